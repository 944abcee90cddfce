"""What Transformers' configs know of our names: they write the one that runs, and allow it to return weights.

Transformers never writes the attention implementation of a config, so that a model which ran "cone" would come back
with SDPA. Wrapped, once, at import:

- `PreTrainedConfig.to_dict`: the dict, and so every config.json, has `attn_implementation` where a name of ours runs;
- `PreTrainedConfig.from_dict`, `PreTrainedModel.from_pretrained` and `_from_config`: a name that the caller gives in
  place of a saved one wins, with one warning;
- `PreTrainedConfig.output_attentions` and its validator, which allow "eager" alone.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from .guard import warn_replaced
from .records import saved_name
from .stock import OURS, PATCHED
from .wrapping import wrap


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
    return _with_name_of(kwargs.get("config"), original, cls, *args, **kwargs)


@wrap("_from_config", PreTrainedModel)
def _from_config(original, cls, config, **kwargs):
    return _with_name_of(config, original, cls, config, **kwargs)


def _with_name_of(config, original, cls, /, *args, **kwargs):
    """`original`, with a warning where the call names another implementation than the config it is given."""
    asked = kwargs.get("attn_implementation")
    saved = saved_name(config) if asked is not None and isinstance(config, PreTrainedConfig) else None
    found = original(cls, *args, **kwargs)
    if saved:
        warn_replaced(
            (found[0] if isinstance(found, tuple) else found).config, saved, f"a {cls.__name__} saved"
        )
    return found


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
