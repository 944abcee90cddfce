"""What all benchmarks share: interleaved rounds, ratios with their spread, the environment."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import hf_hyperattn
from hf_hyperattn.utils.files import write_atomically


def interleaved(
    calls: dict[str, Callable], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every call in every round; the calls take turns, so that a drift of the machine hits all alike."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """For each call its time over the base's of the same round: median, lowest and highest."""
    found = {}
    for name, times in seconds.items():
        each = [t / b for t, b in zip(times, seconds[base], strict=True)]
        found[name] = {
            "median": statistics.median(each),
            "low": min(each),
            "high": max(each),
            "seconds": statistics.median(times),
        }
    return found


def cpuinfo() -> dict[str, str]:
    """What Linux tells of the last processor; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def cpu() -> str:
    """The processor as one tells it from others: a name may be that of many (virtual machines say "AMD EPYC"), so its
    family and model and the widest instructions, or on AArch64 its implementer and part, stand behind.
    """
    told = cpuinfo()
    about = [
        f"{what.removeprefix('cpu ').removeprefix('CPU ')} {told[what]}"
        for what in ("cpu family", "model", "CPU implementer", "CPU part")
        if what in told
    ]
    flags = told.get("flags", "").split()
    about += [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags][:1]
    return f"{chip()} ({', '.join(about)})" if about else chip()


def chip() -> str:
    """The processor's name."""
    return cpuinfo().get("model name") or platform.processor() or platform.machine()


def environment() -> dict[str, str | int]:
    """Chip, threads and versions, as every result must state them."""
    return {
        "chip": chip(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_hyperattn": hf_hyperattn.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def options(description: str, lengths: list[int], rounds: int) -> argparse.ArgumentParser:
    """A parser with what every benchmark of attention over lengths takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the result here")
    return parser


def report(args: argparse.Namespace, dtype: str, what: str, measure: Callable) -> None:
    """Measure every length, print a table of ratios to SDPA as it grows, write JSON where asked to.

    Args:
        dtype, what: of the inputs and the calls, for the line above the table.
        measure: `measure(length, args)` returns the rows of one length.
    """
    torch.set_num_threads(args.threads)
    where = environment()
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; {dtype}, 1 x {args.heads} heads, "
        f"d {args.dim}, {what}"
    )
    print(
        f"{'length':>7} {'what':15} {'kind':17} {'x SDPA':>7} {'low':>6} {'high':>6} {'s':>8} {'MiB':>6} {'error':>8}"
    )
    found = []
    for length in args.lengths:
        for r in measure(length, args):
            found.append(r)
            print(
                f"{r['length']:7d} {r['what']:15} {r['kind']:17} {r['median']:7.2f} {r['low']:6.2f} {r['high']:6.2f} "
                f"{r['seconds']:8.3f} {r['extra_mib']:6.0f} {r['error']:8.1e}",
                flush=True,
            )
    write_json(args.json, {"environment": where, "arguments": vars(args), "rows": found})


def write_json(path: str | None, result: dict) -> None:
    """Write a result where asked to, whole or not at all."""
    if path:
        write_atomically(Path(path), json.dumps(result, indent=2) + "\n")
        print(f"wrote {path}")
