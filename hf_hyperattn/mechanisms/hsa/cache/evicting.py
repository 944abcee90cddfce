"""What a query sees of a cache that has evicted keys, where nothing is refined: keys, values, and a bias of the logits.

Whether a query sees an entry follows from their places alone (docs/hsa.md): an entry of a level stands in the cover if
its parent is open and it is not, and what is open holds one of the first `sinks` tokens or lies round the query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .mean_cache import MeanCache


@dataclass(frozen=True)
class Places:
    """Where queries stand, counted from their row's first real token, and what their heads ask for.

    Args:
        sizes: windows, bottom first.
        place: int64 [B, 1, N, 1].
        near, sinks: int64 [1, H or 1, 1, 1].
    """

    sizes: tuple[int, ...]
    place: Tensor
    near: Tensor
    sinks: Tensor

    def opened(self, level: int, block: Tensor) -> Tensor:
        """Bool [B, H or 1, N, n]: which blocks of a level above 0 are open."""
        width, bottom = self.sizes[level - 1], self.sizes[0]
        window = self.place // bottom * bottom
        first = block * width
        round_window = (first + width > window - self.near.clamp_min(1) + 1) & (first < window + bottom)
        return (first < self.sinks) | round_window

    def seen(self, level: int, entry: Tensor) -> Tensor:
        """Bool [B, H or 1, N, n]: which entries of a level, int64 [B or 1, 1, 1, n], stand in the cover."""
        width, bottom = (1, *self.sizes)[level], self.sizes[0]
        if level == 0:
            seen = (entry <= self.place) & (entry >= 0)
        else:
            seen = ~self.opened(level, entry) & ((entry + 1) * width <= self.place // bottom * bottom)
        if level == len(self.sizes):
            return seen
        return seen & self.opened(level + 1, entry * width // self.sizes[level])


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
    places = Places(cache.sizes, place, of_heads(near, torch.long), of_heads(sinks, torch.long))
    added = of_heads(0.0 if block_bias is None else block_bias, like.dtype)
    keys, values, biases = [], [], []
    for level, (key, value) in reversed(list(enumerate((cache.exact, *cache.means)))):
        entries, at = key.entries()
        seen = places.seen(level, at.view(1, 1, 1, -1) - (0 if level else starts))
        shown = seen.flatten(0, 2).any(0).nonzero()[:, 0]
        seen, pair = seen[..., shown], (entries[:, :, shown], value.entries()[0][:, :, shown])
        if cache.starts is not None:  # what no query of a row sees may hold anything, also no number
            unseen = ~seen.flatten(1, 2).any(1)[:, None, :, None]
            pair = tuple(t.masked_fill(unseen, 0.0) for t in pair)
        keys.append(pair[0])
        values.append(pair[1])
        bias = added + math.log(cache.sizes[level - 1]) if level else torch.zeros_like(added[:, :1])
        biases.append(torch.where(seen, bias, -math.inf))
    if sink_logit is not None:
        for entries in (keys, values):
            entries.insert(0, torch.zeros_like(entries[0][:, :, :1]))
        biases.insert(0, of_heads(sink_logit, like.dtype).expand(-1, -1, queries, 1))
    batch, heads = (max(b.shape[axis] for b in biases) for axis in (0, 1))
    biases = [b.expand(batch, heads, -1, -1) for b in biases]
    return torch.cat(keys, 2), torch.cat(values, 2), torch.cat(biases, -1)
