"""Patch a pretrained model in place, and restore it.

`patch_model` resolves its arguments to attention layers, checks them, and attaches a `hyper` to
each. Every step runs inside `rollback_on_error`, so a failed call leaves the model unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import model_patches

from ...config import HyperAttnConfig, MechanismConfig, Mode
from ...config.choice import Choice, select_heads, select_layers
from ...config.registry import get_mechanism
from ...utils.text import short
from ..attention.call import note_all
from ..attention.first_call import stop_watching
from ..attention.hidden import form_of_hidden, stop_noting
from ..attention.hyper import patched_hosts, unwrap_hyper
from ..attention.running_call import remove_cache_hooks
from ..attention.stock import OURS, PATCHED, check_beneath
from ..parallel.context_parallel import forget_context
from .attach import (
    Selected,
    all_hosts,
    attach_hypers,
    check_combination,
    match_names,
    resolve_overrides,
)
from .checkpoint_config import (
    all_configs,
    erase_records,
    inner_models_of,
    list_configs,
    recorded_hosts,
    running_on,
)
from .conversions import CONVERSIONS, conversion_of, give_back, refuse_by_name, refuse_conversions
from .hierarchical import ignore_hierarchy, resolve_names
from .modes import outside_inference_mode
from .unsupported import check_parts, has_attention, unsupported
from .versions import warn_of_newer_versions

logger = logging.getLogger("hf_hyperattn")
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class PatchListener:
    """Functions that run when a model is patched or unpatched.

    Args:
        check: `check(base, what)` runs before each change. `what` is the name of the operation. It
            raises ValueError if `base` must not change now.
        after_patch: `after_patch(model, base)` runs when `base` has its added parameters. `model`
            is the argument of `patch_model`, for example PEFT's wrapper around `base`.
        after_unpatch: `after_unpatch(model, base)` runs when they are removed.
    """

    check: Callable[[PreTrainedModel, str], None]
    after_patch: Callable[[nn.Module, PreTrainedModel], None]
    after_unpatch: Callable[[nn.Module, PreTrainedModel], None]


#: The listeners of every model. PEFT adapters register here: their modules import this one, so this
#: one cannot import them.
LISTENERS: list[PatchListener] = []


def patch_model(
    model: Model,
    *mechanisms: MechanismConfig | HyperAttnConfig,
    layers: Choice = None,
    heads: Choice = None,
    mode: Mode = "blend",
    include_cross_attention: bool = False,
) -> Model:
    """Patch the attention of a pretrained model, in place.

    Every chosen attention layer gets one child, `hyper`, which owns all added parameters. With
    mode="blend" the output of the patched model is unchanged until it is trained.

    Args:
        model: A Transformers model of a supported family: bare, with a head, composite, wrapped by
            PEFT, compiled, offloaded or quantised. Its adapters get the added parameters, to train
            and save them.
        mechanisms: Mechanism configs such as `ConeConfig()`, at most one per stage, or one
            `HyperAttnConfig`.
        layers: None for all, a number, a list or range of numbers, or a function of a `Host`.
            Also "last-third", "first-half", "last-4" and "every-2nd". Negative numbers count from
            the end. Numbers and names count within each stack (encoder, decoder, ...).
        heads: Query heads, in the same forms. A function gets the number of a head. None for all.
        mode: "blend" (identity at first) or "replace" (the published operator).
        include_cross_attention: Whether to patch cross-attention too.

    Returns:
        The model.

    Raises:
        ValueError: There is nothing to patch, or the model is already patched. Two mechanisms share
            a stage, a layer or head is unknown, or the family is unsupported. The model is
            unchanged.

    Example:
        ha.patch_model(model, ha.ConeConfig(), layers="last-third")
    """
    config = gather_config(mechanisms, layers, heads, mode, include_cross_attention)
    base = base_model(model)
    check_listeners(base, "patch_model")
    if recorded_hosts(base.config) is not None or any(patched_hosts(base)):
        raise ValueError(
            f"{type(base).__name__}, or a model that it shares its config with, is patched already; call "
            "unpatch_model(model) first, or patch all in one call"
        )
    with rollback_on_error(base):
        attach_hypers(base, *resolve_patch(base, config))
        # Adapters copy the added parameters, and copies made in inference mode cannot be trained.
        with outside_inference_mode():
            for listener in LISTENERS:
                listener.after_patch(model, base)
    return model


def check_listeners(base: PreTrainedModel, what: str) -> None:
    """Raise if a listener refuses a change of a model.

    Args:
        base: The model that would change.
        what: Name of the operation, for the error.

    Raises:
        ValueError: A listener refuses, for example because adapters contain a patch of their own.
    """
    for listener in LISTENERS:
        listener.check(base, what)


def resolve_patch(
    base: PreTrainedModel, config: HyperAttnConfig
) -> tuple[HyperAttnConfig, list[Selected], bool]:
    """Return what a config means for a model, after all checks.

    Args:
        base: The model, unpatched or patched in the same way.
        config: The patch, possibly with functions for `layers` and `heads`.

    Returns:
        The config without functions, the selected attention layers, and whether their family was
        routed through the attention interface for this patch.

    Raises:
        ValueError: As in `patch_model`.
    """
    refuse_by_name(base, "patching")
    warn_of_newer_versions()
    note_all(base)
    # Before the selection: a routed family has no attention layers ("hosts") until it is routed.
    newly_routed = route_families(base)
    selected = select_hosts(base, config)
    # When an adapter is added to a patched base, the base runs our name already.
    if not any(patched_hosts(base)):
        check_own_attention(selected)
    check_parts(base, PATCHED, [module.config for module, _ in selected])
    check_calls(config, selected)
    config = resolve_overrides(resolve_heads(config, selected), selected, base)
    warn_unread(config, selected)
    return config, selected, newly_routed


def unpatch_model(model: nn.Module) -> nn.Module:
    """Restore the original model: classes, state dict and implementation.

    A converted model is restored if it was converted with keep_original=True. If it was patched
    after its conversion, the first call removes that patch only.

    Args:
        model: A patched or converted model, possibly inside a wrapper.

    Returns:
        The original model. It is the same object unless a conversion created a new one.

    Raises:
        ValueError: The model is not patched, or it is converted and its original was not kept.

    Example:
        model = ha.unpatch_model(model)
    """
    with outside_inference_mode():
        return _unpatch_or_restore(model)


def _unpatch_or_restore(model: nn.Module) -> nn.Module:
    base = base_model(model)
    check_listeners(base, "unpatch_model")
    hosts = dict(patched_hosts(base))
    recorded = recorded_hosts(base.config) or []
    name = conversion_of(base)
    # An in-place conversion consists of patched layers, so both are undone together.
    if name is not None and (CONVERSIONS[name].in_place or not hosts):
        original = give_back(base, name)
        return model if original is base else original
    if not hosts and not recorded:
        names = {
            c._attn_implementation
            for c in list_configs(base.config)
            if c._attn_implementation in OURS
        }
        how = f"runs attn_implementation={min(names)!r} by name" if names else "is not patched"
        raise ValueError(
            f"{type(base).__name__} {how}, so there is no patch to undo; for its own attention call "
            "model.set_attn_implementation('sdpa')"
        )
    check_whole_model(base, len(hosts))
    with rollback_on_error(base):
        take_off(base)
        for listener in LISTENERS:
            listener.after_unpatch(model, base)
    return model


def check_whole_model(base: PreTrainedModel, count: int) -> None:
    """Raise if a model was patched as a part of a larger model that shares its config.

    Args:
        base: The model that `unpatch_model` was called with.
        count: Number of its patched attention layers.

    Raises:
        ValueError: There is such a larger model, with more patched layers.
    """
    # The record does not answer this: layers may have been deleted since it was written.
    for whole in running_on(base.config):
        around = whole is not base and any(part is base for part in whole.modules())
        if around and len(list(patched_hosts(whole))) > count:
            raise ValueError(
                f"{type(base).__name__} was patched as a part of a larger model that shares its config "
                f"({type(whole).__name__}); call unpatch_model on that"
            )


def take_off(base: PreTrainedModel) -> None:
    """Remove every `hyper`, its hooks and its records."""
    hosts = dict(patched_hosts(base))
    newly_routed = any(unwrap_hyper(host.hyper).newly_routed for host in hosts.values())
    for host in hosts.values():
        del host.hyper
        stop_noting(host)
        stop_watching(host)
        remove_cache_hooks(host)
    ignore_hierarchy(base)
    forget_context(base)
    erase_records(all_configs(base))
    # Parts that run a mechanism with a hierarchy by name keep their `hierarchy=` argument.
    resolve_names(base)
    # Last: unrouting raises while a config still names an implementation of ours.
    if newly_routed:
        model_patches.unserve(base)


@contextmanager
def rollback_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the model's modules and configs if the block raises.

    Classes, attributes, children, parameters, hooks and config entries are restored. Values of
    tensors are not copied, because no patch changes them.
    """
    # By id: modules and configs may be shared, and configs compare by value.
    things: dict[int, Any] = {}
    for module in model.modules():
        things[id(module)] = module
        for value in module.__dict__.values():
            if isinstance(value, PreTrainedConfig):
                things |= {id(part): part for part in list_configs(value)}
    before = []
    for thing in things.values():
        contents = {
            name: (value, dict(value) if isinstance(value, dict) else None)
            for name, value in vars(thing).items()
        }
        before.append((thing, type(thing), contents))
    try:
        yield
    except BaseException:  # also a keyboard interrupt
        for thing, cls, contents in before:
            # Not by `thing.__class__ = `: modules and configs have a `__setattr__` of their own.
            object.__setattr__(thing, "__class__", cls)
            thing.__dict__.clear()
            for name, (value, entries) in contents.items():
                thing.__dict__[name] = value
                if entries is not None:
                    # Clear in place: hook handles keep a reference to this dict.
                    value.clear()
                    value.update(entries)
        raise


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the Transformers model inside wrappers of PEFT, compiler or parallelism.

    Raises:
        ValueError: There is none.
    """
    wrapped: Any = model
    # Wrappers may be nested: `_orig_mod` is the compiler's, `module` the data-parallel wrappers'.
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


def gather_config(
    mechanisms, layers, heads, mode: Mode, include_cross_attention: bool
) -> HyperAttnConfig:
    """Return one `HyperAttnConfig` from the arguments of `patch_model`.

    Raises:
        ValueError: There is no mechanism, a `HyperAttnConfig` comes with further arguments, or a
            mechanism needs `convert`.
    """
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
        config = HyperAttnConfig(
            mechanisms=mechanisms,
            layers=layers,
            heads=heads,
            mode=mode,
            include_cross_attention=include_cross_attention,
        )
    if not config.mechanisms:
        raise ValueError(
            "patch_model got no mechanism; allowed: at least one, such as ConeConfig()"
        )
    refuse_conversions(config)
    return config


def route_families(base: PreTrainedModel) -> bool:
    """Route supported families through the attention interface.

    Only a patch that routed a family undoes it when it is removed.

    Returns:
        Whether it was needed.
    """
    before = next(model_patches.hosts(base), None) is not None
    return model_patches.serve(base) and not before


def select_hosts(base: PreTrainedModel, config: HyperAttnConfig) -> list[Selected]:
    """Return the attention layers that a config selects, each with its facts.

    Raises:
        ValueError: It selects none, the family is unsupported, or a mechanism does not fit a layer.
    """
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
    # A list of names is explicit, so it may contain cross-attention.
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
    """Raise for attention layers where every call would raise later.

    Raises:
        ValueError: A mechanism reads hidden states that a layer gets in another form, or needs the
            positions of queries that a layer pools.
    """
    for module, host in selected:
        for mechanism in config.mechanisms_at(host.name):
            known = get_mechanism(mechanism.mechanism)
            name = f"{host.name} ({type(module).__name__})"
            advice = "allowed: layers= without it, or other mechanisms"
            form = form_of_hidden(module)
            if form is not None and getattr(known.layer, "reads_hidden", False):
                raise ValueError(
                    f"{known.name} reads a row of hidden states for each query, and {name} gets {form}; {advice}"
                )
            # The backbone of SAM 2 pools its queries between stages.
            pools = getattr(module, "query_stride", None) is not None
            has_windows = getattr(mechanism, "windows", None) is not None
            # A mechanism that supports cross-attention needs no positions, except for windows.
            if pools and (has_windows or not known.cross_attention):
                raise ValueError(
                    f"{known.name} cannot tell the positions of queries that {name} pools; {advice}"
                )


def warn_unread(config: HyperAttnConfig, selected: list[Selected]) -> None:
    """Warn of options of a mechanism that none of its attention layers reads.

    Some options only have an effect in causal, others only in bidirectional attention.
    """
    directions: dict[MechanismConfig, set[bool]] = {}
    for _, host in selected:
        for mechanism in config.mechanisms_at(host.name):
            directions.setdefault(mechanism, set()).add(host.is_causal)
    for mechanism, causal in directions.items():
        if said := mechanism.unread(causal):
            logger.warning(f"hf_hyperattn: {said}")


def resolve_heads(config: HyperAttnConfig, selected: list[Selected]) -> HyperAttnConfig:
    """Replace a function for `heads` by the numbers that it selects.

    A config is saved as JSON, which cannot contain a function.

    Raises:
        ValueError: It selects different heads in layers with different numbers of heads.
    """
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
    """Raise if a model runs one of our names: a patch builds on its own attention."""
    for module, host in selected:
        name = cast(Any, module).config._attn_implementation
        if name in OURS:
            raise ValueError(
                f"{host.name} runs attn_implementation={name!r}, and a patch starts from the model's own attention; "
                "first call model.set_attn_implementation('sdpa')"
            )
        check_beneath(name, host.name)
