"""Trilinear attention as functions with the arguments of PyTorch's SDPA.

SDPA is `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import Options, working_dtype
from ..checks import check_call, check_choice, check_tensor
from . import reference
from .attention import BACKENDS, attend
from .config import check_windows
from .reference import Windows


def trilinear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key2: Tensor,
    value2: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    windows: tuple[int | None, int | None] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Three-way ("2-simplicial") attention: a query attends to pairs of keys.

    From arXiv 1909.00668 and 2507.02754:

        L_ijk = scale · Σ_l q_il k_jl k2_kl
        P = softmax of L over all (j, k)
        o_i = Σ_jk P_ijk (v_j ∘ v2_k)

    With key2 and value2 all ones it is ordinary attention.

    Args:
        query: Shape [B, H, N, d], any floating dtype. Arithmetic is float32, or float64 for float64
            inputs.
        key: Shape [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], where Hkv divides H.
        value: Shape [B, H or Hkv, M, dv].
        key2: Second key, of the shape of `key`.
        value2: Second value, of the shape of `value`.
        attn_mask: Bool (True = visible) or additive, broadcastable to [B, H, N, M]. It applies to j
            and to k; an additive mask is added for both. A query that sees no key gives 0.
        dropout_p: Probability of dropping a weight P_ijk, in [0, 1).
        is_causal: Query i sees keys j, k <= i, combined with `attn_mask`.
        scale: Scale of the logits; None means 1/sqrt(d).
        enable_gqa: Allow fewer key and value heads than query heads.
        windows: (w1, w2), each from 1, or None for any distance. Causal: i - w1 < j <= i and i - w2
            < k <= i. Otherwise: |i - j| < w1 and |i - k| < w2. None means (None, None), which costs
            N·M² logits.
        backend: "blockwise" computes tiles, "reference" the definition with all N·M² logits, "auto"
            chooses.

    Returns:
        Shape [B, H, N, dv], in the query's dtype.

    Raises:
        ValueError: An argument is out of range; the message names it, its value and the allowed
            values.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    for name, second, first in (("key2", key2, key), ("value2", value2, value)):
        check_tensor(name, second)
        if second.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(second.shape)}; allowed: that of {name[:-1]}, {tuple(first.shape)}"
            )
    check_choice("backend", backend, BACKENDS)
    spans = Windows(*(check_windows("", windows) or (None, None)), is_causal)
    # Half precision is computed in float32 and rounded once at the end.
    dtype = working_dtype(query, key, value, key2, value2)
    scaled, key, value, key2, value2 = (t.to(dtype) for t in (query, key, value, key2, value2))
    scaled = scaled * (float(query.shape[-1]) ** -0.5 if scale is None else scale)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    out, _ = attend(scaled, (key, key2), (value, value2), options, spans, backend=backend)
    return out.to(query.dtype)


def bidaf_scores(query: Tensor, key: Tensor, *, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The pairwise trilinear logits of BiDAF, by definition.

    From arXiv 1611.01603, equation 1:

        S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j)

    Args:
        query: Shape [B, H, N, d], unscaled: w3 contains 1/sqrt(d).
        key: Shape [B, Hkv, M, d], where Hkv divides H.
        w1: Weights of the query, shape [H, d], or [d] for all heads.
        w2: Weights of the key, of the same shapes.
        w3: Weights of the product, of the same shapes.

    Returns:
        Shape [B, H, N, M], float32, or float64 if an argument is float64.
    """
    check_call(query, key, key)
    heads, width = query.shape[1], query.shape[-1]
    for name, w in (("w1", w1), ("w2", w2), ("w3", w3)):
        check_tensor(name, w)
        if tuple(w.shape) not in ((width,), (heads, width)):
            raise ValueError(
                f"{name} has shape {tuple(w.shape)}; allowed: ({heads}, {width}) or ({width},)"
            )
    dtype = working_dtype(query, key, w1, w2, w3)
    # One vector for all heads is allowed.
    w1, w2, w3 = (torch.broadcast_to(w.to(dtype), (heads, width)) for w in (w1, w2, w3))
    return reference.bidaf_scores(query.to(dtype), key.to(dtype), w1, w2, w3)
