"""HyPE inside a host: mu and tau per query head, learned from their configured values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Host, MechanismLayer, Plan
from .config import HypeConfig
from .positions import of_call
from .score import with_hype


class HypeLayer(MechanismLayer):
    """Blend: S + g·bias with g = 0 at first. Replace: S + bias.

    Parameters, one number per query head, all zero at first: `gate` g (blend only), `log_mu` and `log_tau`, the
    logarithms of mu and tau over their configured values. tau keeps its sign: a bias that rewards distance is not
    reached by learning (in blend the gate may turn it round).

    Raises:
        ValueError: the config has numbers for another count of heads, or neither it nor the model's says a length.
    """

    honours_heads = True

    def __init__(self, config: HypeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.host = "this layer" if host is None else host.name
        if host is not None:
            self.config = config.for_model(host.config)
            self.config.start("sinh", host.heads)
        self.gate = self.per_head(host) if mode == "blend" else None
        self.log_mu = self.per_head(host)
        self.log_tau = self.per_head(host)

    def change(self, plan: Plan) -> Plan:
        call, score = plan.call, plan.score
        form = self.config.form or ("sinh" if call.is_causal else "cosh")
        dtype = score.dtype
        chosen = self.chosen(call.query)
        total, first = call.heads or (call.query.shape[1], 0)
        mu, tau = self.start(form, total, dtype, call.query.device)
        mu, tau = (x if len(x) == 1 else x[first : first + call.query.shape[1]] for x in (mu, tau))
        gate = chosen if self.gate is None else self.gate if chosen is None else self.gate * chosen
        gate = None if gate is None else gate.to(dtype)
        score = with_hype(score, of_call(call, self.host), mu, tau, form, reach=call.key.shape[2], gate=gate)
        return plan.change(score=score)

    def start(self, form: str, heads: int, dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
        """mu and tau as they stand, [H] or, where they are one number and not learned, [1]."""
        starts = (torch.tensor(x, dtype=dtype, device=device) for x in self.config.start(form, heads))
        logs = self.log_mu, self.log_tau
        mu, tau = (
            x if log is None else x * torch.exp(log.to(dtype)) for x, log in zip(starts, logs, strict=True)
        )
        return mu, tau

    def identical(self) -> bool:
        return self.mode == "blend" and not bool(self.gate.any())
