"""What Transformers' configs know of our names: they write the one that runs, and allow it to return weights.

Transformers never writes the attention implementation of a config, so that a model which ran "cone" would come back
with SDPA. Wrapped, once, at import:

- `PreTrainedConfig.to_dict`: the dict, and so every config.json, has `attn_implementation` where a name of ours runs;
- `PreTrainedConfig.from_dict` and the setter of `_attn_implementation`: a name that the caller gives in place of a
  saved one wins, with one warning; on a patched config it is what runs beneath;
- `PreTrainedConfig.output_attentions` and its validator, which allow "eager" alone.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar

from transformers import PreTrainedConfig, PreTrainedModel

from .guard import running_on, set_on_models, warn_replaced
from .records import saved_name, sub_configs, tree
from .stock import OURS, PATCHED, RUNNING, marked, run_beneath
from .wrapping import wrap

#: Where a config keeps the name.
INTERNAL = "_attn_implementation_internal"
#: Whether a model is being built: what its loader asks for is checked then, and settled by `settle_stock`.
LOADING: ContextVar[bool] = ContextVar("hyperattn_loading", default=False)


@wrap("to_dict", PreTrainedConfig)
def _to_dict(original, self):
    values, name = original(self), saved_name(self)
    if name:
        values["attn_implementation"] = name
    elif PATCHED in str(values.get("attn_implementation")):
        del values["attn_implementation"]  # left by an exported checkpoint that was unpatched
    return values


@wrap("from_dict", PreTrainedConfig)
def _from_dict(original, cls, config_dict, **kwargs):
    saved, asked = config_dict.get("attn_implementation"), kwargs.get("attn_implementation")
    found = original(cls, config_dict, **kwargs)
    if asked is not None:
        config = found[0] if isinstance(found, tuple) else found
        warn_replaced(config, saved, f"a {cls.__name__} saved")
    return found


@wrap("from_pretrained", PreTrainedModel)
def _from_pretrained(original, cls, *args, **kwargs):
    return _while_loading(original, cls, *args, **kwargs)


@wrap("_from_config", PreTrainedModel)
def _from_config(original, cls, config, **kwargs):
    if kwargs.get("attn_implementation") is not None and running_on(config):
        config = copy.deepcopy(config)  # Transformers would set the name on the other model's config too
    return _while_loading(original, cls, config, **kwargs)


def _while_loading(original, /, *args, **kwargs):
    token = LOADING.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        LOADING.reset(token)


def keep_names() -> None:
    """Let `config._attn_implementation = name` lose nothing: loaders, Whisper's timestamps and others set it so.

    A name of ours reaches the models that run on the config. On a patched config the name becomes what runs beneath; a
    mechanism's name gives way to it with a warning.
    """
    stock = PreTrainedConfig._attn_implementation

    def setter(self, value):
        ready = INTERNAL in self.__dict__  # else it is being made
        saved = saved_name(self) if ready else None
        before = [(config, getattr(config, INTERNAL, None)) for config in tree(self)]
        try:
            if ready and not LOADING.get():
                set_on_models(self, value)
            _set_name(self, value)
        except ValueError:
            for config, name in before:
                setattr(config, INTERNAL, name)
            raise
        warn_replaced(self, saved, f"a {type(self).__name__} saved")

    PreTrainedConfig._attn_implementation = property(stock.fget, setter, doc=stock.__doc__)


def _set_name(config, value: str | dict | None) -> None:
    """Set the implementation of a config and of those below it, where a dict names them by their keys."""
    before = getattr(config, INTERNAL, None)
    name = value.get("", before) if isinstance(value, dict) else value
    setattr(config, INTERNAL, name)
    if marked(config) and not LOADING.get():
        run_beneath(config, before if before in OURS else RUNNING)
    for key, part in sub_configs(config):
        below = value.get(key, getattr(part, INTERNAL, None)) if isinstance(value, dict) else value
        _set_name(part, below)


def allow_output_attentions() -> None:
    """Let configs that run a name of ours have output_attentions=True, in the setter and at every save and load."""
    stock = PreTrainedConfig.output_attentions

    def setter(self, value):
        if self._attn_implementation in OURS:
            self._output_attentions = value
        else:
            stock.fset(self, value)

    PreTrainedConfig.output_attentions = property(stock.fget, setter, doc=stock.__doc__)

    @wrap("validate_output_attentions", PreTrainedConfig)
    def validate(original, self):
        if self._attn_implementation not in OURS:
            original(self)

    new = PreTrainedConfig.validate_output_attentions
    classes = [PreTrainedConfig]
    for cls in classes:  # each class keeps a list of its validators; classes made later find the new one
        classes += cls.__subclasses__()
        validators = vars(cls).get("__class_validators__", [])
        validators[:] = [new if v is new.__wrapped__ else v for v in validators]


allow_output_attentions()
keep_names()
