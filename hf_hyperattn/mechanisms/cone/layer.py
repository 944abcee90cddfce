"""Cone attention inside a host: gamma and radius per query head, learned from their configured values."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import working_dtype
from ..base import Host, HostCall, MechanismLayer, Plan
from .config import ConeConfig
from .features import ConeSpace, alone, cone_piece, cone_score


class ConeLayer(MechanismLayer):
    """Blend: S + g·S_cone with g = 0 at first. Replace: S_cone.

    Parameters, one number per query head, all zero at first: `gate` g (blend only), `log_gamma` and `log_radius`,
    the logarithms of gamma and radius over their configured values.
    """

    honours_heads = True

    def __init__(self, config: ConeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.gate = self.per_head(host) if mode == "blend" else None
        self.log_gamma = self.per_head(host)
        self.log_radius = self.per_head(host)

    def change(self, plan: Plan) -> Plan:
        call = plan.call
        dtype = working_dtype(call.query, call.key)
        space = self.space(dtype, call.query.device)
        chosen = self.chosen(call.query)
        if self.mode == "replace" and chosen is None:
            return plan.change(score=cone_score(call.query, call.key, space))
        gate = chosen if self.mode == "replace" else self.gate if chosen is None else self.gate * chosen
        query, key, score = plan.base()
        piece, points = cone_piece(query, key, call.scale, space, gate.to(dtype))
        if self.mode == "blend":
            return plan.change(score=score.plus(piece, points))
        score = score.weighted(1 - chosen.to(dtype))
        return plan.change(score=score.plus(piece.changed(capped=True), points))

    def at_once(self, call: HostCall) -> Tensor | None:
        if self.log_gamma is not None:
            return None
        c = self.config
        found = alone(c.variant, c.resolved_mapping, c.squared, c.clamp_heights, c.gamma, c.radius)
        return found and found.attend(call.query, call.key, call.value, call.options)

    def space(self, dtype: torch.dtype, device) -> ConeSpace:
        """The cone's parameters as they stand, in the working dtype."""
        config = self.config
        gamma, radius = (
            _grown(start, log, dtype, device)
            for start, log in ((config.gamma, self.log_gamma), (config.radius, self.log_radius))
        )
        return ConeSpace(
            config.variant, config.resolved_mapping, config.squared, config.clamp_heights, gamma, radius
        )

    def identical(self) -> bool:
        return self.mode == "blend" and not bool(self.gate.any())


def _grown(start: float, log: Tensor | None, dtype: torch.dtype, device) -> Tensor:
    """start · exp(log), [H]; or [1] where nothing is learned."""
    base = torch.full((1,), start, dtype=dtype, device=device)
    return base if log is None else base * torch.exp(log.to(dtype))
