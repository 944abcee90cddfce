"""Sparse attention by the compiled kernel beside SDPA and beside our own dense kernel, in one process.

    python benchmarks/sparse.py                                  layer, model and decoding at 8,192 tokens
    python benchmarks/sparse.py --kinds layer --lengths 2048 8192 --shares 0.1 0.2 --json benchmarks/results/sparse.json
    python benchmarks/sparse.py --kinds model decode --chosen     SmolLM2-135M, by the rules that frontier.py gives it

Heads have the rules that an allocation mixes: chunks of 16 queries that choose pages by the query before or by their
first one, windows, one head of nine exact; how many pages are opened is set so that the heads' mean share of pairs is
what --shares says. Beside every time of a layer stands the largest difference of sampled queries from the rules' masks
in float64, as a share of the largest output. `model` is of SmolLM2-135M's shape with random weights, a prompt and then
one logit; `decode` is a token, the mean of 16 after a prompt. With --chosen both are of SmolLM2-135M itself, and its
heads have what "rules with a kernel" of `frontier.py` have at --shares, by pairs or by the times that it measured,
corrected by what heads lose together or not. `forget` is one token with a cache that forgets, of a model whose key
heads have sinks and a window but for the first one of every second layer, which is exact; it also shows the bytes that
are held, and the largest difference of the logits from those of the cache that keeps all, as a share of the largest.
Times are CPU time of one thread, the lowest of rounds that take turns. Rows of other runs that are in the JSON already
stay there.
GF/s count visible pairs alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from bars import lowest, prefill_step, smollm2, tokens
from common import cpu, environment, write_json
from frontiers.cells import Cell, read_results
from frontiers.choices import Choices
from merged import merged
from transformers import AutoModelForCausalLM, DynamicCache

import hf_hyperattn as ha
from hf_hyperattn.engines import Options, attention, dot_score
from hf_hyperattn.functional import sparse_attention
from hf_hyperattn.mechanisms.sparse import Exact, Pages, SparseRule, Window
from hyperattn_cli.shared.smollm2 import smollm2 as smollm2_folder

HEADS, KV_HEADS, DIM = 9, 3, 64
STEPS = 16  # tokens that are timed at once: as many as share a choice, which one of them makes
CHOSEN = ["by head", "together", "by time", "by time, together"]
PAGED = [Pages(query="previous"), Pages(query="first"), Pages(query="previous", summary="mean")]
LOOSE = [Window(near=64), Window(near=512)]


def mixed(length: int, share: float) -> list[SparseRule]:
    """Rules of nine heads whose mean share of pairs is about what is asked for."""
    few = [*LOOSE, Exact()] if share >= 0.15 else [*LOOSE, Window(near=256)]
    low, high = 0, length
    while low < high:
        top = (low + high + 1) // 2
        low, high = (
            (top, high) if mean_share(with_top(few, top), length) <= share else (low, top - 1)
        )
    return with_top(few, low)


def with_top(few: list[SparseRule], top: int) -> list[SparseRule]:
    """Six heads that open `top` pages each, and three others."""
    paged = [replace(rule, top=top) for rule in PAGED * 2]
    return [
        rule
        for three in (paged[:2] + few[:1], paged[2:4] + few[1:2], paged[4:] + few[2:])
        for rule in three
    ]


def mean_share(rules: list[SparseRule], length: int) -> float:
    """Of the pairs of a causal call."""
    return sum(rule.share(length) for rule in rules) / len(rules)


def error(out: torch.Tensor, q, k, v, rules: list[SparseRule], samples: int = 5) -> float:
    """Largest difference at sampled queries from the masks of the rules, in float64."""
    worst = scale = 0.0
    for row in torch.linspace(0, q.shape[2] - 1, samples).long().tolist():
        for h, rule in enumerate(rules):
            earlier = min(row, rule.earlier)
            own, keys = (
                q[:, h : h + 1, row - earlier : row + 1],
                k[:, h // 3 : h // 3 + 1, : row + 1],
            )
            mask = rule.mask(own, keys, first=row - earlier, earlier=earlier)
            weights = (
                (own[:, :, -1:].double() @ keys.double().mT * DIM**-0.5)
                .masked_fill(~mask, -torch.inf)
                .softmax(-1)
            )
            exact = weights @ v[:, h // 3 : h // 3 + 1, : row + 1].double()
            worst = max(worst, float((out[:, h : h + 1, row : row + 1] - exact).abs().max()))
            scale = max(scale, float(exact.abs().max()))
    return worst / scale


def layer(length: int, share: float, args) -> list[dict]:
    """Raw queries, keys and values."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rules, square = mixed(length, share), torch.randn(2048, 2048)
    run = lambda: sparse_attention(q, k, v, is_causal=True, enable_gqa=True, rules=rules)
    calls: dict[str, Callable] = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
        "dense": lambda: attention(dot_score(q, k), v, Options(is_causal=True), backend="cpu"),
        "sparse": run,
        "square": lambda: square @ square,
    }
    with torch.no_grad():
        off = error(run(), q, k, v, rules)
        seconds = lowest(calls, args.seconds, 1)
    pairs = mean_share(rules, length)
    rate = pairs * 4 * DIM * HEADS * length * (length + 1) / 2 / seconds["sparse"] / 1e9
    product = 2 * 2048**3 / seconds.pop("square") / 1e9
    return [
        row("layer", length, pairs, seconds, error=off, rate=rate, share_of_product=rate / product)
    ]


def models(length: int, args) -> tuple[dict[str, torch.nn.Module], float]:
    """Stock, on our dense kernel, and sparse, which share weights; and the share of the pairs."""
    pretrained = lambda: AutoModelForCausalLM.from_pretrained(
        smollm2_folder(), dtype=torch.float32
    ).eval()
    made = {
        n: pretrained() if args.chosen else smollm2(args.layers)
        for n in ("sdpa", "dense", "sparse")
    }
    for model in made.values():
        model.load_state_dict(made["sdpa"].state_dict(), assign=True)
    made["dense"].set_attn_implementation("hyper_dot")
    ha.set_backend(made["dense"], "cpu")
    if args.chosen:
        cell = Cell(length, "rules with a kernel", args.chosen, args.share)
        entry = read_results()["cells"].get(cell.key, {})
        allocation = Choices(length).of(cell, entry.get("times"), entry.get("rounds", ()))
        ha.patch_model(made["sparse"], allocation.config())
        return made, allocation.pairs
    rules = mixed(length, args.share)
    ha.patch_model(made["sparse"], ha.SparseConfig(rules=rules), mode="replace")
    return made, mean_share(rules, length)


def model(length: int, share: float, args) -> list[dict]:
    """A prompt and one logit."""
    args.context, args.share = length, share
    made, pairs = models(length, args)
    seconds = lowest({name: prefill_step(m, args) for name, m in made.items()}, args.seconds, 1)
    return [row(called("model", args), length, pairs, seconds)]


def decode(length: int, share: float, args) -> list[dict]:
    """A token, the mean of the last ones of a length, and the cache as it was before them.

    `DynamicCache` copies all keys and values at every token, and `HierarchicalCache` does not: so the stock model is
    timed with that as well.
    """
    args.share = share
    made, pairs = models(length, args)
    steps = {name: tokens_after(m, length, STEPS, args, DynamicCache()) for name, m in made.items()}
    caches = {name: ha.HierarchicalCache() for name in made}
    steps |= {
        f"{name}, grown": tokens_after(m, length, STEPS, args, caches[name])
        for name, m in made.items()
    }
    seconds = {name: taken / STEPS for name, taken in lowest(steps, args.seconds, 1).items()}
    grown = {
        "sdpa": seconds["sdpa"],
        **{name: seconds[f"{name}, grown"] for name in ("dense", "sparse")},
    }
    return [
        row(called("decode", args), length, pairs, {name: seconds[name] for name in made}),
        row(called("decode, HierarchicalCache", args), length, pairs, grown),
        row(
            called("the stock model with HierarchicalCache", args),
            length,
            1.0,
            grown | {"sparse": seconds["sdpa, grown"]},
        ),
    ]


def called(kind: str, args) -> str:
    """A row's name."""
    chosen = "" if args.chosen == "by head" else f" {args.chosen}"
    return f"SmolLM2-135M{chosen}, budget {args.share:g}, {kind}" if args.chosen else kind


def forget(length: int, share: float, args) -> list[dict]:
    """One token of a model most of whose key heads forget, and what its cache holds then."""
    args.share, group = share, HEADS // KV_HEADS
    made, _ = models(length, args)
    split = ha.unpatch_model(made["sparse"])
    layers = split.config.num_hidden_layers
    few = [Exact()] * group + [Window(near=256)] * (HEADS - group)
    every_second = {
        f"model.layers.{i}.self_attn": (ha.SparseConfig(few),) for i in range(0, layers, 2)
    }
    of_layers = [few if i % 2 == 0 else [Window(near=256)] for i in range(layers)]
    pairs = sum(mean_share(rules, length) for rules in of_layers) / layers
    ha.patch_model(
        split,
        ha.HyperAttnConfig(
            (ha.SparseConfig(Window(near=256)),), mode="replace", overrides=every_second
        ),
    )
    caches = {
        "sdpa": DynamicCache(),
        "dense": ha.HierarchicalCache(),
        "whole": ha.HierarchicalCache(split),
    }
    caches["sparse"] = ha.HierarchicalCache(split, evict=True)
    steps = {
        name: tokens_after(made.get(name, split), length, 1, args, cache)
        for name, cache in caches.items()
    }
    whole, found = (steps[name]() for name in ("whole", "sparse"))
    off = float((whole - found).abs().max() / whole.abs().max())
    seconds = lowest(steps, args.seconds, 1)
    held = {name: bytes_of(cache) for name, cache in caches.items()}
    return [row(called("forget", args), length, pairs, seconds, error=off, bytes=held)]


def bytes_of(cache: DynamicCache) -> int:
    """What a cache holds: keys and values, and room for more."""
    tensors = []
    for layer in cache.layers:
        store = getattr(layer, "store", None)
        tensors += [layer.keys, layer.values] if store is None else [t.room for t in store.tokens]
    return sum(t.nbytes for t in tensors)


def tokens_after(
    made: torch.nn.Module, length: int, steps: int, args, cache: DynamicCache
) -> Callable:
    """The last tokens of a length, one after the other, with the cache of the model's own prompt."""
    token = tokens(args, 1)
    with torch.inference_mode():
        made(tokens(args, length - steps), past_key_values=cache, logits_to_keep=1)

    @torch.inference_mode()
    def run():
        for _ in range(steps):
            logits = made(token, past_key_values=cache).logits
        cache.crop(-steps)
        return logits

    return run


def row(kind: str, length: int, pairs: float, seconds: dict[str, float], **more) -> dict:
    """One line of the result."""
    ratios = {f"over_{name}": seconds["sparse"] / seconds[name] for name in ("sdpa", "dense")}
    return {"kind": kind, "length": length, "pairs": pairs, **ratios, "seconds": seconds, **more}


def show(r: dict) -> None:
    """Print one line."""
    more = ""
    if "rate" in r:
        more = f"{r['rate']:6.0f} GF/s, {r['share_of_product']:4.0%} of torch.mm's; error {r['error']:.1e}"
    if "bytes" in r:
        held = r["bytes"]
        more = f"holds {held['sparse'] / held['sdpa']:.3f} of {held['sdpa'] / 2**20:.1f} MiB; error {r['error']:.1e}"
    print(
        f"{r['kind']:8} {r['length']:6d} {r['pairs']:6.1%} of pairs: {r['over_sdpa']:.3f} of SDPA, "
        f"{r['over_dense']:.3f} of our dense kernel ({r['seconds']['sparse'] * 1e3:.1f} ms) {more}",
        flush=True,
    )


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {"layer": layer, "model": model, "decode": decode, "forget": forget}
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2], help="of the pairs")
    parser.add_argument("--layers", type=int, default=3, help="of the model with random weights")
    parser.add_argument(
        "--chosen",
        nargs="?",
        const="together",
        choices=CHOSEN,
        help="model and decode: SmolLM2-135M and its own rules; by time, as --shares",
    )
    parser.add_argument("--batch", type=int, default=1, help="of the model")
    parser.add_argument("--seconds", type=float, default=5.0, help="of rounds, for each row")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in args.lengths:
        for share in args.shares:
            for kind in args.kinds:
                for r in kinds[kind](length, share, args):
                    rows.append(r)
                    show(r)
    about = {"environment": environment(), "processor": cpu(), "arguments": vars(args)}
    write_json(args.json, about | {"rows": merged(args.json, rows)})


if __name__ == "__main__":
    main()
