"""How much key-tied attention over windows computes: blocks and tokens per query, counted without computing any."""

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
    """Logits that one head computes over all queries of a text: tokens, closed blocks, and what refinement looks at.

    Ordinary attention has length² of them, or length · (length + 1) / 2 where causal.

    Args:
        length: tokens of the text. sizes: of the windows, bottom first, each dividing the next.
        near, sinks, top_k: as in `HsaConfig`.
        dropped: whether closed blocks are dropped (block_bias -inf): without refinement nobody then looks at them.
        compared: False leaves out the blocks that refinement opens, whose logits those of their children replace: then
            it is the number of logits that enter the softmax.
    """
    if not sizes or near >= length:
        return length * (length + 1) // 2 if is_causal else length**2
    bottom, looked = sizes[0], top_k > 0 or not dropped
    first = np.arange(0, length, bottom)[
        :, None
    ]  # of every bottom window: its queries have the same cover
    rows = np.minimum(length - first[:, 0], bottom)
    total, laid, open_above = (
        np.zeros_like(rows),
        np.zeros_like(rows),
        np.ones((len(first), 1), bool),
    )
    levels = zip(reversed((1, *sizes[:-1])), reversed(sizes), (None, *reversed(sizes[1:])))
    for below, size, above in levels:
        start, own = np.arange(0, length, size), first // size * size
        there = start < own if is_causal else start != own
        if above is not None:  # only the children of what is open stand here
            there &= open_above.repeat(above // size, 1)[:, : len(start)]
        opened = there & is_open(
            start, first - (start + size - 1), start - (first + bottom - 1), near, sinks
        )
        closed = there & ~opened
        single = (closed & (start == length - 1)).sum(
            1
        )  # one token, at the ragged end: never opened
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
    """The logits of the last `queries` of `keys` tokens; arguments as in `count_pairs`."""
    count = lambda length: count_pairs(length, tuple(sizes), near, sinks, top_k, is_causal)
    if is_causal:
        return count(keys) - count(keys - queries)
    return count(keys) * queries / keys


def count_sibling_pairs(length: int, sizes: Sequence[int]) -> float:
    """Logits of tying="both" over windows: those of siblings, one for two blocks."""
    widths = (1, *(size for size in sizes if size < length), length)
    return sum(length / low * (high / low) for low, high in zip(widths, widths[1:]))
