"""Build a `Hyper` for every chosen attention layer and attach it.

`patch_model` calls this for a live model (`attach_hypers`). A saved patched model is rebuilt from
its record before its weights are loaded (`patch_from_record`).
"""

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

from ...config import HyperAttnConfig
from ...config.choice import select_heads
from ...config.registry import get_mechanism
from ...mechanisms.base import Host, MechanismLayer
from ..attention.first_call import watch_first_calls
from ..attention.hidden import check_forward, note_hidden
from ..attention.hosts import NUMBER, find_hosts, generating_config, host_facts, layer_indices
from ..attention.hyper import Hyper
from ..attention.running_call import add_cache_hooks
from ..attention.stock import (
    HYPER_DOT,
    STOCK,
    check_beneath,
    find_eager,
    marked,
    run_beneath,
    stock_name,
)
from ..parallel.partitioned import PARTITIONED
from .checkpoint_config import all_configs, erase_records, list_models, ranks_of, write_records
from .decay import WATCH
from .hierarchical import accept_hierarchy
from .modes import building_on

logger = logging.getLogger("hf_hyperattn")

#: How many names of attention layers a warning lists.
NAMED = 8

#: An attention layer and its facts.
Selected = tuple[nn.Module, Host]


def all_hosts(base: PreTrainedModel) -> list[tuple[str, nn.Module, Host]]:
    """Return every attention layer of a model: the name of its stack, the module, its facts."""
    modules = list(find_hosts(base))
    stacks = layer_indices(list(map(itemgetter(0), modules)))
    known: dict[int, dict] = {}
    generating = generating_config(base)
    hosts = []
    for (name, module), (stack, index) in zip(modules, stacks, strict=True):
        host = host_facts(name, module, index, known)
        generates = generating is not None and host.config is generating
        # Layers without an index, such as the image projection of Kosmos-2, read no cache.
        has_cache = generates and getattr(module, "layer_idx", None) is not None
        # A prefix LM inside a larger model, such as PaliGemma: its masks make the whole prefix
        # visible. A causal model that was made bidirectional (`config.is_causal = False`) is an
        # encoder, even with a head that could generate.
        is_prefix = generating is not base.config and getattr(
            host.config, "use_bidirectional_attention", False
        )
        grows = bool(has_cache and is_prefix and not host.is_causal and not host.is_cross)
        hosts.append((stack, module, replace(host, grows=True) if grows else host))
    return hosts


def patch_from_record(
    model: PreTrainedModel, config: HyperAttnConfig, newly_routed: bool = False
) -> None:
    """Patch a model as its saved config says, before its weights are loaded.

    Attention layers of missing model layers are skipped with a warning. Transformers skips their
    weights, too.

    Raises:
        ValueError: The config names attention layers that the model does not have.
    """
    hosts = {host.name: (module, host) for _, module, host in all_hosts(model)}
    if not hosts.keys() >= set(config.hosts or ()):
        cut = cut_to_depth(config, model)
        if cut is None:
            # Nothing patched is left. The model loads as an ordinary one.
            return erase_records(all_configs(model))
        config = cut
    names = set(match_names(list(hosts), config.hosts or (), model).values())
    selected = [pair for name, pair in hosts.items() if name in names]
    check_combination(config, selected)
    config = resolve_overrides(config, selected, model)
    attach_hypers(model, config, selected, newly_routed, weights_come_later=True)


def resolve_stock(model: PreTrainedModel) -> None:
    """Settle which base implementation a loaded model runs below its mechanisms.

    The implementation that the loader asked for wins. If this machine or family does not have the
    saved one, the model gets the default of Transformers.

    Raises:
        ValueError: The requested implementation cannot run below a mechanism.
    """
    # 1. A name that the loader asked for moves to the base implementation.
    for config in filter(marked, all_configs(model)):
        check_beneath(vars(config)[STOCK], f"the checkpoint of {type(model).__name__}")
        warn_of_missing_function(vars(config)[STOCK], type(model).__name__)
        run_beneath(config)
    # 2. Transformers may refuse the name for a family or machine. Its own default then takes over.
    for part in list_models(model):
        if marked(part.config):
            check = partial(part.get_correct_attn_implementation, is_init_check=True)
            try:
                name = check(stock_name(part.config))
            except (ValueError, ImportError):
                name = check(None)
            setattr(part.config, STOCK, name)


def warn_of_missing_function(name: Any, model: str) -> None:
    """Warn if the model was patched on top of an attention function that is missing here.

    Flash attention and Transformers' other kernels compute the same as "sdpa", which replaces them
    without a warning.
    """
    plain = str(name).removeprefix("paged|")
    is_exact = name is None or plain in ("eager", "sdpa", HYPER_DOT)
    is_replaceable = "flash" in plain or "flex" in plain
    if not is_exact and not is_replaceable and plain not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        logger.warning(
            f"hf_hyperattn: the checkpoint of {model} was patched on top of the attention function {plain[:80]!r}, "
            "which is not registered here; 'sdpa' runs in its place"
        )


def match_names(names: list[str], recorded: Sequence[str], base: PreTrainedModel) -> dict[str, str]:
    """Map the recorded names of attention layers to the names in this model.

    A bare model and a model with a head differ by a prefix. Layers of a part that this model lacks
    are left out.

    Raises:
        ValueError: This model has the part, but not the attention layer.
    """
    if set(recorded) <= set(names):
        return dict(zip(recorded, recorded, strict=True))
    known = _known_names(names, recorded, base)
    missing = [name for name in recorded if name not in known]
    if len(missing) < len(recorded) and not any(_has_stack(base, name) for name in missing):
        # They belong to a part that this model lacks. A T5 encoder lacks the decoder, for example.
        missing = []
    if missing:
        # Llama for question answering names its base model `transformer`. Transformers fails to
        # load such weights, too.
        renamed = any(name.partition(".")[2] == missing[0].partition(".")[2] for name in names)
        advice = ""
        if renamed:
            advice = "; save the bare model, model.base_model.save_pretrained(...), and load that"
        raise ValueError(
            f"hyperattn config names the host {missing[0][:80]!r}, which {type(base).__name__} does not have; "
            f"allowed: {', '.join(names[:3]) or 'none'}, ...{advice}"
        )
    return {name: known[name] for name in recorded if name in known}


def cut_to_depth(
    config: HyperAttnConfig, base: nn.Module, warn: bool = True
) -> HyperAttnConfig | None:
    """Return a saved config without attention layers beyond the model's last layer.

    Args:
        warn: Whether to log a warning that names the layers that are left out.

    Returns:
        The config, unchanged if nothing is beyond. None if no attention layer is left.
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
    """Return the names of modules or tensors that lie beyond the model's last layer."""
    modules = dict(base.named_modules())
    prefix = f"{getattr(base, 'base_model_prefix', '')}."
    return [name for name in names if is_beyond(name, modules, prefix)]


def is_beyond(name: str, modules: dict[str, nn.Module], prefix: str) -> bool:
    """Return whether a name belongs to a layer that is beyond the end of its list of layers.

    Args:
        name: Name of a module or tensor.
        modules: The model's modules by name.
        prefix: Prefix of the base model. The name may have it or lack it.
    """
    # A checkpoint of the bare model and one with a head differ by the prefix, so all forms are
    # tried.
    for form in (name, prefix + name, name.removeprefix(prefix)):
        for number in NUMBER.finditer(form):
            layers = modules.get(form[: number.start() - 1])
            if isinstance(layers, nn.ModuleList | nn.Sequential) and int(number[0]) >= len(layers):
                return True
    return False


def _known_names(
    names: list[str], recorded: Iterable[str], base: PreTrainedModel
) -> dict[str, str]:
    """Map recorded names to the model's names, with or without the prefix.

    The form (unchanged, with prefix, without prefix) that matches most recorded names wins.
    """
    prefix = base.base_model_prefix + "."
    forms = (
        {n: n for n in names},
        {prefix + n: n for n in names},
        {n.removeprefix(prefix): n for n in names if n.startswith(prefix)},
    )
    return max(forms, key=lambda form: len(form.keys() & set(recorded)))


def _has_stack(base: PreTrainedModel, name: str) -> bool:
    """Return whether the model has the list of layers, or the part, of a named attention layer."""
    stack = re.split(r"\.\d+(?:\.|$)", name)[0]
    prefix = base.base_model_prefix
    forms = {stack, stack.removeprefix(prefix + "."), f"{prefix}.{stack}"}
    return not forms.isdisjoint(name for name, _ in base.named_modules())


def resolve_overrides(
    config: HyperAttnConfig, selected: list[Selected], base: PreTrainedModel
) -> HyperAttnConfig:
    """Return the config with the names in `overrides` as this model has them.

    Overrides of attention layers that this model lacks are left out. `hosts` lists the selected
    layers.

    Raises:
        ValueError: An override names a layer that is not selected, and the config has no list of
            layers.
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
    """Raise for heads that a layer lacks, and for mechanisms that cross-attention cannot use."""
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
    """Return whether the tensor-parallel plan splits a projection of an attention layer.

    "colwise" gives every rank a part of the output features, that is, some of the heads.
    """
    given = getattr(getattr(model.config, "distributed_config", None), "tp_plan", None)
    plans = [given] if isinstance(given, dict) else []
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            plans += [
                getattr(part, "_tp_plan", None) or {},
                getattr(part.config, "base_model_tp_plan", None) or {},
            ]
    # Plans write layer numbers as "*", and may start at any module above the projection.
    place = re.sub(r"\b\d+\b", "*", host).split(".")
    cut = (name.split(".") for plan in plans for name, style in plan.items() if style == "colwise")
    return any(place[-count:] == name[:count] for name in cut for count in range(1, len(name)))


def check_ranks(model: PreTrainedModel, selected: list[Selected]) -> None:
    """Raise if tensor parallelism would split the heads of a patched layer unevenly."""
    ranks = ranks_of(model)
    for _, host in selected if ranks > 1 else ():
        if (host.heads % ranks or host.kv_heads % ranks) and is_cut(model, host.name):
            raise ValueError(
                f"{host.name} of {type(model).__name__} has {host.heads} query heads and {host.kv_heads} key heads, "
                f"and tensor parallelism cuts it into {ranks} ranks; allowed: a tp_size that divides both, FSDP2, or "
                "a patch without that layer"
            )


def attach_hypers(
    base: PreTrainedModel,
    config: HyperAttnConfig,
    selected: list[Selected],
    newly_routed: bool = False,
    weights_come_later: bool = False,
) -> None:
    """Build and attach every `Hyper`, and write the records into the configs.

    The caller undoes the changes if this fails.

    Args:
        weights_come_later: Whether the model is being built for loading. Transformers then
            initialises the tensors that the checkpoint lacks. Otherwise the added parameters have
            their starting values already.
    """
    # Everything that may fail for one layer runs before the first layer is changed.
    hypers = build_hypers(base, config, selected, newly_routed)
    if not weights_come_later:
        for hyper in hypers:
            mark_initialized(hyper)
    modules = [module for module, _ in selected]
    for module, hyper in zip(modules, hypers, strict=True):
        module.hyper = hyper
    # Some mechanisms need more than queries, keys and values: hidden states, the cache, a
    # hierarchy.
    note_hidden(zip(modules, hypers, strict=True))
    add_cache_hooks(zip(modules, hypers, strict=True))
    write_records(base)
    watch_first_calls(base)
    if any(get_mechanism(mechanism.mechanism).takes_hierarchy for mechanism in config.mechanisms):
        accept_hierarchy(base, modules)


def mark_initialized(module: nn.Module) -> None:
    """Keep Transformers from initialising the weights of a module again.

    `init_weights` visits all modules of a model, also when a finished model becomes part of another
    one.
    """
    for part in module.modules():
        vars(part)["_is_hf_initialized"] = True


def build_hypers(
    base: PreTrainedModel,
    config: HyperAttnConfig,
    selected: list[Selected],
    newly_routed: bool,
    may_be_empty: bool = False,
) -> list[Hyper]:
    """Return a new `Hyper` for each attention layer, on its device, without attaching any.

    Args:
        may_be_empty: As in `building_on`.
    """
    check_ranks(base, selected)
    # The compiler cannot look for a family's eager function later, so it is found now.
    find_eager(set(map(type, map(itemgetter(1), find_hosts(base)))))
    hypers = [new_hyper(config, host, base, module, may_be_empty) for module, host in selected]
    for (module, host), hyper in zip(selected, hypers, strict=True):
        check_forward(host.name, module, hyper)
    # One shared set, so that a warning appears once per model and not once per layer.
    warned: set[str] = set()
    for hyper in hypers:
        hyper.newly_routed = newly_routed
        for layer in hyper.children():
            cast(MechanismLayer, layer).warned = warned
    WATCH.watch_model(base)
    return hypers


def new_hyper(
    config: HyperAttnConfig,
    host: Host,
    base: PreTrainedModel,
    module: nn.Module,
    may_be_empty: bool = False,
) -> Hyper:
    """Return a new `Hyper` on the device of its attention layer, in the dtype of the model.

    If the model is offloaded, the device is the one that runs the layer. On the meta device, where
    a model is built for loading, the `Hyper` stays on meta.
    """
    device = device_of(module, base)
    dtype = base.dtype if base.dtype.is_floating_point else torch.float32
    with building_on(device.type == "meta", host.name, may_be_empty=may_be_empty):
        hyper = Hyper(config, host)
        for part in hyper.modules():
            # `Module.to` fails under FakeTensorMode, so every parameter is replaced by hand.
            for name, p in part._parameters.items():
                # DeepSpeed's `zero.Init` has already moved and partitioned the parameters it made.
                if p is not None and not hasattr(p, PARTITIONED):
                    target = p.device if p.is_meta else device
                    moved = p.detach().to(dtype=dtype, device=target)
                    part._parameters[name] = nn.Parameter(moved, p.requires_grad)
    return hyper.train(module.training)


def device_of(module: nn.Module, base: nn.Module) -> torch.device:
    """Return the device that runs a module.

    It is the device of the module's weights, or of the model if the module has none. For offloaded
    weights it is the device that offloading copies them to.
    """
    weights = [p for p in module.parameters() if p.is_floating_point()] or [
        *module.parameters(),
        *base.parameters(),
    ]
    device = weights[0].device if weights else torch.device("cpu")
    if device.type == "meta":
        # Accelerate's offloading hooks know the device of the computation.
        for part in module.modules():
            execution = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
            if execution is not None:
                return torch.device(execution)
    return device
