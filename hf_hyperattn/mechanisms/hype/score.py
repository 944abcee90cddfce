"""From positions, mu and tau to what is added to a score."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...engines.score import PairScore, Piece
from ...readable import can_read
from .bias import definition
from .columns import factors, fits
from .positions import from_first
from .term import COSH, SINH


def with_hype(
    score: PairScore,
    positions: tuple[Tensor, Tensor],
    mu: Tensor,
    tau: Tensor,
    form: str,
    reach: float | None,
    gate: Tensor | None = None,
) -> PairScore:
    """The score with HyPE as one more piece.

    Args:
        score: any score.
        positions: of queries [B|1, 1, N] and keys [B|1, 1, M], as they come.
        mu, tau: [H] or [1], in the dtype to compute in.
        form: "sinh" or "cosh".
        reach: the largest distance of two positions, where it is known without looking; None: no columns.
        gate: [H], what the bias is multiplied with.
    """
    (batch, heads, n, m), kv_heads = score.shape, score.kv_heads
    queries, keys = from_first(*positions, mu.dtype)
    columns, weight = None, tau if gate is None else tau * gate
    if reach is not None and can_read(mu, weight) and fits(mu, weight, reach, form):
        columns = partial(factors, queries, keys, mu, tau, form)
    piece = Piece(
        SINH if form == "sinh" else COSH,
        partial(definition, queries, keys, mu, tau, form),
        row=(queries.expand(batch, heads, n),),
        column=(keys.expand(batch, kv_heads, m),),
        head=(mu.expand(heads), tau.expand(heads)),
        gate=gate,
        columns=columns,
    )
    return score.plus(piece)
