"""What single tokens, whole models and the forward pass cost: the figures that changes of the kernels are held to.

    python benchmarks/bars.py decode                 the decode operator, 8,192 keys, every score, beside SDPA
    python benchmarks/bars.py model --kinds decode   a model of SmolLM2's shape, by name and patched, beside itself
    python benchmarks/bars.py peak                   forward in GF/s, as a share of this core's multiplications
    python benchmarks/bars.py peak --dtypes float32 bfloat16 --passes forward training --dims 64 128
    python benchmarks/bars.py peak --base benchmarks/results/bars-CHIP.json    which shares have become smaller

Times are CPU time on one thread and wall time on more, of calls that take turns; the lowest of all rounds counts, which
other work on the machine disturbs least. Weights are random: they change no time. Prints a table; --json writes it,
--save keeps each row, a file a chip, for docs/results/performance.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import cpu, environment, write_json
from speed.cases import Case
from speed.compare import lost_shares
from speed.measure import base, call, inputs
from speed.operations import OPERATIONS, plain
from speed.store import Store, default_path
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_hyperattn as ha
from hf_hyperattn.engines import native

#: Multiplications and additions that do not wait for each other: what a core can do at most; `hyper_peak_half` of tiles
#: or pairs of bfloat16 numbers, where it has instructions for them, else as of floats.
PEAK = """
#include "engines/cpu/tiles.h"
extern "C" float hyper_peak(long n) {
  using namespace hyper;
  constexpr int chains = kRows * kWide;
  Vec sum[chains] = {}, a = splat(n * 1e-30f + 0.5f), b = splat(n * 1e-30f + 0.25f);
  for (long i = 0; i < n; ++i)
#pragma GCC unroll 32
    for (int k = 0; k < chains; ++k) sum[k] = as_it_is(sum[k] * a + b);
  Vec all = {};
  for (int k = 0; k < chains; ++k) all += sum[k];
  return all[0];
}
extern "C" long hyper_peak_flops(long n) { return 2 * n * hyper::kRows * hyper::kWide * hyper::kLanes; }
#if defined(__AVX512BF16__)
#ifdef HYPER_TILES
HYPER_TILES void tiles_peak(long n) {
  hyper::TileShapes shapes(true);
  for (long i = 0; i < n; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
#else
void tiles_peak(long) {}
#endif
extern "C" float hyper_peak_half(long n) {
  using namespace hyper;
  if (has_tiles()) return tiles_peak(n), 0.0f;
  constexpr int chains = kRows * kWide;
  Vec sum[chains] = {};
  const auto a = splat(Two{0x3f803f80}), b = splat(Two{0x3c003c00});
  for (long i = 0; i < n; ++i)
#pragma GCC unroll 32
    for (int k = 0; k < chains; ++k) sum[k] = as_it_is(add_products(sum[k], a, b));
  Vec all = {};
  for (int k = 0; k < chains; ++k) all += sum[k];
  return all[0];
}
extern "C" long hyper_peak_half_flops(long n) {
  return hyper::has_tiles() ? n * 4 * 2 * 16 * 16 * 32 : 2 * hyper_peak_flops(n);
}
#else
extern "C" float hyper_peak_half(long n) { return hyper_peak(n); }
extern "C" long hyper_peak_half_flops(long n) { return hyper_peak_flops(n); }
#endif
"""

#: Patches by what the bars call them; gates of the open ones are off zero, so that the mechanism is computed.
PATCHES: dict[str, Callable] = {
    "cone": ha.ConeConfig,
    "penumbral": partial(ha.ConeConfig, variant="penumbral"),
    "hyperbolic": ha.HyperbolicConfig,
    "hyperbolic mean": partial(ha.HyperbolicConfig, aggregation="mean"),
    "hype": ha.HypeConfig,
    "talking_heads": ha.TalkingHeadsConfig,
    "head_fusion": ha.HeadFusionConfig,
    "mkl": ha.MklConfig,
    "hsa": ha.HsaConfig,
    "trilinear": ha.TrilinearConfig,
}


def lowest(calls: dict[str, Callable], seconds: float, threads: int) -> dict[str, float]:
    """The lowest time of each call, in rounds that take turns for so many seconds; at least three rounds."""
    clock = time.process_time if threads == 1 else time.perf_counter
    found = dict.fromkeys(calls, float("inf"))
    for run in calls.values():
        run()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for name, run in calls.items():
            start = clock()
            run()
            found[name] = min(found[name], clock() - start)
        rounds += 1
    return found


def decode(args) -> Iterator[dict]:
    """One query against many keys, each score over SDPA."""
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in args.dtypes:
            case = Case("decode", args.keys, dtype=dtype, threads=threads)
            tensors = inputs(case)
            for name, operation in OPERATIONS.items():
                if "cpu" not in operation.engines or not re.search(args.only, name):
                    continue
                run = lambda q, k, v, attend=operation.attend: attend(q, k, v, backend="auto")
                if name == "dot":
                    run = lambda q, k, v: plain(q, k, v, backend="cpu")
                seconds = lowest(
                    {"sdpa": call(case, base(case), tensors), "way": call(case, run, tensors)},
                    args.seconds,
                    threads,
                )
                yield {
                    "what": f"decode {name} {dtype} {threads}t",
                    "ratio": seconds["way"] / seconds["sdpa"],
                } | seconds


def smollm2(layers: int) -> torch.nn.Module:
    """A model of SmolLM2-135M's shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def ways(layers: int, only: str) -> dict[str, torch.nn.Module]:
    """The model as it is, by the names of mechanisms, and patched with gates closed and open; they share weights."""
    stock = smollm2(layers)
    weights, models = stock.state_dict(), {"stock": stock}

    def another() -> torch.nn.Module:
        with torch.device("meta"):
            made = type(stock)(stock.config.__class__.from_dict(stock.config.to_dict()))
        made.load_state_dict(weights, assign=True)
        made.tie_weights()
        made.model.rotary_emb = stock.model.rotary_emb
        return made.eval()

    for name in ("cone", "hyperbolic", "hype", "hyper_dot"):
        if re.search(only, f"by name {name}") and name in ALL_ATTENTION_FUNCTIONS.valid_keys():
            models[f"by name {name}"] = another()
            models[f"by name {name}"].set_attn_implementation(name)
    for name, config in PATCHES.items():
        for state in ("closed", "open"):
            if not re.search(only, f"patched {name} {state}"):
                continue
            model = models[f"patched {name} {state}"] = ha.patch_model(another(), config())
            for host in (module.hyper for module in model.modules() if hasattr(module, "hyper")):
                for parameter in host.parameters():
                    parameter.data.fill_(0.3 if state == "open" else 0.0)
    return models


def model(args) -> Iterator[dict]:
    """Whole models over the stock one: decoding, prefill, a training step."""
    models = ways(args.layers, args.only)
    for threads in args.threads:
        torch.set_num_threads(threads)
        for kind in args.kinds:
            calls = {name: STEPS[kind](m, args) for name, m in models.items()}
            seconds = lowest(calls, args.seconds * len(calls), threads)
            for name in list(models)[1:]:
                shape = f"{args.layers} layers batch {args.batch} {threads}t"
                yield {
                    "what": f"{kind} {name} {shape}",
                    "ratio": seconds[name] / seconds["stock"],
                    "sdpa": seconds["stock"],
                    "way": seconds[name],
                }


def tokens(args, length: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, 49152, (args.batch, length), generator=torch.Generator().manual_seed(0))


def decode_step(made, args) -> Callable:
    """A few new tokens after a context; the cache is random, since making it takes longer than all else."""
    from transformers import DynamicCache

    config, cache = made.config, DynamicCache()
    size = args.batch, config.num_key_value_heads, args.context, 64
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(size), torch.randn(size), layer)
    token = tokens(args, 1)

    @torch.inference_mode()
    def run():
        made(token, past_key_values=cache)
        cache.crop(-1)

    return run


def prefill_step(made, args) -> Callable:
    """All tokens of a context at once."""
    ids = tokens(args, args.context)

    @torch.inference_mode()
    def run():
        made(ids, use_cache=False, logits_to_keep=1)

    return run


def training_step(made, args) -> Callable:
    """Loss and gradients of 512 tokens."""
    ids = tokens(args, 512)

    def run():
        made(ids, labels=ids, use_cache=False).loss.backward()
        made.zero_grad(set_to_none=True)

    return run


STEPS = {"decode": decode_step, "prefill": prefill_step, "training": training_step}


def peak(args) -> Iterator[dict]:
    """Passes, causal and full, in GF/s and as a share of what a core can multiply; one thread."""
    torch.set_num_threads(1)
    headers = (
        native.PACKAGE / "engines" / "cpu" / name for name in ("tiles.h", "product.h", "vectors.h")
    )
    library = native.load_library("cpu_peak", PEAK, *headers)
    if library is None:
        raise SystemExit("no compiler: nothing says what this core can multiply")
    count = ctypes.c_long(500_000)
    for dtype, kind, name, causal, width in product(
        args.dtypes, args.passes, args.scores, (True, False), args.dims
    ):
        name_of = f"hyper_peak{'_half' if dtype == 'bfloat16' else ''}"
        multiply, flops = getattr(library, name_of), getattr(library, f"{name_of}_flops")
        multiply.restype, flops.restype = ctypes.c_float, ctypes.c_long
        case = Case(kind, 2048, 1, 4, width, causal, dtype=dtype)
        tensors = inputs(case)
        run = partial(OPERATIONS[name].run, "cpu", causal=causal)
        seconds = lowest(
            {
                "peak": partial(multiply, count),
                "sdpa": call(case, base(case), tensors),
                "way": call(case, run, tensors),
            },
            args.seconds,
            1,
        )
        products = (
            4 * width * case.pairs * (0.5 if causal else 1.0) * (3.5 if kind == "training" else 1.0)
        )
        rate, most = products / seconds["way"] / 1e9, flops(count) / seconds["peak"] / 1e9
        shape = f"{'causal' if causal else 'full'} d {width}"
        what = f"{kind} {name} {dtype} {shape}: {rate:.0f} of {most:.0f} GF/s"
        row = {
            "what": what,
            "kind": kind,
            "score": name,
            "dtype": dtype,
            "shape": shape,
            "rate": rate,
            "most": most,
        }
        yield row | {"ratio": seconds["way"] / seconds["sdpa"], "share": rate / most} | seconds


#: What each command reads, and what it is where it is not given.
READS: dict[str, dict[str, Any]] = {
    "decode": {"only": "", "threads": [1], "dtypes": ["float32"], "keys": 8192},
    "model": {
        "only": "",
        "threads": [1],
        "kinds": ["decode"],
        "batch": 1,
        "context": 2048,
        "layers": 30,
    },
    "peak": {
        "dtypes": ["float32"],
        "passes": ["forward"],
        "scores": ["dot", "umbral"],
        "dims": [64],
        "base": None,
    },
}


def read_options(words: list[str] | None) -> argparse.Namespace:
    """The options; one that the command does not read is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=READS)
    parser.add_argument("--only", help="decode, model: a regular expression of what to measure")
    parser.add_argument("--seconds", type=float, default=2.0, help="of rounds, for each row")
    parser.add_argument("--threads", type=int, nargs="+", help="decode, model")
    parser.add_argument("--dtypes", nargs="+", help="decode, peak")
    parser.add_argument("--passes", nargs="+", choices=("forward", "training"), help="peak")
    parser.add_argument("--keys", type=int, help="decode: how many")
    parser.add_argument("--kinds", nargs="+", choices=STEPS, help="model: what is measured")
    parser.add_argument("--batch", type=int, help="model")
    parser.add_argument(
        "--context", type=int, help="model: tokens before the new one, or of the prefill"
    )
    parser.add_argument("--layers", type=int, help="model")
    parser.add_argument("--scores", nargs="+", choices=OPERATIONS, help="peak")
    parser.add_argument("--dims", type=int, nargs="+", help="peak")
    parser.add_argument(
        "--base", metavar="FILE.json", help="peak, of --save: tell what has less of the peak now"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--json", help="also write the result here")
    where.add_argument(
        "--save",
        action="store_true",
        help="also keep each row in benchmarks/results, a file a chip",
    )
    args = parser.parse_args(words)
    if args.context is not None and args.kinds and set(args.kinds) == {"training"}:
        parser.error("--context says nothing of training, which is of 512 tokens; leave it out")
    for name in {name: None for reads in READS.values() for name in reads}:
        readers = [what for what, reads in READS.items() if name in reads]
        if args.what in readers and getattr(args, name) is None:
            setattr(args, name, READS[args.what][name])
        elif args.what not in readers and getattr(args, name) is not None:
            parser.error(
                f"--{name} says nothing of {args.what}; leave it out; allowed: with {' or '.join(readers)}"
            )
    return args


def main(words: list[str] | None = None) -> None:
    """Measure and print."""
    args = read_options(words)
    base = (
        json.loads(Path(args.base).read_text())
        if args.base
        else {"environment": {"chip": cpu()}, "rows": {}}
    )
    if base["environment"]["chip"] != cpu():
        raise SystemExit(
            f"{args.base} was measured on {base['environment']['chip']}; allowed: one of {cpu()}"
        )
    rows, store = {}, Store(default_path("bars", gpu=False), gpu=False) if args.save else None
    for row in {"decode": decode, "model": model, "peak": peak}[args.what](args):
        key = f"{args.what} {row['what'].partition(':')[0]}"
        rows[key] = row
        if store:
            store.add(row | {"key": key})
        share = f"   {row['share']:.1%} of the peak" if "share" in row else ""
        print(
            f"{row['what']:60} {row['ratio']:6.3f} x ({row['way'] * 1e3:.3f} ms){share}", flush=True
        )
    if not rows:
        raise SystemExit(
            f"--only {args.only} is found in nothing that is measured; leave it out to see all"
        )
    write_json(
        args.json,
        {"environment": environment(), "arguments": vars(args), "rows": list(rows.values())},
    )
    if args.base:
        print(f"{len(base['rows'].keys() & rows.keys())} rows are in the base, too")
    if lost := lost_shares(base["rows"], rows):
        raise SystemExit("\n".join(["slower than in the base:", *lost]))


if __name__ == "__main__":
    main()
