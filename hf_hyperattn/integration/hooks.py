"""Hooks on `PreTrainedModel`: load patched checkpoints, and reject names that a model would ignore.

Transformers accepts any registered `attn_implementation`, even for families that never call the attention interface;
such a model would silently run its own attention. `set_attn_implementation` only warns. These hooks raise instead, and
they restore patches when a checkpoint is loaded. They are installed once, on import, and do nothing for models that use
none of our names.

Wrapped methods:

- `__init__`: rejects a malformed `config.hyperattn`. Builds families that pick their attention class by name under a
  name that they know.
- `__init_subclass__`: records which models are under construction, so that parts know the model they belong to.
- `post_init`: routes supported families through the attention interface, raises for unsupported families and parts, and
  restores the patch of a saved checkpoint.
- `_finalize_model_loading`: checks that the loaded tensors match the record in `config.json`.
- `initialize_weights`: gives added parameters that were not loaded their starting values.
- `set_attn_implementation`: raises where Transformers would warn. On a patched model it changes the base implementation
  and keeps the patch.
- `__setstate__`: registers copied and unpickled models.
"""

from __future__ import annotations

import functools
import logging
from contextvars import ContextVar
from operator import attrgetter, itemgetter
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import model_patches
from model_patches.routing import check_unroute, is_routed

from ..config import read_record
from .attach import patch_from_record, resolve_stock
from .call import note_all, note_masks
from .checkpoint_config import (
    INTERNAL,
    MODELS,
    RECORD,
    all_configs,
    check_keys,
    inner,
    name_before,
    parts,
    patched_hosts,
    recorded_hosts,
    running_on,
    saved_name,
    sub_configs,
    tree,
)
from .conversions import rebuild_conversion
from .first_call import watch_first_calls
from .hierarchical import Accepting, resolve_names
from .hosts import find_hosts
from .hyper import Hyper
from .modes import make_ordinary
from .patching import route
from .record_check import check_loaded
from .stock import OURS, PATCHED, RUNNING, STOCK, marked, run_beneath, stock_name
from .unsupported import check_config, check_parts, check_routed, unsupported
from .versions import warn_of_newer_versions
from .wrapping import WRAPPED, subclasses, wrap

logger = logging.getLogger("hf_hyperattn")

#: The configs that ask for a name of ours, with the name, while a model is built: it may be built under another one,
#: and some models set the names of their parts themselves, from the one at the top.
REQUESTED = "_hyperattn_requested"
#: Whether `set_attn_implementation` is at work, which sets names on configs itself.
SETTING: ContextVar[bool] = ContextVar("hyperattn_setting", default=False)
#: The models whose `__init__` is running, the outermost first.
BUILDING: ContextVar[tuple[PreTrainedModel, ...]] = ContextVar("hyperattn_building", default=())


def note_building(cls: Any) -> None:
    """Let the `__init__` of a model class put its model into `BUILDING` while it runs."""
    stock, inherited = (
        cls.__init__,
        "__init__" not in vars(cls),
    )  # that of a mixin, which is no model
    if hasattr(stock, WRAPPED):
        return

    @functools.wraps(stock)
    def __init__(self, *args, **kwargs):
        init = super(cls, self).__init__ if inherited else functools.partial(stock, self)
        outer = BUILDING.get()
        if outer and outer[-1] is self:  # the `__init__` of a parent class
            return init(*args, **kwargs)
        token = BUILDING.set((*outer, self))
        try:
            return init(*args, **kwargs)
        finally:
            BUILDING.reset(token)

    setattr(__init__, WRAPPED, ())
    cls.__init__ = __init__


@wrap("__init_subclass__")
def _subclass(original, cls, **kwargs):
    original(cls, **kwargs)
    note_building(cls)


def models_around(model: PreTrainedModel) -> tuple[PreTrainedModel, ...]:
    """The models, other than `model`, that are being built now: those that will contain it."""
    building = BUILDING.get()
    return building[:-1] if building and building[-1] is model else building


@wrap("__init__")
def _build(original, self, config, *args, **kwargs):
    if getattr(config, "hyperattn", None) is not None:
        read_record(config.hyperattn)  # before Transformers copies what a stranger wrote
    configs = tree(config)
    for part in configs:
        if (
            STOCK in part.__dict__ and part._attn_implementation is None
        ):  # nobody asked for anything
            setattr(part, INTERNAL, RUNNING)
    original(self, config, *args, **kwargs)
    note_masks(self)
    names = [
        (part, part._attn_implementation) for part in configs if part._attn_implementation in OURS
    ]
    self.__dict__[REQUESTED] = names
    neutral = model_patches.construct_as(self.config.model_type)
    if neutral is not None and self.config._attn_implementation in OURS:
        # a patched checkpoint is built as it was before the patch
        setattr(self.config, INTERNAL, stock_name(self.config) if marked(self.config) else neutral)


for _model_class in subclasses(
    PreTrainedModel
):  # after the wrapper of the `__init__` that they have from there
    note_building(_model_class)


@wrap("post_init")
def _finish(original, self: PreTrainedModel):
    names, outer = self.__dict__.pop(REQUESTED, ()), models_around(self)
    if names:
        warn_of_newer_versions()
    for part, name in names:
        setattr(part, INTERNAL, name)
    restored = restore(self, outer)
    if not restored and self.config._attn_implementation in OURS:
        check_routed(self, self.config._attn_implementation, inside_another=bool(outer))
    if not restored and not outer and names:
        check_part_names(self, names)
    if isinstance(self, Accepting) or set(map(itemgetter(1), names)) - {PATCHED, RUNNING}:
        resolve_names(self)
    if names and not outer:
        watch_first_calls(self)
    MODELS.add(self)
    return original(self)


@wrap("__setstate__")
def _copied(original, self, state):
    original(self, state)
    MODELS.add(self)


def restore(model: PreTrainedModel, outer: tuple[PreTrainedModel, ...]) -> bool:
    """Patch a model whose config says that it was; the outermost model does it, since hosts are named from there.

    Args:
        outer: the models that are being built around it.

    Returns:
        Whether the config says so. `config.hyperattn` without hosts holds parameters of mechanisms used by name.

    Raises:
        ValueError: the config names hosts that the model does not have.
    """
    if recorded_hosts(model.config) is None:
        return False
    if any(map(recorded_hosts, map(attrgetter("config"), outer))) or any(patched_hosts(model)):
        return True
    config = read_record(getattr(model.config, RECORD))
    resolve_stock(model)
    patch_from_record(model, config, route_as_before(model))
    rebuild_conversion(model, config)
    return True


def route_as_before(model: PreTrainedModel) -> bool:
    """Route served families while their configs name the implementation from before, so that it can be undone."""
    named = [
        (c, c._attn_implementation)
        for part in parts(model)
        for c in tree(part.config)
        if STOCK in vars(c)
    ]
    try:
        for config, _ in named:
            setattr(config, INTERNAL, name_before(config))
        return route(model)
    finally:
        for config, name in named:
            setattr(config, INTERNAL, name)


def check_part_names(model: PreTrainedModel, names: list[tuple[Any, str]]) -> None:
    """Raise if a part that was given a name of ours by itself would never call a function of ours.

    One plain name for a whole model goes into every sub-config, also into those of convolutional backbones.

    Args:
        names: the configs that ask for a name of ours, with the name.
    """
    requesting = {id(config) for config, _ in names}
    others = [config for config in tree(model.config) if id(config) not in requesting]
    below = {id(part) for config in others for _, part in sub_configs(config)}
    by_themselves = [(config, name) for config, name in names if id(config) in below]
    if not by_themselves:
        return
    model_patches.serve(model)
    running = {module.config._attn_implementation for _, module in find_hosts(model)}
    for config, name in by_themselves:
        check_config(model, config, name)
        if name not in running:
            part = (
                config.model_type or type(config).__name__
            )  # Transformers 5.17 has parts without a type
            raise ValueError(
                f"attn_implementation={name!r} was asked for the part {part!r} of "
                f"{type(model).__name__}, which lacks that part, or none of whose attention runs on its config; "
                "leave that part out"
            )


@wrap("initialize_weights")
def _initialize(original, self):
    """Every `hyper` starts by its own rule, and not by what the model's class makes of the modules inside."""
    fresh = []
    for module in self.modules():
        if isinstance(module, Hyper) and not getattr(module, "_is_hf_initialized", False):
            module._is_hf_initialized = True
            module.came_with_model = True
            for tensor in (*module.parameters(), *module.buffers()):
                if not getattr(tensor, "_is_hf_initialized", False):
                    fresh.append(module)
                    break
    original(self)
    with torch.no_grad():
        for module in fresh:
            module.reset_parameters()


@wrap("_finalize_model_loading")
def _check_loading(original, model, load_config, loading_info):
    check_loaded(model, loading_info, load_config.pretrained_model_name_or_path)
    result = original(model, load_config, loading_info)
    if torch.is_inference_mode_enabled():
        make_ordinary(host.hyper for _, host in patched_hosts(model))
    return result


def set_on_models(config: Any, value: Any) -> None:
    """Let what a config is given for a name of ours, or in place of one, reach the models that run on it.

    A name of ours goes by `set_attn_implementation`: families whose attention is served by another class would ignore
    or misread it. Some models (T5) have parts that run on copies of the config.
    """
    ours = OURS - {PATCHED, RUNNING}
    new = {name for _, name in requested(config, value)} & ours
    for model in running_on(config):
        if new and not SETTING.get():
            model.set_attn_implementation(value)
        elif not isinstance(value, dict) and config._attn_implementation in ours:
            in_tree = set(map(id, tree(config)))
            for part in all_configs(model):
                if (
                    id(part) not in in_tree
                    and part._attn_implementation == config._attn_implementation
                ):
                    setattr(part, INTERNAL, value)


@wrap("set_attn_implementation")
def _set(original, self, *args, **kwargs):
    token = SETTING.set(True)
    try:
        return _set_and_check(original, self, *args, **kwargs)
    finally:
        SETTING.reset(token)


def _set_and_check(original, self, attn_implementation, *args, **kwargs):
    requests, started = (
        requested(self.config, attn_implementation),
        self.config._attn_implementation,
    )
    names, saved = {name for _, name in requests}, saved_name(self.config)
    before = [
        (config, config._attn_implementation, config.__dict__.get(STOCK))
        for config in all_configs(self)
    ]
    patched: list[tuple[Any, Any]] = [
        (config, name) for config, name, _ in before if marked(config)
    ]
    if patched and names <= {PATCHED, RUNNING}:
        return None
    if names & OURS:
        warn_of_newer_versions()
        for model in {self, *running_on(self.config)}:
            note_all(model)
            model_patches.serve(model)
        if isinstance(attn_implementation, str):
            check_routed(self, attn_implementation, inside_another=bool(models_around(self)))
            check_parts(self, attn_implementation)
        for config, name in requests:
            if name in OURS and config is not self.config:
                check_config(self, config, name)
    try:
        result = original(self, attn_implementation, *args, **kwargs)
        if names & OURS or patched or started in OURS:
            set_on_copies(self, started)
        for config, name in requests:
            if name in OURS and config._attn_implementation != name:
                raise unsupported(config.model_type, name)
        for config, name in patched:
            run_beneath(config, name)
        check_unpatchable(self)
    except BaseException:
        for config, name, beneath in before:
            setattr(config, INTERNAL, name)
            if marked(config):
                setattr(config, STOCK, beneath)
        raise
    warn_replaced(self.config, saved, f"{type(self).__name__} running")
    resolve_names(self)
    if names & OURS or patched or {name for _, name, _ in before} & OURS:
        watch_first_calls(self)
    return result


def set_on_copies(model: PreTrainedModel, started: str | None) -> None:
    """Let parts that run on copies of the config (T5's) follow it, which Transformers 5.17 leaves where they were.

    Args:
        started: what the model and these parts ran before.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config):
            if part.config._attn_implementation == started and part._can_set_attn_implementation():
                setattr(part.config, INTERNAL, model.config._attn_implementation)


def check_unpatchable(model: PreTrainedModel) -> None:
    """Raise where the implementation beneath a patch is none that `unpatch_model` could leave behind."""
    for _, host in patched_hosts(model):
        if inner(host.hyper).newly_routed and is_routed(host):
            name = stock_name(host.config)
            try:
                check_unroute(host, name)
            except ValueError as error:
                raise ValueError(
                    f"attn_implementation={name!r} cannot run beneath what {type(model).__name__} is patched with: "
                    "its own class does not know it; allowed: the one it was loaded with, or 'eager'"
                ) from error


def warn_replaced(config: PreTrainedConfig, saved: str | dict | None, what: str) -> None:
    """Warn, once, where a mechanism's name that was part of a checkpoint has given way to another name.

    Args:
        saved: what the config said before, as in config.json.
        what: the model and what it did with the old name, for the message.
    """
    for part, name in requested(config, saved):
        now = part._attn_implementation
        if name in OURS - {PATCHED, RUNNING} and now != name:
            logger.warning(
                f"{what} with attn_implementation={name!r} runs {now or 'sdpa'!r} as asked; for {name!r} leave "
                f"attn_implementation out, or call model.set_attn_implementation({name!r})"
            )
            return


def requested(config: Any, implementation: str | dict | None) -> list[tuple[Any, str | None]]:
    """(config, name) of every (sub-)config that a value for `set_attn_implementation` names."""
    if not isinstance(implementation, dict):
        return [(config, implementation)]
    check_keys(config, implementation)
    parts = [
        (getattr(config, key, None) if key else config, value)
        for key, value in implementation.items()
    ]
    return [
        request for part, value in parts if part is not None for request in requested(part, value)
    ]
