"""`convert`: change a model's architecture by a mechanism, and keep what was replaced.

A patch adds to a model and starts as the identity. A conversion replaces parts of the model. The
model's class or its modules show that it was converted. If it was converted in place, a reload
rebuilds the converted structure before the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...config import HyperAttnConfig, MechanismConfig
from ...config.fields import refuse
from ...utils.text import short
from ..attention.hyper import patched_hosts
from ..parallel.offloaded import without_weights
from .checkpoint_config import inner_models_of, ranks_of, recorded_hosts
from .modes import building_on
from .versions import warn_of_newer_versions

#: Attribute of a converted model: how to restore the original. It is not in the state dict, so it
#: is never saved.
ORIGINAL = "_hyperattn_original"


@dataclass(frozen=True)
class Conversion:
    """How one mechanism converts models.

    Args:
        run: `run(model, config, keep_original) -> converted model`, the same object if converted in
            place. If it fails or is interrupted, the model must be unchanged.
        requested: Whether a config of the mechanism asks for a conversion. `patch_model` refuses
            such configs.
        done: Whether a model is the result of this conversion.
        in_place: Whether the model keeps its class. Its attention layers then have a `hyper`,
            `unpatch_model` undoes patch and conversion, and `REBUILDERS` holds the function for
            reloads.
        composes: Whether `run` also takes a `HyperAttnConfig`, with a choice of layers and with
            other mechanisms.
        learns: Whether `run` also takes `examples=`, calls of the model that the result is fitted
            to.
    """

    run: Callable[..., PreTrainedModel]
    requested: Callable[[MechanismConfig], bool]
    done: Callable[[PreTrainedModel], bool]
    in_place: bool = False
    composes: bool = False
    learns: bool = False


#: Conversions by the name of their mechanism.
CONVERSIONS: dict[str, Conversion] = {}

#: By mechanism, the function that gives a patched model its converted structure before the weights
#: are loaded. It does nothing for a model that was not converted. Each is in a module that
#: `hyperattn export` copies.
REBUILDERS: dict[str, Callable[[PreTrainedModel], None]] = {}


def register_conversion(mechanism: str, conversion: Conversion) -> None:
    """Register the conversion of a mechanism.

    Raises:
        ValueError: The mechanism has one already.
    """
    if mechanism in CONVERSIONS:
        raise ValueError(f"a conversion for {mechanism!r} is registered already")
    CONVERSIONS[mechanism] = conversion


def conversion_for(config: MechanismConfig) -> Conversion | None:
    """Return the conversion that a mechanism's config asks for, or None for a patch."""
    conversion = CONVERSIONS.get(config.mechanism)
    return conversion if conversion is not None and conversion.requested(config) else None


def refuse_conversions(config: HyperAttnConfig) -> None:
    """Raise if a config for `patch_model` contains a mechanism that needs a conversion."""
    overrides = (
        mechanism for configs in (config.overrides or {}).values() for mechanism in configs
    )
    for mechanism in (*config.mechanisms, *overrides):
        if conversion_for(mechanism) is not None:
            raise ValueError(
                f"{short(mechanism)} changes the architecture, which patch_model does not do; "
                "hf_hyperattn.convert(model, config) is for it"
            )


def conversion_of(model: PreTrainedModel) -> str | None:
    """Return the mechanism that a model was converted by, or None."""
    return next((name for name, conversion in CONVERSIONS.items() if conversion.done(model)), None)


def keep_parts(
    model: PreTrainedModel, restore: Callable[[Any, Any], nn.Module], parts: object
) -> None:
    """Keep in memory what `unpatch_model` gives back.

    A saved conversion comes back without it.

    Args:
        restore: `restore(converted, parts) -> original model`.
        parts: Whatever `restore` needs.
    """
    model.__dict__[ORIGINAL] = restore, parts


def give_back(model: PreTrainedModel, mechanism: str) -> nn.Module:
    """Return the model as it was before its conversion.

    Raises:
        ValueError: The original parts were not kept.
    """
    if ORIGINAL not in model.__dict__:
        raise ValueError(
            f"{type(model).__name__} was converted by {mechanism}, which replaced parts of it, and what they were is "
            "not there; load the original again, or convert with keep_original=True, which keeps it in memory until "
            "the model is saved and loaded"
        )
    restore, parts = model.__dict__[ORIGINAL]
    # If this fails, the parts stay, and the caller can try again.
    original = restore(model, parts)
    model.__dict__.pop(ORIGINAL, None)
    return original


def rebuild_conversion(model: PreTrainedModel, config: HyperAttnConfig) -> None:
    """Give a model that is patched for a reload its converted structure.

    Models that were not converted stay as they are.
    """
    for mechanism in config.mechanisms:
        if mechanism.mechanism in REBUILDERS:
            REBUILDERS[mechanism.mechanism](model)
    if ranks_of(model) > 1:
        refuse_ranks(model, conversion_of(model))


def refuse_ranks(model: PreTrainedModel, mechanism: str | None) -> None:
    """Raise if tensor parallelism splits a model that is converted, or about to be."""
    if mechanism is not None and ranks_of(model) > 1:
        raise ValueError(
            f"{type(model).__name__} is cut into {ranks_of(model)} ranks by tensor parallelism, for which what a "
            f"conversion by {mechanism} puts in it has no plan; allowed: DDP, FSDP2 or device_map"
        )


def convert(
    model: nn.Module,
    config: MechanismConfig | HyperAttnConfig,
    keep_original: bool = False,
    *,
    examples: Iterable[Mapping] | None = None,
) -> PreTrainedModel:
    """Convert a pretrained model to another architecture.

    The config is a `HatConfig(...)` or a `CollaborativeConfig(rank=...)`, for example.
    Unlike a patch, a conversion replaces parts of the model, starts as an approximation of it, and
    has no blend mode. The result is saved and loaded like any model, with the plugin imported.

    Args:
        model: A Transformers model without wrappers. Merge adapters first. It must not be patched.
        config: A mechanism's config that asks for a conversion. If the conversion keeps the class
            of the model (collaborative), also a `HyperAttnConfig` with a choice of layers or with
            other mechanisms.
        keep_original: Keep the replaced parts in memory, so that `unpatch_model` can give them
            back. They are never saved.
        examples: Calls of the model, each a dict of keywords such as a tokenizer returns.
            Collaborative conversion then preserves the logits on these inputs, instead of the
            weights.

    Returns:
        The converted model: the same object if converted in place, else a new one.

    Raises:
        ValueError: The mechanism has no conversion, or the model is converted, patched or wrapped
            already, or of a family that cannot be converted. The model is unchanged.
    """
    # Refuse first, convert last: an error leaves the model unchanged.
    conversion, config = _find_conversion(config)
    base = _check_model(model)
    warn_of_newer_versions()
    first = config.mechanisms[0] if isinstance(config, HyperAttnConfig) else config
    refuse_ranks(base, first.mechanism)
    if not isinstance(keep_original, bool):
        refuse("keep_original", keep_original, "True or False")
    options = {}
    if examples is not None:
        if not conversion.learns:
            raise ValueError(f"{first.mechanism} reads no examples; allowed: examples=None")
        options["examples"] = _check_examples(examples)
    # New modules are built on the model's kind of device, whatever default the caller has set.
    with building_on(without_weights([base]), type(base).__name__):
        return conversion.run(base, config, keep_original, **options)


def _check_examples(examples: Iterable[Mapping]) -> list[Mapping]:
    """Return the examples as a list of dicts, each the keywords of one call.

    Raises:
        ValueError: They are not a list of dicts, or empty.
    """
    # One dict is iterable too: a common mistake is to pass the tokenizer's output without a list
    # around it.
    is_one = isinstance(examples, Mapping | str)
    calls = [] if is_one or not isinstance(examples, Iterable) else list(examples)
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        example = "[tokenizer(texts, return_tensors='pt', padding=True)]"
        refuse(
            "examples",
            examples,
            f"a list of dicts, at least one, each the keywords of a call, such as {example}",
        )
    return calls


def _find_conversion(
    config: MechanismConfig | HyperAttnConfig,
) -> tuple[Conversion, MechanismConfig | HyperAttnConfig]:
    """Return the conversion that a config asks for, and the config in the form that it takes.

    Raises:
        ValueError: No mechanism of the config asks for a conversion, or it cannot be combined as
            given.
    """
    mechanisms = config.mechanisms if isinstance(config, HyperAttnConfig) else (config,)
    names = ", ".join(sorted(CONVERSIONS)) or "none registered"
    if not mechanisms or not all(
        isinstance(mechanism, MechanismConfig) for mechanism in mechanisms
    ):
        raise ValueError(
            f"convert got {short(config)}; allowed: the config of a conversion, of {names}, such as "
            "CollaborativeConfig(rank=96)"
        )
    conversion = next(filter(None, map(conversion_for, mechanisms)), None)
    if conversion is None:
        raise ValueError(
            f"{' with '.join(map(short, mechanisms))} asks for no change of architecture; "
            f"patch_model is for it, and conversions are: {names}"
        )
    if isinstance(config, HyperAttnConfig) and not conversion.composes:
        # Any setting but the default would be lost.
        if len(mechanisms) > 1 or config != HyperAttnConfig(mechanisms):
            raise ValueError(
                f"{mechanisms[0].mechanism} converts a whole model by itself; allowed: its config alone, and "
                "patch_model on the result"
            )
        return conversion, mechanisms[0]
    return conversion, config


def _check_model(model: nn.Module) -> PreTrainedModel:
    """Return the model if it can be converted.

    Raises:
        ValueError: It is wrapped, converted or patched already, or runs a mechanism by name.
    """
    if not isinstance(model, PreTrainedModel):
        advice = inner_models_of(model) if isinstance(model, nn.Module) else ""
        raise ValueError(
            f"convert got {type(model).__name__}; allowed: a PreTrainedModel by itself: merge adapters first "
            f"(merge_and_unload), convert, then compile or wrap{advice and '; '}{advice}"
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
    refuse_by_name(model, "converting")
    return model


def refuse_by_name(model: PreTrainedModel, what: str) -> None:
    """Raise if the model's config holds parameters of mechanisms that run by name.

    Args:
        what: The operation that is refused, for the error.
    """
    if (
        getattr(model.config, "hyperattn", None) is not None
        and recorded_hosts(model.config) is None
    ):
        raise ValueError(
            f"config.hyperattn of {type(model).__name__} holds parameters of mechanisms used by name; take it out "
            f"before {what}: del model.config.hyperattn"
        )
