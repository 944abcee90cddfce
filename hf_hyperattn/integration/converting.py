"""`convert`: changes of architecture, by the conversion that a config asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from ..config import HyperAttnConfig, MechanismConfig
from ..fields import short
from .conversions import CONVERSIONS, Conversion, asked_for, conversion_of
from .records import patched_hosts, recorded_hosts


def convert(
    model: nn.Module,
    config: MechanismConfig | HyperAttnConfig,
    keep_original: bool = False,
    *,
    examples: Iterable[Mapping] | None = None,
) -> PreTrainedModel:
    """Turn a pretrained model into one of another architecture: `HatConfig(...)`, `CollaborativeConfig(rank=...)`.

    Unlike a patch a conversion replaces parts of the model, starts as an approximation of it, and has no blend. The
    result is saved and loaded like any model, with the plugin imported.

    Args:
        model: a Transformers model, by itself; adapters are merged first, and it is not patched.
        config: a mechanism's config that asks for a conversion. Where the conversion leaves the model its class
            (collaborative), also a `HyperAttnConfig` that chooses layers or has other mechanisms beside it.
        keep_original: keep in memory what is replaced, so that `unpatch_model` can give it back. It is never saved.
        examples: calls of the model, each the keywords of one, such as what a tokenizer returns; collaborative then
            keeps logits on what the model sees there, instead of weights as such.

    Returns:
        The converted model: the same object where the conversion is made in place, else a new one.

    Raises:
        ValueError: a mechanism without a conversion, a model that is converted or patched already, wrapped, or of a
            family that cannot be converted. The model is left as it was.
    """
    conversion, asked = _conversion(config)
    base = _checked(model)
    if not isinstance(keep_original, bool):
        raise ValueError(f"keep_original={short(keep_original)} is not allowed; allowed: True or False")
    if examples is None:
        return conversion.run(base, asked, keep_original)
    if not conversion.learns:
        raise ValueError(f"{_mechanism(config)} reads no examples; allowed: examples=None")
    return conversion.run(base, asked, keep_original, examples=_calls(examples))


def _calls(examples: Iterable[Mapping]) -> list[Mapping]:
    """The examples as a list, where each can be the keywords of a call."""
    single = isinstance(examples, Mapping | str) or not isinstance(examples, Iterable)
    calls = [] if single else list(examples)
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(
            f"examples={short(examples)} is not allowed; allowed: a list of dicts, at least one, each the keywords "
            "of a call, such as [tokenizer(texts, return_tensors='pt', padding=True)]"
        )
    return calls


def _mechanism(config: MechanismConfig | HyperAttnConfig) -> str:
    return (config.mechanisms[0] if isinstance(config, HyperAttnConfig) else config).mechanism


def _conversion(
    config: MechanismConfig | HyperAttnConfig,
) -> tuple[Conversion, MechanismConfig | HyperAttnConfig]:
    """The conversion that a config asks for, and the config in the form that it takes."""
    given = config.mechanisms if isinstance(config, HyperAttnConfig) else (config,)
    if not given or not all(isinstance(mechanism, MechanismConfig) for mechanism in given):
        raise ValueError(
            f"convert got {short(config)}; allowed: the config of a conversion, of {_names()}, such as "
            "CollaborativeConfig(rank=96)"
        )
    found = [c for c in map(asked_for, given) if c is not None]
    if not found:
        raise ValueError(
            f"{' with '.join(map(short, given))} asks for no change of architecture; "
            f"patch_model is for it, and conversions are: {_names()}"
        )
    if isinstance(config, HyperAttnConfig) and not found[0].composes:
        if len(given) > 1 or config != HyperAttnConfig(given):
            raise ValueError(
                f"{given[0].mechanism} converts a whole model by itself; allowed: its config alone, and patch_model "
                "on the result"
            )
        return found[0], given[0]
    return found[0], config


def _names() -> str:
    return ", ".join(sorted(CONVERSIONS)) or "none registered"


def _checked(model: nn.Module) -> PreTrainedModel:
    """The model, where it can be converted."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"convert got {type(model).__name__}; allowed: a PreTrainedModel by itself: merge adapters first "
            "(merge_and_unload), convert, then compile or wrap"
        )
    name = conversion_of(model)
    if name is not None:
        raise ValueError(
            f"{type(model).__name__} is converted already, by {name}; allowed: one conversion, of the original model"
        )
    if recorded_hosts(model.config) is not None or any(patched_hosts(model)):
        raise ValueError(
            f"{type(model).__name__} is patched, and a conversion starts from the original; call "
            "unpatch_model(model) first"
        )
    if getattr(model.config, "hyperattn", None) is not None:
        raise ValueError(
            f"config.hyperattn of {type(model).__name__} holds parameters of mechanisms used by name; take it out "
            "before converting: del model.config.hyperattn"
        )
    return model
