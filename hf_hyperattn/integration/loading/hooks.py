"""Hooks on `PreTrainedModel`: load patched checkpoints, and reject names that a model would ignore.

Transformers accepts any registered `attn_implementation`, even for families that never call the
attention interface. Such a model would silently run its own attention, and
`set_attn_implementation` only warns. These hooks raise instead, and they restore patches when a
checkpoint is loaded. They are installed once, on import, and do nothing for models that use none of
our names.

Wrapped methods:

- `__init__`: rejects a malformed `config.hyperattn`. Builds families that pick their attention
  class by name under a name that they know.
- `__init_subclass__`: records which models are under construction, so that parts know the model
  they belong to.
- `post_init`: routes supported families through the attention interface, raises for unsupported
  families and parts, and restores the patch of a saved checkpoint.
- `_finalize_model_loading`: checks that the loaded tensors match the record in `config.json`.
- `initialize_weights`: gives added parameters that were not loaded their starting values.
- `set_attn_implementation`: raises where Transformers would warn. On a patched model it changes
  the base implementation and keeps the patch.
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

from ...config import read_record
from ..attention.call import note_all, note_masks
from ..attention.first_call import watch_first_calls
from ..attention.hosts import find_hosts
from ..attention.hyper import Hyper, patched_hosts, unwrap_hyper
from ..attention.running_call import Accepting
from ..attention.stock import OURS, PATCHED, RUNNING, STOCK, marked, run_beneath, stock_name
from ..patching.attach import patch_from_record, resolve_stock
from ..patching.checkpoint_config import (
    INTERNAL,
    MODELS,
    RECORD,
    all_configs,
    check_keys,
    list_configs,
    list_models,
    name_before,
    recorded_hosts,
    running_on,
    saved_name,
    sub_configs,
)
from ..patching.conversions import rebuild_conversion
from ..patching.hierarchical import resolve_names
from ..patching.modes import make_ordinary
from ..patching.patch import route_families
from ..patching.unsupported import check_config, check_parts, check_routed, unsupported
from ..patching.versions import warn_of_newer_versions
from ..patching.wrapping import WRAPPED, subclasses, wrap
from .record_check import check_loaded

logger = logging.getLogger("hf_hyperattn")

#: Attribute of a model under construction: pairs of a config and the name of ours that it asks for.
#: The model may be built under another name, and some models overwrite the names of their parts.
REQUESTED = "_hyperattn_requested"
#: Whether `set_attn_implementation` is running. It sets names on configs itself.
SETTING: ContextVar[bool] = ContextVar("hyperattn_setting", default=False)
#: The models whose `__init__` is running, the outermost first.
BUILDING: ContextVar[tuple[PreTrainedModel, ...]] = ContextVar("hyperattn_building", default=())


def note_building(cls: Any) -> None:
    """Make the `__init__` of a model class add its model to `BUILDING` while it runs."""
    stock = cls.__init__
    # Every model class has a wrapped `__init__`, so an unwrapped inherited one is a mixin's.
    # `super()` finds it at call time, in the order of the class that is built.
    inherited = "__init__" not in vars(cls)
    if hasattr(stock, WRAPPED):
        return

    @functools.wraps(stock)
    def __init__(self, *args, **kwargs):
        init = super(cls, self).__init__ if inherited else functools.partial(stock, self)
        outer = BUILDING.get()
        if outer and outer[-1] is self:  # called by the `__init__` of a subclass, which is noted
            return init(*args, **kwargs)
        token = BUILDING.set((*outer, self))
        try:
            return init(*args, **kwargs)
        finally:
            BUILDING.reset(token)

    setattr(__init__, WRAPPED, ())
    cls.__init__ = __init__


# Missing upstream: an event for "construction of a model begins", with the model around it.
# `post_init` comes too late: the parts of a model finish before the model itself.
@wrap("__init_subclass__")
def _note_subclass(original, cls, **kwargs):
    """Note the construction of models of a new class, too."""
    original(cls, **kwargs)
    note_building(cls)


def find_enclosing_models(model: PreTrainedModel) -> tuple[PreTrainedModel, ...]:
    """Return the models under construction around `model`, the outermost first."""
    building = BUILDING.get()
    return building[:-1] if building and building[-1] is model else building


# Missing upstream: a callback that sees the config before a model is built from it. Also missing:
# a default attention class in families that choose the class by name and do not know ours.
@wrap("__init__")
def _start_building(original, self, config, *args, **kwargs):
    """Check the record, and note which names of ours the configs request."""
    if getattr(config, "hyperattn", None) is not None:
        # The record may come from a stranger's config.json: check it before Transformers copies it.
        read_record(config.hyperattn)
    configs = list_configs(config)
    for part in configs:
        # A patched config without a requested implementation, as in `from_config`: run the patch.
        if STOCK in part.__dict__ and part._attn_implementation is None:
            setattr(part, INTERNAL, RUNNING)
    original(self, config, *args, **kwargs)
    note_masks(self)
    names = [
        (part, part._attn_implementation) for part in configs if part._attn_implementation in OURS
    ]
    self.__dict__[REQUESTED] = names
    neutral = model_patches.construct_as(self.config.model_type)
    if neutral is not None and self.config._attn_implementation in OURS:
        # Build the classes that a patched checkpoint had before its patch. `post_init` puts the
        # requested name back.
        setattr(self.config, INTERNAL, stock_name(self.config) if marked(self.config) else neutral)


# After `PreTrainedModel.__init__` is wrapped: a class that inherits it then counts as noted.
for _model_class in subclasses(PreTrainedModel):
    note_building(_model_class)


# Missing upstream: an event for "model built, weights not loaded yet". The added parameters must
# exist at that moment so that the loader fills them.
@wrap("post_init")
def _finish_building(original, self: PreTrainedModel):
    """Restore the requested names and the recorded patch, and check both."""
    names = self.__dict__.pop(REQUESTED, ())
    outer = find_enclosing_models(self)
    if names:
        warn_of_newer_versions()
    for part, name in names:
        setattr(part, INTERNAL, name)
    restored = restore_patch(self, outer)
    if not restored and self.config._attn_implementation in OURS:
        check_routed(self, self.config._attn_implementation, inside_another=bool(outer))
    if not restored and not outer and names:
        check_part_names(self, names)
    if isinstance(self, Accepting) or set(map(itemgetter(1), names)) - {PATCHED, RUNNING}:
        resolve_names(self)
    # Only the outermost model: its check covers the attention layers of all parts.
    if names and not outer:
        watch_first_calls(self)
    MODELS.add(self)
    return original(self)


# Missing upstream: an event for "model copied or unpickled". Neither calls `__init__`.
@wrap("__setstate__")
def _register_copy(original, self, state):
    """Add a copied or unpickled model to `MODELS`."""
    original(self, state)
    MODELS.add(self)


def restore_patch(model: PreTrainedModel, outer: tuple[PreTrainedModel, ...]) -> bool:
    """Patch a model if its config records a patch.

    The outermost recorded model does it, because the record names attention layers from there.

    Args:
        model: The model under construction.
        outer: The models under construction that will contain it.

    Returns:
        Whether the config records patched attention layers. A `config.hyperattn` without layers
        holds parameters of mechanisms used by name, which is no patch.

    Raises:
        ValueError: The config names attention layers that the model does not have.
    """
    if recorded_hosts(model.config) is None:
        return False
    if any(map(recorded_hosts, map(attrgetter("config"), outer))) or any(patched_hosts(model)):
        return True
    config = read_record(getattr(model.config, RECORD))
    resolve_stock(model)
    patch_from_record(model, config, route_as_before(model))
    # After the patch: a conversion finds the layers to rebuild by their `hyper`.
    rebuild_conversion(model, config)
    return True


def route_as_before(model: PreTrainedModel) -> bool:
    """Route supported families under the implementation from before the patch.

    Routing records the current name. `unpatch_model` later accepts that name only, or "eager".

    Returns:
        Whether routing was needed.
    """
    named = [
        (config, config._attn_implementation)
        for part in list_models(model)
        for config in list_configs(part.config)
        if STOCK in vars(config)
    ]
    try:
        for config, _ in named:
            setattr(config, INTERNAL, name_before(config))
        return route_families(model)
    finally:
        for config, name in named:
            setattr(config, INTERNAL, name)


def check_part_names(model: PreTrainedModel, names: list[tuple[Any, str]]) -> None:
    """Raise if a name of ours was requested for a part that would never call it.

    One plain name for a whole model reaches every sub-config, also the sub-configs of convolutional
    backbones. Such parts are not checked here.

    Args:
        model: The outermost model.
        names: Pairs of a config and the name of ours that it asks for.

    Raises:
        ValueError: No attention layer of a part runs the name that was requested for it.
    """
    requesting = {id(config) for config, _ in names}
    others = [config for config in list_configs(model.config) if id(config) not in requesting]
    # A config whose parent asks for nothing was named by itself, with a dict of names.
    below = {id(part) for config in others for _, part in sub_configs(config)}
    by_themselves = [(config, name) for config, name in names if id(config) in below]
    if not by_themselves:
        return
    model_patches.serve(model)
    running = {module.config._attn_implementation for _, module in find_hosts(model)}
    for config, name in by_themselves:
        check_config(model, config, name)
        if name not in running:
            # Some parts have no model type in Transformers 5.17.
            part = config.model_type or type(config).__name__
            raise ValueError(
                f"attn_implementation={name!r} was requested for the part {part!r} of "
                f"{type(model).__name__}, but no attention layer there runs on the config of that "
                "part; leave that part out"
            )


# Missing upstream: `_init_weights` of a model class decides for all modules inside. A module cannot
# say that it initialises itself.
@wrap("initialize_weights")
def _initialize_hypers(original, self):
    """Initialise every `hyper` by its own rule, not by the rule of the model's class."""
    fresh = []
    for module in self.modules():
        if isinstance(module, Hyper) and not getattr(module, "_is_hf_initialized", False):
            module._is_hf_initialized = True
            module.came_with_model = True
            tensors = (*module.parameters(), *module.buffers())
            if not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
                fresh.append(module)
    original(self)
    # After Transformers' own initialisation, which may have written into the same tensors.
    with torch.no_grad():
        for module in fresh:
            module.reset_parameters()


# Missing upstream: a callback with the missing and unexpected keys of a load, which may raise.
@wrap("_finalize_model_loading")
def _check_loading(original, model, load_config, loading_info):
    """Compare the record with the loaded tensors before Transformers reports them."""
    check_loaded(model, loading_info, load_config.pretrained_model_name_or_path)
    result = original(model, load_config, loading_info)
    if torch.is_inference_mode_enabled():
        # Parameters that the checkpoint lacks were created just now, as inference tensors.
        make_ordinary(host.hyper for _, host in patched_hosts(model))
    return result


def set_on_models(config: Any, value: Any) -> None:
    """Apply a new `attn_implementation` of a config to the models that run on it.

    This does something only if the old or the new name is ours. A name of ours goes through
    `set_attn_implementation`: families whose attention needs another class would ignore or misread
    a plain assignment. Some models (T5) have parts that run on copies of the config.

    Args:
        config: The config that is assigned to, still with its old name.
        value: A name, or a dict of names by part.
    """
    ours = OURS - {PATCHED, RUNNING}
    new = {name for _, name in list_requests(config, value)} & ours
    for model in running_on(config):
        # `set_attn_implementation` assigns to the config itself: do not call it again from there.
        if new and not SETTING.get():
            model.set_attn_implementation(value)
        elif not isinstance(value, dict) and config._attn_implementation in ours:
            old = config._attn_implementation
            in_tree = set(map(id, list_configs(config)))
            for part in all_configs(model):
                if id(part) not in in_tree and part._attn_implementation == old:
                    setattr(part, INTERNAL, value)


# Missing upstream: validation of the name per family, with an error. Transformers only warns, and
# it would replace the name of a patched model and so switch its patch off.
@wrap("set_attn_implementation")
def _set_implementation(original, self, *args, **kwargs):
    """Mark that names are being set, so that setters of configs do not call back."""
    token = SETTING.set(True)
    try:
        return _set_and_check(original, self, *args, **kwargs)
    finally:
        SETTING.reset(token)


def _set_and_check(original, self, attn_implementation, *args, **kwargs):
    """Set an implementation and keep the patch; on an error, put all names back.

    Args:
        original: Transformers' own method.
        self: The model, patched or not.
        attn_implementation: A name, or a dict of names by part.
    """
    requests = list_requests(self.config, attn_implementation)
    names = {name for _, name in requests}
    started = self.config._attn_implementation
    saved = saved_name(self.config)
    before = [
        (config, config._attn_implementation, config.__dict__.get(STOCK))
        for config in all_configs(self)
    ]
    patched: list[tuple[Any, Any]] = [
        (config, name) for config, name, _ in before if marked(config)
    ]
    # A patched model runs its patch already: there is nothing to set.
    if patched and names <= {PATCHED, RUNNING}:
        return None
    if names & OURS:
        _check_requests(self, attn_implementation, requests)
    try:
        result = original(self, attn_implementation, *args, **kwargs)
        if names & OURS or patched or started in OURS:
            set_on_copies(self, started)
        for config, name in requests:
            # Transformers warned and left the old name in place: this family takes no other name.
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


def _check_requests(model: PreTrainedModel, value: Any, requests: list[tuple[Any, Any]]) -> None:
    """Raise if a requested name of ours would never be called.

    Supported families are routed first.

    Args:
        model: The model that is to run the names.
        value: The value of `attn_implementation`, a name or a dict of names by part.
        requests: What `list_requests` makes of it.
    """
    warn_of_newer_versions()
    for whole in {model, *running_on(model.config)}:
        note_all(whole)
        model_patches.serve(whole)
    if isinstance(value, str):
        check_routed(model, value, inside_another=bool(find_enclosing_models(model)))
        check_parts(model, value)
    for config, name in requests:
        if name in OURS and config is not model.config:
            check_config(model, config, name)


def set_on_copies(model: PreTrainedModel, started: str | None) -> None:
    """Set the model's implementation on copies of its config, such as T5's.

    T5's encoder and decoder run on such copies. Transformers 5.17 leaves these copies unchanged.

    Args:
        model: The model, with its new implementation.
        started: The implementation that the model and these parts ran before.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config):
            if part.config._attn_implementation == started and part._can_set_attn_implementation():
                setattr(part.config, INTERNAL, model.config._attn_implementation)


def check_unpatchable(model: PreTrainedModel) -> None:
    """Raise if `unpatch_model` could not restore the base implementation of a layer.

    Raises:
        ValueError: A routed layer's own class does not know the name.
    """
    for _, host in patched_hosts(model):
        if unwrap_hyper(host.hyper).newly_routed and is_routed(host):
            name = stock_name(host.config)
            try:
                check_unroute(host, name)
            except ValueError as error:
                raise ValueError(
                    f"attn_implementation={name!r} cannot run beneath what {type(model).__name__} is patched with: "
                    "its own class does not know it; allowed: the one it was loaded with, or 'eager'"
                ) from error


def warn_replaced(config: PreTrainedConfig, saved: str | dict | None, what: str) -> None:
    """Warn once if another name replaced a mechanism's name from a checkpoint.

    Args:
        config: The config with its new names.
        saved: Its `attn_implementation` from before, as in config.json.
        what: The model and what it did with the old name, for the message.
    """
    for part, name in list_requests(config, saved):
        now = part._attn_implementation
        if name in OURS - {PATCHED, RUNNING} and now != name:
            logger.warning(
                f"{what} with attn_implementation={name!r} runs {now or 'sdpa'!r} as asked; for {name!r} leave "
                f"attn_implementation out, or call model.set_attn_implementation({name!r})"
            )
            return


def list_requests(config: Any, implementation: str | dict | None) -> list[tuple[Any, str | None]]:
    """Return the name that a value of `attn_implementation` requests for each config.

    Args:
        config: The config that the value is for.
        implementation: A name, or a dict of names by part ("" for the config itself), which may
            be nested.

    Returns:
        Pairs of a config and a name, without parts that the config does not have.
    """
    if not isinstance(implementation, dict):
        return [(config, implementation)]
    check_keys(config, implementation)
    requests = []
    for key, value in implementation.items():
        part = getattr(config, key, None) if key else config
        if part is not None:
            requests += list_requests(part, value)
    return requests
