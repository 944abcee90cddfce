"""The last queries of a conversation, for selections that later calls with the same cache share with them.

A cache keeps keys and no queries, and a rule may select by the queries before those of a call. So the layer leaves its
last queries on the cache. They are copied, pickled and freed with it, and two conversations never meet. Rows are
recognised by their keys, so that beams, selected rows and crops need no bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The attribute of a Transformers cache that holds a `RecentQueries` for each attention layer, by the layer's name.
RECENT = "_hyperattn_recent_queries"
#: Calls that are remembered for a layer and a cache. The last one is enough to go on. The prompt is kept too, so that a
#: cache can be cropped back to it. Models that run one layer in several cycles (HRM) have these calls for each cycle.
CALLS = 16


@dataclass(frozen=True, eq=False)
class Tail:
    """The last queries [B, H, T, d] of a call, and the last T' of the same tokens' keys, [B, Hkv, T', d].

    Args:
        query, key: the tensors, which share no memory with the call's.
        stop: one past the last of these tokens, counted from the beginning of the rows.
        continued: whether the call continued a remembered one.
    """

    query: Tensor
    key: Tensor
    stop: int
    continued: bool

    def count_before(self, stop: int) -> int:
        """Return how many of the queries stand before token `stop`; 0 or less if the tail does not reach it."""
        return self.query.shape[2] - (self.stop - stop) if self.stop >= stop else 0

    def match_rows(self, key: Tensor, stop: int) -> Tensor:
        """Return int64 [B], the row here of each row of a cache whose last keys before `stop` are `key`; -1 if none."""
        end = self.key.shape[2] - (self.stop - stop)
        compared = min(end, key.shape[2])
        if compared < 1 or key.shape[1] != self.key.shape[1]:
            return torch.full((len(key),), -1, device=key.device)
        held = self.key[:, :, end - compared : end].to(key.device)
        same = (key[:, None, :, -compared:] == held[None]).flatten(2).all(2)
        return same.int().argmax(1).where(same.any(1), -1)

    def queries_before(self, stop: int, count: int) -> Tensor:
        """Return the `count` queries before token `stop`."""
        end = self.count_before(stop)
        return self.query[:, :, end - count : end]


class RecentQueries:
    """The last queries that one attention layer computed for one cache."""

    def __init__(self):
        self.tails: list[Tail] = []

    def go_on(
        self,
        query: Tensor,
        key: Tensor,
        *,
        start: int,
        least: int,
        most: int,
        count: int,
        dropped: int,
    ) -> Tensor | None:
        """Return the queries [B, H, T, d] that stand before those of a call, and remember the call's own.

        Args:
            query, key: The call's. Keys begin `dropped` tokens after the rows do.
            start: The key that belongs to query 0.
            least: Queries that are needed, if the rows have as many; no more are returned.
            most: Queries that are of use.
            count: Queries to remember.
            dropped: Tokens that the cache has dropped from the beginning of the rows.

        Returns:
            The queries; None if those of some row are not known.
        """
        before = self.find_before(query, key, start=start, least=least, most=most, dropped=dropped)
        self.keep(query, key, start=start, before=before, count=count, dropped=dropped)
        return before if before is None else before[:, :, max(0, before.shape[2] - least) :]

    def find_before(
        self, query: Tensor, key: Tensor, *, start: int, least: int, most: int, dropped: int
    ) -> Tensor | None:
        """Return up to `most` queries that stand before those of a call; arguments as in `go_on`."""
        held, stop = key[:, :, max(0, start - most) : start], start + dropped
        rows, parts = torch.full((len(key),), -1, device=key.device), []
        for tail in reversed(self.tails):
            if tail.count_before(stop) < max(1, min(least, stop)):
                continue
            matching = tail.match_rows(held, stop)
            new = (rows < 0) & (matching >= 0)
            rows = torch.where(new, matching, rows)
            if bool(new.any()):
                parts.append((tail, new))
            if bool((rows >= 0).all()):
                break
        else:
            return None
        if len(parts) == 1 and tail.continued:  # what this call keeps holds all of it
            self.tails.remove(tail)
        count = min(most, stop, *(tail.count_before(stop) for tail, _ in parts))
        result = query.new_zeros(len(query), query.shape[1], count, query.shape[3])
        for tail, new in parts:
            result[new] = tail.queries_before(stop, count)[rows[new].to(tail.query.device)].to(
                result
            )
        return result

    def keep(
        self,
        query: Tensor,
        key: Tensor,
        *,
        start: int,
        before: Tensor | None,
        count: int,
        dropped: int,
    ) -> None:
        """Remember the last `count` queries of a call, and the keys that there are of the same tokens.

        Args:
            query, key, start, count, dropped: As in `go_on`.
            before: The result of `find_before` for the call.
        """
        end = start + query.shape[2]
        queries = query if before is None else torch.cat([before, query], 2)
        tail = queries[:, :, -count:].detach().clone()
        keys = key[:, :, max(0, end - tail.shape[2]) : end].detach().clone()
        # Calls that end later were about tokens that have been taken back since.
        self.tails = [known for known in self.tails if known.stop <= end + dropped]
        self.tails.append(
            Tail(query=tail, key=keys, stop=end + dropped, continued=before is not None)
        )
        del self.tails[:-CALLS]


def recent_queries(cache: Any, layer: str) -> RecentQueries | None:
    """Return the queries that an attention layer has left on a cache; None without a cache.

    Args:
        cache: The Transformers cache of the call. Of an encoder-decoder cache the part for self-attention counts, which
            some models wrap again at every call.
        layer: The name of the attention layer, since several layers may share one layer of the cache.
    """
    if cache is None:
        return None
    owner = getattr(cache, "self_attention_cache", cache)
    attributes = getattr(owner, "__dict__", None)
    if attributes is None:  # a class with slots has no room: rules say themselves what is not known
        return None
    return attributes.setdefault(RECENT, {}).setdefault(layer, RecentQueries())
