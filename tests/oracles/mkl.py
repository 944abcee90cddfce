"""Multiple kernel learning by loops in float64."""

import numpy as np


def softmax(x):
    """Of a vector."""
    x = np.asarray(x, dtype=np.float64)
    e = np.exp(x - x.max())
    return e / e.sum()


def global_logits(logits, beta):
    """[B, H, N, M] with the weights of beta [H]."""
    H = logits.shape[1]
    weight = H * softmax(beta)
    return np.stack([weight[h] * np.asarray(logits[:, h], dtype=np.float64) for h in range(H)], 1)


def conditional_logits(logits, row, column):
    """[B, H, N, M] with the weights of row [B, H, N] and column [B, H, M], logits over heads."""
    logits = np.array(logits, dtype=np.float64)
    B, H, N, M = logits.shape
    for b, i, j in np.ndindex(B, N, M):
        one, other = softmax(row[b, :, i]), softmax(column[b, :, j])
        for h in range(H):
            logits[b, h, i, j] *= H * one[h] * H * other[h]
    return logits


def combined_logits(logits):
    """[B, H, N, M] in which every head has the sum of all heads."""
    total = sum(logits[:, h] for h in range(logits.shape[1]))
    return np.stack([total] * logits.shape[1], 1)


def image(value, value_map):
    """[B, H, M] of [B, Hkv, M, dv] and [H, Hkv · dv]: heads of key and value one behind the other."""
    value, value_map = np.asarray(value, dtype=np.float64), np.asarray(value_map, dtype=np.float64)
    B, Hkv, M, dv = value.shape
    out = np.zeros((B, len(value_map), M))
    for b, j in np.ndindex(B, M):
        row = np.concatenate([value[b, g, j] for g in range(Hkv)])
        out[b, :, j] = value_map @ row
    return out
