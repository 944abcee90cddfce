"""Three-way attention as a function, shaped like `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import Options, working_dtype
from ..checks import check_call, check_choice, check_tensor
from . import reference
from .attention import BACKENDS, attend
from .config import checked_windows
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
    """Three-way ("2-simplicial") attention (arXiv 1909.00668, 2507.02754): a query attends to pairs of keys.

        L_ijk = scale · Σ_l q_il k_jl k2_kl     P = softmax of L over all (j, k)     o_i = Σ_jk P_ijk (v_j ∘ v2_k)

    With key2 and value2 all ones it is ordinary attention.

    Args:
        query: [B, H, N, d], any floating dtype. Arithmetic is float32, float64 for float64 inputs.
        key, key2: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value, value2: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]; it holds for j and for k alike,
            an additive one is added for both. A query that sees no key gives 0.
        dropout_p: probability that a weight P_ijk is dropped, in [0, 1).
        is_causal: query i sees keys j, k <= i; intersects with `attn_mask`.
        scale: of the logits; None: 1/sqrt(d).
        enable_gqa: allow fewer heads of keys and values than of queries.
        windows: (w1, w2), each from 1, or None for any distance: i - w1 < j <= i and i - w2 < k <= i where causal,
            |i - j| < w1 and |i - k| < w2 otherwise. None: (None, None), at the cost of N·M² logits.
        backend: "blockwise" computes tiles, "reference" the definition with all N·M² logits; "auto" chooses.

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    for name, second, first in (("key2", key2, key), ("value2", value2, value)):
        check_tensor(name, second)
        if second.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(second.shape)}; allowed: that of {name[:-1]}, {tuple(first.shape)}"
            )
    check_choice("backend", backend, BACKENDS)
    spans = Windows(*(checked_windows("", windows) or (None, None)), is_causal)
    dtype = working_dtype(query, key, value, key2, value2)
    scaled, key, value, key2, value2 = (t.to(dtype) for t in (query, key, value, key2, value2))
    scaled = scaled * (float(query.shape[-1]) ** -0.5 if scale is None else scale)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    out, _ = attend(scaled, (key, key2), (value, value2), options, spans, backend=backend)
    return out.to(query.dtype)


def bidaf_scores(query: Tensor, key: Tensor, *, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The pairwise trilinear logits of BiDAF (arXiv 1611.01603, equation 1), straight from the definition:

        S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j)

    Args:
        query: [B, H, N, d], unscaled: 1/sqrt(d) is part of w3.
        key: [B, Hkv, M, d], Hkv dividing H.
        w1, w2, w3: [H, d] or, for all heads, [d].

    Returns:
        [B, H, N, M], float32, or float64 if one of the arguments has it.
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
    w1, w2, w3 = (torch.broadcast_to(w.to(dtype), (heads, width)) for w in (w1, w2, w3))
    return reference.bidaf_scores(query.to(dtype), key.to(dtype), w1, w2, w3)
