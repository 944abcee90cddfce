"""softmax(logits)·V in float64 numpy with everything a call may ask for, one row at a time.

Order: cap, bias, what is hidden, sinks, softmax. A sink is one more logit per head that has no value, so the
weights of a row sum to less than one.
"""

import numpy as np


def attention(
    logits,
    v,
    *,
    mask=None,
    bias=None,
    causal=False,
    window=None,
    offset=0,
    softcap=None,
    sinks=None,
):
    """Logits [B, H, N, M], values [B, Hkv, M, dv] -> (output [B, H, N, dv], weights [B, H, N, M])."""
    logits, v = np.asarray(logits, dtype=np.float64), np.asarray(v, dtype=np.float64)
    B, H, N, M = logits.shape
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if bias is not None:
        logits = logits + np.asarray(bias, dtype=np.float64)
    if mask is not None:
        mask = np.broadcast_to(np.asarray(mask), logits.shape)
        logits = np.where(mask, logits, -np.inf) if mask.dtype == bool else logits + mask
    out, weights = np.zeros((B, H, N, v.shape[-1])), np.zeros(logits.shape)
    for b, h, i in np.ndindex(B, H, N):
        row = np.where(_hidden(i + offset, np.arange(M), causal, window), -np.inf, logits[b, h, i])
        extra = [] if sinks is None else [float(sinks[h])]
        top = max([row.max(), *extra])
        if top == -np.inf:
            continue
        row = np.exp(row - top)
        weights[b, h, i] = row / (row.sum() + sum(np.exp(s - top) for s in extra))
        out[b, h, i] = weights[b, h, i] @ v[b, h // (H // v.shape[1])]
    return out, weights


def _hidden(i, keys, causal, window):
    far = np.zeros(keys.shape, dtype=bool)
    if window is not None:
        far = (i - keys >= window) | ((keys - i >= window) & (not causal))
    return far | ((keys > i) & causal)
