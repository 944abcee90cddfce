"""Trees of WordNet's nouns, cut at a depth."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

#: Pointer symbols of "is a kind of" and "is an instance of", in WordNet's file format (wndb(5)).
HYPERNYM = ("@", "@i")


def read_parents(path: str | Path) -> dict[str, str | None]:
    """The parent of every noun synset, None for the root; synsets are named "word.offset".

    WordNet's nouns form a graph in which 2 % of the nouns have several hypernyms; the one that is listed first is
    taken, which leaves a tree.

    Raises:
        ValueError: the file is not `data.noun`.
    """
    names, parents = {}, {}
    with open(path, encoding="latin-1") as lines:
        for line in lines:
            if line.startswith("  "):  # the licence
                continue
            fields = line.split(" | ")[0].split()
            if len(fields) < 6 or fields[2] != "n":
                raise ValueError(
                    f"{path} is no data.noun of WordNet: it has the line {line[:40]!r}"
                )
            offset, words = fields[0], int(fields[3], 16)
            names[offset] = f"{fields[4]}.{offset}"
            pointers = fields[5 + 2 * words :]
            kinds = zip(pointers[::4], pointers[1::4])
            parents[offset] = next((target for symbol, target in kinds if symbol in HYPERNYM), None)
    return {names[child]: parent and names[parent] for child, parent in parents.items()}


def read_glosses(path: str | Path) -> dict[str, str]:
    """What every noun synset means, without the examples; synsets are named as in `read_parents`."""
    found = {}
    with open(path, encoding="latin-1") as lines:
        for line in lines:
            if not line.startswith("  "):
                fields, gloss = line.split(" | ", 1)
                offset, _, _, _, word = fields.split()[:5]
                found[f"{word}.{offset}"] = gloss.split(";")[0].strip()
    return found


def sample_paths(
    parents: dict[str, str | None], depth: int, leaves: int, seed: int
) -> list[tuple[str, ...]]:
    """Paths from depth 1 to depth `depth`, of as many distinct nodes at that depth.

    Each is a random walk from the root, with equal chances for all children whose subtree is deep enough. Uniform
    choice of the leaf instead would leave almost only pairs that part near the root.

    Returns:
        Sorted tuples of `depth` names; the root, which all share, is left out.
    """
    children = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)
    (root,) = children.pop(None)
    reach = heights(children, root)
    draw, found = random.Random(seed), set()
    while len(found) < leaves:
        node, path = root, []
        for left in range(depth - 1, -1, -1):
            node = draw.choice([child for child in children[node] if reach[child] >= left])
            path.append(node)
        found.add(tuple(path))
    return sorted(found)


def heights(children: dict[str, list[str]], root: str) -> dict[str, int]:
    """The number of levels under every node."""
    order = [root]
    for node in order:
        order.extend(children.get(node, ()))
    reach: dict[str, int] = {}
    for node in reversed(order):
        reach[node] = max((1 + reach[child] for child in children.get(node, ())), default=0)
    return reach
