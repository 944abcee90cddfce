"""What all benchmarks share: interleaved rounds, ratios with their spread, the environment."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import hf_hyperattn
from hf_hyperattn.config import write_atomically


def interleaved(calls: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call in every round; the calls take turns, so that a drift of the machine hits all alike."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """For each call its time over the base's of the same round: median, lowest and highest."""
    found = {}
    for name, times in seconds.items():
        each = [t / b for t, b in zip(times, seconds[base], strict=True)]
        found[name] = {"median": statistics.median(each), "low": min(each), "high": max(each),
                       "seconds": statistics.median(times)}  # fmt: skip
    return found


def environment() -> dict[str, str | int]:
    """Chip, threads and versions, as every result must state them."""
    chip = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        chip = names[0] if names else chip
    return {
        "chip": chip,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_hyperattn": hf_hyperattn.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: str | None, result: dict) -> None:
    """Write a result where asked to, whole or not at all."""
    if path:
        write_atomically(Path(path), json.dumps(result, indent=2) + "\n")
        print(f"wrote {path}")
