"""Patch a pretrained model in place, and give it back as it was."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

import model_patches

from ..config import HyperAttnConfig, MechanismConfig
from ..mechanisms.base import Host
from ..registry import get_mechanism
from .hosts import find_hosts, host_facts, layer_indices
from .hyper import Hyper
from .refusal import has_attention, refusal
from .selection import LayerChoice, select
from .stock import PATCHED, STOCK, stock_name


def patch_model(
    model: nn.Module,
    *mechanisms: MechanismConfig | HyperAttnConfig,
    layers: LayerChoice = None,
    heads=None,
    mode: str = "blend",
    include_cross_attention: bool = False,
) -> nn.Module:
    """Give a pretrained model hierarchy-aware attention, in place.

    Every chosen attention host gets one child, `hyper`, which owns all added parameters. With mode="blend" the
    patched model computes what it did before, until it is trained.

    Args:
        model: any Transformers model whose attention is served: bare, with a head, composite, wrapped by PEFT,
            compiled, offloaded or quantised.
        mechanisms: mechanism configs such as `ConeConfig()`, at most one per stage; or one `HyperAttnConfig`.
        layers: None for all, a list or range of layer numbers, "last-third", "first-half", "last-4", "every-2nd", or
            a function of a `Host`. Numbers count within each stack (encoder, decoder, ...) of the model.
        heads: indices of the query heads to change, None for all.
        mode: "blend" (identity at first) or "replace" (the published operator).
        include_cross_attention: patch cross-attention too.

    Returns:
        The model.

    Raises:
        ValueError: nothing to patch, patched already, two mechanisms of one stage, an unknown layer or head, or a
            family out of reach. The model is left as it was.
    """
    config = gather(mechanisms, layers, heads, mode, include_cross_attention)
    base = base_model(model)
    if getattr(base.config, "hyperattn", None) is not None or any(patched_hosts(base)):
        raise ValueError(f"{type(base).__name__} is patched already; call unpatch_model(model) first")
    newly_routed = route(base)
    try:
        chosen = choose_hosts(base, config)
        attach(base, config, chosen, newly_routed)
    except BaseException:
        if newly_routed:
            model_patches.unserve(base)
        raise
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Give back the original model: same classes, state-dict keys and values, implementation; no hook is left.

    Raises:
        ValueError: the model is not patched.
    """
    base = base_model(model)
    hosts = list(patched_hosts(base))
    if not hosts:
        raise ValueError(f"{type(base).__name__} is not patched; nothing to undo")
    newly_routed = any(_inner(host.hyper).newly_routed for _, host in hosts)
    for _, host in hosts:
        del host.hyper
    for config in {id(c): c for c in (base.config, *(host.config for _, host in hosts))}.values():
        forget(config)
    if newly_routed:
        model_patches.unserve(base)
    return model


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside PEFT's, the compiler's or a data-parallel wrapper.

    Raises:
        ValueError: there is none.
    """
    seen = model
    while not isinstance(seen, PreTrainedModel):
        inner = getattr(seen, "_orig_mod", None) or getattr(seen, "module", None)
        if inner is None and hasattr(seen, "get_base_model"):
            inner = seen.get_base_model()
        if inner is None:
            raise ValueError(
                f"{type(model).__name__} is no Transformers model; allowed: a PreTrainedModel, also inside a "
                "PEFT, compiled or data-parallel wrapper"
            )
        seen = inner
    return seen


def gather(mechanisms, layers, heads, mode: str, include_cross_attention: bool) -> HyperAttnConfig:
    """One `HyperAttnConfig` out of the arguments of `patch_model`."""
    if len(mechanisms) == 1 and isinstance(mechanisms[0], HyperAttnConfig):
        if layers is not None or heads is not None or mode != "blend" or include_cross_attention:
            raise ValueError(
                "patch_model got a HyperAttnConfig and further arguments; allowed: one or the other, set "
                "layers, heads, mode and include_cross_attention in the config"
            )
        config = mechanisms[0]
    else:
        config = HyperAttnConfig(mechanisms, layers, heads, mode, include_cross_attention)
    if not config.mechanisms:
        raise ValueError("patch_model got no mechanism; allowed: at least one, such as ConeConfig()")
    return config


def route(base: PreTrainedModel) -> bool:
    """Make served families call the attention interface; whether that was needed now."""
    before = next(model_patches.hosts(base), None) is not None
    return model_patches.serve(base) and not before


def choose_hosts(base: PreTrainedModel, config: HyperAttnConfig) -> list[tuple[nn.Module, Host]]:
    """The hosts that the config means, each with its facts."""
    modules = list(find_hosts(base))
    if not modules:
        if has_attention(base):
            raise refusal(base.config.model_type, PATCHED)
        raise ValueError(f"model type {base.config.model_type!r} has no attention; nothing to patch")
    stacks = layer_indices([name for name, _ in modules])
    facts = [(s, host_facts(name, m, i)) for (name, m), (s, i) in zip(modules, stacks, strict=True)]
    if config.hosts is not None:
        chosen = match_names([name for name, _ in modules], config.hosts, base)
    else:
        chosen = [
            pick and (config.include_cross_attention or not host.is_cross)
            for pick, (_, host) in zip(select(facts, config.layers), facts, strict=True)
        ]
    found = [(m, host) for (_, m), (_, host), pick in zip(modules, facts, chosen, strict=True) if pick]
    if not found:
        raise ValueError(
            f"layers={config.layers!r} chooses no attention module of {type(base).__name__}; it has: "
            f"{', '.join(sorted({s for s, _ in stacks}))}"
        )
    check_combination(config, found)
    return found


def match_names(names: list[str], wanted: tuple[str, ...], base: PreTrainedModel) -> list[bool]:
    """Which names a saved list of hosts means; a bare model and one with a head differ by a prefix."""
    prefix = base.base_model_prefix + "."
    forms = (
        {n: n for n in names},
        {prefix + n: n for n in names},
        {n.removeprefix(prefix): n for n in names if n.startswith(prefix)},
    )
    for known in forms:
        if all(w in known for w in wanted):
            meant = {known[w] for w in wanted}
            return [n in meant for n in names]
    missing = next(w for w in wanted if w not in forms[0])
    raise ValueError(
        f"hyperattn config names the host {missing[:80]!r}, which {type(base).__name__} does not have; "
        f"allowed: {', '.join(names[:3])}, ..."
    )


def check_combination(config: HyperAttnConfig, found: list[tuple[nn.Module, Host]]) -> None:
    """Refuse heads that a host lacks, and mechanisms that cross-attention has no meaning for."""
    for _, host in found:
        if config.heads is not None and max(config.heads) >= host.heads:
            raise ValueError(
                f"heads={list(config.heads)} names head {max(config.heads)}, {host.name} has {host.heads}; "
                f"allowed: 0 to {host.heads - 1}"
            )
        for mechanism in config.mechanisms:
            if host.is_cross and not get_mechanism(mechanism.mechanism).cross_attention:
                raise ValueError(
                    f"{mechanism.mechanism} has no meaning for cross-attention ({host.name}); allowed: "
                    "include_cross_attention=False"
                )


def attach(base: PreTrainedModel, config: HyperAttnConfig, chosen: list, newly_routed: bool = False) -> None:
    """Build every `hyper`, then put them all in place and write the configs: nothing can fail half-way."""
    built = [
        Hyper(config, host).to(*placement(base, module)).train(module.training) for module, host in chosen
    ]
    for hyper, (module, _) in zip(built, chosen, strict=True):
        hyper.newly_routed = newly_routed
        module.hyper = hyper
        remember(module.config)
    base.config.hyperattn = replace(config, hosts=tuple(host.name for _, host in chosen)).to_dict()


def placement(base: PreTrainedModel, module: nn.Module) -> tuple:
    """Device and dtype for what a host gets: those of its floating-point parameters, or where offload runs it."""
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    hook = getattr(module, "_hf_hook", None) or next(
        (h for m in module.modules() if (h := getattr(m, "_hf_hook", None)) is not None), None
    )
    execution = getattr(hook, "execution_device", None)
    if device.type == "meta" and execution is not None:
        device = torch.device(execution)
    return device, base.dtype if base.dtype.is_floating_point else torch.float32


def remember(config) -> None:
    """Set our implementation in a config and note the one from before. `attn_implementation` is what a reload reads.

    On a reload the note is there already, and an implementation that the user asked for stays.
    """
    if not hasattr(config, STOCK):
        setattr(config, STOCK, config._attn_implementation)
        config._attn_implementation_internal = PATCHED
    config.attn_implementation = PATCHED


def forget(config) -> None:
    """The inverse of `remember`."""
    if config._attn_implementation == PATCHED:
        config._attn_implementation_internal = stock_name(config)
    for name in (STOCK, "hyperattn", "attn_implementation"):
        config.__dict__.pop(name, None)


def patched_hosts(model: nn.Module):
    """Name and module of every host that has a `hyper`."""
    return ((n, m) for n, m in model.named_modules() if isinstance(_inner(m._modules.get("hyper")), Hyper))


def _inner(module: nn.Module | None) -> nn.Module | None:
    """The `Hyper` inside PEFT's wrapper, where there is one."""
    return getattr(module, "original_module", module)
