"""Provide hyperbolic-distance attention as a function.

Its arguments are named as in `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...config.fields import SMALLEST
from ...engines import Options
from ..checks import check_call, check_choice, check_number, check_number_of_heads
from ..score_layer import attend_in_space
from .config import AGGREGATIONS, DISTANCES, Aggregation, Distance
from .midpoint import make_aggregation
from .score import HyperbolicSpace


def hyperbolic_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    curvature: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    distance: Distance = "geodesic",
    aggregation: Aggregation = "einstein",
    backend: str = "auto",
) -> Tensor:
    """Attend with softmax(-d(q, k) / τ) (Hyperbolic Attention Networks, arXiv 1805.09786).

    d is the distance in the Poincaré ball of curvature -c. Queries, keys and values are tangent
    vectors at the origin.

    Args:
        query: Queries [B, H, N, d], any floating dtype; d is at least 2. Arithmetic is in float32,
            or in float64 for float64 inputs.
        key: Keys [B, H, M, d]. With `enable_gqa` [B, Hkv, M, d]; Hkv divides H.
        value: Values [B, H or Hkv, M, dv].
        attn_mask: Bool (True = visible) or additive, broadcastable to [B, H, N, M]. A query that
            sees no key gives 0.
        dropout_p: Probability that a weight is dropped, in [0, 1).
        is_causal: Let query i see only keys j <= i. Combined with `attn_mask`, both apply.
        scale: Factor of queries, keys and values before they are lifted into the ball. None
            (default): 1/sqrt(d).
        enable_gqa: Allow fewer heads of keys and values than of queries.
        curvature: c > 0, a float, or a tensor with one value per query head. With one per head and
            aggregation="einstein", shared keys and values are repeated for every query head.
        temperature: τ > 0, a float, or a tensor with one value per query head.
        distance: "geodesic": S = -d/τ. "squared_lorentz": S = -(2/c) (cosh(√c d) - 1) / τ.
        aggregation: "einstein": the Einstein midpoint of the lifted values, mapped back to the
            tangent space at the origin and divided by `scale`. "mean": the weighted mean of the
            values themselves.
        backend: "auto" (default), or the name of an engine.

    Returns:
        Outputs [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: An argument is out of range. The message names it, its value and the allowed
            values.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    space = hyperbolic_space(query, scale, curvature, temperature, distance)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    if aggregation == "einstein":
        midpoint = make_aggregation(space.curvature, space.get_scale(query.shape[-1]))
        options = replace(options, aggregation=midpoint)
    return attend_in_space(space, query, key, value, options, backend)


def hyperbolic_scores(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    curvature: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    distance: Distance = "geodesic",
) -> Tensor:
    """Return the dense logits [B, H, N, M], computed from the definition.

    Arguments are as in `hyperbolic_attention`.
    """
    check_call(query, key, key)
    space = hyperbolic_space(query, scale, curvature, temperature, distance)
    return space.compute_logits(query, key)


def hyperbolic_space(query: Tensor, scale, curvature, temperature, distance) -> HyperbolicSpace:
    """Check the parameters of a hyperbolic score, and return them as a `HyperbolicSpace`.

    Arguments are as in `hyperbolic_attention`.
    """
    check_choice("distance", distance, DISTANCES)
    scale = float(query.shape[-1]) ** -0.5 if scale is None else scale
    check_number("scale", scale, least=SMALLEST)
    return HyperbolicSpace(
        distance=distance,
        scale=float(scale),
        curvature=check_number_of_heads("curvature", curvature, query),
        temperature=check_number_of_heads("temperature", temperature, query),
    )
