"""HyPE as a term of a score, and inside a host: mu and tau per query head, learned from their configured values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engines.score import PairScore, ScoreTerm
from ...readable import can_read
from ..base import Host, HostCall, Plan
from ..score_layer import ScoreLayer
from .columns import factors, fits
from .config import HypeConfig
from .positions import from_first, of_call
from .reference import definition
from .terms import COSH, SINH


def with_hype(
    score: PairScore,
    positions: tuple[Tensor, Tensor],
    mu: Tensor,
    tau: Tensor,
    form: str,
    reach: float | None,
    gate: Tensor | None = None,
) -> PairScore:
    """The score with HyPE as one more term.

    Args:
        score: any score.
        positions: of queries [B|1, 1, N] and keys [B|1, 1, M], as they come.
        mu, tau: [H] or [1], in the dtype to compute in.
        form: "sinh" or "cosh".
        reach: the largest distance of two positions, where it is known without looking; None: no low-rank factors.
        gate: [H], what the bias is multiplied with.
    """
    (batch, heads, n, m), kv_heads = score.shape, score.kv_heads
    queries, keys = from_first(*positions, mu.dtype)
    low_rank, weight = None, tau if gate is None else tau * gate
    if reach is not None and can_read(mu, weight) and fits(mu, weight, reach, form):
        low_rank = partial(factors, queries, keys, mu, tau, form)
    term = ScoreTerm(
        SINH if form == "sinh" else COSH,
        partial(definition, queries, keys, mu, tau, form),
        row=(queries.expand(batch, heads, n),),
        column=(keys.expand(batch, kv_heads, m),),
        head=(mu.expand(heads), tau.expand(heads)),
        gate=gate,
        low_rank_factors=low_rank,
    )
    return score.plus(term)


class HypeLayer(ScoreLayer):
    """Blend: S + g·bias with g = 0 at first. Replace: S + bias.

    Parameters, one number per query head, all zero at first: `gate` g (blend only), `log_mu` and `log_tau`, the
    logarithms of mu and tau over their configured values. tau keeps its sign: a bias that rewards distance is not
    reached by learning (in blend the gate may turn it round).

    Raises:
        ValueError: the config has numbers for another count of heads, or neither it nor the model's says a length.
    """

    learned = ("mu", "tau")
    counts_keys = True

    def __init__(self, config: HypeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.host = host
        if host is not None:
            self.config = config.for_model(host.config)
            self.config.start("sinh", host.heads)

    def forward(self, plan: Plan) -> Plan:
        return plan if self.idle() else self.change(plan)

    def change(self, plan: Plan) -> Plan:
        call, score = plan.call, plan.score
        form = self.config.form or ("sinh" if call.is_causal else "cosh")
        dtype = score.dtype
        mu, tau = self.start(form, call, dtype)
        gate = self.gate_heads(self.gate, call, dtype)
        score = with_hype(
            score, of_call(call, self.host), mu, tau, form, reach=call.key.shape[2], gate=gate
        )
        return replace(plan, score=score)

    def start(self, form: str, call: HostCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """mu and tau as they stand, [H] or, where they are one number and not learned, [1]."""
        rank, device = call.heads, call.query.device
        starts = self.config.start(form, call.query.shape[1] if rank is None else rank.total)
        if rank is not None:
            starts = tuple(
                x if len(x) == 1 else x[rank.first : rank.first + rank.count] for x in starts
            )
        starts = (torch.tensor(x, dtype=dtype, device=device) for x in starts)
        logs: tuple[Any, Any] = self.log_mu, self.log_tau
        mu, tau = (
            x if log is None else x * torch.exp(log.to(dtype))
            for x, log in zip(starts, logs, strict=True)
        )
        return mu, tau
