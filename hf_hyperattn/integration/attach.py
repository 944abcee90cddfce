"""Putting a `hyper` into every chosen host: for a patch, and for a patched checkpoint that is loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..config import HyperAttnConfig
from ..mechanisms.base import Host, MechanismLayer
from ..registry import get_mechanism
from ..selection import select_heads
from .cache_of_call import add_cache_hooks
from .checkpoint_config import all_configs, erase_records, parts, ranks_of, write_records
from .decay import WATCH
from .first_call import watch_first_calls
from .hidden import check_forward, note_hidden
from .hierarchical import accept_hierarchy
from .hosts import NUMBER, find_hosts, generating_config, host_facts, layer_indices
from .hyper import Hyper
from .modes import building_on
from .stock import HYPER_DOT, STOCK, check_beneath, find_eager, marked, run_beneath, stock_name

logger = logging.getLogger("hf_hyperattn")

#: How many names of hosts a warning spells out.
NAMED = 8

#: A module and what is known of it.
Selected = tuple[nn.Module, Host]


def all_hosts(base: PreTrainedModel) -> list[tuple[str, nn.Module, Host]]:
    """Every host of a model: its stack, the module, and its facts."""
    modules = list(find_hosts(base))
    stacks = layer_indices(list(map(itemgetter(0), modules)))
    known: dict[int, dict] = {}
    generating = generating_config(base)
    hosts = []
    for (name, module), (stack, index) in zip(modules, stacks, strict=True):
        host = host_facts(name, module, index, known)
        # Layers without an index, such as Kosmos-2's projection of images, read no cache.
        has_cache = (
            host.config is generating is not None and getattr(module, "layer_idx", None) is not None
        )
        # A language model inside a larger one whose masks show the prefix whole (PaliGemma). A causal model that was
        # made bidirectional (`config.is_causal = False`) is an encoder, also under a head that could generate.
        is_prefix = generating is not base.config and getattr(
            host.config, "use_bidirectional_attention", False
        )
        grows = bool(has_cache and is_prefix and not host.is_causal and not host.is_cross)
        hosts.append((stack, module, replace(host, grows=True) if grows else host))
    return hosts


def repatch(model: PreTrainedModel, config: HyperAttnConfig, newly_routed: bool = False) -> None:
    """Patch a model as its config says, before its weights are loaded.

    Hosts of layers that the model lacks are left out with a warning, as Transformers leaves out their weights.

    Raises:
        ValueError: the config names hosts that the model does not have.
    """
    hosts = {host.name: (module, host) for _, module, host in all_hosts(model)}
    if not hosts.keys() >= set(config.hosts or ()):
        cut = cut_to_depth(config, model)
        if cut is None:
            return erase_records(all_configs(model))
        config = cut
    names = set(match_names(list(hosts), config.hosts or (), model).values())
    selected = [pair for name, pair in hosts.items() if name in names]
    check_combination(config, selected)
    config = resolve_overrides(config, selected, model)
    attach(model, config, selected, newly_routed, weights_come_later=True)


def resolve_stock(model: PreTrainedModel) -> None:
    """An implementation that the loader asked for runs beneath. One from before that this machine or family does not
    have becomes what Transformers would take.

    Raises:
        ValueError: what was asked for cannot run beneath a mechanism.
    """
    for config in filter(marked, all_configs(model)):
        check_beneath(vars(config)[STOCK], f"the checkpoint of {type(model).__name__}")
        warn_of_missing_function(vars(config)[STOCK], type(model).__name__)
        run_beneath(config)
    for part in parts(model):
        if marked(part.config):
            check = partial(part.get_correct_attn_implementation, is_init_check=True)
            try:
                name = check(stock_name(part.config))
            except (ValueError, ImportError):
                name = check(None)
            setattr(part.config, STOCK, name)


def warn_of_missing_function(name: Any, model: str) -> None:
    """Warn if a checkpoint was patched on top of an attention function that this process does not have.

    Flash attention and other kernels of Transformers compute the same as "sdpa", which then takes their place.
    """
    plain = str(name).removeprefix("paged|")
    same = (
        name is None or plain in ("eager", "sdpa", HYPER_DOT) or "flash" in plain or "flex" in plain
    )
    if not same and plain not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        logger.warning(
            f"hf_hyperattn: the checkpoint of {model} was patched on top of the attention function {plain[:80]!r}, "
            "which is not registered here; 'sdpa' runs in its place"
        )


def match_names(names: list[str], recorded: Sequence[str], base: PreTrainedModel) -> dict[str, str]:
    """The names that a saved list of hosts means, by what the list has; a bare model and one with a head differ by a
    prefix. Hosts of a part that this model lacks are left out.
    """
    if set(recorded) <= set(names):
        return dict(zip(recorded, recorded, strict=True))
    known = _known_names(names, recorded, base)
    missing = [name for name in recorded if name not in known]
    if len(missing) < len(recorded) and not any(_has_stack(base, name) for name in missing):
        missing = []  # they belong to a part that this model lacks, as a T5 encoder lacks the decoder
    if missing:
        # Llama's question answering calls its base `transformer`; Transformers does not load the weights either
        renamed = any(name.partition(".")[2] == missing[0].partition(".")[2] for name in names)
        advice = (
            "; save the bare model, model.base_model.save_pretrained(...), and load that"
            if renamed
            else ""
        )
        raise ValueError(
            f"hyperattn config names the host {missing[0][:80]!r}, which {type(base).__name__} does not have; "
            f"allowed: {', '.join(names[:3]) or 'none'}, ...{advice}"
        )
    return {name: known[name] for name in recorded if name in known}


def cut_to_depth(
    config: HyperAttnConfig, base: nn.Module, warn: bool = True
) -> HyperAttnConfig | None:
    """A saved config without the hosts of layers behind the model's last one; None if no host is left.

    Args:
        warn: whether to log a warning that names what is left out.
    """
    beyond = beyond_depth(config.hosts or (), base)
    if not beyond:
        return config
    if warn:
        more = f" and {len(beyond) - NAMED} more" if len(beyond) > NAMED else ""
        logger.warning(
            f"hf_hyperattn: {type(base).__name__} has fewer layers than the model that was patched; left out: "
            f"{', '.join(beyond[:NAMED])}{more}"
        )
    left_out = set(beyond)
    hosts = tuple(name for name in config.hosts or () if name not in left_out)
    overrides = {
        name: configs for name, configs in (config.overrides or {}).items() if name not in left_out
    }
    return replace(config, hosts=hosts, overrides=overrides or None) if hosts else None


def beyond_depth(names: Iterable[str], base: nn.Module) -> list[str]:
    """Those of the names, of modules or tensors, that would be in layers behind the model's last one."""
    modules, prefix = dict(base.named_modules()), f"{getattr(base, 'base_model_prefix', '')}."
    return [name for name in names if is_beyond(name, modules, prefix)]


def is_beyond(name: str, modules: dict[str, nn.Module], prefix: str) -> bool:
    """Whether a model has the list of layers in which something of that name would be, and the list is too short.

    Args:
        modules: the model's modules by name.
        prefix: of the base model; the name may have it or lack it.
    """
    for form in (name, prefix + name, name.removeprefix(prefix)):
        for number in NUMBER.finditer(form):
            layers = modules.get(form[: number.start() - 1])
            if isinstance(layers, nn.ModuleList | nn.Sequential) and int(number[0]) >= len(layers):
                return True
    return False


def _known_names(
    names: list[str], recorded: Iterable[str], base: PreTrainedModel
) -> dict[str, str]:
    """The model's names by the form in which `recorded` has most of them: as they are, with the prefix, or without."""
    prefix = base.base_model_prefix + "."
    forms = (
        {n: n for n in names},
        {prefix + n: n for n in names},
        {n.removeprefix(prefix): n for n in names if n.startswith(prefix)},
    )
    return max(forms, key=lambda form: len(form.keys() & set(recorded)))


def _has_stack(base: PreTrainedModel, name: str) -> bool:
    """Whether the model has the list of layers, or the part, in which a host of that name would be."""
    stack, prefix = re.split(r"\.\d+(?:\.|$)", name)[0], base.base_model_prefix
    forms = {stack, stack.removeprefix(prefix + "."), f"{prefix}.{stack}"}
    return not forms.isdisjoint(name for name, _ in base.named_modules())


def resolve_overrides(
    config: HyperAttnConfig, selected: list[Selected], base: PreTrainedModel
) -> HyperAttnConfig:
    """The config with the names in `overrides` as this model has them, and all that belongs to its hosts alone.

    Raises:
        ValueError: an override is for a host that is not selected, though the config does not list it as one.
    """
    if not config.overrides:
        return config
    names = [host.name for _, host in selected]
    known = _known_names(names, config.hosts or config.overrides, base)
    strange = next((name for name in config.overrides if name not in known), None)
    if strange is not None and config.hosts is None:
        raise ValueError(
            f"overrides names the host {strange[:80]!r}, which is not patched in this {type(base).__name__}; "
            f"allowed: {', '.join(names[:3])}, ..."
        )
    overrides = {
        known[name]: configs for name, configs in config.overrides.items() if name in known
    }
    return replace(config, hosts=tuple(names), overrides=overrides)


def check_combination(config: HyperAttnConfig, selected: list[Selected]) -> None:
    """Refuse heads that a host lacks, and mechanisms that cross-attention has no meaning for."""
    for _, host in selected:
        if config.heads is not None:
            select_heads(config.heads, host.heads, host.name)
        for mechanism in config.mechanisms if host.is_cross else ():
            if not get_mechanism(mechanism.mechanism).cross_attention:
                raise ValueError(
                    f"{mechanism.mechanism} has no meaning for cross-attention ({host.name}); allowed: "
                    "include_cross_attention=False"
                )


def is_cut(model: PreTrainedModel, host: str) -> bool:
    """Whether the plan for tensor parallelism cuts a projection of a host into parts that stay apart."""
    given = getattr(getattr(model.config, "distributed_config", None), "tp_plan", None)
    plans = [given] if isinstance(given, dict) else []
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            plans += [
                getattr(part, "_tp_plan", None) or {},
                getattr(part.config, "base_model_tp_plan", None) or {},
            ]
    place = re.sub(r"\b\d+\b", "*", host).split(".")
    cut = (name.split(".") for plan in plans for name, style in plan.items() if style == "colwise")
    return any(place[-count:] == name[:count] for name in cut for count in range(1, len(name)))


def check_ranks(model: PreTrainedModel, selected: list[Selected]) -> None:
    """Raise where ranks share the heads of a host that is patched, or loaded patched, in unequal parts."""
    ranks = ranks_of(model)
    for _, host in selected if ranks > 1 else ():
        if (host.heads % ranks or host.kv_heads % ranks) and is_cut(model, host.name):
            raise ValueError(
                f"{host.name} of {type(model).__name__} has {host.heads} query heads and {host.kv_heads} key heads, "
                f"and tensor parallelism cuts it into {ranks} ranks; allowed: a tp_size that divides both, FSDP2, or "
                "a patch without that layer"
            )


def attach(
    base: PreTrainedModel,
    config: HyperAttnConfig,
    selected: list[Selected],
    newly_routed: bool = False,
    weights_come_later: bool = False,
) -> None:
    """Build every `hyper`, then put them all in place and write the configs; the caller undoes it where it fails.

    Args:
        weights_come_later: The model is being built to be loaded: tensors that its checkpoint lacks are initialised
            then. Without it, the added parameters have their starting values now, and keep what they learn.
    """
    hypers = build(base, config, selected, newly_routed)
    if not weights_come_later:
        for hyper in hypers:
            mark_initialized(hyper)
    modules = [module for module, _ in selected]
    for module, hyper in zip(modules, hypers, strict=True):
        module.hyper = hyper
    note_hidden(zip(modules, hypers, strict=True))
    add_cache_hooks(zip(modules, hypers, strict=True))
    write_records(base)
    watch_first_calls(base)
    if any(get_mechanism(mechanism.mechanism).takes_hierarchy for mechanism in config.mechanisms):
        accept_hierarchy(base, modules)


def mark_initialized(module: nn.Module) -> None:
    """Keep Transformers from initialising the weights of a module again.

    `init_weights` goes through all modules of a model, also when a finished model becomes a part of another one.
    """
    for part in module.modules():
        vars(part)["_is_hf_initialized"] = True


def build(
    base: PreTrainedModel,
    config: HyperAttnConfig,
    selected: list[Selected],
    newly_routed: bool,
    may_be_empty: bool = False,
) -> list[Hyper]:
    """A new `Hyper` for each host, where the host is, and none of them in place; `may_be_empty` as in `building_on`."""
    check_ranks(base, selected)
    find_eager(set(map(type, map(itemgetter(1), find_hosts(base)))))
    hypers = [new_hyper(config, host, base, module, may_be_empty) for module, host in selected]
    for (module, host), hyper in zip(selected, hypers, strict=True):
        check_forward(host.name, module, hyper)
    warned: set[str] = set()
    for hyper in hypers:
        hyper.newly_routed = newly_routed
        for layer in hyper.children():
            cast(MechanismLayer, layer).warned = warned
    WATCH.begin(base)
    return hypers


def new_hyper(
    config: HyperAttnConfig,
    host: Host,
    base: PreTrainedModel,
    module: nn.Module,
    may_be_empty: bool = False,
) -> Hyper:
    """A new `Hyper` where its host is, or where offload runs it, in the dtype of the model.

    On the meta device, where a model is built to be loaded, it stays there.
    """
    device = device_of(module, base)
    dtype = base.dtype if base.dtype.is_floating_point else torch.float32
    with building_on(device.type == "meta", host.name, may_be_empty=may_be_empty):
        hyper = Hyper(config, host)
        for part in hyper.modules():
            for name, p in part._parameters.items():  # `Module.to` fails under FakeTensorMode
                if p is not None:
                    moved = p.detach().to(dtype=dtype, device=p.device if p.is_meta else device)
                    part._parameters[name] = nn.Parameter(moved, p.requires_grad)
    return hyper.train(module.training)


def device_of(module: nn.Module, base: nn.Module) -> torch.device:
    """Where a module runs: where its weights are, or where offload brings them; for one without, where the model is."""
    weights = [p for p in module.parameters() if p.is_floating_point()] or [
        *module.parameters(),
        *base.parameters(),
    ]
    device = weights[0].device if weights else torch.device("cpu")
    if device.type == "meta":
        for part in module.modules():
            execution = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
            if execution is not None:
                return torch.device(execution)
    return device
