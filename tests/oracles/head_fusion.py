"""Attention over heads (math.md A5) in float64, one token and one head at a time."""

import math


def weights(x, query_map, kappa, bias):
    """beta [B][N][M] as nested lists, from lists: x [B][N][width], W [size][width], kappa [M][size], b [M]."""
    return [
        [_softmax([_dot(_image(query_map, t), k) + b for k, b in zip(kappa, bias)]) for t in row]
        for row in x
    ]


def fused(out, x, query_map, kappa, bias):
    """Outputs [B][M][N][dv], each times M · beta."""
    beta, heads = weights(x, query_map, kappa, bias), len(kappa)
    return [
        [
            [[heads * beta[b][i][m] * c for c in token] for i, token in enumerate(head)]
            for m, head in enumerate(row)
        ]
        for b, row in enumerate(out)
    ]


def _image(matrix, x):
    return [_dot(row, x) for row in matrix]


def _dot(a, b):
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


def _softmax(logits):
    top = max(logits)
    e = [math.exp(s - top) for s in logits]
    return [value / math.fsum(e) for value in e]
