"""Talking-heads attention (arXiv 2003.02436) in float64 numpy, pair by pair and head by head."""

import numpy as np

from .softmax import attention


def talking_heads(logits, v, before, after, *, bias=None, softcap=None, **hiding):
    """Logits J [B, H, N, M] of any score, values [B, Hkv, M, dv] -> (output, mixed weights).

    The cap acts on J, the bias is added to it, then P_l mixes; masks and sinks act on what is mixed; P_w mixes what
    the softmax gives.
    """
    logits, v, before, after = (np.asarray(x, dtype=np.float64) for x in (logits, v, before, after))
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if bias is not None:
        logits = logits + np.asarray(bias, dtype=np.float64)
    _, weights = attention(spoken(before, logits), np.zeros((*v.shape[:3], 1)), **hiding)
    weights = spoken(after, weights)
    out = np.zeros((*logits.shape[:3], v.shape[-1]))
    for b, h, i in np.ndindex(*out.shape[:3]):
        out[b, h, i] = sum(
            w * x for w, x in zip(weights[b, h, i], v[b, h // (logits.shape[1] // v.shape[1])])
        )
    return out, weights


def spoken(matrix, x):
    """For every head, the sum of what it takes from each head."""
    found = np.zeros(x.shape)
    for h in range(x.shape[1]):
        for g in range(x.shape[1]):
            found[:, h] += matrix[h, g] * x[:, g]
    return found
