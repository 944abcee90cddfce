"""`hyperattn doctor`: versions, which engines run here, what is compiled or prebuilt, and what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from .. import address, functional
from ..engines import native
from ..engines.cpu import library
from .inputs import count_threads

PROGRAMS = ("torch", "transformers", "accelerate", "peft", "triton")


def run(args: argparse.Namespace) -> None:
    """Print the report: ten lines, or JSON."""
    lines = report()
    if args.json:
        print(json.dumps(lines, indent=2))
        return
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name.ljust(width)}  {text}")


def report() -> dict[str, str]:
    """What there is, by its name. Kernels of one score are compiled for this, where the wheel does not carry them."""
    missing = []
    engine, command = check_engine(), compiler()
    if not engine.startswith("cpu"):
        missing.append("compiled kernels: attention runs 3 to 5 times slower on CPUs")
    if command is None and not native.read_manifest():
        missing.append("a C++ compiler (g++ or clang++, or set CXX)")
    if torch.cuda.is_available() and not found("triton"):
        missing.append("triton, for kernels on the GPU")
    return {
        address.NAME: f"{address.VERSION}, in {native.PACKAGE}",
        "python": f"{platform.python_version()}, {', '.join(f'{p} {found(p)}' for p in PROGRAMS if found(p))}",
        "cpu": f"{platform.machine()}, {count_threads()}, {' '.join(native.read_levels()) or 'no levels'}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "compiler": command or "none",
        "kernels": kernels(
            "compiled when first used" if command else "not compiled, for want of a compiler"
        ),
        "cache": cache(),
        "cone attention": engine,
        "key-tied hsa": "compiled" if library.core() is not None else "plain torch",
        "missing": "; ".join(missing) or "nothing",
    }


def found(program: str) -> str | None:
    """The version of an installed program."""
    try:
        return version(program) if importlib.util.find_spec(program) else None
    except PackageNotFoundError:
        return "of its source"


def compiler() -> str | None:
    """The compiler and its first line on itself; None where there is none that runs."""
    try:
        command = native.find_compiler()
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        return None
    return f"{' '.join(command)}: {done.stdout.partition(chr(10))[0]}"


def kernels(others: str) -> str:
    """Where kernels come from; `others`: what becomes of those that the wheel does not carry."""
    if not native.is_enabled():
        return f"turned off by {native.SETTING}={os.environ[native.SETTING]}"
    try:
        level, carried = native.choose_level(), native.load_prebuilt()
    except ValueError as error:
        return str(error)
    if carried is not None:
        return (
            f"of the wheel, for {carried.level}: {len(carried.scores)} scores; others are {others}"
        )
    return f"{others}, for {level or 'this CPU'}; the installed package carries none"


def cache() -> str:
    """The folder of compiled kernels, and what it holds."""
    try:
        sizes = [file.stat().st_size for file in native.private_directory().glob("*.so")]
    except OSError as error:
        return str(error)
    return f"{len(sizes)} libraries, {sum(sizes) / 1e6:.1f} MB, in {native.build_directory()}"


def check_engine() -> str:
    """The engine that cone attention takes on this CPU, and how far its result is from the definition."""
    query, key, value = torch.randn(3, 1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    name = "cpu" if library.load("umbral", False) is not None else "blockwise"
    out, expected = (
        functional.cone_attention(query, key, value, backend=b) for b in (name, "reference")
    )
    half = f"; bfloat16 {library.bfloat16_products()}" if name == "cpu" else ""
    return f"{name}, {float((out - expected).abs().max()):.0e} from the definition{half}"
