"""HyperbolicAttention, the module over points of the ball, beside torch's own multi-head attention: time and error.

A source claims 50 microseconds for 64 tokens of dimension 64; it says neither on what machine nor for what parts of
the module. Here one core does the whole forward pass, and the parts are timed beside it.

python benchmarks/hyperbolic_module.py --compile
"""

from __future__ import annotations

import argparse
import statistics

import torch
from common import environment, interleaved, ratios, write_json

import hf_hyperattn as ha
from hf_hyperattn.geometry import poincare

BASE = "nn.MultiheadAttention"
CLAIM = 50e-6  # seconds, for 64 tokens of dimension 64


def modules(args) -> dict:
    """HyperbolicAttention with as many heads as asked for, one module each."""
    torch.manual_seed(0)
    return {
        f"HyperbolicAttention, {heads} head{'s' * (heads > 1)}": ha.HyperbolicAttention(
            args.dim, heads
        ).eval()
        for heads in args.heads
    }


def parts(module, points) -> dict:
    """What a forward pass is made of, by itself, on inputs like its own."""
    tangent = poincare.logmap0(points, 1.0)
    projections = (module.query, module.key, module.value, module.out)
    q, k, v = (
        f(tangent).unflatten(-1, (module.heads, -1)).transpose(1, 2) for f in projections[:3]
    )
    return {
        "  logmap0": lambda: poincare.logmap0(points, 1.0),
        "  four projections": lambda: [f(tangent) for f in projections],
        "  attention and midpoint": lambda: ha.functional.hyperbolic_attention(q, k, v, scale=1.0),
        "  expmap0": lambda: poincare.expmap0(tangent, 1.0),
    }


def error(module, points) -> float:
    """The largest difference of a coordinate from the same module in float64, where distances are differences."""
    exact = ha.HyperbolicAttention(module.dim, module.heads, backend="reference").double().eval()
    exact.load_state_dict(module.state_dict())
    return float((module(points) - exact(points.double())).abs().max())


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--compile", action="store_true", help="also time torch.compile of each module"
    )
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = modules(args)
    points = poincare.expmap0(0.2 * torch.randn(1, args.length, args.dim), 1.0)
    stock = torch.nn.MultiheadAttention(args.dim, args.heads[-1], batch_first=True).eval()
    timed = {BASE: lambda: stock(points, points, points, need_weights=False)}
    timed |= {name: lambda m=module: m(points) for name, module in found.items()}
    timed |= parts(list(found.values())[-1], points)
    if args.compile:
        compiled = {
            f"{name}, compiled": torch.compile(module, fullgraph=True)
            for name, module in found.items()
        }
        timed |= {name: lambda m=module: m(points) for name, module in compiled.items()}
    with torch.no_grad():
        errors = {name: error(module, points) for name, module in found.items()}
        seconds = interleaved(timed, args.rounds)
    report(args, seconds, errors)


def report(args, seconds: dict, errors: dict) -> None:
    """Print the table, and write it where asked to."""
    compared = ratios(seconds, BASE)
    print(f"{args.length} tokens of dimension {args.dim}, float32, forward; {environment()}")
    print("Indented: the parts of the last module. Error: of coordinates, against float64.")
    print(f"{'':36}{'median':>10}{'least':>10}{'/ stock':>9}{'/ claim':>9}{'error':>10}")
    rows = {}
    for name, times in seconds.items():
        median, least = statistics.median(times), min(times)
        row = {
            "median": median,
            "least": least,
            "over_stock": compared[name]["median"],
            "over_claim": median / CLAIM,
        }
        rows[name] = row | {"error": errors.get(name)}
        shown = f"{errors[name]:>10.1e}" if name in errors else ""
        print(
            f"{name:36}{median * 1e6:>7.0f} µs{least * 1e6:>7.0f} µs{row['over_stock']:>9.2f}"
            f"{row['over_claim']:>9.2f}{shown}"
        )
    write_json(args.json, {"setting": vars(args), "environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
