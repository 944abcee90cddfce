"""Compressed collaborative heads: the projections of queries and keys replaced by shared ones, in place.

All layers are decomposed, and their errors reported, before anything is replaced. Where examples are given, logits on
them are kept, by second moments of what projections read there. For keys those of differences from a sequence's mean:
what all keys of a row share, softmax does not see. Padded tokens do not count where the call says which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...config import HyperAttnConfig, MechanismConfig
from ...mechanisms.base import Host
from ...mechanisms.collaborative.config import CollaborativeConfig
from ...mechanisms.collaborative.decomposition import decompose
from ...mechanisms.collaborative.layer import check_host, check_rank
from ..attach import Selected, attach_hypers, mark_initialized, resolve_overrides
from ..call import note_all
from ..checkpoint_config import inner
from ..conversions import Conversion, keep_parts, register_conversion
from ..offloaded import drop_weights, in_memory, is_offloaded, offload_like, without_weights
from ..patching import check_own_attention, rollback_on_error, route, select_hosts, take_off
from ..stock import PATCHED
from ..unsupported import check_parts
from .projections import FUSED, Projections, SharedShape, is_shared, projections, shared_modules

logger = logging.get_logger(__name__)

Moments = tuple[Tensor, Tensor]


#: Model types whose hosts' queries and keys are the outputs of their projections, reshaped into heads and nothing else:
#: no rotation, no norm, no second use. `tests/integration/test_collaborative_families.py` holds each of them to that.
SHAREABLE = frozenset(
    """
    albert bart beit bert bert-generation biogpt blenderbot blenderbot-small blip_text_model camembert
    clip_text_model clip_vision_model data2vec-text decision_transformer deit dinov2 distilbert dpr electra
    ernie gpt2 gpt_neo hubert ijepa layoutlm m2m_100 marian mbart megatron-bert mpnet mt5 openai-gpt opt
    pegasus plbart rembert roberta roberta-prelayernorm siglip_text_model siglip_vision_model speech_to_text
    splinter switch_transformers t5 umt5 videomae vit vit_mae vit_msn vivit wav2vec2 whisper xglm xlm-roberta
    xlm-roberta-xl
    """.split()
)


@dataclass(frozen=True)
class SharedHost:
    """One host, its projections, and the shared ones that take their place."""

    host: Host
    module: Any
    projections: Projections
    shape: SharedShape
    config: CollaborativeConfig
    result: Any = None  # a `Decomposition`, once it is solved
    modules: Any = None  # what takes the projections' place, by name, once it is solved

    @property
    def parameters(self) -> tuple[int, int]:
        """Parameters of the two projections before and after, mixing and content bias included."""
        old, shape = self.projections, self.shape
        tensors = (old.query, old.key, old.query_bias, old.key_bias)
        before = sum(t.numel() for t in tensors if t is not None)
        inputs = old.query.shape[1] + old.key.shape[1]
        content = shape.heads * old.key.shape[1] if shape.content else 0
        return before, shape.rank * (inputs + shape.heads + shape.bias) + content


def share(
    model: PreTrainedModel,
    config: MechanismConfig | HyperAttnConfig,
    keep_original: bool,
    examples: Iterable[Mapping] | None = None,
) -> PreTrainedModel:
    """Run the conversion, see `hf_hyperattn.convert`."""
    share_heads(
        model,
        config,
        keep_original,
        examples,
        lambda parts: logger.warning(report(model, parts, model.dtype)),
    )
    return model


def share_heads(
    model: PreTrainedModel,
    config: MechanismConfig | HyperAttnConfig,
    keep_original: bool,
    examples: Iterable[Mapping] | None,
    before_it: Callable[[list[SharedHost]], None],
) -> list[SharedHost]:
    """Convert a model, and return what was replaced; `before_it` is called with that before anything is."""
    if not isinstance(
        config, HyperAttnConfig
    ):  # without others beside it there is nothing to blend
        config = HyperAttnConfig((config,), mode="replace")
    note_all(model)
    with rollback_on_error(model):
        newly_routed = route(model)
        chosen, parts = plan(model, config)
        parts = solve(parts, None if examples is None else moments_of(model, parts, examples))
        before_it(parts)
        install(model, config, chosen, parts, keep_original, newly_routed)
    return parts


def plan(
    model: PreTrainedModel, config: HyperAttnConfig
) -> tuple[list[Selected], list[SharedHost]]:
    """The hosts that the config means, and those of them whose projections are to be shared, all checked."""
    chosen = select_hosts(model, config)
    check_own_attention(chosen)
    check_parts(model, PATCHED, [module.config for module, _ in chosen])
    config = resolve_overrides(config, chosen, model)
    parts = []
    for module, host in chosen:
        mechanism = next(
            m for m in config.mechanisms_at(host.name) if isinstance(m, CollaborativeConfig)
        )
        if mechanism.rank is not None:
            parts.append(check_part(module, host, mechanism, config.heads))
    return chosen, parts


def check_part(module: nn.Module, host: Host, config: CollaborativeConfig, heads) -> SharedHost:
    """A host that is to be converted.

    Raises:
        ValueError: rotary positions, a family whose projections have other uses, projections that are no plain linear
            maps, grouped keys, weights that are not in memory, or a rank that is not allowed.
    """
    check_host(host)
    model_type = getattr(host.config, "model_type", "")
    if model_type not in SHAREABLE:
        raise ValueError(
            f"collaborative cannot replace the projections of {host.name}: model type {model_type!r} is not known to "
            f"use them as they are; allowed: {', '.join(sorted(SHAREABLE))}, or patch_model with "
            "CollaborativeConfig(), which replaces nothing"
        )
    if heads is not None:
        raise ValueError(
            f"heads={heads} cannot be chosen where all heads share; allowed: heads=None"
        )
    old = projections(module)
    if old is None or old.query.shape[0] != old.key.shape[0]:
        raise ValueError(
            f"collaborative finds no plain projections of queries and keys of one width in {host.name} "
            f"({type(module).__name__}); allowed: linear maps, neither quantised nor with adapters (merge these first)"
        )
    if without_weights(old.children.values()):
        raise ValueError(
            f"{host.name} is on the meta device, without weights; allowed: a model in memory, or offloaded"
        )
    check_rank(config.rank, host)
    shape = old.shared(config.rank or 0, host.heads)
    if shape.content and shape.rank + host.heads > shape.width:
        raise ValueError(
            f"CollaborativeConfig.rank={config.rank} leaves no room for the content bias of {host.name}, and would "
            f"save nothing; allowed: 1 to {shape.width - host.heads}, or {shape.width}, which is exact"
        )
    return SharedHost(host, module, old, shape, config)


def solve(parts: list[SharedHost], moments: list[Moments] | None = None) -> list[SharedHost]:
    """Every part with its decomposition and its new modules, under a progress bar; one layer's weights at a time where
    they are offloaded.
    """
    solved = []
    with logging.tqdm(total=len(parts), desc="Sharing heads", leave=False) as bar:
        for part, moment in zip(parts, repeat(None) if moments is None else moments):
            bar.set_postfix_str(f"{part.host.name}, rank {part.config.rank}")
            with in_memory(part.projections.children.values()):
                old: Any = projections(part.module)
                query, key = (by_head(w, part.host.heads) for w in (old.query, old.key))
                result: Any = decompose(
                    query, key, part.shape.rank, part.config.steps, part.config.seed, moment
                )
                modules = filled(part, old, result)
            for name, child in old.children.items():
                offload_like(modules[name], child, f"{part.host.name}.{name}")
            result = replace(result, query=None, key=None)  # they are in the modules
            solved.append(replace(part, result=result, modules=modules))
            bar.update(1)
    return solved


class InputMoment:
    """A forward pre-hook that sums over the inputs of one projection.

    Args:
        centred: whether differences from each sequence's mean are what counts.
    """

    def __init__(self, centred: bool):
        self.centred, self.total, self.tokens = centred, torch.zeros((), dtype=torch.float64), 0.0
        self.mask: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple) -> None:
        x = args[0].detach().double()
        x = x.flatten(0, -3) if x.dim() > 3 else x
        mask, shape = self.mask, x.shape[:-1]
        keep = (x.new_ones(shape) if mask is None or mask.shape != shape else mask.to(x))[..., None]
        if self.centred:
            x = x - (x * keep).sum(-2, keepdim=True) / keep.sum(-2, keepdim=True).clamp_min(1)
        rows = (x * keep).flatten(0, -2)
        self.total, self.tokens = self.total.to(x) + rows.mT @ rows, self.tokens + float(keep.sum())

    @property
    def moment(self) -> Tensor:
        """[D, D], float64, on the CPU."""
        return (self.total / self.tokens).cpu()


@torch.no_grad()
def moments_of(model: PreTrainedModel, parts: list, examples: Iterable[Mapping]) -> list[Moments]:
    """For each part the moments of what its queries and its keys are made from.

    Raises:
        ValueError: a host that no example reaches.
    """
    pairs = [(InputMoment(centred=False), InputMoment(centred=True)) for _ in parts]
    with ExitStack() as stack:
        for part, pair in zip(parts, pairs, strict=True):
            children = list(part.projections.children.values())
            for module, moment in zip(
                children if len(children) > 1 else children * 2, pair, strict=True
            ):
                stack.callback(module.register_forward_pre_hook(moment).remove)
        stack.callback(model.train, model.training)
        model.eval()
        for call in examples:
            inputs = {
                n: v.to(model.device) if isinstance(v, Tensor) else v for n, v in call.items()
            }
            mask = inputs.get("attention_mask")
            for moment in (m for pair in pairs for m in pair):
                moment.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
            model(**inputs)
    for part, pair in zip(parts, pairs, strict=True):
        if not all(moment.tokens for moment in pair):
            raise ValueError(
                f"no example reaches {part.host.name}; allowed: calls that run every converted host"
            )
    return [(query.moment, key.moment) for query, key in pairs]


def by_head(weight: Tensor, heads: int) -> Tensor:
    """[H·d, D] to [H, d, D], float64, on the CPU."""
    return weight.detach().cpu().double().unflatten(0, (heads, -1))


def report(model: PreTrainedModel, parts: list[SharedHost], dtype: torch.dtype) -> str:
    """What is about to be replaced, a line a layer: rank, relative errors, parameters; and the model's size in a dtype,
    before and after.
    """
    lines = [
        f"{type(model).__name__}: projections of queries and keys to be shared (arXiv 2006.16362)"
    ]
    names = max((len(p.host.name) for p in parts), default=0)
    for part in parts:
        (before, after), result = part.parameters, part.result
        logits = (
            ""
            if result.logit_error is None
            else f", of logits on the examples {result.logit_error:.4f}"
        )
        lines.append(
            f"  {part.host.name:{names}}  rank {part.shape.rank} of {part.shape.width}  "
            f"error of weights {result.error:.4f}{logits}  parameters {before:,} -> {after:,}"
        )
    total, size = sum(p.numel() for p in model.parameters()), dtype.itemsize / 1e6
    left = total - sum(before - after for before, after in (p.parameters for p in parts))
    lines.append(
        f"  model: {total:,} -> {left:,} parameters, {total * size:.1f} -> {left * size:.1f} MB"
    )
    return "\n".join(lines)


def install(
    model: PreTrainedModel,
    config: HyperAttnConfig,
    chosen: list[Selected],
    parts: list[SharedHost],
    keep_original: bool,
    newly_routed: bool,
) -> None:
    """Put the shared projections in place, and with them a `hyper`."""
    attach_hypers(model, resolve_overrides(config, chosen, model), chosen, newly_routed)
    for part in parts:
        hyper: Any = inner(part.module.hyper)
        with torch.no_grad():
            hyper.collaborative.mixing.copy_(part.result.mixing)
        for name, module in part.modules.items():
            mark_initialized(module)
            setattr(part.module, name, module)
            if not keep_original:
                drop_weights(part.projections.children[name], f"{part.host.name}.{name}")
    if keep_original:
        keep_parts(model, bring_back_original, {p.host.name: p.projections.children for p in parts})


def filled(part: SharedHost, old: Any, result: Any) -> dict[str, nn.Module]:
    """The new modules of a host with the weights of a decomposition."""
    heads = part.host.heads
    modules = shared_modules(old, part.shape)
    fused: Any = modules.get(FUSED)
    shared: Any = modules.values() if fused is None else (fused.query, fused.key)
    query, key = shared
    with torch.no_grad():
        query.shared.weight.copy_(result.query)
        key.shared.weight.copy_(result.key)
        if part.shape.bias:
            query.shared.bias.copy_(old.query_bias)
        if part.shape.content:
            # c_h = W_K^h^T b^h, [H, D]: what a key adds to a head's logits because queries have a bias
            bias = old.query_bias.detach().cpu().double().unflatten(0, (heads, 1, -1))
            key.content.weight.copy_((bias @ by_head(old.key, heads))[:, 0])
    for module in modules.values():
        module.requires_grad_(old.query.requires_grad)
    return modules


def bring_back_original(
    model: PreTrainedModel, kept: dict[str, dict[str, nn.Module]]
) -> PreTrainedModel:
    """The model with the projections that it had, where it is now."""
    modules = dict(model.named_modules())
    for name, children in kept.items():
        host = modules[name]
        for child, module in children.items():
            like = next(host.get_submodule(child).parameters())
            if not is_offloaded(module):
                module.to(like.device, like.dtype)
            setattr(host, child, module.train(host.training))
    take_off(model)
    return model


register_conversion(
    CollaborativeConfig.mechanism,
    Conversion(
        share,
        requested=lambda config: (
            isinstance(config, CollaborativeConfig) and config.rank is not None
        ),
        done=is_shared,
        in_place=True,
        composes=True,
        learns=True,
    ),
)
