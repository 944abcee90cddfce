"""Attend to a cache that has evicted keys, in plain torch.

This is the fallback if the compiled kernel cannot compute a call. This module shows how the
cover of a query follows from its position (docs/hsa.md). Nothing is refined here, so one softmax
over the kept tokens and means is enough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...engines import Options
from .config import Rule
from .open_blocks import is_open
from .windowed.native import Levels


def attend_evicted(
    query: Tensor, levels: Levels, rule: Rule, options: Options, scale: float
) -> Tensor:
    """Compute `windowed.key.attend_levels`, causal and without refinement.

    Refinement would need scores of evicted keys.

    Args:
        query: [B, H, N, d]; query i is token `options.offset + i` of the row.
        levels: Kept tokens and means.
        rule, options, scale: As in `attend_levels`.

    Returns:
        [B, H, N, dv].
    """
    # The means decide dtype and device: tokens may be in half precision.
    like, queries = levels.keys[-1], query.shape[2]
    starts = torch.zeros(1).long() if levels.starts is None else levels.starts
    starts = starts.to(like.device).view(-1, 1, 1, 1)
    _, held = levels.held or (0, ((0, 0),) * len(levels.keys))

    def by_head(x, dtype) -> Tensor:
        return torch.as_tensor(x, dtype=dtype, device=like.device).reshape(1, -1, 1, 1)

    last = options.offset + queries
    place = torch.arange(options.offset, last, device=like.device).view(1, 1, -1, 1) - starts
    near, sinks = by_head(rule.near, torch.long), by_head(rule.sinks, torch.long)
    added = by_head(rule.block_bias, like.dtype)

    # Collect keys, values and additive masks [B|1, H|1, N, columns] of every level.
    parts = []
    tables = zip(levels.keys, levels.values, held, strict=True)
    for level, (key, value, (head, gone)) in enumerate(tables):
        row = torch.arange(key.shape[2], device=like.device)
        # Rows behind the front stand `gone` places later in the text. Windows start at each row's
        # first real token.
        index = torch.where(row < head, row, row + gone) - (0 if level else starts)
        seen = is_seen(levels.sizes, level, index, place, near, sinks)
        if level:
            # Mean logit + log|B| + block bias.
            bias = added + math.log(levels.sizes[level - 1])
        else:
            bias = torch.zeros_like(added)
        # Leave out columns that no query of any row sees.
        shown = seen.flatten(0, 2).any(0)
        seen = seen[..., shown]
        # Rows of a table that no query of a batch row sees may hold NaN, which a weight of 0 would
        # pass on.
        hidden = ~seen.flatten(1, 2).any(1)[:, None, :, None]
        key, value = (t[:, :, shown].masked_fill(hidden, 0.0) for t in (key, value))
        parts.append((key, value, torch.where(seen, bias, -math.inf)))
    if options.sinks is not None:
        # A key and a value of zeros give the sink's logit no value.
        no_key, no_value = (torch.zeros_like(t[:, :, :1]) for t in parts[0][:2])
        logit = by_head(options.sinks, like.dtype).expand(-1, -1, queries, 1)
        parts.append((no_key, no_value, logit))

    keys, values, biases = zip(*parts, strict=True)
    batch, heads = (max(b.shape[axis] for b in biases) for axis in (0, 1))
    mask = torch.cat([b.expand(batch, heads, -1, -1) for b in biases], -1)
    out = scaled_dot_product_attention(
        query.to(like.dtype),
        torch.cat(keys, 2),
        torch.cat(values, 2),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    # A query that sees nothing gives 0. SDPA does not promise this on every device.
    return out.masked_fill(mask.isneginf().all(-1, keepdim=True), 0.0)


def is_seen(
    sizes: tuple[int, ...], level: int, index: Tensor, place: Tensor, near: Tensor, sinks: Tensor
) -> Tensor:
    """Return bool: whether causal queries attend to blocks of one level.

    The blocks of level 0 are tokens. Windows are continued to the right: what a query sees does not
    depend on how many tokens follow.

    Args:
        sizes: Window sizes, bottom first.
        level: Level of the blocks.
        index: Numbers of the blocks, which count from a row's first real token.
        place: Places of the queries, which count likewise.
        near, sinks: As in `is_open`.
    """
    widths = (1, *sizes)
    start = place // sizes[0] * sizes[0]  # First token of the query's own window.

    def stands_open(level: int, index: Tensor) -> Tensor:
        first = index * widths[level]
        left = start - (first + widths[level] - 1)
        right = first - (start + sizes[0] - 1)
        return is_open(first, left, right, near, sinks)

    # A node is used if it is closed (or a token), and its parent is open.
    if level:
        seen = ((index + 1) * widths[level] <= start) & ~stands_open(level, index)
    else:
        seen = (index <= place) & (index >= 0)
    if level == len(sizes):
        return seen
    return seen & stands_open(level + 1, index // (widths[level + 1] // widths[level]))
