"""Choose the best scores, for sparse rules and for HSA's refinement."""

from __future__ import annotations

import torch
from torch import Tensor


def select_best(score: Tensor, candidates: Tensor, top: int) -> Tensor:
    """Return bool [..., X], the `top` best candidates; ties go to the first.

    Args:
        score: [..., X].
        candidates: Bool, broadcastable to `score`.
        top: Number to select, fewer if there are fewer candidates.
    """
    score = score.masked_fill(~candidates, -torch.inf)
    top = min(top, score.shape[-1])
    if not top:
        return torch.zeros_like(candidates).expand_as(score)
    # `topk` does not say which of several equal scores it returns. So only its threshold is used.
    least = score.topk(top, -1).values[..., -1:]
    above = score > least
    equal = score == least
    room = top - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))) & candidates
