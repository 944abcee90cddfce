"""What a query sees of a cache that has evicted keys, where nothing is refined: keys, values, and a bias of the logits.

Whether a query sees an entry follows from their places alone (docs/hsa.md, windowed/cover.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..windowed.cover import Cover
from .mean_cache import MeanCache


def gather(
    cache: MeanCache, first: int, queries: int, near, sinks, block_bias, sink_logit: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What some query from token `first` on sees, from the top level down to the tokens, the newest last.

    Args:
        near, sinks, block_bias: one for all heads, or one a head. sink_logit: [H], an entry of no value, or None.

    Returns:
        Keys and values [B, Hkv, n, e], 0 where no query of the row sees them, and what is added to the logits,
        [B or 1, H or 1, N, n]: -inf where a query does not see what another one does.
    """
    like, starts = cache.exact[0].room, cache.starts
    starts = torch.zeros(1, 1, 1, 1).long() if starts is None else starts.view(-1, 1, 1, 1)
    starts = starts.to(like.device)
    of_heads = lambda x, dtype: torch.as_tensor(x, dtype=dtype, device=like.device).reshape(1, -1, 1, 1)
    place = torch.arange(first, first + queries, device=like.device).view(1, 1, -1, 1) - starts
    counts = of_heads(near, torch.long), of_heads(sinks, torch.long)
    cover = Cover(cache.sizes, *counts, 0, True, cache.exact[0].length)
    added = of_heads(0.0 if block_bias is None else block_bias, like.dtype)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    biases: list[Tensor] = []
    for level, (key, value) in reversed(list(enumerate((cache.exact, *cache.means)))):
        entries, at = key.entries()
        seen = cover.seen(level, at.view(1, 1, 1, -1) - (0 if level else starts), place)
        shown = seen.flatten(0, 2).any(0).nonzero()[:, 0]
        seen = seen[..., shown]
        for tables, held in ((keys, entries), (values, value.entries()[0])):
            held = held[:, :, shown]
            if cache.starts is not None:  # what no query of a row sees may hold anything, also no number
                held = held.masked_fill(~seen.flatten(1, 2).any(1)[:, None, :, None], 0.0)
            tables.append(held)
        bias = added + math.log(cache.sizes[level - 1]) if level else torch.zeros_like(added[:, :1])
        biases.append(torch.where(seen, bias, -math.inf))
    if sink_logit is not None:
        for tables in (keys, values):
            tables.insert(0, torch.zeros_like(tables[0][:, :, :1]))
        biases.insert(0, of_heads(sink_logit, like.dtype).expand(-1, -1, queries, 1))
    batch, heads = (max(b.shape[axis] for b in biases) for axis in (0, 1))
    biases = [b.expand(batch, heads, -1, -1) for b in biases]
    return torch.cat(keys, 2), torch.cat(values, 2), torch.cat(biases, -1)
