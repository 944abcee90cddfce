"""The command `python recipes/experiments`."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace

from .pausing import PAUSE

#: Names and what they ask, in the order of docs/results/experiments.md; each is a module with an `EXPERIMENT`.
NAMES = {
    "alibi": "how far HyPE's bias is from ALiBi's",
    "flash": "what HyPE's bias costs and loses, computed in the kernel and as columns",
    "length": "language models trained at 128 tokens, read at up to 2,048",
    "depth": "depth of the lowest common ancestor, by attention with seven scores",
}
#: The same, in the order of docs/results/hsa_experiments.md.
HSA = {
    "hsa_minilm": "hierarchical attention injected into three of MiniLM's six layers",
    "hsa_probe": "the same model read by a linear probe on IMDB",
    "hsa_joined": "HsaEncoder on images joined with texts, each partly corrupted",
    "hsa_joined_deep": "the same with one, two and four layers and a rate searched for each",
    "hsa_imdb": "HsaEncoder of one layer on reviews, from scratch",
}
#: The same, in docs/results/collaborative.md, docs/results/head_fusion.md and docs/results/hat.md.
HEADS = {
    "collaborative": "MiniLM with queries and keys shared by its heads, at several ranks",
    "head_pruning": "SmolLM2 without some of its heads, chosen by their weight and by rivals of it",
    "hat_imdb": "HAT made from MiniLM on long reviews, against the model cut off, and with full attention",
}
#: The same, in docs/results/mkl.md and docs/results/trilinear.md.
MIXTURES = {
    "kernels": "whether a learned mixture of kernels aligns with the task, on nouns of WordNet",
    "token_weights": "language models of bytes whose heads are weighted by each token, or each by one number",
    "trilinear": "a relation of three tokens, learned by three-way and by pairwise attention",
    "coattention": "a question, a context and answers, by three-way and by pairwise attention",
}
#: The same, in docs/results/hyperbolicity.md and docs/results/graphs.md; minutes each.
GEOMETRY = {
    "hyperbolicity": "how tree-like words and nodes lie, and whether their norms follow frequency or depth",
    "ball": "WordNet's mammals as points of the ball and of Euclidean space",
    "graphs": "sections of Debian's packages by attention over their dependencies",
    "graph_trees": "the same sections by hierarchical attention over a package's neighbourhood as a tree",
    "hypernyms": "which word is above a noun, by MiniLM's frozen states and one score over them",
    "operations": "what distance, maps and attention over 64 tokens cost",
    "starts": "the depth task from other starts of cones and distances",
}
#: The same, in docs/results/translation.md, docs/results/adaptation.md and docs/results/vision.md.
EVIDENCE = {
    "translation": "German to English from scratch, by attention with seven scores and several widths",
    "adaptation": "SmolLM2 with LoRA alone and with each mechanism, at equal trainable parameters",
    "vision": "a small DeiT on Fashion-MNIST from scratch, with seven scores and several gammas",
}
#: The same, in docs/results/adaptation.md.
RECOVERY = {
    "recovered": "SmolLM2 with k layers of another score, each distilled from the layer that it replaces",
    "injected_lora": "SmolLM2 with hierarchical attention injected and then fine-tuned, and the other way round",
}
ALL = NAMES | HSA | HEADS | MIXTURES | GEOMETRY | EVIDENCE | RECOVERY
#: The long ones, the one first whose answer is worth most for its time.
QUEUE = (
    "depth",
    "length",
    "hat_imdb",
    "head_pruning",
    "coattention",
    "hsa_joined_deep",
    *EVIDENCE,
    *RECOVERY,
)
#: Those that draw pages of their own, each in a module NAME_tables.
PAGES = (
    "hsa",
    "hsa_joined_deep",
    "head",
    "hat",
    "collaborative",
    *MIXTURES,
    *GEOMETRY,
    *EVIDENCE,
    *RECOVERY,
    "evidence",
)
#: The paper's experiment with any classifier of reviews; takes --model and --layers.
CLASSIFIER = "hsa_classifier"


def main(argv: list[str] | None = None) -> int:
    """Read the command line and act; an error is one line on stderr and exit code 2."""
    listing = "\n".join(f"  {name:16}{what}" for name, what in ALL.items())
    parser = argparse.ArgumentParser(
        prog="python recipes/experiments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Experiments on open questions, resumable run by run.\n\n{listing}\n"
        f"  {CLASSIFIER} --model ID --layers 7,9,11\n             the same in a classifier of reviews, on IMDB\n"
        "  all        the first four, one after the other\n"
        f"  queue      {', '.join(QUEUE)}:\n             one run at a time on one core, niced; goes on where it "
        f"stopped. Paused between two steps while\n             {PAUSE.relative_to(PAUSE.parents[1])} exists, or by "
        "`kill -USR1 PID` until `kill -USR2 PID`\n"
        "  draw       tables and plots of all pages in docs/ that have experiments, from the results;\n"
        "             and the maps of docs/selection.md and the figures of docs/figures",
    )
    parser.add_argument("what", choices=[*ALL, CLASSIFIER, "all", "queue", "draw"])
    parser.add_argument(
        "--minutes", type=float, help="start no run after this long; the same command goes on"
    )
    parser.add_argument("--model", help=f"{CLASSIFIER}: a folder or an id on the Hub")
    parser.add_argument("--layers", help=f"{CLASSIFIER}: numbers from 0, such as 7,9,11")
    parser.add_argument(
        "--full", action="store_true", help=f"{', '.join(EVIDENCE)}: sizes for a GPU"
    )
    parser.add_argument(
        "--data",
        help="translation and vision --full: a folder with train.de and so on, or train/CLASS",
    )
    parser.add_argument(
        "--left",
        action="store_true",
        help="only say what is left, of the queue or of one experiment",
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    args = parser.parse_args(argv)
    try:
        return act(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"experiments: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def act(args: argparse.Namespace) -> int:
    """Draw, or run what is missing of the named experiments until the minutes are over.

    Raises:
        ValueError: an option is given that nothing reads.
    """
    given = [
        name
        for name in ("minutes", "model", "layers", "full", "data", "fresh")
        if getattr(args, name)
    ]
    given += ["left"] if args.left and args.what in ("draw", CLASSIFIER) else []
    if given and (args.what in ("draw", "queue") or args.left):
        raise ValueError(
            f"--{given[-1]} is not read here; leave it out with {args.what}{' --left' * args.left}"
        )
    if args.what == "draw":
        from .draw import draw

        draw()
        for page in PAGES:
            importlib.import_module(f"experiments.{page}_tables").draw()
        importlib.import_module("experiments.selection_maps").draw()
        importlib.import_module("experiments.explanations").draw()
        return 0
    if args.what == "queue":
        from .queue import main as queue

        return queue(QUEUE, left_only=args.left)
    from .store import perform

    if args.left:
        from .queue import report

        print(report(tuple(NAMES) if args.what == "all" else (args.what,)))
        return 0
    names = NAMES if args.what == "all" else (args.what,)
    for name in names:
        if not perform(experiment_of(name, args), minutes=args.minutes, fresh=args.fresh):
            return 0
    return 0


def experiment_of(name: str, args: argparse.Namespace):
    """The experiment of a name.

    Raises:
        ValueError: options are missing where they are needed, or given where nothing reads them.
    """
    module = importlib.import_module(f"experiments.{name}")
    if args.full and name not in EVIDENCE:
        raise ValueError(f"--full is for {', '.join(EVIDENCE)}; leave it out with {name}")
    if args.data is not None and not (args.full and "data" in module.EXPERIMENT.settings):
        raise ValueError("--data is for translation --full and vision --full; leave it out")
    given = args.model is not None and args.layers is not None
    if name != CLASSIFIER:
        if args.model is not None or args.layers is not None:
            raise ValueError(
                f"--model and --layers are for {CLASSIFIER}; leave them out with {name}"
            )
        return full_size(module, args.data) if args.full else module.EXPERIMENT
    if not given or not all(part.strip().isdigit() for part in args.layers.split(",")):
        raise ValueError(
            f"{CLASSIFIER} needs --model ID and --layers, numbers from 0 such as 7,9,11"
        )
    return module.experiment(args.model, [int(part) for part in args.layers.split(",")])


def full_size(module, data: str | None):
    """The experiment with the sizes of its paper, under a name of its own."""
    small = module.EXPERIMENT
    settings = small.settings | module.FULL | ({"data": data} if data else {})
    return replace(small, name=f"{small.name}_full", settings=settings)
