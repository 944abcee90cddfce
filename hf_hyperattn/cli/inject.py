"""`hyperattn inject`: checks its input, shows what `hf_hyperattn.inject` did, and writes the checkpoint."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from hyperattn_cli import MECHANISMS, nearest

from ..folders import check_replaceable
from ..inject import Allocation, hsa, sparse
from ..inject.causal import RETRIEVAL, CausalInjection
from ..inject.encoder import EncoderInjection
from ..inject.injection import ROUNDS, Losses, ids_of
from ..inject.pays import Pays, is_faster, pays_from
from ..inject.retrieval import least_right
from ..integration.checkpoint_files import errors_as
from . import device_map
from .console import progress, reported, table
from .inject_collaborative import inject_collaborative
from .inject_task import PASSAGES, Task, dtype_of, prepare, results, write
from .inputs import check_place, count_threads, positions_of, quiet
from .smollm2 import cache_directory

BUDGET, RETRIEVAL_BUDGET = (
    0.02,
    0.05,
)  # by default; the second of sparse alone, which no earlier script runs
ROWS, QUERIES = 384, 1024  # measured a text, and at least over all of them
#: Options that say nothing for an encoder, and why.
NOT_OF_ENCODERS = {
    "rows": "which is measured on whole passages",
    "seed": "of which nothing is drawn",
    "retrieval_budget": "which answers nothing",
    "resume": "of which nothing is kept",
    "cost": "whose rules go by layer, and which keeps no cache",
}
#: Not for a mechanism: (option, mechanisms that it says nothing for).
SAYS_NOTHING = (
    ("rank", ("hsa", "sparse")),
    ("retrieval_budget", ("collaborative",)),
    ("resume", ("collaborative",)),
    ("compare", ("collaborative",)),
    ("cost", ("collaborative",)),
    ("allow_slower", ("collaborative", "hsa")),
)
RESUMED = "Add --resume to reuse the measurements."
#: What costs are called where they are shown.
CALLED = {"pairs": "the pairs", "bytes": "the cache's bytes", "time": "attention's time"}
#: The certificate is shown for these, the defaults of `HsaConfig` but for its windows.
SHOWN = {"near": 96, "refine_top_k": 16, "block_bias": 0.0}


def run(args: argparse.Namespace) -> int:
    """Measure, choose, verify and write; raises ValueError or OSError for bad input."""
    check(args)
    quiet()
    return reported(
        inject_collaborative if args.mechanism == "collaborative" else inject_rules, args
    )


def check(args: argparse.Namespace) -> None:
    """Refuse what is wrong in itself, before anything is read."""
    if args.mechanism not in MECHANISMS:
        allowed = ", ".join(MECHANISMS)
        close = nearest(args.mechanism, MECHANISMS)
        raise ValueError(
            f"--mechanism {args.mechanism} cannot be injected without training; allowed: {allowed}{close}"
        )
    for name, mechanisms in SAYS_NOTHING:
        if getattr(args, name) not in (None, False) and args.mechanism in mechanisms:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} says nothing for --mechanism {args.mechanism}; leave it out"
            )
    if args.allow_slower and args.cost == "bytes":
        raise ValueError(
            "--allow-slower says nothing with --cost bytes, which writes a slower model too; leave it out"
        )
    device_map.read_device_map(args.device_map)
    if args.output is not None:
        check_replaceable(Path(args.output), args.force, args.model)
        check_place("--output", args.output)
    elif args.force:
        raise ValueError("--force says nothing without --output; leave it out")


def inject_rules(args: argparse.Namespace) -> int:
    """Give heads or layers cheaper rules; 1 where every candidate is refused and nothing is written."""
    if not args.text:
        raise ValueError(
            f"--mechanism {args.mechanism} needs --text FILE...; allowed: one text or more"
        )
    has_budget = args.budget is not None
    args.budget = args.budget if has_budget else BUDGET
    task = prepare(args)
    check_task(args, task)
    if task.is_encoder and has_budget and args.pairs is not None:
        raise ValueError(
            "--budget says nothing for an encoder beside --pairs; leave out one of them"
        )
    if args.retrieval_budget is None and args.mechanism == "sparse" and not task.is_encoder:
        args.retrieval_budget = RETRIEVAL_BUDGET
    args.seed = args.seed or 0
    cost = CALLED[args.cost or "pairs"]
    print("\n".join(describe_run(args, task)), flush=True)
    with errors_as(f"{args.model}: cannot load it"):
        kind = AutoModel if task.is_encoder else AutoModelForCausalLM
        model = device_map.load(kind, args)
    injection = injection_of(args, task, model)
    with progress(injection.count_steps()) as bar:
        report = injection.run(bar)
        rivals = injection.compare_rivals(bar) if args.compare else {}
        bar.describe("timing")
        pays = pays_from(
            model, ids_of(next(iter(injection.texts[2].values()))), positions_of(task.config)
        )
    report["attention_seconds"] = dict(zip(("before", "after"), pays.seconds[task.length]))
    show_measured(injection)
    show_tried(injection.tried, task.is_encoder)
    show_verified(report, task.is_encoder)
    show_rivals(rivals, cost, task.is_encoder)
    report |= {"rivals": rivals, "pays": {"from": pays.start, "seconds": pays.seconds}}
    args.report = report
    reason = refusal(args, report, task.is_encoder) or slower(args, report, pays, task.is_encoder)
    if reason:
        print(f"\n{reason}")
        return 1
    names = ("mechanism", "budget", "retrieval_budget", "pairs", "cost", "rows", "seed")
    request = {name: getattr(args, name) for name in names}
    report = {"asked": request | {"texts": list(task.texts[0])}, **report}
    write(args, model, dtype_of(task.config), task.tokenizer, report, results(args, report))
    return 0


def describe_run(args: argparse.Namespace, task: Task) -> list[str]:
    """Return the lines that name the model, the goal and the texts of a run."""
    settings = [f"mechanism {args.mechanism}", count_threads()]
    if not task.is_encoder:
        settings.insert(1, f"seed {args.seed}")
    cost = CALLED[args.cost or "pairs"]
    if args.pairs is not None:
        goal = f"{percent(args.pairs)} of {cost}, at any loss"
    elif task.is_encoder:
        goal = f"fewest pairs with 1 - cosine at most {args.budget:g}"
    else:
        goal = f"least of {cost} with perplexity at most +{percent(args.budget)}"
        if args.retrieval_budget is not None:
            goal += f" and answers of retrieval tasks at most +{percent(args.retrieval_budget)}"
    each = f"{PASSAGES} passages of {task.length:,}" if task.is_encoder else f"{task.length:,}"
    parts = f"3 parts of {each} tokens (measure, choose, verify)"
    return [
        f"{Path(args.model).name}: {', '.join(settings)}",
        f"Goal: {goal}",
        f"Texts: {', '.join(task.texts[0])}; {parts}",
    ]


def percent(share: float) -> str:
    """Return a share in per cent, with up to four digits."""
    return f"{100 * share:.4g} %"


def check_task(args: argparse.Namespace, task: Task) -> None:
    """Refuse what says nothing for an encoder, and texts that are called as what is made of them for a causal model."""
    if not task.is_encoder:
        taken = [
            name for name in task.texts[0] if re.fullmatch(rf"({'|'.join(RETRIEVAL)})( \d+)?", name)
        ]
        if taken:
            raise ValueError(
                f"--text {taken[0]}: a test of retrieval has this name; allowed: another name, with .txt"
            )
        return
    for name, why in NOT_OF_ENCODERS.items():
        if getattr(args, name) is not None and getattr(args, name) is not False:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} says nothing for an encoder, {why}; leave it out")


def injection_of(
    args: argparse.Namespace, task: Task, model: Any
) -> CausalInjection | EncoderInjection:
    """What is to be done, to a model that is loaded."""
    options = (task.length, args.budget, args.pairs)
    kind: Any = hsa if args.mechanism == "hsa" else sparse
    if task.is_encoder:
        return EncoderInjection(model, task.texts, kind.layer_candidates(task.length), *options)
    rules: list[Any] = kind.candidates(task.length)
    args.rows = args.rows or max(ROWS, -(-QUERIES // len(task.texts[0])))
    rivals = sparse.candidates(task.length) if args.compare and args.mechanism == "hsa" else ()
    return CausalInjection(
        model,
        task.texts,
        rules,
        *options,
        rivals,
        args.cost or "pairs",
        args.rows,
        args.seed,
        task.tokenizer,
        args.retrieval_budget,
        cache_directory() / "inject",
        args.resume,
    )


def refusal(args: argparse.Namespace, report: dict[str, Any], is_encoder: bool) -> str | None:
    """Why the held-out texts refuse what was last verified; None where they do not."""
    if report["accepted"]:
        return None
    budgets = {"texts": args.budget, "retrieval": args.retrieval_budget}
    rows = [
        (kind, name, row["loss"])
        for kind in budgets
        for name, row in report.get(kind, {}).items()
        if row.get("decides", True)
    ]
    kind, name, loss = max(rows, key=lambda row: row[2] / (budgets[row[0]] or float("inf")))
    option = "--budget" if kind == "texts" else "--retrieval-budget"
    number = (lambda x: f"{x:.4g}") if is_encoder else percent
    count = len(report["refused"])
    who = f"The safest of {count} candidates" if count > 1 else "The only candidate"
    again = "" if is_encoder else f" {RESUMED}"
    return (
        f"Nothing written. {who} lost {number(round(loss, 4))} on {name} (budget {number(budgets[kind])}). "
        f"Try a larger {option}, or longer texts of the same kinds.{again}"
    )


def slower(
    args: argparse.Namespace, report: dict[str, Any], pays: Pays, is_encoder: bool = False
) -> str | None:
    """Say where the model is faster; for sparse rules, why one that is slower is not written."""
    before, after = (
        report["attention_seconds"][key] for key in ("before", "after")
    )  # of the same pass: of one load
    report["faster"] = is_faster((before, after))
    word = "faster" if report["faster"] else "NOT faster"
    print(
        f"\nAt {report['length']:,} tokens attention is {word} than the original model's on this machine "
        f"({after / before:.2f}x the time). {pays.to_sentence()}"
    )
    if report["faster"] or args.mechanism == "hsa" or args.allow_slower or args.cost == "bytes":
        return None
    again = "" if is_encoder else f" {RESUMED}"
    return f"Nothing written, because attention is not faster. Add --allow-slower to write the model anyway.{again}"


def loss_text(loss: float, is_encoder: bool) -> str:
    """A loss as it is shown: 1 - cosine, or more perplexity."""
    return f"{loss:.4f}" if is_encoder else f"{loss:+.2%}"


def show_measured(injection: CausalInjection | EncoderInjection) -> None:
    """What was measured by layer."""
    if isinstance(injection, EncoderInjection):
        show_layers(injection)
    elif isinstance(injection.rules[0], hsa.HsaHeadRule):
        show_certificate(injection)
    else:
        show_families(injection)


def show_families(injection: CausalInjection) -> None:
    """How many heads of each layer have rules of each kind, and the layer's pairs."""
    allocation = injection.allocation
    families = list(dict.fromkeys(rule.family for rule in injection.rules))
    rows = []
    for name, rules in allocation.layers.items():
        kinds = ["exact" if rule.is_exact else rule.family for rule in rules]
        share = sum(rule.share(allocation.length) for rule in rules) / len(rules)
        rows.append(
            [name, f"{share:.1%}", *(str(kinds.count(kind)) for kind in ("exact", *families))]
        )
    print("\nHeads by rule:")
    table(("layer", "pairs", "exact", *families), rows)


def show_rivals(rivals: dict[str, dict[str, Any]], cost: str, is_encoder: bool) -> None:
    """What other choices lose at no more of the cost, on the held-out texts and tasks."""
    if not rivals:
        return
    print(f"\nRivals at no more of {cost}, on held-out text:")
    rows = [
        [name, f"{r['pairs']:.1%}", *(loss_text(x, is_encoder) for x in r["losses"].values())]
        for name, r in rivals.items()
    ]
    table(("", "pairs", *rivals["this choice"]["losses"]), rows)


def show_certificate(injection: CausalInjection) -> None:
    """What every layer loses under one common setting, KL from its own attention, by the certificate."""
    rules: list[Any] = list(injection.rules)
    has = lambda rule, wanted: all(getattr(rule, name) == value for name, value in wanted.items())
    undropped = {
        "block_bias": 0.0
    }  # at lengths that are too short for the setting that is shown elsewhere
    at = next(
        i for wanted in (SHOWN, undropped) for i, rule in enumerate(rules) if has(rule, wanted)
    )
    rows = []
    for name in injection.measured[0].kl:
        kl = torch.stack([m.kl[name][:, at] for m in injection.measured]).mean(0)
        rows.append([name, f"{kl.mean():.3f}", f"{kl.max():.3f}", str(int(kl.argmax()))])
    print(
        f"\nKL of tied from own attention, nats (windows {rules[at].windows}, near {rules[at].near}, refine_top_k "
        f"{rules[at].refine_top_k}):"
    )
    table(("layer", "mean", "worst head", "head"), rows)


def show_layers(injection: EncoderInjection) -> None:
    """What every layer of an encoder loses by itself."""
    print(
        "\nLoss of each layer changed alone (1 - cosine, worst text), the least and by its chosen setting:"
    )
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
    print(
        f"\nTried on the second part of each text ({'1 - cosine' if is_encoder else 'rise of perplexity'}):"
    )
    rows = [
        [str(len(a.sparse)), f"{a.pairs:.1%}", *(loss_text(x, is_encoder) for x in losses.values())]
        for a, losses in tried
    ]
    table(("layers", "pairs", *tried[0][1]), rows)


def show_verified(report: dict[str, Any], is_encoder: bool) -> None:
    """The table before and after, on the third part of each text."""
    print(
        f"\nHeld-out text, before and after{'' if is_encoder else ' (perplexity of texts and of answers)'}:"
    )
    unable = cannot_do(report)
    rows = [
        [
            f"{report['metric']}, {name}",
            f"{r['before']:.3f}",
            f"{r['after']:.3f}",
            loss_text(r["loss"], is_encoder),
        ]
        for name, r in report["texts"].items()
    ]
    for name, r in report.get("retrieval", {}).items():
        # The one answer of copying is hundreds of tokens long, and is hardly ever right as a whole.
        of, kind = ("tokens ", "right") if name == "copying" else ("", "exact")
        right = f"{r['loss']:+.2%}, {of}right {r[f'{kind}_before']:.0%} -> {r[f'{kind}_after']:.0%}"
        right += " *" if name in unable else ""
        rows.append([f"answers, {name}", f"{r['before']:.3f}", f"{r['after']:.3f}", right])
    rows.append(["attended pairs", "100.0%", f"{report['pairs']:.1%}", ""])
    cost = report.get("cost", {"name": "pairs"})
    if cost["name"] != "pairs":
        rows.append(
            [f"{CALLED[cost['name']]}, of the rules alone", "100.0%", f"{cost['share']:.1%}", ""]
        )
    a, b = (report["attention_seconds"][key] for key in ("before", "after"))
    rows.append(["attention, time", f"{a:.2f} s", f"{b:.2f} s", f"{b / a:.2f}x the time"])
    a, b = (report["seconds"][key] for key in ("before", "after"))
    speed = f"{b['median'] / a['median']:.2f}x the time, medians of {ROUNDS} passes"
    rows.append(["whole model, time (range)", seconds_text(a), seconds_text(b), speed])
    memory = [f"{report['memory'][k] / 2**20:,.0f} MiB" for k in ("before", "after")]
    table(("", "before", "after", ""), [*rows, ["memory", *memory, ""]])
    for name in unable:
        of = "tokens" if name == "copying" else "answers"
        share = report["retrieval"][name]["right_before" if name == "copying" else "exact_before"]
        print(
            f"* {name} does not decide: the original model gets {share:.0%} of the {of} right "
            f"({least_right(name):.0%} needed)."
        )


def cannot_do(report: dict[str, Any]) -> list[str]:
    """The tasks of retrieval that the original model cannot do."""
    found = []
    for name, row in report.get("retrieval", {}).items():
        share = row["right_before"] if name == "copying" else row["exact_before"]
        if share < least_right(name):
            found.append(name)
    return found


def seconds_text(times: dict[str, float]) -> str:
    """A median with its range."""
    return f"{times['median']:.2f} s ({times['least']:.2f} to {times['most']:.2f})"
