"""Multiple kernel learning inside a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...engines import DOT, Options, PairScore, ScoreTerm, repeat_heads
from ...engines.reference import total_logits
from ...readable import is_recorded
from .. import checks
from ..base import Host, HostCall, MechanismLayer, Plan
from ..talking_heads.operator import BACKENDS, talking_heads
from .config import MklConfig
from .reference import combined, head_weights, weighted
from .terms import weighted_score


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
    for_all_heads = ("beta",)

    def __init__(self, config: MklConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        known = check_host(config, host, mode, heads)
        self.host = known
        if config.kind == "global":
            self.beta = nn.Parameter(torch.zeros(known.heads))
        else:
            self.value_map = nn.Parameter(
                torch.zeros(known.heads, known.kv_heads * known.value_dim)
            )

    def change(self, plan: Plan) -> Plan:
        score, options, column = plan.score, plan.options, None
        if self.config.kind == "global":
            row = head_weights(self.beta.to(score.dtype), self.heads)
            row = row if plan.call.heads is None else plan.call.heads.slice_rank(row)
            score = scaled_score(score, row, options)
        else:
            row, column = weights_of(plan.call, self.value_map, score.dtype, self.heads, self.host)
            score = weighted_score(score, row, column, options.softcap)
            options = replace(options, softcap=None)
        if options.bias is not None:
            bias = options.bias.reshape((1,) * (4 - options.bias.dim()) + tuple(options.bias.shape))
            options = replace(options, bias=weighted(bias.to(row.dtype), row, column))
        plan = plan.change(score=score, options=options)
        if self.config.combine:
            return plan.change(attend=partial(combined_attention, plan.attend))
        heads = score.kv_heads  # keys of their own for every query head, where keys are weighted
        return (
            plan
            if plan.value.shape[1] == heads
            else plan.change(value=repeat_heads(plan.value, heads))
        )

    @property
    def mixes_heads(self) -> bool:  # type: ignore[override]  # nobody sets it
        """Conditional weights are made of the values of all heads."""
        return self.config.combine or self.config.kind != "global"

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


def combined_attention(
    attend: Callable,
    score: PairScore,
    value: Tensor,
    options: Options,
    backend: str = "auto",
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(Σ_m S^m)·V, the same weights for the values of every head.

    Dot products of all heads are one dot product of all their dimensions. Other scores are talking heads of which only
    one is left after the logits are mixed.

    Args:
        attend: computes a pair score of one head, as `engines.attention` does.
        score: the weighted kernels; features [B, H, N, d].
        value: [B, Hkv, M, dv].
        options: masks that are the same for all heads, and the bias of every head; no sinks.
        backend, weights: as in `engines.attention`.

    Returns:
        [B, H, N, dv], and the weights [B, H, N, M] where asked for.

    Raises:
        ValueError: sinks or masks that differ between heads.
    """
    mask_per_head = (
        options.mask is not None and options.mask.dim() == 4 and options.mask.shape[1] > 1
    )
    for what, differs in (
        ("attention sinks, which differ between heads", options.sinks is not None),
        ("a mask for every head", mask_per_head),
    ):
        if differs:
            raise ValueError(
                f"mkl with combine=True makes one attention for all heads, and was called with {what}; allowed: "
                "combine=False"
            )
    heads, groups, width = score.shape[1], value.shape[1], value.shape[-1]
    together = value.transpose(1, 2).flatten(2)[:, None]  # [B, 1, M, Hkv · dv]
    if options.softcap is None and all(t.term is DOT for t in score.terms):
        options = options if options.bias is None else replace(options, bias=combined(options.bias))
        out, shared = attend(
            one_product(score), together, options, backend=backend, weights=weights
        )
    else:
        if is_recorded():  # plain torch, for programs without this package
            backend = "reference"
        out, shared = talking_heads(
            score,
            together,
            options,
            before=value.new_ones(1, heads),
            after=None,
            backend=backend if backend in BACKENDS else "auto",
            weights=weights,
        )
    out = repeat_heads(out[:, 0].unflatten(-1, (groups, width)).transpose(1, 2), heads)
    return out, shared if shared is None else shared.expand(-1, heads, -1, -1)


def one_product(score: PairScore) -> PairScore:
    """Dot products of all heads as one; queries of a group are summed, since they share their keys."""
    gates = [1.0 if t.gate is None else t.gate[:, None, None] for t in score.terms]
    query, key = score.features()
    query = (query * sum(gates)).unflatten(1, (key.shape[1], -1)).sum(2)
    q, k = (t.transpose(1, 2).flatten(2)[:, None] for t in (query, key))
    return PairScore(q, k, (ScoreTerm(DOT, lambda: combined(total_logits(score))),))


def weights_of(
    call: HostCall, value_map: Tensor, dtype: torch.dtype, heads: tuple[int, ...] | None, host: Host
) -> tuple[Tensor, Tensor]:
    """Conditional weights of queries [B, H, N] and of keys [B, H, M], from a linear image of a token's value rows.

    The value rows of a query are those of its own token: values are cached as they are made, are not rotated, and move
    with the beams, so that generation with a cache sees the same ones.

    Args:
        value_map: [H, Hkv · dv].
        dtype: to compute in.
        heads: that share the weights.
        host: where the call is made.

    Raises:
        ValueError: the call does not say which keys are the queries' own, or has values of another shape.
    """
    value, n = call.value, call.query.shape[2]
    kv_heads, width = value.shape[1], value.shape[-1]
    if kv_heads * width != value_map.shape[1]:
        raise ValueError(
            f"mkl was built for value rows of {value_map.shape[1]} numbers in {host.name}, and its attention is called "
            f"with {kv_heads} heads of {width}; allowed: hosts whose config says what they hand over, choose them with "
            "layers=..."
        )
    start = call.first_query("mkl", host)
    by_kv_head = value_map.to(dtype).view(-1, kv_heads, width).transpose(0, 1)  # [Hkv, H, dv]
    keys = head_weights((by_kv_head @ value.to(dtype).mT).sum(1), heads)
    if isinstance(start, int):
        return keys.narrow(2, start, n), keys
    return keys.index_select(2, torch.arange(n, device=keys.device) + start), keys


def check_host(config: MklConfig, host: Host | None, mode: str, heads) -> Any:
    """Refuse settings and hosts that the gates have no meaning for."""
    known = checks.check_host(
        "mkl", host, *(("value_dim",) if config.kind == "conditional" else ())
    )
    if config.combine and mode == "blend":
        raise ValueError(
            "MklConfig.combine=True has no setting at which it is the identity, so that mode='blend' is not allowed; "
            "allowed: mode='replace', or combine=False"
        )
    if config.combine and heads is not None and len(heads) < known.heads:
        raise ValueError(
            "MklConfig.combine=True makes one attention of all heads, and heads=... chooses some; allowed: heads=None, "
            "or combine=False"
        )
    if config.kind == "conditional" and known.is_cross:
        raise ValueError(
            f"MklConfig.kind='conditional' reads the queries' own values, which cross-attention has none of "
            f"({known.name}); allowed: kind='global', or include_cross_attention=False"
        )
    return known
