"""Multiple kernel learning in an attention layer.

`MklLayer` weights the logits of a call's plan; `combined_attention` computes one attention for all
heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...engines import DOT, Options, PairScore, ScoreTerm, repeat_heads
from ...engines.reference import total_logits
from ...utils.readable import is_recorded
from .. import checks
from ..base import Host, HostCall, MechanismLayer, Plan
from ..talking_heads.operator import BACKENDS, talking_heads
from .config import MklConfig
from .reference import combined, head_weights, weighted
from .terms import weighted_score


class MklLayer(MechanismLayer):
    """Multiply every head's logits by the head's weight.

    The logits include all score and bias terms. Masks and sinks are applied afterwards. The layer
    starts as the identity in both modes, except with combine=True, which has no identity.

    Parameters, initialised to zero:

    - `beta` [heads], for kind="global": logits of the weights.
    - `value_map` [heads, kv heads · dv], for kind="conditional": maps a token's values to logits of
      the weights.

    Raises:
        ValueError: combine=True with mode="blend" or with a choice of heads; conditional weights in
            cross-attention, or with unknown value width.
    """

    honours_heads = True
    mixes_queries = False
    for_all_heads = ("beta",)

    def __init__(self, config: MklConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        known = check_host(config, host, mode, heads)
        self.host = known
        # Zero logits give equal weights, M · 1/M = 1: the identity.
        if config.kind == "global":
            self.beta = nn.Parameter(torch.zeros(known.heads))
        else:
            self.value_map = nn.Parameter(
                torch.zeros(known.heads, known.kv_heads * known.value_dim)
            )

    def change(self, plan: Plan) -> Plan:
        score = plan.score
        options = plan.options
        column = None
        if self.config.kind == "global":
            row = head_weights(self.beta.to(score.dtype), self.heads)
            row = plan.call.slice_rank(row)
            score = scaled_score(score, row, options)
        else:
            row, column = compute_conditional_weights(
                plan.call, self.value_map, score.dtype, self.heads, self.host
            )
            # The softcap acts on the logits before their weights, so the weighted terms contain it.
            score = weighted_score(score, row, column, options.softcap)
            options = replace(options, softcap=None)
        if options.bias is not None:
            # The bias is a part of the kernel, so it gets the weight too.
            missing = (1,) * (4 - options.bias.dim())
            bias = options.bias.reshape(missing + tuple(options.bias.shape))
            options = replace(options, bias=weighted(bias.to(row.dtype), row, column))
        plan = plan.change(score=score, options=options)
        # Only the engine call changes; masks and later stages stay as they are.
        if self.config.combine:
            return plan.change(attend=partial(combined_attention, plan.attend))
        # Weighted keys differ between the query heads of a group, so values need as many heads.
        heads = score.kv_heads
        if plan.value.shape[1] == heads:
            return plan
        return plan.change(value=repeat_heads(plan.value, heads))

    @property
    def mixes_heads(self) -> bool:  # type: ignore[override]  # read-only
        """Whether a head reads the values of other heads."""
        return self.config.combine or self.config.kind != "global"

    def identical(self) -> bool:
        return not self.config.combine and not any(bool(p.any()) for p in self.parameters())


def scaled_score(score: PairScore, weight: Tensor, options: Options) -> PairScore:
    """Multiply every term of a score by a weight per head.

    The weight of a plain dot product is multiplied into the query, which keeps the engines for
    plain dot products. The other terms must then not depend on that product; HyPE is an example.

    Args:
        score: The score.
        weight: Weights of the heads, shape [H].
        options: Options of the call.
    """
    first, *rest = score.terms
    is_plain = first.term is DOT and first.gate is None and options.softcap is None
    if not is_plain or any(t.low_rank_factors is None for t in rest):
        return score.weighted(weight)
    others = replace(score, terms=tuple(rest)).weighted(weight).terms
    weighted_product = replace(first, definition=lambda: weighted(first.definition(), weight))
    # Multiply in the weights' dtype and round once, as the docstring of `mkl_attention` promises.
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
    """Compute softmax(Σ_m S^m)·V: one attention for the values of all heads.

    The sum of the heads' dot products is one dot product over the dimensions of all heads. Other
    scores are computed as talking heads that mix the logits into a single head.

    Args:
        attend: Computes attention of a one-head score, like `engines.attention`.
        score: The weighted kernels, with features [B, H, N, d].
        value: Shape [B, Hkv, M, dv].
        options: Masks that are equal for all heads, and the bias of every head; no sinks.
        backend: As in `engines.attention`.
        weights: As in `engines.attention`.

    Returns:
        Output [B, H, N, dv], and the weights [B, H, N, M] or None.

    Raises:
        ValueError: There are sinks, or masks that differ between heads.
    """
    mask = options.mask
    mask_per_head = mask is not None and mask.dim() == 4 and mask.shape[1] > 1
    for what, differs in (
        ("attention sinks, which differ between heads", options.sinks is not None),
        ("a mask for every head", mask_per_head),
    ):
        if differs:
            raise ValueError(
                f"mkl with combine=True makes one attention for all heads, and was called with {what}; allowed: "
                "combine=False"
            )
    heads = score.shape[1]
    groups, width = value.shape[1], value.shape[-1]
    # One head of attention reads the values of all heads side by side.
    together = value.transpose(1, 2).flatten(2)[:, None]  # [B, 1, M, Hkv · dv]
    if options.softcap is None and all(t.term is DOT for t in score.terms):
        options = options if options.bias is None else replace(options, bias=combined(options.bias))
        out, shared = attend(
            join_dot_products(score), together, options, backend=backend, weights=weights
        )
    else:
        # A recorded program must run without this package, so it may hold only plain torch
        # operators.
        if is_recorded():
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
    # Split the values of all heads again.
    out = repeat_heads(out[:, 0].unflatten(-1, (groups, width)).transpose(1, 2), heads)
    return out, shared if shared is None else shared.expand(-1, heads, -1, -1)


def join_dot_products(score: PairScore) -> PairScore:
    """Join the dot products of all heads into one.

    The queries of a group are summed, since they share their keys.
    """
    # Gates differ between heads, so they move into the queries.
    gates = [1.0 if t.gate is None else t.gate[:, None, None] for t in score.terms]
    query, key = score.features()
    query = (query * sum(gates)).unflatten(1, (key.shape[1], -1)).sum(2)
    q, k = (t.transpose(1, 2).flatten(2)[:, None] for t in (query, key))
    return PairScore(q, k, (ScoreTerm(DOT, lambda: combined(total_logits(score))),))


def compute_conditional_weights(
    call: HostCall, value_map: Tensor, dtype: torch.dtype, heads: tuple[int, ...] | None, host: Host
) -> tuple[Tensor, Tensor]:
    """Compute conditional weights from a linear map of each token's values.

    A query uses the values of its own token. Cached values are neither rotated nor changed, and
    they move with the beams, so generation with a cache sees the same weights.

    Args:
        call: The attention call.
        value_map: Shape [H, Hkv · dv].
        dtype: dtype of the computation.
        heads: Heads that share the weights; None means all.
        host: The attention layer.

    Returns:
        Weights of queries [B, H, N] and of keys [B, H, M].

    Raises:
        ValueError: The call does not say which keys belong to the queries, or its values have
            another shape.
    """
    value = call.value
    n = call.query.shape[2]
    kv_heads, width = value.shape[1], value.shape[-1]
    if kv_heads * width != value_map.shape[1]:
        raise ValueError(
            f"mkl was built for value rows of {value_map.shape[1]} numbers in {host.name}, and its attention is called "
            f"with {kv_heads} heads of {width}; allowed: hosts whose config says what they hand over, choose them with "
            "layers=..."
        )
    start = call.first_query("mkl", host)
    # A sum over value heads avoids a copy of the values with all heads side by side.
    by_kv_head = value_map.to(dtype).view(-1, kv_heads, width).transpose(0, 1)  # [Hkv, H, dv]
    keys = head_weights((by_kv_head @ value.to(dtype).mT).sum(1), heads)
    # A start in a tensor is not read, so that the call stays traceable.
    if isinstance(start, int):
        return keys.narrow(2, start, n), keys
    return keys.index_select(2, torch.arange(n, device=keys.device) + start), keys


def check_host(config: MklConfig, host: Host | None, mode: str, heads) -> Any:
    """Raise ValueError if the settings do not fit the attention layer."""
    # Conditional weights are a map of the values, whose width must be known before the first
    # call.
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
