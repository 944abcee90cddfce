"""Trilinear attention by definition, as in the papers.

Three-way ("2-simplicial") attention, arXiv 1909.00668 and 2507.02754: a query attends to pairs of
keys,

    L_ijk = scale · Σ_l q_il k_jl k2_kl
    P_ijk = softmax of L over all (j, k)
    o_i = Σ_jk P_ijk (v_j ∘ v2_k)

and the pairwise trilinear score of BiDAF, arXiv 1611.01603, equation 1:

    S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j)

In both, `∘` is the elementwise product.
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
    """The distance that keys may have from a query i.

    Args:
        first: w1, for j; None for any distance.
        second: w2, for k; None for any distance.
        back: True: windows look back only, i - w < j <= i. False: |i - j| < w.
    """

    first: int | None = None
    second: int | None = None
    back: bool = False

    def first_key(self, start: object) -> int:
        """Return the first key that queries from key `start` on can see.

        It is 0 if `start` is no number, or if a window is open.
        """
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
    """Compute three-way attention with all its N x M x M logits.

    Args:
        query: Scaled, shape [B, H, N, d].
        keys: k and k2, each [B, Hkv, M, d].
        values: v and v2, each [B, Hkv, M, dv].
        options: Masks and other options. A hidden key is hidden as j and as k; an additive mask is
            added for both. `bias` is added for j only. `softcap` applies to L. A sink is one more
            key j without a value, paired with every k.
        windows: Largest distances of j and k from i.

    Returns:
        Output [B, H, N, dv], and the weights of j, Σ_k P_ijk, [B, H, N, M], before dropout. A query
        that sees nothing gets zeros.
    """
    heads = query.shape[1]
    (k, k2), (v, v2) = ((repeat_heads(t, heads) for t in pair) for pair in (keys, values))
    logits = torch.einsum("bhnd,bhjd,bhkd->bhnjk", query, k, k2)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    n, m = logits.shape[2:4]
    i, j = torch.arange(n, device=query.device)[:, None], torch.arange(m, device=query.device)[None]
    first = sum_masks(
        options, windows.first, windows.back, i, j, logits, options.mask, options.bias
    )
    second = sum_masks(options, windows.second, windows.back, i, j, logits, options.mask)
    # Masks of j and of k are added on their own axes.
    logits = logits + first[..., :, None] + second[..., None, :]
    if options.sinks is not None:
        # A sink replaces the key j only, so the mask of k still applies to it.
        sinks = (options.sinks[:, None, None] + second).expand(*logits.shape[:3], m)
        logits = torch.cat([logits, sinks[..., None, :]], -2)
    # One softmax over all pairs (j, k); the sink's row is cut off afterwards.
    weights = softmax_with_sinks(logits.flatten(-2)).unflatten(-1, logits.shape[-2:])[..., :m, :]
    return torch.einsum(
        "bhnjk,bhjv,bhkv->bhnv", apply_dropout(weights, options), v, v2
    ), weights.sum(-1)


def sum_masks(
    options: Options,
    window: int | None,
    back: bool,
    i: Tensor,
    j: Tensor,
    like: Tensor,
    *masks: Tensor | None,
) -> Tensor:
    """Return what is added to the logits of query i with key j, shape [..., R, C].

    Hidden keys get -inf, additive masks add their numbers.

    Args:
        options: Causality, window and offset, which apply to either key.
        window: Window of this key, see `Windows`.
        back: Direction of this window, see `Windows`.
        i: Numbers of the queries, int64 [R, 1].
        j: Numbers of the keys, int64 [R|1, C].
        like: Tensor whose dtype the result has.
        masks: Masks for these queries and keys, bool or additive, [..., R|1, C|1].
    """
    # A window that looks back is a causal window for `visible_pairs`.
    looks_back = back and window is not None
    own_window = Options(is_causal=looks_back, window=window, offset=options.offset)
    shape = torch.broadcast_shapes(i.shape, j.shape)
    total = torch.zeros(shape, dtype=like.dtype, device=like.device)
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
    """Compute the logits of BiDAF.

    Args:
        query: Shape [B, H, N, d], unscaled.
        key: Shape [B, Hkv, M, d].
        w1: Shape [H, d].
        w2: Shape [H, d].
        w3: Shape [H, d].

    Returns:
        Shape [B, H, N, M].
    """
    k = repeat_heads(key, query.shape[1])
    of_query = torch.einsum("hd,bhnd->bhn", w1, query)[..., :, None]
    of_key = torch.einsum("hd,bhmd->bhm", w2, k)[..., None, :]
    return of_query + of_key + torch.einsum("hd,bhnd,bhmd->bhnm", w3, query, k)
