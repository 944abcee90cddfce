"""A PEFT type of our own: one adapter with LoRA matrices and the parameters of mechanisms.

`HyperLoraConfig` is a `LoraConfig` that contains a `HyperAttnConfig`. Putting it on a model adds
LoRA's matrices, then a `HyperAdapter` at every patched attention layer. The active adapter decides
which layers are patched, what the configs record, and which hooks are installed.

On disk `peft_type` is "HF_HYPERATTN", a type that PEFT without this package rejects by name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any, cast

import peft.utils.hotswap
from peft import LoraConfig, LoraModel, PeftType
from peft.tuners.lora import LoraLayer
from peft.utils import register_peft_method
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin
from transformers.pytorch_utils import Conv1D

import model_patches

from ...config import HyperAttnConfig, MechanismConfig, Mode
from ...config.choice import Choice
from ...config.fields import refuse
from ...config.registry import get_mechanism
from ...mechanisms.base import MechanismLayer
from ..attention.first_call import watch_first_calls
from ..attention.hidden import note_hidden, stop_noting
from ..attention.hyper import Hyper, patched_hosts, unwrap_hyper
from ..attention.running_call import add_cache_hooks, remove_cache_hooks
from ..parallel.offloaded import without_weights
from ..patching.attach import Selected, build_hypers, cut_to_depth, mark_initialized
from ..patching.checkpoint_config import RECORD, write_records
from ..patching.hierarchical import accept_hierarchy, ignore_hierarchy, resolve_names
from ..patching.modes import building_on
from ..patching.patch import base_model, gather_config, resolve_patch, rollback_on_error
from ..patching.wrapping import wrap
from .adapter_config import hyper_wrappers, normalize_record
from .hyper_adapter import HyperAdapter, base_hyper, hyper_adapters

logger = logging.getLogger("hf_hyperattn")

NAME = "HF_HYPERATTN"
#: Combinations that `add_weighted_adapter` allows; the others prune LoRA's matrices.
COMBINATIONS = ("svd", "linear", "cat")
#: Defaults of `layers`, `heads`, `mode` and `include_cross_attention` in `HyperLoraConfig`.
DEFAULTS = (None, None, "blend", False)


# Missing upstream: a way to add a member to `PeftType`. `register_peft_method` only takes names
# that the enum already has.
def new_peft_type(name: str) -> PeftType:
    """Add a member to PEFT's enum of adapter types."""
    member: Any = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    member._sort_order_ = len(PeftType.__members__)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
    # `EnumType.__setattr__` refuses to assign to a member.
    type.__setattr__(PeftType, name, member)
    return member


@dataclass
class HyperLoraConfig(LoraConfig):
    """A PEFT config for LoRA and all that a patch adds, in one adapter.

    The adapter brings its patch along. Put on an unpatched base model, by any loader, it patches
    that model. On a patched model (leave `mechanisms` out) it starts from the parameters there.

    Args:
        mechanisms, layers, heads, mode, include_cross_attention: As in `patch_model`.
        r: Rank of LoRA's matrices. With 0 only the mechanisms are trained and saved, a few KB.
        target_modules: Where LoRA's matrices go, as in PEFT. Default: the linear layers inside
            patched attention.
        hyperattn: A `HyperAttnConfig` or its dict, in place of `mechanisms` and the arguments that
            follow it.

    Further arguments are the same as in `peft.LoraConfig`: `lora_alpha`, `use_dora`,
    `modules_to_save`, `task_type`, ...

    Raises:
        ValueError: `mechanisms` and `hyperattn` are both given, `patch_model` would reject their
            values, or `layer_replication` is set.

    Example:
        config = ha.HyperLoraConfig(mechanisms=[ha.ConeConfig()], r=8, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    """

    hyperattn: Any = field(
        default=None, metadata={"help": "what is done to attention, a HyperAttnConfig"}
    )
    mechanisms: InitVar[Sequence[MechanismConfig]] = ()
    layers: InitVar[Choice] = None
    heads: InitVar[Choice] = None
    mode: InitVar[Mode] = "blend"
    include_cross_attention: InitVar[bool] = False

    def __post_init__(self, mechanisms, layers, heads, mode, include_cross_attention):
        super().__post_init__()
        self.peft_type = getattr(PeftType, NAME)
        if self.layer_replication:
            raise ValueError(
                f"HyperLoraConfig got layer_replication={self.layer_replication}, which makes layers anew that the "
                "patch would not be in; allowed: None, and a model that has these layers already"
            )
        options = (layers, heads, mode, include_cross_attention)
        if mechanisms or options != DEFAULTS:
            if self.hyperattn is not None:
                raise ValueError(
                    "HyperLoraConfig got hyperattn and mechanisms, layers, heads or mode; give one of both"
                )
            self.hyperattn = gather_config(mechanisms, *options)
        elif self.hyperattn is not None and not isinstance(self.hyperattn, HyperAttnConfig):
            self.hyperattn = HyperAttnConfig.from_dict(self.hyperattn)
        # A `HyperAdapter` holds "hyper" already. PEFT would wrap it a second time.
        others = [name for name in self.modules_to_save or () if name.rpartition(".")[2] != "hyper"]
        self.modules_to_save = others or None
        self._set_targets()

    def _set_targets(self) -> None:
        """Set rank 0 and PEFT's placeholder for targets if there are no LoRA matrices."""
        is_empty = self.target_modules is not None and not self.target_modules
        no_targets = is_empty and not self.target_parameters
        has_targets = self.target_modules not in (None, DUMMY_TARGET_MODULES) and not no_targets
        if self.r == 0 and has_targets:
            raise ValueError(
                "HyperLoraConfig.target_modules says nothing with r=0; leave it out, or give r"
            )
        # PEFT raises an error for an adapter that matches no module, except with this placeholder.
        if self.r == 0 or no_targets:
            self.r, self.target_modules = 0, DUMMY_TARGET_MODULES

    def to_dict(self) -> dict:
        """Return plain JSON values, as in adapter_config.json."""
        hyperattn = None if self.hyperattn is None else self.hyperattn.to_dict()
        return super().to_dict() | {"hyperattn": hyperattn}


def check_lora_ranks(base: nn.Module, config: HyperLoraConfig) -> None:
    """Raise for ranks above the widest weight, before matrices of that size exist.

    An adapter_config.json may come from a stranger, and one number could fill the memory.

    Raises:
        ValueError: There is such a rank in `r` or `rank_pattern`.
    """
    widest = max((size for p in base.parameters() for size in p.shape), default=0)
    ranks = {"r": config.r}
    for name, rank in (config.rank_pattern or {}).items():
        ranks[f"rank_pattern[{name!r}]"] = rank
    for name, rank in ranks.items():
        if isinstance(rank, int) and rank > widest:
            refuse(
                f"HyperLoraConfig.{name}",
                rank,
                f"up to {widest}, the widest weight of {type(base).__name__}",
            )


# Missing upstream: PEFT's tuners have no hook for parameters besides their own matrices. The
# overridden methods with an underscore are private; `wrapping.RELIED_ON` checks their signatures.
class HyperLoraModel(LoraModel):
    """`LoraModel` with a `HyperAdapter` at every patched attention layer."""

    tuner_layer_cls: Any = (LoraLayer, HyperAdapter)
    peft_config: Any

    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        """Put an adapter on the model: LoRA's matrices first, then the added parameters."""
        base = base_model(model)
        ordinary = building_on(without_weights([base]), type(base).__name__, may_be_empty=True)
        with ordinary, rollback_on_error(base), following_adapters(base):
            # A copy: the caller may put the same config on another model.
            config = copy.copy(self.peft_config[adapter_name])
            check_lora_ranks(base, config)
            config.hyperattn, selected, newly_routed = resolve_adapter(base, config)
            if config.target_modules is None and not config.target_parameters:
                hosts = [(host.name, module) for module, host in selected]
                config.target_modules = set(find_linear_targets(base, hosts))
            self.peft_config[adapter_name] = config
            super().inject_adapter(model, adapter_name, *args, **kwargs)
            # After LoRA: if a tuner layer existed before, PEFT would not freeze the base.
            trained = adapter_name in self.active_adapters and not config.inference_mode
            hypers = build_hypers(base, config.hyperattn, selected, newly_routed, may_be_empty=True)
            for hyper, (module, _) in zip(hypers, selected, strict=True):
                # On a patched base the adapter starts from what the patch has learned.
                if (patched := base_hyper(module)) is not None:
                    hyper = copy.deepcopy(patched)
                if not isinstance(module._modules.get("hyper"), HyperAdapter):
                    there: Any = module._modules.pop("hyper", None)
                    module.hyper = HyperAdapter(there and there.requires_grad_(False))
                mark_initialized(hyper)
                adapter = cast(HyperAdapter, module.hyper)
                adapter.lora_hyper[adapter_name] = hyper.requires_grad_(trained)
            for _, _, adapter in hyper_adapters(base):
                adapter._active_adapter = list(self.active_adapters)

    def set_adapter(self, adapter_name, inference_mode: bool = False) -> None:
        """Activate adapters. At most one of them may patch each attention layer."""
        check_single_patch(self.model, adapter_name, "set_adapter")
        with following_adapters(self.model):
            super().set_adapter(adapter_name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter and activate another one."""
        with following_adapters(self.model):
            active = [name for name in self.active_adapters if name != adapter_name]
            super().delete_adapter(adapter_name)
            self.active_adapter = active or sorted(self.peft_config)[:1]
            # PEFT lets each layer choose the next active adapter among its own.
            if self.active_adapter:
                super().set_adapter(self.active_adapter)

    def merge_adapter(self, adapter_names=None, safe_merge: bool = False) -> None:
        """Merge adapters, if the patch of the active adapters then stays the same."""
        names = adapter_names or self.active_adapters
        check_single_patch(self.model, names, "merge_adapter", safe_merge)
        for _, _, adapter in hyper_adapters(self.model):
            merged = adapter.select_holding(names, "merge_adapter")
            if merged != adapter.select_holding(self.active_adapters, "merge_adapter"):
                raise ValueError(
                    f"merge_adapter({list(names)}) would leave the patch of {self.active_adapters} in place; first "
                    "call set_adapter with the adapters to merge"
                )
        super().merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self, merge=True, progressbar=False, safe_merge=False, adapter_names=None
    ):
        if merge:
            names = adapter_names or self.active_adapters
            check_single_patch(self.model, names, "merge_and_unload", safe_merge)
        with following_adapters(self.model):
            result = super()._unload_and_optionally_merge(
                merge, progressbar, safe_merge, adapter_names
            )
            # PEFT trains adapters of half-precision models in float32.
            if self.model.dtype.is_floating_point:
                for _, host in patched_hosts(self.model):
                    host.hyper.to(self.model.dtype)
        return result

    def _replace_module(self, parent, child_name, new_module, child):
        # PEFT's method moves the new module to the device of a linear layer's weight.
        if not isinstance(child, HyperAdapter):
            super()._replace_module(parent, child_name, new_module, child)
        elif new_module is None:
            delattr(parent, child_name)
        else:
            setattr(parent, child_name, new_module)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args, **kwargs):
        names, beams = kwargs.get("adapter_names"), kwargs.get("num_beams") or 1
        if names is None:
            with super()._enable_peft_forward_hooks(*args, **kwargs):
                yield
            return
        # PEFT rejects names of adapters that no LoRA layer has.
        kwargs["adapter_names"] = [self._name_for_lora(name) for name in names]
        adapters = [(host, adapter) for _, host, adapter in hyper_adapters(self.model)]
        handles, error = [], None
        try:
            with super()._enable_peft_forward_hooks(*args, **kwargs):
                layers = [(host, adapter.layers(names)) for host, adapter in adapters]
                connect_hooks(self.model, layers)
                handles += self._pass_names([adapter for _, adapter in adapters], names, beams)
                # PEFT removes its own hooks only if no exception passes through its generator.
                try:
                    yield
                except BaseException as raised:
                    error = raised
            if error is not None:
                raise error
        finally:
            for handle in handles:
                handle.remove()
            connect_hooks(self.model, [(host, adapter.layers()) for host, adapter in adapters])
            resolve_names(self.model)

    def _name_for_lora(self, name: str) -> str:
        """Return the name under which PEFT's LoRA layers compute the rows of an adapter."""
        has_lora = name not in self.peft_config or self.peft_config[name].r
        return name if has_lora else "__base__"

    def _pass_names(self, adapters: list[HyperAdapter], names: Sequence[str], beams: int) -> list:
        """Pass the adapter of each row to `HyperAdapter`s; return handles of hooks.

        Args:
            adapters: The modules that are called.
            names: One adapter for each row of the batch.
            beams: Beams per row. Only a decoder sees a batch with repeated rows.
        """
        is_encoder_decoder = getattr(self.model.config, "is_encoder_decoder", False)
        inside = set(self.model.get_encoder().modules()) if is_encoder_decoder else set()
        repeated = [name for name in names for _ in range(beams)]
        handles = []
        for adapter in adapters:
            hook = partial(add_adapter_names, rows=names if adapter in inside else repeated)
            handles.append(adapter.register_forward_pre_hook(hook, with_kwargs=True))
        return handles

    def add_weighted_adapter(
        self, adapters, weights, adapter_name, combination_type: Any = "svd", *args, **options
    ) -> None:
        """Combine adapters as PEFT does.

        The added parameters become the weighted sum of what the adapters have learned.
        """
        configs = [self.peft_config[name] for name in adapters if name in self.peft_config]
        # PEFT raises its own errors for names that exist already or do not exist.
        if adapter_name in self.peft_config or len(configs) < len(adapters):
            return super().add_weighted_adapter(
                adapters, weights, adapter_name, combination_type, *args, **options
            )
        prefix = self.model.base_model_prefix
        first = normalize_record(configs[0].hyperattn, prefix)
        differ = any(normalize_record(config.hyperattn, prefix) != first for config in configs)
        some_have_lora = len({config.r == 0 for config in configs}) > 1
        if differ or some_have_lora or combination_type not in COMBINATIONS:
            raise ValueError(
                f"add_weighted_adapter got the adapters {list(adapters)} and combination_type={combination_type!r}; "
                "allowed: adapters with the same mechanisms in the same layers, all with LoRA or all without, and "
                f"{', '.join(COMBINATIONS)}"
            )
        if configs[0].r:
            super().add_weighted_adapter(
                adapters, weights, adapter_name, combination_type, *args, **options
            )
        else:
            self.peft_config[adapter_name] = replace(configs[0])
            self.inject_adapter(self.model, adapter_name)
        for _, _, adapter in hyper_adapters(self.model):
            adapter.combine_adapters(adapters, weights, adapter_name)

    @classmethod
    def _get_adapter_state_dict(
        cls, model, config, adapter_name, state_dict, unwanted_adapter_names
    ):
        tensors = super()._get_adapter_state_dict(
            model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        mechanisms = {mechanism.mechanism for mechanism in config.hyperattn.mechanisms}
        if not set(unwanted_adapter_names) & mechanisms:
            return tensors
        # Another adapter has the name of a mechanism, such as "cone": PEFT took `.cone.` out too.
        own = f".lora_hyper.{adapter_name}."
        return tensors | {
            name: tensor for name, tensor in model.state_dict().items() if own in name
        }

    @classmethod
    def _convert_state_dict_for_initial_model(cls, model, config, where, *args):
        # PEFT does this for `PeftType.LORA` only; for others it sets `init_weights`.
        config.init_lora_weights = True
        config.save_pretrained(where)
        return super()._convert_state_dict_for_initial_model(model, config, where, *args)

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model, config, adapter_name, state_dict):
        tensors = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, state_dict
        )
        own = {name for name in model.state_dict() if f".lora_hyper.{adapter_name}." in name}
        # Models with native adapters have no prefix, PEFT's models have this one.
        prefix = "base_model.model."
        given = {form for name in tensors for form in (name, name.removeprefix(prefix))}
        missing = sorted(own - given)
        if missing:
            logger.warning(
                f"the tensors for adapter {adapter_name!r} lack {len(missing)} added parameters, such as "
                f"{missing[0]!r}, which stay as they are; take them with get_peft_model_state_dict from a model that "
                "has this adapter"
            )
        return tensors

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # Only the first one: a mechanism below may have the name of the adapter.
        if f".lora_hyper.{adapter_name}." in key:
            return key.replace(f".lora_hyper.{adapter_name}.", ".lora_hyper.", 1)
        return super()._remove_adapter_name_from_key(key, adapter_name)


def add_adapter_names(module, args: tuple, keywords: dict, *, rows: Sequence[str]) -> tuple:
    """Add `adapter_names` to a call; a forward pre-hook of a `HyperAdapter`."""
    return args, {**keywords, "adapter_names": rows}


if NAME not in PeftType.__members__:
    new_peft_type(NAME)
    register_peft_method(
        name=NAME.lower(), config_cls=HyperLoraConfig, model_cls=HyperLoraModel, prefix="lora_"
    )
    # Missing upstream: `register_peft_method` does not say which config keys a hot-swap compares.
    checked = peft.utils.hotswap.CONFIG_KEYS_TO_CHECK
    checked[getattr(PeftType, NAME)] = [*checked[PeftType.LORA], "hyperattn"]


def resolve_adapter(
    base: PreTrainedModel, config: HyperLoraConfig
) -> tuple[HyperAttnConfig, list[Selected], bool]:
    """Return what an adapter does to a model.

    Args:
        base: The model, patched or not.
        config: The adapter's config. Without mechanisms the adapter adopts the model's patch.

    Returns:
        The patch with the names of its attention layers, these layers, and whether their family was
        routed for an adapter.

    Raises:
        ValueError: Neither the config nor a patch of the model names a mechanism, or both do and
            differ.
    """
    for path, _ in hyper_wrappers(base):
        raise ValueError(
            f"{path} is in an adapter with modules_to_save=['hyper'], and an adapter with a patch of its "
            "own cannot be added to it; put the two adapters on two models"
        )
    record = None
    if any(base_hyper(host) is not None for _, host in patched_hosts(base)):
        # Written again, because a part of the model may have been patched by itself.
        write_records(base)
        record = HyperAttnConfig.from_dict(getattr(base.config, RECORD))
    wanted = cut_to_depth(config.hyperattn, base) if config.hyperattn else record
    if wanted is None and config.hyperattn:
        raise ValueError(
            f"{type(base).__name__} has none of the layers that this adapter patches; load a deeper base"
        )
    if wanted is None:
        raise ValueError(
            f"HyperLoraConfig names no mechanism, and {type(base).__name__} is not patched; pass one, such as "
            "mechanisms=[ConeConfig()]"
        )
    wanted, selected, newly_routed = resolve_patch(base, wanted)
    wanted = replace(wanted, hosts=tuple(host.name for _, host in selected))
    prefix = base.base_model_prefix
    if record is not None and normalize_record(record, prefix) != normalize_record(wanted, prefix):
        raise ValueError(
            f"{type(base).__name__} is patched otherwise than this adapter asks for; leave mechanisms out to "
            "adapt the present patch, or call unpatch_model(model) first"
        )
    # An earlier adapter may have routed the family: the last one to leave has to undo it.
    newly_routed = newly_routed or any(h.newly_routed for h in hypers_of_adapters(base))
    return wanted, selected, newly_routed


def find_linear_targets(base: PreTrainedModel, hosts: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the linear layers in attention layers, in the short form for PEFT.

    Args:
        base: The model.
        hosts: Names and modules of the attention layers.

    Returns:
        Endings of names, such as "self_attn.q_proj". A layer whose ending another module shares
        has its full name, "layers.20.self_attn.q_proj".

    Raises:
        ValueError: There are no linear layers.
    """
    layers = [f"{host}.{name}" for host, module in hosts for name in find_linear_layers(module)]
    if not layers:
        raise ValueError(
            f"the patched hosts of {type(base).__name__} hold no linear layers; pass target_modules=[...], or r=0"
        )
    others = sorted({name for name, _ in base.named_modules()} - set(layers))
    targets = set()
    for name in layers:
        short = ".".join(name.split(".")[-2:])
        ambiguous = any(n == short or n.endswith("." + short) for n in others)
        # Without the prefix, so that the name also matches in a model with another head.
        targets.add(name.removeprefix(base.base_model_prefix + ".") if ambiguous else short)
    return sorted(targets)


def find_linear_layers(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the names of the linear layers in a module, except those inside `hyper`.

    Layers that already carry an adapter count, the matrices of the adapter do not.

    Args:
        module: The module to search.
        path: Its name, with a final dot, for names below it.
    """
    for name, child in module.named_children():
        layer: Any = child
        layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        if isinstance(layer, nn.Linear | Conv1D):
            yield path + name
        elif layer is child and name != "hyper":
            yield from find_linear_layers(child, f"{path}{name}.")


def hypers_of_adapters(model: nn.Module) -> Iterator[Hyper]:
    """Yield every `Hyper` that belongs to an adapter."""
    for _, _, adapter in hyper_adapters(model):
        yield from adapter.lora_hyper.values()


def check_single_patch(model: nn.Module, names, what: str, finite: bool = False) -> None:
    """Raise if two adapters patch the same attention layer.

    Args:
        model: The base model.
        names: Name of one adapter, or a list of names.
        what: The operation, for the error.
        finite: Whether added parameters must also be finite numbers.

    Raises:
        ValueError: Two adapters patch one attention layer, or a number is not finite.
    """
    for path, _, adapter in hyper_adapters(model):
        for name in adapter.select_holding([names] if isinstance(names, str) else names, what):
            parameters = adapter.lora_hyper[name].parameters()
            if finite and not all(p.isfinite().all() for p in parameters):
                raise ValueError(
                    f"{path}.hyper of adapter {name!r} has numbers that are not finite; train it anew, or merge "
                    "without safe_merge"
                )


@contextmanager
def following_adapters(base: PreTrainedModel) -> Iterator[None]:
    """Adapt records, hooks and signature of a model to its active adapter afterwards."""
    # Noted before the block, which may remove the last adapter.
    hosts = {id(host): host for _, host, _ in hyper_adapters(base)}
    routed = any(hyper.newly_routed for hyper in hypers_of_adapters(base))
    yield
    adapters = list(hyper_adapters(base))
    hosts |= {id(host): host for _, host, _ in adapters}
    if not hosts:
        return
    # Remove adapter layers without an adapter: the last one was deleted.
    for _, host, adapter in adapters:
        if not adapter.lora_hyper:
            del host.hyper
            if adapter.base_layer is not None:
                host.hyper = adapter.base_layer
    patched = {id(host): host for _, host in patched_hosts(base)}
    layers = []
    for key, host in hosts.items():
        layers.append((host, unwrap_hyper(host.hyper).layers() if key in patched else []))
    connect_hooks(base, layers)
    write_records(base)
    # Parts that run a mechanism with a hierarchy by name keep their `hierarchy=` argument.
    resolve_names(base)
    watch_first_calls(base)
    if routed and not patched and not any(hypers_of_adapters(base)):
        model_patches.unserve(base)


def connect_hooks(
    base: PreTrainedModel, hosts: list[tuple[nn.Module, list[MechanismLayer]]]
) -> None:
    """Install exactly the hooks and arguments that the layers of mechanisms need.

    Args:
        base: The model, whose `forward` accepts `hierarchy=` only if a layer reads it.
        hosts: Attention layers with the layers of mechanisms that run there.
    """
    structured = []
    for host, layers in hosts:
        # Remove first: the layers that ran before may have needed other hooks.
        stop_noting(host)
        note_hidden([(host, nn.ModuleList(layers))])
        remove_cache_hooks(host)
        if any(get_mechanism(layer.config.mechanism).takes_hierarchy for layer in layers):
            structured.append(host)
    add_cache_hooks([(host, nn.ModuleList(layers)) for host, layers in hosts])
    if structured:
        accept_hierarchy(base, structured)
    else:
        ignore_hierarchy(base)


# Transformers' own methods for adapters. Missing upstream: a callback for "the active adapter
# changed". Configs and hooks must follow it.


@wrap("set_adapter", PeftAdapterMixin)
def _set_natively(original, self, adapter_name):
    """Activate an adapter on a Transformers model without PEFT's wrapper."""
    check_single_patch(self, adapter_name, "set_adapter")
    with following_adapters(self):
        return original(self, adapter_name)


@wrap("delete_adapter", PeftAdapterMixin)
def _delete_natively(original, self, adapter_names):
    """Delete adapters of a Transformers model without PEFT's wrapper."""
    if next(hyper_adapters(self), None) is None:
        return original(self, adapter_names)
    with following_adapters(self):
        active = self.active_adapters()
        original(self, adapter_names)
        there = getattr(self, "peft_config", {})
        # One choice for all layers: PEFT's layers would each choose by themselves.
        active = [name for name in active if name in there] or sorted(there)[:1]
        if active:
            self.set_adapter(active)
