"""Which blocks of a hierarchy are open to a query by where they stand (arXiv 2509.15448; docs/hsa.md).

The definition in `reference.py` stands by itself. The compiled kernel computes the same in `find_standing`
(engines/cpu/listed/windows.h), as ranges of windows. Everything else asks here: attention by trees, exported programs,
caches that forget, counts of pairs, and sparse rules of nested windows.
"""

from __future__ import annotations

from typing import Any


def is_open(first: Any, left: Any, right: Any, near: Any, sinks: Any) -> Any:
    """Return whether blocks are open: they hold a first token, lie near the query's own window, or hold a token of it.

    A block that is hidden in part from the query is open, too; what is hidden, the caller knows. All arguments are
    integers, arrays or tensors that broadcast; the result is of their kind.

    Args:
        first: the number of the first token of each block.
        left: how far the query's own window lies behind the block's last token, from token to token; less than 1 where
            the window begins in the block or before it.
        right: how far the block's first token lies behind the window's last token, likewise.
        near: a block is open if its distance is less than this number of tokens.
        sinks: how many of the first tokens of the text open the blocks that hold them.
    """
    is_within = lambda limit: (left < limit) & (right < limit)
    return (first < sinks) | is_within(near) | is_within(1)


def first_near(own: int, near: int) -> int:
    """Return the first token at a distance of less than `near` from a window that begins with token `own`.

    A block before the window is open if it ends at this token or later.
    """
    return max(0, own - max(near, 1) + 1)
