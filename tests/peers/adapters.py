"""`make adapters`: twelve PEFT methods on a patched Llama, from training to the merged model; writes docs/adapters.md.

Exit status 1 where a number is above 1e-6, or an error is none of those that `CLEAR` explains.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

import hf_hyperattn as ha
from tests.integration.adapters.test_adapters import (
    LOADERS,
    METHODS,
    PROGRAM,
    Method,
    base,
    gap,
    said,
    step,
)
from tests.integration.lessons import added, next_character

ROOT = Path(__file__).parents[2]
ALLOWED = 1e-6
COLUMNS = (
    "trained",
    "saved, loaded",
    *(f"`{name}`" for name in LOADERS),
    "disabled",
    "merged",
    "reloaded",
    "left out",
)
#: What a message has in it -> the mark in the table, and what it means.
CLEAR = {
    "does not support": (
        "refused¹",
        "¹ Transformers' native loading refuses this method for any model, by its name.",
    ),
    "merge_and_unload": (
        "refused²",
        "² A prompt is not part of the weights: PEFT has no `merge_and_unload` for it.",
    ),
    "changed the weights": (
        "—³",
        "³ PiSSA changes the base's weights when it starts, for any model.",
    ),
}
ABOUT = """\
Which methods of PEFT train, save and load what a patch added? All twelve that were tried, by PEFT's own loaders.
Transformers' loaders refuse two of them, for any model. `make adapters` took each method from training to the merged
model, and wrote this page. The base is a tiny Llama with cone attention and open gates. Training is one large step of
Adam on the adapter and on the added parameters. LoRA and its variants use `ha.lora_config(model, ...)`, whose
adapters carry the patch. The others have `modules_to_save=["hyper"]`.

Numbers are the largest differences of logits, which are about 1; 1e-6 is allowed:

- trained: the number of added tensors that the step moved.
- saved, loaded: the saved adapter on a new base. The next four columns are loaders, each in a fresh process. All are
  compared with the training process.
- disabled: compared with the base. merged: compared with the adapter. reloaded: the saved merged model,
  compared with the merged one.
- left out: the message of an adapter that is made without the added parameters."""


class Warnings(logging.Handler):
    """What the package warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def config_of(method: Method, model: Any) -> Any:
    if method.config is LoraConfig:
        return ha.lora_config(model, **method.options)
    return method.config(**method.options, task_type="CAUSAL_LM", modules_to_save=["hyper"])


def shown(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.0e}".replace("e-0", "e-")


def attempt(compute: Any) -> str:
    """A cell: the largest difference, or the mark of an error."""
    try:
        difference = compute()
    except Exception as error:
        return marked(f"{type(error).__name__}: {error}")
    return shown(difference) if difference <= ALLOWED else f"**{difference:.1e}**"


def marked(message: str) -> str:
    return next(
        (mark for part, (mark, _) in CLEAR.items() if part in message),
        f"**{' '.join(message.split())[:80]}**",
    )


def left_out(method: Method) -> str:
    """Whether an adapter that leaves out what the patch added is warned of, once."""
    handler, logger = Warnings(), logging.getLogger("hf_hyperattn")
    logger.addHandler(handler)
    try:
        get_peft_model(base(), method.config(**method.options, task_type="CAUSAL_LM"))
    finally:
        logger.removeHandler(handler)
    return (
        "warned"
        if ["leaves out" in line for line in handler.lines] == [True]
        else f"**{handler.lines}**"
    )


def row(name: str, folder: Path) -> tuple[list[str], torch.Tensor]:
    """The cells of a method but for those of the loaders, and what its adapter says."""
    method, original = METHODS[name], said(base())
    stock = hf.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = get_peft_model(stock, config_of(method, stock))
    start = {n: p.clone() for n, p in added(model).items()}
    step(model)
    moved = sum(not torch.equal(p, start[n]) for n, p in added(model).items())
    trained = said(model)
    model.save_pretrained(folder / "adapters" / name)
    again = attempt(
        lambda: gap(said(PeftModel.from_pretrained(base(), folder / "adapters" / name)), trained)
    )
    with model.disable_adapter():
        disabled = (
            attempt(lambda: gap(said(model), original))
            if method.disable
            else marked("changed the weights")
        )
    merged = reloaded = marked("merge_and_unload")
    if method.merge:
        model = model.merge_and_unload()
        merged = attempt(lambda: gap(said(model), trained))
        model.save_pretrained(folder / "merged" / name)
        load = hf.AutoModelForCausalLM.from_pretrained
        reloaded = attempt(lambda: gap(said(load(folder / "merged" / name)), said(model)))
    return [f"{moved}/{len(start)}", again, disabled, merged, reloaded, left_out(method)], trained


def loaded(how: str, folder: Path, trained: dict[str, torch.Tensor]) -> dict[str, str]:
    """Method -> the cell of one loader, in a process of its own."""
    subprocess.run(
        [sys.executable, "-c", PROGRAM, LOADERS[how], folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    answers = torch.load(folder / "found")
    cells = {}
    for name, expected in trained.items():
        answer = answers[str(folder / "adapters" / name)]
        cells[name] = (
            marked(answer) if isinstance(answer, str) else attempt(partial(gap, answer, expected))
        )
    return cells


def table(folder: Path) -> dict[str, list[str]]:
    """Method -> its cells."""
    base().save_pretrained(folder / "base")
    torch.save(next_character()["input_ids"], folder / "ids")
    rows, trained = {}, {}
    for name in METHODS:
        rows[name], trained[name] = row(name, folder)
    columns = [loaded(how, folder, trained) for how in LOADERS]
    return {
        name: [*cells[:2], *(column[name] for column in columns), *cells[2:]]
        for name, cells in rows.items()
    }


def page(rows: dict[str, list[str]]) -> str:
    """docs/adapters.md."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    lines = ["# PEFT methods on a patched model", "", ABOUT]
    lines += ["", f"| method | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    there = {cell for cells in rows.values() for cell in cells}
    lines += ["", *(f"- {why}" for mark, why in CLEAR.values() if mark in there)]
    lines += ["", f"{versions}. [Train adapters](training.md) has everything else."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "adapters.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = table(Path(folder))
    options.report.write_text(page(rows))
    bad = [f"{name}: {cell}" for name, cells in rows.items() for cell in cells if "**" in cell]
    print("\n".join(bad) or f"{len(rows)} methods: nothing above {ALLOWED:g}, no unclear error")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
