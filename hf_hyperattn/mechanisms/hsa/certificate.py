"""Measure the loss of tying.

The loss is the KL divergence of tied attention from the softmax that it replaces (docs/hsa.md).
This module shows how the loss is computed without N² memory.

    loss = Σ_i KL(P_i ‖ softmax(S_i))        over the tokens i of a row, one number per row and head, in nats

For `tying="both"`, P is optimal among all matrices that are constant on sibling blocks, and its
loss has a closed form: Σ_i log Σ_j exp(S_ij) - N·ρ(root). The first term costs N² time, in blocks
of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...engines.options import Options, position_mask
from ...engines.score import repeat_heads
from ...hierarchy import Hierarchy
from .tree.both import attend_both_with_root
from .tree.layout import layout_of
from .windowed.key import key_tied

# Logits that are formed at a time: 32 MiB of float64.
BLOCK_ELEMENTS = 2**22


def loss_both(
    query: Tensor,
    key: Tensor,
    hierarchy: Hierarchy,
    scale: float | None = None,
    *,
    keep_diagonal: bool = True,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Return the loss of `tying="both"`, [B, H], by the closed form.

    Divide by the number of tokens for the mean in nats. Without the diagonal, the softmax has none
    either, and a row of one token has loss 0. Padding is ignored.

    Args:
        query, key, hierarchy, scale, keep_diagonal, position_bias: As in `attend_both_with_root`.
    """
    # The loss is the difference of two large sums. In float32, most of its digits would cancel.
    query, key = query.double(), key.double()
    # Only ρ(root) is needed, so the values are a single column.
    _, root = attend_both_with_root(
        query,
        key,
        key[..., :1],
        hierarchy,
        scale,
        keep_diagonal=keep_diagonal,
        position_bias=position_bias,
    )
    real = _find_real_tokens(hierarchy, query)
    total = torch.zeros_like(root)
    for rows, logits in _logit_blocks(query, key, scale, position_bias):
        logits = logits.masked_fill(~real[:, None, None], float("-inf"))
        # Compare with the softmax that has no diagonal either.
        if not keep_diagonal:
            logits.diagonal(offset=rows.start, dim1=-2, dim2=-1).fill_(float("-inf"))
        total += logits.logsumexp(-1).masked_fill(~real[:, None, rows], 0.0).sum(-1)
    # Without its diagonal, a row of one token attends to nothing, and ρ(root) is -inf.
    return torch.where(root.isneginf(), 0.0, total - real.sum(-1, keepdim=True) * root)


def loss_key(
    query: Tensor,
    key: Tensor,
    hierarchy: Hierarchy,
    scale: float | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    **rules,
) -> Tensor:
    """Return the loss of `tying="key"`, [B, H], from the attention weights.

    Args:
        query: [B, H, N, d].
        key: [B, Hkv, N, d], of the same tokens.
        hierarchy: Trees over these tokens; tokens in no tree are padding.
        mask: bool, True = visible, [1 or B, 1 or H, N, N]; needed only if it hides more than
            padding.
        rules: `near`, `sinks`, `refine_top_k`, `block_bias` as in `key_tied`.
        scale, is_causal, window, position_bias: As in `key_tied`, where the last is `bias`.
    """
    query, key = query.double(), key.double()
    bias = None if position_bias is None else position_bias.double()
    real = _find_real_tokens(hierarchy, query)
    length = query.shape[2]
    options = Options(is_causal=is_causal, window=window)
    total = query.new_zeros(query.shape[:2])
    for rows, logits in _logit_blocks(query, key, scale, bias):
        mask_part, bias_part = _select_rows(mask, rows), _select_rows(bias, rows)
        # Only the weights are needed, so the values are a single column.
        _, P = key_tied(
            query[:, :, rows],
            key,
            key[..., :1],
            hierarchy,
            is_causal=is_causal,
            offset=rows.start,
            scale=scale,
            window=window,
            mask=mask_part,
            bias=bias_part,
            weights=True,
            **rules,
        )
        assert P is not None
        # The softmax hides the same tokens as tied attention.
        hidden = ~real[:, None, None]
        seen = position_mask(options, (rows.start, rows.stop), (0, length), query.device)
        for t in (seen, mask_part):
            hidden = hidden if t is None else hidden | ~t
        full = torch.log_softmax(logits.masked_fill(hidden, float("-inf")), -1)
        # P log P - P log Q. Hidden tokens have P = 0 and log Q = -inf, whose product would be NaN.
        terms = torch.where(P > 0, torch.xlogy(P, P) - P * full, 0.0)
        total += terms.sum(-1).masked_fill(~real[:, None, rows], 0.0).sum(-1)
    return total


def _find_real_tokens(hierarchy: Hierarchy, query: Tensor) -> Tensor:
    """Return bool [B, N]: the tokens that are leaves of the hierarchy."""
    layout = layout_of(hierarchy, len(query), query.device)
    ones = query.new_ones(len(query), 1, query.shape[2])
    return layout.from_leaves(layout.to_leaves(ones))[:, 0] > 0


def _select_rows(t: Tensor | None, rows: slice) -> Tensor | None:
    """Return the rows of a mask or bias [..., N, N], or None."""
    return t if t is None else t[..., rows, :]


def _logit_blocks(
    query: Tensor, key: Tensor, scale: float | None, position_bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their logits S, [B, H, n, N], block after block."""
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, queries, _ = query.shape
    step = max(1, BLOCK_ELEMENTS // (batch * heads * key.shape[2]))
    columns = repeat_heads(key, heads).transpose(-1, -2)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        logits = factor * (query[:, :, rows] @ columns)
        yield rows, logits if position_bias is None else logits + position_bias[..., rows, :]
