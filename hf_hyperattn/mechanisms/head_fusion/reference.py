"""The weights of head fusion by definition: attention over heads, for every token.

Let x_i be the hidden state of token i that enters the layer, W the query map, and for each of the M
heads kappa_m a key and b_m a number:

    a_i = W x_i        beta_i = softmax_m(a_i · kappa_m + b_m)        o_im <- M · beta_im · o_im

This is applied before the output projection. kappa = 0 and b = 0 is the identity: every beta is
1/M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry.scalars import at_least


def head_weights(hidden: Tensor, query_map: Tensor, kappa: Tensor, bias: Tensor) -> Tensor:
    """Compute beta, the share of every head at every token.

    Args:
        hidden: x, shape [B, N, width].
        query_map: W, shape [size, width].
        kappa: Shape [M, size].
        bias: b, shape [M].

    Returns:
        Shape [B, N, M], rows sum to 1; float32, or float64 if an argument is float64.
    """
    tensors = (hidden, query_map, kappa, bias)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    x, w, k, b = (t.to(dtype) for t in tensors)
    return torch.softmax(torch.nn.functional.linear(x @ w.T, k, b), dim=-1)


def entropy(weights: Tensor) -> Tensor:
    """Compute the entropy of weights [..., M] in nats, shape [...].

    It is 0 if one head has all the weight, and log(M) for equal weights.
    """
    # `torch.special.entr` has an infinite derivative at 0, and a softmax can underflow to 0.
    return -(weights * at_least(weights, torch.finfo(weights.dtype).tiny).log()).sum(-1)
