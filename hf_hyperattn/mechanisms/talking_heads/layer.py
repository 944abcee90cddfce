"""Talking heads inside a host: the mixing of logits and of weights, learned from the identity."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..base import Host, MechanismLayer, Plan
from .config import TalkingHeadsConfig
from .operator import talking_heads


class TalkingHeadsLayer(MechanismLayer):
    """P_l = 1 + `before`, P_w = 1 + `after`, in front of and behind the softmax of whatever the score is.

    Parameters: `before` and `after`, [heads, heads] each, or of those in `heads=` alone, which mix among themselves;
    zero at first, which is the identity.
    """

    honours_heads = True

    def __init__(self, config: TalkingHeadsConfig, host: Host, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        count = host.heads if heads is None else len(heads)
        self.before = nn.Parameter(torch.zeros(count, count)) if config.before else None
        self.after = nn.Parameter(torch.zeros(count, count)) if config.after else None

    def change(self, plan: Plan) -> Plan:
        heads, dtype = plan.call.query.shape[1], plan.score.dtype
        before, after = (self.matrix(delta, heads, dtype) for delta in (self.before, self.after))
        return plan.change(attend=partial(talking_heads, before=before, after=after))

    def matrix(self, delta: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
        """1 + delta at the selected heads and 1 elsewhere, [H, H]; None where these heads are not mixed."""
        if delta is None:
            return None
        one, delta = torch.eye(heads, dtype=dtype, device=delta.device), delta.to(dtype)
        if self.heads is None:
            return one + delta
        index = torch.tensor(self.heads, device=delta.device)
        return one.index_put((index[:, None], index[None]), delta, accumulate=True)

    def identical(self) -> bool:
        return not any(
            bool(delta.any()) for delta in (self.before, self.after) if delta is not None
        )
