"""Patch a pretrained model in place, and give it back as it was."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

import model_patches

from ..choice import Choice, head_numbers
from ..config import HyperAttnConfig, MechanismConfig
from ..fields import short
from ..mechanisms.base import Host
from ..registry import get_mechanism
from .hosts import find_hosts, host_facts, layer_indices
from .hyper import Hyper
from .records import erase_records, inner, patched_hosts, recorded_hosts, write_records
from .refusal import OURS, has_attention, refusal
from .selection import select
from .stock import PATCHED


def patch_model(
    model: nn.Module,
    *mechanisms: MechanismConfig | HyperAttnConfig,
    layers: Choice = None,
    heads: Choice = None,
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
        layers: None for all, a number, a list or range of numbers (negative ones count from the end), "last-third",
            "first-half", "last-4", "every-2nd", or a function of a `Host`. Numbers and names count within each stack
            (encoder, decoder, ...) of the model.
        heads: which query heads, in the same ways; a function gets a head's number. None for all.
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
    if recorded_hosts(base.config) is not None or any(patched_hosts(base)):
        raise ValueError(
            f"{type(base).__name__}, or a model that it shares its config with, is patched already; call "
            "unpatch_model(model) first, or patch all in one call"
        )
    if getattr(base.config, "hyperattn", None) is not None:
        raise ValueError(
            f"config.hyperattn of {type(base).__name__} holds parameters of mechanisms used by name; take it out "
            "before patching: del model.config.hyperattn"
        )
    newly_routed = route(base)
    try:
        chosen = choose_hosts(base, config)
        check_own_attention(chosen)
        attach(base, settle_heads(config, chosen), chosen, newly_routed)
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
    hosts, recorded = dict(patched_hosts(base)), recorded_hosts(base.config) or []
    if not hosts and not recorded:
        raise ValueError(f"{type(base).__name__} is not patched; nothing to undo")
    if len(hosts) < len(recorded) and hosts:
        raise ValueError(
            f"{type(base).__name__} was patched as a part of a larger model that shares its config; call "
            "unpatch_model on that"
        )
    newly_routed = any(inner(host.hyper).newly_routed for host in hosts.values())
    for host in hosts.values():
        del host.hyper
    erase_records(base)
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
        layers = "a function" if callable(config.layers) else short(config.layers)
        raise ValueError(
            f"layers={layers} chooses no attention module of {type(base).__name__}; it has: "
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
    known = max(forms, key=lambda form: sum(w in form for w in wanted))
    missing = [w for w in wanted if w not in known]
    if len(missing) < len(wanted) and not any(_has_stack(base, w) for w in missing):
        missing = []  # they belong to a part that this model lacks, as a T5 encoder lacks the decoder
    if missing:
        raise ValueError(
            f"hyperattn config names the host {missing[0][:80]!r}, which {type(base).__name__} does not have; "
            f"allowed: {', '.join(names[:3])}, ..."
        )
    meant = {known[w] for w in wanted if w in known}
    return [n in meant for n in names]


def _has_stack(base: PreTrainedModel, name: str) -> bool:
    """Whether the model has the list of layers, or the part, in which a host of that name would be."""
    stack = re.split(r"\.\d+(?:\.|$)", name)[0]
    forms = (stack, stack.removeprefix(base.base_model_prefix + "."), f"{base.base_model_prefix}.{stack}")
    return any(form in (n for n, _ in base.named_modules()) for form in forms)


def settle_heads(config: HyperAttnConfig, chosen: list[tuple[nn.Module, Host]]) -> HyperAttnConfig:
    """The config with the heads that a function chose as numbers, since a config cannot hold a function."""
    if not callable(config.heads):
        return config
    found = {head_numbers(config.heads, host.heads, host.name) for _, host in chosen}
    if len(found) > 1:
        raise ValueError(
            "heads is a function that chooses other heads in hosts with more of them; allowed: a list of numbers, "
            "a name such as 'first-half', or one patch_model call for each kind of host"
        )
    return replace(config, heads=found.pop())


def check_own_attention(chosen: list[tuple[nn.Module, Host]]) -> None:
    """Refuse a model that runs one of our names: a patch starts from the model's own attention."""
    for module, host in chosen:
        name = module.config._attn_implementation
        if name in OURS:
            raise ValueError(
                f"{host.name} runs attn_implementation={name!r}, and a patch starts from the model's own attention; "
                "first call model.set_attn_implementation('sdpa')"
            )


def check_combination(config: HyperAttnConfig, found: list[tuple[nn.Module, Host]]) -> None:
    """Refuse heads that a host lacks, and mechanisms that cross-attention has no meaning for."""
    for _, host in found:
        head_numbers(config.heads, host.heads, host.name)
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
    write_records(base)


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
