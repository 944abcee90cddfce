"""Throughput of continuous batching: SmolLM2-135M as it is, computed request by request, and with sparse rules.

    python benchmarks/batching.py                                                an hour on an idle core
    python benchmarks/batching.py --requests 4 --rounds 1 --json benchmarks/results/batching.json   three minutes

`generate_batch` reads 16 prompts of 2,048 random tokens and writes 32 tokens to each, in steps of at most 2,048 tokens.
The models:

- sdpa: the model as it is. Transformers computes all requests of a step at once, under a mask of all pairs.
- dense: the same attention by the name `hyper_dot`, which computes each request by itself.
- sparse: the rules that `frontier.py` gives SmolLM2-135M at 2,048 tokens ("rules with a kernel", chosen by head, 20 %).

Times are CPU time of one thread for a whole call of `generate_batch`; models take turns, and the lowest time of all
rounds counts. Throughput is read and written tokens in a second of this time. `equal` is the share of the new tokens
that the stock model writes as well.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from common import cpu, environment, write_json
from frontiers.cells import Cell
from frontiers.choices import Choices
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import hf_hyperattn as ha
from hyperattn_cli.shared.smollm2 import smollm2

PAGE = 256  # the default of Transformers
CHOSEN_AT = 2048


def make_models(share: float) -> tuple[dict[str, torch.nn.Module], float]:
    """Return the models by name, and the share of the logits that the sparse one computes."""
    made = {
        name: AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        for name in ("sdpa", "dense", "sparse")
    }
    for model in made.values():
        model.load_state_dict(made["sdpa"].state_dict(), assign=True)
    made["dense"].set_attn_implementation("hyper_dot")
    allocation = Choices(CHOSEN_AT).of(Cell(CHOSEN_AT, "rules with a kernel", "by head", share))
    ha.patch_model(made["sparse"], allocation.config())
    return made, allocation.pairs


def serve(model: torch.nn.Module, prompts: list[list[int]], args) -> tuple[float, list[list[int]]]:
    """Return the CPU seconds of one call of `generate_batch`, and the new tokens of each request."""
    pages = -(-(args.length + args.new) // PAGE) + 1
    settings = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages * len(prompts),
        max_batch_tokens=args.step,
    )
    options = GenerationConfig(
        max_new_tokens=args.new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    start = time.process_time()
    found = model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=settings
    )
    seconds = time.process_time() - start
    errors = [result.error for result in found.values() if result.error]
    if errors or len(found) != len(prompts):
        raise RuntimeError(f"generate_batch answered {len(found)} of {len(prompts)}: {errors[:1]}")
    ordered = sorted(found.items(), key=lambda item: int(item[0].split("_")[-1]))
    return seconds, [result.generated_tokens for _, result in ordered]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--step", type=int, default=2048, help="most tokens of a step")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    made, pairs = make_models(args.share)
    draw = partial(torch.randint, 5, 49_000, generator=torch.Generator().manual_seed(0))
    prompts = draw((args.requests, args.length)).tolist()
    seconds: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(1, args.rounds + 1):
        for name, model in made.items():
            taken, tokens[name] = serve(model, prompts, args)
            seconds[name] = min(taken, seconds.get(name, taken))
            print(f"round {number}, {name}: {taken:.0f} s of CPU time", flush=True)
        # After every round, so that a run that is stopped leaves a result.
        rows = [compare(name, seconds, tokens, args) for name in made]
        found = {
            "environment": environment(),
            "processor": cpu(),
            "arguments": vars(args) | {"rounds": number},
            "pairs": pairs,
            "rows": rows,
        }
        write_json(args.json, found)
    for row in rows:
        print(
            f"{row['model']:>6}: {row['tokens_a_second']:.0f} tokens a second, {row['over_sdpa']:.2f}x sdpa, "
            f"{row['over_dense']:.2f}x dense, {row['equal']:.0%} of the tokens equal"
        )


def compare(name: str, seconds: dict[str, float], tokens: dict[str, list], args) -> dict:
    """Return the row of a model, with its throughput over that of the two dense ones."""
    same = [
        a == b
        for own, stock in zip(tokens[name], tokens["sdpa"], strict=True)
        for a, b in zip(own, stock, strict=True)
    ]
    return {
        "model": name,
        "seconds": seconds[name],
        "tokens_a_second": args.requests * (args.length + args.new) / seconds[name],
        "over_sdpa": seconds["sdpa"] / seconds[name],
        "over_dense": seconds["dense"] / seconds[name],
        "equal": sum(same) / len(same),
    }


if __name__ == "__main__":
    main()
