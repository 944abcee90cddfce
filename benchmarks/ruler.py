"""Run RULER's tasks on SmolLM2-135M: the original, injected and healed model.

    python benchmarks/ruler.py                              # 4,096 and 8,192 tokens; again until all is done
    python benchmarks/ruler.py --lengths 4096 --examples 4 --minutes 30
    python benchmarks/ruler.py --draw                       # the tables of docs/results/ruler.md

Eleven tasks (`frontiers/ruler_tasks.py`; the two that need a download are left out). The score is
RULER's: the share of the answers that the generated text contains. Beside it stands the
log-likelihood of the answers, which also tells models apart that solve no task.

The injected models have the sparse rules that the frontier chose for 8,192 tokens, with 20 % and 10 %
of the pairs there. They follow from committed losses and corrections, so nothing is chosen again. A
healed model is run if `benchmarks/healing.py` has left its adapter. Every sample is kept in
benchmarks/results/ruler.json, and not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
from common import cpu, environment, write_json
from frontiers import cells
from frontiers.cells import ROOT, Cell, healed_folder
from frontiers.choices import Choices, held_out_texts
from frontiers.ruler_tasks import TASKS, Sample, make_sample, score_text
from frontiers.rules import HEALED, as_run
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

import hf_hyperattn as ha
from hf_hyperattn.inject import Allocation
from hyperattn_cli.shared.smollm2 import smollm2

RESULTS = ROOT / "benchmarks" / "results" / "ruler.json"
PAGE = ROOT / "docs" / "results" / "ruler.md"
LENGTHS = (4096, 8192)
#: Length that the rules were chosen at.
CHOSEN_AT = 8192
#: Samples of each task.
EXAMPLES = 1
#: The rows: name -> cell of the frontier; None: the original model.
ORIGINAL = "original"
ROWS: dict[str, Cell | None] = {
    ORIGINAL: None,
    "20 % of the pairs": Cell(CHOSEN_AT, "rules with a kernel", "together", 0.2),
    "10 % of the pairs": Cell(CHOSEN_AT, "rules with a kernel", "together", 0.1),
    "10 % of the pairs, healed": Cell(CHOSEN_AT, HEALED, "by head", 0.1),
}


class FoundAll(StoppingCriteria):
    """Stop generating once the score cannot rise further.

    Args:
        tokenizer: Of the model.
        sample: The sample that is answered.
        start: Number of tokens of its prompt.
    """

    def __init__(self, tokenizer: Any, sample: Sample, start: int):
        self.tokenizer, self.sample, self.start = tokenizer, sample, start

    def __call__(self, input_ids, scores, **kwargs):
        text = self.tokenizer.decode(input_ids[0, self.start :])
        found = score_text(text, self.sample.answers) == 1
        return torch.full((len(input_ids),), found, dtype=torch.bool)


def allocation_of(cell: Cell) -> Allocation:
    """Return the committed choice of a cell.

    Raises:
        SystemExit: The committed losses give another choice than the committed cell had.
    """
    entry = cells.read_results()["cells"][cell.key]
    made = Choices(cell.length).of(cell, rounds=entry.get("rounds", ()))
    if made is None or not math.isclose(made.pairs, entry["pairs"], rel_tol=1e-9):
        raise SystemExit(
            f"{cell.key}: the committed losses give other rules than the committed cell has; run "
            "`python benchmarks/frontier.py` for it again"
        )
    return as_run(made)


def load_models() -> dict[str, Any]:
    """Return the model of every row that can be run here."""
    models = {}
    for name, cell in ROWS.items():
        if cell is not None and cell.method == HEALED and not healed_folder(cell).is_dir():
            print(
                f"{name}: no adapter here, not run; python benchmarks/healing.py --length {cell.length} "
                f"--budget {cell.budget:g} makes it"
            )
            continue
        model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        if cell is not None:
            ha.patch_model(model, allocation_of(cell).config())
            if cell.method == HEALED:
                model = PeftModel.from_pretrained(model, str(healed_folder(cell))).eval()
        models[name] = model
    return models


@torch.no_grad()
def run_sample(model: Any, tokenizer: Any, sample: Sample) -> dict[str, Any]:
    """Score one sample.

    Returns:
        The score, nats per token of the answers, the generated text and seconds.
    """
    start = time.process_time()
    prompt = tokenizer(sample.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    answer = tokenizer(
        f" {', '.join(sample.answers)}", add_special_tokens=False, return_tensors="pt"
    )["input_ids"]
    cache = ha.HierarchicalCache(model)
    # The last token of the prompt is read twice: before the answer, and before what is generated.
    model(prompt[:, :-1], past_key_values=cache, logits_to_keep=1)
    read = torch.cat([prompt[:, -1:], answer], 1)
    logits = model(read, past_key_values=cache).logits[0, :-1].float()
    nats = torch.nn.functional.cross_entropy(logits, answer[0]).item()
    cache.crop(-read.shape[1])
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=sample.tokens,
        stopping_criteria=[FoundAll(tokenizer, sample, prompt.shape[1])],
    )
    text = tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
    return {
        "score": score_text(text, sample.answers),
        "nats": nats,
        "generated": text,
        "tokens": prompt.shape[1],
        "seconds": time.process_time() - start,
    }


def read_results() -> dict[str, Any]:
    """Return what was measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}


def key_of(length: int, name: str, task: str) -> str:
    """Return the name of a cell in the file of results."""
    return f"{length}/{name}/{task}"


def measure(lengths: list[int], tasks: list[str], examples: int, until: float) -> bool:
    """Run every sample that is missing; return whether all is done.

    All rows of a sample are run before the next sample, so that rows can always be compared.
    """
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    models = load_models()
    text = held_out_texts()["essay"]
    count = lambda prompt: len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    for length in lengths:
        for number in range(examples):
            for task in tasks:
                sample = None
                for name, model in models.items():
                    key = key_of(length, name, task)
                    if len(read_results()["cells"].get(key, [])) > number:
                        continue
                    if time.monotonic() > until:
                        return False
                    sample = sample or make_sample(task, length, count, text, str(number))
                    found = run_sample(model, tokenizer, sample)
                    result = read_results()
                    result["cells"].setdefault(key, []).append(found)
                    where = {**environment(), "cpu": cpu()}
                    write_json(str(RESULTS), {**result, "environment": where})
                    print(key, found["score"], round(found["nats"], 3), flush=True)
    return True


def table_of(result: dict[str, Any], length: int) -> str:
    """Return a Markdown table of a length: score, and rise of the answers' perplexity."""
    if not any(key.startswith(f"{length}/") for key in result["cells"]):
        return "Not run."
    of = lambda name, task: result["cells"].get(key_of(length, name, task), [])
    lines = [
        "| task | samples | " + " | ".join(ROWS) + " |",
        "| --- |" + " --- |" * (1 + len(ROWS)),
    ]
    for task in sorted(TASKS):
        shown = [describe_cell(of(name, task), of(ORIGINAL, task)) for name in ROWS]
        samples = str(len(of(ORIGINAL, task)))
        lines.append("| " + " | ".join([task, samples, *shown]) + " |")
    means = [describe_mean(result, length, name) for name in ROWS]
    return "\n".join([*lines, "| " + " | ".join(["**mean**", "", *means]) + " |"])


def describe_cell(found: list[dict], original: list[dict]) -> str:
    """Return score, and how much larger the perplexity of the answers is than the original's."""
    if not found:
        return "not run"
    score = f"{100 * statistics.mean(sample['score'] for sample in found):.0f}"
    if found is original:
        return f"{score}; {statistics.mean(sample['nats'] for sample in found):.2f} nats"
    # Rows are run in turns, so the original may be one sample ahead.
    more = [a["nats"] - b["nats"] for a, b in zip(found, original)]
    return f"{score}; {math.expm1(statistics.mean(more)):+.1%}"


def describe_mean(result: dict[str, Any], length: int, name: str) -> str:
    """Return the mean over the tasks that all rows have run, and its standard error."""
    run = [row for row in ROWS if any(f"{length}/{row}/" in key for key in result["cells"])]
    of = lambda row, task: result["cells"].get(key_of(length, row, task), [])
    tasks = [task for task in TASKS if run and all(of(row, task) for row in run)]
    if name not in run or len(tasks) < 2:
        return "not run"
    scores = [100 * statistics.mean(s["score"] for s in of(name, task)) for task in tasks]
    said = f"{statistics.mean(scores):.1f}"
    if name == ORIGINAL:
        nats = [statistics.mean(s["nats"] for s in of(name, task)) for task in tasks]
        return f"{said}; {statistics.mean(nats):.2f} nats"
    more = [
        statistics.mean(a["nats"] - b["nats"] for a, b in zip(of(name, t), of(ORIGINAL, t)))
        for t in tasks
    ]
    mean = statistics.mean(more)
    error = math.exp(mean) * statistics.stdev(more) / math.sqrt(len(more))
    return f"{said}; {math.expm1(mean):+.1%} ± {error:.1%}"


def draw_tables(result: dict[str, Any]) -> None:
    """Write the tables into the page."""
    text = PAGE.read_text()
    begin, end = "<!-- ruler -->", "<!-- /ruler -->"
    body = "\n\n".join(f"**{length:,} tokens**\n\n{table_of(result, length)}" for length in LENGTHS)
    PAGE.write_text(f"{text.split(begin)[0]}{begin}\n{body}\n{end}{text.split(end)[1]}")


def main(words: list[str] | None = None) -> None:
    """Read the command line, run, write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, help=f"of each task (default: {EXAMPLES})"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after this")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--draw", action="store_true", help="only write the tables")
    args = parser.parse_args(words)
    if args.examples < 1:
        parser.error(f"--examples {args.examples}: allowed: 1 or more")
    if not args.draw:
        torch.set_num_threads(args.threads)
        until = time.monotonic() + 60 * args.minutes
        done = measure(args.lengths, args.tasks, args.examples, until)
        print("all is done" if done else "stopped; the same command goes on from here")
    draw_tables(read_results())


if __name__ == "__main__":
    main()
