"""Cone attention as a function, shaped like `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor

from ...engines import Options, attention
from ...engines.score import upcast_for_grad
from ..checks import check_call, check_choice, check_number_of_heads
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
    """softmax(S)·V with cone scores (Coneheads, arXiv 2306.00392): S is minus gamma times the height of the lowest
    common ancestor of two cones in the half space. There is no 1/sqrt(d).

    Args:
        query: [B, H, N, d], any floating dtype; d at least 2. Arithmetic is float32, float64 for float64 inputs.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]. A query that sees no key gives 0.
        dropout_p: probability that a weight is dropped, in [0, 1).
        is_causal: query i sees keys j <= i; intersects with `attn_mask`.
        enable_gqa: allow fewer heads of keys and values than of queries.
        variant: "umbral" or "penumbral".
        mapping: "xi", "psi" or "expmap", from head vectors to points; None: xi for umbral, psi for penumbral.
        gamma: γ > 0, a float or a tensor of one value per query head.
        radius: r > 0, likewise.
        squared: penumbral only: squared heights, as released (default), or heights.
        clamp_heights: penumbral only: cut heights at r·(1 - 1e-3); needed with xi and expmap.
        backend: "auto" or the name of an engine.

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    flags = dict(is_causal=is_causal, squared=squared, clamp_heights=clamp_heights)
    check_call(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, **flags)
    space = cone_space(query, variant, mapping, gamma, radius, squared, clamp_heights)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    score = space.score(upcast_for_grad(query), upcast_for_grad(key))
    out, _ = attention(score, value, options, backend=backend)
    return out.to(query.dtype)


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
    """The dense logits [B, H, N, M] straight from the definition; arguments as in `cone_attention`."""
    check_call(query, key, key, squared=squared, clamp_heights=clamp_heights)
    space = cone_space(query, variant, mapping, gamma, radius, squared, clamp_heights)
    return space.score(query, key).terms[0].definition()


def cone_space(query: Tensor, variant, mapping, gamma, radius, squared, clamp_heights) -> ConeSpace:
    """Checked parameters of a cone score for these queries."""
    check_choice("variant", variant, VARIANTS)
    check_choice("mapping", mapping, (None, *MAPPINGS))
    mapping = resolve_mapping(variant, mapping)
    check_pairing("", variant, mapping, squared, clamp_heights)
    gamma, radius = (
        check_number_of_heads(n, x, query) for n, x in (("gamma", gamma), ("radius", radius))
    )
    return ConeSpace(variant, mapping, squared, clamp_heights, gamma, radius)
