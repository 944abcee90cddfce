"""Hyperbolic-distance attention one pair at a time with 60 digits, read straight from the paper's formulas.

Source: Hyperbolic Attention Networks, arXiv 1805.09786; the Poincaré ball as in arXiv 1805.09112. Points are lifted
into the ball, distances are the ball's arcosh, midpoints are taken in Klein coordinates. The dense expressions at the
end take the other road, the Lorentz form in float64 torch, and serve for gradients and longer sequences of points in
general position.
"""

import mpmath
import numpy as np
import torch

DIGITS = 60
RIM = mpmath.mpf(1) - mpmath.mpf(10) ** -5


def norm(x):
    return mpmath.sqrt(mpmath.fsum(a * a for a in x))


def lift(x, c, scale):
    """Head vector -> point of the Poincaré ball of curvature -c, as a list of mpf."""
    u = [mpmath.mpf(float(a)) * scale for a in x]
    reach = mpmath.sqrt(c) * norm(u)
    if reach == 0:
        return u
    return [min(mpmath.tanh(reach), RIM) * a / reach for a in u]


def distance(x, y, c):
    """d = (1/√c) arcosh(1 + 2c|x - y|² / ((1 - c|x|²)(1 - c|y|²)))"""
    apart = norm([a - b for a, b in zip(x, y, strict=True)]) ** 2
    rooms = (1 - c * norm(x) ** 2) * (1 - c * norm(y) ** 2)
    return mpmath.acosh(1 + 2 * c * apart / rooms) / mpmath.sqrt(c)


def to_lorentz(x, c):
    """Time and space coordinates of a point of the ball."""
    room = 1 - c * norm(x) ** 2
    return (2 - room) / room / mpmath.sqrt(c), [2 * a / room for a in x]


def squared_lorentz(x, y, c):
    """|x - y|² in the Lorentz inner product: -2/c - 2⟨x, y⟩."""
    (tx, sx), (ty, sy) = to_lorentz(x, c), to_lorentz(y, c)
    return -2 / c - 2 * (mpmath.fsum(a * b for a, b in zip(sx, sy, strict=True)) - tx * ty)


def scores(q, k, *, curvature=1.0, temperature=1.0, distance_name="geodesic", scale=None):
    """[B, H, N, d] and [B, Hkv, M, d] -> [B, H, N, M] logits; c and τ: scalar or per head."""
    q, k = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
    (B, H, N, d), (Hkv, M) = q.shape, k.shape[1:3]
    curvature, temperature = np.broadcast_to(curvature, (H,)), np.broadcast_to(temperature, (H,))
    out = np.empty((B, H, N, M))
    measure = distance if distance_name == "geodesic" else squared_lorentz
    with mpmath.workdps(DIGITS):
        scale = 1 / mpmath.sqrt(d) if scale is None else mpmath.mpf(scale)
        for b, h in np.ndindex(B, H):
            c, tau = mpmath.mpf(float(curvature[h])), mpmath.mpf(float(temperature[h]))
            queries = [lift(x, c, scale) for x in q[b, h]]
            keys = [lift(x, c, scale) for x in k[b, h // (H // Hkv)]]
            for i, j in np.ndindex(N, M):
                out[b, h, i, j] = float(-measure(queries[i], keys[j], c) / tau)
    return out


def klein_midpoint(weights, points, c):
    """The Einstein midpoint of points of the ball: into Klein coordinates, Σ w γ k / Σ w γ, and back."""
    klein = [[2 * a / (1 + c * norm(x) ** 2) for a in x] for x in points]
    gamma = [1 / mpmath.sqrt(1 - c * norm(k) ** 2) for k in klein]
    share = [w * g for w, g in zip(weights, gamma, strict=True)]
    total = mpmath.fsum(share)
    middle = [
        mpmath.fsum(s * k[i] for s, k in zip(share, klein, strict=True)) / total
        for i in range(len(klein[0]))
    ]
    return [a / (1 + mpmath.sqrt(1 - c * norm(middle) ** 2)) for a in middle]


def logmap0(x, c):
    """Point of the ball -> tangent vector at the origin."""
    reach = mpmath.sqrt(c) * norm(x)
    return x if reach == 0 else [mpmath.atanh(reach) * a / reach for a in x]


def midpoints(weights, v, *, curvature=1.0, scale=None, d=None):
    """[B, H, N, M] weights and [B, Hkv, M, dv] values -> [B, H, N, dv]. Weight that is missing lies at the origin."""
    weights, v = np.asarray(weights, dtype=np.float64), np.asarray(v, dtype=np.float64)
    (B, H, N), (Hkv, dv) = weights.shape[:3], (v.shape[1], v.shape[-1])
    curvature = np.broadcast_to(curvature, (H,))
    out = np.zeros((B, H, N, dv))
    with mpmath.workdps(DIGITS):
        scale = 1 / mpmath.sqrt(d or dv) if scale is None else mpmath.mpf(scale)
        for b, h in np.ndindex(B, H):
            c = mpmath.mpf(float(curvature[h]))
            points = [lift(x, c, scale) for x in v[b, h // (H // Hkv)]]
            for i in range(N):
                row = [mpmath.mpf(float(w)) for w in weights[b, h, i]]
                if not any(row):
                    continue
                missing = max(1 - mpmath.fsum(row), mpmath.mpf(0))
                missing = missing if missing > 1e-9 else mpmath.mpf(0)
                middle = klein_midpoint([*row, missing], [*points, [mpmath.mpf(0)] * dv], c)
                out[b, h, i] = [float(a / scale) for a in logmap0(middle, c)]
    return out


def attention(logits, v, *, aggregation="einstein", curvature=1.0, scale=None, d=None, **asked):
    """Output from logits, `asked` as in `softmax.attention`."""
    from .softmax import attention as average

    out, weights = average(logits, v, **asked)
    return (
        out
        if aggregation == "mean"
        else midpoints(weights, v, curvature=curvature, scale=scale, d=d)
    )


# The Lorentz form in torch.


def dense_points(x, c, scale):
    """Time [B, H, L] and space [B, H, L, d] coordinates times √c, unclipped, of float64 vectors."""
    reach = 2 * c.sqrt() * scale * x.norm(dim=-1)
    return torch.cosh(reach), (torch.sinh(reach) / x.norm(dim=-1))[..., None] * x


def dense_scores(q, k, *, curvature=1.0, temperature=1.0, distance_name="geodesic", scale=None):
    """Logits [B, H, N, M], differentiable; c and τ: a float or one per query head."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    c, tau = (
        torch.as_tensor(p, dtype=q.dtype).expand(q.shape[1])[:, None]
        for p in (curvature, temperature)
    )
    (tq, sq), (tk, sk) = dense_points(q, c, scale), dense_points(k, c, scale)
    cosh = tq[..., :, None] * tk[..., None, :] - sq @ sk.mT
    c, tau = c[..., None], tau[..., None]
    if distance_name == "geodesic":
        return -torch.acosh(cosh.clamp_min(1 + 1e-15)) / c.sqrt() / tau
    return 2 / c * (1 - cosh) / tau


def dense_midpoints(weights, v, *, curvature=1.0, scale=None, d=None):
    """Σ w x brought back onto the sheet, and to the tangent space; [B, H, N, dv], differentiable."""
    scale = (d or v.shape[-1]) ** -0.5 if scale is None else scale
    v = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    c = torch.as_tensor(curvature, dtype=v.dtype).expand(v.shape[1])[:, None]
    time, space = dense_points(v, c, scale)
    time, space = (weights @ time[..., None]).squeeze(-1), weights @ space
    length = space.norm(dim=-1)
    radius = torch.asinh(length / (time.square() - length.square()).sqrt())
    return (radius / 2 / c.sqrt() / scale / length)[..., None] * space


def dense_attention(q, k, v, *, aggregation="einstein", mask=None, causal=False, **space):
    """Hyperbolic attention in float64; every argument keeps its graph."""
    from .dense import softmax_average, visible

    logits = dense_scores(q, k, **space)
    if aggregation == "mean":
        return softmax_average(logits, v, mask, causal)
    seen = visible(logits.shape, mask, causal)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
    curvature, scale = space.get("curvature", 1.0), space.get("scale")
    return dense_midpoints(weights, v, curvature=curvature, scale=scale, d=q.shape[-1])
