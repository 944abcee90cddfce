"""Decide by position which blocks of a hierarchy are open to a query.

The rule is from arXiv 2509.15448; see docs/hsa.md. This module shows the rule of `near` and
`sinks`, shared by trees, exported programs, evicting caches, pair counts and sparse rules of nested
windows.

The definition in `reference.py` does not use this module, so that tests can compare the two. The
compiled kernel computes the same in `find_standing` (engines/cpu/listed/windows.h), as ranges of
windows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_open(first: Any, left: Any, right: Any, near: Any, sinks: Any) -> Any:
    """Return whether blocks are open to a query by their position.

    A block is open if it holds a first token, is near the query's own window, or shares a token
    with it. A block that is partly hidden from the query is open, too. The caller must add this
    rule. All arguments are integers, arrays or tensors that broadcast; the result is of the same
    kind.

    Args:
        first: Number of the first token of each block.
        left: Distance from the block's last token to the first token of the query's own window;
            less than 1 if the window begins in the block or before it.
        right: Distance from the window's last token to the block's first token; less than 1
            likewise.
        near: A block is open if its distance is less than this number of tokens.
        sinks: Number of first tokens of the text that open the blocks that hold them.
    """

    # A block lies on one side of the window. The distance on the other side is negative and always
    # passes.
    def is_within(limit):
        return (left < limit) & (right < limit)

    # With near=0, blocks that share a token with the window must still be open: their distances are
    # below 1.
    return (first < sinks) | is_within(near) | is_within(1)


def first_near(own: int, near: int) -> int:
    """Return the first token at a distance of less than `near` from a window.

    A block before the window is open if it ends at this token or later.

    Args:
        own: First token of the window.
        near: As in `is_open`.
    """
    return max(0, own - max(near, 1) + 1)


def is_seen(
    sizes: tuple[int, ...],
    level: int,
    index: Tensor,
    place: Tensor,
    near: int | Tensor,
    sinks: int | Tensor,
) -> Tensor:
    """Return bool: whether causal queries attend to blocks of one level.

    The blocks of level 0 are tokens. Windows are continued to the right: what a query sees does not
    depend on how many tokens follow.

    Args:
        sizes: Window sizes, bottom first.
        level: Level of the blocks.
        index: Numbers of the blocks, which count from a row's first real token.
        place: Places of the queries, which count likewise.
        near, sinks: As in `is_open`.
    """
    widths = (1, *sizes)
    start = place // sizes[0] * sizes[0]  # First token of the query's own window.

    def stands_open(level: int, index: Tensor) -> Tensor:
        first = index * widths[level]
        left = start - (first + widths[level] - 1)
        right = first - (start + sizes[0] - 1)
        return is_open(first, left, right, near, sinks)

    # A node is used if it is closed (or a token), and its parent is open.
    if level:
        seen = ((index + 1) * widths[level] <= start) & ~stands_open(level, index)
    else:
        seen = (index <= place) & (index >= 0)
    if level == len(sizes):
        return seen
    return seen & stands_open(level + 1, index // (widths[level + 1] // widths[level]))
