"""Cone attention in float64, one pair at a time, read straight from the definition.

Source: Coneheads, arXiv 2306.00392; cones from Shadow Cones, arXiv 2305.15215. Slow on purpose: no product
form, no folded constants, no vectorised arithmetic that could share a mistake with an engine.
"""

import math

import mpmath
import numpy as np

CLAMP = 1 - 1e-3  # clamp_heights keeps a height at or below this share of the radius
LONGEST = 30.0  # expmap shortens longer tangent vectors to this norm


def point(x, mapping, radius=1.0):
    """Head vector of d numbers -> (horizontal part as a list of d-1 floats, height)."""
    x = [float(c) for c in x]
    d, last = len(x), x[-1]
    if mapping == "xi":
        h = math.exp(min(max(last / d, -10.0), 10.0))
        return [c * h for c in x[:-1]], h
    if mapping == "psi":
        h = radius * (
            1 / (1 + math.exp(-last)) if last >= 0 else math.exp(last) / (1 + math.exp(last))
        )
        return [c * h for c in x[:-1]], h
    if mapping == "expmap":
        return _expmap_point(x)
    raise KeyError(mapping)


def _expmap_point(x):
    # cosh s - (x_d/s) sinh s cancels for vectors that point up, so it is taken with 60 digits
    with mpmath.workdps(60):
        x = [mpmath.mpf(c) for c in x]
        s = mpmath.sqrt(sum(c * c for c in x))
        if s == 0:
            return [0.0] * (len(x) - 1), 1.0
        if s > LONGEST:
            x, s = [c * LONGEST / s for c in x], mpmath.mpf(LONGEST)
        h = 1 / (mpmath.cosh(s) - x[-1] / s * mpmath.sinh(s))
        return [float(c * h * mpmath.sinh(s) / s) for c in x[:-1]], float(h)


def distance(p, q):
    """Euclidean distance of two horizontal parts, from differences."""
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(p, q, strict=True)))


def umbral_height(d, hq, hk, radius):
    """Height of the lowest common ancestor of two points a horizontal distance d apart."""
    return max(hq, hk, (d / math.sinh(radius) + hq + hk) / 2)


def penumbral_height_squared(d, hq, hk, radius):
    """Squared height of the lowest common ancestor, penumbral cones; heights below the radius."""
    a, b = math.sqrt(radius**2 - hq**2), math.sqrt(radius**2 - hk**2)
    if d <= a + b:
        return max(hq**2, hk**2, radius**2 - ((a + b - d) / 2) ** 2)
    return ((d**2 + hk**2 - hq**2) / (2 * d)) ** 2 + hq**2


def pair_score(p, q, variant, gamma, radius, squared, clamp_heights):
    """The logit of one query point and one key point."""
    (xq, hq), (xk, hk) = p, q
    if clamp_heights:
        hq, hk = min(hq, radius * CLAMP), min(hk, radius * CLAMP)
    d = distance(xq, xk)
    if variant == "umbral":
        return -gamma * umbral_height(d, hq, hk, radius)
    height2 = penumbral_height_squared(d, hq, hk, radius)
    return -gamma * (height2 if squared else math.sqrt(height2))


def scores(q, k, *, variant, mapping, gamma=1.0, radius=1.0, squared=True, clamp_heights=False):
    """[B, H, N, d] and [B, Hkv, M, d] arrays -> [B, H, N, M] logits; gamma, radius: scalar or per head."""
    q, k = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
    (B, H, N, _), (Hkv, M) = q.shape, k.shape[1:3]
    gamma, radius = np.broadcast_to(gamma, (H,)), np.broadcast_to(radius, (H,))
    out = np.empty((B, H, N, M))
    for b, h in np.ndindex(B, H):
        g, r = float(gamma[h]), float(radius[h])
        queries = [point(x, mapping, r) for x in q[b, h]]
        keys = [point(x, mapping, r) for x in k[b, h // (H // Hkv)]]
        for i, j in np.ndindex(N, M):
            out[b, h, i, j] = pair_score(queries[i], keys[j], variant, g, r, squared, clamp_heights)
    return out


def softmax_average(logits, v, mask=None, causal=False):
    """softmax(logits + mask) · v, row by row; rows that see nothing give zeros. Causality is top-left."""
    v = np.asarray(v, dtype=np.float64)
    B, H, N, M = logits.shape
    out = np.zeros((B, H, N, v.shape[-1]))
    seen = np.ones(logits.shape, dtype=bool)
    if mask is not None:
        mask = np.broadcast_to(np.asarray(mask), logits.shape)
        seen = mask.copy() if mask.dtype == bool else mask > -np.inf
        logits = logits if mask.dtype == bool else logits + mask
    for b, h, i in np.ndindex(B, H, N):
        keys = [j for j in range(M) if seen[b, h, i, j] and not (causal and j > i)]
        if not keys:
            continue
        top = max(logits[b, h, i, j] for j in keys)
        weights = [math.exp(logits[b, h, i, j] - top) for j in keys]
        values = v[b, h // (H // v.shape[1])]
        out[b, h, i] = sum(w * values[j] for w, j in zip(weights, keys, strict=True)) / math.fsum(
            weights
        )
    return out


def attention(q, k, v, mask=None, causal=False, **cone):
    """Cone attention of [B, H, L, D] arrays; K and V may have fewer heads."""
    return softmax_average(scores(q, k, **cone), v, mask, causal)
