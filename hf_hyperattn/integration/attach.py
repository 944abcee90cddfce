"""Putting a `hyper` into every chosen host: for a patch, and for a patched checkpoint that is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ..choice import head_numbers
from ..config import HyperAttnConfig
from ..mechanisms.base import Host
from ..registry import get_mechanism
from .families import note_all
from .hidden import add_hooks
from .hierarchical import accept_hierarchy
from .hosts import find_hosts, host_facts, layer_indices
from .hyper import Hyper
from .records import all_configs, parts, write_records
from .stock import STOCK, find_eager, marked, run_beneath, stock_name

#: A module and what is known of it.
Found = tuple[nn.Module, Host]


def all_hosts(base: PreTrainedModel) -> list[tuple[str, nn.Module, Host]]:
    """Every host of a model: its stack, the module, and its facts."""
    modules = list(find_hosts(base))
    stacks = layer_indices([name for name, _ in modules])
    return [(s, m, host_facts(n, m, i)) for (n, m), (s, i) in zip(modules, stacks, strict=True)]


def bring_back(model: PreTrainedModel, config: HyperAttnConfig, newly_routed: bool = False) -> None:
    """Patch a model as its config says, before its weights are loaded.

    Raises:
        ValueError: the config names hosts that the model does not have.
    """
    hosts = [(module, host) for _, module, host in all_hosts(model)]
    meant = set(match_names([host.name for _, host in hosts], config.hosts, model).values())
    chosen = [found for found in hosts if found[1].name in meant]
    check_combination(config, chosen)
    attach(model, settle_overrides(config, chosen, model), chosen, newly_routed)


def settle_stock(model: PreTrainedModel) -> None:
    """An implementation that the loader asked for runs beneath. One from before that this machine or family does not
    have becomes what Transformers would take.

    Raises:
        ValueError: what was asked for cannot run beneath a mechanism.
    """
    for config in filter(marked, all_configs(model)):
        run_beneath(config)
    for part in parts(model):
        if marked(part.config):
            try:
                name = part.get_correct_attn_implementation(stock_name(part.config), is_init_check=True)
            except (ValueError, ImportError):
                name = part.get_correct_attn_implementation(None, is_init_check=True)
            setattr(part.config, STOCK, name)


def match_names(names: list[str], wanted: Sequence[str], base: PreTrainedModel) -> dict[str, str]:
    """The names that a saved list of hosts means, by what the list has; a bare model and one with a head differ by a
    prefix. Hosts of a part that this model lacks are left out.
    """
    known = _known_names(names, wanted, base)
    missing = [w for w in wanted if w not in known]
    if len(missing) < len(wanted) and not any(_has_stack(base, w) for w in missing):
        missing = []  # they belong to a part that this model lacks, as a T5 encoder lacks the decoder
    if missing:
        # Llama's question answering calls its base `transformer`; Transformers does not load the weights either
        renamed = any(name.partition(".")[2] == missing[0].partition(".")[2] for name in names)
        advice = (
            "; save the bare model, model.base_model.save_pretrained(...), and load that" if renamed else ""
        )
        raise ValueError(
            f"hyperattn config names the host {missing[0][:80]!r}, which {type(base).__name__} does not have; "
            f"allowed: {', '.join(names[:3]) or 'none'}, ...{advice}"
        )
    return {w: known[w] for w in wanted if w in known}


def _known_names(names: list[str], wanted: Iterable[str], base: PreTrainedModel) -> dict[str, str]:
    """The model's names by the form in which `wanted` has most of them: as they are, with the prefix, or without."""
    prefix = base.base_model_prefix + "."
    forms = (
        {n: n for n in names},
        {prefix + n: n for n in names},
        {n.removeprefix(prefix): n for n in names if n.startswith(prefix)},
    )
    return max(forms, key=lambda form: sum(w in form for w in wanted))


def settle_overrides(config: HyperAttnConfig, found: list[Found], base: PreTrainedModel) -> HyperAttnConfig:
    """The config with the names in `overrides` as this model has them, and all that belongs to its hosts alone.

    Args:
        found: the hosts that are patched.

    Raises:
        ValueError: an override is for a host that is not among them, though the config does not list it as one.
    """
    if not config.overrides:
        return config
    names = [host.name for _, host in found]
    known = _known_names(names, config.hosts or config.overrides, base)
    strange = next((name for name in config.overrides if name not in known), None)
    if strange is not None and config.hosts is None:
        raise ValueError(
            f"overrides names the host {strange[:80]!r}, which is not patched in this {type(base).__name__}; "
            f"allowed: {', '.join(names[:3])}, ..."
        )
    own = {known[name]: configs for name, configs in config.overrides.items() if name in known}
    return replace(config, hosts=tuple(names), overrides=own)


def _has_stack(base: PreTrainedModel, name: str) -> bool:
    """Whether the model has the list of layers, or the part, in which a host of that name would be."""
    stack = re.split(r"\.\d+(?:\.|$)", name)[0]
    forms = (stack, stack.removeprefix(base.base_model_prefix + "."), f"{base.base_model_prefix}.{stack}")
    return any(form in (n for n, _ in base.named_modules()) for form in forms)


def check_combination(config: HyperAttnConfig, found: list[Found]) -> None:
    """Refuse heads that a host lacks, and mechanisms that cross-attention has no meaning for."""
    for _, host in found:
        head_numbers(config.heads, host.heads, host.name)
        for mechanism in config.mechanisms:
            if host.is_cross and not get_mechanism(mechanism.mechanism).cross_attention:
                raise ValueError(
                    f"{mechanism.mechanism} has no meaning for cross-attention ({host.name}); allowed: "
                    "include_cross_attention=False"
                )


def refuse_tensor_parallel(model: PreTrainedModel, mechanisms: Iterable[str]) -> None:
    """Raise where ranks share the heads of a model that is patched, or loaded patched."""
    ranks = getattr(getattr(model.config, "distributed_config", None), "tp_size", None)
    ranks = ranks or getattr(model, "_tp_size", None) or 1
    if ranks > 1:
        raise ValueError(
            f"{type(model).__name__} is cut into {ranks} ranks by tensor parallelism, which a patch with "
            f"{' and '.join(mechanisms)} does not follow; allowed: DDP, FSDP2 or device_map, or the mechanism by name, "
            "attn_implementation=..."
        )


def attach(
    base: PreTrainedModel, config: HyperAttnConfig, chosen: list[Found], newly_routed: bool = False
) -> None:
    """Build every `hyper`, then put them all in place and write the configs; the caller undoes it where it fails."""
    refuse_tensor_parallel(base, [mechanism.mechanism for mechanism in config.mechanisms])
    note_all(base)
    find_eager(type(module) for _, module in find_hosts(base))
    built = [placed(Hyper(config, host), base, module) for module, host in chosen]
    warned: set[str] = set()
    for hyper, (module, _) in zip(built, chosen, strict=True):
        for layer in hyper.layers():
            layer.warned = warned
        hyper.newly_routed = newly_routed
        module.hyper = hyper
        add_hooks(module, hyper.layers())
    write_records(base)
    if any(get_mechanism(mechanism.mechanism).stage == "structure" for mechanism in config.mechanisms):
        accept_hierarchy(base, [module for module, _ in chosen])


def placed(hyper: Hyper, base: PreTrainedModel, module: nn.Module) -> Hyper:
    """A new hyper where its host is; on the meta device, where a model is built to be loaded, it stays there."""
    device, dtype = placement(base, module)
    for part in hyper.modules():
        for name, p in part._parameters.items():  # `Module.to` fails under FakeTensorMode
            if p is not None:
                moved = p.detach().to(dtype=dtype, device=p.device if p.is_meta else device)
                part._parameters[name] = nn.Parameter(moved, p.requires_grad)
    return hyper.train(module.training)


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
