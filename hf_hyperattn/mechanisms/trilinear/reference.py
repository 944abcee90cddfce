"""Trilinear attention: the definitions, as the papers have them.

Three-way ("2-simplicial") attention, arXiv 1909.00668 and 2507.02754: a query attends to pairs of keys,

    L_ijk = scale · Σ_l q_il k_jl k2_kl       P_ijk = softmax of L over all (j, k)       o_i = Σ_jk P_ijk (v_j ∘ v2_k)

and the pairwise trilinear score of BiDAF, arXiv 1611.01603, equation 1:

    S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j)

In both, `∘` multiplies number by number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...engines import repeat_heads
from ...engines.options import Options, visible_pairs
from ...engines.reference import apply_dropout, softmax_with_sinks


@dataclass(frozen=True)
class Windows:
    """How far keys may be from a query i.

    Args:
        first: w1, for j; None for any distance.
        second: w2, for k.
        back: windows look back only, i - w < j <= i; else |i - j| < w.
    """

    first: int | None = None
    second: int | None = None
    back: bool = False

    def first_key(self, start: object) -> int:
        """The first key that queries from key `start` on can see; 0 where that is no number, or a window is open."""
        if not isinstance(start, int) or self.first is None or self.second is None:
            return 0
        return max(0, start + 1 - max(self.first, self.second))


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
    i, j = torch.arange(n, device=query.device)[:, None], torch.arange(m, device=query.device)[None]
    first = added(options, windows.first, windows.back, i, j, logits, options.mask, options.bias)
    second = added(options, windows.second, windows.back, i, j, logits, options.mask)
    logits = logits + first[..., :, None] + second[..., None, :]
    if options.sinks is not None:
        sinks = (options.sinks[:, None, None] + second).expand(*logits.shape[:3], m)
        logits = torch.cat([logits, sinks[..., None, :]], -2)
    weights = softmax_with_sinks(logits.flatten(-2)).unflatten(-1, logits.shape[-2:])[..., :m, :]
    return torch.einsum(
        "bhnjk,bhjv,bhkv->bhnv", apply_dropout(weights, options), v, v2
    ), weights.sum(-1)


def added(
    options: Options,
    window: int | None,
    back: bool,
    i: Tensor,
    j: Tensor,
    like: Tensor,
    *masks: Tensor | None,
) -> Tensor:
    """What is added to the logits of query i with key j, [..., R, C]: -inf where a key is hidden, numbers of masks.

    Args:
        options: causality, window and offset hold for either key.
        window, back: of this key, see `Windows`.
        i: numbers of queries, int64 [R, 1]; j: of keys, [R|1, C].
        like: gives dtype.
        masks: of these queries and keys, bool or additive, [..., R|1, C|1].
    """
    own_window = Options(
        is_causal=back and window is not None, window=window, offset=options.offset
    )
    total = torch.zeros(
        torch.broadcast_shapes(i.shape, j.shape), dtype=like.dtype, device=like.device
    )
    for visible in (visible_pairs(options, i, j), visible_pairs(own_window, i, j)):
        if visible is not None:
            total.masked_fill_(~visible, float("-inf"))
    for mask in masks:
        if mask is not None and mask.dtype == torch.bool:
            total = total.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            total = total + mask.to(like.dtype)
    return total


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
