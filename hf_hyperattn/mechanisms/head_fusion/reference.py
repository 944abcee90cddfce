"""The weights of heads: attention over heads, for every token.

With x_i the hidden state that enters the host at token i, W the query map, and for each head m a key kappa_m and a
number b_m:

    a_i = W x_i        beta_i = softmax_m(a_i · kappa_m + b_m)        o_im <- M · beta_im · o_im

over the M heads, before the output projection. kappa = 0 and b = 0 is the identity: every beta is 1/M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry.scalars import at_least


def head_weights(hidden: Tensor, query_map: Tensor, kappa: Tensor, bias: Tensor) -> Tensor:
    """beta, the share of every head at every token.

    Args:
        hidden: x, [B, N, width].
        query_map: W, [size, width].
        kappa: [M, size].
        bias: b, [M].

    Returns:
        [B, N, M], rows sum to 1; float32, or float64 if one of the arguments has it.
    """
    tensors = (hidden, query_map, kappa, bias)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    x, w, k, b = (t.to(dtype) for t in tensors)
    return torch.softmax(torch.nn.functional.linear(x @ w.T, k, b), dim=-1)


def entropy(weights: Tensor) -> Tensor:
    """Entropy in nats of weights [..., M], as [...]: from 0, one head has everything, to log(M), all have the same."""
    # entr's derivative is infinite at 0, where a softmax may underflow
    return -(weights * at_least(weights, torch.finfo(weights.dtype).tiny).log()).sum(-1)
