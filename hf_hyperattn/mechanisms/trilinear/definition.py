"""Trilinear attention: the definitions, as the papers have them.

Three-way ("2-simplicial") attention, arXiv 1909.00668 and 2507.02754: a query attends to pairs of keys,

    L_ijk = scale · Σ_l q_il k_jl k2_kl       P_ijk = softmax of L over all (j, k)       o_i = Σ_jk P_ijk (v_j ∘ v2_k)

and the pairwise trilinear score of BiDAF, arXiv 1611.01603, equation 1:

    S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j)

In both, `∘` multiplies number by number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import repeat_heads
from ...engines.options import Options
from .pairs import Windows, of_first, of_second


def simplicial(
    query: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    options: Options,
    windows: Windows,
) -> tuple[Tensor, Tensor]:
    """Three-way attention with all its N x M x M logits.

    Args:
        query: [B, H, N, d], scaled.
        keys: k and k2, each [B, Hkv, M, d].
        values: v and v2, each [B, Hkv, M, dv].
        options: masks and the rest. What hides a key hides it as j and as k; an additive mask is added for j and for
            k; `bias` is added for j; `softcap` acts on L; a sink stands beside the keys j, so that it is met with
            every k, and has no value.
        windows: how far j and k may be from i.

    Returns:
        The output [B, H, N, dv], and the weights of j, Σ_k P_ijk, [B, H, N, M], before dropout. A query that sees
        nothing gets zeros.
    """
    heads = query.shape[1]
    (k, k2), (v, v2) = ((repeat_heads(t, heads) for t in pair) for pair in (keys, values))
    logits = torch.einsum("bhnd,bhjd,bhkd->bhnjk", query, k, k2)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    n, m = logits.shape[2:4]
    rows, columns = range(n), range(m)
    first = of_first(options, windows, rows, columns, logits)
    second = of_second(options, windows, rows, torch.arange(m, device=query.device)[None], m, logits)
    logits = logits + first[..., :, None] + second[..., None, :]
    if options.sinks is not None:
        sinks = (options.sinks[:, None, None] + second).expand(*logits.shape[:3], m)
        logits = torch.cat([logits, sinks[..., None, :]], -2)
    weights = softmax(logits.flatten(-2)).unflatten(-1, logits.shape[-2:])[..., :m, :]
    dropped = torch.nn.functional.dropout(weights, options.dropout_p) if options.dropout_p else weights
    return torch.einsum("bhnjk,bhjv,bhkv->bhnv", dropped, v, v2), weights.sum(-1)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; where all is -inf, zeros with zero gradients."""
    top = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.sum(-1, keepdim=True)
    e = torch.exp(logits - top.clamp_min(torch.finfo(logits.dtype).min))
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def bidaf_scores(query: Tensor, key: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The logits of BiDAF, [B, H, N, M].

    Args:
        query: [B, H, N, d], unscaled.
        key: [B, Hkv, M, d].
        w1, w2, w3: [H, d].
    """
    k = repeat_heads(key, query.shape[1])
    of_query = torch.einsum("hd,bhnd->bhn", w1, query)[..., :, None]
    of_key = torch.einsum("hd,bhmd->bhm", w2, k)[..., None, :]
    return of_query + of_key + torch.einsum("hd,bhnd,bhmd->bhnm", w3, query, k)
