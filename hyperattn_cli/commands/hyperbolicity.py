"""`hyperattn hyperbolicity`: measure how tree-like points are.

Points are word vectors, hidden states or rows of a file. Each set is compared with a shuffled
control.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel

from hf_hyperattn.analysis.hyperbolicity import hyperbolicity, shuffled
from hf_hyperattn.integration.loading.checkpoint_files import errors_as, find_folder, load_config

from ..shared.console import print_report, print_table, show_progress
from ..shared.inputs import (
    encode_text,
    prefix_of,
    read_text,
    read_tokenizer,
    silence_transformers,
    window_of,
)

#: Readers of files of points, by suffix. Pickles are not read, since they can run code.
READERS = {
    ".npy": lambda path: torch.from_numpy(np.load(path, allow_pickle=False)),
    ".csv": lambda path: torch.from_numpy(np.loadtxt(path, delimiter=",", ndmin=2)),
    ".safetensors": lambda path: get_only_matrix(load_file(path)),
}
TOKENS = 512  # tokens of the text, without --tokens
QUADRUPLES = 20_000


def run(args: argparse.Namespace) -> None:
    """Measure and print; raise ValueError or OSError for bad input."""
    silence_transformers()
    if args.tokens is not None and args.text is None:
        raise ValueError("--tokens says nothing without --text; leave it out")
    rows = {}
    sets = read_points(args)
    with show_progress(len(sets)) as bar:
        for name, points in sets.items():
            bar.describe(name)
            rows[name] = measure_points(points, args)
            bar.advance(1)
    asked = {"size": args.size, "draws": args.draws}
    print_report(
        args,
        {"source": args.source, "asked": asked, "rows": rows},
        lambda _: print_result(rows, asked),
    )


def read_points(args: argparse.Namespace) -> dict[str, Tensor]:
    """Read or compute the sets of points.

    Returns:
        Points by name, shape [N, d] each.

    Raises:
        ValueError: The source is neither a file of points nor a text model.
    """
    path = Path(args.source)
    # A folder may have a name such as model.csv, and is then a model.
    if path.suffix in READERS and not path.is_dir():
        if args.text is not None:
            raise ValueError("--text says nothing for a file of points; leave it out")
        with errors_as(
            f"{path}: no points; allowed: numbers, one point a row, in {', '.join(READERS)}"
        ):
            points = READERS[path.suffix](path)
        return {path.name: check_points(args.source, points)}
    if path.is_file():
        raise ValueError(
            f"{args.source}: no file of points; allowed: {', '.join(READERS)}, or the folder of a model"
        )
    return compute_vectors(args)


def get_only_matrix(tensors: dict[str, Tensor]) -> Tensor:
    """Return the single tensor of a safetensors file."""
    if len(tensors) != 1:
        raise ValueError(f"it holds {len(tensors)} tensors, and one was expected")
    return next(iter(tensors.values()))


def check_points(name: str, points: Tensor) -> Tensor:
    """Return points as float64.

    Args:
        name: Source of the points, for the message.
        points: Numbers, shape [N, d].

    Raises:
        ValueError: The shape is wrong, there are fewer than 8 points, or some are not finite.
    """
    if points.ndim != 2 or len(points) < 8 or points.is_complex():
        raise ValueError(
            f"{name}: numbers of shape {list(points.shape)}; allowed: 8 points or more, one a row"
        )
    points = points.double()
    if not points.isfinite().all():
        raise ValueError(f"{name}: holds nan or inf; allowed: finite numbers")
    return points


@torch.inference_mode()
def compute_vectors(args: argparse.Namespace) -> dict[str, Tensor]:
    """Return a model's input embeddings, and a text's hidden states by layer."""
    # Fail at once for a path that does not exist, instead of asking the Hub.
    find_folder(args.source, args.source)
    config = load_config(args.source, args.source)
    ids: list[int] = []
    if args.text is not None:
        tokenizer = read_tokenizer(args.source, args.source)
        prefix = prefix_of(tokenizer)
        tokens = window_of(config, args.tokens, TOKENS, len(prefix), option="--tokens")
        text, name = read_text(args.text, 64 * tokens)
        ids = prefix + encode_text(tokenizer, text, tokens, name)
    with errors_as(f"{args.source}: cannot load it"):
        model: Any = AutoModel.from_pretrained(args.source, dtype=torch.float32).eval()
    with errors_as(f"{args.source}: no table of word vectors; allowed: a text model"):
        sets = {"word vectors": model.get_input_embeddings().weight}
    if ids:
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        # State 0 is the embedding of the tokens, which the word vectors cover.
        sets |= {f"layer {i}": state[0] for i, state in enumerate(states) if i}
    return {name: check_points(name, points.detach()) for name, points in sets.items()}


def measure_points(points: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a random subset of the points, and its shuffled control."""
    draw = torch.Generator().manual_seed(args.seed)
    # Delta is expensive for many points, so take a random subset.
    points = points[torch.randperm(len(points), generator=draw)[: args.points]]
    # Both use the same seed, so that they draw the same samples.
    ours, control = (
        hyperbolicity(x, size=args.size, draws=args.draws, quadruples=QUADRUPLES, seed=args.seed)
        for x in (points, shuffled(points, args.seed))
    )
    # Standard error of the difference of two means.
    error = (ours.mean_error**2 + control.mean_error**2) ** 0.5
    return {
        "points": len(points),
        **vars(ours),
        "control": vars(control),
        "below_control": ours.mean + 3 * error < control.mean,
    }


def print_result(rows: dict[str, dict[str, Any]], asked: dict[str, int]) -> None:
    """Print the table, a summary, and a note on samples of another size."""
    cells = [
        [
            name,
            str(row["points"]),
            f"{row['largest']:.3f} ± {row['largest_deviation']:.3f}",
            f"{row['control']['largest']:.3f}",
            f"{row['mean']:.4f}",
            f"{row['control']['mean']:.4f}",
            "below" if row["below_control"] else "not below",
        ]
        for name, row in rows.items()
    ]
    print_table(
        ("points", "number", "2δ/diameter", "shuffled", "mean", "shuffled", "control"), cells
    )
    all_sizes = [row["size"] for row in rows.values()]
    # Delta grows with the size of a sample, so different sizes do not compare.
    least, most = min(all_sizes), max(all_sizes)
    sizes = f"{least}" if least == most else f"{least} to {most} (not comparable)"
    below = sum(row["below_control"] for row in rows.values())
    print(
        f"\n{below} of {len(rows)} have a mean delta below their control by 3 standard errors, nearer to a tree. "
        f"Samples of {sizes} points: 0 is a tree, 1 the maximum"
    )
    # With few points, all samples are the same, and there is no deviation.
    for count in sorted({row["points"] for row in rows.values() if row["points"] <= asked["size"]}):
        print(f"{count} points: one sample of all, in place of {asked['draws']} of {asked['size']}")
