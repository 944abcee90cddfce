"""The selection contract: where the tokens of a call stand, and which keys each query attends to.

A rule never sees masks, caches or kernels. It is given `Places`, which say for every query and every key which token of
its row it is. Only the reader of masks makes them (mechanisms/selection/places.py), once for all layers of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def computed_once(method: Callable) -> Any:
    """Return a property that keeps its value with the object, but in compiled calls.

    The compiler cannot enter the lock that `functools.cached_property` has before Python 3.12.
    """
    name = "_" + method.__name__

    def get(self):
        if torch.compiler.is_compiling():
            return method(self)
        if name not in self.__dict__:
            self.__dict__[name] = method(self)
        return self.__dict__[name]

    return property(get, doc=method.__doc__)


@dataclass(frozen=True, eq=False)
class Places:
    """Where the queries and the keys of a call stand in their rows.

    A row has `dropped` tokens that a cache keeps no more, then the keys of the call. Padding is not counted: the
    number of a token is how many tokens of its row stand before it.

    Args:
        batch, queries, keys: B, N, M.
        device: where the tensors below are.
        start: The key that is query 0's own; the next query's is the next key. A tensor of no axes where it cannot be
            read, as in compiled calls.
        dropped: The tokens before key 0.
        real: Bool [B|1, dropped + M], the tokens that are no padding and no empty slot of a cache; None if all are.
    """

    batch: int
    queries: int
    keys: int
    device: torch.device
    start: int | Tensor = 0
    dropped: int = 0
    real: Tensor | None = None

    @property
    def stop(self) -> int | None:
        """How many keys there are up to the last query's own; None where that cannot be read."""
        return self.start + self.queries if isinstance(self.start, int) else None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is padding, and nothing was dropped."""
        return self.real is None and not self.dropped

    @computed_once
    def count(self) -> Tensor:
        """int64 [B|1, dropped + M], how many tokens of the row there are up to each, and with it."""
        if self.real is None:
            return torch.arange(1, self.dropped + self.keys + 1, device=self.device)[None]
        return self.real.cumsum(1)

    @computed_once
    def row(self) -> Tensor:
        """int64 [B|1, dropped + M], the number of each token in its row; -1 for padding and empty slots."""
        number = self.count - 1
        return number if self.real is None else number.masked_fill(~self.real, -1)

    @property
    def key(self) -> Tensor:
        """int64 [B|1, M], the numbers of the keys."""
        return self.row[:, self.dropped :]

    @computed_once
    def slot(self) -> Tensor:
        """int64 [N], the key that is each query's own."""
        slot = torch.arange(self.queries, device=self.device) + self.start
        return slot.clamp(0, max(0, self.keys - 1))

    @computed_once
    def query(self) -> Tensor:
        """int64 [B|1, N], the numbers of the queries."""
        return self.key.index_select(1, self.slot)

    @computed_once
    def spans(self) -> tuple[list[int], list[int]] | None:
        """The first key of each row and the end of its keys, before `stop`; None if padding stands between tokens.

        To be asked only where `stop` is known.
        """
        stop = self.stop or 0
        if self.real is None:
            return [0] * self.batch, [stop] * self.batch
        there = self.real[:, self.dropped :]
        counts, starts = there.sum(1), there.int().argmax(1)
        ends = there.shape[1] - there.flip(1).int().argmax(1)
        if bool((ends - starts != counts).logical_and(counts > 0).any()):
            return None
        repeats = self.batch // len(counts)
        return starts.tolist() * repeats, (starts + counts).clamp_max(stop).tolist() * repeats

    def slots(self, stop: int, count: int) -> int:
        """Return how many slots before `stop` hold the last `count` tokens of every row, or all that a row has.

        Args:
            stop: Counted from the beginning of the rows.
            count: Tokens.
        """
        if not stop or self.real is None:
            return min(stop, count)
        row = self.row[:, :stop]
        last = (row >= (row.amax(1, keepdim=True) + 1 - count).clamp_min(0)).int()
        return int((last.amax(1) * (stop - last.argmax(1))).amax())


@dataclass(frozen=True, eq=False)
class Texts:
    """Which tokens of a row belong together, where a mask packs several texts into one.

    Args:
        number: int64 [B, M], the text that each key is of; -1 for padding.
        place: int64 [B, M], the number of each key in its text.
    """

    number: Tensor
    place: Tensor
