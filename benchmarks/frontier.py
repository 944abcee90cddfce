"""The frontier of injection: what sparse rules cost SmolLM2-135M, one for all heads and by head, by share of the pairs.

    python benchmarks/frontier.py --plan                         # the cells that are left, and hours of one core
    python benchmarks/frontier.py --length 2048 --threads 1      # again until it says that all is done
    python benchmarks/frontier.py --length 2048 --only Quest --budgets 0.2 --minutes 10
    python benchmarks/frontier.py --length 8192 --only "rules with a kernel" --kind together --mixed
    python benchmarks/frontier.py --length 8192 --only "rules with a kernel" --kind together --budgets 0.2 \\
        --config hyperattn_cli/commands/smollm2_sparse_8192.json # the rules of `hyperattn demo`
    python benchmarks/frontier.py --draw                         # tables and plot of docs/results/frontier.md

A cell is a method, "uniform" (the rule of the method that is predicted to lose least, for all heads) or "by head" (a
rule or exact attention for every head), and a budget of pairs. "By time" and "by bytes" are by head too, the budget a
share of the time that stock's attention takes, or of the bytes of its keys and values that a cache has to keep: every
rule's time is measured when its run begins, and kept. "Together" is by head, corrected twice by what heads lose
together on other windows of the texts that rules are measured on; `hyperattn inject` finds that on the texts that it
chooses on, and keeps the best of its tries.

What rules lose is measured on the Bible, a part of Python's library, film reviews, a copied text and one that hides
needles; what a cell costs, on five other texts, of which three are of other kinds, and on retrieval examples made of
them (what rules are measured on is drawn by another seed). `--mixed` adds eight mixtures of all tasks, which ask for 80
needles and 72 words of few-shot in eight passes. Measurements and every text of a cell are kept, and not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import cpu
from frontiers.cells import (
    BUDGETS,
    LONG,
    STOCK,
    WINDOWS,
    Cell,
    adapter_of,
    cells,
    healed_folder,
    keep,
    read_results,
)
from frontiers.choices import Choices, counted, held_out_texts, tokens_of
from frontiers.rules import HEALED, as_run
from frontiers.table import draw
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn
from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.inject import retrieval
from hf_hyperattn.inject.gradients import final_hidden, head_of, loss_of
from hyperattn_cli.shared.smollm2 import smollm2

#: Seconds of one core a pass, and for the measurement of all rules on three texts, before any was taken.
PASS, MEASURING = {2048: 15.0, 8192: 150.0}, {2048: 2400.0, 8192: 7200.0}

#: Mixtures of `--mixed`, and how many answers each task has in one.
MIXTURES = 8
ANSWERS = {
    "needle": 1,
    "few_shot": 9,
    "variables": retrieval.HOPS + 1,
    "needle_values": retrieval.NEEDLES,
}


class Work:
    """The model, and the texts and examples of one length."""

    def __init__(self, length: int, mixed: bool = False):
        """With `mixed`, eight mixtures more are measured of every cell."""
        self.length = length
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2())
        self.model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        texts = tokens_of(self.tokenizer, held_out_texts(), 20_000, WINDOWS[length] * length)
        self.windows = {name: ids.split(length) for name, ids in texts.items()}
        hay = [texts["essay"], texts["code"]]
        make = lambda **more: retrieval.examples(self.tokenizer, hay, length, **more)
        mixtures = [
            retrieval.mixture(self.tokenizer, ids, length, seed=i) for i, ids in enumerate(hay)
        ]
        self.examples = {
            task: [e for e in make() if e.task == task] for task in ("copying", *retrieval.TASKS)
        }
        self.examples["mixture"] = [e for e in mixtures if e is not None]
        self.mixed = mixed_examples(self.tokenizer, list(texts.values()), length) if mixed else []
        self.head = head_of(self.model, self.windows["essay"][0])
        self.choices: Choices | None = None

    def run(self, cell: Cell, until: float) -> bool:
        """Do what a cell lacks; whether it is whole."""
        entry = read_results()["cells"].get(cell.key, {"texts": {}, "retrieval": {}, "seconds": []})
        todo = self.todo(cell, entry)
        if not todo or entry.get("none"):
            return True
        if cell.method == HEALED and not healed_folder(cell).is_dir():
            print(
                f"{cell.key}: not healed yet; python benchmarks/healing.py --length {cell.length} --budget "
                f"{cell.budget:g} does it"
            )
            return False
        if cell.method == HEALED and entry.get("adapter") != adapter_of(
            cell
        ):  # what another one did is done anew
            entry = {"texts": {}, "retrieval": {}, "seconds": [], "adapter": adapter_of(cell)}
            todo = self.todo(cell, entry)
        if cell.method != STOCK:
            self.choices = self.choices or Choices(self.length, self.model, self.tokenizer)
            if (
                cell.is_by_time and "times" not in entry
            ):  # texts of one cell are read by one allocation
                if entry["texts"]:
                    print(f"{cell.key}: measured before times were kept, and now anew", flush=True)
                entry = {
                    "texts": {},
                    "retrieval": {},
                    "seconds": [],
                    "times": self.choices.times(cell),
                }
                todo = self.todo(cell, entry)
            if cell.is_together:
                rounds, say = entry.setdefault("rounds", []), lambda: self.say(cell, entry)
                if not self.choices.lose_together(cell, rounds, say, until, entry.get("times")):
                    return False
            allocation = self.choices.of(cell, entry.get("times"), entry.get("rounds", ()))
            entry["pairs"] = None if allocation is None else allocation.pairs
            if allocation is None:
                entry["none"] = "no rule of the method is cheap enough"
                keep(cell, entry)
                return True
            entry["rules"] = counted(allocation)
            hf_hyperattn.patch_model(self.model, as_run(allocation).config())
        healed = (
            PeftModel.from_pretrained(self.model, str(healed_folder(cell)))
            if cell.method == HEALED
            else None
        )
        try:
            for kind, name in todo:
                if time.monotonic() > until:
                    return False
                self.measure(entry, kind, name)
                keep(cell, entry)
                print(cell.key, kind, name, entry[kind][name], flush=True)
        finally:
            if healed is not None:
                healed.unload()
            if cell.method != STOCK:
                hf_hyperattn.unpatch_model(self.model)
        return True

    def say(self, cell: Cell, entry: dict) -> None:
        """Keep what heads lose together."""
        keep(cell, entry)
        print(cell.key, "rounds", [found["done"] for found in entry["rounds"]], flush=True)

    def todo(self, cell: Cell, entry: dict) -> list[tuple[str, str]]:
        """What is not there yet: texts, then tasks; of the stock model its time on this CPU."""
        wanted = [("texts", name) for name in self.windows]
        wanted += [("retrieval", task) for task in cell.tasks if self.examples[task]]
        wanted += [("mixed", "needle")] if self.mixed else []  # and the other tasks with it
        wanted += [("seconds_on", cpu())] if cell.method == STOCK else []
        return [(kind, name) for kind, name in wanted if name not in entry.get(kind, {})]

    @torch.no_grad()
    def measure(self, entry: dict, kind: str, name: str) -> None:
        """Nats a token of every window or example; of texts the processor's seconds and the most memory too.

        Seconds of a cell that are not all of one CPU are not shown.
        """
        if kind == "retrieval":
            scores = [
                retrieval.score(self.model, self.head, example) for example in self.examples[name]
            ]
            entry[kind][name] = {
                "nats": [s.nats for s in scores],
                "exact": [s.exact for s in scores],
            }
            return
        if kind == "mixed":
            entry[kind] = self.measure_mixed()
            return
        if kind == "seconds_on":
            start, passes = (
                time.process_time(),
                [w for windows in self.windows.values() for w in windows],
            )
            for ids in passes:
                loss_of(self.head, final_hidden(self.model, ids), ids, gradient=False)
            entry.setdefault(kind, {})[name] = [(time.process_time() - start) / len(passes)]
            return
        entry["cpu"] = cpu() if not entry["seconds"] or entry.get("cpu") == cpu() else "several"
        losses, start = [], time.process_time()
        with PeakMemory(self.model.device) as memory:
            for ids in self.windows[name]:
                losses.append(
                    loss_of(self.head, final_hidden(self.model, ids), ids, gradient=False)[0]
                )
        entry[kind][name] = losses
        entry["seconds"].append((time.process_time() - start) / len(losses))
        entry["bytes"] = max(entry.get("bytes", 0), memory.peak)

    def measure_mixed(self) -> dict[str, dict[str, list[float]]]:
        """By task, nats a token and the share of right answers of every mixture, which are read once for all tasks."""
        found: dict[str, dict[str, list[float]]] = {}
        for parts in self.mixed:
            hidden = final_hidden(self.model, next(iter(parts.values())).ids)
            for task, example in parts.items():
                score = retrieval.score_hidden(hidden, self.head, example)
                of_task = found.setdefault(task, {"nats": [], "exact": []})
                of_task["nats"].append(score.nats)
                of_task["exact"].append(score.exact)
        return found


def mixed_examples(
    tokenizer: Any, hay: Sequence[torch.Tensor], length: int
) -> list[dict[str, retrieval.Example]]:
    """Eight mixtures, each by task: the same tokens, of which that task's answers count."""
    made = []
    for i in range(MIXTURES):
        whole = retrieval.mixture(tokenizer, hay[i % len(hay)], length, seed=200 + i)
        owners = [task for task in retrieval.MIXED for _ in range(ANSWERS[task])]
        if whole is None or len(whole.spans) != len(owners):
            raise SystemExit(
                f"--mixed: {length} tokens do not hold all tasks at once; allowed: 8192"
            )
        spans = {
            t: tuple(s for s, owner in zip(whole.spans, owners) if owner == t) for t in ANSWERS
        }
        made.append(
            {task: replace(whole, task=task, spans=of_task) for task, of_task in spans.items()}
        )
    return made


def write_config(cell: Cell, file: Path) -> None:
    """Write the config that patches SmolLM2-135M with the rules of a cell, from committed costs."""
    entry = read_results()["cells"].get(cell.key, {})
    allocation = Choices(cell.length).of(cell, entry.get("times"), entry.get("rounds", ()))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2()))
    hf_hyperattn.patch_model(model, as_run(allocation).config())
    file.write_text(json.dumps(model.config.hyperattn) + "\n", encoding="utf-8")


def plan(result: dict, wanted: Sequence[Cell]) -> None:
    """Print what is left of these cells, in hours of one core."""
    total = 0.0
    for length in dict.fromkeys(cell.length for cell in wanted):
        every = [cell for cell in wanted if cell.length == length]
        left = [cell for cell in every if not cell.is_whole(result["cells"].get(cell.key))]
        timed = [cell for cell in cells([length]) if cell.method != STOCK]
        taken = [s for c in timed for s in result["cells"].get(c.key, {}).get("seconds", ())]
        seconds = statistics.mean(taken) if taken else PASS[length]
        passes = sum(cell.passes for cell in left)
        hours = (passes * seconds + (MEASURING[length] if len(left) > 1 else 0)) / 3600
        total += hours
        print(
            f"{length:,} tokens: {len(left)} of {len(every)} cells, {passes} passes of {seconds:.0f} s, "
            f"{hours:.1f} h with the measurement of the rules"
        )
    print(f"{total:.1f} hours of one core")


def main(words: list[str] | None = None) -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length", type=int, choices=list(BUDGETS), help="one of both; where none is named, both"
    )
    parser.add_argument(
        "--only", nargs="+", help="methods, such as Quest; the stock model is always run"
    )
    parser.add_argument("--kind", choices=list(LONG), help="one of these")
    parser.add_argument("--budgets", type=float, nargs="+", help="some of the budgets, such as 0.2")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="start nothing new after this long"
    )
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument(
        "--mixed", action="store_true", help="eight mixtures more, of the cells that are named"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="write the HyperAttnConfig of the one cell that is named",
    )
    parser.add_argument("--plan", action="store_true", help="the cells that are left, and hours")
    parser.add_argument(
        "--draw", action="store_true", help="the tables and the plot, from the results"
    )
    args = parser.parse_args(words)
    if args.draw and (
        args.length or args.only or args.kind or args.budgets or args.mixed or args.plan
    ):
        parser.error("--draw draws all that is measured; give it alone")
    if args.plan and args.mixed:
        parser.error("--plan counts no mixtures; leave --mixed out")
    lengths = [args.length] if args.length else list(BUDGETS)
    every = list(cells(lengths))
    kinds = args.kind and [args.kind]
    asked_of = lambda cell: (
        (args.only, cell.method),
        (args.budgets, cell.budget),
        (kinds, cell.kind),
    )
    is_wanted = lambda cell: all(asked is None or value in asked for asked, value in asked_of(cell))
    for option, asked, known in (
        ("--only", args.only, [cell.method for cell in every]),
        (
            "--budgets",
            args.budgets,
            sorted({cell.budget for cell in every if cell.method != STOCK}),
        ),
    ):
        strange = [value for value in asked or () if value not in known]
        if strange:
            parser.error(
                f"{option} {strange[0]}: no such cell; allowed: {', '.join(map(str, dict.fromkeys(known)))}"
            )
    if not any(map(is_wanted, every)):
        parser.error(
            "no cell is of all that --only, --budgets and --kind name; leave one of them out"
        )
    if args.config:
        named = [cell for cell in every if is_wanted(cell) and cell.method != STOCK]
        if len(named) != 1:
            parser.error(
                f"--config with {len(named)} cells; name one by --length, --only, --kind and --budgets"
            )
        return write_config(named[0], args.config)
    if args.threads:
        torch.set_num_threads(args.threads)
    result = read_results()
    if args.plan:
        return plan(result, [cell for cell in every if is_wanted(cell)])
    if args.draw:
        return draw(result)
    until, done = time.monotonic() + 60 * args.minutes, True
    for length in lengths:
        work = None
        for cell in cells([length]):
            entry = read_results()["cells"].get(cell.key)
            whole = cell.is_whole(entry) and not (args.mixed and "mixed" not in (entry or {}))
            if (is_wanted(cell) or cell.method == STOCK) and not whole:
                work = work or Work(length, args.mixed)
                done = done and time.monotonic() < until and work.run(cell, until)
    print("all is done" if done else "stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
