"""Add HyPE to a score, and provide the HyPE layer of a patched model.

Here you learn how the bias becomes one more term of any score, and how each head learns mu and tau.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...engines.score import TERMS, PairScore, ScoreTerm
from ...utils.readable import can_read
from ..base import Host, HostCall, MechanismLayer, Plan
from ..positions import read_positions, subtract_first
from ..score_layer import ScoreLayer
from .columns import are_sums_exact, make_factors
from .config import HypeConfig
from .reference import definition


def with_hype(
    score: PairScore,
    positions: tuple[Tensor, Tensor],
    mu: Tensor,
    tau: Tensor,
    form: str,
    reach: float | None,
    gate: Tensor | None = None,
) -> PairScore:
    """Return the score with HyPE as one more term.

    Args:
        score: Any score.
        positions: Positions of queries [B|1, 1, N] and keys [B|1, 1, M].
        mu, tau: Parameters [H] or [1], in the dtype of the computation.
        form: "sinh" or "cosh".
        reach: Largest distance between two positions, if it is known without reading them. None: no
            low-rank factors.
        gate: Weight of the bias [H]. None (default): 1.
    """
    batch, heads, n, m = score.shape
    queries, keys = subtract_first(*positions, mu.dtype)
    arguments = queries, keys, mu, tau, form
    weight = tau if gate is None else tau * gate
    low_rank = None
    if reach is not None and can_read(mu, weight) and are_sums_exact(mu, weight, reach, form):
        low_rank = partial(make_factors, *arguments)
    term = ScoreTerm(
        TERMS[f"hype_{form}"],
        partial(definition, *arguments),
        row=(queries.expand(batch, heads, n),),
        column=(keys.expand(batch, score.kv_heads, m),),
        head=(mu.expand(heads), tau.expand(heads)),
        gate=gate,
        low_rank_factors=low_rank,
    )
    return score.plus(term)


class HypeLayer(ScoreLayer):
    """HyPE in an attention layer with the score S.

    Blend computes S + g·bias, with g = 0 at the start. Replace computes S + bias.

    Parameters, one number per query head, all zero at the start: `gate` g (blend only), `log_mu` and
    `log_tau`. The latter are the logarithms of mu and tau over their configured values. Therefore
    tau keeps its sign: no learned tau rewards distance. In blend, a negative gate does.

    Raises:
        ValueError: The config has numbers for another count of heads, or neither it nor the model's
            config has a length.
    """

    learned = ("mu", "tau")
    counts_keys = True

    def __init__(self, config: HypeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.host = host
        if host is not None:
            self.config = config.for_model(host.config)
            self.config.compute_starts("sinh", host.heads)

    # Not the forward of `ScoreLayer`: the bias is added to the score in both modes.
    forward = MechanismLayer.forward

    def change(self, plan: Plan) -> Plan:
        call = plan.call
        form = self.config.form or ("sinh" if call.is_causal else "cosh")
        dtype = plan.score.dtype
        mu, tau = self.compute_parameters(form, call, dtype)
        score = with_hype(
            plan.score,
            read_positions(call, self.host, "hype"),
            mu=mu,
            tau=tau,
            form=form,
            reach=call.key.shape[2],
            gate=self.gate_heads(self.gate, call, dtype),
        )
        return replace(plan, score=score)

    def compute_parameters(
        self, form: str, call: HostCall, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the current mu and tau, each [H], or [1] if it is one number and not learned.

        Args:
            form: "sinh" or "cosh".
            call: Call of the attention layer.
            dtype: Dtype of the tensors.
        """
        starts = self.config.compute_starts(form, call.total_heads)
        mu, tau = (
            self.compute_number(name, self.make_start(start, call, dtype), dtype)
            for name, start in zip(self.learned, starts, strict=True)
        )
        return mu, tau
