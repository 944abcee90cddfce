"""`hyperattn inject`: checks its input, shows what `hf_hyperattn.inject` did, and writes the checkpoint."""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import shlex
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

import hub_cards
from hyperattn_cli import MECHANISMS

from ..folders import check_replaceable, replace_folder
from ..inject import Allocation, hsa
from ..inject.injection import CausalInjection, EncoderInjection, Losses
from ..integration.loading import errors_as
from .console import progress, table
from .inputs import encode, quiet, read_config, read_text, read_tokenizer, window_of

REPORT = "hyperattn_inject.json"
BUDGET, ROWS = 0.02, 384  # of hsa, by default
CHARACTERS = 16  # of a text are read for a token; texts have about 4
PASSAGES = 8  # of `length` tokens in each part of a text for an encoder
PARTS = 3  # to measure on, to choose on, to verify on
#: The certificate is shown for these, the defaults of `HsaConfig` but for its windows.
SHOWN = {"near": 96, "refine_top_k": 16, "block_bias": 0.0}


def run(args: argparse.Namespace) -> int:
    """Measure, choose, verify and write; raises ValueError or OSError for bad input."""
    check(args)
    quiet()
    if args.mechanism == "collaborative":
        from .inject_collaborative import inject
    else:
        inject = inject_hsa
    return inject(args)


def check(args: argparse.Namespace) -> None:
    """Refuse what is wrong in itself, before anything is read."""
    if args.mechanism not in MECHANISMS:
        allowed = ", ".join(MECHANISMS)
        raise ValueError(
            f"--mechanism {args.mechanism} cannot be injected without training; allowed: {allowed}"
        )
    if args.budget is not None and not 0 < args.budget < 1:
        raise ValueError(
            f"--budget {args.budget:g} is not allowed; allowed: above 0 and below 1, such as 0.02"
        )
    if args.pairs is not None and not 0 < args.pairs <= 1:
        raise ValueError(f"--pairs {args.pairs:g} is not allowed; allowed: above 0, up to 1")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed} is not allowed; allowed: 0 to 2**63 - 1")
    if args.output is not None:
        check_replaceable(Path(args.output), args.force, args.model)
        above = Path(args.output).absolute().parent
        if not above.is_dir():
            raise ValueError(
                f"--output {args.output}: {above} is no folder; allowed: a place in an existing folder"
            )


@dataclass
class Task:
    """A model and the texts that its attention is changed on.

    Args:
        args: of the command line.
        texts: for each of the `PARTS`, by name: token ids [length], for an encoder passages [PASSAGES, length].
        is_encoder: whether the model reads both ways, which is then loaded without its head.
    """

    args: argparse.Namespace
    config: PreTrainedConfig
    tokenizer: Any
    texts: list[dict[str, Tensor]]
    length: int
    is_encoder: bool


def prepare(args: argparse.Namespace) -> Task:
    """Find model and texts and check them."""
    for path in args.text:
        read_text(path, 1)
    config = read_stock_config(args.model)
    tokenizer = read_tokenizer(args.model, args.model)
    is_encoder = not is_causal(args.model, config)
    length = window_of(config, args.length, 128 if is_encoder else 2048)
    piece = length * (PASSAGES if is_encoder else 1)  # tokens of a part
    texts: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]
    for path in args.text:
        text, name = read_text(path, CHARACTERS * PARTS * piece)
        if name in texts[0]:
            raise ValueError(f"--text {path}: a second text called {name}; allowed: texts of different names")
        ids = encode(tokenizer, text, PARTS * piece, name)
        if len(ids) < PARTS * piece:
            raise ValueError(
                f"--text {path}: {len(ids)} tokens; allowed: {PARTS * piece} or more ({PARTS} parts of {piece}); use "
                "a longer text or a smaller --length"
            )
        for part, ids_of_part in zip(texts, torch.tensor(ids).split(piece)):
            part[name] = passages(tokenizer, ids_of_part, length) if is_encoder else ids_of_part
    return Task(args, config, tokenizer, texts, length, is_encoder)


def read_stock_config(path: str) -> PreTrainedConfig:
    """The config of a model with its own attention; raises ValueError where it is patched or no model."""
    config = read_config(path, path)
    if getattr(config, "hyperattn", None) is not None:
        raise ValueError(f"{path}: patched already; allowed: a model with its own attention")
    return config


def is_causal(path: str, config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is of a causal LM, not of a text encoder; raises ValueError where it is neither."""
    classes = "".join(config.architectures or ())
    if config.is_encoder_decoder:
        raise ValueError(f"{path}: an encoder with a decoder; allowed: causal LMs and text encoders")
    causal = "CausalLM" in classes or "LMHead" in classes
    with errors_as(f"{path}: not a causal LM or text encoder"), torch.device("meta"):
        (AutoModelForCausalLM if causal else AutoModel).from_config(copy.deepcopy(config))
    return causal


def passages(tokenizer: Any, ids: Tensor, length: int) -> Tensor:
    """[PASSAGES, length] of the tokens, between the tokenizer's first and last special token."""
    first, last = ([] if x is None else [x] for x in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    inner = length - len(first) - len(last)
    return torch.tensor([first + row[:inner].tolist() + last for row in ids.split(length)])


def dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """Of the checkpoint, in which the new one is written."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def inject_hsa(args: argparse.Namespace) -> int:
    """Tie attention over blocks of tokens; 1 where the held-out texts exceed the budget and nothing is written."""
    if not args.text:
        raise ValueError("--mechanism hsa needs --text FILE...; allowed: one text or more")
    if args.rank is not None:
        raise ValueError("--rank says nothing for --mechanism hsa; leave it out")
    args.budget = BUDGET if args.budget is None else args.budget
    args.rows = ROWS if args.rows is None else args.rows
    task = prepare(args)
    goal = "1 - cosine" if task.is_encoder else "perplexity"
    print(f"{Path(args.model).name}: {args.mechanism}, {goal} within {args.budget:.1%}, {task.length:,} tokens a text, "
          f"seed {args.seed}, {torch.get_num_threads()} threads\nTexts: {', '.join(task.texts[0])}",
          flush=True)  # fmt: skip
    with errors_as(f"{args.model}: cannot load it"):
        kind = AutoModel if task.is_encoder else AutoModelForCausalLM
        model = kind.from_pretrained(args.model, dtype=torch.float32).eval()
    options = (task.length, args.budget, args.pairs, args.rows, args.seed)
    injection: CausalInjection | EncoderInjection
    if task.is_encoder:
        injection = EncoderInjection(model, task.texts, hsa.layer_candidates(task.length), *options)
    else:
        injection = CausalInjection(model, task.texts, hsa.candidates(task.length), *options)
    with progress(injection.steps()) as bar:
        report = injection.run(bar)
    if isinstance(injection, EncoderInjection):
        show_layers(injection)
    else:
        show_certificate(injection)
    show_tried(injection.tried, task.is_encoder)
    show_verified(report)
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


def write(
    args: argparse.Namespace,
    model: Any,
    dtype: torch.dtype,
    tokenizer: Any,
    report: dict[str, Any],
    results: list[dict[str, Any]] | None = None,
) -> None:
    """Write the folder, whole or not at all; without --output nothing is written.

    Args:
        tokenizer: None where the model has none.
        results: what the card says was measured.
    """
    if args.output is None:
        print("\nnothing is written: no --output")
        return
    with replace_folder(Path(args.output), keep_others=False) as stage:
        model.to(dtype).save_pretrained(stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
        (stage / REPORT).write_text(json.dumps(report, indent=1) + "\n")
        hub_cards.write_card(stage, base_model=hub_cards.hub_id_or_none(args.model), results=results)
    print(f"\nwritten: {Path(args.output)}")


def results(args: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the card says was measured."""
    common = {
        "command": public_command(args),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "date": datetime.date.today().isoformat(),
        "metric": report["metric"],
        "notes": f"{report['length']} tokens, {report['pairs']:.1%} of the attended pairs.",
    }
    return [
        {**common, "value": r["after"], "base_value": r["before"], "dataset": f"{name}, held-out part"}
        for name, r in report["texts"].items()
    ]


def public_command(args: argparse.Namespace) -> str:
    """The command as it was run; of paths on this machine the last part alone."""
    paths = (args.model, args.output, *(args.text or ()))
    local = {path for path in paths if path and not hub_cards.hub_id_or_none(path)}
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
