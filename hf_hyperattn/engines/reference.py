"""The specification: dense, differentiable, float64-capable. Every other engine must agree with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .options import Options, position_mask
from .score import PairScore, repeat_heads


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """softmax(S)·V with the full matrix of logits.

    Args:
        score: the pair score; its terms' definitions are what is evaluated.
        value: [B, Hkv, M, dv].
        options: masks and the rest, see `Options`.

    Returns:
        The output [B, H, N, dv] and the weights [B, H, N, M] before dropout, both in the working dtype. A query that
        sees no key gets zeros.
    """
    weights = softmax(visible_logits(score, options), options.sinks)
    return dropout(weights, options) @ repeat_heads(
        value.to(weights.dtype), weights.shape[1]
    ), weights


def visible_logits(score: PairScore, options: Options) -> Tensor:
    """[B, H, N, M]: the score's logits, plus bias, hidden pairs at -inf."""
    logits = total_logits(score, options.softcap)
    return hide(logits if options.bias is None else logits + options.bias, options)


def hide(logits: Tensor, options: Options, rows: tuple[int, int] | None = None) -> Tensor:
    """Logits [B, H, R, M] with masks added, hidden pairs at -inf.

    Args:
        rows: the queries [start, stop) that these logits are of; None for all.
    """
    mask = options.mask if rows is None else of_rows(options.mask, rows)
    if mask is not None:
        logits = (
            logits + mask if mask.dtype != torch.bool else logits.masked_fill(~mask, float("-inf"))
        )
    visible = position_mask(
        options, rows or (0, logits.shape[-2]), (0, logits.shape[-1]), logits.device
    )
    return logits if visible is None else logits.masked_fill(~visible, float("-inf"))


def of_rows(t: Tensor | None, rows: tuple[int, int]) -> Tensor | None:
    """What a mask or bias [..., N|1, M] has for these rows."""
    return t if t is None or t.dim() < 2 or t.shape[-2] == 1 else t[..., slice(*rows), :]


def dropout(weights: Tensor, options: Options) -> Tensor:
    """The weights after dropout."""
    return torch.nn.functional.dropout(weights, options.dropout_p) if options.dropout_p else weights


def total_logits(score: PairScore, softcap: float | None = None) -> Tensor:
    """[B, H, N, M]: the terms times their gates, the first one capped by c·tanh(S/c) where asked."""
    logits: Any = 0.0  # a tensor from the first term on
    for index, term in enumerate(score.terms):
        part = term.definition()
        if (index == 0 or term.capped) and softcap is not None:
            part = softcap * torch.tanh(part / softcap)
        logits = logits + (part if term.gate is None else term.gate[:, None, None] * part)
    return logits


def softmax(logits: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last axis, with one extra logit per head where sinks are given; all -inf gives zeros."""
    top = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.sum(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(logits.dtype)[:, None, None]
        top = torch.maximum(top, sinks)
    top = top.detach().clamp_min(torch.finfo(logits.dtype).min)
    e = torch.exp(logits - top)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    # not the smallest number: the gradient divided by that would be infinite, and infinity times 0 is no number
    return e / torch.where(total > 0, total, 1.0)
