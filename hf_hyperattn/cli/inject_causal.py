"""Injection into a causal language model: measure, choose, verify, write."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import hf_hyperattn

from ..analysis.attention_gradients import final_hidden, head_of, loss_and_slope
from ..analysis.attention_time import attention_times
from ..analysis.cost import PeakMemory
from ..analysis.frontier import Selection, candidates, choose, predicted
from ..analysis.sensitivity import Sensitivity, Setting, measure
from .console import progress, table
from .inject_output import write
from .inject_setting import Setting as Task

#: The certificate is shown for these, the defaults of `HsaConfig` but for its windows.
SHOWN = {"near": 96, "refine_top_k": 16, "block_bias": 0.0}
#: The part that is chosen on must keep this much of the budget: the texts to come are others.
MARGIN = 0.8
#: How many shares of pairs are tried.
TRIES = 5
LAYER_STEPS = 10  # progress steps of the measurement of a layer; a pass over a text is one


@dataclass
class Quality:
    """What a pass over some texts gave.

    Args:
        losses: nats a token, by text. seconds: of the passes. memory: the most in use, in bytes.
    """

    losses: dict[str, float]
    seconds: float = 0.0
    memory: int = 0


def quality(model: nn.Module, texts: dict[str, Tensor], bar=None) -> Quality:
    """The loss of every text, the time of the model's passes, and the memory."""
    found = Quality({})
    head = head_of(model, next(iter(texts.values())))
    with torch.no_grad(), PeakMemory(next(model.parameters()).device) as memory:
        for name, ids in texts.items():
            start = time.perf_counter()
            hidden = final_hidden(model, ids)
            found.seconds += time.perf_counter() - start
            found.losses[name] = loss_and_slope(head, hidden, ids, slope=False)[0]
            if bar:
                bar.advance(1)
    found.memory = memory.peak
    return found


def increases(before: Quality, after: Quality) -> dict[str, float]:
    """Relative perplexity by text: 0.02 is 2 % more."""
    return {name: math.expm1(after.losses[name] - loss) for name, loss in before.losses.items()}


def inject(task: Task) -> int:
    """The whole of it; 0, or 1 where the held-out texts exceed the budget and nothing is written."""
    model = task.load()
    head_of(
        model, next(iter(task.part(0).values()))
    )  # raises for heads of another kind, before anything slow
    chosen_on, held_out = task.part(1), task.part(2)
    layers = sum(1 for m in model.modules() if hasattr(m, "layer_idx")) or 1
    steps = len(task.texts) * (LAYER_STEPS * layers + 2 * TRIES)
    with progress(steps) as bar:
        measured = measure_all(task, model, bar)
        bar.describe("the model as it is")
        before = quality(model, chosen_on, bar)
        selection, tried = settle(task, model, measured, before, bar)
        bar.describe("verifying on held-out text")
        stock = quality(model, held_out, bar)
        config = selection.config()
        if config is None:
            raise ValueError(
                f"no setting keeps within --budget {task.args.budget:g} on these texts: every head stays exact; "
                "allowed: a larger budget, or longer texts"
            )
        hf_hyperattn.patch_model(model, config)
        tied = quality(model, held_out, bar)
        times = attention_times(model, next(iter(held_out.values())))
    show_certificate(measured)
    show_tried(tried)
    losses = increases(stock, tied)
    report = {
        "metric": "perplexity",
        "pairs": selection.pairs,
        "texts": {
            name: {
                "before": math.exp(stock.losses[name]),
                "after": math.exp(tied.losses[name]),
                "loss": losses[name],
            }
            for name in losses
        },
        "seconds": {"before": stock.seconds, "after": tied.seconds},
        "attention_seconds": {"before": times[0], "after": times[1]},
        "memory": {"before": stock.memory, "after": tied.memory},
        "length": task.length,
    }
    show_verified(task, report)
    worst = max(losses, key=losses.get)
    if task.args.pairs is None and losses[worst] > task.args.budget:
        print(
            f"\nheld-out text {worst} loses {losses[worst]:+.2%}, more than the budget of {task.args.budget:.1%}: "
            "nothing is written; use longer texts of the same kinds, or a larger --budget"
        )
        return 1
    write(task, model, selection, report)
    return 0


def measure_all(task: Task, model: nn.Module, bar) -> list[Sensitivity]:
    """Sensitivities of every text's first part."""
    found, settings = [], candidates(task.length)
    for name, ids in task.part(0).items():
        bar.describe(f"measuring on {name}")
        found.append(
            measure(
                model,
                ids,
                lambda _: settings,
                rows=task.args.rows,
                seed=task.args.seed,
                on_layer=lambda _: bar.advance(LAYER_STEPS),
            )
        )
    if not found[0].names:
        raise ValueError(
            f"{task.path}: no layer attends causally to all of {task.length} tokens; allowed: models without "
            "sliding windows as short, soft caps or position biases"
        )
    return found


def settle(
    task: Task, model: nn.Module, measured: list[Sensitivity], before: Quality, bar
) -> tuple[Selection, list[tuple[float, dict[str, float]]]]:
    """The selection with the fewest pairs that keeps the budget on the second parts, and all that were tried.

    A text that loses more than the others gets more weight in the next choice.
    """
    weights, tried, texts = [1.0] * len(measured), [], task.part(1)
    allowed, low, high = MARGIN * task.args.budget, 0.0, 1.0
    best = Selection(
        {n: (Setting((16,), 2**31, 0),) * len(measured[0].kl[n]) for n in measured[0].names}, task.length
    )
    pairs = task.args.pairs or 0.4
    for _ in range(1 if task.args.pairs else TRIES):
        selection = choose(measured[0].settings, predicted(measured, weights), task.length, pairs)
        bar.describe(f"trying {selection.pairs:.1%} of the pairs")
        lost = increases(before, patched_quality(model, selection, texts, bar, before))
        tried.append((selection.pairs, lost))
        worst = max(lost.values())
        if worst <= allowed or task.args.pairs:
            best, high = selection, pairs
        else:
            low = pairs
        weights = reweighted(weights, list(lost.values()))
        pairs = math.sqrt(max(low, high / 4) * high)
    return best, tried


def patched_quality(model: nn.Module, selection: Selection, texts, bar, before: Quality) -> Quality:
    """The quality of the model under a selection; the model is left as it was."""
    config = selection.config()
    if config is None:
        return before
    hf_hyperattn.patch_model(model, config)
    try:
        return quality(model, texts, bar)
    finally:
        hf_hyperattn.unpatch_model(model)


def reweighted(weights: list[float], lost: list[float]) -> list[float]:
    """More weight for the texts that lose more than the mean, at most four times as much a step."""
    mean = max(sum(max(x, 0.0) for x in lost) / len(lost), 1e-6)
    found = [w * min(4.0, max(0.25, x / mean)) for w, x in zip(weights, lost)]
    return [w * len(found) / sum(found) for w in found]


def show_certificate(measured: list[Sensitivity]) -> None:
    """What every layer loses under one common setting, KL from its own attention, by the certificate."""
    rows = []
    for name in measured[0].names:
        settings = measured[0].settings[name]
        at = next((i for i, s in enumerate(settings) if all(getattr(s, k) == v for k, v in SHOWN.items())), 0)
        kl = torch.stack([m.kl[name][:, at] for m in measured]).mean(0)
        rows.append([name, f"{kl.mean():.3f}", f"{kl.max():.3f}", str(int(kl.argmax()))])
    shown = settings[at]
    print(f"\nKL of tied from own attention, nats (windows {shown.windows}, near {shown.near}, refine_top_k "
          f"{shown.refine_top_k}):")  # fmt: skip
    table(("layer", "mean", "worst head", "head"), rows)


def show_tried(tried) -> None:
    """The loss at every share of pairs that was tried."""
    print("\nTried, on the second part of each text (perplexity against the model as it is):")
    table(
        ("pairs", *tried[0][1]),
        [[f"{pairs:.1%}", *(f"{x:+.2%}" for x in lost.values())] for pairs, lost in tried],
    )


def show_verified(task: Task, report: dict) -> None:
    """The table before and after, on the third part of each text."""
    print("\nHeld-out text, before and after:")
    rows = [
        [f"{report['metric']}, {name}", f"{r['before']:.3f}", f"{r['after']:.3f}", f"{r['loss']:+.2%}"]
        for name, r in report["texts"].items()
    ]
    rows.append(["attended pairs", "100 %", f"{report['pairs']:.1%}", ""])
    for what, key in (("attention", "attention_seconds"), ("whole model", "seconds")):
        a, b = report[key]["before"], report[key]["after"]
        rows.append([f"{what}, time", f"{a:.2f} s", f"{b:.2f} s", f"x {a / b:.2f}"])
    memory = [f"{report['memory'][k] / 2**20:,.0f} MiB" for k in ("before", "after")]
    table(("", "before", "after", ""), [*rows, ["memory", *memory, ""]])
