"""How much key-tied attention over windows attends to: blocks and tokens per query, counted without computing any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cover import Cover


def attended(length: int, sizes: Sequence[int], near: int, sinks: int, refine_top_k: int, is_causal: bool) -> int:
    """Logits that enter the softmax of one head, over all queries of a full pass without padding.

    Ordinary attention has length² of them, or length · (length + 1) / 2 where causal. A closed block counts once.
    The logits that refinement looks at and then replaces by those of the children are not among them: about
    refine_top_k more for every level and query.
    """
    cover = Cover(() if near >= length else tuple(sizes), near, sinks, refine_top_k, is_causal, length)
    windows = torch.arange(-(-length // cover.bottom()))  # queries of a window have one cover before refinement
    rows = (length - windows * cover.bottom()).clamp_max(cover.bottom())
    total, laid = torch.zeros_like(windows), torch.zeros_like(windows)
    for level in range(cover.top, 0, -1):
        index = torch.arange(cover.blocks(level))
        first, last = (edge[:, None] for edge in cover.moving(level, windows))
        closed = (index < cover.front(level)) | ((index >= first) & (index < last))
        closed &= ~cover.hidden(level, index, windows)
        single = (closed & (cover.sizes_of(level, index) == 1)).sum(1)  # never opened
        here = closed.sum(1) + laid
        opened = (here - single).clamp_max(refine_top_k)
        total += here - opened
        laid = opened * cover.branching(level)
    first, last = cover.moving(0, windows)
    seen = windows * cover.bottom() + rows if is_causal else torch.full_like(windows, length)
    front = torch.full_like(seen, cover.front(0))
    tokens = torch.minimum(front, seen) + (torch.minimum(last, seen) - torch.maximum(first, front)).clamp_min(0)
    later = rows * (rows - 1) // 2 if is_causal else 0  # of the own window
    return int((rows * (tokens + total + laid) - later).sum())
