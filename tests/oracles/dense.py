"""The same definition as `cone.py` as a dense float64 torch expression, for gradients and longer sequences.

`tests/mechanisms/cone/test_cone.py` holds it against the loops. Meant for points in general position: it makes no
promise about derivatives at ties.
"""

import torch

from .cone import CLAMP, LONGEST


def points(x, mapping, radius):
    """[B, H, L, d] float64 and radius [H, 1] -> horizontal parts [B, H, L, d-1], heights [B, H, L]."""
    flat, last = x[..., :-1], x[..., -1]
    if mapping == "xi":
        h = torch.exp(torch.clamp(last / x.shape[-1], -10, 10))
        return flat * h[..., None], h
    if mapping == "psi":
        h = radius * torch.sigmoid(last)
        return flat * h[..., None], h
    s = x.norm(dim=-1)
    if bool((s > LONGEST).any()):
        raise ValueError("this evaluation is for tangent vectors of moderate length only")
    h = 1 / (torch.cosh(s) - last / s * torch.sinh(s))
    return flat * (h * torch.sinh(s) / s)[..., None], h


def scores(q, k, *, variant, mapping, gamma=1.0, radius=1.0, squared=True, clamp_heights=False):
    """Logits [B, H, N, M]; gamma and radius: a float or a float64 tensor of one value per query head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    g, r = (
        torch.as_tensor(p, dtype=torch.float64).expand(q.shape[1])[:, None] for p in (gamma, radius)
    )
    (xq, hq), (xk, hk) = points(q, mapping, r), points(k, mapping, r)
    if clamp_heights:
        hq, hk = torch.minimum(hq, CLAMP * r), torch.minimum(hk, CLAMP * r)
    hq, hk, g, r = hq[..., :, None], hk[..., None, :], g[..., None], r[..., None]
    # one row block at a time keeps the [rows, M, d] differences small
    rows = [
        ((a - xk[..., None, :, :]) ** 2).sum(-1).sqrt()
        for a in xq[..., :, None, :].split(64, dim=-3)
    ]
    d = torch.cat(rows, dim=-2)
    if variant == "umbral":
        return -g * torch.maximum(torch.maximum(hq, hk), (d / torch.sinh(r) + hq + hk) / 2)
    a, b = (r**2 - hq**2).sqrt(), (r**2 - hk**2).sqrt()
    inside = torch.maximum(torch.maximum(hq**2, hk**2), r**2 - ((a + b - d) / 2) ** 2)
    outside = ((d**2 + hk**2 - hq**2) / (2 * d)) ** 2 + hq**2
    height2 = torch.where(d <= a + b, inside, outside)
    return -g * (height2 if squared else height2.sqrt())


def visible(shape, mask=None, causal=False):
    """Boolean [B, H, N, M]: which keys each query may use."""
    seen = torch.ones(shape, dtype=torch.bool)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask > -torch.inf)
    return seen.tril() if causal else seen


def softmax_average(logits, v, mask=None, causal=False):
    """softmax(logits + mask) · v; rows that see nothing give zeros."""
    seen = visible(logits.shape, mask, causal)
    if mask is not None and mask.dtype != torch.bool:
        logits = (
            logits + mask.masked_fill(~seen, 0.0) if mask.shape == seen.shape else logits + mask
        )
    logits = logits.masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return weights @ v.repeat_interleave(logits.shape[1] // v.shape[1], dim=1)


def attention(q, k, v, mask=None, causal=False, **cone):
    """Cone attention in float64; every argument keeps its graph."""
    q, k, v = q.double(), k.double(), v.double()
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return softmax_average(scores(q, k, **cone), v, mask, causal)
