"""What Transformers' configs know of our names: they write the one that runs, and allow it to return weights.

Transformers never writes the attention implementation of a config, so that a model which ran "cone" would come back
with SDPA. Wrapped, once, at import:

- `PreTrainedConfig.to_dict`: the dict, and so every config.json, has `attn_implementation` where a name of ours runs;
- `PreTrainedConfig.from_dict` and the setter of `_attn_implementation`: a name that the caller gives in place of a
  saved one wins, with one warning; on a patched config it is what runs beneath;
- `PreTrainedConfig.output_attentions` and its validator, which allow "eager" alone;
- continuous batching (`model.generate_batch`, `transformers serve --continuous-batching`), which lets in "sdpa", eager
  and flash attention by their names, and makes a mask for the first two. Names of ours get the same mask, which says of
  every pair whether it belongs together; a mechanism that asks where a key stands in its text is refused.
"""

from __future__ import annotations

import copy
import inspect
from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..config import HyperAttnConfig
from ..mechanisms.scores import ScoreConfig
from ..registry import named_configs
from .checkpoint_config import (
    INTERNAL,
    LOADING,
    all_configs,
    check_keys,
    inner,
    patched_hosts,
    running_on,
    saved_name,
    sub_configs,
    tree,
)
from .hooks import set_on_models, warn_replaced
from .stock import OURS, PATCHED, RUNNING, marked, run_beneath
from .wrapping import subclasses, wrap

BATCHING = "transformers.generation.continuous_batching"
#: The class whose properties are replaced.
CONFIG: Any = PreTrainedConfig


@wrap("to_dict", PreTrainedConfig)
def _to_dict(original, self):
    values, name = original(self), saved_name(self)
    if name:
        values["attn_implementation"] = name
        if "hyperattn" not in values and isinstance(
            config := named_configs().get(str(name)), ScoreConfig
        ):
            values["hyperattn"] = HyperAttnConfig(
                [config], mode="replace"
            ).to_dict()  # what a reader must import
    elif PATCHED in str(values.get("attn_implementation")):
        del values["attn_implementation"]  # left by an exported checkpoint that was unpatched
    return values


@wrap("from_dict", PreTrainedConfig)
def _from_dict(original, cls, config_dict, **kwargs):
    saved, requested = config_dict.get("attn_implementation"), kwargs.get("attn_implementation")
    result = original(cls, config_dict, **kwargs)
    if requested is not None:
        config = result[0] if isinstance(result, tuple) else result
        warn_replaced(config, saved, f"a {cls.__name__} saved")
    return result


@wrap("_from_config", PreTrainedModel)
def _from_config(original, cls, config, **kwargs):
    if kwargs.get("attn_implementation") is not None and running_on(config):
        config = copy.deepcopy(
            config
        )  # Transformers would set the name on the other model's config too
    token = LOADING.set(True)
    try:
        return original(cls, config, **kwargs)
    finally:
        LOADING.reset(token)


def keep_names() -> None:
    """Let `config._attn_implementation = name` lose nothing: loaders, Whisper's timestamps and others set it so.

    A name of ours reaches the models that run on the config. On a patched config the name becomes what runs beneath; a
    mechanism's name gives way to it with a warning.
    """
    stock: Any = inspect.getattr_static(PreTrainedConfig, "_attn_implementation")

    def setter(self, value):
        if INTERNAL not in self.__dict__:  # it is being made
            return _set_name(self, value)
        saved = saved_name(self)
        before = [(config, getattr(config, INTERNAL, None)) for config in tree(self)]
        try:
            if not LOADING.get():
                set_on_models(self, value)
            _set_name(self, value)
        except ValueError:
            for config, name in before:
                setattr(config, INTERNAL, name)
            raise
        warn_replaced(self, saved, f"a {type(self).__name__} saved")

    CONFIG._attn_implementation = property(stock.fget, setter, doc=stock.__doc__)


def _set_name(config, value: str | dict | None) -> None:
    """Set the implementation of a config and of those below it, where a dict names them by their keys."""
    before = getattr(config, INTERNAL, None)
    if isinstance(value, dict):
        check_keys(config, value)
    name = value.get("", before) if isinstance(value, dict) else value
    setattr(config, INTERNAL, name)
    if not LOADING.get() and marked(config):
        run_beneath(config, before if before in OURS else RUNNING)
    for key, part in sub_configs(config) if config.sub_configs else ():
        below = value.get(key, getattr(part, INTERNAL, None)) if isinstance(value, dict) else value
        _set_name(part, below)


def allow_output_attentions() -> None:
    """Let configs that run a name of ours have output_attentions=True, in the setter and at every save and load."""
    stock: Any = inspect.getattr_static(PreTrainedConfig, "output_attentions")

    def setter(self, value):
        if self._attn_implementation in OURS:
            self._output_attentions = value
        else:
            stock.fset(self, value)

    CONFIG.output_attentions = property(stock.fget, setter, doc=stock.__doc__)

    @wrap("validate_output_attentions", PreTrainedConfig)
    def validate(original, self):
        if self._attn_implementation not in OURS:
            original(self)

    new = CONFIG.validate_output_attentions
    for cls in (
        PreTrainedConfig,
        *subclasses(PreTrainedConfig),
    ):  # each keeps a list of its validators
        validators = vars(cls).get("__class_validators__", [])
        validators[:] = [new if v is new.__wrapped__ else v for v in validators]


@wrap(
    "switch_to_cb_friendly_attn",
    import_module(f"{BATCHING}.continuous_api").ContinuousBatchingManager,
)
def _switch_attention(original, self, model, *args, **kwargs):
    if model.config._attn_implementation not in OURS:
        return original(self, model, *args, **kwargs)
    running = {config._attn_implementation for config in all_configs(model)}
    mechanisms = [config for name, config in named_configs().items() if name in running]
    mechanisms += [
        config for _, host in patched_hosts(model) for config in inner(host.hyper).mechanisms()
    ]
    for config in mechanisms:
        if config.positional:
            raise ValueError(
                f"{config.mechanism} is refused in continuous batching: it needs the place of every key in its own "
                "text, and Transformers hands to attention the keys of all requests without it; allowed: generate(), "
                "or continuous batching of a model without it"
            )
    return None


@wrap("attn_mask_is_needed", import_module(f"{BATCHING}.input_outputs"))
def _needs_mask(original, config):
    return config._attn_implementation in OURS or original(config)


allow_output_attentions()
keep_names()
