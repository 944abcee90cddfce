"""Cone scores: the definition, as the paper has it (Coneheads, arXiv 2306.00392, section 4; math in docs/cone.md).

The score of a pair is minus the height of the lowest common ancestor of its cones, times gamma. With D the Euclidean
distance of the horizontal parts, and gamma and r per head:

    umbral:     S = -gamma · max(h_q, h_k, (D / sinh r + h_q + h_k) / 2)
    penumbral:  a = sqrt(r² - h_q²), b = sqrt(r² - h_k²)
                D <= a + b:  H² = max(h_q², h_k², r² - ((a + b - D) / 2)²)
                D >  a + b:  H² = ((D² + h_k² - h_q²) / (2D))² + h_q²
                S = -gamma · H²   (squared, as released)   or   -gamma · H
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.score import repeat_heads, working_dtype
from .points import clamp_height, height_and_stretch, horizontal

FLOOR = 1e-6  # of (r² - h²) / r² under the roots, where the sigmoid saturates


def definition(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    radius: Tensor,
    *,
    variant: str,
    mapping: str,
    squared: bool,
    clamp_heights: bool,
) -> Tensor:
    """Dense logits [B, H, N, M] of checked arguments, from differences of points.

    Args:
        query: [B, H, N, d].
        key: [B, Hkv, M, d], Hkv dividing H.
        gamma, radius: [H] or [1], positive.
    """
    dtype = working_dtype(query, key)
    q, k = query.to(dtype), repeat_heads(key.to(dtype), query.shape[1])
    gamma, r = gamma.to(dtype)[:, None, None], radius.to(dtype)[:, None, None]
    hq, stretch_q = height_and_stretch(q, mapping, r[..., 0])
    hk, stretch_k = height_and_stretch(k, mapping, r[..., 0])
    distance = euclidean(horizontal(q, stretch_q), horizontal(k, stretch_k))
    if variant == "umbral":
        return -gamma * umbral_height(distance, hq[..., None], hk[..., None, :], r)
    if clamp_heights:
        hq, hk = clamp_height(hq, r[..., 0]), clamp_height(hk, r[..., 0])
    height_squared = penumbral_height_squared(distance, hq[..., None], hk[..., None, :], r)
    if squared:
        return -gamma * height_squared
    return -gamma * torch.sqrt(
        height_squared.clamp_min(torch.finfo(dtype).tiny)
    )  # a finite slope at height 0


def inverse_sinh(r: Tensor) -> Tensor:
    """1 / sinh r, which goes to 0 without overflow for large r."""
    return 2 * torch.exp(-r) / -torch.expm1(-2 * r)


def umbral_height(distance: Tensor, hq: Tensor, hk: Tensor, r: Tensor) -> Tensor:
    """Height of the lowest point whose umbral cone holds both points."""
    return torch.maximum(torch.maximum(hq, hk), (distance * inverse_sinh(r) + hq + hk) / 2)


def penumbral_height_squared(distance: Tensor, hq: Tensor, hk: Tensor, r: Tensor) -> Tensor:
    """Squared height of the lowest point whose penumbral cone holds both points; heights are below r."""
    a, b = half_width(hq, r), half_width(hk, r)
    inside = torch.maximum(torch.maximum(hq**2, hk**2), r**2 - ((a + b - distance).clamp_min(0) / 2) ** 2)
    apart = torch.where(
        distance > a + b, distance, torch.ones_like(distance)
    )  # no 0/0 in the branch not taken
    outside = ((apart**2 + hk**2 - hq**2) / (2 * apart)) ** 2 + hq**2
    return torch.where(distance > a + b, outside, inside)


def half_width(h: Tensor, r: Tensor) -> Tensor:
    """sqrt(r² - h²): half the width of a penumbral cone's base on the boundary."""
    return torch.sqrt(torch.maximum(r**2 - h**2, FLOOR * r**2))


def euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Distances [..., N, M] from direct differences; the gradient at distance 0 is 0."""
    return torch.cdist(x.contiguous(), y.contiguous(), compute_mode="donot_use_mm_for_euclid_dist")
