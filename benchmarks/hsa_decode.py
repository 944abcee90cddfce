"""One generated token: attention over a HierarchicalCache against SDPA over plain keys, as ratios in one process.

python benchmarks/hsa_decode.py --lengths 8192 32768 --json benchmarks/results/hsa_decode.json

A step of ours is everything that a layer does: the new key and value are stored, the means of windows that became
complete are made, and the query attends. SDPA gets its keys in one contiguous tensor, without the copy that
`DynamicCache` makes for each token. `sdpa` is called as Transformers calls it; `sdpa folded` gets the query heads of a
key head as queries, which Transformers does not do and which reads shared keys once. The error is the largest
difference of a step from the definition in float64, over the largest output. `upward` continues the windows by factors
of 4; `evict` also forgets what no later token sees.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from common import environment, interleaved, write_json
from merged import merged

from hf_hyperattn.engines import Options
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.integration.attention.hierarchical_cache import HierarchicalLayer
from hf_hyperattn.mechanisms.hsa.config import Rule
from hf_hyperattn.mechanisms.hsa.means_kept import read_levels
from hf_hyperattn.mechanisms.hsa.windowed.key import attend_keys, attend_levels
from hf_hyperattn.mechanisms.selection.cache import KeepWindows

SDPA = "sdpa"


def settings(length: int, args) -> dict[str, dict]:
    """What is timed, by name: window sizes, how many blocks are refined, whether the cache forgets."""
    plain, up = tuple(args.windows), list(args.windows)
    while up[-1] * 4 <= length:
        up.append(up[-1] * 4)
    refined = {"top_k": args.top_k}
    return {
        "plain": {"sizes": plain},
        "refined": {"sizes": plain, **refined},
        "upward": {"sizes": tuple(up)},
        "upward refined": {"sizes": tuple(up), **refined},
        "evict": {"sizes": plain, "evict": True},
        "upward evict": {"sizes": tuple(up), "evict": True},
    }


class Step:
    """A layer's attention for one more token, over and over."""

    def __init__(self, key, value, query, setting: dict, args):
        self.args, self.sizes = args, setting["sizes"]
        self.top_k, self.evict = setting.get("top_k", 0), setting.get("evict", False)
        self.rule = Rule(
            tying="key",
            near=args.near,
            sinks=args.sinks,
            refine_top_k=self.top_k,
            block_bias=None,
        )
        self.layer = HierarchicalLayer(
            KeepWindows(self.sizes, args.near, args.sinks) if self.evict else None
        )
        for part in range(0, key.shape[2], 1024):
            self.layer.update(key[:, :, part : part + 1024], value[:, :, part : part + 1024])
            read_levels(self.layer.store, self.sizes, None)
        self.query, self.key, self.value = query, key[:, :, -1:], value[:, :, -1:]

    def __call__(self) -> torch.Tensor:
        self.layer.update(self.key, self.value)
        store = self.layer.store
        levels = read_levels(store, self.sizes, None)
        options = Options(is_causal=True, offset=store.length - 1)
        scale = self.args.dim**-0.5
        return attend_levels(self.query, levels, self.rule, options, scale, lse=False)[0]

    def held(self) -> float:
        """MiB of keys, values and means."""
        pairs = [self.layer.store.tokens, *self.layer.store.beside["means"].means]
        return sum(t.room.nbytes for pair in pairs for t in pair) / 2**20

    def error(self, key, value) -> float:
        """Of the next step, against the definition; `key` and `value` are what the cache was made of."""
        out, more = self(), self.layer.store.length - key.shape[2]
        key, value = (
            torch.cat([t, t[:, :, -1:].expand(-1, -1, more, -1)], 2).double() for t in (key, value)
        )
        exact, _ = attend_keys(
            self.query.double(),
            key,
            value,
            Hierarchy(key.shape[2], sizes=self.sizes),
            self.rule,
            Options(is_causal=True, offset=key.shape[2] - 1),
            scale=self.args.dim**-0.5,
            backend="torch",
        )
        return float((out - exact).abs().max() / exact.abs().max())


def measure(heads: int, kv_heads: int, length: int, args) -> list[dict]:
    """Rows of the table for one shape."""
    torch.manual_seed(0)
    query = torch.randn(1, heads, 1, args.dim)
    key, value = (torch.randn(1, kv_heads, length, args.dim) for _ in range(2))
    steps = {
        name: Step(key, value, query, setting, args)
        for name, setting in settings(length, args).items()
    }
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {SDPA: lambda: sdpa(query, key, value, enable_gqa=heads != kv_heads)}
    if heads != kv_heads:
        folded = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
        calls["sdpa folded"] = lambda: sdpa(folded, key, value)
    calls |= steps
    seconds = interleaved(calls, args.rounds)
    rows = []
    for name, times in seconds.items():
        each = sorted(s / t for s, t in zip(seconds[SDPA], times, strict=True))
        row = {"heads": heads, "kv_heads": kv_heads, "length": length, "what": name}
        row |= {"seconds": statistics.median(times), "faster": statistics.median(each)}
        row |= {"low": each[len(each) // 10], "high": each[-1 - len(each) // 10]}
        if name not in steps:
            row |= {"held_mib": (key.nbytes + value.nbytes) / 2**20}
        else:
            row |= {"held_mib": steps[name].held(), "error": steps[name].error(key, value)}
        show(row)
        rows.append(row)
    return rows


def show(r: dict) -> None:
    """Print one line."""
    error = f"{r['error']:9.1e}" if "error" in r else ""
    print(
        f"{r['heads']:2d}/{r['kv_heads']:<2d} {r['length']:6d} {r['what']:15} {r['seconds'] * 1e3:8.3f} ms "
        f"{r['faster']:6.1f} ({r['low']:.1f} to {r['high']:.1f}) {r['held_mib']:8.2f} MiB {error}",
        flush=True,
    )


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[32768])
    parser.add_argument(
        "--shapes", nargs="*", default=["8/8", "9/3"], help="query heads / key heads"
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--windows", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--near", type=int, default=64)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    print(
        "heads  length what             time     times SDPA's speed (10 % to 90 %)  held      error"
    )
    with torch.no_grad():
        for shape in args.shapes:
            for length in args.lengths:
                rows += measure(*map(int, shape.split("/")), length, args)
    write_json(
        args.json,
        {"environment": environment(), "settings": vars(args), "rows": merged(args.json, rows)},
    )


if __name__ == "__main__":
    main()
