"""What becomes of a mechanism on a road: equal, refused or warned; all else is a failure.

A road is run for the stock model too. Where the stock model fails, there is no road: the cell is empty. What the stock
model loses on the way (rounding to bf16, int8, a merge of low-rank weights) is what a mechanism may lose, FACTOR times:
it goes through the same arithmetic, with more operations.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers as hf

from .cases import MARGIN, Case

FACTOR = 8
#: A stock model that loses more than this is not itself at the end: there is no road.
LOST = 0.1
OURS = ("/hf_hyperattn/", "/model_patches/")
#: Words of ours about the machine or about a conversion that is made, not about a mechanism lost; they excuse nothing.
ABOUT_OTHERS = re.compile(
    r"is not compiled|Triton kernels|cannot compute a call|the plain torch way|queries and keys to be shared"
)
#: What a message must hold beside what is wrong: what to do.
ADVICE = re.compile(
    r"\b(allowed|use|call|first|load|pass|save|set|merge|unpatch|patch|install|import|train|give|take|leave)\b",
    re.IGNORECASE,
)
#: Errors of others that are a clear refusal: (road, words, why they will do).
OTHERS = [
    (
        r"without the plugin",
        r"attn_implementation=.{0,9}(hf_hyperattn|cone|hype|hsa|hyperbolic)",
        "Transformers names the implementation that is missing",
    ),
    (
        r"without the plugin",
        r"model type `?(hf_hyperattn|hyperattn|hat)\w*",
        "Transformers names the model type that is missing",
    ),
    (
        r"a batch of two adapters",
        r"Length of `adapter_names`",
        "PEFT counts rows, and HAT's are segments",
    ),
    (
        r"^load with a head",
        r"Unrecognized configuration class .*HatEncoderConfig",
        "Transformers names the class",
    ),
    (
        r"^stock class",
        r"(Unexpected|Missing) key\(s\) in state_dict",
        "torch lists the parameters without a place",
    ),
]


@dataclass
class Cell:
    """The outcome of one road for one case.

    Args:
        outcome: "equal", "refused", "warned"; "no road" (the stock model fails there too), "not run" (a program is
            missing); or a failure: "silent", "crash", "vacuous".
        difference: the largest of the logits; -1 where nothing was compared.
        tolerance: what was allowed.
        words: of the refusal or warning, else what explains the outcome.
    """

    outcome: str
    difference: float = -1.0
    tolerance: float = 0.0
    words: str = ""

    @property
    def holds(self) -> bool:
        return self.outcome in ("equal", "refused", "warned", "no road")

    def as_dict(self) -> dict:
        return asdict(self)


class Records(logging.Handler):
    """Keeps what our loggers say."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def listening():
    """A list that fills with what our loggers warn of, also what they say once only.

    Nobody else's words excuse a mechanism that is lost, such as a tracer's warning about a line of ours.
    """
    handler, logger = Records(), logging.getLogger("hf_hyperattn")
    for once in (hf.utils.logging.warning_once, hf.utils.logging.info_once):
        once.cache_clear()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    texts: list[str] = []
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        texts += [t for t in handler.texts if not ABOUT_OTHERS.search(t)]


def gap(got, want) -> float:
    """The largest difference of two tensors, as a share of the largest value where that is above 1; inf for another
    shape, NaN, or a condition (a bool) that does not hold.
    """
    if isinstance(got, bool):
        return 0.0 if got == want else float("inf")
    if isinstance(got, float | int):
        got, want = torch.tensor(float(got)), torch.tensor(float(want))
    if got.shape != want.shape:
        return float("inf")
    want = want.detach().double()
    found = (got.detach().double() - want).abs().max().item() / max(1.0, want.abs().max().item())
    return found if found == found else float("inf")


def travel(road, case: Case, folder: Path) -> tuple[float, list[str], BaseException | None]:
    """The largest difference that a road shows, our warnings, and the error that ended it."""
    worst, error = -1.0, None
    with listening() as said:
        try:
            for got, want in road.function(case, folder):
                worst = max(worst, gap(got, want))
        except Exception as problem:
            wrapped = (
                type(problem).__name__ == "TorchExportError"
            )  # the exporter to ONNX shows what stopped it
            error = (wrapped and problem.__cause__) or problem
    return worst, list(dict.fromkeys(said)), error


def raised_by_us(error: BaseException) -> bool:
    """Whether a line of ours raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(place in frames[-1].filename for place in OURS)


def refusal_of(road: str, error: BaseException) -> str | None:
    """Why an error is a refusal: "" for a line of ours that says what to do, a reason for others, else None."""
    text = str(error)
    if raised_by_us(error) and isinstance(
        error, ValueError | TypeError | RuntimeError | ImportError | OSError
    ):
        return "" if "\n" not in text.strip() and len(text) > 30 and ADVICE.search(text) else None
    return next(
        (why for where, words, why in OTHERS if re.search(where, road) and re.search(words, text)),
        None,
    )


def brief(error: BaseException) -> str:
    """An error in a line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}"


def judge(road, case: Case, seen: tuple, lost: float) -> Cell:
    """The cell, given what `travel` saw and what the stock model loses on the same road."""
    worst, said, error = seen
    tolerance = max(road.tolerance, case.tolerance, FACTOR * lost)
    words = " / ".join(" ".join(t.split()) for t in said)
    if error is not None:
        why = refusal_of(road.name, error)
        text = " ".join(str(error).split())
        if why is not None and worst > tolerance and not words:
            return Cell("silent", worst, tolerance, f"wrong before it was refused: {text}")
        if why is not None:
            return Cell("refused", worst, tolerance, text)
        return Cell("crash", worst, tolerance, brief(error))
    if worst < 0:
        return Cell("crash", worst, tolerance, "the road compares nothing")
    if worst <= tolerance:
        if case.how != "stock" and case.margin < max(MARGIN, 3 * tolerance):
            return Cell(
                "vacuous", worst, tolerance, f"the stock model differs by {case.margin:.1e} only"
            )
        return Cell("equal", worst, tolerance, words)
    return Cell("warned" if words else "silent", worst, tolerance, words)


def control(road, family: Case, folder: Path) -> tuple[float, str | None]:
    """What a stock model loses on a road, and why it cannot take it."""
    if not road.control:
        return 0.0, None
    folder.mkdir(parents=True, exist_ok=True)
    lost, _, problem = travel(road, family, folder)
    return max(lost, 0.0), None if problem is None else brief(problem)


def cell(road, case: Case, folder: Path, controls: dict) -> Cell:
    """Run a road for a case, after the stock model; `controls` keeps what the stock models lose."""
    missing = road.missing()
    if missing:
        return Cell("not run", words=f"{missing} is not installed")
    key = road.name, case.control.label
    if key not in controls:
        controls[key] = control(road, case.control, folder / "control")
    lost, problem = controls[key]
    if problem is not None:
        return Cell("no road", words=f"the stock model: {problem}")
    place = folder / "case"
    place.mkdir(parents=True, exist_ok=True)
    found = judge(road, case, travel(road, case, place), lost if lost < LOST else 0.0)
    if lost >= LOST and found.outcome not in ("refused", "warned"):
        return Cell("no road", words=f"the stock model is another one at its end, by {lost:.1e}")
    return found
