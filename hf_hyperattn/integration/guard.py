"""No name of ours is ever silently ignored.

Transformers accepts any registered name for any family, also for those that never call the attention interface, and
`set_attn_implementation` only warns. So these methods of `PreTrainedModel` are wrapped, once, at import; for models
that ask for none of our names the wrappers do nothing.

- `__init__`: a malformed `config.hyperattn` is refused; families whose attention class is picked from a dict of names
  are built under a name they know;
- `post_init`: served families are routed, unrouted ones and unrouted parts refused by name, patched checkpoints get
  their `hyper`;
- `_finalize_model_loading`: record and added tensors of what was loaded are compared;
- `_initialize_weights`: added parameters that start anew get their starting value, not uninitialised memory;
- `state_dict`: notes which attention of ours the model runs, where torch keeps its own metadata;
- `load_state_dict`, also PEFT's, and Accelerate's `load_checkpoint_in_model`: warn where added tensors, or a name that
  the checkpoint ran under, are passed over;
- `set_attn_implementation`: raises where it would only warn; on a patched model it changes what runs beneath.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from weakref import WeakSet

import accelerate
import accelerate.big_modeling
import accelerate.utils.modeling
from peft import PeftModel
from transformers import PreTrainedModel

import model_patches
from model_patches.routing import check_unroute, is_routed

from ..config import HyperAttnConfig
from .adapter_saving import describe_base
from .families import note_all, note_masks
from .hierarchical import settle_names
from .hosts import find_hosts
from .hyper import Hyper
from .record_check import NOTED, READ, check_loaded, checked_as_one, warn_of_noted, warn_of_state_dict
from .records import all_configs, inner, patched_hosts, saved_name, sub_configs, tree
from .refusal import check_config, check_parts, check_routed, inside_another_model, refusal
from .restore import restore
from .stock import OURS, PATCHED, RUNNING, STOCK, marked, run_beneath, stock_name
from .wrapping import wrap

logger = logging.getLogger("hf_hyperattn")

#: The configs that asked for a name of ours, while a model is built: it may be built under another one, and some models
#: set the names of their parts themselves, from the one at the top.
WANTED = "_hyperattn_wanted"
#: The sub-configs that a name of ours was given for by themselves, with the name.
ASKED = "_hyperattn_asked_parts"
#: Every model, by which a name that is set on a config finds those that run on it.
MODELS: WeakSet[PreTrainedModel] = WeakSet()
#: Whether `set_attn_implementation` is at work, which sets names on configs itself.
SETTING: ContextVar[bool] = ContextVar("hyperattn_setting", default=False)


@wrap("__init__")
def _build(original, self, config, *args, **kwargs):
    if getattr(config, "hyperattn", None) is not None:
        HyperAttnConfig.from_dict(config.hyperattn)  # before Transformers copies what a stranger wrote
    for part in tree(config):
        if marked(part) and part._attn_implementation is None:  # nobody asked for anything
            part._attn_implementation_internal = RUNNING
    original(self, config, *args, **kwargs)
    note_masks(self)
    self.__dict__[WANTED] = [
        (part, part._attn_implementation) for part in tree(self.config) if part._attn_implementation in OURS
    ]
    self.__dict__[ASKED] = list(asked_by_own_name(self.config))
    neutral = model_patches.construct_as(self.config.model_type)
    if neutral is not None and self.config._attn_implementation in OURS:
        # a patched checkpoint is built as it was before the patch
        name = stock_name(self.config) if marked(self.config) else neutral
        self.config._attn_implementation_internal = name


@wrap("post_init")
def _finish(original, self):
    for part, wanted in self.__dict__.pop(WANTED, ()):
        part._attn_implementation_internal = wanted
    name = self.config._attn_implementation
    restored = getattr(self.config, "hyperattn", None) is not None and restore(self)
    if name in OURS and not restored:
        check_routed(self, name)
    if self.__dict__.get(ASKED) and not restored and not inside_another_model(self):
        check_asked(self)
    settle_names(self)
    MODELS.add(self)
    return original(self)


@wrap("__setstate__")
def _copied(original, self, state):
    original(self, state)
    MODELS.add(self)


def asked_by_own_name(config) -> Iterator[tuple]:
    """(sub-config, name) of those that run under a name of ours although the config above them does not.

    One plain name for the whole model goes into every sub-config, also into those of convolutional backbones.
    """
    for _, part in sub_configs(config):
        if part._attn_implementation in OURS and config._attn_implementation not in OURS:
            yield part, part._attn_implementation
        yield from asked_by_own_name(part)


def check_asked(model: PreTrainedModel) -> None:
    """Raise if a part that was asked for by its own name would never call a function of ours."""
    model_patches.serve(model)
    running = {module.config._attn_implementation for _, module in find_hosts(model)}
    for config, name in model.__dict__[ASKED]:
        check_config(model, config, name)
        if name not in running:
            part = config.model_type or type(config).__name__  # Transformers 5.17 has parts without a type
            raise ValueError(
                f"attn_implementation={name!r} was asked for the part {part!r} of "
                f"{type(model).__name__}, which lacks that part, or none of whose attention runs on its config; "
                "leave that part out"
            )


@wrap("_initialize_weights")
def _initialize(original, self, module, *args, **kwargs):
    if not isinstance(module, Hyper):
        return original(self, module, *args, **kwargs)
    if not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()
        module._is_hf_initialized = True


@wrap("_finalize_model_loading")
def _check_loading(original, model, load_config, loading_info):
    check_loaded(model, loading_info, load_config.pretrained_model_name_or_path)
    return original(model, load_config, loading_info)


@wrap("load_state_dict", PeftModel)
@wrap("load_state_dict")
def _load_state_dict(original, self, state_dict, *args, **kwargs):
    result = original(self, state_dict, *args, **kwargs)
    if READ.get() is not None:
        READ.get().update(state_dict)
    elif not warn_of_state_dict(self, result.missing_keys, result.unexpected_keys):
        warn_of_noted(self, state_dict)
    return result


@wrap("state_dict")
def _state_dict(original, self, *args, **kwargs):
    result, described = original(self, *args, **kwargs), describe_base(self)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    if described is not None and hasattr(result, "_metadata"):  # a name has no tensor that would tell of it
        result._metadata.setdefault(prefix[:-1], {})[NOTED] = copy.deepcopy(described)
    return result


@wrap("load_state_dict", accelerate.utils.modeling)
def _read_file(original, checkpoint_file, *args, **kwargs):
    tensors = original(checkpoint_file, *args, **kwargs)
    if READ.get() is not None:
        READ.get().update(tensors)
    return tensors


def _load_files(original, model, checkpoint, *args, **kwargs):
    with checked_as_one(model, checkpoint):
        return original(model, checkpoint, *args, **kwargs)


for _module in (accelerate, accelerate.utils, accelerate.utils.modeling, accelerate.big_modeling):
    wrap("load_checkpoint_in_model", _module)(_load_files)


def running_on(config) -> list[PreTrainedModel]:
    """The models with this very config, the outermost first."""
    models = [reference() for reference in tuple(MODELS.data)]  # at once: other threads may build models
    found = [model for model in models if getattr(model, "config", None) is config]
    return sorted(found, key=lambda model: -len(list(model.modules())))


def set_on_models(config, value: str | dict | None) -> None:
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
            own = {id(part) for part in tree(config)}
            for part in all_configs(model):
                if id(part) not in own and part._attn_implementation == config._attn_implementation:
                    part._attn_implementation_internal = value


@wrap("set_attn_implementation")
def _set(original, self, *args, **kwargs):
    token = SETTING.set(True)
    try:
        return _set_and_check(original, self, *args, **kwargs)
    finally:
        SETTING.reset(token)


def _set_and_check(original, self, attn_implementation, *args, **kwargs):
    asked = requested(self.config, attn_implementation)
    names, saved = {name for _, name in asked}, saved_name(self.config)
    before = [(config, config._attn_implementation) for config in all_configs(self)]
    patched = [(config, name) for config, name in before if marked(config)]
    beneath = [(config, getattr(config, STOCK)) for config, _ in patched]
    if patched and names <= {PATCHED, RUNNING}:
        return None
    if names & OURS:
        for model in {self, *running_on(self.config)}:
            note_all(model)
            model_patches.serve(model)
        if isinstance(attn_implementation, str):
            check_routed(self, attn_implementation)
            check_parts(self, attn_implementation)
        for config, name in asked:
            if name in OURS and config is not self.config:
                check_config(self, config, name)
    try:
        result = original(self, attn_implementation, *args, **kwargs)
        for config, name in asked:
            if name in OURS and config._attn_implementation != name:
                raise refusal(config.model_type, name)
        for config, name in patched:
            run_beneath(config, name)
        check_unpatchable(self)
    except BaseException:
        for config, name in before:
            config._attn_implementation_internal = name
        for config, name in beneath:
            setattr(config, STOCK, name)
        raise
    warn_replaced(self.config, saved, f"{type(self).__name__} running")
    settle_names(self)
    return result


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


def warn_replaced(config, saved: str | dict | None, what: str) -> None:
    """Warn, once, where a mechanism's name that was part of a checkpoint has given way to another name.

    Args:
        config: as it is now.
        saved: what it said before, as in config.json.
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


def requested(config, implementation: str | dict) -> list[tuple]:
    """(config, name) of every (sub-)config that a value for `set_attn_implementation` names."""
    if not isinstance(implementation, dict):
        return [(config, implementation)]
    found = []
    for key, value in implementation.items():
        part = config if key == "" else getattr(config, key, None)
        if part is not None:
            found += requested(part, value)
    return found
