"""HSA tied on both sides against SDPA in one process: times SDPA takes of it, memory, and the error beside each time.

python benchmarks/hsa_both.py --lengths 1024 8192 --json benchmarks/results/hsa_both.json
"""

from __future__ import annotations

import argparse
import random

import torch
from common import environment, interleaved, write_json
from merged import merged

from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.hsa.tree.both import attend_both

SDPA = "sdpa"


def hierarchies(length: int, args) -> dict[str, Hierarchy]:
    """What is timed: windows, the same windows as a tree, and a random text-like tree."""
    windows = Hierarchy.windows(length, args.windows)
    made = Hierarchy.windows(length, args.windows).materialised
    return {"windows": windows, "tree": made, "text": Hierarchy.from_parents(text_tree(length))}


def text_tree(length: int) -> list[int]:
    """Words of 1 to 3 tokens, sentences of 5 to 30 words, paragraphs of 2 to 8 sentences."""
    rng = random.Random(0)
    parents, level, count = [], list(range(length)), length
    parent = {}
    for low, high in ((1, 3), (5, 30), (2, 8)):
        above, at = [], 0
        while at < len(level):
            size = rng.randint(low, high)
            parent |= dict.fromkeys(level[at : at + size], count)
            above, count, at = [*above, count], count + 1, at + size
        level = above
    parents = parent | dict.fromkeys(level, count)
    return [parents[node] for node in range(count)] + [-1]


def tensors(length: int, args) -> list[torch.Tensor]:
    """Query, key and value [1, heads, length, dim], float32, of unit variance."""
    torch.manual_seed(0)
    return [torch.randn(1, args.heads, length, args.dim, requires_grad=True) for _ in range(3)]


def forward(call):
    """The call without gradients."""

    def run():
        with torch.no_grad():
            return call()

    return run


def measure(length: int, args) -> list[dict]:
    """Rows of the table for one length."""
    leaves = tensors(length, args)
    shapes = hierarchies(length, args)
    calls = {SDPA: lambda: torch.nn.functional.scaled_dot_product_attention(*leaves)}
    calls |= {name: lambda h=h: attend_both(*leaves, h) for name, h in shapes.items()}
    kinds = {
        "forward": {n: forward(c) for n, c in calls.items()},
        "forward+backward": {
            n: lambda c=c: torch.autograd.grad(c().sum(), leaves) for n, c in calls.items()
        },
    }
    rows = []
    for kind, runs in kinds.items():
        seconds = interleaved(runs, args.rounds)
        for name, times in seconds.items():
            faster = sorted(s / t for s, t in zip(seconds[SDPA], times, strict=True))
            with PeakMemory() as memory:
                runs[name]()
            rows.append(
                {
                    "length": length,
                    "what": name,
                    "kind": kind,
                    "median": faster[len(faster) // 2],
                    "low": faster[0],
                    "high": faster[-1],
                    "seconds": sorted(times)[len(times) // 2],
                    "extra_mib": memory.added / 2**20,
                    "error": error(leaves, shapes.get(name)),
                }
            )
    return rows


def error(leaves, hierarchy: Hierarchy | None) -> float:
    """Largest difference of the output from that in float64."""
    if hierarchy is None:
        return 0.0
    with torch.no_grad():
        return float(
            (
                attend_both(*leaves, hierarchy)
                - attend_both(*(t.double() for t in leaves), hierarchy)
            )
            .abs()
            .max()
        )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = environment()
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; float32, 1 x {args.heads} heads, "
        f"d {args.dim}, not causal, windows {tuple(args.windows)}"
    )
    print(
        f"{'length':>7} {'what':8} {'kind':17} {'faster':>7} {'low':>7} {'high':>7} {'ms':>8} {'MiB':>6} {'error':>8}"
    )
    found = []
    for length in args.lengths:
        for r in measure(length, args):
            found.append(r)
            print(
                f"{r['length']:7d} {r['what']:8} {r['kind']:17} {r['median']:7.1f} {r['low']:7.1f} {r['high']:7.1f} "
                f"{r['seconds'] * 1e3:8.1f} {r['extra_mib']:6.0f} {r['error']:8.1e}",
                flush=True,
            )
    write_json(
        args.json, {"environment": where, "arguments": vars(args), "rows": merged(args.json, found)}
    )


if __name__ == "__main__":
    main()
