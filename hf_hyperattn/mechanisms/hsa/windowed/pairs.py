"""How much key-tied attention over windows attends to: blocks and tokens per query, counted without computing any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cover import Cover


def attended(
    length: int, sizes: Sequence[int], near: int, sinks: int, refine_top_k: int, is_causal: bool
) -> int:
    """Logits that enter the softmax of one head, over all queries of a full pass without padding.

    Ordinary attention has length² of them, or length · (length + 1) / 2 where causal. A closed block counts once.
    The logits that refinement looks at and then replaces by those of the children are not among them: about
    refine_top_k more for every level and query.
    """
    flat = near >= length
    cover = Cover(() if flat else tuple(sizes), near, sinks, refine_top_k, is_causal, length)
    starts = torch.arange(0, length, cover.bottom())
    windows = starts // cover.bottom()
    total = torch.zeros(len(windows), dtype=torch.long)
    laid = torch.zeros_like(total)
    for level in range(cover.top, 0, -1):
        standing, single = closed(cover, level, windows)
        here = standing + laid
        opened = (here - single).clamp_max(refine_top_k)
        total += here - opened
        laid = opened * cover.branching(level)
    rows = (length - starts).clamp_max(cover.bottom())
    tokens = rows * (standing_tokens(cover, windows) + total + laid)
    hidden = rows * (rows - 1) // 2 if is_causal else 0  # the later tokens of the own window
    return int((tokens - hidden).sum())


def closed(cover: Cover, level: int, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Closed blocks of `level` before refinement, for each window; and those of one token, which are never opened."""
    found = []
    for window, index in zip(windows, _places(cover, level, windows)):
        here = ~cover.hidden(level, index[None], window[None])[0]
        found.append((int(here.sum()), int((here & (cover.sizes_of(level, index) == 1)).sum())))
    return tuple(torch.tensor(found).T)


def standing_tokens(cover: Cover, windows: torch.Tensor) -> torch.Tensor:
    """Tokens that stand in the cover of a window's last query before refinement."""
    last = ((windows + 1) * cover.bottom()).clamp_max(cover.tokens) if cover.is_causal else cover.tokens
    count = [int((index < (last[i] if cover.is_causal else last)).sum()) for i, index in
             enumerate(_places(cover, 0, windows))]  # fmt: skip
    return torch.tensor(count)


def _places(cover: Cover, level: int, windows: torch.Tensor):
    """The blocks of `level` whose parents are open, for each window."""
    front, blocks = cover.front(level), cover.blocks(level)
    first, last = cover.moving(level, windows)
    for a, b in zip(first.tolist(), last.tolist()):
        yield torch.cat([torch.arange(front), torch.arange(max(a, front), max(a, front, min(b, blocks)))])
