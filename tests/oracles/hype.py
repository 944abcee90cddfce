"""HyPE by mpmath and loops: the bias with 40 digits, and attention row by row in float64."""

import mpmath
import numpy as np

from .cone import softmax_average


def bias(i, j, mu, tau, form):
    """One entry of the bias as a float, correctly rounded; mu and tau are taken as the floats they are."""
    with mpmath.workdps(40):
        x = mpmath.mpf(float(mu)) * (mpmath.mpf(float(j)) - mpmath.mpf(float(i)))
        if form == "sinh":
            return float(mpmath.mpf(float(tau)) * mpmath.sinh(x))
        return float(-mpmath.mpf(float(tau)) * (mpmath.cosh(x) - 1))


def biases(query_positions, key_positions, mu, tau, form):
    """[B, H, N, M] of positions [B, N] and [B, M], mu and tau one value per head."""
    B, N, M, H = len(query_positions), len(query_positions[0]), len(key_positions[0]), len(mu)
    out, seen = np.empty((B, H, N, M)), {}
    for b, h, i, j in np.ndindex(B, H, N, M):
        key = (float(query_positions[b][i]), float(key_positions[b][j]), h)
        if key not in seen:
            seen[key] = bias(key[0], key[1], mu[h], tau[h], form)
        out[b, h, i, j] = seen[key]
    return out


def attention(
    q, k, v, mask=None, causal=False, *, mu, tau, form, query_positions=None, key_positions=None
):
    """HyPE attention of [B, H, L, D] arrays, scale 1/sqrt(d); K and V may have fewer heads."""
    q, k = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
    (B, H, N, d), (Hkv, M) = q.shape, k.shape[1:3]
    mu, tau = np.broadcast_to(mu, (H,)), np.broadcast_to(tau, (H,))
    queries = np.broadcast_to(np.arange(N) if query_positions is None else query_positions, (B, N))
    keys = np.broadcast_to(np.arange(M) if key_positions is None else key_positions, (B, M))
    logits = biases(queries, keys, mu, tau, form)
    for b, h, i, j in np.ndindex(B, H, N, M):
        logits[b, h, i, j] += sum(q[b, h, i] * k[b, h // (H // Hkv), j]) / d**0.5
    return softmax_average(logits, v, mask, causal)
