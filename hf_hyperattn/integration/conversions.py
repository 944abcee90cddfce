"""`convert`: changes of architecture, by mechanism, and what they put aside.

A patch adds to a model and starts as the identity; a conversion replaces parts of it. A conversion is recorded where it
can be recognised, by the model's class or by its modules, and where it was made in place it is rebuilt on reload before
the weights come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..config import HyperAttnConfig, MechanismConfig
from ..fields import refuse, short
from .checkpoint_config import inner_models_of, patched_hosts, ranks_of, recorded_hosts
from .modes import building_on
from .offloaded import without_weights
from .versions import warn_of_newer_versions

#: Where a converted model keeps what it was made from; no part of its state dict, so that it is never saved.
ORIGINAL = "_hyperattn_original"


@dataclass(frozen=True)
class Conversion:
    """How models are converted by one mechanism.

    Args:
        run: `run(model, config, keep_original) -> converted model`, the same object where it is done in place. Whatever
            goes wrong in it, and also where it is interrupted, the model is left as it was.
        requested: whether a config of the mechanism asks for a conversion; it is then refused by `patch_model`.
        done: whether a model is a result of it.
        in_place: whether the model keeps its class. Its hosts then have a `hyper`, `unpatch_model` undoes both, and
            what is in `REBUILDERS` brings it back.
        composes: whether `run` also takes a `HyperAttnConfig`, with layers and with other mechanisms beside it.
        learns: whether `run` also takes `examples=`, calls of the model that the result is fitted to.
    """

    run: Callable[..., PreTrainedModel]
    requested: Callable[[MechanismConfig], bool]
    done: Callable[[PreTrainedModel], bool]
    in_place: bool = False
    composes: bool = False
    learns: bool = False


#: Conversions by the name of their mechanism.
CONVERSIONS: dict[str, Conversion] = {}

#: By mechanism, what gives a patched model that is being built its converted structure, for weights that come next;
#: does nothing where the model was not converted. In modules of their own, which `hyperattn export` copies.
REBUILDERS: dict[str, Callable[[PreTrainedModel], None]] = {}


def register_conversion(mechanism: str, conversion: Conversion) -> None:
    """Make a conversion known; a second one for the same mechanism is refused."""
    if mechanism in CONVERSIONS:
        raise ValueError(f"a conversion for {mechanism!r} is registered already")
    CONVERSIONS[mechanism] = conversion


def conversion_for(config: MechanismConfig) -> Conversion | None:
    """The conversion that a mechanism's config asks for; None where it is a patch."""
    conversion = CONVERSIONS.get(config.mechanism)
    return conversion if conversion is not None and conversion.requested(config) else None


def refuse_conversions(config: HyperAttnConfig) -> None:
    """Raise where a config for `patch_model` has a mechanism that only a conversion can bring."""
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
    """The mechanism by which a model was converted; None where it was not."""
    return next((name for name, conversion in CONVERSIONS.items() if conversion.done(model)), None)


def keep_parts(
    model: PreTrainedModel, restore: Callable[[Any, Any], nn.Module], parts: object
) -> None:
    """Put aside what `unpatch_model` gives back, as `restore(converted, parts)`. It is in memory only: a saved
    conversion comes back without it.
    """
    model.__dict__[ORIGINAL] = restore, parts


def give_back(model: PreTrainedModel, mechanism: str) -> nn.Module:
    """The model as it was before its conversion; ValueError where that was not kept."""
    if ORIGINAL not in model.__dict__:
        raise ValueError(
            f"{type(model).__name__} was converted by {mechanism}, which replaced parts of it, and what they were is "
            "not there; load the original again, or convert with keep_original=True, which keeps it in memory until "
            "the model is saved and loaded"
        )
    restore, parts = model.__dict__[ORIGINAL]
    original = restore(model, parts)
    model.__dict__.pop(ORIGINAL, None)
    return original


def rebuild_conversion(model: PreTrainedModel, config: HyperAttnConfig) -> None:
    """Give a model that was patched for a reload the structure that its conversion left, where it was converted."""
    for mechanism in config.mechanisms:
        if mechanism.mechanism in REBUILDERS:
            REBUILDERS[mechanism.mechanism](model)
    if ranks_of(model) > 1:
        refuse_ranks(model, conversion_of(model))


def refuse_ranks(model: PreTrainedModel, mechanism: str | None) -> None:
    """Raise for a model that is converted by a mechanism, or is to be, where ranks share its heads."""
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
    conversion, config = _find_conversion(config)
    base = _check_model(model)
    warn_of_newer_versions()
    refuse_ranks(
        base, (config.mechanisms[0] if isinstance(config, HyperAttnConfig) else config).mechanism
    )
    if not isinstance(keep_original, bool):
        refuse("keep_original", keep_original, "True or False")
    options = {}
    if examples is not None:
        if not conversion.learns:
            mechanism = config.mechanisms[0] if isinstance(config, HyperAttnConfig) else config
            raise ValueError(f"{mechanism.mechanism} reads no examples; allowed: examples=None")
        options["examples"] = _check_examples(examples)
    with building_on(without_weights([base]), type(base).__name__):
        return conversion.run(base, config, keep_original, **options)


def _check_examples(examples: Iterable[Mapping]) -> list[Mapping]:
    """The examples as a list, where each can be the keywords of a call."""
    calls = (
        []
        if isinstance(examples, Mapping | str) or not isinstance(examples, Iterable)
        else list(examples)
    )
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
    """The conversion that a config asks for, and the config in the form that it takes."""
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
        if len(mechanisms) > 1 or config != HyperAttnConfig(mechanisms):
            raise ValueError(
                f"{mechanisms[0].mechanism} converts a whole model by itself; allowed: its config alone, and "
                "patch_model on the result"
            )
        return conversion, mechanisms[0]
    return conversion, config


def _check_model(model: nn.Module) -> PreTrainedModel:
    """The model, where it can be converted."""
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
    """Raise before `what` where the config holds parameters of mechanisms that are used by name."""
    if (
        getattr(model.config, "hyperattn", None) is not None
        and recorded_hosts(model.config) is None
    ):
        raise ValueError(
            f"config.hyperattn of {type(model).__name__} holds parameters of mechanisms used by name; take it out "
            f"before {what}: del model.config.hyperattn"
        )
