"""Hyperbolic-distance attention as a function, shaped like `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor

from ...engines import Options, attention
from ...engines.score import upcast_for_grad
from ...fields import SMALLEST
from ..checks import check_call, check_choice, check_number, check_number_of_heads
from .config import AGGREGATIONS, DISTANCES, Aggregation, Distance
from .midpoint import einstein
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
    """softmax(-d(q, k) / τ) over values, with d the distance in the Poincaré ball of curvature -c (Hyperbolic
    Attention Networks, arXiv 1805.09786). Queries, keys and values are tangent vectors at the origin.

    Args:
        query: [B, H, N, d], any floating dtype; d at least 2. Arithmetic is float32, float64 for float64 inputs.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]. A query that sees no key gives 0.
        dropout_p: probability that a weight is dropped, in [0, 1).
        is_causal: query i sees keys j <= i; intersects with `attn_mask`.
        scale: what queries, keys and values are multiplied with before they are lifted into the ball; None: 1/sqrt(d).
        enable_gqa: allow fewer heads of keys and values than of queries.
        curvature: c > 0, a float or a tensor of one value per query head. With one per head and aggregation="einstein"
            shared keys and values are repeated for every query head.
        temperature: τ > 0, likewise.
        distance: "geodesic": S = -d/τ; "squared_lorentz": S = -(2/c) (cosh(√c d) - 1) / τ.
        aggregation: "einstein": the Einstein midpoint of the lifted values, mapped back to the tangent space at the
            origin and divided by `scale`; "mean": the weighted mean of the values themselves.
        backend: "auto" or the name of an engine.

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    space = hyperbolic_space(query, scale, curvature, temperature, distance)
    score = space.score(upcast_for_grad(query), upcast_for_grad(key))
    average = (
        einstein(space.curvature, space.scale_of(query)) if aggregation == "einstein" else None
    )
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, aggregation=average)
    return attention(score, value, options, backend=backend)[0].to(query.dtype)


def hyperbolic_scores(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    curvature: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    distance: Distance = "geodesic",
) -> Tensor:
    """The dense logits [B, H, N, M] straight from the definition; arguments as in `hyperbolic_attention`."""
    check_call(query, key, key)
    space = hyperbolic_space(query, scale, curvature, temperature, distance)
    return space.score(query, key).terms[0].definition()


def hyperbolic_space(query: Tensor, scale, curvature, temperature, distance) -> HyperbolicSpace:
    """Checked parameters of a hyperbolic score for these queries."""
    check_choice("distance", distance, DISTANCES)
    scale = float(query.shape[-1]) ** -0.5 if scale is None else scale
    check_number("scale", scale, least=SMALLEST)
    numbers = ("curvature", curvature), ("temperature", temperature)
    return HyperbolicSpace(
        distance, float(scale), *(check_number_of_heads(n, x, query) for n, x in numbers)
    )
