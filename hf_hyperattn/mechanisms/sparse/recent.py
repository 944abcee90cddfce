"""The last queries of recent calls, for selections that later calls with the same cache share with them.

A cache keeps keys and no queries. So a layer keeps some of the last ones, each with its key; those of a later call are
known by the keys that stand before it, whatever rows the cache has got since (beams, batches) and however it was cut.
"""

from __future__ import annotations

from contextlib import suppress
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

    def known(self, stop: int) -> int:
        """How many queries before `stop` there are; 0 or less where it ends before."""
        return self.query.shape[2] - (self.stop - stop) if self.stop >= stop else 0

    def rows(self, key: Tensor, stop: int) -> Tensor:
        """int64 [B], the row here of each row of a cache whose last keys before `stop` are `key`; -1 where none is."""
        end = self.key.shape[2] - (self.stop - stop)
        some = min(end, key.shape[2])
        if some < 1 or key.shape[1] != self.key.shape[1]:
            return torch.full((len(key),), -1, device=key.device)
        same = (key[:, None, :, -some:] == self.key[None, :, :, end - some : end].to(key.device)).flatten(2).all(2)
        return same.int().argmax(1).where(same.any(1), -1)

    def before(self, stop: int, count: int) -> Tensor:
        """The `count` queries before `stop`."""
        end = self.known(stop)
        return self.query[:, :, end - count : end]


class Recent:
    """What a layer remembers of its last calls."""

    def __init__(self):
        self.tails: list[Tail] = []

    def __deepcopy__(self, memo: Any) -> Recent:
        return Recent()

    def __reduce__(self):
        return Recent, ()

    def before(self, query: Tensor, key: Tensor, start: int, least: int, most: int, dropped: int) -> Tensor | None:
        """Queries [B, H, T, d] that stood before a call's; None where they are not known in every row.

        Args:
            query, key: of the call; keys begin `dropped` tokens after the rows do.
            start: which key belongs to query 0.
            least, most: how many queries are of use, where the rows have as many.
        """
        held, stop = key[:, :, max(0, start - most) : start], start + dropped
        rows, parts = torch.full((len(key),), -1, device=key.device), []
        for tail in reversed(self.tails):
            if tail.known(stop) < max(1, min(least, stop)):
                continue
            there = tail.rows(held, stop)
            new = (rows < 0) & (there >= 0)
            rows = torch.where(new, there, rows)
            if bool(new.any()):
                parts.append((tail, new))
            if tail.continued and bool(new.all()):
                with suppress(ValueError):  # a thread with the same text was faster
                    self.tails.remove(tail)
            if bool((rows >= 0).all()):
                break
        else:
            return None
        count = min(most, stop, *(tail.known(stop) for tail, _ in parts))
        result = query.new_zeros(len(query), query.shape[1], count, query.shape[3])
        for tail, new in parts:
            result[new] = tail.before(stop, count)[rows[new].to(tail.query.device)].to(result)
        return result

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
