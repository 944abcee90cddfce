"""The last queries of recent calls, for selections that later calls with the same cache share with them.

A cache keeps keys and no queries. So a layer keeps some of the last ones, each with its key; those of a later call are
known by the keys that stand before it, whatever rows the cache has got since (beams, batches) and however it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Calls that a layer remembers.
CALLS = 4


@dataclass(frozen=True, eq=False)
class Tail:
    """The last queries [B, H, T, d] of a call, and their keys [B, Hkv, T', d], the last T' of these tokens.

    Args:
        stop: one past the last of them, counted from the beginning of the rows.
        continued: whether the call continued one that was known.
    """

    query: Tensor
    key: Tensor
    stop: int
    continued: bool

    def rows(self, key: Tensor, stop: int, count: int) -> Tensor | None:
        """int64 [B], the row here of each row of a cache whose last keys before `stop` are these; -1 where none is.

        None where the tail does not reach back far enough.

        Args:
            key: [B, Hkv, T'', d], the keys before `stop`.
            count: how many queries before `stop` are asked for.
        """
        later = self.stop - stop
        if later < 0 or self.query.shape[2] - later < min(count, stop) or key.shape[1:2] != self.key.shape[1:2]:
            return None
        some = min(self.key.shape[2] - later, key.shape[2], count)
        if some < 1:
            return None
        mine = self.key[:, :, self.key.shape[2] - later - some : self.key.shape[2] - later]
        same = (key[:, None, :, -some:].to(mine.device) == mine[None]).flatten(2).all(2)
        return same.int().argmax(1).where(same.any(1), -1)

    def before(self, stop: int, count: int) -> Tensor:
        """The `count` queries before `stop`, fewer where the text begins there."""
        end = self.query.shape[2] - (self.stop - stop)
        return self.query[:, :, max(0, end - count) : end]


class Recent:
    """What a layer remembers of its last calls."""

    def __init__(self):
        self.tails: list[Tail] = []

    def __deepcopy__(self, memo: Any) -> Recent:
        return Recent()

    def __reduce__(self):
        return Recent, ()

    def before(self, query: Tensor, key: Tensor, start: int, count: int, dropped: int) -> Tensor | None:
        """Queries [B, H, up to `count`, d] that stood before a call's; None where they are not known in every row.

        Args:
            query, key: of the call; keys begin `dropped` tokens after the rows do.
            start: which key belongs to query 0.
        """
        held, stop = key[:, :, max(0, start - count) : start], start + dropped
        if not start or not self.tails:
            return None
        rows = torch.full((len(key),), -1, device=key.device)
        result = query.new_zeros(len(query), query.shape[1], min(count, stop), query.shape[3])
        for tail in reversed(self.tails):
            there = tail.rows(held, stop, count)
            new = None if there is None else (rows < 0) & (there.to(rows.device) >= 0)
            if there is None or new is None or not bool(new.any()):
                continue
            result[new] = tail.before(stop, count)[there.to(rows.device)[new]].to(result)
            rows = torch.where(new, there.to(rows.device), rows)
            if tail.continued and bool(new.all()):
                self.tails.remove(tail)
            if bool((rows >= 0).all()):
                return result
        return None

    def keep(self, query: Tensor, key: Tensor, start: int, before: Tensor | None, count: int, dropped: int) -> None:
        """Remember the last `count` queries of a call, and the keys that there are of the same tokens.

        Args:
            before: what `before` has given for it.
        """
        end = start + query.shape[2]
        every = query if before is None else torch.cat([before, query], 2)
        tail = every[:, :, -count:].detach().clone()
        keys = key[:, :, max(0, end - tail.shape[2]) : end].detach().clone()
        self.tails.append(Tail(tail, keys, end + dropped, before is not None))
        del self.tails[:-CALLS]
