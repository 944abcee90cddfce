"""Load and patch a causal LM for commands that measure it unpatched and patched.

A recipe is a string such as "cone+hype" that names the mechanisms to patch in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hf_hyperattn as ha
from hf_hyperattn.config import MechanismConfig
from hf_hyperattn.config.registry import MECHANISMS, named_configs
from hf_hyperattn.integration.attention.hyper import patched_hosts
from hf_hyperattn.integration.loading.checkpoint_files import errors_as, load_config

from .adapters import find_base, is_adapter, load_adapter

OWN, PATCHED = "original", "patched"
#: Rows of an adapter: its base model without the adapter and its patch, and with both.
BASE, ADAPTED = "base model", "with adapter"


def mechanism_configs(recipe: str) -> list[MechanismConfig]:
    """Return the configs that a recipe names, with their defaults."""
    # Names of attention come first: "cone_penumbral" is a setting of the mechanism cone.
    named = named_configs()
    return [
        named[name] if name in named else MECHANISMS[name].config() for name in recipe.split("+")
    ]


def causal_config(path: str) -> PreTrainedConfig:
    """Read the config of a causal LM; for an adapter, the config of its base.

    Raises:
        ValueError: The model is not a causal LM.
    """
    config = load_config(find_base(path), path) if is_adapter(path) else load_config(path, path)
    classes = "".join(config.architectures or ())
    # AutoModelForCausalLM also loads BERT, which then still attends in both directions.
    causal = "CausalLM" in classes or "LMHead" in classes
    if type(config) not in AutoModelForCausalLM._model_mapping or not causal:
        raise ValueError(
            f"{path}: {config.model_type} is no causal LM; allowed: a model that AutoModelForCausalLM loads"
        )
    return config


def check_request(args: argparse.Namespace, config: PreTrainedConfig, needs_patch: bool) -> None:
    """Check --mechanism and --mode against the model, before anything is loaded.

    Args:
        args: The command line.
        config: Config of the model.
        needs_patch: Whether the command needs two kinds of attention to compare.

    Raises:
        ValueError: The options do not fit the model.
    """
    # The config tells enough, so nothing is loaded for these checks.
    patched = is_patched(config)
    if is_adapter(args.model):
        if args.mechanism:
            raise ValueError(
                f"{args.model}: an adapter, which has its own patch; leave out --mechanism, or name its base model"
            )
        # An adapter always has its base to compare with.
        needs_patch = False
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
    """Return whether a checkpoint is patched, converted, or runs a mechanism by name."""
    return getattr(config, "hyperattn", None) is not None or runs_by_name(config)


def runs_by_name(config: PreTrainedConfig) -> bool:
    """Return whether `attn_implementation` alone selects a mechanism."""
    return getattr(config, "_attn_implementation", None) in named_configs()


def load_model(args: argparse.Namespace) -> Any:
    """Load the model on its device, in evaluation mode."""
    device = device_of(args.device)
    dtype = getattr(torch, args.dtype)
    if is_adapter(args.model):
        return load_adapter(args.model, dtype=dtype).to(device).eval()
    with errors_as(f"{args.model}: cannot load it"):
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    return model.to(device).eval()


def patch_recipe(model: Any, recipe: str, mode: Any, layers: Any = None) -> Any:
    """Patch a model with a recipe; raise a one-line ValueError if that fails."""
    with errors_as(f"--mechanism {recipe}"):
        return ha.patch_model(model, *mechanism_configs(recipe), mode=mode, layers=layers)


def measure_both(
    args: argparse.Namespace, model: Any, measure: Callable[[Any], Any]
) -> dict[str, Any]:
    """Measure a model unpatched and patched.

    Args:
        args: The command line.
        model: The model, patched or not.
        measure: Measures a model.

    Returns:
        Measurements by `OWN` and `PATCHED`. One is missing for an unpatched model without
        --mechanism, and for a converted model. An adapter is measured as `BASE` and `ADAPTED`.
    """
    if is_adapter(args.model):
        adapted = measure(model)
        del model
        with errors_as(f"{args.model}: cannot load its base"):
            base: Any = AutoModelForCausalLM.from_pretrained(
                find_base(args.model), dtype=getattr(torch, args.dtype)
            )
        return {BASE: measure(base.to(device_of(args.device)).eval()), ADAPTED: adapted}
    if not is_patched(model.config):
        measured = {OWN: measure(model)}
        if args.mechanism:
            measured[PATCHED] = measure(patch_recipe(model, args.mechanism, args.mode).eval())
        return measured
    # A patched model is measured first, because unpatching changes it in place.
    patched = measure(model)
    # A model by name has no patch to remove, only another name to choose.
    if not any(patched_hosts(model)) and runs_by_name(model.config):
        model.set_attn_implementation("sdpa")
    else:
        try:
            ha.unpatch_model(model)
        except ValueError:
            # A converted model does not contain its original.
            return {PATCHED: patched}
    return {OWN: measure(model), PATCHED: patched}


def device_of(name: str) -> torch.device:
    """Return the device of --device.

    Raises:
        ValueError: The device cannot be used here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Only an allocation shows whether the device works.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {name}: not usable here ({error}); allowed: cpu, cuda, ..."
        ) from error
    return device
