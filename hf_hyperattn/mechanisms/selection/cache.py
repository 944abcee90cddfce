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

#: (near, sinks): a head looks at its last `near` tokens and the first `sinks` tokens alone; None: it may look at any.
Reach = tuple[int, int] | None
#: Calls with several queries whose last queries are remembered.
CALLS = 16
#: Keys and values.
Pair = tuple[GrowingTensor, GrowingTensor]
#: How errors name a cache that forgets tokens.
EVICTING = "HierarchicalCache(evict=True)"


@dataclass(frozen=True)
class KeepWindows:
    """What has to be kept of a layer with Hierarchical Self-Attention that opens no blocks by their scores.

    Args:
        sizes: Windows, bottom first, at least one.
        near, sinks: The most that a head asks for.
    """

    sizes: tuple[int, ...]
    near: int
    sinks: int


#: Which tokens must stay: `KeepWindows` under Hierarchical Self-Attention, a `Reach` for each key head under sparse
#: rules, None for all tokens.
Keep = KeepWindows | tuple[Reach, ...] | None


class KeptWithKeys:
    """What a mechanism keeps beside the keys of a cache, which calls these methods to keep it in step with the keys."""

    def before_append(self, cache: LayerCache) -> None:
        """Called before tokens are added to the cache that this belongs to."""

    def crop(self, length: int) -> None:
        """Take back all tokens but the first `length`."""

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order: beams, or several answers to a prompt."""


class Blocks(KeptWithKeys):
    """Counts the complete blocks of each row of the batch.

    Args:
        starts: The first real token of each row; blocks begin there.
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
        self.first = 0  # the token of the first query that was ever added
        #: The last queries of calls with several, such as a prompt, and the token after them: a cache can be taken back
        #: to the end of these, however much was generated since.
        self.prompts: list[tuple[int, Tensor]] = []

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
        """Return the `least` queries before a call, None if they are not held, and remember the call's own.

        As `recent.RecentQueries.go_on`, whose arguments it takes. The cache says itself what is taken back, so that no
        keys need to be compared.
        """
        if self.queries is None or self.first + self.queries.length != start:
            self.queries, self.first, self.prompts = GrowingTensor(query), start, []
        held = self.queries.view()
        before = held[:, :, held.shape[2] - least :] if held.shape[2] >= least > 0 else None
        self.queries.append(query.detach())
        if query.shape[2] > 1:
            self.prompts.append(
                (start + query.shape[2], self.queries.view()[:, :, -count:].clone())
            )
            del self.prompts[:-CALLS]
        self.queries.evict(self.queries.length - count, 0)
        return before

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        if self.queries is None:
            return
        self.prompts = [
            (stop, queries) for stop, queries in self.prompts if stop - queries.shape[2] < length
        ]
        left = length - self.first - self.queries.base  # of those that are held
        self.queries.length = max(self.queries.base, min(self.queries.length, length - self.first))
        for stop, queries in self.prompts:
            of_prompt = queries[:, :, : length - stop] if stop > length else queries
            if stop >= length and of_prompt.shape[2] > left:
                self.queries, self.first = GrowingTensor(queries), length - of_prompt.shape[2]
                self.queries.append(of_prompt)
                left = of_prompt.shape[2]

    def pick(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        if self.queries is not None:
            self.queries.pick(rows)
            self.prompts = [
                (stop, queries[rows.to(queries.device)]) for stop, queries in self.prompts
            ]


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
        key, value: [B, Hkv, n, d] and [B, Hkv, n, dv], for their shapes, dtypes and device; no token is added yet.
        keep: What has to be kept, where the rest may be forgotten.
    """

    def __init__(self, key: Tensor, value: Tensor, keep: Keep = None):
        self.keep = keep
        self.reaches = keep if isinstance(keep, tuple) else (None,) * key.shape[1]
        if keep is not None and not (key.shape[1] == value.shape[1] == len(self.reaches)):
            raise ValueError(
                f"{EVICTING} was given {key.shape[1]} heads of keys and {value.shape[1]} of values, and the model was "
                f"made for {len(self.reaches)}; allowed: evict=False"
            )
        self.shortest = 0  # tokens that must be left when some are taken back
        self.beside: dict[Any, KeptWithKeys] = {}
        self.parts = []
        kinds = dict.fromkeys(self.reaches)
        for reach in kinds:
            heads = [h for h, other in enumerate(self.reaches) if other == reach]
            # Values may have other heads than keys, as long as all are kept together.
            pair = (
                (key, value) if len(kinds) == 1 else (of_heads(key, heads), of_heads(value, heads))
            )
            self.parts.append(Part(heads, reach, (GrowingTensor(pair[0]), GrowingTensor(pair[1]))))

    @property
    def tokens(self) -> Pair:
        """Keys and values, of the first part where there are several."""
        return self.parts[0].tokens

    @property
    def length(self) -> int:
        """Tokens of the rows: those that were added and not taken back, forgotten ones included."""
        return self.tokens[0].length

    @property
    def has_evicted(self) -> bool:
        """Whether some tokens were forgotten."""
        return any(tensor.gone for part in self.parts for tensor in part.tokens)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens [B, Hkv, n, d]."""
        for kept in self.beside.values():
            kept.before_append(self)
        for part in self.parts:
            for tensor, new in zip(part.tokens, (key, value), strict=True):
                tensor.append(new if len(self.parts) == 1 else of_heads(new, part.heads))

    def show(self) -> tuple[Tensor, Tensor]:
        """Return keys and values for Transformers to pass on; attention finds this cache by them.

        Where some may be forgotten, they are NaN of the full length, for which masks are made: one number, expanded.
        Attention then reads what is kept from the cache.
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
        """Take back all tokens but the first `length`.

        Raises:
            ValueError: More is to be taken back than can be.
        """
        if length < self.shortest:
            raise ValueError(
                f"{EVICTING} has forgotten keys that are read after a crop to {length} tokens; allowed: crops to "
                f"{self.shortest} tokens or more, reset(), or evict=False"
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

    def evict_unreachable(self, real: Tensor | None) -> None:
        """Forget what no query looks at from here on, nor from `TAKEN_BACK` tokens before.

        Args:
            real: Bool [B|1, M], the real tokens; None: all.
        """
        for part in self.parts:
            if part.reach is None:
                continue
            near, sinks = part.reach
            keep_from, keep_first = self.length + 1 - near - TAKEN_BACK, sinks
            if real is not None:  # rows share one tensor: what any of them needs is kept
                count = real.cumsum(1)
                keep_from = int((count <= count[:, -1:] + 1 - near - TAKEN_BACK).sum(1).min())
                keep_first = int((count <= sinks).sum(1).max())
            gone = part.tokens[0].gone
            if keep_from > keep_first:
                for tensor in part.tokens:
                    tensor.evict(keep_from, keep_first)
            if part.tokens[0].gone > gone:
                self.shortest = self.length - TAKEN_BACK


def of_heads(tensor: Tensor, heads: list[int]) -> Tensor:
    """Heads of [B, H, ...], as a view where they follow each other."""
    first, last = heads[0], heads[-1]
    return tensor[:, first : last + 1] if last - first + 1 == len(heads) else tensor[:, heads]


def layer_cache_of(key: Tensor, value: Tensor, mechanism: str, kind: type) -> LayerCache | None:
    """Return the cache that keys and values come from; None if they do not both come from one, and in recorded calls.

    Args:
        key, value: Of an attention call.
        mechanism: The name for errors.
        kind: The type of `LayerCache.keep` that the mechanism can read, if something may be forgotten.

    Raises:
        ValueError: The cache has not kept all, and the call reads something else than what it kept.
    """
    if is_recorded():
        return None
    cache = attached_to(key, LayerCache)
    if cache is not attached_to(value, LayerCache):
        return None
    if cache is not None and cache.keep is not None and not isinstance(cache.keep, kind):
        raise ValueError(
            f"{EVICTING} was made for the model as it was patched before, and has forgotten keys that {mechanism} may "
            "read; allowed: a new cache, or evict=False"
        )
    return cache
