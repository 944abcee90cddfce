"""One query after another against a cache that forgets.

What a query sees changes only where a window of the bottom begins: within it, each query sees what the one before it
saw, and itself. So what is seen is gathered once a window, and a token costs one more entry and one call of SDPA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .evicting import Places, whole
from .mean_cache import Store


@dataclass
class Gathered:
    """What the queries of one window see, with room for those to come.

    Args:
        asked: what it was gathered for; tensors are copies.
        window: which one of the bottom.
        length: tokens that the cache had.
        count: entries that are filled.
        key, value: [B, Hkv, n, e].
        bias: what is added to the logits, [1, H or 1, 1, n]; -inf where a head does not see what another one does.
    """

    asked: tuple
    window: int
    length: int
    count: int
    key: Tensor
    value: Tensor
    bias: Tensor

    def serves(self, asked: tuple, window: int, length: int) -> bool:
        """Whether only the newest of `length` tokens is missing."""
        return (
            self.window == window
            and self.length == length - 1
            and all(same(a, b) for a, b in zip(self.asked, asked, strict=True))
        )

    def add(self, store: Store) -> None:
        """The newest token."""
        for room, grown in ((self.key, store.exact[0]), (self.value, store.exact[1])):
            room[:, :, self.count] = grown.room[:, :, grown.length - grown.base - 1]
        self.count, self.length = self.count + 1, self.length + 1


def attend_following(
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
    """`kept.attend_kept` for the newest token alone, query [B, H, 1, d], of a store whose rows all start at 0."""
    asked, window, length = (near, sinks, block_bias, sink_logit), offset // store.sizes[0], offset + 1
    found = store.gathered
    if found is not None and found.serves(asked, window, length):
        found.add(store)
    else:
        found = store.gathered = gather(store, *asked, offset)
    heads, groups = query.shape[1], found.key.shape[1]
    query = query.to(found.key.dtype).reshape(len(query), groups, heads // groups, -1)
    key, value, bias = (
        found.key[:, :, : found.count],
        found.value[:, :, : found.count],
        found.bias[..., : found.count],
    )
    bias = bias if bias.shape[1] == 1 else bias.reshape(1, groups, heads // groups, -1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    return out.reshape(len(query), heads, 1, -1)


def gather(store: Store, near, sinks, block_bias, sink_logit: Tensor | None, offset: int) -> Gathered:
    """What the query at `offset` sees, and room for the rest of its window."""
    like, (window, inside) = store.exact[0].room, divmod(offset, store.sizes[0])
    row = torch.full((1, 1, 1, 1), offset, device=like.device)
    places = Places(store.sizes, row, whole(near, like), whole(sinks, like))
    added = torch.as_tensor(0.0 if block_bias is None else block_bias, dtype=like.dtype, device=like.device)
    keys, values, biases = [], [], []
    for level, (key, value) in reversed(list(enumerate((store.exact, *store.means)))):
        entries, place = key.entries()
        seen = places.seen(level, place.view(1, 1, 1, -1))
        shown = seen.any(1).flatten().nonzero().flatten()
        keys.append(entries[:, :, shown])
        values.append(value.entries()[0][:, :, shown])
        bias = (
            added.reshape(1, -1, 1, 1) + math.log(store.sizes[level - 1])
            if level
            else added.new_zeros(1, 1, 1, 1)
        )
        biases.append(torch.where(seen[..., shown], bias, -math.inf))
    if sink_logit is not None:  # an entry of no value
        keys.insert(0, torch.zeros_like(keys[0][:, :, :1]))
        values.insert(0, torch.zeros_like(values[0][:, :, :1]))
        biases.insert(0, sink_logit.to(like.dtype).view(1, -1, 1, 1))
    heads = max(b.shape[1] for b in biases)
    count, room = sum(k.shape[2] for k in keys), store.sizes[0] - inside - 1
    biases = [b.expand(-1, heads, -1, -1) for b in (*biases, added.new_zeros(1, 1, 1, room))]
    padded = (torch.nn.functional.pad(torch.cat(parts, 2), (0, 0, 0, room)) for parts in (keys, values))
    asked = tuple(t.clone() if torch.is_tensor(t) else t for t in (near, sinks, block_bias, sink_logit))
    return Gathered(asked, window, offset + 1, count, *padded, torch.cat(biases, -1))


def same(a, b) -> bool:
    """Whether two numbers, lists or tensors hold the same."""
    if torch.is_tensor(a) or torch.is_tensor(b):
        return torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b)
    return a == b
