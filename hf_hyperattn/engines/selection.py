"""The selection contract: where the tokens of a call stand, and which keys each query attends to.

A `Rule` never sees masks, caches or kernels. It is about rows of whole texts:

- `Places` say for every query and every key which token of its row it is. Only the reader of masks makes them
  (mechanisms/selection/places.py), once for all layers of a model.
- `Summaries` stand for blocks of keys, such as the mean of a page. They are kept beside the keys of
  a cache (mechanisms/sparse/pages_kept.py).
- `Lists` say which blocks of keys each chunk of queries attends to. A kernel makes them from queries and summaries, and
  attends to the keys that they list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def computed_once(method: Callable) -> Any:
    """Return a property that is computed once and stored with the object; compiled calls compute it each time.

    `functools.cached_property` will not do: before Python 3.12 it has a lock, which the compiler cannot enter.
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

    A row has `dropped` tokens that a cache keeps no more, then the keys of the call. A token is *real* if it is neither
    padding nor an empty slot of a cache. The number of a real token is how many real tokens of its row stand before it.

    Args:
        batch, queries, keys: B, N, M.
        device: Where the tensors below are.
        start: The key that is query 0's own; the next query's is the next key. A tensor of no axes where it cannot be
            read, as in compiled calls.
        dropped: How many tokens stand before key 0.
        real: Bool [B|1, dropped + M], the real tokens; None if all are.
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
        """How many keys there are up to the last query's own, also where these are more than M; None if unreadable."""
        return self.start + self.queries if isinstance(self.start, int) else None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is padding, and nothing was dropped."""
        return self.real is None and not self.dropped

    @computed_once
    def count(self) -> Tensor:
        """int64 [B|1, dropped + M], how many real tokens of the row there are up to each token, itself included."""
        if self.real is None:
            return torch.arange(1, self.dropped + self.keys + 1, device=self.device)[None]
        return self.real.cumsum(1)

    @computed_once
    def numbers(self) -> Tensor:
        """int64 [B|1, dropped + M], the number of each real token in its row; -1 for the others."""
        number = self.count - 1
        return number if self.real is None else number.masked_fill(~self.real, -1)

    @property
    def key_numbers(self) -> Tensor:
        """int64 [B|1, M], the numbers of the keys; -1 for those that are not real."""
        return self.numbers[:, self.dropped :]

    @computed_once
    def own_keys(self) -> Tensor:
        """int64 [N], the key that is each query's own; the last key for queries that stand after all keys."""
        own = torch.arange(self.queries, device=self.device) + self.start
        return own.clamp(0, max(0, self.keys - 1))

    @computed_once
    def query_numbers(self) -> Tensor:
        """int64 [B|1, N], the numbers of the queries; -1 for those that are not real."""
        return self.key_numbers.index_select(1, self.own_keys)

    @computed_once
    def spans(self) -> tuple[list[int], list[int]] | None:
        """The first real key of each row, and the end of its real keys; None if padding stands between them.

        To be asked only where `stop` is known.
        """
        stop = self.stop or 0
        if self.real is None:
            return [0] * self.batch, [stop] * self.batch
        there = self.real[:, self.dropped :]
        if not there.numel():  # no rows, or rows without keys
            return [0] * self.batch, [0] * self.batch
        counts, starts = there.sum(1), there.int().argmax(1)
        ends = there.shape[1] - there.flip(1).int().argmax(1)
        if bool((ends - starts != counts).logical_and(counts > 0).any()):
            return None
        repeats = self.batch // len(counts)
        return starts.tolist() * repeats, (starts + counts).clamp_max(stop).tolist() * repeats

    def count_slots(self, stop: int, count: int) -> int:
        """Return how many tokens before `stop` one must take for the last `count` real ones of every row.

        Where a row has fewer real ones, for all of them.

        Args:
            stop: Counted from the beginning of the rows, dropped tokens included.
            count: Real tokens.
        """
        if not stop or self.real is None or not len(self.real):
            return min(stop, count)
        numbers = self.numbers[:, :stop]
        last = (numbers >= (numbers.amax(1, keepdim=True) + 1 - count).clamp_min(0)).int()
        return int((last.amax(1) * (stop - last.argmax(1))).amax())


@dataclass(frozen=True, eq=False)
class Texts:
    """Which tokens of a row belong together, where a mask packs several texts into one.

    Args:
        number: int64 [B|1, M], the text that each key is of, from 0; -1 for padding.
        place: int64 [B|1, M], the number of each real key in its text; of padding it says nothing.
    """

    number: Tensor
    place: Tensor


@dataclass(frozen=True, eq=False)
class Summaries:
    """What stands for blocks of keys, a row for each block that is complete in some row of the batch.

    Args:
        rows: float32 [B, Hkv, P, w]: the mean of the keys of a block, or the largest of them and then the least, by
            channel.
        starts: The first real key of each row of the batch; blocks begin there. What a row of the batch has not
            completed may hold anything.
        size: Keys of a block.
    """

    rows: Tensor
    starts: Sequence[int]
    size: int


@dataclass(frozen=True, eq=False)
class Lists:
    """The blocks of keys that chunks of queries attend to, beside what they see by place.

    Args:
        rows: int32 [B, sum of chunks · most over the heads]: for each head its table [chunks, most], flattened. An
            entry is the number of a block, or -1 for none; a chunk has each block once, in any order. Chunk 0 is the
            chunk of the first real query.
        shapes: (chunks, most) of each head: how many chunks there are, and how many blocks one attends to at most.
    """

    rows: Tensor
    shapes: Sequence[tuple[int, int]]

    def of_heads(self) -> list[Tensor]:
        """Return the lists of each head, views [B, chunks, most]."""
        parts = self.rows.split([chunks * most for chunks, most in self.shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Rule(ABC):
    """Which keys a query of one head attends to, in a text without padding."""

    @property
    def is_exact(self) -> bool:
        """Whether every query sees every key before it."""
        return False

    @property
    def only_causal(self) -> str:
        """The part of the rule that needs causal attention, for errors; "" if queries may see later tokens too."""
        return f"{type(self).__name__}()"

    @property
    def earlier(self) -> int:
        """How many queries before a query its selection reads; 0: it depends on the query and the keys alone."""
        return 0

    @property
    def reach(self) -> tuple[int, int] | None:
        """(near, sinks): a query sees none but its last `near` tokens and the first `sinks` tokens of the text.

        Whether it sees one of these depends on nothing but where they stand. All others may be forgotten; `visible` is
        then called with what is left of the text. None: any token may be seen by a later query.
        """
        return None

    @abstractmethod
    def share(self, length: int) -> float:
        """The fraction of all causal logits, length·(length+1)/2, that a head computes over a text of `length` tokens.

        One logit is counted for every key that a query sees, and for every summary (of a page, of a cluster) that its
        selection scores. Where a chunk of C queries shares a selection, a scored summary counts 1/C for each of them.
        """

    def share_both_sides(self, length: int) -> float:
        """Return the fraction of all length² logits that a head computes in attention that is not causal.

        Args:
            length: Tokens of the text.

        Raises:
            ValueError: The rule is defined for causal attention only.
        """
        raise ValueError(
            f"{self.only_causal or type(self).__name__} has no share of the pairs on both sides; allowed: "
            "share(length) for causal attention, or a rule that defines share_both_sides, such as Window()"
        )

    @abstractmethod
    def visible(self, call: Any) -> Tensor:
        """Bool, broadcastable to [B, H, N, M]: the keys that each query sees. In a causal call, what it says of
        keys after a query is ignored.

        Args:
            call: The queries, the keys and where they stand: a `RuleCall` (mechanisms/sparse/rules.py).
        """
