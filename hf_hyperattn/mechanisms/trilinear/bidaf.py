"""BiDAF's pairwise trilinear score inside a host (arXiv 1611.01603, equation 1)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ...engines import DOT, PairScore, ScoreTerm, working_dtype
from ..base import Host, MechanismLayer, Plan
from .definition import bidaf_scores


class BidafLayer(MechanismLayer):
    """S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j), which starts as the host's own score, in either mode.

    It is one dot product, (w_3 ∘ q_i + w_2)·k_j, with w_1·q_i added to the whole row. What is added to a row is not
    seen by softmax, so that w_1 matters, and learns, only in hosts with sinks or a softcap.

    Parameters, [heads, d], zero at first: `w1`, `w2`, and `w3`: w_3 = scale · (1 + w3).

    Raises:
        ValueError: nothing tells the head dimension of the host.
    """

    honours_heads = True

    def __init__(self, config, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        if host is None or host.head_dim is None:
            raise ValueError(
                f"trilinear needs the head dimension of {'a host' if host is None else host.name}, and nothing tells "
                "it; allowed: patch_model on hosts with key projections, choose them with layers=..."
            )
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.zeros(host.heads, host.head_dim)) for _ in range(3))

    def change(self, plan: Plan) -> Plan:
        call = plan.call
        dtype = working_dtype(call.query, call.key)
        chosen = self.chosen(call.query)
        w1, w2, w3 = (
            (w if chosen is None else w * chosen[:, None]).to(dtype) for w in (self.w1, self.w2, self.w3)
        )
        kept = plan.options.sinks is not None or plan.options.softcap is not None
        return plan.change(score=bidaf_score(call.query, call.key, w1, w2, call.scale * (1 + w3), kept))

    def identical(self) -> bool:
        return not any(bool(p.any()) for p in self.parameters())


def bidaf_score(query: Tensor, key: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, with_row: bool) -> PairScore:
    """The score as engines see it.

    Args:
        query: [B, H, N, d], key: [B, Hkv, M, d], as they come.
        w1, w2, w3: [H, d], in the dtype to compute in.
        with_row: keep what is added to a whole row, as one more feature.
    """
    q, k = query.to(w1.dtype), key.to(w1.dtype)
    left = q * w3[:, None] + w2[:, None]
    if not with_row:
        unused = 0.0 * w1.sum()  # a gradient of zero, not of rounding errors
        term = ScoreTerm(DOT, lambda: bidaf_scores(q, k, w1.detach(), w2, w3) + unused)
        return PairScore(left + unused, k, (term,))
    row = torch.einsum("hd,bhnd->bhn", w1, q)[..., None]
    # the gate of ones says that the features are not the host's own keys
    term = ScoreTerm(DOT, partial(bidaf_scores, q, k, w1, w2, w3), gate=w1.new_ones(query.shape[1]))
    return PairScore(torch.cat([left, row], -1), torch.cat([k, k.new_ones(*k.shape[:-1], 1)], -1), (term,))
