"""Talking-heads attention (arXiv 2003.02436, section 3), dense, as the paper has it.

    J_h = q_h · k_h (any score), bias included        logits of head h
    L   = P_l · J                                     mixed over heads; masks come after it
    W   = softmax(L)
    U   = P_w · W                                     mixed over heads; rows need not sum to 1, nor be positive
    o_h = U_h V_h                                     dropout acts on U

P_l, P_w are [H, H] over the query heads: row h says what head h takes from each head. A P_l of fewer rows, [H', H],
leaves so many heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.options import Options
from ...engines.reference import apply_dropout, hide_pairs, softmax_with_sinks, total_logits
from ...engines.score import PairScore, repeat_heads
from ...geometry.scalars import at_least

#: Logits below this are hidden in all but name; larger sizes would leave float32 when heads are mixed.
LOWEST = -1e30


def mix(matrix: Tensor | None, x: Tensor) -> Tensor:
    """[H', H] times [B, H, N, M] over heads; None is the identity."""
    return x if matrix is None else torch.einsum("hg,bgnm->bhnm", matrix, x)


def attend(
    score: PairScore, value: Tensor, options: Options, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition, dense.

    Args:
        score: the pair score, features [B, H, N, d] and [B, Hkv, M, d].
        value: [B, Hkv, M, dv], Hkv dividing the heads after mixing.
        options: masks and the rest; all but `bias` and `softcap` act on the mixed logits.
        before, after: P_l and P_w, [H, H]; None for the identity.

    Returns:
        The output [B, H, N, dv] and U [B, H, N, M] before dropout, in the working dtype. A query that sees no key
        gets zeros.
    """
    logits = total_logits(score, options.softcap)
    if options.bias is not None:
        logits = logits + at_least(options.bias, LOWEST)
    logits = hide_pairs(mix(before, logits), options)
    empty = (logits == float("-inf")).all(
        -1, keepdim=True
    )  # of finite numbers, so that gradients are finite
    weights = softmax_with_sinks(logits.masked_fill(empty, 0.0), options.sinks).masked_fill(
        empty, 0.0
    )
    weights = mix(after, weights)
    return apply_dropout(weights, options) @ repeat_heads(
        value.to(weights.dtype), weights.shape[1]
    ), weights
