"""Talking heads in an attention layer: learned mixing of logits and weights.

Mixing starts as the identity.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..base import Host, MechanismLayer, Plan
from .config import TalkingHeadsConfig
from .operator import talking_heads


class TalkingHeadsLayer(MechanismLayer):
    """Mix heads by P_l = 1 + `before` and P_w = 1 + `after`, around any softmax.

    Parameters: `before` and `after`, each [heads, heads], initialised to zero, which is the
    identity. With `heads=`, only the chosen heads mix among themselves.
    """

    honours_heads = True
    mixes_queries = False

    def __init__(self, config: TalkingHeadsConfig, host: Host, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        count = host.heads if heads is None else len(heads)
        self.before = nn.Parameter(torch.zeros(count, count)) if config.before else None
        self.after = nn.Parameter(torch.zeros(count, count)) if config.after else None

    def change(self, plan: Plan) -> Plan:
        heads, dtype = plan.call.query.shape[1], plan.score.dtype
        before, after = (
            self.make_matrix(delta, heads, dtype) for delta in (self.before, self.after)
        )
        return plan.change(attend=partial(talking_heads, before=before, after=after))

    def make_matrix(self, delta: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mixing matrix [H, H], or None if there is no mixing.

        It is 1 + delta for the chosen heads and the identity for the others.
        """
        if delta is None:
            return None
        identity = torch.eye(heads, dtype=dtype, device=delta.device)
        delta = delta.to(dtype)
        if self.heads is None:
            return identity + delta
        index = torch.tensor(self.heads, device=delta.device)
        return identity.index_put((index[:, None], index[None]), delta, accumulate=True)

    def identical(self) -> bool:
        deltas = (delta for delta in (self.before, self.after) if delta is not None)
        return not any(bool(delta.any()) for delta in deltas)
