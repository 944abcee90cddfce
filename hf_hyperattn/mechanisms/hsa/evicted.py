"""Queries against a cache that has evicted keys, in plain torch, where the compiled kernel does not serve.

What a query sees of the cache follows from places alone (docs/hsa.md), since nothing is refined: one softmax over what
some query sees of all that is kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .open_blocks import is_open
from .windowed.means import Levels


def attend_evicted(
    query: Tensor,
    levels: Levels,
    *,
    near,
    sinks,
    block_bias,
    offset: int,
    scale: float,
    sink_logit: Tensor | None,
) -> Tensor:
    """As `key_tied` with these levels, causal and without refinement, which needs what is gone.

    Args:
        query: [B, H, N, d]; query i is token `offset + i` of the row. Other arguments as in `key_tied`.

    Returns:
        [B, H, N, dv].
    """
    like, queries = levels.keys[-1], query.shape[2]  # means: tokens may be in half precision
    starts = torch.zeros(1).long() if levels.starts is None else levels.starts
    _, held = levels.held or (0, ((0, 0),) * len(levels.keys))
    starts = starts.to(like.device).view(-1, 1, 1, 1)
    of_heads = lambda x, dtype: torch.as_tensor(x, dtype=dtype, device=like.device).reshape(
        1, -1, 1, 1
    )
    place = torch.arange(offset, offset + queries, device=like.device).view(1, 1, -1, 1) - starts
    near, sinks = (of_heads(x, torch.long) for x in (near, sinks))
    added = of_heads(0.0 if block_bias is None else block_bias, like.dtype)
    parts = []
    for level, (key, value, (head, gone)) in enumerate(
        zip(levels.keys, levels.values, held, strict=True)
    ):
        row = torch.arange(key.shape[2], device=like.device)
        index = torch.where(row < head, row, row + gone) - (0 if level else starts)
        seen = is_seen(levels.sizes, level, index, place, near, sinks)
        bias = added + math.log(levels.sizes[level - 1]) if level else torch.zeros_like(added)
        shown = seen.flatten(0, 2).any(0)
        seen = seen[..., shown]
        # what no query of a row sees may hold anything, also no number
        hidden = ~seen.flatten(1, 2).any(1)[:, None, :, None]
        tables = (t[:, :, shown].masked_fill(hidden, 0.0) for t in (key, value))
        parts.append((*tables, torch.where(seen, bias, -math.inf)))
    if sink_logit is not None:
        nothing = (torch.zeros_like(t[:, :, :1]) for t in parts[0][:2])
        parts.append((*nothing, of_heads(sink_logit, like.dtype).expand(-1, -1, queries, 1)))
    keys, values, biases = zip(*parts, strict=True)
    batch, heads = (max(b.shape[axis] for b in biases) for axis in (0, 1))
    mask = torch.cat([b.expand(batch, heads, -1, -1) for b in biases], -1)
    joined = torch.cat(keys, 2), torch.cat(values, 2)
    out = scaled_dot_product_attention(
        query.to(like.dtype), *joined, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.masked_fill(mask.isneginf().all(-1, keepdim=True), 0.0)


def is_seen(
    sizes: tuple[int, ...], level: int, index: Tensor, place: Tensor, near: Tensor, sinks: Tensor
) -> Tensor:
    """Bool: whether causal queries at `place` attend to the blocks (level 0: tokens) `index` themselves.

    Places count from a row's first real token. Windows are continued to the right, so that what a query sees does not
    depend on how many tokens follow.
    """
    widths, start = (1, *sizes), place // sizes[0] * sizes[0]

    def stands_open(level: int, index: Tensor) -> Tensor:
        first = index * widths[level]
        return is_open(
            first, start - (first + widths[level] - 1), first - (start + sizes[0] - 1), near, sinks
        )

    if level:
        seen = ((index + 1) * widths[level] <= start) & ~stands_open(level, index)
    else:
        seen = (index <= place) & (index >= 0)
    if level == len(sizes):
        return seen
    return seen & stands_open(level + 1, index // (widths[level + 1] // widths[level]))
