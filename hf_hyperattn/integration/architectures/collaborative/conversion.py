"""Convert a model to collaborative heads of a lower rank: replace query and key projections in place.

All layers are decomposed, and their errors reported, before any projection is replaced. Without
examples the decomposition approximates the weights. With examples it approximates the logits on
them, by the second moments of what the projections read.
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

from ....config import HyperAttnConfig, MechanismConfig
from ....mechanisms.base import Host
from ....mechanisms.collaborative.config import CollaborativeConfig
from ....mechanisms.collaborative.decomposition import decompose
from ....mechanisms.collaborative.layer import check_host, check_rank
from ...attention.call import note_all
from ...attention.hyper import unwrap_hyper
from ...attention.stock import PATCHED
from ...parallel.offloaded import (
    drop_weights,
    in_memory,
    is_offloaded,
    offload_like,
    without_weights,
)
from ...patching.attach import Selected, attach_hypers, mark_initialized, resolve_overrides
from ...patching.conversions import Conversion, keep_parts, register_conversion
from ...patching.patch import (
    check_own_attention,
    rollback_on_error,
    route_families,
    select_hosts,
    take_off,
)
from ...patching.unsupported import check_parts
from .projections import (
    FUSED,
    Projections,
    SharedShape,
    build_shared,
    find_projections,
    is_shared,
)

logger = logging.get_logger(__name__)

#: Second moments of what queries and keys are projected from, [D, D] and [D', D'].
Moments = tuple[Tensor, Tensor]


#: Model types whose queries and keys are the outputs of their projections, only reshaped into
#: heads: no rotation, no norm, no second use. For each of them,
#: `tests/integration/architectures/test_collaborative_families.py` checks this.
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
    """One attention layer that is converted.

    Args:
        host: Its facts.
        module: The module.
        projections: Its own projections.
        shape: Sizes of the shared projections that replace them.
        config: The mechanism's config for this layer.
        result: The `Decomposition`. None until it is solved.
        modules: The new modules, by the names of those they replace. None until it is solved.
    """

    host: Host
    module: Any
    projections: Projections
    shape: SharedShape
    config: CollaborativeConfig
    result: Any = None
    modules: Any = None

    @property
    def parameters(self) -> tuple[int, int]:
        """Parameters of the projections before and after, with mixing and content bias."""
        old, shape = self.projections, self.shape
        tensors = (old.query, old.key, old.query_bias, old.key_bias)
        before = sum(t.numel() for t in tensors if t is not None)
        inputs = old.query.shape[1] + old.key.shape[1]
        content = shape.heads * old.key.shape[1] if shape.content else 0
        # R rows of both projections, R mixing weights per head, and R biases.
        return before, shape.rank * (inputs + shape.heads + shape.bias) + content


def run_conversion(
    model: PreTrainedModel,
    config: MechanismConfig | HyperAttnConfig,
    keep_original: bool,
    examples: Iterable[Mapping] | None = None,
) -> PreTrainedModel:
    """Convert a model and log the report; see `hf_hyperattn.convert`."""

    def log_report(parts: list[SharedHost]) -> None:
        logger.warning(format_report(model, parts, model.dtype))

    share_heads(model, config, keep_original, examples, log_report)
    return model


def share_heads(
    model: PreTrainedModel,
    config: MechanismConfig | HyperAttnConfig,
    keep_original: bool,
    examples: Iterable[Mapping] | None,
    before_it: Callable[[list[SharedHost]], None],
) -> list[SharedHost]:
    """Convert a model in place.

    Args:
        model: An unpatched model.
        config: The mechanism's config, or a config that selects layers and further mechanisms.
        keep_original: Whether to keep the old projections for `unpatch_model`.
        examples: Calls of the model whose logits are approximated, or None.
        before_it: Called with the solved layers before any projection is replaced.

    Returns:
        The converted attention layers.
    """
    # With no other mechanism there is nothing to blend: the old projections are gone.
    if not isinstance(config, HyperAttnConfig):
        config = HyperAttnConfig((config,), mode="replace")
    note_all(model)
    with rollback_on_error(model):
        newly_routed = route_families(model)
        selected, parts = select_parts(model, config)
        moments = None if examples is None else measure_moments(model, parts, examples)
        parts = solve_parts(parts, moments)
        before_it(parts)
        install_parts(model, config, selected, parts, keep_original, newly_routed)
    return parts


def select_parts(
    model: PreTrainedModel, config: HyperAttnConfig
) -> tuple[list[Selected], list[SharedHost]]:
    """Return the attention layers that a config selects, and the converted ones.

    Layers with other mechanisms, or without a rank, are patched and keep their projections.
    """
    selected = select_hosts(model, config)
    check_own_attention(selected)
    check_parts(model, PATCHED, [module.config for module, _ in selected])
    config = resolve_overrides(config, selected, model)
    parts = []
    for module, host in selected:
        mechanism = next(
            m for m in config.mechanisms_at(host.name) if isinstance(m, CollaborativeConfig)
        )
        if mechanism.rank is not None:
            parts.append(check_part(module, host, mechanism, config.heads))
    return selected, parts


def check_part(module: nn.Module, host: Host, config: CollaborativeConfig, heads) -> SharedHost:
    """Return an attention layer that can be converted.

    Args:
        module: The module.
        host: Its facts.
        config: The mechanism's config for this layer.
        heads: The choice of heads, which must be None.

    Raises:
        ValueError: The layer has rotary positions, grouped keys, or projections that are no plain
            linear maps. Its family is not in `SHAREABLE`. Its weights are not in memory. The rank
            is too high.
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
    old = find_projections(module)
    # Grouped keys have fewer rows than queries.
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
    shape = old.plan_shared(config.rank or 0, host.heads)
    # Rows are as wide as before: R shared numbers, then one content bias for each head.
    if shape.content and shape.rank + host.heads > shape.width:
        raise ValueError(
            f"CollaborativeConfig.rank={config.rank} leaves no room for the content bias of {host.name}, and would "
            f"save nothing; allowed: 1 to {shape.width - host.heads}, or {shape.width}, which is exact"
        )
    return SharedHost(
        host=host,
        module=module,
        projections=old,
        shape=shape,
        config=config,
    )


def solve_parts(parts: list[SharedHost], moments: list[Moments] | None = None) -> list[SharedHost]:
    """Decompose every attention layer and build its new modules, with a progress bar.

    Of an offloaded model, the weights of one layer at a time are in memory.

    Args:
        parts: The attention layers.
        moments: Second moments for each of them, or None to approximate the weights.
    """
    solved = []
    with logging.tqdm(total=len(parts), desc="Sharing heads", leave=False) as bar:
        for part, moment in zip(parts, repeat(None) if moments is None else moments):
            bar.set_postfix_str(f"{part.host.name}, rank {part.config.rank}")
            with in_memory(part.projections.children.values()):
                # Read again: the weights of an offloaded module are other tensors now.
                old: Any = find_projections(part.module)
                query, key = (split_heads(w, part.host.heads) for w in (old.query, old.key))
                result: Any = decompose(
                    query, key, part.shape.rank, part.config.steps, part.config.seed, moment
                )
                modules = build_filled(part, old, result)
            for name, child in old.children.items():
                offload_like(modules[name], child, f"{part.host.name}.{name}")
            # The modules have these factors now. Float64 copies of all layers would fill memory.
            result = replace(result, query=None, key=None)
            solved.append(replace(part, result=result, modules=modules))
            bar.update(1)
    return solved


class InputMoment:
    """A forward pre-hook that sums second moments over the inputs of one projection.

    Args:
        centred: Whether to subtract the mean of each sequence. Used for keys: softmax does not see
            what all keys of a row share.

    Attributes:
        mask: Tokens of the current call that count, [B, N]. None if all do.
    """

    def __init__(self, centred: bool):
        self.centred = centred
        self.total = torch.zeros((), dtype=torch.float64)
        self.tokens = 0.0
        self.mask: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple) -> None:
        """Add the input of a call, [..., N, D]."""
        x = args[0].detach().double()
        x = x.flatten(0, -3) if x.dim() > 3 else x
        mask, shape = self.mask, x.shape[:-1]
        # In an encoder-decoder model the mask belongs to the other sequence for some projections.
        if mask is None or mask.shape != shape:
            mask = x.new_ones(shape)
        keep = mask.to(x)[..., None]
        if self.centred:
            x = x - (x * keep).sum(-2, keepdim=True) / keep.sum(-2, keepdim=True).clamp_min(1)
        rows = (x * keep).flatten(0, -2)
        # `to`: with a device map the projections run on several devices.
        self.total = self.total.to(x) + rows.mT @ rows
        self.tokens += float(keep.sum())

    @property
    def moment(self) -> Tensor:
        """The mean over tokens, [D, D], float64, on the CPU."""
        return (self.total / self.tokens).cpu()


@torch.no_grad()
def measure_moments(
    model: PreTrainedModel, parts: list[SharedHost], examples: Iterable[Mapping]
) -> list[Moments]:
    """Run the model on examples and return what the projections of each layer read.

    Args:
        model: The model.
        parts: The attention layers.
        examples: Calls of the model, each as its keywords.

    Returns:
        Second moments of the inputs of queries and of keys, for each layer.

    Raises:
        ValueError: No example reaches a layer.
    """
    pairs = [(InputMoment(centred=False), InputMoment(centred=True)) for _ in parts]
    with ExitStack() as stack:
        for part, pair in zip(parts, pairs, strict=True):
            children = list(part.projections.children.values())
            # A fused projection reads one input for queries and keys.
            children = children if len(children) > 1 else children * 2
            for module, moment in zip(children, pair, strict=True):
                stack.callback(module.register_forward_pre_hook(moment).remove)
        # Without dropout, and back to the mode from before.
        stack.callback(model.train, model.training)
        model.eval()
        for call in examples:
            inputs = {
                name: value.to(model.device) if isinstance(value, Tensor) else value
                for name, value in call.items()
            }
            # A mask of another shape does not say which tokens are padded.
            mask = inputs.get("attention_mask")
            is_padding = isinstance(mask, Tensor) and mask.dim() == 2
            for moment in (moment for pair in pairs for moment in pair):
                moment.mask = mask if is_padding else None
            model(**inputs)
    for part, pair in zip(parts, pairs, strict=True):
        if not all(moment.tokens for moment in pair):
            raise ValueError(
                f"no example reaches {part.host.name}; allowed: calls that run every converted host"
            )
    return [(query.moment, key.moment) for query, key in pairs]


def split_heads(weight: Tensor, heads: int) -> Tensor:
    """Return a weight [H·d, D] as [H, d, D], float64, on the CPU."""
    return weight.detach().cpu().double().unflatten(0, (heads, -1))


def format_report(model: PreTrainedModel, parts: list[SharedHost], dtype: torch.dtype) -> str:
    """Return a report of the coming conversion, one line for each attention layer.

    Args:
        model: The model, not converted yet.
        parts: The solved attention layers.
        dtype: The dtype for the size of the model in MB.
    """
    lines = [
        f"{type(model).__name__}: projections of queries and keys to be shared (arXiv 2006.16362)"
    ]
    names = max((len(p.host.name) for p in parts), default=0)
    for part in parts:
        before, after = part.parameters
        result = part.result
        logits = ""
        if result.logit_error is not None:
            logits = f", of logits on the examples {result.logit_error:.4f}"
        lines.append(
            f"  {part.host.name:{names}}  rank {part.shape.rank} of {part.shape.width}  "
            f"error of weights {result.error:.4f}{logits}  parameters {before:,} -> {after:,}"
        )
    total = sum(p.numel() for p in model.parameters())
    left = total - sum(before - after for before, after in (p.parameters for p in parts))
    megabytes = dtype.itemsize / 1e6
    lines.append(
        f"  model: {total:,} -> {left:,} parameters, "
        f"{total * megabytes:.1f} -> {left * megabytes:.1f} MB"
    )
    return "\n".join(lines)


def install_parts(
    model: PreTrainedModel,
    config: HyperAttnConfig,
    selected: list[Selected],
    parts: list[SharedHost],
    keep_original: bool,
    newly_routed: bool,
) -> None:
    """Attach a `hyper` to every selected layer, and replace projections.

    Args:
        model: The model.
        config: The patch, as given.
        selected: All selected attention layers.
        parts: The layers that are converted, solved.
        keep_original: Whether to keep the old projections for `unpatch_model`.
        newly_routed: Whether the family was routed for this conversion.
    """
    attach_hypers(model, resolve_overrides(config, selected, model), selected, newly_routed)
    for part in parts:
        hyper: Any = unwrap_hyper(part.module.hyper)
        with torch.no_grad():
            hyper.collaborative.mixing.copy_(part.result.mixing)
        for name, module in part.modules.items():
            mark_initialized(module)
            setattr(part.module, name, module)
            if not keep_original:
                drop_weights(part.projections.children[name], f"{part.host.name}.{name}")
    if keep_original:
        keep_parts(model, bring_back_original, {p.host.name: p.projections.children for p in parts})


def build_filled(part: SharedHost, old: Any, result: Any) -> dict[str, nn.Module]:
    """Return the new modules of an attention layer, filled from a decomposition.

    Args:
        part: The attention layer.
        old: Its projections, with their weights in memory.
        result: The `Decomposition`.
    """
    heads = part.host.heads
    modules = build_shared(old, part.shape)
    fused: Any = modules.get(FUSED)
    shared: Any = modules.values() if fused is None else (fused.query, fused.key)
    query, key = shared
    with torch.no_grad():
        query.shared.weight.copy_(result.query)
        key.shared.weight.copy_(result.key)
        # The bias of keys is dropped: it adds the same number to all logits of a query.
        if part.shape.bias:
            query.shared.bias.copy_(old.query_bias)
        if part.shape.content:
            # c_h = W_K^h^T b^h, [H, D]: what a key adds to a head's logits because queries have a
            # bias (arXiv 2006.16362).
            bias = old.query_bias.detach().cpu().double().unflatten(0, (heads, 1, -1))
            key.content.weight.copy_((bias @ split_heads(old.key, heads))[:, 0])
    for module in modules.values():
        module.requires_grad_(old.query.requires_grad)
    return modules


def bring_back_original(
    model: PreTrainedModel, kept: dict[str, dict[str, nn.Module]]
) -> PreTrainedModel:
    """Return the model with its old projections, in its current device and dtype.

    Args:
        model: The converted model.
        kept: For the name of each converted attention layer, its old modules by name.
    """
    modules = dict(model.named_modules())
    for name, children in kept.items():
        host = modules[name]
        for child, module in children.items():
            # The model may have moved since the conversion, without the kept modules.
            like = next(host.get_submodule(child).parameters())
            if not is_offloaded(module):
                module.to(like.device, like.dtype)
            setattr(host, child, module.train(host.training))
    take_off(model)
    return model


def requests_conversion(config: MechanismConfig) -> bool:
    """Return whether a config asks for a conversion: without a rank it is a patch."""
    return isinstance(config, CollaborativeConfig) and config.rank is not None


register_conversion(
    CollaborativeConfig.mechanism,
    Conversion(
        run=run_conversion,
        requested=requests_conversion,
        done=is_shared,
        in_place=True,
        composes=True,
        learns=True,
    ),
)
