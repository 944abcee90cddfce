"""Queries against a cache that has evicted keys: one softmax over all that it keeps, O(what is kept) a query.

What a query sees changes only where a window of the bottom begins: within it, each query sees what the one before it
saw, and itself. So for the newest token what is seen is gathered once a window, and a token costs one more entry and
one call of SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .evicting import gather
from .mean_cache import MeanCache


@dataclass
class Gathered:
    """What the queries of one window see, with room for those to come.

    Args:
        rules: what it was gathered for; tensors are copies.
        window: which one of the bottom.
        length: tokens that the cache had.
        count: entries that are filled.
        key, value: [B, Hkv, n, e].
        bias: what is added to the logits, [1, H or 1, 1, n].
    """

    rules: tuple
    window: int
    length: int
    count: int
    key: Tensor
    value: Tensor
    bias: Tensor

    def serves(self, rules: tuple, window: int, length: int) -> bool:
        """Whether only the newest of `length` tokens is missing."""
        return (
            self.window == window
            and self.length == length - 1
            and all(same(a, b) for a, b in zip(self.rules, rules, strict=True))
        )

    def add(self, cache: MeanCache) -> None:
        """The newest token."""
        for room, tensor in ((self.key, cache.exact[0]), (self.value, cache.exact[1])):
            room[:, :, self.count] = tensor.room[:, :, tensor.length - tensor.base - 1]
        self.count, self.length = self.count + 1, self.length + 1


def attend_evicted(
    query: Tensor,
    cache: MeanCache,
    *,
    near,
    sinks,
    block_bias,
    offset: int,
    scale: float,
    sink_logit: Tensor | None,
) -> Tensor:
    """As `key.attend` on `cache.levels(...)`, causal and without refinement, which needs what is gone.

    Args:
        query: [B, H, N, d]; query i is token `offset + i` of the row. Other arguments as in `key.key_tied`.

    Returns:
        [B, H, N, dv].
    """
    rules, query = (near, sinks, block_bias, sink_logit), query.to(cache.exact[0].room.dtype)
    if query.shape[2] == 1 and cache.starts is None and offset + 1 == cache.exact[0].length:
        return _attend_newest(query, cache, rules, offset, scale)
    key, value, bias = gather(cache, offset, query.shape[2], *rules)
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    return out.masked_fill(bias.isneginf().all(-1, keepdim=True), 0.0)


def _attend_newest(query: Tensor, cache: MeanCache, rules: tuple, offset: int, scale: float) -> Tensor:
    """For the newest token alone, query [B, H, 1, d], of a cache whose rows all start at 0."""
    gathered, window = cache.gathered, offset // cache.sizes[0]
    if gathered is not None and gathered.serves(rules, window, offset + 1):
        gathered.add(cache)
    else:
        gathered = cache.gathered = _gathered(cache, rules, offset)
    heads, kv_heads, count = query.shape[1], gathered.key.shape[1], gathered.count
    query = query.reshape(len(query), kv_heads, heads // kv_heads, -1)
    key, value, bias = gathered.key[:, :, :count], gathered.value[:, :, :count], gathered.bias[..., :count]
    bias = bias if bias.shape[1] == 1 else bias.reshape(1, kv_heads, heads // kv_heads, -1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    return out.reshape(len(query), heads, 1, -1)


def _gathered(cache: MeanCache, rules: tuple, offset: int) -> Gathered:
    """What the query at `offset` sees, and room for the rest of its window."""
    window, inside = divmod(offset, cache.sizes[0])
    key, value, bias = gather(cache, offset, 1, *rules)
    count, room = key.shape[2], cache.sizes[0] - inside - 1
    key, value = (pad(t, (0, 0, 0, room)) for t in (key, value))
    rules = tuple(t.clone() if torch.is_tensor(t) else t for t in rules)
    return Gathered(rules, window, offset + 1, count, key, value, pad(bias, (0, room)))


def same(a, b) -> bool:
    """Whether two numbers, lists or tensors hold the same."""
    if torch.is_tensor(a) or torch.is_tensor(b):
        return torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b)
    return a == b
