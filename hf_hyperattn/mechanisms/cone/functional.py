"""Provide cone attention as a function.

Its arguments are named as in `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

from torch import Tensor

from ...engines import Options
from ..checks import check_call, check_choice, check_number_of_heads
from ..score_layer import attend_in_space
from .config import VARIANTS, Variant, check_pairing, resolve_mapping
from .reference import MAPPINGS, Mapping
from .score import ConeSpace


def cone_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    *,
    variant: Variant = "umbral",
    mapping: Mapping | None = None,
    gamma: float | Tensor = 1.0,
    radius: float | Tensor = 1.0,
    squared: bool = True,
    clamp_heights: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax(S)·V with cone scores S (Coneheads, arXiv 2306.00392).

    S is minus gamma times the height of the lowest common ancestor of two cones in the half-space.
    There is no factor 1/sqrt(d).

    Args:
        query: Queries [B, H, N, d], any floating dtype; d is at least 2. Arithmetic is in float32,
            or in float64 for float64 inputs.
        key: Keys [B, H, M, d]. With `enable_gqa` [B, Hkv, M, d]; Hkv divides H.
        value: Values [B, H or Hkv, M, dv].
        attn_mask: Bool (True = visible) or additive, broadcastable to [B, H, N, M]. A query that
            sees no key gives 0.
        dropout_p: Probability that a weight is dropped, in [0, 1).
        is_causal: Let query i see only keys j <= i. Combined with `attn_mask`, both apply.
        enable_gqa: Allow fewer heads of keys and values than of queries.
        variant: "umbral" or "penumbral".
        mapping: Map from head vectors to points: "xi", "psi" or "expmap". None (default): xi for
            umbral, psi for penumbral.
        gamma: γ > 0, a float, or a tensor with one value per query head.
        radius: r > 0, a float, or a tensor with one value per query head.
        squared: Penumbral only: squared heights, as released (default), or heights.
        clamp_heights: Penumbral only: clamp heights at r·(1 - 1e-3). xi and expmap need it.
        backend: "auto" (default), or the name of an engine.

    Returns:
        Outputs [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: An argument is out of range. The message names it, its value and the allowed
            values.
    """
    flags = dict(is_causal=is_causal, squared=squared, clamp_heights=clamp_heights)
    check_call(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, **flags)
    space = cone_space(query, variant, mapping, gamma, radius, squared, clamp_heights)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    return attend_in_space(space, query, key, value, options, backend)


def cone_scores(
    query: Tensor,
    key: Tensor,
    *,
    variant: Variant = "umbral",
    mapping: Mapping | None = None,
    gamma: float | Tensor = 1.0,
    radius: float | Tensor = 1.0,
    squared: bool = True,
    clamp_heights: bool = False,
) -> Tensor:
    """Return the dense logits [B, H, N, M], computed from the definition.

    Arguments are as in `cone_attention`.
    """
    check_call(query, key, key, squared=squared, clamp_heights=clamp_heights)
    space = cone_space(query, variant, mapping, gamma, radius, squared, clamp_heights)
    return space.compute_logits(query, key)


def cone_space(query: Tensor, variant, mapping, gamma, radius, squared, clamp_heights) -> ConeSpace:
    """Check the parameters of a cone score, and return them as a `ConeSpace`.

    Arguments are as in `cone_attention`.
    """
    check_choice("variant", variant, VARIANTS)
    check_choice("mapping", mapping, (None, *MAPPINGS))
    mapping = resolve_mapping(variant, mapping)
    check_pairing("", variant, mapping, squared, clamp_heights)
    return ConeSpace(
        variant=variant,
        mapping=mapping,
        squared=squared,
        clamp_heights=clamp_heights,
        gamma=check_number_of_heads("gamma", gamma, query),
        radius=check_number_of_heads("radius", radius, query),
    )
