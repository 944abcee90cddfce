"""How many pairs key-tied attention over windows looks at, counted without computing any (docs/hsa.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch


@lru_cache(maxsize=65536)
def pairs(
    length: int, sizes: tuple[int, ...], near: int, sinks: int, top_k: int, dropped: bool = False
) -> int:
    """Logits that one causal head computes for a text: tokens, closed blocks, and every block that refinement looks at.

    Ordinary attention computes length · (length + 1) / 2.

    Args:
        length: tokens of the text. sizes: of the windows, bottom first, each dividing the next.
        near, sinks, top_k: as in `HsaConfig`.
        dropped: whether closed blocks are dropped (block_bias -inf): without refinement nobody then looks at them.
    """
    if not sizes or near >= length:
        return length * (length + 1) // 2
    bottom, looked = sizes[0], top_k > 0 or not dropped
    first = torch.arange(0, length, bottom)  # of every bottom window: its queries have the same cover
    rows = (length - first).clamp_max(bottom)
    total = torch.zeros_like(first)
    laid, open_above = torch.zeros_like(first), None
    for size, above in zip(reversed(sizes), (None, *reversed(sizes[1:]))):
        start = torch.arange(0, length, size)
        left = start[None] < (first // size * size)[:, None]
        if above is not None:  # only the children of what is open stand here
            left &= open_above.repeat_interleave(above // size, 1)[:, : len(start)]
        opened = left & ((first[:, None] - (start + size - 1) < near) | (start < sinks))
        free = (left & ~opened).sum(1) + laid
        chosen = free.clamp_max(top_k)
        total += free if looked else 0
        laid = chosen * (size // (sizes[sizes.index(size) - 1] if size != bottom else 1))
        open_above = opened | (start[None] == (first // size * size)[:, None])
    tokens = opened.sum(1) * bottom + laid
    return int((rows * (total + tokens) + rows * (rows + 1) // 2).sum())


def share(
    length: int, sizes: Sequence[int], near: int, sinks: int, top_k: int, dropped: bool = False
) -> float:
    """`pairs` in proportion to those of ordinary causal attention."""
    return pairs(length, tuple(sizes), near, sinks, top_k, dropped) / (length * (length + 1) / 2)
