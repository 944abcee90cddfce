"""Define attention by a dense, differentiable implementation.

Every other engine must agree with it. It evaluates the definitions of the score's terms and nothing
else, in float64 if an input has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .options import Options, position_mask
from .score import PairScore, repeat_heads


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Compute softmax(S)·V with the full matrix of logits.

    Args:
        score: Pair score; only the definitions of its terms are evaluated.
        value: Values [B, Hkv, M, dv].
        options: Masks and further settings, see `Options`.

    Returns:
        The output [B, H, N, dv] and the weights [B, H, N, M] before dropout, both in the working
        dtype. Queries that see no key get zeros.
    """
    weights = softmax_with_sinks(visible_logits(score, options), options.sinks)
    value = repeat_heads(value.to(weights.dtype), weights.shape[1])
    return apply_dropout(weights, options) @ value, weights


def visible_logits(score: PairScore, options: Options) -> Tensor:
    """Return the score's logits plus bias [B, H, N, M], with -inf at hidden pairs."""
    logits = total_logits(score, options.softcap)
    return hide_pairs(logits if options.bias is None else logits + options.bias, options)


def hide_pairs(logits: Tensor, options: Options, rows: tuple[int, int] | None = None) -> Tensor:
    """Add the masks to logits and set hidden pairs to -inf.

    Args:
        logits: Logits [B, H, R, M].
        options: The masks, causality and window.
        rows: The queries [start, stop) of these logits; None (default) for all queries.

    Returns:
        Logits [B, H, R, M].
    """
    mask = options.mask if rows is None else slice_rows(options.mask, rows)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, float("-inf")) if is_bool else logits + mask
    visible = position_mask(
        options, rows or (0, logits.shape[-2]), (0, logits.shape[-1]), logits.device
    )
    return logits if visible is None else logits.masked_fill(~visible, float("-inf"))


def slice_rows(t: Tensor | None, rows: tuple[int, int]) -> Tensor | None:
    """Return the part of a mask or bias [..., N|1, M] for these rows."""
    if t is None or t.dim() < 2 or t.shape[-2] == 1:
        return t
    return t[..., slice(*rows), :]


def apply_dropout(weights: Tensor, options: Options) -> Tensor:
    """Return the weights after dropout."""
    return torch.nn.functional.dropout(weights, options.dropout_p) if options.dropout_p else weights


def total_logits(score: PairScore, softcap: float | None = None) -> Tensor:
    """Return the sum of the terms times their gates, [B, H, N, M].

    Args:
        score: The pair score.
        softcap: Replaces the first term S, and others with `capped`, by c·tanh(S/c). Default: no
            cap.
    """
    logits: Any = 0.0  # a tensor from the first term on
    for index, term in enumerate(score.terms):
        part = term.definition()
        if (index == 0 or term.capped) and softcap is not None:
            part = softcap * torch.tanh(part / softcap)
        logits = logits + (part if term.gate is None else term.gate[:, None, None] * part)
    return logits


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the softmax over the last axis; rows of only -inf give zeros.

    Args:
        logits: Logits [B, H, N, M].
        sinks: One extra logit per head [H] that is in the sum but gets no column. Default: none.
    """
    # amax has no value for zero keys. The empty sum gives 0 there.
    top = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.sum(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(logits.dtype)[:, None, None]
        top = torch.maximum(top, sinks)
    # The maximum cancels, so it needs no gradient. Clamping avoids -inf - -inf = NaN in rows that
    # see nothing.
    top = top.detach().clamp_min(torch.finfo(logits.dtype).min)
    e = torch.exp(logits - top)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    # Empty rows divide by 1, not by a tiny number: the gradient would be infinite, and infinity
    # times 0 is NaN.
    return e / torch.where(total > 0, total, 1.0)
