"""Writes what `hyperattn inject` found: the patched checkpoint, its card, and the report, whole or not at all."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
from importlib.metadata import version
from pathlib import Path

import torch

import hub_cards

from ..analysis.frontier import Selection
from ..folders import replace_folder
from .inject_setting import Setting as Task

REPORT = "hyperattn_inject.json"


def write(task: Task, model, selection: Selection | None, report: dict) -> None:
    """Write the folder, whole or not at all; without --output nothing is written."""
    if task.args.output is None:
        print("\nnothing is written: no --output")
        return
    target = Path(task.args.output)
    with replace_folder(target, keep_others=False) as stage:
        model.to(task.dtype).save_pretrained(stage)
        task.tokenizer.save_pretrained(stage)
        (stage / REPORT).write_text(json.dumps(said(task, selection, report), indent=1) + "\n")
        hub_cards.write_card(
            stage, base_model=hub_cards.hub_id_or_none(task.path), results=results(task, report)
        )
    print(f"\nwritten: {target}")


def said(task: Task, selection: Selection | None, report: dict) -> dict:
    """The report with what was asked."""
    names = ("mechanism", "budget", "pairs", "rows", "seed")
    return {"asked": {n: getattr(task.args, n) for n in names} | {"texts": list(task.texts)}, **report}


def results(task: Task, report: dict) -> list[dict]:
    """What the card says was measured."""
    common = {
        "command": public_command(task.args),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "date": datetime.date.today().isoformat(),
        "metric": report["metric"],
    }
    notes = f"{task.length} tokens, {report['pairs']:.1%} of the attended pairs."
    return [
        {
            **common,
            "value": r["after"],
            "base_value": r["before"],
            "dataset": f"{name}, held-out part",
            "notes": notes,
        }
        for name, r in report["texts"].items()
    ]


def public_command(args: argparse.Namespace) -> str:
    """The command as it was run; of paths on this machine the last part alone."""
    local = {
        p for p in (args.model, args.output, *(args.text or ())) if p and not hub_cards.hub_id_or_none(p)
    }
    words = []
    for word in args.argv:
        option, equals, value = word.partition("=")
        if option.startswith("-") and value in local:
            word = option + equals + public_name(value)
        words.append(public_name(word) if word in local else word)
    return shlex.join(["hyperattn", *words])


def public_name(path: str) -> str:
    """The last part of a path, which is all of it that is anybody else's business."""
    return os.path.basename(os.path.abspath(path))
