"""A causal LM with its own attention and patched, for commands that measure both."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hf_hyperattn as ha

from ..config import MechanismConfig
from ..integration.checkpoint_config import patched_hosts
from ..integration.checkpoint_files import errors_as, load_config
from ..registry import MECHANISMS, named_configs
from .demo import device_of

OWN, PATCHED = "own attention", "patched"


def mechanism_configs(recipe: str) -> list[MechanismConfig]:
    """The configs that a recipe names, such as "cone+hype": mechanisms with their defaults, or names of attention."""
    named = named_configs()
    return [
        named[name] if name in named else MECHANISMS[name].config() for name in recipe.split("+")
    ]


def causal_config(path: str) -> PreTrainedConfig:
    """The config of a causal LM; raises ValueError for what is none."""
    config = load_config(path, path)
    classes = "".join(config.architectures or ())
    causal = (
        "CausalLM" in classes or "LMHead" in classes
    )  # a BERT can be loaded as one, and then reads both ways
    if type(config) not in AutoModelForCausalLM._model_mapping or not causal:
        raise ValueError(
            f"{path}: {config.model_type} is no causal LM; allowed: a model that AutoModelForCausalLM loads"
        )
    return config


def check_request(args: argparse.Namespace, config: PreTrainedConfig, needs_patch: bool) -> None:
    """Refuse --mechanism for a model that has one, and a comparison of a model with itself, before anything is loaded.

    Args:
        needs_patch: whether a model with its own attention says nothing by itself.
    """
    patched = is_patched(config)
    if patched and args.mechanism:
        raise ValueError(
            f"{args.model}: patched already; leave out --mechanism, or name a model with its own attention"
        )
    if needs_patch and not patched and not args.mechanism:
        raise ValueError(
            f"{args.model}: has its own attention; add what to measure beside it: --mechanism cone"
        )
    if args.mode != "blend" and not args.mechanism:
        raise ValueError(f"--mode {args.mode} says nothing without --mechanism; leave it out")


def is_patched(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint has attention of ours: patched, converted, or by name."""
    return getattr(config, "hyperattn", None) is not None or by_name(config)


def by_name(config: PreTrainedConfig) -> bool:
    """Whether attention of ours runs by its name alone."""
    return getattr(config, "_attn_implementation", None) in named_configs()


def load(args: argparse.Namespace) -> Any:
    """The model on its device, in evaluation mode."""
    device = device_of(args.device)
    with errors_as(f"{args.model}: cannot load it"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype)
        )
    return model.to(device).eval()


def patch(model: Any, recipe: str, mode: Any, layers: Any = None) -> Any:
    """Patch a model by a recipe; raises ValueError in one line for what cannot be."""
    with errors_as(f"--mechanism {recipe}"):
        return ha.patch_model(model, *mechanism_configs(recipe), mode=mode, layers=layers)


def measure_both(
    args: argparse.Namespace, model: Any, measure: Callable[[Any], Any]
) -> dict[str, Any]:
    """What `measure` says of a model with its own attention and patched, by `OWN` and `PATCHED`; of one alone where
    there is no other: a stock model without --mechanism, a conversion.
    """
    if not is_patched(model.config):
        own = {OWN: measure(model)}
        return own | (
            {PATCHED: measure(patch(model, args.mechanism, args.mode).eval())}
            if args.mechanism
            else {}
        )
    patched = measure(model)
    if not any(patched_hosts(model)) and by_name(model.config):
        model.set_attn_implementation("sdpa")
    else:
        try:
            ha.unpatch_model(model)
        except ValueError:  # a conversion, whose original is not there
            return {PATCHED: patched}
    return {OWN: measure(model), PATCHED: patched}
