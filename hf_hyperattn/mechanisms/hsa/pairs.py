"""Count the logits of tied attention over windows.

This module shows how near, sinks, refinement and window sizes determine the cost of HSA.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .open_blocks import is_open


@lru_cache(maxsize=65536)
def count_pairs(
    length: int,
    sizes: tuple[int, ...],
    near: int,
    sinks: int,
    top_k: int,
    is_causal: bool = True,
    *,
    dropped: bool = False,
    compared: bool = True,
) -> int:
    """Return the number of logits of one head over all queries.

    These are logits of tokens, of closed blocks and of refinement candidates. Ordinary attention
    has length² logits, or length · (length + 1) / 2 if causal.

    Args:
        length: Number of tokens of the text.
        sizes: Window sizes, bottom first, each dividing the next.
        near, sinks, top_k: As in `HsaConfig`; `top_k` is `refine_top_k`.
        is_causal: Whether attention is causal.
        dropped: Whether closed blocks are dropped (block_bias -inf). Without refinement, their
            logits are not needed.
        compared: If False, leave out blocks that refinement opens, because logits of their children
            replace theirs. The result is then the number of logits in the softmax.
    """
    if not sizes or near >= length:
        return length * (length + 1) // 2 if is_causal else length**2
    bottom = sizes[0]
    looked = top_k > 0 or not dropped
    # All queries of a bottom window have the same cover, so count once for each window: `rows` is
    # its queries.
    first = np.arange(0, length, bottom)[:, None]
    rows = np.minimum(length - first[:, 0], bottom)

    # From the top level down. `laid` counts the children of blocks that refinement opened on the
    # level above.
    total = np.zeros_like(rows)
    laid = np.zeros_like(rows)
    open_above = np.ones((len(first), 1), bool)
    levels = zip(reversed((1, *sizes[:-1])), reversed(sizes), (None, *reversed(sizes[1:])))
    for below, size, above in levels:
        start = np.arange(0, length, size)
        own = first // size * size
        there = start < own if is_causal else start != own
        if above is not None:
            # Only children of open blocks are in the cover.
            there &= open_above.repeat(above // size, 1)[:, : len(start)]
        left = first - (start + size - 1)
        right = start - (first + bottom - 1)
        opened = there & is_open(start, left, right, near, sinks)
        closed = there & ~opened
        # A block of one token, at the ragged end, is that token: refinement never opens it.
        single = (closed & (start == length - 1)).sum(1)
        free = closed.sum(1) + laid
        chosen = np.minimum(free - single, top_k)
        if looked:
            total += free if compared else free - chosen
        laid = chosen * (size // below)
        open_above = opened | (start == own)
    tokens = (opened * np.minimum(length - start, bottom)).sum(1) + laid
    own_window = rows * (rows + 1) // 2 if is_causal else rows * rows
    return int((rows * (total + tokens) + own_window).sum())


def count_query_pairs(
    queries: int,
    keys: int,
    sizes: Sequence[int],
    near: int,
    sinks: int,
    top_k: int,
    is_causal: bool,
) -> float:
    """Return the number of logits of the last `queries` of `keys` tokens.

    Args:
        queries, keys: Numbers of queries and keys.
        sizes, near, sinks, top_k, is_causal: As in `count_pairs`.
    """

    def count_text(length: int) -> int:
        return count_pairs(length, tuple(sizes), near, sinks, top_k, is_causal)

    if is_causal:
        # Windows are continued to the right, so earlier queries have the same logits without the
        # last ones.
        return count_text(keys) - count_text(keys - queries)
    return count_text(keys) * queries / keys


def count_sibling_pairs(length: int, sizes: Sequence[int]) -> float:
    """Return the number of logits of tying="both" over windows.

    Each pair of siblings has one logit.

    Args:
        length: Number of tokens.
        sizes: Window sizes, bottom first.
    """
    widths = (1, *(size for size in sizes if size < length), length)
    return sum(length / low * (high / low) for low, high in zip(widths, widths[1:]))
