"""Heal SmolLM2-135M under the sparse rules that the frontier chose, and keep the adapter for a cell of the frontier.

    python benchmarks/healing.py --length 8192 --budget 0.1 --threads 1              # again, where it was cut off
    python benchmarks/frontier.py --length 8192 --only "rules with a kernel, healed"  # what it is worth

It learns from the three texts on which rules are measured, and from examples of retrieval made of them: nothing of what
a cell of the frontier is measured on. Windows are drawn by seed and step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import environment, write_json
from frontiers.cells import Cell, healed_folder
from frontiers.choices import Choices, tokens_of
from frontiers.rules import HEALED
from hsa_frontier import texts
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn
from hf_hyperattn.cli.smollm2 import smollm2
from hf_hyperattn.inject import Healing, retrieval

RESULTS = Path(__file__).parent / "results"
TOKENS = 300_000  # of each text, no more
MIXTURES = 12  # examples of retrieval, each as long as a window


def lessons(tokenizer: Any, length: int) -> dict[str, torch.Tensor]:
    """Token ids of the three texts, and of examples that hide needles in them, one after the other."""
    found = tokens_of(tokenizer, texts(), 0, TOKENS)
    hay = [ids[i * length :] for i in range(MIXTURES // len(found)) for ids in found.values()]
    made = [retrieval.mixture(tokenizer, ids, length, seed=1000 + i) for i, ids in enumerate(hay)]
    return found | {"retrieval": torch.cat([example.ids for example in made if example is not None])}


def main() -> None:
    """Read the command line, heal, and keep the adapter and what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a window (default: 8192)")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the pairs (default: 0.1)")
    parser.add_argument("--steps", type=int, default=60, help="windows to learn from (default: 60)")
    parser.add_argument("--lora", type=int, default=8, help="rank of LoRA's matrices (default: 8)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 3e-3)")
    parser.add_argument("--threads", type=int, help="of torch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    cell = Cell(args.length, HEALED, "by head", args.budget)
    folder, tokenizer = healed_folder(cell), AutoTokenizer.from_pretrained(smollm2())
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
    allocation = Choices(args.length, model, tokenizer).of(cell)
    if allocation is None:
        raise SystemExit(f"no rules of {args.budget:.0%} of the pairs")
    hf_hyperattn.patch_model(model, allocation.config())
    settings: Any = {"rank": args.lora, "lr": args.lr, "bf16": True}
    healing = Healing(model, lessons(tokenizer, args.length), args.length, args.steps, **settings)
    start, before = time.monotonic(), healing.held_out()

    def say(loss: float) -> None:
        print(f"{time.monotonic() - start:7.0f} s  step {len(healing.losses)}  KL {loss:.5f}", flush=True)

    print(f"{allocation.pairs:.1%} of the pairs; before: {before}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    healing.run(folder.with_suffix(".state"), 5, say)
    after = healing.held_out()
    healing.adapter.save_pretrained(str(folder))
    print(f"after: {after}")
    told = {"pairs": allocation.pairs, "before": before, "after": after, "losses": healing.losses}
    settings |= {"length": args.length, "budget": args.budget, "steps": args.steps}
    file = RESULTS / f"healing-{args.length}-{args.budget:g}.json"
    write_json(str(file), {**settings, **told, "environment": environment()})


if __name__ == "__main__":
    main()
