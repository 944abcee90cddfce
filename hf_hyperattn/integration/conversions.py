"""Changes of architecture, by mechanism: what `hf_hyperattn.convert` runs, and what it put aside.

A patch adds to a model and starts as the identity; a conversion replaces parts of it. A conversion is recorded where it
can be recognised, by the model's class or by its modules, and where it was made in place it is rebuilt on reload before
the weights come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..config import HyperAttnConfig, MechanismConfig
from ..fields import short

#: Where a converted model keeps what it was made from; no part of its state dict, so that it is never saved.
ORIGINAL = "_hyperattn_original"


@dataclass(frozen=True)
class Conversion:
    """How models are converted by one mechanism.

    Args:
        run: `run(model, config, keep_original) -> converted model`, the same object where it is done in place. Whatever
            goes wrong in it, and also where it is interrupted, the model is left as it was.
        asked: whether a config of the mechanism asks for a conversion; it is then refused by `patch_model`.
        done: whether a model is a result of it.
        in_place: whether the model keeps its class. Its hosts then have a `hyper`, `unpatch_model` undoes both, and
            what is in `REBUILDERS` brings it back.
        composes: whether `run` also takes a `HyperAttnConfig`, with layers and with other mechanisms beside it.
        learns: whether `run` also takes `examples=`, calls of the model that the result is fitted to.
    """

    run: Callable[..., PreTrainedModel]
    asked: Callable[[MechanismConfig], bool]
    done: Callable[[PreTrainedModel], bool]
    in_place: bool = False
    composes: bool = False
    learns: bool = False


#: Conversions by the name of their mechanism.
CONVERSIONS: dict[str, Conversion] = {}

#: By mechanism, what gives a patched model that is being built its converted structure, for weights that come next;
#: does nothing where the model was not converted. In modules of their own, which `hyperattn export` copies.
REBUILDERS: dict[str, Callable[[PreTrainedModel], None]] = {}


@dataclass
class Original:
    """What a conversion with keep_original=True put aside.

    Args:
        restore: `restore(converted, kept) -> original model`.
        kept: what it needs for that.
    """

    restore: Callable[[PreTrainedModel, object], nn.Module]
    kept: object


def register_conversion(mechanism: str, conversion: Conversion) -> None:
    """Make a conversion known; a second one for the same mechanism is refused."""
    if mechanism in CONVERSIONS:
        raise ValueError(f"a conversion for {mechanism!r} is registered already")
    CONVERSIONS[mechanism] = conversion


def asked_for(config: MechanismConfig) -> Conversion | None:
    """The conversion that a mechanism's config asks for; None where it is a patch."""
    conversion = CONVERSIONS.get(config.mechanism)
    return conversion if conversion is not None and conversion.asked(config) else None


def refuse_conversions(config: HyperAttnConfig) -> None:
    """Raise where a config for `patch_model` has a mechanism that only a conversion can bring."""
    own = (mechanism for configs in (config.overrides or {}).values() for mechanism in configs)
    for mechanism in (*config.mechanisms, *own):
        if asked_for(mechanism) is not None:
            raise ValueError(
                f"{short(mechanism)} changes the architecture, which patch_model does not do; "
                "hf_hyperattn.convert(model, config) is for it"
            )


def conversion_of(model: PreTrainedModel) -> str | None:
    """The mechanism by which a model was converted; None where it was not."""
    return next((name for name, conversion in CONVERSIONS.items() if conversion.done(model)), None)


def keep(model: PreTrainedModel, restore: Callable, kept: object) -> None:
    """Put aside what `unpatch_model` gives back. It is in memory only: a saved conversion comes back without it."""
    model.__dict__[ORIGINAL] = Original(restore, kept)


def give_back(model: PreTrainedModel, mechanism: str) -> nn.Module:
    """The model as it was before its conversion.

    Raises:
        ValueError: it was not kept.
    """
    original = model.__dict__.get(ORIGINAL)
    if original is None:
        raise ValueError(
            f"{type(model).__name__} was converted by {mechanism}, which replaced parts of it, and what they were is "
            "not there; load the original again, or convert with keep_original=True, which keeps it in memory until "
            "the model is saved and loaded"
        )
    restored = original.restore(model, original.kept)
    model.__dict__.pop(ORIGINAL, None)
    return restored


def rebuild(model: PreTrainedModel) -> None:
    """Give a model that was patched for a reload the structure that its conversion left, where it was converted."""
    for rebuilder in REBUILDERS.values():
        rebuilder(model)
