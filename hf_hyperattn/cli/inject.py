"""Tie the attention of a pretrained model without training, as far as a budget of quality allows.

Measures on a little text what every head loses under many settings of hierarchical attention, chooses windows, near,
refinement and block bias for each head at the lowest cost within the budget, verifies the choice on text that had no
part in it, and writes the patched checkpoint with its card. Each text is cut in three parts: one to measure on, one to
choose the cost on, one to verify on. Where verification exceeds the budget nothing is written.

--mechanism collaborative instead replaces the projections of queries and keys by --rank dimensions that all heads
share, and prints the error of every layer before it does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..folders import check_replaceable
from .command import check_count

#: What hsa takes where nothing is said.
BUDGET, ROWS = 0.02, 384
HELP = "change a pretrained model's attention without training, and say what it loses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `hyperattn inject`."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub id of a causal LM or a text encoder")
    add = parser.add_argument
    add("--mechanism", required=True, help=f"what to inject: {', '.join(MECHANISMS)}")
    add(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 texts, of the kinds the model is to serve; collaborative does without",
    )
    add("--rank", type=int, metavar="R", help="collaborative: dimensions that all heads share")
    add("--budget", type=float, metavar="X",
        help="largest loss: relative perplexity of a causal LM, 1 - cosine of an encoder (default: 0.02)")  # fmt: skip
    add("--length", type=int, metavar="N", help="tokens a text (default: 2048, or the model's limit)")
    add("--output", metavar="DIR", help="where to write the patched checkpoint (default: it is not written)")
    add("--force", action="store_true", help="replace the checkpoint in DIR, and all else there")
    add("--pairs", type=float, metavar="SHARE", help="look at this share of the pairs, whatever it costs")
    add("--rows", type=int, metavar="N", help="queries measured a text (default: 384)")
    add("--seed", type=int, default=0, help="of the sampled queries, or of the decomposition (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Measure, choose, verify and write; raises ValueError or OSError for bad input."""
    check(args)
    return MECHANISMS[args.mechanism](args)


def hsa(args: argparse.Namespace) -> int:
    """Tie attention over blocks of tokens."""
    if not args.text:
        raise ValueError("--mechanism hsa needs --text FILE...; allowed: one text or more")
    if args.rank is not None:
        raise ValueError("--rank says nothing for --mechanism hsa; leave it out")
    args.budget = BUDGET if args.budget is None else args.budget
    args.rows = ROWS if args.rows is None else args.rows
    from .inject_setting import prepare

    setting = prepare(args)
    print(setting.title(), flush=True)
    if setting.encoder:
        from .inject_encoder import inject
    else:
        from .inject_causal import inject
    return inject(setting)


def collaborative(args: argparse.Namespace) -> int:
    """Share the projections of queries and keys among heads."""
    from .inject_collaborative import run

    return run(args)


#: What can be injected without training: by name, what runs it on the checked arguments and returns the exit code.
MECHANISMS = {"hsa": hsa, "collaborative": collaborative}


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
    for name, least in (("length", 64), ("rows", 16)):
        value = getattr(args, name)
        if value is not None:
            check_count(name, value, least)
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed} is not allowed; allowed: 0 to 2**63 - 1")
    if args.output is not None:
        check_replaceable(Path(args.output), args.force, args.model)
        above = Path(args.output).absolute().parent
        if not above.is_dir():
            raise ValueError(
                f"--output {args.output}: {above} is no folder; allowed: a place in an existing folder"
            )
