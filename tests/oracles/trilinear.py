"""Three-way attention and BiDAF's score by loops over queries, pairs of keys and numbers, in float64."""

import numpy as np


def attention(
    q,
    k,
    v,
    k2,
    v2,
    *,
    scale=None,
    mask=None,
    bias=None,
    causal=False,
    windows=(None, None),
    softcap=None,
    sinks=None,
    offset=0,
    kept=None,
):
    """[B, H, N, d], [B, Hkv, M, d] and [B, Hkv, M, dv] arrays -> (output [B, H, N, dv], weights of j [B, H, N, M]).

    A query sees the pairs (j, k) of keys that are both visible to it. A sink is one more j, without a value.
    `kept` [B, H, N, M, M] is what dropout multiplies weights with.
    """
    q, k, v, k2, v2 = (np.asarray(t, dtype=np.float64) for t in (q, k, v, k2, v2))
    (B, H, N, d), (Hkv, M) = q.shape, k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    out, weights = np.zeros((B, H, N, v.shape[-1])), np.zeros((B, H, N, M))
    mask = None if mask is None else np.broadcast_to(np.asarray(mask), (B, H, N, M))
    bias = np.zeros((1, 1, 1, 1)) if bias is None else np.asarray(bias, dtype=np.float64)
    bias = np.broadcast_to(bias, (B, H, N, M))
    for b, h, i in np.ndindex(B, H, N):
        g, added = h // (H // Hkv), [seen(mask, b, h, i, j) for j in range(M)]
        js = [
            j
            for j in range(M)
            if visible(i + offset, j, causal, windows[0]) and added[j] is not None
        ]
        ks = [
            j
            for j in range(M)
            if visible(i + offset, j, causal, windows[1]) and added[j] is not None
        ]
        logits = {}
        for j in js:
            for t in ks:
                total = scale * sum(
                    q[b, h, i, n] * k[b, g, j, n] * k2[b, g, t, n] for n in range(d)
                )
                total = total if softcap is None else softcap * np.tanh(total / softcap)
                logits[j, t] = total + added[j] + added[t] + bias[b, h, i, j]
        extra = [] if sinks is None else [float(sinks[h]) + added[t] for t in ks]
        if not logits:
            continue
        top = max([*logits.values(), *extra])
        norm = sum(np.exp(x - top) for x in [*logits.values(), *extra])
        for (j, t), x in logits.items():
            weight = np.exp(x - top) / norm
            weights[b, h, i, j] += weight
            weight *= 1.0 if kept is None else kept[b, h, i, j, t]
            out[b, h, i] += weight * v[b, g, j] * v2[b, g, t]
    return out, weights


def seen(mask, b, h, i, j):
    """What a mask adds for a key, or None where it hides it."""
    if mask is None:
        return 0.0
    value = mask[b, h, i, j]
    if mask.dtype == bool:
        return 0.0 if value else None
    return None if value == -np.inf else float(value)


def visible(i, j, causal, window):
    """Whether query i may see key j."""
    if causal and j > i:
        return False
    return window is None or abs(i - j) < window


def bidaf(q, k, w1, w2, w3):
    """Logits [B, H, N, M] of [B, H, N, d] and [B, Hkv, M, d], with w [H, d]."""
    q, k, w1, w2, w3 = (np.asarray(t, dtype=np.float64) for t in (q, k, w1, w2, w3))
    (B, H, N, d), (Hkv, M) = q.shape, k.shape[1:3]
    out = np.zeros((B, H, N, M))
    for b, h, i, j in np.ndindex(B, H, N, M):
        key = k[b, h // (H // Hkv), j]
        for n in range(d):
            out[b, h, i, j] += (
                w1[h, n] * q[b, h, i, n] + w2[h, n] * key[n] + w3[h, n] * q[b, h, i, n] * key[n]
            )
    return out
