"""`hyperattn inject --plan`: print the time and memory of a run, and write nothing."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_hyperattn.inject.plan import InjectionPlan, plan_injection

from ..shared.console import print_table
from ..shared.inputs import positions_of
from ..shared.models import device_of
from .inject_task import Task, dtype_of


def print_plan(args: argparse.Namespace, task: Task, make: Callable[[Any], Any]) -> int:
    """Measure a probe of the model and print the plan of a run; return the exit code 0.

    Args:
        args: The command line; `args.report` is set, and `args.output` to None.
        task: The model and the texts.
        make: Builds the injection of a model.

    Raises:
        ValueError: One layer does not fit into the memory of the device.
    """
    # Only shapes are needed, so the weights need not be on this machine.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(task.config))
    device = device_of(args.device)
    try:
        plan = plan_injection(
            make(model),
            device=device,
            dtype=getattr(torch, find_dtype(args, task)),
            longest=positions_of(task.config),
            compare=args.compare,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"--length {task.length}: one layer does not fit into the memory of {device}; allowed: a smaller --length, "
            "fewer --rows, or --dtype bfloat16"
        ) from error
    # With --json, the report must not name a folder that was not written.
    args.output = None
    args.report = {"plan": asdict(plan) | {"seconds": plan.seconds, "peak": plan.peak}}
    show_plan(plan, task.length)
    return 0


def find_dtype(args: argparse.Namespace, task: Task) -> str:
    """Return the name of the dtype that the weights are loaded in."""
    if args.dtype == "auto":
        return str(dtype_of(task.config)).removeprefix("torch.")
    return args.dtype or "float32"


def show_plan(plan: InjectionPlan, length: int) -> None:
    """Print the stages with their times, and the parts of the memory."""
    print(
        f"\nPlan. Measured: {plan.probed} of {plan.layers} layers with random weights, and the output embedding, at "
        f"{length:,} tokens.\n"
    )
    rows = [
        [name, str(plan.passes[name]), format_time(seconds)]
        for name, seconds in plan.stages.items()
    ]
    total = str(sum(plan.passes.values()))
    print_table(("stage", "passes", "time"), [*rows, ["total", total, format_time(plan.seconds)]])
    print(
        f"If verification refuses a candidate, the next one takes {format_time(plan.candidate)} more."
    )
    parts = [*plan.memory.items(), ("peak", plan.peak)]
    print()
    print_table(("memory", "GB"), [[name, f"{size / 1e9:.2f}"] for name, size in parts])
    print("\nNothing written: this is a plan. Leave out --plan to run it.")


def format_time(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
