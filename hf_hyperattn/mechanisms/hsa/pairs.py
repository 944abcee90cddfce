"""How much key-tied attention over windows computes: blocks and tokens per query, counted without computing any."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=65536)
def pairs(
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
    first = torch.arange(0, length, bottom)[:, None]  # of every bottom window: its queries have the same cover
    rows = (length - first[:, 0]).clamp_max(bottom)
    total, laid = torch.zeros_like(rows), torch.zeros_like(rows)
    open_above = torch.ones(len(first), 1, dtype=torch.bool)
    levels = zip(reversed((1, *sizes[:-1])), reversed(sizes), (None, *reversed(sizes[1:])))
    for below, size, above in levels:
        start, own = torch.arange(0, length, size), first // size * size
        there = start < own if is_causal else start != own
        if above is not None:  # only the children of what is open stand here
            there &= open_above.repeat_interleave(above // size, 1)[:, : len(start)]
        close = (first - (start + size - 1) < near) & (start - (first + bottom - 1) < near)
        opened = there & (close | (start < sinks))
        closed = there & ~opened
        single = (closed & (start == length - 1)).sum(1)  # one token, at the ragged end: never opened
        free = closed.sum(1) + laid
        chosen = (free - single).clamp_max(top_k)
        if looked:
            total += free if compared else free - chosen
        laid = chosen * (size // below)
        open_above = opened | (start == own)
    tokens = (opened * (length - start).clamp_max(bottom)).sum(1) + laid
    own_window = rows * (rows + 1) // 2 if is_causal else rows * rows
    return int((rows * (total + tokens) + own_window).sum())
