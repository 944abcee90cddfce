"""Compressed collaborative heads: the projections of queries and keys replaced by shared ones, in place.

All layers are decomposed, and their errors reported, before anything is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...config import HyperAttnConfig, MechanismConfig, mechanisms_of
from ...mechanisms.base import Host
from ...mechanisms.collaborative.config import CollaborativeConfig
from ...mechanisms.collaborative.decomposition import Decomposition, decompose
from ...mechanisms.collaborative.layer import check_host, check_rank
from ..attach import Selected, attach, resolve_overrides
from ..checkpoint_config import inner
from ..conversions import Conversion, keep, register_conversion
from ..families import note_all
from ..patching import check_own_attention, rollback_on_error, route, select_hosts, take_off
from ..stock import PATCHED
from ..unsupported import check_parts
from .families import check_family
from .moments import Moments, moments_of
from .projections import Found, Shape, projections, shared_modules, shared_pair
from .rebuilding import is_shared

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """One host, its projections, and the shared ones that were found for them."""

    host: Host
    module: nn.Module
    found: Found
    shape: Shape
    config: CollaborativeConfig
    result: Decomposition | None = None

    @property
    def parameters(self) -> tuple[int, int]:
        """Parameters of the two projections before and after, mixing and content bias included."""
        found, shape = self.found, self.shape
        biases = (b for b in (found.query_bias, found.key_bias) if b is not None)
        before = found.query.numel() + found.key.numel() + sum(b.numel() for b in biases)
        inputs = found.query.shape[1] + found.key.shape[1]
        content = shape.heads * found.key.shape[1] if shape.content else 0
        return before, shape.rank * (inputs + shape.heads + shape.bias) + content


def share(
    model: PreTrainedModel,
    config: MechanismConfig | HyperAttnConfig,
    keep_original: bool,
    examples: Iterable[Mapping] | None = None,
) -> PreTrainedModel:
    """Run the conversion, see `hf_hyperattn.convert`."""
    config = as_whole(config)
    note_all(model)
    with rollback_on_error(model):
        newly_routed = route(model)
        chosen, parts = plan(model, config)
        parts = solve(parts, None if examples is None else moments_of(model, parts, examples))
        logger.warning(report(model, parts))
        install(model, config, chosen, parts, keep_original, newly_routed)
    return model


def as_whole(config: MechanismConfig | HyperAttnConfig) -> HyperAttnConfig:
    """The config as one of a whole model; without others beside it there is nothing to blend."""
    if isinstance(config, HyperAttnConfig):
        return config
    return HyperAttnConfig((config,), mode="replace")


def plan(model: PreTrainedModel, config: HyperAttnConfig) -> tuple[list[Selected], list[Part]]:
    """The hosts that the config means, and those of them whose projections are to be shared, all checked."""
    chosen = select_hosts(model, config)
    check_own_attention(chosen)
    check_parts(model, PATCHED, [module.config for module, _ in chosen])
    config = resolve_overrides(config, chosen, model)
    parts = []
    for module, host in chosen:
        own = mechanisms_of(config.mechanisms, (config.overrides or {}).get(host.name, ()))
        mechanism = next(m for m in own if m.mechanism == CollaborativeConfig.mechanism)
        if mechanism.rank is not None:
            parts.append(check_part(module, host, mechanism, config.heads))
    return chosen, parts


def check_part(module: nn.Module, host: Host, config: CollaborativeConfig, heads) -> Part:
    """A host that is to be converted.

    Raises:
        ValueError: rotary positions, a family whose projections have other uses, projections that are no plain linear
            maps, grouped keys, weights that are not in memory, or a rank that is not allowed.
    """
    check_host(host)
    check_family(host)
    if heads is not None:
        raise ValueError(f"heads={heads} cannot be chosen where all heads share; allowed: heads=None")
    found = projections(module)
    if found is None or found.query.shape[0] != found.key.shape[0]:
        raise ValueError(
            f"collaborative finds no plain projections of queries and keys of one width in {host.name} "
            f"({type(module).__name__}); allowed: linear maps, neither quantised nor with adapters (merge these first)"
        )
    if found.query.is_meta:
        raise ValueError(f"the weights of {host.name} are offloaded; allowed: a model that is in memory")
    check_rank(config.rank, host)
    shape = Shape.of(found, config.rank, host.heads)
    if shape.content and config.rank + host.heads > shape.width:
        raise ValueError(
            f"CollaborativeConfig.rank={config.rank} leaves no room for the content bias of {host.name}, and would "
            f"save nothing; allowed: 1 to {shape.width - host.heads}, or {shape.width}, which is exact"
        )
    return Part(host, module, found, shape, config)


def solve(parts: list[Part], moments: list[Moments] | None = None) -> list[Part]:
    """Every part with its decomposition, under a progress bar."""
    solved = []
    with logging.tqdm(total=sum(p.config.steps for p in parts), desc="Sharing heads", leave=False) as bar:
        for number, part in enumerate(parts):
            bar.set_postfix_str(f"{part.host.name}, rank {part.config.rank}")
            left = Countdown(part.config.steps, bar.update)
            result = decompose(
                *(by_head(weight, part.host.heads) for weight in (part.found.query, part.found.key)),
                part.config.rank,
                part.config.steps,
                part.config.seed,
                None if moments is None else moments[number],
                left.step,
            )
            left.skip()
            solved.append(replace(part, result=result))
    return solved


def sizes(model: PreTrainedModel, parts: list[Part]) -> tuple[int, int]:
    """Parameters of the model before and after."""
    total = sum(p.numel() for p in model.parameters())
    return total, total - sum(before - after for before, after in (p.parameters for p in parts))


class Countdown:
    """Steps of one layer on the bar; those that were not needed are skipped."""

    def __init__(self, steps: int, update: Callable[[int], None]):
        self.steps, self.update = steps, update

    def step(self) -> None:
        self.steps -= 1
        self.update(1)

    def skip(self) -> None:
        self.update(self.steps)


def by_head(weight: Tensor, heads: int) -> Tensor:
    """[H·d, D] to [H, d, D], float64, on the CPU."""
    return weight.detach().cpu().double().unflatten(0, (heads, -1))


def report(model: PreTrainedModel, parts: list[Part]) -> str:
    """What is about to be replaced, a line a layer: rank, relative error, parameters."""
    lines = [f"{type(model).__name__}: projections of queries and keys to be shared (arXiv 2006.16362)"]
    names = max((len(p.host.name) for p in parts), default=0)
    for part in parts:
        before, after = part.parameters
        lines.append(
            f"  {part.host.name:{names}}  rank {part.shape.rank} of {part.shape.width}  "
            f"{errors(part.result)}  parameters {before:,} -> {after:,}"
        )
    (total, left), size = sizes(model, parts), model.dtype.itemsize / 1e6
    lines.append(f"  model: {total:,} -> {left:,} parameters, {total * size:.1f} -> {left * size:.1f} MB")
    return "\n".join(lines)


def errors(result: Decomposition) -> str:
    """Relative errors in words."""
    logits = "" if result.logit_error is None else f", of logits on the examples {result.logit_error:.4f}"
    return f"error of weights {result.error:.4f}{logits}"


def install(
    model: PreTrainedModel,
    config: HyperAttnConfig,
    chosen: list[Selected],
    parts: list[Part],
    keep_original: bool,
    newly_routed: bool,
) -> None:
    """Put the shared projections in place, and with them a `hyper`."""
    built = [filled(part) for part in parts]
    attach(model, resolve_overrides(config, chosen, model), chosen, newly_routed)
    for part, modules in zip(parts, built, strict=True):
        with torch.no_grad():
            inner(part.module.hyper).collaborative.mixing.copy_(part.result.mixing)
        for name, module in modules.items():
            setattr(part.module, name, module)
    if keep_original:
        keep(model, bring_back_original, {p.host.name: p.found.children for p in parts})


def filled(part: Part) -> dict[str, nn.Module]:
    """The new modules of a host with their weights."""
    found, result = part.found, part.result
    modules = shared_modules(found, part.shape)
    query, key = shared_pair(modules)
    with torch.no_grad():
        query.shared.weight.copy_(result.query)
        key.shared.weight.copy_(result.key)
        if part.shape.bias:
            query.shared.bias.copy_(found.query_bias)
        if part.shape.content:
            key.content.weight.copy_(content_bias(found, part.host.heads))
    for module in modules.values():
        module.requires_grad_(found.query.requires_grad)
    return modules


def content_bias(found: Found, heads: int) -> Tensor:
    """c_h = W_K^h^T b^h, [H, D]: what a key adds to a head's logits because queries have a bias."""
    bias = found.query_bias.detach().cpu().double().unflatten(0, (heads, -1))
    return (bias[:, None] @ by_head(found.key, heads))[:, 0]


def bring_back_original(model: PreTrainedModel, kept: dict[str, dict[str, nn.Module]]) -> PreTrainedModel:
    """The model with the projections that it had, where it is now."""
    modules = dict(model.named_modules())
    for name, children in kept.items():
        host = modules[name]
        for child, module in children.items():
            like = next(host._modules[child].parameters())
            setattr(host, child, module.to(like.device, like.dtype).train(host.training))
    take_off(model)
    return model


register_conversion(
    CollaborativeConfig.mechanism,
    Conversion(
        share,
        requested=lambda config: config.rank is not None,
        done=is_shared,
        in_place=True,
        composes=True,
        learns=True,
    ),
)
