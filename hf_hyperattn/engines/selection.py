"""Define the selection contract between rules and engines.

A `Rule` selects keys. It sees whole texts, and never masks, caches or kernels. Three classes
connect it to a call:

- `Places` give the position of every query and key in its row. Only the reader of masks makes them
  (mechanisms/selection/places.py), once for all layers of a model.
- `Summaries` describe blocks of keys, for example by the mean of a page. A cache stores them with
  its keys (mechanisms/sparse/pages_kept.py).
- `Lists` name the blocks of keys that each chunk of queries attends to. A kernel makes them from
  queries and summaries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def computed_once(method: Callable) -> Any:
    """Return a property that is computed once and stored in the object.

    Before Python 3.12, `functools.cached_property` has a lock, which torch's compiler cannot trace.
    """
    name = "_" + method.__name__

    def read_or_compute(self):
        # Compiled calls compute it each time: a program must not read a value that an earlier call
        # has stored.
        if torch.compiler.is_compiling():
            return method(self)
        if name not in self.__dict__:
            self.__dict__[name] = method(self)
        return self.__dict__[name]

    return property(read_or_compute, doc=method.__doc__)


@dataclass(frozen=True, eq=False)
class Places:
    """Positions of the queries and keys of a call in their rows.

    A row has `dropped` tokens that a cache has evicted, then the keys of the call. A token is
    *real* if it is neither padding nor an empty slot of a cache. The number of a real token is the
    count of real tokens before it in its row.

    Args:
        batch, queries, keys: Sizes B, N, M.
        device: Device of the tensors below.
        start: Index of the key that belongs to query 0; later queries belong to the keys after it.
            A tensor without axes if its value cannot be read, as in compiled calls. Default: 0.
        dropped: Number of tokens before key 0. Default: 0.
        real: Bool [B|1, dropped + M], the real tokens; None (default) if all are.
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
        """Number of keys up to the last query's own, None if unreadable; it may exceed M."""
        return self.start + self.queries if isinstance(self.start, int) else None

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are real, and none was dropped."""
        return self.real is None and not self.dropped

    @computed_once
    def count(self) -> Tensor:
        """Count of real tokens up to and including each token, int64 [B|1, dropped + M]."""
        if self.real is None:
            return torch.arange(1, self.dropped + self.keys + 1, device=self.device)[None]
        return self.real.cumsum(1)

    @computed_once
    def numbers(self) -> Tensor:
        """Number of each real token in its row, int64 [B|1, dropped + M]; -1 for others."""
        number = self.count - 1
        return number if self.real is None else number.masked_fill(~self.real, -1)

    @property
    def key_numbers(self) -> Tensor:
        """Numbers of the keys, int64 [B|1, M]; -1 for keys that are not real."""
        return self.numbers[:, self.dropped :]

    @computed_once
    def own_keys(self) -> Tensor:
        """Index of the key that belongs to each query, int64 [N].

        It is the last key for queries that stand behind all keys.
        """
        # Clamped to a valid index, because the result is used to gather.
        own = torch.arange(self.queries, device=self.device) + self.start
        return own.clamp(0, max(0, self.keys - 1))

    @computed_once
    def query_numbers(self) -> Tensor:
        """Numbers of the queries, int64 [B|1, N]; -1 for queries that are not real."""
        return self.key_numbers.index_select(1, self.own_keys)

    @computed_once
    def spans(self) -> tuple[list[int], list[int]] | None:
        """First real key of each row, and the end of its real keys.

        None if there is padding between real keys.

        Only valid if `stop` is known.
        """
        stop = self.stop or 0
        if self.real is None:
            return [0] * self.batch, [stop] * self.batch
        real = self.real[:, self.dropped :]
        # Without keys argmax would fail, and without rows the division below.
        if not real.numel():
            return [0] * self.batch, [0] * self.batch
        # argmax finds the first True. As long as the count fills the distance to the last True,
        # nothing is in between.
        counts, starts = real.sum(1), real.int().argmax(1)
        ends = real.shape[1] - real.flip(1).int().argmax(1)
        if bool((ends - starts != counts).logical_and(counts > 0).any()):
            return None
        # One row of `real` may stand for the whole batch.
        repeats = self.batch // len(counts)
        return starts.tolist() * repeats, (starts + counts).clamp_max(stop).tolist() * repeats

    def count_slots(self, stop: int, count: int) -> int:
        """Return how many tokens before `stop` include the last real ones.

        These are the last `count` real tokens of every row, or all of a row with fewer.

        Args:
            stop: End of the tokens, counted from the beginning of the rows with the dropped ones.
            count: Number of real tokens.
        """
        if not stop or self.real is None or not len(self.real):
            return min(stop, count)
        numbers = self.numbers[:, :stop]
        # The clamp excludes padding, which has number -1, in rows with fewer than `count` real
        # tokens.
        last = (numbers >= (numbers.amax(1, keepdim=True) + 1 - count).clamp_min(0)).int()
        # Rows without real tokens have only zeros and add nothing.
        return int((last.amax(1) * (stop - last.argmax(1))).amax())


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts that a mask packs into one row.

    Args:
        number: Number of the text of each key, int64 [B|1, M], from 0; -1 for padding.
        place: Number of each real key in its text, int64 [B|1, M]; undefined for padding.
    """

    number: Tensor
    place: Tensor


@dataclass(frozen=True, eq=False)
class Summaries:
    """Summaries of blocks of keys.

    There is one for each block that at least one row of the batch has completed.

    Args:
        rows: Summaries, float32 [B, Hkv, P, w]: the mean of a block's keys, or their maximum and
            then their minimum, by channel. Blocks that a row of the batch has not completed hold
            arbitrary numbers.
        starts: First real key of each row of the batch, where its blocks begin.
        size: Number of keys in a block.
    """

    rows: Tensor
    starts: Sequence[int]
    size: int


@dataclass(frozen=True, eq=False)
class Lists:
    """Blocks of keys that chunks of queries attend to.

    They come in addition to keys that queries see by their position.

    Args:
        rows: int32 [B, sum of chunks · most over the heads]: the table [chunks, most] of each head,
            flattened. An entry is the number of a block, or -1 for none. A chunk has each block
            once, in any order. Chunk 0 contains the first real query.
        shapes: (chunks, most) of each head: the number of chunks, and the largest number of blocks
            of one chunk.
    """

    rows: Tensor
    shapes: Sequence[tuple[int, int]]

    def of_heads(self) -> list[Tensor]:
        """Return the table of each head, views [B, chunks, most]."""
        parts = self.rows.split([chunks * most for chunks, most in self.shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Rule(ABC):
    """The keys that a query of one head attends to, in a text without padding."""

    @property
    def is_exact(self) -> bool:
        """Whether every query sees every key before it."""
        return False

    @property
    def only_causal(self) -> str:
        """The part of the rule that needs causal attention, for errors, or ""."""
        return f"{type(self).__name__}()"

    @property
    def earlier(self) -> int:
        """Number of earlier queries that a query's selection reads. Default: none."""
        return 0

    @property
    def reach(self) -> tuple[int, int] | None:
        """(near, sinks) if queries see only recent tokens and the first ones.

        A query then sees none but its last `near` tokens and the first `sinks` tokens of the text.

        Which of these it sees must depend only on their positions. A cache may evict all other
        tokens and calls `visible` with the rest of the text. None (default): later queries may see
        any token.
        """
        return None

    @abstractmethod
    def share(self, length: int) -> float:
        """Return the fraction of all causal logits that a head computes.

        All causal logits are length·(length+1)/2.

        Every key that a query sees counts as one logit, and so does every summary (of a page, of a
        cluster) that its selection scores. If a chunk of C queries shares a selection, a scored
        summary counts 1/C for each query.

        Args:
            length: Number of tokens of the text.
        """

    def share_both_sides(self, length: int) -> float:
        """Return the fraction of all length² logits that a head computes.

        This is the share in bidirectional attention.

        Args:
            length: Number of tokens of the text.

        Raises:
            ValueError: The rule is defined for causal attention only.
        """
        raise ValueError(
            f"{self.only_causal or type(self).__name__} has no share of the pairs on both sides; allowed: "
            "share(length) for causal attention, or a rule that defines share_both_sides, such as Window()"
        )

    @abstractmethod
    def visible(self, call: Any) -> Tensor:
        """Return the keys that each query sees.

        Args:
            call: Queries, keys and their positions: a `RuleCall` (mechanisms/sparse/rules.py).

        Returns:
            Bool, broadcastable to [B, H, N, M]. In a causal call, keys after a query are hidden
            anyway.
        """
