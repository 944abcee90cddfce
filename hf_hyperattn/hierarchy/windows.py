"""Divide a sequence into fixed windows of several sizes.

Sizes stand bottom first, and each divides the next. This module shows which sizes are allowed,
and how windows become a tree or group ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..config.fields import MOST_INTEGER
from ..utils.text import short
from .tree import Tree


def checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return window sizes as a tuple.

    Raises:
        ValueError: A size below 2, or one that does not divide the next.
    """
    sizes = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    for size in sizes:
        # bool is a subclass of int.
        if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= MOST_INTEGER:
            allowed = f"integers of at least 2, and at most {MOST_INTEGER:,}, bottom first"
            raise ValueError(f"window size {short(size)} is not allowed; allowed: {allowed}")
    # Equal sizes would make windows with a single child, which is the same node.
    for small, large in zip(sizes, sizes[1:]):
        if large % small or large == small:
            raise ValueError(
                f"windows {short(sizes)}: {large} is no larger multiple of {small}; allowed: sizes bottom first, each "
                "dividing the next, such as (16, 64, 256)"
            )
    return sizes


@lru_cache(maxsize=32)
def windows_tree(leaves: int, sizes: tuple[int, ...]) -> Tree:
    """Return the tree of windows over tokens.

    Leaf i is in windows i // w_1, i // w_2, ... under the root.

    Args:
        leaves: Number of tokens.
        sizes: Window sizes w, bottom first.
    """
    parents, nodes = [], leaves
    below = torch.arange(leaves)
    for small, large in zip((1, *sizes), sizes, strict=False):
        parents.append(nodes + below // (large // small))
        # Round up: the last window of a level may be incomplete.
        below = torch.arange(-(-len(below) * small // large))
        nodes += len(below)
    parents.append(torch.full((len(below),), nodes))
    return Tree.from_parents(torch.cat([*parents, torch.tensor([-1])]))


def window_ids(places: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the group ids of tokens, coarse to fine, int64 [..., levels].

    Tokens with a negative place have -1.

    Args:
        places: int64 [...], the place of each token.
        sizes: Window sizes, bottom first.
    """
    # Coarse to fine: the largest windows first.
    widths = torch.tensor([*sizes][::-1], device=places.device)
    return torch.where(places[..., None] >= 0, places[..., None] // widths, -1)
