"""Hyperbolic-distance attention inside a host: curvature and temperature per query head, learned from their
configured values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...engines import repeat_heads, working_dtype
from ..base import Host, MechanismLayer, Plan
from .config import HyperbolicConfig
from .features import HyperbolicSpace, hyperbolic_piece, hyperbolic_score, with_own_keys
from .midpoint import midpoint, midpoint_columns


class HyperbolicLayer(MechanismLayer):
    """Blend: S + g·S_hyperbolic and (1 - g')·mean + g'·midpoint with g = g' = 0 at first. Replace: S_hyperbolic and
    the midpoint. Vectors are scaled with 1/sqrt(d), whatever the host's scaling is.

    Parameters, one number per query head, all zero at first: `gate` g (blend only), `midpoint_gate` g' (blend with
    aggregation="einstein" only), `log_curvature` and `log_temperature`, the logarithms of c and τ over their
    configured values.
    """

    honours_heads = True

    def __init__(self, config: HyperbolicConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        einstein = config.aggregation == "einstein"
        self.gate = self.per_head(host) if mode == "blend" else None
        self.midpoint_gate = self.per_head(host) if mode == "blend" and einstein else None
        self.log_curvature = self.per_head(host)
        self.log_temperature = self.per_head(host)

    def change(self, plan: Plan) -> Plan:
        call = plan.call
        dtype = working_dtype(call.query, call.key)
        space = self.space(call.query, dtype)
        chosen = self.chosen(call.query)
        plan = plan.change(score=self.score(plan, space, chosen, dtype))
        return self.aggregate(plan, space, chosen, dtype) if self.config.aggregation == "einstein" else plan

    def score(self, plan: Plan, space: HyperbolicSpace, chosen: Tensor | None, dtype: torch.dtype):
        """The plan's score with the hyperbolic one in it, or in its place."""
        call = plan.call
        if self.mode == "replace" and chosen is None:
            return hyperbolic_score(call.query, call.key, space)
        gate = self.weight(self.gate, chosen).to(dtype)
        query, key, score = plan.base()
        piece, points = hyperbolic_piece(query, key, call.scale, space, gate)
        if self.mode == "blend":
            return score.plus(piece, points)
        return score.weighted(1 - gate).plus(replace(piece, capped=True), points)

    def aggregate(self, plan: Plan, space: HyperbolicSpace, chosen: Tensor | None, dtype: torch.dtype):
        """The plan with midpoints for means, or blended with them."""
        columns = midpoint_columns(plan.value.to(dtype), space.curvature, space.scale)
        sinks = plan.options.sinks is not None
        width, heads = plan.value.shape[-1], columns.shape[1]
        if self.mode == "replace" and chosen is None:
            gate = None
        else:
            gate = self.weight(self.midpoint_gate, chosen).to(dtype)[:, None, None]
            columns = torch.cat([repeat_heads(plan.value.to(dtype), heads), columns], dim=-1)

        def after(out: Tensor) -> Tensor:
            if gate is None:
                return midpoint(out, space.curvature, space.scale, sinks)
            mean = out[..., :width]
            return mean + gate * (midpoint(out[..., width:], space.curvature, space.scale, sinks) - mean)

        return plan.change(score=with_own_keys(plan.score, heads), value=columns, after=(*plan.after, after))

    def weight(self, gate: Tensor | None, chosen: Tensor | None) -> Tensor:
        """How much of the mechanism each head gets: its gate, if it has one, at the heads that are changed."""
        return chosen if gate is None else gate if chosen is None else gate * chosen

    def space(self, query: Tensor, dtype: torch.dtype) -> HyperbolicSpace:
        """The space's parameters as they stand, in the working dtype."""
        config = self.config
        curvature, temperature = (
            _grown(start, log, dtype, query.device)
            for start, log in (
                (config.curvature, self.log_curvature),
                (config.temperature, self.log_temperature),
            )
        )
        return HyperbolicSpace(config.distance, query.shape[-1] ** -0.5, curvature, temperature)

    def identical(self) -> bool:
        gates = (self.gate, self.midpoint_gate)
        return self.mode == "blend" and not any(bool(g.any()) for g in gates if g is not None)


def _grown(start: float, log: Tensor | None, dtype: torch.dtype, device) -> Tensor:
    """start · exp(log), [H]; or [1] where nothing is learned."""
    base = torch.full((1,), start, dtype=dtype, device=device)
    return base if log is None else base * torch.exp(log.to(dtype))
