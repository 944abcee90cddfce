"""Heal SmolLM2-135M under the sparse rules that the frontier chose, and keep the adapter for a cell of the frontier.

    python benchmarks/healing.py --length 8192 --budget 0.1 --threads 1              # again, where it was cut off
    python benchmarks/frontier.py --length 8192 --only "rules with a kernel, healed"  # what it is worth
    python benchmarks/healing.py --length 8192 --budget 0.1 --controls               # what could explain it away

It learns from the three texts on which rules are measured, and from examples of retrieval made of them. The texts of a
cell of the frontier are others, and so are its numbers, names and places of needles; but the words of few-shot and
their labels are few and the same, so that it might learn them by heart. `--controls` gives every word another label,
and asks the stock, the injected and the healed model; and it reads the texts by the stock model with the adapter alone,
which tells what the adapter would gain where nothing is to be healed. Windows are drawn by seed and step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import environment, write_json
from frontiers.cells import Cell, healed_folder
from frontiers.choices import Choices, held_out_texts, tokens_of
from frontiers.rules import HEALED
from hsa_frontier import texts
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn
from hf_hyperattn.inject import Healing, retrieval
from hf_hyperattn.inject.gradients import final_hidden, head_of, loss_of
from hyperattn_cli.shared.smollm2 import smollm2

RESULTS = Path(__file__).parent / "results"
TOKENS = 300_000  # of each text, no more
MIXTURES = 12  # examples of retrieval, each as long as a window


def lessons(tokenizer: Any, length: int) -> dict[str, torch.Tensor]:
    """Token ids of the three texts, and of examples that hide needles in them, one after the other."""
    found = tokens_of(tokenizer, texts(), 0, TOKENS)
    hay = [ids[i * length :] for i in range(MIXTURES // len(found)) for ids in found.values()]
    made = [retrieval.mixture(tokenizer, ids, length, seed=1000 + i) for i, ids in enumerate(hay)]
    return found | {
        "retrieval": torch.cat([example.ids for example in made if example is not None])
    }


@torch.no_grad()
def relabelled(model: Any, tokenizer: Any, length: int) -> list[float]:
    """Nats a token of the answers of few-shot, on the frontier's texts, where every word has the label of others."""
    labels, words = list(retrieval.KINDS), list(retrieval.KINDS.values())
    texts_of = tokens_of(tokenizer, held_out_texts(), 20_000, length)
    with patch.dict(retrieval.KINDS, zip(labels, [*words[1:], words[0]])):
        made = retrieval.examples(
            tokenizer, [texts_of["essay"], texts_of["code"]], length, tasks=["few_shot"]
        )
    head = head_of(model, made[0].ids)
    return [retrieval.score(model, head, example).nats for example in made]


@torch.no_grad()
def controls(cell: Cell, model: Any, tokenizer: Any, config: Any, file: Path) -> None:
    """Few-shot with other labels, and the texts by the stock model with the adapter, into the file of results."""
    told = json.loads(file.read_text())
    found = {"stock": relabelled(model, tokenizer, cell.length)} if "relabelled" not in told else {}
    healed = PeftModel.from_pretrained(
        hf_hyperattn.patch_model(model, config), str(healed_folder(cell))
    )
    if found:
        with healed.disable_adapter():
            found["injected"] = relabelled(model, tokenizer, cell.length)
        found["healed"] = relabelled(model, tokenizer, cell.length)
        told["relabelled"] = found
    model = hf_hyperattn.unpatch_model(healed.merge_and_unload())
    told["adapter alone"] = {}
    for name, ids in tokens_of(tokenizer, held_out_texts(), 20_000, cell.length).items():
        loss, _ = loss_of(head_of(model, ids), final_hidden(model, ids), ids, gradient=False)
        told["adapter alone"][name] = loss
        print(name, loss, flush=True)
    write_json(str(file), told)


def main() -> None:
    """Read the command line, heal, and keep the adapter and what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length", type=int, default=8192, help="tokens of a window (default: 8192)"
    )
    parser.add_argument(
        "--budget", type=float, default=0.1, help="share of the pairs (default: 0.1)"
    )
    parser.add_argument("--steps", type=int, default=60, help="windows to learn from (default: 60)")
    parser.add_argument("--lora", type=int, default=8, help="rank of LoRA's matrices (default: 8)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 3e-3)")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument(
        "--controls", action="store_true", help="what could explain the gain, once it is healed"
    )
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    cell = Cell(args.length, HEALED, "by head", args.budget)
    folder, tokenizer = healed_folder(cell), AutoTokenizer.from_pretrained(smollm2())
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
    allocation = Choices(args.length, model, tokenizer).of(cell)
    if allocation is None:
        raise SystemExit(f"no rules of {args.budget:.0%} of the pairs")
    file = RESULTS / f"healing-{args.length}-{args.budget:g}.json"
    if args.controls:
        return controls(cell, model, tokenizer, allocation.config(), file)
    hf_hyperattn.patch_model(model, allocation.config())
    settings: Any = {"rank": args.lora, "lr": args.lr, "bf16": True}
    healing = Healing(model, lessons(tokenizer, args.length), args.length, args.steps, **settings)
    start, before = time.monotonic(), healing.held_out()

    def say(loss: float) -> None:
        print(
            f"{time.monotonic() - start:7.0f} s  step {len(healing.losses)}  KL {loss:.5f}",
            flush=True,
        )

    print(f"{allocation.pairs:.1%} of the pairs; before: {before}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    state = folder.with_name(f"{folder.name}.state")
    healing.run(state, 5, say)
    after = healing.held_out()
    healing.adapter.save_pretrained(str(folder))
    state.unlink(missing_ok=True)
    print(f"after: {after}")
    told = {"pairs": allocation.pairs, "before": before, "after": after, "losses": healing.losses}
    settings |= {"length": args.length, "budget": args.budget, "steps": args.steps}
    write_json(str(file), {**settings, **told, "environment": environment()})


if __name__ == "__main__":
    main()
