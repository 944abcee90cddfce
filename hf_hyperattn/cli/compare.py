"""`hyperattn compare`: mechanisms trained beside LoRA alone, at equal parameters; a verdict and its uncertainty."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from hub_cards.beside import replace_file

from ..analysis import perplexity
from ..analysis.paired import LEVEL, holm, paired
from ..files import read_json
from ..inject.kept import fingerprint
from ..selection import normalize_choice
from .compare_training import NONE, Trial, load, survey, train
from .console import ProgressBar, output, progress, table
from .inject_task import circumstances, public_name
from .inputs import check_folder, encode, prefix_of, quiet, read_text, read_tokenizer, window_of
from .models import causal_config, is_patched

STATE, CARD = "hyperattn_compare.json", "README.md"
BUDGET, LEAST_STEPS, PROBE = 1200.0, 10, 3  # seconds; of a run; of the run by which time is planned
SPARE = 0.9  # of the budget is planned
HELD_OUT = 0.2  # of every text, its end
LARGEST_TEXT = 20_000_000  # characters of a file
#: What must be the same for runs to be compared, of the command line.
REQUEST = (
    "mechanisms",
    "seeds",
    "length",
    "held_out",
    "layers",
    "rank",
    "rate",
    "added_rate",
    "device",
)
BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
#: Said with every gain.
NOT_YET = (
    "a gain over LoRA alone is not yet hierarchy: the control for that is a plain distance, as a "
    "score of your own"
)
SIGN = "<!-- hyperattn compare -->"


def run(args: argparse.Namespace) -> None:
    """Train what is missing, judge, and write; raises ValueError or OSError for bad input."""
    quiet()
    check(args)
    trial, request = prepare(args)
    state = opened(args, request)
    with progress(1) as bar:
        plan(trial, state, bar)
        complete(trial, state, bar)
    report = judged(args, state)
    if args.out is not None:
        write(args, report)
    output(args, report, show)


def check(args: argparse.Namespace) -> None:
    """Refuse what is wrong in itself, before anything is read."""
    if args.steps is not None and args.budget is not None:
        raise ValueError("--steps and --budget say the same thing; leave one out")
    args.layers = normalize_choice("--layers", args.layers)
    args.mechanisms = [NONE, *(name for name in args.mechanisms if name != NONE)]
    args.dtype = "float32"
    if args.held_out < len(args.text):
        raise ValueError(
            f"--held-out {args.held_out} with {len(args.text)} texts; allowed: {len(args.text)} or more"
        )
    if args.out is not None:
        check_folder("--out", args.out)


def prepare(args: argparse.Namespace) -> tuple[Trial, dict[str, Any]]:
    """The texts in two parts, and what is to be compared; all in order before anything is trained."""
    texts = read_texts(args.text)
    config = causal_config(args.model)
    if is_patched(config):
        raise ValueError(f"{args.model}: patched already; allowed: a model with its own attention")
    tokenizer = read_tokenizer(args.model, args.model)
    prefix = prefix_of(tokenizer)
    length = window_of(config, args.length, 512, len(prefix))
    trained: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for text, name in texts:
        ids = torch.tensor(encode(tokenizer, text, len(text), name))
        wanted = -(-(args.held_out - len(read)) // len(texts))  # as many of every text, or one more
        windows = min(int(HELD_OUT * len(ids)) // length, wanted)
        if windows < 1 or len(ids) < 2 * length:
            raise ValueError(
                f"the text {name} has {len(ids)} tokens; allowed: {math.ceil(length / HELD_OUT):,} or "
                f"more for windows of {length}; use a longer text or a smaller --length"
            )
        cut = len(ids) - int(HELD_OUT * len(ids))
        trained.append(ids[:cut])
        read.append(ids[cut : cut + windows * length])
    held_out = torch.cat(read)
    digest = hashlib.sha256(torch.cat([*trained, held_out]).numpy().tobytes()).hexdigest()
    request = {name: getattr(args, name) for name in REQUEST} | {
        "model": public_name(args.model) if os.path.exists(args.model) else args.model,
        "texts": [name for _, name in texts],
        "tokens": digest,
        "length": length,
        "trained_on": sum(map(len, trained)),
        "read": len(held_out),
        "weights": fingerprint(load(args), torch.empty(0), ()),
    }
    return Trial(args, torch.cat(trained), held_out, prefix, length), json.loads(
        json.dumps(request)
    )


def read_texts(paths: list[str]) -> list[tuple[str, str]]:
    """The texts with their names; one that is given twice would be learnt, and read, twice."""
    texts: dict[str, str] = {}
    for path in paths:
        text, name = read_text(path, LARGEST_TEXT)
        if name in texts:
            raise ValueError(
                f"--text {path}: a second text called {name}; allowed: texts of different names"
            )
        texts[name] = text
    return [(text, name) for name, text in texts.items()]


def opened(args: argparse.Namespace, request: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted comparison left in --out, or the start of a new one.

    Raises:
        ValueError: it is another comparison, or damaged.
    """
    state: dict[str, Any] = {
        "request": request,
        "steps": args.steps,
        "runs": {},
        "seconds": 0.0,
        "path": None,
    }
    state["budget"] = None if args.steps else args.budget or BUDGET
    if args.out is None:
        return state
    path = Path(args.out) / STATE
    if path.is_file():
        left = read_json(path)
        if not isinstance(left.get("request"), dict) or not isinstance(left.get("runs"), dict):
            raise ValueError(
                f"{path}: not what `hyperattn compare` writes; use another --out, or remove it"
            )
        other = [name for name in request if left["request"].get(name) != request[name]]
        if args.steps not in (None, left.get("steps")):
            other.append("steps")
        if args.budget not in (None, left.get("budget")):
            other.append("budget")
        if other:
            raise ValueError(
                f"{path}: of another comparison ({', '.join(other)} differ); use another --out, or remove it"
            )
        state |= {
            name: left.get(name)
            for name in ("steps", "budget", "runs", "seconds", "stock", "added")
        }
    return state | {"path": path}


def keep(state: dict[str, Any]) -> None:
    """Write the state, whole or not at all; nothing without --out."""
    if state["path"] is not None:
        state["path"].parent.mkdir(exist_ok=True)
        content = {name: value for name, value in state.items() if name != "path"}
        replace_file(state["path"], (json.dumps(content, indent=1) + "\n").encode())


def plan(trial: Trial, state: dict[str, Any], bar: ProgressBar) -> None:
    """Look at every recipe, so that what cannot be is refused now; choose the steps that the budget allows."""
    args, start = trial.args, time.perf_counter()
    for recipe in args.mechanisms[1:]:
        bar.describe(f"looking at {recipe}")
        survey(trial, recipe)
    state["added"] = trial.added
    if state["steps"] is not None:
        return
    budget, seconds = state["budget"], []
    for recipe in args.mechanisms:
        bar.describe(f"timing {recipe}")
        seconds.append(train(trial, recipe, 0, PROBE, lambda: None)["seconds"])
    fixed = args.seeds * sum(s["load"] + s["read"] for s in seconds) + time.perf_counter() - start
    step = args.seeds * sum(s["step"] for s in seconds)
    steps = int((SPARE * budget - fixed) / step)
    if steps < LEAST_STEPS:
        least = math.ceil((fixed + LEAST_STEPS * step) / SPARE / 60)
        raise ValueError(
            f"--budget of {budget:g} s leaves {max(steps, 0)} steps a run; allowed: {LEAST_STEPS} or "
            f"more, about {least}min; or a smaller --length, fewer --mechanisms"
        )
    state["steps"] = steps
    keep(state)


def complete(trial: Trial, state: dict[str, Any], bar: ProgressBar) -> None:
    """Every run that is missing, seed by seed; each is kept when it is done."""
    args, start, before = trial.args, time.perf_counter(), state["seconds"]
    names = [(recipe, seed) for seed in range(args.seeds) for recipe in args.mechanisms]
    bar.total, bar.n = len(names) * state["steps"], 0
    if state.get("stock") is None:
        bar.describe("reading the model as it is")
        state["stock"] = perplexity(
            load(args), trial.held_out, trial.length, prefix=trial.prefix
        ).loss
    for recipe, seed in names:
        key = f"{recipe}, seed {seed}"
        if key in state["runs"]:
            bar.advance(state["steps"])
            continue
        bar.describe(key)
        state["runs"][key] = train(trial, recipe, seed, state["steps"], lambda: bar.advance(1))
        state["seconds"] = before + time.perf_counter() - start
        keep(state)


def judged(args: argparse.Namespace, state: dict[str, Any]) -> dict[str, Any]:
    """The rows with their verdicts, and the circumstances."""
    runs = {
        r: [state["runs"][f"{r}, seed {seed}"] for seed in range(args.seeds)]
        for r in args.mechanisms
    }
    losses = {recipe: [run["loss"] for run in done] for recipe, done in runs.items()}
    tests = {recipe: paired(losses[recipe], losses[NONE]) for recipe in args.mechanisms[1:]}
    corrected = dict(zip(tests, holm([test.p for test in tests.values()])))
    rows: dict[str, Any] = {}
    for recipe in args.mechanisms:
        rows[recipe] = {
            "parameters": runs[recipe][0]["parameters"],
            "added": state["added"].get(recipe, 0),
            "losses": losses[recipe],
            "loss": mean(losses[recipe]),
            "deviation": stdev(losses[recipe]),
            "perplexity": math.exp(mean(losses[recipe])),
            "seconds_a_step": mean(run["seconds"]["step"] for run in runs[recipe]),
        }
        if recipe in tests:
            rows[recipe] |= {
                "against_none": vars(tests[recipe]),
                "p_corrected": corrected[recipe],
                "verdict": verdict(tests[recipe].mean, corrected[recipe]),
            }
    return {
        **state["request"],
        "windows_read": state["request"]["read"] // state["request"]["length"],
        "steps": state["steps"],
        "stock_loss": state["stock"],
        "rows": rows,
        "seconds": state["seconds"],
        **circumstances(args, "torch", "transformers", "peft"),
    }


def verdict(difference: float, p: float) -> str:
    """What a corrected test says of a loss less that of the control."""
    if not p < LEVEL:
        return UNDECIDED
    return BETTER if difference < 0 else WORSE


def cells(report: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The table: head and rows."""
    rows = []
    for name, row in report["rows"].items():
        test = row.get("against_none")
        difference = (
            ""
            if test is None
            else f"{test['mean']:+.4f} ({test['low']:+.4f} to {test['high']:+.4f})"
        )
        rows.append(
            [
                name,
                f"{row['parameters']:,}",
                f"{row['loss']:.4f} ± {row['deviation']:.4f}",
                f"{row['perplexity']:,.2f}",
                f"{row['seconds_a_step']:.2f} s",
                difference,
                "" if test is None else f"{row['p_corrected']:.3f}",
                row.get("verdict", "control"),
            ]
        )
    head = (
        "mechanism",
        "trained",
        "nats a token",
        "perplexity",
        "a step",
        "less none (95 %)",
        "p",
        "verdict",
    )
    return head, rows


def sentences(report: dict[str, Any]) -> list[str]:
    """What the table says, and what it does not."""
    said = []
    for name, row in report["rows"].items():
        if "verdict" not in row:
            continue
        found = f"{row['against_none']['detectable']:.4f} nats"
        words = {
            BETTER: "predicts better than LoRA alone",
            WORSE: "predicts worse than LoRA alone",
            UNDECIDED: "undecided: no difference from LoRA alone was shown",
        }[row["verdict"]]
        said.append(
            f"{name}: {words}; {report['seeds']} seeds find a difference of {found} four times in five"
        )
    if report["windows_read"] < report["held_out"]:
        said.append(
            f"{report['windows_read']} held-out windows were read, not {report['held_out']}: the last fifth of "
            "a text holds fewer than its share"
        )
    sizes = [row["parameters"] for row in report["rows"].values()]
    none = report["rows"][NONE]["loss"]
    return [
        *said,
        f"trained parameters differ by at most {(max(sizes) - min(sizes)) / min(sizes):.2%}; the model as it is: "
        f"{report['stock_loss']:.4f} nats, LoRA alone {none - report['stock_loss']:+.4f}",
        "the uncertainty is that of seeds, on these texts, at these rates and steps: other texts may say otherwise",
        *(
            [NOT_YET]
            if any(row.get("verdict") == BETTER for row in report["rows"].values())
            else []
        ),
    ]


def title(report: dict[str, Any]) -> str:
    """What was compared, in a line."""
    return (
        f"{public_name(report['model'])}: {', '.join(report['texts'])}, {report['steps']} steps of {report['length']} "
        f"tokens, {report['seeds']} seeds, {report['read']:,} tokens read, {report['seconds'] / 60:.1f} min"
    )


def show(report: dict[str, Any]) -> None:
    """The report for a terminal."""
    print(title(report) + "\n")
    table(*cells(report))
    print("\n".join(["", *sentences(report)]))


def write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """The card, unless a person's own is there, and for every mechanism the facts that `hyperattn card` takes."""
    folder = Path(args.out)
    folder.mkdir(exist_ok=True)
    for name, row in report["rows"].items():
        if "verdict" in row:
            replace_file(
                folder / f"facts-{name}.json",
                (json.dumps({"results": [fact(report, row)]}, indent=1) + "\n").encode(),
            )
    path = folder / CARD
    if os.path.lexists(path) and not path.read_bytes().startswith(SIGN.encode()):
        print(f"kept {path}: it was not written by `hyperattn compare`", file=sys.stderr)
        return
    replace_file(path, card(report).encode())


def fact(report: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A result as `hub_cards.Result` has it."""
    test = row["against_none"]
    notes = (
        f"Trained {report['steps']} steps of {report['length']} tokens, {report['seeds']} seeds; against LoRA "
        f"alone at equal parameters: {test['mean']:+.4f} nats ({test['low']:+.4f} to {test['high']:+.4f}), "
        f"{row['verdict']}."
    )
    return {
        "metric": "perplexity",
        "value": row["perplexity"],
        "base_value": math.exp(report["stock_loss"]),
        "dataset": f"{', '.join(report['texts'])}, held-out part",
        "notes": notes,
        **{name: report[name] for name in ("command", "machine", "versions", "date")},
    }


def card(report: dict[str, Any]) -> str:
    """The report in Markdown; what a person named is put into code spans."""
    head, rows = cells(report)
    lines = [
        "| " + " | ".join(line) + " |"
        for line in (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    ]
    code = lambda text: "`" + " ".join(str(text).split()).replace("`", "'") + "`"
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return "\n".join(
        [
            SIGN,
            "# A comparison of attention mechanisms",
            "",
            code(title(report)),
            "",
            *lines,
            "",
            *(f"- {code(line)}" for line in sentences(report)),
            "",
            "A mechanism's run of a seed reads the same tokens as the control's, and starts from the "
            "same LoRA matrices, but for those that gave ranks. The test is a paired t test over "
            "seeds, p corrected by Holm.",
            "",
            f"Command: {code(report['command'])}  ",
            f"Machine: {report['machine']}; {versions}; {report['date']}",
            "",
        ]
    )
