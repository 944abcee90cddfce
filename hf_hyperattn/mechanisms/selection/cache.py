"""The one cache of an attention layer: its keys and values, what mechanisms keep beside them, and what is forgotten.

A Transformers cache asks `LayerCache` to hold the tokens of a layer (integration/hierarchical_cache.py). Mechanisms
plug in what they need at every token: HSA the means of windows, sparse rules the summaries of pages. Such things are
`KeptWithKeys`: they follow when tokens are taken back or rows of the batch are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ...attached import attach, attached_to
from ...readable import is_recorded
from .growing import TAKEN_BACK, GrowingTensor

#: The nearest tokens and the first tokens that a head looks at, (near, sinks); None: it may look at any.
Reach = tuple[int, int] | None
#: Keys and values.
Pair = tuple[GrowingTensor, GrowingTensor]
EVICTING = "HierarchicalCache(evict=True)"


@dataclass(frozen=True)
class KeepWindows:
    """What HSA has to keep of a layer whose heads refine nothing.

    Args:
        sizes: Windows, bottom first, at least one.
        near, sinks: The most that a head asks for.
    """

    sizes: tuple[int, ...]
    near: int
    sinks: int


#: What a layer may have to keep: of HSA; of sparse rules, by key head. None: everything.
Keep = KeepWindows | tuple[Reach, ...] | None


class KeptWithKeys:
    """What a mechanism keeps beside the keys of a cache, until these change in another way than by growing."""

    def before_append(self) -> None:
        """Called before tokens are added."""

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`."""

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order: beams, or several answers to a prompt."""


class Blocks(KeptWithKeys):
    """Blocks of one size, of which each row of the batch has so many that are complete.

    Args:
        starts: The first token of each row that is no padding; blocks begin there.
        size: Tokens of a block.
    """

    def __init__(self, starts: list[int], size: int):
        self.starts, self.size = starts, size
        self.counts = [0] * len(starts)

    def complete(self, length: int) -> list[int]:
        """Return how many blocks of each row are complete with so many tokens."""
        return [max(0, length - start) // self.size for start in self.starts]

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        self.counts = [*map(min, self.counts, self.complete(length))]

    def pick(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        chosen = rows.tolist()
        self.starts, self.counts = ([of[r] for r in chosen] for of in (self.starts, self.counts))


class QueriesKept(KeptWithKeys):
    """The last queries of a layer: a cache keeps keys, and a rule may select by queries before those of a call."""

    def __init__(self):
        self.queries: GrowingTensor | None = None
        self.first = 0  # the token of the first of these queries

    def go_on(
        self, query: Tensor, key: Tensor, *, start: int, least: int, most: int, count: int, dropped: int
    ) -> Tensor | None:
        """See `recent.RecentQueries.go_on`. The cache says itself what is taken back: no keys are compared."""
        if self.queries is None or self.first + self.queries.length != start:
            self.queries, self.first = GrowingTensor(query), start
        held = self.queries.view()
        before = held[:, :, held.shape[2] - least :] if held.shape[2] >= least > 0 else None
        self.queries.append(query.detach())
        self.queries.evict(self.queries.length - count, 0)
        return before

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        if self.queries is not None:
            self.queries.length = max(self.queries.base, min(self.queries.length, length - self.first))

    def pick(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        if self.queries is not None:
            self.queries.pick(rows)


@dataclass(eq=False)
class Part:
    """Key heads that keep the same tokens, and their keys and values."""

    heads: list[int]
    reach: Reach
    tokens: Pair


Kept = TypeVar("Kept", bound=KeptWithKeys)


class LayerCache:
    """The keys and values of one layer, and what mechanisms keep beside them.

    Args:
        key: [B, Hkv, n, d] and
        value: [B, Hkv, n, dv]: what the first tokens look like; nothing is added yet.
        keep: What has to be kept, where the rest may be forgotten.
    """

    def __init__(self, key: Tensor, value: Tensor, keep: Keep = None):
        self.keep = keep
        self.reaches = keep if isinstance(keep, tuple) else (None,) * key.shape[1]
        if key.shape[1] != len(self.reaches) or value.shape[1] != len(self.reaches):
            raise ValueError(
                f"{EVICTING} was given {key.shape[1]} heads of keys and {value.shape[1]} of values, and the model was "
                f"made for {len(self.reaches)}; allowed: evict=False"
            )
        self.least = 0  # tokens that must be left when some are taken back
        self.beside: dict[Any, KeptWithKeys] = {}
        self.parts = []
        for reach in dict.fromkeys(self.reaches):
            heads = [h for h, other in enumerate(self.reaches) if other == reach]
            tokens = GrowingTensor(of_heads(key, heads)), GrowingTensor(of_heads(value, heads))
            self.parts.append(Part(heads, reach, tokens))

    @property
    def tokens(self) -> Pair:
        """Keys and values, of the first part where there are several."""
        return self.parts[0].tokens

    @property
    def length(self) -> int:
        """How many tokens were added, forgotten ones too."""
        return self.tokens[0].length

    @property
    def has_forgotten(self) -> bool:
        """Whether some tokens are gone."""
        return any(tensor.gone for part in self.parts for tensor in part.tokens)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens [B, Hkv, n, d]."""
        for kept in self.beside.values():
            kept.before_append()
        for part in self.parts:
            for tensor, new in zip(part.tokens, (key, value), strict=True):
                tensor.append(of_heads(new, part.heads))

    def show(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, by which attention finds this cache.

        Where some may be forgotten, they are placeholders, NaN, of the length that masks are made for.
        """
        heads, tokens = len(self.reaches), self.tokens
        key, value = (t.view() if self.keep is None else t.placeholder(heads) for t in tokens)
        attach(key, self)
        attach(value, self)
        return key, value

    def kept(self, name: Any, make: Callable[[], Kept]) -> Kept:
        """Return what is kept under this name; `make` makes it at first."""
        if name not in self.beside:
            self.beside[name] = make()
        found: Any = self.beside[name]
        return found

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`.

        Raises:
            ValueError: More is to be taken back than can be.
        """
        if length < self.least:
            raise ValueError(
                f"{EVICTING} cannot go back to {length} tokens, only to {self.least}; allowed: at most {TAKEN_BACK} "
                "tokens at once, reset(), or evict=False"
            )
        for part in self.parts:
            for tensor in part.tokens:
                tensor.length = min(tensor.length, length)
        for kept in self.beside.values():
            kept.crop(length)

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order: beams, or several answers to a prompt."""
        for part in self.parts:
            for tensor in part.tokens:
                tensor.pick(rows)
        for kept in self.beside.values():
            kept.pick(rows)

    def forget_unreachable(self, real: Tensor | None) -> None:
        """Forget what no query reaches from here on, nor from `TAKEN_BACK` tokens before.

        Args:
            real: Bool [B|1, M], which tokens are no padding; None: all.
        """
        for part in self.parts:
            if part.reach is None:
                continue
            near, sinks = part.reach
            first, head = self.length + 1 - near - TAKEN_BACK, sinks
            if real is not None:
                count = real.cumsum(1)
                first = int((count <= count[:, -1:] + 1 - near - TAKEN_BACK).sum(1).min())
                head = int((count <= sinks).sum(1).max())
            gone = part.tokens[0].gone
            for tensor in part.tokens:
                if first > head:
                    tensor.evict(first, head)
            if part.tokens[0].gone > gone:
                self.least = self.length - TAKEN_BACK


def of_heads(tensor: Tensor, heads: list[int]) -> Tensor:
    """Heads of [B, H, ...], as a view where they follow each other."""
    first, last = heads[0], heads[-1]
    return tensor[:, first : last + 1] if last - first + 1 == len(heads) else tensor[:, heads]


def layer_cache_of(key: Tensor, value: Tensor, mechanism: str, kind: type) -> LayerCache | None:
    """Return the cache that keys and values come from; None where there is none, or it has nothing to do with them.

    Args:
        key, value: Of an attention call.
        mechanism: The name for errors.
        kind: The type of `LayerCache.keep` that the mechanism can read, if something may be forgotten.

    Raises:
        ValueError: The cache has not kept all, and the call reads something else than what it kept.
    """
    if is_recorded():
        return None
    cache, other = attached_to(key, LayerCache), attached_to(value, LayerCache)
    either = cache or other
    if cache is not other and either is not None:
        if either.keep is not None:
            raise ValueError(
                f"{EVICTING} cannot serve a host that changes keys or values after they were cached; allowed: "
                "evict=False"
            )
        return None
    if cache is not None and cache.keep is not None and not isinstance(cache.keep, kind):
        raise ValueError(
            f"{EVICTING} was made for the model as it was patched before, and has forgotten keys that {mechanism} may "
            "read; allowed: a new cache, or evict=False"
        )
    return cache
