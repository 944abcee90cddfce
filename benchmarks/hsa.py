"""Key-tied HSA against causal SDPA in one process: how many times faster, with the error beside every time.

python benchmarks/hsa.py --lengths 8192 32768 --only-upward 4096 16384 65536 --json benchmarks/results/hsa.json

Every time is of one whole call on raw queries, keys and values: pooling and the choice of blocks are in it. `decode` is
one query at the end, on means that are there already, as a cache has them. The error is the largest difference at
sampled queries from the general way in float64, over the largest output. Windows are continued upward by factors of
4 for `upward`, whose cost exponent is fitted over all lengths; it runs without SDPA at `--only-upward` lengths.
A run adds its lengths to those that the JSON holds.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
from common import environment, interleaved, write_json
from merged import merged

from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.engines import Options
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.hsa.config import Rule
from hf_hyperattn.mechanisms.hsa.pairs import count_pairs
from hf_hyperattn.mechanisms.hsa.windowed.key import attend_keys, attend_levels
from hf_hyperattn.mechanisms.hsa.windowed.native import pool_levels

SDPA = "sdpa"


def settings(length: int, args) -> dict[str, dict]:
    """What is timed: windows, rule, by name."""
    up = list(args.windows)
    while up[-1] * 4 <= length:
        up.append(up[-1] * 4)
    rule = {"near": args.near, "sinks": args.sinks}
    return {
        "plain": {"hierarchy": tuple(args.windows), **rule},
        "refined": {"hierarchy": tuple(args.windows), **rule, "refine_top_k": args.top_k},
        "upward": {"hierarchy": tuple(up), **rule},
        "upward refined": {"hierarchy": tuple(up), **rule, "refine_top_k": args.top_k},
    }


def tensors(length: int, args) -> list[torch.Tensor]:
    """Query, key and value [1, heads, length, dim], float32, of unit variance."""
    torch.manual_seed(0)
    return [torch.randn(1, args.heads, length, args.dim) for _ in range(3)]


def attend(q, k, v, setting: dict, backend: str, offset: int = 0) -> torch.Tensor:
    """Causal key-tied attention of queries from token `offset` on."""
    counts = {name: number for name, number in setting.items() if name != "hierarchy"}
    return attend_keys(
        q,
        k,
        v,
        Hierarchy(k.shape[2], sizes=setting["hierarchy"]),
        Rule(tying="key", **counts, block_bias=None),
        Options(is_causal=True, offset=offset),
        scale=q.shape[-1] ** -0.5,
        backend=backend,
    )[0]


def error(setting: dict, q, k, v, args, samples: int = 6) -> float:
    """Largest error at sampled queries against float64, relative to the largest output there."""
    out = attend(q, k, v, setting, args.backend)
    worst = scale = 0.0
    for row in torch.linspace(0, q.shape[2] - 1, samples).long().tolist():
        one = (
            q[:, :, row : row + 1].double(),
            k[:, :, : row + 1].double(),
            v[:, :, : row + 1].double(),
        )
        exact = attend(*one, setting, "torch", offset=row)
        worst = max(worst, float((out[:, :, row : row + 1] - exact).abs().max()))
        scale = max(scale, float(exact.abs().max()))
    return worst / scale


def row(length: int, kind: str, name: str, seconds: dict, setting: dict | None, **rest) -> dict:
    """One line of the table; faster: SDPA's time over this one's, in the same round."""
    found = {
        "length": length,
        "kind": kind,
        "what": name,
        "seconds": statistics.median(seconds[name]),
    }
    if SDPA in seconds:
        each = sorted(s / t for s, t in zip(seconds[SDPA], seconds[name], strict=True))
        found |= {"faster": statistics.median(each), "low": each[0], "high": each[-1]}
    if setting is not None:
        rule = {key: value for key, value in setting.items() if key != "hierarchy"}
        numbers = (rule["near"], rule["sinks"], rule.get("refine_top_k", 0))
        found["pairs"] = count_pairs(length, setting["hierarchy"], *numbers, compared=False) / (
            length * (length + 1) / 2
        )
    return found | rest


def full(length: int, args, only_upward: bool = False) -> list[dict]:
    """The causal forward pass."""
    q, k, v = tensors(length, args)
    asked = settings(length, args)
    asked = {"upward": asked["upward"]} if only_upward else asked
    calls = {n: lambda s=s: attend(q, k, v, s, args.backend) for n, s in asked.items()}
    if not only_upward:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls = {SDPA: lambda: sdpa(q, k, v, is_causal=True), **calls}
    seconds = interleaved(calls, args.rounds)
    rows = []
    for name in calls:
        with PeakMemory() as memory:
            calls[name]()
        setting = asked.get(name)
        off = {} if setting is None else {"error": error(setting, q, k, v, args)}
        rows.append(
            row(length, "forward", name, seconds, setting, extra_mib=memory.added / 2**20, **off)
        )
    return rows


def decode(length: int, args) -> list[dict]:
    """One query at the end, on pooled means."""
    q, k, v = tensors(length, args)
    one, calls, asked = q[:, :, -1:], {}, settings(length, args)
    calls[SDPA] = lambda: torch.nn.functional.scaled_dot_product_attention(one, k, v)
    for name, setting in asked.items():
        levels = pool_levels(k, v, setting["hierarchy"])
        counts = {name: setting.get(name, 0) for name in ("near", "sinks", "refine_top_k")}
        call = (
            levels,
            Rule(tying="key", **counts, block_bias=None),
            Options(is_causal=True, offset=length - 1),
            args.dim**-0.5,
            args.backend,
        )
        calls[name] = lambda call=call: attend_levels(one, *call)
    seconds = interleaved(calls, max(args.rounds, 20))
    return [row(length, "decode", name, seconds, None) for name in calls]


def exponent(rows: list[dict], what: str) -> float | None:
    """Slope of log seconds over log length, by least squares."""
    found = [
        (r["length"], r["seconds"]) for r in rows if r["kind"] == "forward" and r["what"] == what
    ]
    if len(found) < 3:
        return None
    x, y = ([math.log(n) for n in column] for column in zip(*found, strict=True))
    return statistics.linear_regression(x, y).slope


def show(r: dict) -> None:
    """Print one line."""
    faster = f"{r['faster']:8.1f} {r['low']:6.1f} {r['high']:7.1f}" if "faster" in r else " " * 23
    rest = "".join(
        f"{r[key]:{form}}" if key in r else " " * 9
        for key, form in (("pairs", "9.2%"), ("error", "9.1e"))
    )
    print(
        f"{r['length']:7d} {r['kind']:8} {r['what']:15} {r['seconds']:10.5f} {faster} {rest}",
        flush=True,
    )


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192])
    parser.add_argument(
        "--only-upward",
        type=int,
        nargs="*",
        default=[],
        help="lengths without SDPA, for the exponent",
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--near", type=int, default=64)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "native"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = environment()
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; float32, 1 x {args.heads} heads, "
        f"d {args.dim}, causal, backend {args.backend}"
    )
    print(
        f"{'length':>7} {'kind':8} {'what':15} {'s':>10} {'x faster':>8} {'low':>6} {'high':>7} "
        f"{'pairs':>9}{'error':>9}"
    )
    rows = []
    with torch.no_grad():
        for length in args.lengths:
            for r in [*full(length, args), *decode(length, args)]:
                rows.append(r)
                show(r)
        for length in args.only_upward:
            for r in full(length, args, only_upward=True):
                rows.append(r)
                show(r)
    rows = merged(args.json, rows)
    slope = exponent(rows, "upward")
    if slope is not None:
        print(f"cost exponent of `upward` over {sorted({r['length'] for r in rows})}: {slope:.2f}")
    write_json(
        args.json,
        {"environment": environment(), "arguments": vars(args), "rows": rows, "exponent": slope},
    )


if __name__ == "__main__":
    main()
