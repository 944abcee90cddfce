"""`hyperattn inject`: check the input, run `hf_hyperattn.inject`, write a model.

Most of this module prints the measurements: by layer, by candidate, on held-out text and by time.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_hyperattn.inject import Allocation, hsa, sparse
from hf_hyperattn.inject.causal import RETRIEVAL, CausalInjection
from hf_hyperattn.inject.encoder import EncoderInjection
from hf_hyperattn.inject.injection import ROUNDS, Losses, ids_of
from hf_hyperattn.inject.pays import Pays, is_faster, pays_from
from hf_hyperattn.inject.retrieval import least_right
from hf_hyperattn.integration.loading.checkpoint_files import errors_as
from hf_hyperattn.utils.folders import check_replaceable
from hyperattn_cli import MECHANISMS, suggest_nearest

from ..shared import device_map
from ..shared.console import print_table, run_with_report, show_progress
from ..shared.inputs import check_place, count_threads, positions_of, silence_transformers
from ..shared.models import device_of
from ..shared.smollm2 import cache_directory
from .inject_collaborative import inject_collaborative
from .inject_plan import find_dtype, print_plan
from .inject_task import (
    PASSAGES,
    Task,
    dtype_of,
    is_causal,
    list_results,
    prepare_task,
    read_stock_config,
    write_model,
)

#: Default of --budget.
BUDGET = 0.02
#: Default of --retrieval-budget for sparse rules. HSA only reports retrieval, so that scripts
#: written before the option existed keep their results.
RETRIEVAL_BUDGET = 0.05
#: Default number of sampled queries per text, and the least number over all texts.
ROWS, QUERIES = 384, 1024
#: Options that an encoder does not use, and why.
NOT_OF_ENCODERS = {
    "rows": "which is measured on whole passages",
    "seed": "which samples no queries",
    "retrieval_budget": "which has no retrieval tasks",
    "resume": "whose measurements are not stored",
    "cost": "whose rules go by layer, and which keeps no cache",
    "plan": "whose run takes minutes",
}
#: Options that some mechanisms do not use: (option, mechanisms).
UNUSED_OPTIONS = (
    ("rank", ("hsa", "sparse")),
    ("retrieval_budget", ("collaborative",)),
    ("resume", ("collaborative",)),
    ("compare", ("collaborative",)),
    ("cost", ("collaborative",)),
    ("plan", ("collaborative",)),
    ("dtype", ("collaborative",)),
    ("allow_slower", ("collaborative", "hsa")),
)
RESUMED = "Add --resume to reuse the measurements."
#: Names of the costs in the output.
COST_NAMES = {"pairs": "the pairs", "bytes": "the cache's bytes", "time": "attention's time"}
#: Setting whose certificate is printed: defaults of `HsaConfig`, except its windows.
SHOWN = {"near": 96, "refine_top_k": 16, "block_bias": 0.0}


def run(args: argparse.Namespace) -> int:
    """Measure, choose, verify and write; raise ValueError or OSError for bad input."""
    silence_transformers()
    if args.mechanism is None:
        args.mechanism = find_default_mechanism(args)
    check_options(args)
    return run_with_report(
        inject_collaborative if args.mechanism == "collaborative" else inject_rules, args
    )


def find_default_mechanism(args: argparse.Namespace) -> str:
    """Return sparse for causal models, hsa for encoders: what lost least in docs/results/frontier.md."""
    config = read_stock_config(args.model)
    return "sparse" if is_causal(args.model, config) else "hsa"


def check_options(args: argparse.Namespace) -> None:
    """Check the options before anything is read."""
    if args.mechanism not in MECHANISMS:
        allowed = ", ".join(MECHANISMS)
        close = suggest_nearest(args.mechanism, MECHANISMS)
        raise ValueError(
            f"--mechanism {args.mechanism} cannot be injected without training; allowed: {allowed}{close}"
        )
    for name, mechanisms in UNUSED_OPTIONS:
        if getattr(args, name) not in (None, False) and args.mechanism in mechanisms:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} says nothing for --mechanism {args.mechanism}; leave it out"
            )
    # An option without effect is an error: the user expects one.
    if args.allow_slower and args.cost == "bytes":
        raise ValueError(
            "--allow-slower says nothing with --cost bytes, which writes a slower model too; leave it out"
        )
    # Only to report a wrong map or device now; the model is loaded much later.
    device_map.read_device_map(args.device_map)
    device_of(args.device)
    if args.device_map is not None and args.device != "auto":
        raise ValueError(
            f"--device {args.device} says nothing with --device-map, which places every module; leave it out"
        )
    if args.device_map is not None and args.plan:
        raise ValueError(
            "--plan cannot plan a model of several devices; leave out --device-map, and read the memory of one device"
        )
    if args.output is not None:
        check_replaceable(Path(args.output), args.force, args.model)
        check_place("--output", args.output)
    elif args.force:
        raise ValueError("--force says nothing without --output; leave it out")


def inject_rules(args: argparse.Namespace) -> int:
    """Give attention heads or layers cheaper rules; return 1 if nothing was written."""
    if not args.text:
        raise ValueError(
            f"--mechanism {args.mechanism} needs --text FILE...; allowed: one text or more"
        )
    # Remember whether the user gave a budget before the default replaces None.
    has_budget = args.budget is not None
    args.budget = args.budget if has_budget else BUDGET
    task = prepare_task(args)
    check_task(args, task)
    if task.is_encoder and has_budget and args.pairs is not None:
        raise ValueError(
            "--budget has no effect on an encoder together with --pairs; leave out one of them"
        )
    # The default depends on mechanism and model, so the parser cannot set it.
    if args.retrieval_budget is None and args.mechanism == "sparse" and not task.is_encoder:
        args.retrieval_budget = RETRIEVAL_BUDGET
    # The default is None in the parser, so that `check_task` can tell a given seed from the
    # default.
    args.seed = args.seed or 0
    cost = COST_NAMES[args.cost or "pairs"]
    print("\n".join(describe_run(args, task)), flush=True)
    if args.plan:
        return print_plan(args, task, partial(make_injection, args, task))
    with errors_as(f"{args.model}: cannot load it"):
        kind = AutoModel if task.is_encoder else AutoModelForCausalLM
        model = device_map.load_model(kind, args)
    injection = make_injection(args, task, model)
    with show_progress(injection.count_steps()) as bar:
        report = injection.run(bar)
        rivals = injection.compare_rivals(bar) if args.compare else {}
        injection.enter_stage("timing")
        bar.describe("timing")
        # Find the length from which the rules are faster than the original attention.
        pays = pays_from(
            model, ids_of(next(iter(injection.texts[2].values()))), positions_of(task.config)
        )
    injection.enter_stage(None)
    report["stages"] = injection.stages
    report["attention_seconds"] = dict(zip(("before", "after"), pays.seconds[task.length]))
    show_summary(args, report, task.is_encoder)
    # Print everything that was measured before a refusal, so that the user sees its reason.
    show_measured(injection)
    show_tried(injection.tried, task.is_encoder)
    show_verified(report, task.is_encoder)
    show_rivals(rivals, cost, task.is_encoder)
    report |= {"rivals": rivals, "pays": {"from": pays.start, "seconds": pays.seconds}}
    args.report = report
    reason = explain_refusal(args, report, task.is_encoder)
    reason = reason or check_speed(args, report, pays, task.is_encoder)
    if reason:
        print(f"\n{reason}")
        return 1
    # The report in the checkpoint names the options, so that the run can be repeated.
    names = ("mechanism", "budget", "retrieval_budget", "pairs", "cost", "rows", "seed", "dtype")
    request = {name: getattr(args, name) for name in names}
    report = {"asked": request | {"texts": list(task.texts[0])}, **report}
    write_model(
        args, model, dtype_of(task.config), task.tokenizer, report, list_results(args, report)
    )
    return 0


def describe_run(args: argparse.Namespace, task: Task) -> list[str]:
    """Return the lines that name the model, the goal and the texts of a run."""
    place = args.device_map or f"{device_of(args.device)}"
    settings = [
        f"mechanism {args.mechanism}",
        f"{find_dtype(args, task)} on {place}",
        count_threads(),
    ]
    if not task.is_encoder:
        settings.insert(1, f"seed {args.seed}")
    cost = COST_NAMES[args.cost or "pairs"]
    # With --pairs the share is fixed and the loss is whatever results.
    if args.pairs is not None:
        goal = f"{format_percent(args.pairs)} of {cost}, at any loss"
    elif task.is_encoder:
        goal = f"fewest pairs with 1 - cosine at most {args.budget:g}"
    else:
        goal = f"least of {cost} with perplexity at most +{format_percent(args.budget)}"
        if args.retrieval_budget is not None:
            goal += (
                f" and answers of retrieval tasks at most +{format_percent(args.retrieval_budget)}"
            )
    each = f"{PASSAGES} passages of {task.length:,}" if task.is_encoder else f"{task.length:,}"
    parts = f"3 parts of {each} tokens (measure, choose, verify)"
    return [
        f"{Path(args.model).name}: {', '.join(settings)}",
        f"Goal: {goal}",
        f"Texts: {', '.join(task.texts[0])}; {parts}",
    ]


def format_percent(share: float) -> str:
    """Return a share in per cent, with up to four digits."""
    return f"{100 * share:.4g} %"


def check_task(args: argparse.Namespace, task: Task) -> None:
    """Check options and text names against the kind of model.

    Raises:
        ValueError: An option has no meaning for an encoder, or a text has the name of a retrieval
            task.
    """
    if not task.is_encoder:
        # Retrieval tasks are reported under these names, together with the texts.
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
            raise ValueError(f"--{option} has no effect on an encoder, {why}; leave it out")


def make_injection(
    args: argparse.Namespace, task: Task, model: Any
) -> CausalInjection | EncoderInjection:
    """Build the injection of a loaded model from the options."""
    kind: Any = hsa if args.mechanism == "hsa" else sparse
    if task.is_encoder:
        return EncoderInjection(
            model=model,
            texts=task.texts,
            rules=kind.layer_candidates(task.length),
            length=task.length,
            budget=args.budget,
            pairs=args.pairs,
        )
    # Few texts get more rows each, so that the choice rests on at least `QUERIES` queries.
    args.rows = args.rows or max(ROWS, -(-QUERIES // len(task.texts[0])))
    rules: list[Any] = kind.candidates(task.length)
    rivals = sparse.candidates(task.length) if args.compare and args.mechanism == "hsa" else ()
    return CausalInjection(
        model=model,
        texts=task.texts,
        rules=rules,
        length=task.length,
        budget=args.budget,
        pairs=args.pairs,
        rivals=rivals,
        cost=args.cost or "pairs",
        rows=args.rows,
        seed=args.seed,
        tokenizer=task.tokenizer,
        retrieval_budget=args.retrieval_budget,
        folder=cache_directory() / "inject",
        resume=args.resume,
    )


def explain_refusal(
    args: argparse.Namespace, report: dict[str, Any], is_encoder: bool
) -> str | None:
    """Explain why the held-out texts reject the last candidate, or return None."""
    if report["accepted"]:
        return None
    # Losses of texts and of retrieval tasks have budgets of their own.
    budgets = {"texts": args.budget, "retrieval": args.retrieval_budget}
    rows = [
        (kind, name, row["loss"])
        for kind in budgets
        for name, row in report.get(kind, {}).items()
        if row.get("decides", True)
    ]
    # Name the row that exceeds its budget by the largest factor.
    kind, name, loss = max(rows, key=lambda row: row[2] / (budgets[row[0]] or float("inf")))
    option = "--budget" if kind == "texts" else "--retrieval-budget"
    number = "{:.4g}".format if is_encoder else format_percent
    count = len(report["refused"])
    who = f"The safest of {count} candidates" if count > 1 else "The only candidate"
    again = "" if is_encoder else f" {RESUMED}"
    return (
        f"Nothing written. {who} lost {number(round(loss, 4))} on {name} (budget {number(budgets[kind])}). "
        f"Try a larger {option}, or longer texts of the same kinds.{again}"
    )


def check_speed(
    args: argparse.Namespace, report: dict[str, Any], pays: Pays, is_encoder: bool = False
) -> str | None:
    """Print whether attention is faster, and refuse a slower sparse model.

    Args:
        args: The command line.
        report: The measurements; gets the key "faster".
        pays: Times of attention by length.
        is_encoder: Whether the model is an encoder, which has no --resume.

    Returns:
        The reason for not writing, or None.
    """
    # Both times come from the same pass, so that the machine's load affects them alike.
    before, after = (report["attention_seconds"][key] for key in ("before", "after"))
    report["faster"] = is_faster((before, after))
    word = "faster" if report["faster"] else "NOT faster"
    print(
        f"\nAt {report['length']:,} tokens attention is {word} than the original model's on this machine "
        f"({after / before:.2f}x the time). {pays.to_sentence()}"
    )
    # Only sparse rules promise speed. HSA and cache bytes are chosen for other reasons.
    if report["faster"] or args.mechanism == "hsa" or args.allow_slower or args.cost == "bytes":
        return None
    again = "" if is_encoder else f" {RESUMED}"
    return f"Nothing written, because attention is not faster. Add --allow-slower to write the model anyway.{again}"


def format_loss(loss: float, is_encoder: bool) -> str:
    """Return a loss as text: 1 - cosine of an encoder, else the rise in perplexity."""
    return f"{loss:.4f}" if is_encoder else f"{loss:+.2%}"


def show_summary(args: argparse.Namespace, report: dict[str, Any], is_encoder: bool) -> None:
    """Print in three lines what is saved, what is lost, and whether verification passed."""
    attention = report["attention_seconds"]["after"] / report["attention_seconds"]["before"]
    seconds = report["seconds"]
    whole = seconds["after"]["median"] / seconds["before"]["median"]
    print(
        f"\nSaved: {1 - report['pairs']:.0%} of the attention pairs. At {report['length']:,} tokens attention takes "
        f"{attention:.2f}x the time of the original, the whole model {whole:.2f}x."
    )
    lost = []
    measure = "1 - cosine" if is_encoder else "perplexity"
    for kind, what in (("texts", measure), ("retrieval", "perplexity of answers")):
        rows = {n: r["loss"] for n, r in report.get(kind, {}).items() if r.get("decides", True)}
        if rows:
            worst = max(rows, key=lambda name: rows[name])
            lost.append(f"{what} {format_loss(rows[worst], is_encoder)} ({worst})")
    print(f"Lost, at worst, on text that was not used before: {', '.join(lost)}.")
    cheaper = len(report["refused"])
    if not report["accepted"]:
        tried = (
            "the only combination exceeds" if cheaper == 1 else f"all {cheaper} combinations exceed"
        )
        print(f"Verification failed: {tried} a budget.")
    elif args.pairs is not None:
        print("Verification: none, because --pairs accepts any loss.")
    else:
        refused = f" It came after {cheaper} cheaper that did not." if cheaper else ""
        print(f"Verification passed: this combination keeps every budget.{refused}")


def show_measured(injection: CausalInjection | EncoderInjection) -> None:
    """Print the table of measurements by layer that fits the mechanism."""
    if isinstance(injection, EncoderInjection):
        show_layers(injection)
    elif isinstance(injection.rules[0], hsa.HsaHeadRule):
        show_certificate(injection)
    else:
        show_families(injection)


def show_families(injection: CausalInjection) -> None:
    """Print the number of heads with each kind of rule, and the pairs, by layer."""
    allocation = injection.allocation
    # A dict removes duplicates and keeps the order of the rules.
    families = list(dict.fromkeys(rule.family for rule in injection.rules))
    rows = []
    for name, rules in allocation.layers.items():
        kinds = ["exact" if rule.is_exact else rule.family for rule in rules]
        share = sum(rule.share(allocation.length) for rule in rules) / len(rules)
        rows.append(
            [name, f"{share:.1%}", *(str(kinds.count(kind)) for kind in ("exact", *families))]
        )
    print("\nHeads by rule:")
    print_table(("layer", "pairs", "exact", *families), rows)


def show_rivals(rivals: dict[str, dict[str, Any]], cost: str, is_encoder: bool) -> None:
    """Print the held-out losses of other choices that cost no more."""
    if not rivals:
        return
    print(f"\nRivals at no more of {cost}, on held-out text:")
    rows = [
        [name, f"{r['pairs']:.1%}", *(format_loss(x, is_encoder) for x in r["losses"].values())]
        for name, r in rivals.items()
    ]
    print_table(("", "pairs", *rivals["this choice"]["losses"]), rows)


def show_certificate(injection: CausalInjection) -> None:
    """Print the KL of every layer under one common HSA setting."""
    # The table needs one setting for all layers, to make them comparable.
    rules: list[Any] = list(injection.rules)
    has = lambda rule, wanted: all(getattr(rule, name) == value for name, value in wanted.items())
    # Short lengths have no rule with the setting `SHOWN`; any rule without a block bias then
    # serves.
    fallback = {"block_bias": 0.0}
    at = next(
        i for wanted in (SHOWN, fallback) for i, rule in enumerate(rules) if has(rule, wanted)
    )
    rows = []
    # Average over the texts.
    for name in injection.measured[0].kl:
        kl = torch.stack([m.kl[name][:, at] for m in injection.measured]).mean(0)
        rows.append([name, f"{kl.mean():.3f}", f"{kl.max():.3f}", str(int(kl.argmax()))])
    print(
        f"\nKL of tied from own attention, nats (windows {rules[at].windows}, near {rules[at].near}, refine_top_k "
        f"{rules[at].refine_top_k}):"
    )
    print_table(("layer", "mean", "worst head", "head"), rows)


def show_layers(injection: EncoderInjection) -> None:
    """Print the loss of every encoder layer when only that layer is changed."""
    print(
        "\nLoss if only this layer is changed (1 - cosine, worst text): least, and with its chosen setting:"
    )
    rows = []
    chosen = injection.allocation.sparse
    for name, (costs,) in injection.costs.items():
        cost, setting = "exact", ""
        if name in chosen:
            (rule,) = chosen[name]
            cost = f"{costs[injection.rules.index(rule)]:.5f}"
            setting = str(rule)
        rows.append([name, f"{costs.min():.5f}", cost, setting])
    print_table(("layer", "least", "chosen", "setting"), rows)


def show_tried(tried: list[tuple[Allocation, Losses]], is_encoder: bool) -> None:
    """Print the loss of every allocation that was tried."""
    print(
        f"\nTried on the second part of each text ({'1 - cosine' if is_encoder else 'rise of perplexity'}):"
    )
    rows = [
        [
            str(len(a.sparse)),
            f"{a.pairs:.1%}",
            *(format_loss(x, is_encoder) for x in losses.values()),
        ]
        for a, losses in tried
    ]
    print_table(("layers", "pairs", *tried[0][1]), rows)


def show_verified(report: dict[str, Any], is_encoder: bool) -> None:
    """Print losses, times and memory before and after, on the third part of each text."""
    kind = "" if is_encoder else " (perplexity of texts and of answers)"
    print(f"\nHeld-out text, before and after{kind}:")
    unable = list_failed_tasks(report)
    rows = [
        [
            f"{report['metric']}, {name}",
            f"{r['before']:.3f}",
            f"{r['after']:.3f}",
            format_loss(r["loss"], is_encoder),
        ]
        for name, r in report["texts"].items()
    ]
    for name, r in report.get("retrieval", {}).items():
        # Copying has one answer of hundreds of tokens, which is hardly ever right as a whole. So
        # its tokens are counted instead.
        of, kind = ("tokens ", "right") if name == "copying" else ("", "exact")
        right = f"{r['loss']:+.2%}, {of}right {r[f'{kind}_before']:.0%} -> {r[f'{kind}_after']:.0%}"
        right += " *" if name in unable else ""
        rows.append([f"answers, {name}", f"{r['before']:.3f}", f"{r['after']:.3f}", right])
    rows.append(["attended pairs", "100.0%", f"{report['pairs']:.1%}", ""])
    # Encoders report no cost, since their rules are always chosen by pairs.
    cost = report.get("cost", {"name": "pairs"})
    if cost["name"] != "pairs":
        rows.append(
            [
                f"{COST_NAMES[cost['name']]}, of the rules alone",
                "100.0%",
                f"{cost['share']:.1%}",
                "",
            ]
        )
    # Attention only, then the whole model.
    a, b = (report["attention_seconds"][key] for key in ("before", "after"))
    rows.append(["attention, time", f"{a:.2f} s", f"{b:.2f} s", f"{b / a:.2f}x the time"])
    a, b = (report["seconds"][key] for key in ("before", "after"))
    speed = f"{b['median'] / a['median']:.2f}x the time, medians of {ROUNDS} passes"
    rows.append(["whole model, time (range)", format_seconds(a), format_seconds(b), speed])
    memory = [f"{report['memory'][k] / 2**20:,.0f} MiB" for k in ("before", "after")]
    print_table(("", "before", "after", ""), [*rows, ["memory", *memory, ""]])
    for name in unable:
        of = "tokens" if name == "copying" else "answers"
        share = report["retrieval"][name]["right_before" if name == "copying" else "exact_before"]
        print(
            f"* {name} does not decide: the original model gets {share:.0%} of the {of} right "
            f"({least_right(name):.0%} needed)."
        )


def list_failed_tasks(report: dict[str, Any]) -> list[str]:
    """List the retrieval tasks that the original model cannot do."""
    failed = []
    for name, row in report.get("retrieval", {}).items():
        share = row["right_before"] if name == "copying" else row["exact_before"]
        if share < least_right(name):
            failed.append(name)
    return failed


def format_seconds(times: dict[str, float]) -> str:
    """Return a median time with its range."""
    return f"{times['median']:.2f} s ({times['least']:.2f} to {times['most']:.2f})"
