"""A PEFT type of our own: LoRA and the parameters of mechanisms in one adapter, which patches its base by itself.

`HyperLoraConfig` is a `LoraConfig` with a `HyperAttnConfig` in it. Putting it on a model adds LoRA's matrices, then a
`HyperAdapter` at every host. Which hosts are patched, what the configs say, and which hooks there are follows the
adapter that is active. On disk `peft_type` is "HF_HYPERATTN", a type that PEFT without this package refuses by name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
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

from ..config import HyperAttnConfig, MechanismConfig, Mode
from ..fields import refuse
from ..mechanisms.base import MechanismLayer
from ..registry import get_mechanism
from ..selection import Choice
from .adapter_config import hyper_wrappers, normalize_record
from .attach import Selected, build_hypers, cut_to_depth, mark_initialized
from .cache_of_call import add_cache_hooks, remove_cache_hooks
from .checkpoint_config import RECORD, inner, patched_hosts, write_records
from .first_call import watch_first_calls
from .hidden import note_hidden, stop_noting
from .hierarchical import accept_hierarchy, ignore_hierarchy, resolve_names
from .hyper import Hyper
from .hyper_adapter import HyperAdapter, base_hyper, hyper_adapters
from .modes import building_on
from .offloaded import without_weights
from .patching import base_model, gather, resolve, rollback_on_error
from .wrapping import wrap

logger = logging.getLogger("hf_hyperattn")

NAME = "HF_HYPERATTN"
#: How `add_weighted_adapter` may combine; the others prune LoRA's matrices.
COMBINATIONS = ("svd", "linear", "cat")


def new_peft_type(name: str) -> PeftType:
    """A further member of PEFT's enum, which is closed to `register_peft_method`."""
    member: Any = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    member._sort_order_ = len(PeftType.__members__)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)
    return member


@dataclass
class HyperLoraConfig(LoraConfig):
    """A PEFT config that patches a model and adapts it: LoRA, and beside it all that the patch adds, in one adapter.

    The adapter brings its patch along: put on a stock base, by whichever loader, it patches that. On a model that is
    patched already (leave `mechanisms` out) it starts from the parameters that are there.

    Args:
        mechanisms, layers, heads, mode, include_cross_attention: as in `patch_model`.
        r: rank of LoRA's matrices; 0 trains and saves the mechanisms alone, a few KB.
        target_modules: where LoRA's matrices go, as PEFT has it; None: the linear layers inside patched attention.
        hyperattn: the same as a `HyperAttnConfig` or its dict, which `mechanisms` and the rest are short for.

    All else is `peft.LoraConfig`'s: `lora_alpha`, `use_dora`, `modules_to_save`, `task_type`, ...

    Raises:
        ValueError: `mechanisms` and `hyperattn` are both given, what they say is refused by `patch_model`, or
            `layer_replication` is set.
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
        if mechanisms or (layers, heads, mode, include_cross_attention) != (
            None,
            None,
            "blend",
            False,
        ):
            if self.hyperattn is not None:
                raise ValueError(
                    "HyperLoraConfig got hyperattn and mechanisms, layers, heads or mode; give one of both"
                )
            self.hyperattn = gather(mechanisms, layers, heads, mode, include_cross_attention)
        elif self.hyperattn is not None and not isinstance(self.hyperattn, HyperAttnConfig):
            self.hyperattn = HyperAttnConfig.from_dict(self.hyperattn)
        others = [name for name in self.modules_to_save or () if name.rpartition(".")[2] != "hyper"]
        self.modules_to_save = others or None
        no_targets = (
            self.target_modules is not None
            and not self.target_modules
            and not self.target_parameters
        )
        if (
            self.r == 0
            and self.target_modules not in (None, DUMMY_TARGET_MODULES)
            and not no_targets
        ):
            raise ValueError(
                "HyperLoraConfig.target_modules says nothing with r=0; leave it out, or give r"
            )
        if self.r == 0 or no_targets:
            self.r, self.target_modules = 0, DUMMY_TARGET_MODULES

    def to_dict(self) -> dict:
        """Plain JSON values, as in adapter_config.json."""
        hyperattn = None if self.hyperattn is None else self.hyperattn.to_dict()
        return super().to_dict() | {"hyperattn": hyperattn}


def check_ranks(base: nn.Module, config: HyperLoraConfig) -> None:
    """Refuse ranks above the widest weight of the base, before matrices of that size are made.

    Raises:
        ValueError: such a rank, from `r` or `rank_pattern`.
    """
    widest = max((size for p in base.parameters() for size in p.shape), default=0)
    ranks = [
        ("r", config.r),
        *((f"rank_pattern[{name!r}]", rank) for name, rank in (config.rank_pattern or {}).items()),
    ]
    for name, rank in ranks:
        if isinstance(rank, int) and rank > widest:
            refuse(
                f"HyperLoraConfig.{name}",
                rank,
                f"up to {widest}, the widest weight of {type(base).__name__}",
            )


class HyperLoraModel(LoraModel):
    """`LoraModel` with a `HyperAdapter` at every host that one of its adapters patches."""

    tuner_layer_cls: Any = (LoraLayer, HyperAdapter)
    peft_config: Any

    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        base = base_model(model)
        ordinary = building_on(without_weights([base]), type(base).__name__, may_be_empty=True)
        with ordinary, rollback_on_error(base), following_adapters(base):
            config = copy.copy(
                self.peft_config[adapter_name]
            )  # so that the caller's can be put on another model
            check_ranks(base, config)
            config.hyperattn, selected, newly_routed = resolve_adapter(base, config)
            if config.target_modules is None and not config.target_parameters:
                config.target_modules = set(
                    projections(base, [(host.name, module) for module, host in selected])
                )
            self.peft_config[adapter_name] = config
            super().inject_adapter(model, adapter_name, *args, **kwargs)
            # after LoRA: were there a tuner layer before, PEFT would leave the base open to training
            trained = adapter_name in self.active_adapters and not config.inference_mode
            hypers = build_hypers(base, config.hyperattn, selected, newly_routed, may_be_empty=True)
            for hyper, (module, _) in zip(hypers, selected, strict=True):
                if (patched := base_hyper(module)) is not None:  # else it starts anew
                    hyper = copy.deepcopy(patched)
                if not isinstance(module._modules.get("hyper"), HyperAdapter):
                    there: Any = module._modules.pop("hyper", None)
                    module.hyper = HyperAdapter(there and there.requires_grad_(False))
                mark_initialized(hyper)
                cast(HyperAdapter, module.hyper).lora_hyper[adapter_name] = hyper.requires_grad_(
                    trained
                )
            for _, _, adapter in hyper_adapters(base):
                adapter._active_adapter = list(self.active_adapters)

    def set_adapter(self, adapter_name, inference_mode: bool = False) -> None:
        check_one(self.model, adapter_name, "set_adapter")
        with following_adapters(self.model):
            super().set_adapter(adapter_name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        with following_adapters(self.model):
            active = [name for name in self.active_adapters if name != adapter_name]
            super().delete_adapter(adapter_name)
            self.active_adapter = active or sorted(self.peft_config)[:1]
            if self.active_adapter:  # PEFT's layers choose the next one each for itself
                super().set_adapter(self.active_adapter)

    def merge_adapter(self, adapter_names=None, safe_merge: bool = False) -> None:
        names = adapter_names or self.active_adapters
        check_one(self.model, names, "merge_adapter", safe_merge)
        for _, _, adapter in hyper_adapters(self.model):
            if adapter.holding(names, "merge_adapter") != adapter.holding(
                self.active_adapters, "merge_adapter"
            ):
                raise ValueError(
                    f"merge_adapter({list(names)}) would leave the patch of {self.active_adapters} in place; first "
                    "call set_adapter with the adapters to merge"
                )
        super().merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self, merge=True, progressbar=False, safe_merge=False, adapter_names=None
    ):
        if merge:
            check_one(
                self.model, adapter_names or self.active_adapters, "merge_and_unload", safe_merge
            )
        with following_adapters(self.model):
            result = super()._unload_and_optionally_merge(
                merge, progressbar, safe_merge, adapter_names
            )
            for _, host in patched_hosts(self.model) if self.model.dtype.is_floating_point else ():
                host.hyper.to(
                    self.model.dtype
                )  # PEFT trains adapters of half-precision models in float32
        return result

    def _replace_module(self, parent, child_name, new_module, child):
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
        without_lora = {
            name for name in names if name in self.peft_config and not self.peft_config[name].r
        }
        kwargs["adapter_names"] = ["__base__" if name in without_lora else name for name in names]
        encoder = (
            self.model.get_encoder()
            if getattr(self.model.config, "is_encoder_decoder", False)
            else None
        )
        inside = set() if encoder is None else set(encoder.modules())
        adapters = [(host, adapter) for _, host, adapter in hyper_adapters(self.model)]
        handles, error = [], None
        try:
            with super()._enable_peft_forward_hooks(*args, **kwargs):
                connect(self.model, [(host, adapter.layers(names)) for host, adapter in adapters])
                for _, adapter in adapters:
                    rows = (
                        names
                        if adapter in inside
                        else [name for name in names for _ in range(beams)]
                    )
                    hook = lambda _, args, keywords, rows=rows: (
                        args,
                        {**keywords, "adapter_names": rows},
                    )
                    handles.append(adapter.register_forward_pre_hook(hook, with_kwargs=True))
                try:
                    yield
                except BaseException as raised:  # PEFT would leave its own hooks
                    error = raised
            if error is not None:
                raise error
        finally:
            for handle in handles:
                handle.remove()
            connect(self.model, [(host, adapter.layers()) for host, adapter in adapters])
            resolve_names(self.model)

    def add_weighted_adapter(
        self, adapters, weights, adapter_name, combination_type: Any = "svd", *args, **options
    ) -> None:
        """As PEFT's; the added parameters are the weighted sum of what the adapters learned beyond their start."""
        configs = [self.peft_config[name] for name in adapters if name in self.peft_config]
        if adapter_name in self.peft_config or len(configs) < len(adapters):
            return super().add_weighted_adapter(
                adapters, weights, adapter_name, combination_type, *args, **options
            )
        prefix = self.model.base_model_prefix
        differ = any(
            normalize_record(c.hyperattn, prefix) != normalize_record(configs[0].hyperattn, prefix)
            for c in configs
        )
        if (
            differ
            or combination_type not in COMBINATIONS
            or len({config.r == 0 for config in configs}) > 1
        ):
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
            adapter.combine(adapters, weights, adapter_name)

    @classmethod
    def _get_adapter_state_dict(
        cls, model, config, adapter_name, state_dict, unwanted_adapter_names
    ):
        tensors = super()._get_adapter_state_dict(
            model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        if not set(unwanted_adapter_names) & {
            mechanism.mechanism for mechanism in config.hyperattn.mechanisms
        }:
            return tensors
        own = f".lora_hyper.{adapter_name}."  # PEFT took out what has another adapter's name, also of a mechanism
        return tensors | {
            name: tensor for name, tensor in model.state_dict().items() if own in name
        }

    @classmethod
    def _convert_state_dict_for_initial_model(cls, model, config, where, *args):
        config.init_lora_weights = True  # as PEFT does for its own type
        config.save_pretrained(where)
        return super()._convert_state_dict_for_initial_model(model, config, where, *args)

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model, config, adapter_name, state_dict):
        tensors = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, state_dict
        )
        own = {name for name in model.state_dict() if f".lora_hyper.{adapter_name}." in name}
        prefix = "base_model.model."
        missing = sorted(
            own - {form for name in tensors for form in (name, name.removeprefix(prefix))}
        )
        if missing:
            logger.warning(
                f"the tensors for adapter {adapter_name!r} lack {len(missing)} added parameters, such as "
                f"{missing[0]!r}, which stay as they are; take them with get_peft_model_state_dict from a model that "
                "has this adapter"
            )
        return tensors

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        if f".lora_hyper.{adapter_name}." in key:
            return key.replace(f".lora_hyper.{adapter_name}.", ".lora_hyper.", 1)
        return super()._remove_adapter_name_from_key(key, adapter_name)


if NAME not in PeftType.__members__:
    new_peft_type(NAME)
    register_peft_method(
        name=NAME.lower(), config_cls=HyperLoraConfig, model_cls=HyperLoraModel, prefix="lora_"
    )
    checked = peft.utils.hotswap.CONFIG_KEYS_TO_CHECK
    checked[getattr(PeftType, NAME)] = [*checked[PeftType.LORA], "hyperattn"]


def resolve_adapter(
    base: PreTrainedModel, config: HyperLoraConfig
) -> tuple[HyperAttnConfig, list[Selected], bool]:
    """What an adapter does to this model, its hosts by name; these; and whether their family was routed for it.

    Raises:
        ValueError: neither the config nor a patch of the model says what to do, or both do and differ.
    """
    for path, _ in hyper_wrappers(base):
        raise ValueError(
            f"{path} is in an adapter with modules_to_save=['hyper'], beside which none with a patch of its own "
            "has a place; put them on two models"
        )
    record = None
    if any(base_hyper(host) is not None for _, host in patched_hosts(base)):
        write_records(base)  # a part of it may have been patched by itself
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
    wanted, selected, newly_routed = resolve(base, wanted)
    wanted = replace(wanted, hosts=tuple(host.name for _, host in selected))
    prefix = base.base_model_prefix
    if record is not None and normalize_record(record, prefix) != normalize_record(wanted, prefix):
        raise ValueError(
            f"{type(base).__name__} is patched otherwise than this adapter asks for; leave mechanisms out to adapt "
            "what is there, or call unpatch_model(model) first"
        )
    return wanted, selected, newly_routed or any(h.newly_routed for h in hypers_of_adapters(base))


def projections(base: PreTrainedModel, hosts: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of the linear layers inside some hosts, in the short form that PEFT matches with name endings.

    "self_attn.q_proj" where that means patched hosts alone, else a name for each, "layers.20.self_attn.q_proj".
    """
    layers = [f"{host}.{name}" for host, module in hosts for name in linear_layers(module)]
    if not layers:
        raise ValueError(
            f"the patched hosts of {type(base).__name__} hold no linear layers; pass target_modules=[...], or r=0"
        )
    others = sorted({name for name, _ in base.named_modules()} - set(layers))
    targets = set()
    for name in layers:
        short = ".".join(name.split(".")[-2:])
        ambiguous = any(n == short or n.endswith("." + short) for n in others)
        targets.add(name.removeprefix(base.base_model_prefix + ".") if ambiguous else short)
    return sorted(targets)


def linear_layers(module: nn.Module, path: str = "") -> Iterator[str]:
    """Names of the linear layers in a module, those that carry an adapter already included, and ours not."""
    for name, child in module.named_children():
        layer: Any = child
        layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        if isinstance(layer, nn.Linear | Conv1D):
            yield path + name
        elif layer is child and name != "hyper":
            yield from linear_layers(child, f"{path}{name}.")


def hypers_of_adapters(model: nn.Module) -> Iterator[Hyper]:
    """Every `Hyper` that belongs to an adapter."""
    for _, _, adapter in hyper_adapters(model):
        yield from adapter.lora_hyper.values()


def check_one(model: nn.Module, names, what: str, finite: bool = False) -> None:
    """Raise, before anything is done, where two of the adapters have added parameters in one host.

    Args:
        names: an adapter or several; what: what is to be done with them.
        finite: whether numbers that are not finite are refused too.
    """
    for path, _, adapter in hyper_adapters(model):
        for name in adapter.holding([names] if isinstance(names, str) else names, what):
            if finite and not all(
                p.isfinite().all() for p in adapter.lora_hyper[name].parameters()
            ):
                raise ValueError(
                    f"{path}.hyper of adapter {name!r} has numbers that are not finite; train it anew, or merge "
                    "without safe_merge"
                )


@contextmanager
def following_adapters(base: PreTrainedModel) -> Iterator[None]:
    """After the block, what a model says of its patch, its hooks and its signature are those of the active adapter."""
    hosts = {id(host): host for _, host, _ in hyper_adapters(base)}
    routed = any(hyper.newly_routed for hyper in hypers_of_adapters(base))
    yield
    adapters = list(hyper_adapters(base))
    hosts |= {id(host): host for _, host, _ in adapters}
    if not hosts:
        return
    for _, host, adapter in adapters:
        if not adapter.lora_hyper:  # the last one was deleted
            del host.hyper
            if adapter.base_layer is not None:
                host.hyper = adapter.base_layer
    patched = {id(host): host for _, host in patched_hosts(base)}
    connect(
        base,
        [
            (host, inner(host.hyper).layers() if key in patched else [])
            for key, host in hosts.items()
        ],
    )
    write_records(base)
    resolve_names(base)  # parts that run a structure by name
    watch_first_calls(base)
    if routed and not patched and not any(hypers_of_adapters(base)):
        model_patches.unserve(base)


def connect(base: PreTrainedModel, hosts: list[tuple[nn.Module, list[MechanismLayer]]]) -> None:
    """Give hosts the hooks, and the model the signature, that these layers of theirs need, and no others."""
    structured = []
    for host, layers in hosts:
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


# Transformers' own methods for adapters


@wrap("set_adapter", PeftAdapterMixin)
def _set_natively(original, self, adapter_name):
    check_one(self, adapter_name, "set_adapter")
    with following_adapters(self):
        return original(self, adapter_name)


@wrap("delete_adapter", PeftAdapterMixin)
def _delete_natively(original, self, adapter_names):
    if next(hyper_adapters(self), None) is None:
        return original(self, adapter_names)
    with following_adapters(self):
        active = self.active_adapters()
        original(self, adapter_names)
        there = getattr(self, "peft_config", {})
        active = [name for name in active if name in there] or sorted(there)[:1]
        if active:
            self.set_adapter(active)
