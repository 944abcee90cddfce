"""`hyperattn compare`: train mechanisms and a LoRA control, then test them.

All runs have equally many trainable parameters. This module plans the runs, saves their results,
and writes the verdict with its uncertainty.
"""

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

from hf_hyperattn.analysis import perplexity
from hf_hyperattn.analysis.paired import LEVEL, holm, paired
from hf_hyperattn.config.choice import normalize_choice
from hf_hyperattn.inject.kept import fingerprint
from hf_hyperattn.utils.files import read_json
from hub_cards.beside import replace_file

from ..shared.console import ProgressBar, print_report, print_table, show_progress
from ..shared.inputs import (
    check_folder,
    encode_text,
    prefix_of,
    read_text,
    read_tokenizer,
    silence_transformers,
    window_of,
)
from ..shared.models import causal_config, is_patched
from ..shared.wrap import wrap_text
from .compare_training import NONE, Trial, load_model, survey_recipe, train_run
from .inject_task import describe_circumstances, public_name

STATE = "hyperattn_compare.json"
CARD = "README.md"
BUDGET = 1200.0  # seconds, if neither --budget nor --steps is given
LEAST_STEPS = 10  # per run
PROBE = 3  # steps of the run that measures the time of a step
SPARE = 0.9  # share of the budget that is planned
HELD_OUT = 0.2  # share of every text, taken from its end
LARGEST_TEXT = 20_000_000  # characters of a file
#: Arguments of the command line that must be equal for runs to be comparable.
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
#: Reported with every gain.
NOT_YET = (
    "A gain over LoRA alone does not yet come from hierarchy. The control for that is a plain distance, as a "
    "score of your own."
)
#: First line of a card that this command wrote, and may therefore replace.
SIGN = "<!-- hyperattn compare -->"


def run(args: argparse.Namespace) -> None:
    """Train the missing runs, judge and write.

    Raises:
        ValueError or OSError: Bad input.
    """
    silence_transformers()
    check_options(args)
    trial, request = prepare_trial(args)
    state = open_state(args, request)
    # `finish_runs` sets the total once the number of steps is known.
    with show_progress(1) as bar:
        plan_steps(trial, state, bar)
        finish_runs(trial, state, bar)
    report = judge_runs(args, state)
    if args.out is not None:
        write_results(args, report)
    print_report(args, report, show_report)


def check_options(args: argparse.Namespace) -> None:
    """Check the options before anything is read."""
    if args.steps is not None and args.budget is not None:
        raise ValueError("--steps and --budget say the same thing; leave one out")
    args.layers = normalize_choice("--layers", args.layers)
    # The control is always trained, and always first.
    args.mechanisms = [NONE, *(name for name in args.mechanisms if name != NONE)]
    args.dtype = "float32"
    if args.held_out < len(args.text):
        raise ValueError(
            f"--held-out {args.held_out} with {len(args.text)} texts; allowed: {len(args.text)} or more"
        )
    if args.out is not None:
        check_folder("--out", args.out)


def prepare_trial(args: argparse.Namespace) -> tuple[Trial, dict[str, Any]]:
    """Read the texts, split them, and describe the comparison.

    Everything that can fail early is checked here, before a run is trained.

    Returns:
        The trial, and the request: a JSON object that identifies the comparison in the state file.
    """
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
        ids = torch.tensor(encode_text(tokenizer, text, len(text), name))
        # Spread the windows evenly: ceil division gives some texts one window more.
        wanted = -(-(args.held_out - len(read)) // len(texts))
        windows = min(int(HELD_OUT * len(ids)) // length, wanted)
        if windows < 1 or len(ids) < 2 * length:
            raise ValueError(
                f"the text {name} has {len(ids)} tokens; allowed: {math.ceil(length / HELD_OUT):,} or "
                f"more for windows of {length}; use a longer text or a smaller --length"
            )
        # Train on the beginning of the text, and measure on the start of its held-out end.
        cut = len(ids) - int(HELD_OUT * len(ids))
        trained.append(ids[:cut])
        read.append(ids[cut : cut + windows * length])
    held_out = torch.cat(read)
    # The digest identifies the tokens, whichever folder the texts come from.
    digest = hashlib.sha256(torch.cat([*trained, held_out]).numpy().tobytes()).hexdigest()
    request = {name: getattr(args, name) for name in REQUEST} | {
        "model": public_name(args.model) if os.path.exists(args.model) else args.model,
        "texts": [name for _, name in texts],
        "tokens": digest,
        "length": length,
        "trained_on": sum(map(len, trained)),
        "read": len(held_out),
        "weights": fingerprint(load_model(args), torch.empty(0), ()),
    }
    trial = Trial(
        args=args, train=torch.cat(trained), held_out=held_out, prefix=prefix, length=length
    )
    # A round trip turns tuples into lists, so that the request equals one that was read from a
    # file.
    return trial, json.loads(json.dumps(request))


def read_texts(paths: list[str]) -> list[tuple[str, str]]:
    """Read the texts with their names.

    Raises:
        ValueError: Two texts have the same name: the same text would count twice.
    """
    texts: dict[str, str] = {}
    for path in paths:
        text, name = read_text(path, LARGEST_TEXT)
        if name in texts:
            raise ValueError(
                f"--text {path}: a second text called {name}; allowed: texts of different names"
            )
        texts[name] = text
    return [(text, name) for name, text in texts.items()]


def open_state(args: argparse.Namespace, request: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an interrupted comparison in --out, or a new state.

    Raises:
        ValueError: The file in --out belongs to another comparison, or is damaged.
    """
    state: dict[str, Any] = {
        "request": request,
        "steps": args.steps,
        "runs": {},
        "seconds": 0.0,
        "path": None,
    }
    # --steps replaces the budget, so that no steps are planned.
    state["budget"] = None if args.steps else args.budget or BUDGET
    if args.out is None:
        return state
    path = Path(args.out) / STATE
    if path.is_file():
        left = read_json(path)
        # A user may have put any file into the folder.
        if not isinstance(left.get("request"), dict) or not isinstance(left.get("runs"), dict):
            raise ValueError(
                f"{path}: not what `hyperattn compare` writes; use another --out, or remove it"
            )
        # Runs are comparable only if everything except the progress is equal.
        other = [name for name in request if left["request"].get(name) != request[name]]
        if args.steps not in (None, left.get("steps")):
            other.append("steps")
        if args.budget not in (None, left.get("budget")):
            other.append("budget")
        if other:
            raise ValueError(
                f"{path}: of another comparison ({', '.join(other)} differ); use another --out, or remove it"
            )
        # Continue with the planned steps and the finished runs of the interrupted command.
        state |= {
            name: left.get(name)
            for name in ("steps", "budget", "runs", "seconds", "stock", "added")
        }
    return state | {"path": path}


def save_state(state: dict[str, Any]) -> None:
    """Write the state atomically; without --out, do nothing."""
    if state["path"] is not None:
        state["path"].parent.mkdir(exist_ok=True)
        content = {name: value for name, value in state.items() if name != "path"}
        replace_file(state["path"], (json.dumps(content, indent=1) + "\n").encode())


def plan_steps(trial: Trial, state: dict[str, Any], bar: ProgressBar) -> None:
    """Check every recipe, and choose the number of steps that the budget allows.

    Raises:
        ValueError: A recipe cannot be patched in, or the budget is too small.
    """
    args = trial.args
    start = time.perf_counter()
    for recipe in args.mechanisms[1:]:
        bar.describe(f"looking at {recipe}")
        survey_recipe(trial, recipe)
    state["added"] = trial.added
    if state["steps"] is not None:
        return
    # Time a short run of every recipe: mechanisms differ in the time of a step.
    budget = state["budget"]
    seconds = []
    for recipe in args.mechanisms:
        bar.describe(f"timing {recipe}")
        seconds.append(train_run(trial, recipe, 0, PROBE, lambda: None)["seconds"])
    # Loading and reading happen once per run, whatever the number of steps.
    fixed = args.seeds * sum(s["load"] + s["read"] for s in seconds) + time.perf_counter() - start
    # All seeds of all recipes share the budget.
    step = args.seeds * sum(s["step"] for s in seconds)
    steps = int((SPARE * budget - fixed) / step)
    # The message says how large the budget must be.
    if steps < LEAST_STEPS:
        least = math.ceil((fixed + LEAST_STEPS * step) / SPARE / 60)
        raise ValueError(
            f"--budget of {budget:g} s leaves {max(steps, 0)} steps a run; allowed: {LEAST_STEPS} or "
            f"more, about {least}min; or a smaller --length, fewer --mechanisms"
        )
    state["steps"] = steps
    save_state(state)


def finish_runs(trial: Trial, state: dict[str, Any], bar: ProgressBar) -> None:
    """Train every missing run, seed by seed, and save each one when it is finished."""
    args = trial.args
    start = time.perf_counter()
    before = state["seconds"]  # of the runs that an interrupted command finished
    # Seeds are the outer loop, so that an interrupted comparison has complete pairs.
    names = [(recipe, seed) for seed in range(args.seeds) for recipe in args.mechanisms]
    bar.total = len(names) * state["steps"]
    bar.n = 0
    if state.get("stock") is None:
        bar.describe("measuring the untrained model")
        state["stock"] = perplexity(
            load_model(args), trial.held_out, trial.length, prefix=trial.prefix
        ).loss
    for recipe, seed in names:
        key = f"{recipe}, seed {seed}"
        if key in state["runs"]:
            bar.advance(state["steps"])
            continue
        bar.describe(key)
        state["runs"][key] = train_run(trial, recipe, seed, state["steps"], lambda: bar.advance(1))
        state["seconds"] = before + time.perf_counter() - start
        save_state(state)


def judge_runs(args: argparse.Namespace, state: dict[str, Any]) -> dict[str, Any]:
    """Return the report, with a row and a verdict for every recipe."""
    # Group the runs by recipe, in the order of the seeds: the paired test needs equal orders.
    runs = {
        r: [state["runs"][f"{r}, seed {seed}"] for seed in range(args.seeds)]
        for r in args.mechanisms
    }
    losses = {recipe: [run["loss"] for run in done] for recipe, done in runs.items()}
    tests = {recipe: paired(losses[recipe], losses[NONE]) for recipe in args.mechanisms[1:]}
    # Several mechanisms are tested, so that p values need a correction (Holm).
    corrected = dict(zip(tests, holm([test.p for test in tests.values()])))
    # Mean and deviation are over seeds.
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
                "verdict": decide_verdict(tests[recipe].mean, corrected[recipe]),
            }
    return {
        **state["request"],
        "windows_read": state["request"]["read"] // state["request"]["length"],
        "steps": state["steps"],
        "stock_loss": state["stock"],
        "rows": rows,
        "seconds": state["seconds"],
        **describe_circumstances(args, "torch", "transformers", "peft"),
    }


def decide_verdict(difference: float, p: float) -> str:
    """Return the verdict on a mechanism.

    Args:
        difference: Mean loss of the mechanism minus the mean loss of the control.
        p: Corrected p value.
    """
    # Not `p >= LEVEL`: a p value of nan must be undecided too.
    if not p < LEVEL:
        return UNDECIDED
    return BETTER if difference < 0 else WORSE


def format_cells(report: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the header and the rows of the result table."""
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
        "loss",
        "perplexity",
        "a step",
        "minus none (95 %)",
        "p",
        "verdict",
    )
    return head, rows


def describe_result(report: dict[str, Any]) -> list[str]:
    """Return sentences that state the verdicts and the limits of the comparison."""
    sentences = []
    for name, row in report["rows"].items():
        if "verdict" not in row:
            continue
        detectable = f"{row['against_none']['detectable']:.4f} nats"
        words = {
            BETTER: "predicts better than LoRA alone",
            WORSE: "predicts worse than LoRA alone",
            UNDECIDED: "undecided, because no difference from LoRA alone was shown",
        }[row["verdict"]]
        sentences.append(
            f"{name}: {words}. {report['seeds']} seeds detect a difference of {detectable} in four of five cases."
        )
    # Warn that the uncertainty rests on fewer windows than requested.
    if report["windows_read"] < report["held_out"]:
        sentences.append(
            f"Only {report['windows_read']} of {report['held_out']} held-out windows were read, because the last fifth "
            "of a text holds fewer than its share."
        )
    # Ranks are whole numbers, so parameters can be equal only approximately.
    sizes = [row["parameters"] for row in report["rows"].values()]
    none = report["rows"][NONE]["loss"]
    return [
        *sentences,
        "Losses are in nats per token of held-out text; ± is the deviation over seeds. Without training, the model "
        f"has {report['stock_loss']:.4f}; LoRA alone (none) changes that by {none - report['stock_loss']:+.4f}. The "
        f"numbers of trained parameters differ by at most {(max(sizes) - min(sizes)) / min(sizes):.2%}.",
        "The uncertainty covers only seeds. Other texts, rates or numbers of steps may give another result.",
        *(
            [NOT_YET]
            if any(row.get("verdict") == BETTER for row in report["rows"].values())
            else []
        ),
    ]


def format_title(report: dict[str, Any]) -> str:
    """Return one line that says what was compared."""
    return (
        f"{public_name(report['model'])} on {', '.join(report['texts'])}: {report['seeds']} seeds, {report['steps']} "
        f"training steps of {report['length']} tokens, {report['read']:,} held-out tokens, "
        f"{report['seconds'] / 60:.1f} min"
    )


def show_report(report: dict[str, Any]) -> None:
    """Print the report for a terminal."""
    print(format_title(report) + "\n")
    print_table(*format_cells(report))
    for sentence in describe_result(report):
        print("\n" + wrap_text("", sentence))


def write_results(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write the facts of every mechanism, and the card unless a person wrote one."""
    folder = Path(args.out)
    folder.mkdir(exist_ok=True)
    for name, row in report["rows"].items():
        # The control has no verdict and therefore no facts of its own.
        if "verdict" in row:
            replace_file(
                folder / f"facts-{name}.json",
                (json.dumps({"results": [make_fact(report, row)]}, indent=1) + "\n").encode(),
            )
    path = folder / CARD
    # Compare bytes: a card that a person wrote may have any encoding.
    if os.path.lexists(path) and not path.read_bytes().startswith(SIGN.encode()):
        print(f"kept {path}: it was not written by `hyperattn compare`", file=sys.stderr)
        return
    replace_file(path, make_card(report).encode())


def make_fact(report: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as a dict with the fields of `hub_cards.Result`."""
    test = row["against_none"]
    notes = (
        f"Trained {report['steps']} steps of {report['length']} tokens, {report['seeds']} seeds; against LoRA "
        f"alone at equal parameters: {test['mean']:+.4f} nats ({test['low']:+.4f} to {test['high']:+.4f}), "
        f"{row['verdict']}."
    )
    return {
        "metric": "perplexity",
        "value": row["perplexity"],
        # The card compares with the untrained model; the control is in the notes.
        "base_value": math.exp(report["stock_loss"]),
        "dataset": f"{', '.join(report['texts'])}, held-out part",
        "notes": notes,
        **{name: report[name] for name in ("command", "machine", "versions", "date")},
    }


def make_card(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    head, rows = format_cells(report)
    lines = [
        "| " + " | ".join(line) + " |"
        for line in (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    ]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return "\n".join(
        [
            SIGN,
            "# A comparison of attention mechanisms",
            "",
            quote_code(format_title(report)),
            "",
            *lines,
            "",
            *(f"- {quote_code(line)}" for line in describe_result(report)),
            "",
            "For each seed, a mechanism reads the same tokens as the control and starts from the same "
            "LoRA matrices, except those that gave up ranks. The test is a paired t test over seeds "
            "with Holm's correction of p.",
            "",
            f"Command: {quote_code(report['command'])}  ",
            f"Machine: {report['machine']}; {versions}; {report['date']}",
            "",
        ]
    )


def quote_code(text: object) -> str:
    """Return text as a Markdown code span, so that user-given names are no markup."""
    return "`" + " ".join(str(text).split()).replace("`", "'") + "`"
