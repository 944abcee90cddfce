"""Patch a pretrained model in place, and give it back as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import model_patches

from ..config import HyperAttnConfig, MechanismConfig, Mode
from ..fields import short
from ..registry import get_mechanism
from ..selection import Choice, select_heads, select_layers
from .adapter_config import give_adapters_hyper, take_hyper_from_adapters
from .attach import Selected, all_hosts, attach, check_combination, match_names, resolve_overrides
from .cache_of_call import remove_cache_hooks
from .call import note_all
from .checkpoint_config import (
    all_configs,
    erase_records,
    inner,
    inner_models_of,
    patched_hosts,
    recorded_hosts,
    running_on,
    tree,
)
from .conversions import CONVERSIONS, conversion_of, give_back, refuse_by_name, refuse_conversions
from .first_call import stop_watching
from .hidden import form_of_hidden, stop_noting
from .hierarchical import ignore_hierarchy, resolve_names
from .hyper_adapter import refuse_adapters
from .modes import outside_inference_mode
from .stock import OURS, PATCHED, check_beneath
from .unsupported import check_parts, has_attention, unsupported
from .versions import warn_of_newer_versions

logger = logging.getLogger("hf_hyperattn")
Model = TypeVar("Model", bound=nn.Module)


def patch_model(
    model: Model,
    *mechanisms: MechanismConfig | HyperAttnConfig,
    layers: Choice = None,
    heads: Choice = None,
    mode: Mode = "blend",
    include_cross_attention: bool = False,
) -> Model:
    """Give a pretrained model hierarchy-aware attention, in place.

    Every chosen attention layer gets one child, `hyper`, which owns all added parameters. With mode="blend" the
    patched model computes what it did before, until it is trained.

    Args:
        model: any Transformers model whose attention is served: bare, with a head, composite, wrapped by PEFT,
            compiled, offloaded or quantised. Adapters that it has get the added parameters, to train and save.
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
    refuse_adapters(base, "patch_model")
    if recorded_hosts(base.config) is not None or any(patched_hosts(base)):
        raise ValueError(
            f"{type(base).__name__}, or a model that it shares its config with, is patched already; call "
            "unpatch_model(model) first, or patch all in one call"
        )
    with rollback_on_error(base):
        attach(base, *resolve(base, config))
        with outside_inference_mode():  # adapters take copies
            give_adapters_hyper(model, base)
    return model


def resolve(
    base: PreTrainedModel, config: HyperAttnConfig
) -> tuple[HyperAttnConfig, list[Selected], bool]:
    """What a config means for a model that is stock, or patched alike: the config without functions, the hosts, and
    whether their family was made to call the attention interface for it.

    Raises:
        ValueError: as `patch_model`.
    """
    refuse_by_name(base, "patching")
    warn_of_newer_versions()
    note_all(base)
    newly_routed = route(base)
    selected = select_hosts(base, config)
    if not any(patched_hosts(base)):
        check_own_attention(selected)
    check_parts(base, PATCHED, [module.config for module, _ in selected])
    check_calls(config, selected)
    config = resolve_overrides(resolve_heads(config, selected), selected, base)
    warn_unread(config, selected)
    return config, selected, newly_routed


def unpatch_model(model: nn.Module) -> nn.Module:
    """Give back the original model: same classes, state-dict keys and values, implementation; no hook is left.

    A converted model is given back where it was converted with keep_original=True; a later patch of it goes first.

    Raises:
        ValueError: the model is not patched, or it is converted and what it was made from is not there.
    """
    with outside_inference_mode():
        return _unpatch(model)


def _unpatch(model: nn.Module) -> nn.Module:
    base = base_model(model)
    refuse_adapters(base, "unpatch_model")
    hosts, recorded = dict(patched_hosts(base)), recorded_hosts(base.config) or []
    name = conversion_of(base)
    if name is not None and (CONVERSIONS[name].in_place or not hosts):
        original = give_back(base, name)
        return model if original is base else original
    if not hosts and not recorded:
        names = {
            c._attn_implementation for c in tree(base.config) if c._attn_implementation in OURS
        }
        how = f"runs attn_implementation={min(names)!r} by name" if names else "is not patched"
        raise ValueError(
            f"{type(base).__name__} {how}, so there is no patch to undo; for its own attention call "
            "model.set_attn_implementation('sdpa')"
        )
    # Fewer hosts than the record lists may also mean that layers were deleted, so the models themselves are asked.
    for whole in running_on(base.config):
        around = whole is not base and any(part is base for part in whole.modules())
        if around and len(list(patched_hosts(whole))) > len(hosts):
            raise ValueError(
                f"{type(base).__name__} was patched as a part of a larger model that shares its config "
                f"({type(whole).__name__}); call unpatch_model on that"
            )
    with rollback_on_error(base):
        take_off(base)
        take_hyper_from_adapters(model, base)
    return model


def take_off(base: PreTrainedModel) -> None:
    """Remove every `hyper` and all that came with it."""
    hosts = dict(patched_hosts(base))
    newly_routed = any(inner(host.hyper).newly_routed for host in hosts.values())
    for host in hosts.values():
        del host.hyper
        stop_noting(host)
        stop_watching(host)
        remove_cache_hooks(host)
    ignore_hierarchy(base)
    erase_records(all_configs(base))
    resolve_names(base)  # parts that run a structure by name
    if newly_routed:
        model_patches.unserve(base)


@contextmanager
def rollback_on_error(model: nn.Module) -> Iterator[None]:
    """Where the block raises, the model's modules and configs are as they were before it.

    Classes, attributes, children, parameters, hooks and config entries are put back; values of tensors, which no patch
    changes, are not copied.
    """
    things: dict[int, Any] = {}
    for module in model.modules():
        configs = [
            value for value in module.__dict__.values() if isinstance(value, PreTrainedConfig)
        ]
        things |= {
            id(thing): thing for thing in (module, *(part for top in configs for part in tree(top)))
        }
    before = []
    for thing in things.values():
        contents = {
            n: (v, dict(v) if isinstance(v, dict) else None) for n, v in vars(thing).items()
        }
        before.append((thing, type(thing), contents))
    try:
        yield
    except BaseException:
        for thing, cls, contents in before:
            object.__setattr__(thing, "__class__", cls)
            thing.__dict__.clear()
            for name, (value, entries) in contents.items():
                thing.__dict__[name] = value
                if entries is not None:
                    value.clear()  # in place: handles of hooks refer to the dict itself
                    value.update(entries)
        raise


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside PEFT's, the compiler's or a data-parallel wrapper.

    Raises:
        ValueError: there is none.
    """
    wrapped: Any = model
    while not isinstance(wrapped, PreTrainedModel):
        inside = getattr(wrapped, "_orig_mod", None) or getattr(wrapped, "module", None)
        if inside is None and hasattr(wrapped, "get_base_model"):
            inside = wrapped.get_base_model()
        if inside is None:
            advice = inner_models_of(model) if isinstance(wrapped, nn.Module) else ""
            allowed = (
                "allowed: a PreTrainedModel, also inside a PEFT, compiled or data-parallel wrapper"
            )
            raise ValueError(
                f"{type(model).__name__} is no Transformers model; {advice or allowed}"
            )
        wrapped = inside
    return wrapped


def gather(mechanisms, layers, heads, mode: Mode, include_cross_attention: bool) -> HyperAttnConfig:
    """One `HyperAttnConfig` out of the arguments of `patch_model`."""
    if len(mechanisms) == 1 and isinstance(mechanisms[0], HyperAttnConfig):
        if layers is not None or heads is not None or mode != "blend" or include_cross_attention:
            raise ValueError(
                "patch_model got a HyperAttnConfig and further arguments; allowed: one or the other, set "
                "layers, heads, mode and include_cross_attention in the config"
            )
        config = mechanisms[0]
        if config.layers is not None and config.hosts is not None:
            raise ValueError(
                "HyperAttnConfig has layers and hosts; allowed: one of them, hosts=None to choose by layers"
            )
    else:
        config = HyperAttnConfig(mechanisms, layers, heads, mode, include_cross_attention)
    if not config.mechanisms:
        raise ValueError(
            "patch_model got no mechanism; allowed: at least one, such as ConeConfig()"
        )
    refuse_conversions(config)
    return config


def route(base: PreTrainedModel) -> bool:
    """Make served families call the attention interface; whether that was needed now."""
    before = next(model_patches.hosts(base), None) is not None
    return model_patches.serve(base) and not before


def select_hosts(base: PreTrainedModel, config: HyperAttnConfig) -> list[Selected]:
    """The hosts that the config means, each with its facts."""
    hosts = all_hosts(base)
    if not hosts:
        if has_attention(base):
            raise unsupported(base.config.model_type, PATCHED)
        raise ValueError(
            f"model type {base.config.model_type!r} has no attention; nothing to patch"
        )
    if config.hosts is not None:
        names = set(match_names([host.name for _, _, host in hosts], config.hosts, base).values())
        picks = [host.name in names for _, _, host in hosts]
    else:
        picks = select_layers([(stack, host) for stack, _, host in hosts], config.layers)
    cross = config.include_cross_attention or config.hosts is not None
    picked = [(module, host) for (_, module, host), pick in zip(hosts, picks, strict=True) if pick]
    selected = [(module, host) for module, host in picked if cross or not host.is_cross]
    if not selected:
        layers = "a function" if callable(config.layers) else short(config.layers)
        raise ValueError(
            f"layers={layers} chooses no attention module of {type(base).__name__} (model type "
            f"{base.config.model_type!r}); allowed: layers of "
            f"{', '.join(sorted({stack for stack, _, _ in hosts}))}"
        )
    check_combination(config, selected)
    return selected


def check_calls(config: HyperAttnConfig, selected: list[Selected]) -> None:
    """Refuse hosts of which it is known that every call would be refused."""
    for module, host in selected:
        for mechanism in config.mechanisms_at(host.name):
            known, name = (
                get_mechanism(mechanism.mechanism),
                f"{host.name} ({type(module).__name__})",
            )
            advice = "allowed: layers= without it, or other mechanisms"
            form = form_of_hidden(module)
            if form is not None and getattr(known.layer, "reads_hidden", False):
                raise ValueError(
                    f"{known.name} reads a row of hidden states for each query, and {name} gets {form}; {advice}"
                )
            pools = (
                getattr(module, "query_stride", None) is not None
            )  # SAM 2's backbone, between its stages
            if pools and (
                not known.cross_attention or getattr(mechanism, "windows", None) is not None
            ):
                raise ValueError(
                    f"{known.name} cannot tell the positions of queries that {name} pools; {advice}"
                )


def warn_unread(config: HyperAttnConfig, selected: list[Selected]) -> None:
    """Say what of a mechanism's config none of its hosts reads."""
    directions: dict[MechanismConfig, set[bool]] = {}
    for _, host in selected:
        for mechanism in config.mechanisms_at(host.name):
            directions.setdefault(mechanism, set()).add(host.is_causal)
    for mechanism, causal in directions.items():
        if said := mechanism.unread(causal):
            logger.warning(f"hf_hyperattn: {said}")


def resolve_heads(config: HyperAttnConfig, selected: list[Selected]) -> HyperAttnConfig:
    """The config with the heads that a function selects as numbers, since a config cannot hold a function."""
    if not callable(config.heads):
        return config
    heads = {select_heads(config.heads, host.heads, host.name) for _, host in selected}
    if len(heads) > 1:
        raise ValueError(
            "heads is a function that chooses other heads in hosts with more of them; allowed: a list of numbers, "
            "a name such as 'first-half', or one patch_model call for each kind of host"
        )
    return replace(config, heads=heads.pop())


def check_own_attention(selected: list[Selected]) -> None:
    """Refuse a model that runs one of our names: a patch starts from the model's own attention."""
    for module, host in selected:
        name = cast(Any, module).config._attn_implementation
        if name in OURS:
            raise ValueError(
                f"{host.name} runs attn_implementation={name!r}, and a patch starts from the model's own attention; "
                "first call model.set_attn_implementation('sdpa')"
            )
        check_beneath(name, host.name)
