"""Multi-kernel gates inside a host."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ...engines import DOT, Options, PairScore, repeat_heads
from ..base import Host, MechanismLayer, Plan
from .combine import combined_attention
from .config import MklConfig
from .score import combined, head_weights, weighted
from .terms import weighted_score
from .values import weights_of


class MklLayer(MechanismLayer):
    """Every head's logits, with whatever score and bias pieces are in them, times the head's weight; masks and sinks
    come after. It starts as the identity in either mode, but for combine=True, which has none.

    Parameters, zero at first: for kind="global" `beta` [heads], logits of the weights; for kind="conditional"
    `value_map` [heads, kv heads · dv], which makes them of a token's value rows.

    Raises:
        ValueError: combine=True with mode="blend" or with chosen heads; conditional weights in cross-attention, or
            where nothing tells how wide values are.
    """

    honours_heads = True

    def __init__(self, config: MklConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        check_host(config, host, mode, heads)
        self.host = host.name
        if config.kind == "global":
            self.beta = self.per_head(host)
        else:
            self.value_map = nn.Parameter(torch.zeros(host.heads, host.kv_heads * host.value_dim))

    def change(self, plan: Plan) -> Plan:
        dtype = plan.score.dtype
        row, column = self.weights(plan, dtype)
        options, score = plan.options, plan.score
        if column is None:
            score = scaled_score(score, row, options)
        else:
            score = weighted_score(score, row, column, options.softcap)
            options = replace(options, softcap=None)
        options = replace(options, bias=scaled_bias(options.bias, row, column, self.config.combine))
        plan = plan.change(score=score, options=options)
        if not self.config.combine:
            own_keys = (
                score.key.shape[1] != plan.score.key.shape[1] or score.key.shape[1] != plan.value.shape[1]
            )
            return plan.change(value=repeat_heads(plan.value, score.key.shape[1])) if own_keys else plan
        return plan.change(attend=partial(combined_attention, plan.attend))

    def weights(self, plan: Plan, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The weights of rows, [H] or [B, H, N], and for the conditional form those of columns, [B, H, M]."""
        if self.config.kind == "global":
            return head_weights(self.beta.to(dtype), self.heads), None
        return weights_of(plan.call, self.value_map, dtype, self.heads, self.host)

    def identical(self) -> bool:
        return not self.config.combine and not any(bool(p.any()) for p in self.parameters())


def scaled_score(score: PairScore, weight: Tensor, options: Options) -> PairScore:
    """The score with a weight per head on every piece; that of a plain dot product goes into the query.

    What may stand beside that product is what does not read it, such as HyPE.
    """
    first, *rest = score.terms
    plain = first.term is DOT and first.gate is None and options.softcap is None
    if not plain or any(t.low_rank_factors is None for t in rest):
        return score.weighted(weight)
    others = replace(score, terms=tuple(rest)).weighted(weight).terms
    weighted_product = replace(first, definition=lambda: weighted(first.definition(), weight))
    scaled = (score.raw_query.to(weight.dtype) * weight[:, None, None]).to(score.raw_query.dtype)
    return replace(score, raw_query=scaled, terms=(weighted_product, *others))


def scaled_bias(bias: Tensor | None, row: Tensor, column: Tensor | None, combine: bool) -> Tensor | None:
    """A bias [B|1, H|1, N|1, M] with the weights of the kernels, summed over heads where they are combined."""
    if bias is None:
        return None
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)).to(row.dtype)
    bias = weighted(bias, row, column)
    return combined(bias) if combine else bias


def check_host(config: MklConfig, host: Host | None, mode: str, heads) -> None:
    """Refuse settings and hosts that the gates have no meaning for."""
    if host is None:
        raise ValueError("mkl has parameters to learn; allowed: patch_model(model, MklConfig(...))")
    if config.combine and mode == "blend":
        raise ValueError(
            "MklConfig.combine=True has no setting at which it is the identity, so that mode='blend' is not allowed; "
            "allowed: mode='replace', or combine=False"
        )
    if config.combine and heads is not None and len(heads) < host.heads:
        raise ValueError(
            "MklConfig.combine=True makes one attention of all heads, and heads=... chooses some; allowed: heads=None, "
            "or combine=False"
        )
    if config.kind == "conditional" and host.is_cross:
        raise ValueError(
            f"MklConfig.kind='conditional' reads the queries' own values, which cross-attention has none of "
            f"({host.name}); allowed: kind='global', or include_cross_attention=False"
        )
    if config.kind == "conditional" and host.value_dim is None:
        raise ValueError(
            f"MklConfig.kind='conditional' reads value rows, and nothing tells how wide they are in {host.name}; "
            "allowed: kind='global', or hosts with value projections"
        )
