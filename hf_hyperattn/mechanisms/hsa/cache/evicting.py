"""Key-tied attention to what a cache that forgets has kept: one softmax over all of it, where nothing is refined.

Whether a query sees an entry follows from their places alone (docs/hsa.md): an entry of a level stands in the cover if
its parent is open and it is not, and what is open holds one of the first `sinks` tokens or lies round the query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .mean_cache import Store


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


def whole(numbers, like: Tensor) -> Tensor:
    """Numbers of the heads, or one for all, as int64 [1, H or 1, 1, 1]."""
    return torch.as_tensor(numbers, device=like.device).reshape(1, -1, 1, 1)


def attend_kept(
    query: Tensor,
    store: Store,
    *,
    near,
    sinks,
    block_bias,
    offset: int,
    scale: float,
    sink_logit: Tensor | None,
) -> Tensor:
    """As `key.attend` on `store.levels(...)`, causal and without refinement.

    Args:
        query: [B, H, N, d]; query i is token `offset + i` of the row. Other arguments as in `key.key_tied`.

    Returns:
        [B, H, N, dv]; O(N · what is kept) time and memory.
    """
    heads, kv_heads, device = query.shape[1], store.exact[0].room.shape[1], query.device
    starts = (
        query.new_zeros(len(query), dtype=torch.long) if store.starts is None else store.starts.to(device)
    )
    starts = starts.view(-1, 1, 1, 1)
    rows = torch.arange(query.shape[2], device=device).view(1, 1, -1, 1) + offset - starts
    places = Places(store.sizes, rows, whole(near, query), whole(sinks, query))
    query = query.to(store.exact[0].room.dtype) * scale
    grouped = query.unflatten(1, (kv_heads, -1))
    bias = torch.as_tensor(0.0 if block_bias is None else block_bias, dtype=query.dtype, device=device)
    logits, values = [], []
    for level, (keys, held) in enumerate((store.exact, *store.means)):
        key, place = keys.entries()
        seen = places.seen(level, place.view(1, 1, 1, -1) - (starts if level == 0 else 0))
        found = (grouped @ key[:, :, None].mT).flatten(1, 2)
        if level:
            found = found + math.log(store.sizes[level - 1]) + bias.reshape(1, -1, 1, 1)
        logits.append(found.masked_fill(~seen, float("-inf")))
        # what nobody sees may hold anything, also no number
        ever = (seen if seen.shape[1] == 1 else seen.any(1, keepdim=True)).any(2).view(len(seen), 1, -1, 1)
        values.append(held.entries()[0].masked_fill(~ever, 0.0))
    if sink_logit is not None:
        logits.append(sink_logit.to(query.dtype).view(1, -1, 1, 1).expand(len(query), -1, query.shape[2], 1))
    logits = torch.cat(logits, -1)
    nothing = logits.amax(-1, keepdim=True).isneginf()
    shares = torch.softmax(logits.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    value = torch.cat(values, 2)
    shares = shares[..., : value.shape[2]].unflatten(1, (kv_heads, heads // kv_heads))
    return (shares @ value[:, :, None]).flatten(1, 2)
