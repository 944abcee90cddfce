"""Talking-heads attention (arXiv 2003.02436, section 3), dense, as in the paper.

    J_h = q_h · k_h (any score), bias included        logits of head h
    L   = P_l · J                                     mixed over heads; masks are applied afterwards
    W   = softmax_with_sinks(L)
    U   = P_w · W                                     mixed over heads; rows need not sum to 1 or be
    positive
    o_h = U_h V_h                                     dropout applies to U

P_l and P_w are [H, H] over the query heads: row h holds the share of each head in head h. A P_l
with fewer rows, [H', H], leaves H' heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.options import Options
from ...engines.reference import apply_dropout, hide_pairs, softmax_with_sinks, total_logits
from ...engines.score import PairScore, repeat_heads
from ...geometry.scalars import at_least

#: Least bias. Such logits are practically hidden; smaller ones would overflow float32 when mixed.
LOWEST = -1e30


def mix_heads(matrix: Tensor | None, x: Tensor) -> Tensor:
    """Multiply [H', H] with [B, H, N, M] over heads; None is the identity."""
    return x if matrix is None else torch.einsum("hg,bgnm->bhnm", matrix, x)


def attend(
    score: PairScore, value: Tensor, options: Options, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute talking-heads attention by definition, dense.

    Args:
        score: Pair score with features [B, H, N, d] and [B, Hkv, M, d].
        value: Shape [B, Hkv, M, dv], where Hkv divides the number of heads after mixing.
        options: Masks and other options; all except `bias` and `softcap` apply to the mixed logits.
        before: P_l, shape [H, H]; None means the identity.
        after: P_w, shape [H, H]; None means the identity.

    Returns:
        Output [B, H, N, dv], and U [B, H, N, M] before dropout, in the dtype of the computation. A
        query that sees no key gets zeros.
    """
    logits = total_logits(score, options.softcap)
    if options.bias is not None:
        logits = logits + at_least(options.bias, LOWEST)
    logits = hide_pairs(mix_heads(before, logits), options)
    # Rows that see no key get finite logits before the softmax and weight 0 after it. A softmax
    # over -inf only would give gradients of nan.
    empty = (logits == float("-inf")).all(-1, keepdim=True)
    weights = softmax_with_sinks(logits.masked_fill(empty, 0.0), options.sinks).masked_fill(
        empty, 0.0
    )
    weights = mix_heads(after, weights)
    value = repeat_heads(value.to(weights.dtype), weights.shape[1])
    return apply_dropout(weights, options) @ value, weights
