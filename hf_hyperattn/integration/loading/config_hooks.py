"""Hooks on Transformers' configs: they save the running attention name, and let it return weights.

Transformers never writes the attention implementation of a config. A model that ran "cone" would
come back with SDPA. These functions are wrapped once, on import:

- `PreTrainedConfig.to_dict`: adds `attn_implementation` if a name of ours runs, and so to every
  config.json.
- `PreTrainedConfig.from_dict` and the setter of `_attn_implementation`: a name from the caller
  replaces the saved name, with one warning. On a patched config it becomes the base implementation.
- `PreTrainedConfig.output_attentions` and its validator, which only allow "eager".
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ...config import HyperAttnConfig
from ...config.registry import named_configs
from ...mechanisms.scores import ScoreConfig
from ..attention.stock import OURS, PATCHED, RUNNING, marked, run_beneath
from ..patching.checkpoint_config import (
    INTERNAL,
    LOADING,
    check_keys,
    list_configs,
    running_on,
    saved_name,
    sub_configs,
)
from ..patching.wrapping import subclasses, wrap
from .hooks import set_on_models, warn_replaced

#: The class whose properties are replaced; `Any`, because type checkers refuse to assign
#: properties.
CONFIG: Any = PreTrainedConfig


@wrap("to_dict", PreTrainedConfig)
def _to_dict(original, self):
    """Add the running name, and the record of a user's own score, to the dict."""
    values = original(self)
    name = saved_name(self)
    if name:
        values["attn_implementation"] = name
        if "hyperattn" not in values:
            config = named_configs().get(str(name))
            if isinstance(config, ScoreConfig):
                # A score of the user's own: the record names the module that a reader must import.
                values["hyperattn"] = HyperAttnConfig([config], mode="replace").to_dict()
    elif PATCHED in str(values.get("attn_implementation")):
        # An exported checkpoint left the name, and the model was unpatched since.
        del values["attn_implementation"]
    return values


@wrap("from_dict", PreTrainedConfig)
def _from_dict(original, cls, config_dict, **kwargs):
    """Warn if the caller's name replaces a saved name of ours."""
    # Read the saved name first: Transformers writes the requested one into `config_dict`.
    saved = config_dict.get("attn_implementation")
    requested = kwargs.get("attn_implementation")
    result = original(cls, config_dict, **kwargs)
    if requested is not None:
        config = result[0] if isinstance(result, tuple) else result
        warn_replaced(config, saved, f"a {cls.__name__} saved")
    return result


@wrap("_from_config", PreTrainedModel)
def _from_config(original, cls, config, **kwargs):
    """Build a model without changing a config that another model runs on."""
    if kwargs.get("attn_implementation") is not None and running_on(config):
        # Transformers sets the name on this config, which another model already runs on.
        config = copy.deepcopy(config)
    token = LOADING.set(True)
    try:
        return original(cls, config, **kwargs)
    finally:
        LOADING.reset(token)


def keep_names() -> None:
    """Let `config._attn_implementation = name` act on the models that run on the config.

    Loaders, Whisper's timestamps and others set the name this way. One of our names is set on the
    models. On a patched config the name becomes the base implementation. A saved name of ours that
    is replaced gives a warning.
    """
    stock: Any = inspect.getattr_static(PreTrainedConfig, "_attn_implementation")

    def set_implementation(self, value):
        if INTERNAL not in self.__dict__:
            # The config is being created, so no model runs on it.
            return _set_name(self, value)
        saved = saved_name(self)
        before = [(config, getattr(config, INTERNAL, None)) for config in list_configs(self)]
        try:
            if not LOADING.get():
                set_on_models(self, value)
            _set_name(self, value)
        except ValueError:
            # A refused name changes nothing, at any level.
            for config, name in before:
                setattr(config, INTERNAL, name)
            raise
        warn_replaced(self, saved, f"a {type(self).__name__} saved")

    CONFIG._attn_implementation = property(stock.fget, set_implementation, doc=stock.__doc__)


def _set_name(config, value: str | dict | None) -> None:
    """Set the implementation of a config and of the configs below it.

    Args:
        value: A name for all, or a dict of names by part, "" for the config itself.
    """
    before = getattr(config, INTERNAL, None)
    if isinstance(value, dict):
        check_keys(config, value)
    name = value.get("", before) if isinstance(value, dict) else value
    setattr(config, INTERNAL, name)
    # While a model loads, `resolve_stock` does this once its modules exist.
    if not LOADING.get() and marked(config):
        run_beneath(config, before if before in OURS else RUNNING)
    for key, part in sub_configs(config) if config.sub_configs else ():
        below = value.get(key, getattr(part, INTERNAL, None)) if isinstance(value, dict) else value
        _set_name(part, below)


def allow_output_attentions() -> None:
    """Allow output_attentions=True for our names: in the setter, and on every save and load."""
    stock: Any = inspect.getattr_static(PreTrainedConfig, "output_attentions")

    def set_output_attentions(self, value):
        if self._attn_implementation in OURS:
            self._output_attentions = value
        else:
            stock.fset(self, value)

    CONFIG.output_attentions = property(stock.fget, set_output_attentions, doc=stock.__doc__)

    @wrap("validate_output_attentions", PreTrainedConfig)
    def validate_for_our_names(original, self):
        if self._attn_implementation not in OURS:
            original(self)

    # Every config class keeps its own list of validators, so the wrapped one replaces the original
    # in each list.
    new = CONFIG.validate_output_attentions
    for cls in (PreTrainedConfig, *subclasses(PreTrainedConfig)):
        validators = vars(cls).get("__class_validators__", [])
        validators[:] = [new if v is new.__wrapped__ else v for v in validators]


allow_output_attentions()
keep_names()
