"""`hyperattn doctor`: show versions, engines, kernels and missing programs.

Every line of the report is a function here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from hf_hyperattn import address, functional
from hf_hyperattn.engines import native
from hf_hyperattn.engines.cpu import library

from ..shared.inputs import count_threads

PROGRAMS = ("torch", "transformers", "accelerate", "peft", "triton")


def run(args: argparse.Namespace) -> None:
    """Print the report as ten lines, or as JSON."""
    lines = make_report()
    if args.json:
        print(json.dumps(lines, indent=2))
        return
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name.ljust(width)}  {text}")


def make_report() -> dict[str, str]:
    """Return the lines of the report by name.

    One kernel is compiled for the report, unless the wheel contains it.
    """
    programs = [f"{name} {find_version(name)}" for name in PROGRAMS if find_version(name)]
    missing = []
    engine = check_engine()
    command = describe_compiler()
    levels = " ".join(native.read_levels()) or "unknown"
    # Each entry says what is slower or impossible without the program.
    if not engine.startswith("cpu"):
        missing.append(
            "compiled kernels (without them, attention takes 2.5 to 5.6 times as long on CPUs)"
        )
    if command is None and not native.read_manifest():
        missing.append("a C++ compiler (g++ or clang++, or set CXX)")
    if torch.cuda.is_available() and not find_version("triton"):
        missing.append("triton (without it, there are no kernels on the GPU)")
    return {
        address.NAME: f"{address.VERSION}, in {native.PACKAGE}",
        "python": f"{platform.python_version()}, {', '.join(programs)}",
        "cpu": f"{platform.machine()}, {count_threads()}, instruction sets {levels}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "compiler": command or "none",
        "kernels": describe_kernels(
            "compiled on first use" if command else "not compiled, because there is no compiler"
        ),
        "cache": describe_cache(),
        "cone attention": engine,
        "hsa and sparse": "compiled" if library.core() is not None else "plain PyTorch",
        "missing": "; ".join(missing) or "nothing; every part runs at full speed",
    }


def find_version(program: str) -> str | None:
    """Return the version of an installed program, or None."""
    try:
        return version(program) if importlib.util.find_spec(program) else None
    except PackageNotFoundError:
        return "from source"


def describe_compiler() -> str | None:
    """Return the C++ compiler and its version line, or None if none runs."""
    try:
        command = native.find_compiler()
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        return None
    return f"{' '.join(command)}: {done.stdout.partition(chr(10))[0]}"


def describe_kernels(others: str) -> str:
    """Say where kernels come from.

    Args:
        others: How kernels that the wheel does not contain are made.
    """
    if not native.is_enabled():
        return f"turned off by {native.SETTING}={os.environ[native.SETTING]}"
    try:
        level, carried = native.choose_level(), native.load_prebuilt()
    except ValueError as error:
        return str(error)
    if carried is not None:
        return f"from the wheel, for {carried.level}: {len(carried.scores)} scores; others are {others}"
    return f"{others}, for {level or 'this CPU'}; this installation contains no prebuilt ones"


def describe_cache() -> str:
    """Return the folder of compiled kernels, and their number and size."""
    try:
        sizes = [file.stat().st_size for file in native.private_directory().glob("*.so")]
    except OSError as error:
        return str(error)
    return f"{len(sizes)} libraries, {sum(sizes) / 1e6:.1f} MB, in {native.build_directory()}"


def check_engine() -> str:
    """Compute cone attention on this CPU and compare it with the reference.

    Returns:
        The name of the engine and its largest error.
    """
    # More than one tile of queries and keys, and small enough to be instant.
    query, key, value = torch.randn(3, 1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    # `load` compiles the kernel if necessary, and returns None if it cannot.
    name = "cpu" if library.load("umbral", False) is not None else "blockwise"
    out = functional.cone_attention(query, key, value, backend=name)
    expected = functional.cone_attention(query, key, value, backend="reference")
    half = f"; bfloat16 {library.bfloat16_products()}" if name == "cpu" else ""
    kind = "compiled" if name == "cpu" else "plain PyTorch"
    error = float((out - expected).abs().max())
    return f"{name} engine ({kind}), largest error {error:.0e}{half}"
