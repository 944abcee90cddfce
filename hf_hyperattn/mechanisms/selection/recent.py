"""The last queries of a conversation, for rules that select by earlier queries.

They are copied, pickled and freed with the cache, so two conversations never mix. Rows are
recognised by their keys, so beams, selected rows and crops need no bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The attribute of a Transformers cache that holds a `RecentQueries` for each attention layer, by
#: the layer's name.
RECENT = "_hyperattn_recent_queries"
#: Number of remembered calls for a layer and a cache. The last one is enough to go on. The prompt
#: is kept, too, so that a cache can be cropped back to it. Models that run one layer in several
#: cycles (HRM) make these calls in each cycle.
CALLS = 16


@dataclass(frozen=True, eq=False)
class Tail:
    """The last queries of a call, and keys that identify their rows.

    Args:
        query: [B, H, T, d], a copy.
        key: [B, Hkv, T', d], a copy of the keys of the last T' of these tokens.
        stop: One past the last of these tokens, counted from the beginning of the rows.
        continued: Whether the call continued a remembered one.
    """

    query: Tensor
    key: Tensor
    stop: int
    continued: bool

    def count_before(self, stop: int) -> int:
        """Return the number of queries before token `stop`.

        0 or less if the tail does not reach it.
        """
        return self.query.shape[2] - (self.stop - stop) if self.stop >= stop else 0

    def match_rows(self, key: Tensor, stop: int) -> Tensor:
        """Return the row of this tail that equals each row of a cache.

        Args:
            key: [B, Hkv, M, d], the last keys of the cache before `stop`.
            stop: Token at which the keys end.

        Returns:
            int64 [B]; -1 if no row is equal.
        """
        end = self.key.shape[2] - (self.stop - stop)
        compared = min(end, key.shape[2])
        if compared < 1 or key.shape[1] != self.key.shape[1]:
            return torch.full((len(key),), -1, device=key.device)
        held = self.key[:, :, end - compared : end].to(key.device)
        # Compare every row with every row, since beams may have changed their order. Keys must be
        # equal to the bit.
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
        """Return the queries [B, H, T, d] before a call, and remember the call's own.

        Args:
            query, key: Of the call. Keys begin `dropped` tokens after the rows do.
            start: The key that belongs to query 0.
            least: Number of queries that are needed, if the rows are that long; no more are
                returned.
            most: Largest number of earlier queries to look up. More than `least` are kept for later
                crops.
            count: Number of queries to remember.
            dropped: Number of tokens that the cache has dropped from the beginning of the rows.

        Returns:
            The queries; None if they are unknown for some row.
        """
        before = self.find_before(query, key, start=start, least=least, most=most, dropped=dropped)
        self.remember_call(query, key, start=start, before=before, count=count, dropped=dropped)
        if before is None:
            return None
        return before[:, :, max(0, before.shape[2] - least) :]

    def find_before(
        self, query: Tensor, key: Tensor, *, start: int, least: int, most: int, dropped: int
    ) -> Tensor | None:
        """Return up to `most` queries before a call; arguments are as in `go_on`."""
        held = key[:, :, max(0, start - most) : start]
        stop = start + dropped
        # For each row of the cache, the row of the tail that it equals; -1 until one is found.
        rows = torch.full((len(key),), -1, device=key.device)
        parts = []
        # The newest call first: it usually holds all rows. Rows that were put together may come
        # from several calls.
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
        # This call will keep all queries of a tail that it continues. Its first call, the prompt,
        # stays for crops.
        if len(parts) == 1 and tail.continued:
            self.tails.remove(tail)
        count = min(most, stop, *(tail.count_before(stop) for tail, _ in parts))
        result = query.new_zeros(len(query), query.shape[1], count, query.shape[3])
        for tail, new in parts:
            queries = tail.queries_before(stop, count)
            result[new] = queries[rows[new].to(queries.device)].to(result)
        return result

    def remember_call(
        self,
        query: Tensor,
        key: Tensor,
        *,
        start: int,
        before: Tensor | None,
        count: int,
        dropped: int,
    ) -> None:
        """Remember the last `count` queries of a call, and the keys of the same tokens.

        Args:
            query, key, start, count, dropped: As in `go_on`.
            before: The result of `find_before` for the call.
        """
        end = start + query.shape[2]
        queries = query if before is None else torch.cat([before, query], 2)
        tail = queries[:, :, -count:].detach().clone()
        keys = key[:, :, max(0, end - tail.shape[2]) : end].detach().clone()
        # Calls that end later belong to tokens that have been taken back since.
        self.tails = [known for known in self.tails if known.stop <= end + dropped]
        self.tails.append(
            Tail(query=tail, key=keys, stop=end + dropped, continued=before is not None)
        )
        del self.tails[:-CALLS]


def find_recent_queries(cache: Any, layer: str) -> RecentQueries | None:
    """Return the queries that an attention layer has left on a cache.

    None without a cache.

    Args:
        cache: The Transformers cache of the call.
        layer: Name of the attention layer, since several layers may share one layer of the cache.
    """
    if cache is None:
        return None
    # Some models wrap the self-attention part of an encoder-decoder cache again in every call. The
    # part itself lasts.
    owner = getattr(cache, "self_attention_cache", cache)
    attributes = getattr(owner, "__dict__", None)
    # A class with __slots__ takes no attributes. A rule that needs earlier queries then raises
    # (`RuleCall.check`).
    if attributes is None:
        return None
    return attributes.setdefault(RECENT, {}).setdefault(layer, RecentQueries())
