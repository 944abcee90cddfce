"""`hyperattn inject`: checks its input, shows what `hf_hyperattn.inject` did, and writes the checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from hyperattn_cli import MECHANISMS, nearest

from ..folders import check_replaceable
from ..inject import Allocation, hsa
from ..inject.injection import CausalInjection, EncoderInjection, Losses
from ..integration.checkpoint_files import errors_as
from . import device_map
from .console import progress, table
from .inject_collaborative import inject_collaborative
from .inject_task import dtype_of, prepare, results, write
from .inputs import quiet

BUDGET, ROWS = 0.02, 384  # of hsa, by default
#: The certificate is shown for these, the defaults of `HsaConfig` but for its windows.
SHOWN = {"near": 96, "refine_top_k": 16, "block_bias": 0.0}


def run(args: argparse.Namespace) -> int:
    """Measure, choose, verify and write; raises ValueError or OSError for bad input."""
    check(args)
    quiet()
    inject = inject_hsa if args.mechanism == "hsa" else inject_collaborative
    if not args.json:
        return inject(args)
    args.report = None
    with contextlib.redirect_stdout(sys.stderr):
        code = inject(args)
    print(json.dumps({"written": args.output if code == 0 else None, "report": args.report}, indent=2))
    return code


def check(args: argparse.Namespace) -> None:
    """Refuse what is wrong in itself, before anything is read."""
    if args.mechanism not in MECHANISMS:
        allowed = ", ".join(MECHANISMS)
        close = nearest(args.mechanism, MECHANISMS)
        raise ValueError(
            f"--mechanism {args.mechanism} cannot be injected without training; allowed: {allowed}{close}"
        )
    if args.budget is not None and not 0 < args.budget < 1:
        raise ValueError(f"--budget {args.budget:g} is not allowed; allowed: above 0 and below 1, such as 0.02")
    if args.pairs is not None and not 0 < args.pairs <= 1:
        raise ValueError(f"--pairs {args.pairs:g} is not allowed; allowed: above 0, up to 1")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed} is not allowed; allowed: 0 to 2**63 - 1")
    device_map.read_device_map(args.device_map)
    if args.output is not None:
        check_replaceable(Path(args.output), args.force, args.model)
        above = Path(args.output).absolute().parent
        if not above.is_dir():
            raise ValueError(f"--output {args.output}: {above} is no folder; allowed: a place in an existing folder")


def inject_hsa(args: argparse.Namespace) -> int:
    """Tie attention over blocks of tokens; 1 where the held-out texts exceed the budget and nothing is written."""
    if not args.text:
        raise ValueError("--mechanism hsa needs --text FILE...; allowed: one text or more")
    if args.rank is not None:
        raise ValueError("--rank says nothing for --mechanism hsa; leave it out")
    args.budget = BUDGET if args.budget is None else args.budget
    task = prepare(args)
    if task.is_encoder and args.rows is not None:
        raise ValueError("--rows says nothing for an encoder, which is measured on whole passages; leave it out")
    rows: int = ROWS if args.rows is None else args.rows
    goal = "1 - cosine" if task.is_encoder else "perplexity"
    print(f"{Path(args.model).name}: {args.mechanism}, {goal} within {args.budget:.1%}, {task.length:,} tokens a text, "
          f"seed {args.seed}, {torch.get_num_threads()} threads\nTexts: {', '.join(task.texts[0])}",
          flush=True)  # fmt: skip
    with errors_as(f"{args.model}: cannot load it"):
        kind = AutoModel if task.is_encoder else AutoModelForCausalLM
        model = device_map.load(kind, args)
    options = (task.length, args.budget, args.pairs)
    injection: CausalInjection | EncoderInjection
    if task.is_encoder:
        injection = EncoderInjection(model, task.texts, hsa.layer_candidates(task.length), *options)
    else:
        injection = CausalInjection(model, task.texts, hsa.candidates(task.length), *options, rows, args.seed)
    with progress(injection.steps()) as bar:
        report = injection.run(bar)
    if isinstance(injection, EncoderInjection):
        show_layers(injection)
    else:
        show_certificate(injection)
    show_tried(injection.tried, task.is_encoder)
    show_verified(report)
    args.report = report
    losses = {name: text["loss"] for name, text in report["texts"].items()}
    worst = max(losses, key=lambda name: losses[name])
    if args.pairs is None and losses[worst] > args.budget:
        loss = loss_text(losses[worst], task.is_encoder)
        print(f"\nheld-out text {worst} loses {loss}, more than the budget of {args.budget:g}: "
              "nothing is written; use longer texts of the same kinds, or a larger --budget")  # fmt: skip
        return 1
    request = {name: getattr(args, name) for name in ("mechanism", "budget", "pairs", "rows", "seed")}
    report = {"asked": request | {"texts": list(task.texts[0])}, **report}
    write(args, model, dtype_of(task.config), task.tokenizer, report, results(args, report))
    return 0


def loss_text(loss: float, is_encoder: bool) -> str:
    """A loss as it is shown: 1 - cosine, or more perplexity."""
    return f"{loss:.4f}" if is_encoder else f"{loss:+.2%}"


def show_certificate(injection: CausalInjection) -> None:
    """What every layer loses under one common setting, KL from its own attention, by the certificate."""
    rules: list[Any] = list(injection.rules)
    at = next((i for i, r in enumerate(rules) if all(getattr(r, k) == v for k, v in SHOWN.items())), 0)
    rows = []
    for name in injection.measured[0].kl:
        kl = torch.stack([m.kl[name][:, at] for m in injection.measured]).mean(0)
        rows.append([name, f"{kl.mean():.3f}", f"{kl.max():.3f}", str(int(kl.argmax()))])
    print(f"\nKL of tied from own attention, nats (windows {rules[at].windows}, near {rules[at].near}, refine_top_k "
          f"{rules[at].refine_top_k}):")  # fmt: skip
    table(("layer", "mean", "worst head", "head"), rows)


def show_layers(injection: EncoderInjection) -> None:
    """What every layer of an encoder loses by itself."""
    print("\nLoss of each layer tied alone (1 - cosine, worst text), the least and by its chosen setting:")
    rows, sparse = [], injection.allocation.sparse
    for name, (costs,) in injection.costs.items():
        cost, setting = "exact", ""
        if name in sparse:
            (rule,) = sparse[name]
            cost, setting = f"{costs[injection.rules.index(rule)]:.5f}", str(rule)
        rows.append([name, f"{costs.min():.5f}", cost, setting])
    table(("layer", "least", "chosen", "setting"), rows)


def show_tried(tried: list[tuple[Allocation, Losses]], is_encoder: bool) -> None:
    """The loss of every allocation that was tried."""
    print("\nTried, on the second part of each text:")
    rows = [
        [str(len(a.sparse)), f"{a.pairs:.1%}", *(loss_text(x, is_encoder) for x in losses.values())]
        for a, losses in tried
    ]
    table(("layers", "pairs", *tried[0][1]), rows)


def show_verified(report: dict[str, Any]) -> None:
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
