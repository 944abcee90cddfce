"""`LayerCache`: keys and values of a layer, and state that mechanisms keep.

A Transformers cache stores the tokens of a layer here (integration/attention/hierarchical_cache.py).
Mechanisms add state that follows the keys (`KeptWithKeys`): HSA the means of windows, sparse rules
the summaries of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ...utils.attached import attach
from .growing import TAKEN_BACK, GrowingTensor

#: (near, sinks): a head only sees its last `near` tokens and the first `sinks` tokens; None: it may
#: see any.
Reach = tuple[int, int] | None
#: Number of calls with several queries whose last queries are kept.
CALLS = 16
#: Keys and values.
Pair = tuple[GrowingTensor, GrowingTensor]
#: The name in errors of a cache that evicts tokens.
EVICTING = "HierarchicalCache(evict=True)"


@dataclass(frozen=True)
class KeepWindows:
    """The keys to keep for a layer with HSA that opens no blocks by score.

    Args:
        sizes: Windows, smallest first, at least one.
        near, sinks: The largest values among the heads.
    """

    sizes: tuple[int, ...]
    near: int
    sinks: int


#: Which tokens must stay: `KeepWindows` under Hierarchical Self-Attention, a `Reach` for each key
#: head under sparse rules, None for all tokens.
Keep = KeepWindows | tuple[Reach, ...] | None


# State that follows the keys


class KeptWithKeys:
    """State of a mechanism in a cache.

    The cache calls these methods to keep it in step with the keys.
    """

    def before_append(self, cache: LayerCache) -> None:
        """Prepare for tokens that are about to be added to the cache."""

    def crop(self, length: int) -> None:
        """Take back all tokens but the first `length`."""

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order (beams, repeated prompts)."""


class Blocks(KeptWithKeys):
    """Counts the complete blocks of each row of the batch.

    Args:
        starts: First real token of each row; blocks begin there.
        size: Tokens of a block.
    """

    def __init__(self, starts: list[int], size: int):
        self.starts, self.size = starts, size
        self.counts = [0] * len(starts)

    def count_complete(self, length: int) -> list[int]:
        """Return the number of complete blocks of each row in a cache of `length` tokens."""
        return [max(0, length - start) // self.size for start in self.starts]

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        self.counts = [*map(min, self.counts, self.count_complete(length))]

    def select_rows(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        chosen = rows.tolist()
        self.starts = [self.starts[row] for row in chosen]
        self.counts = [self.counts[row] for row in chosen]


class QueriesKept(KeptWithKeys):
    """The last queries of a layer, for rules that select by earlier queries.

    A Transformers cache keeps only keys and values.
    """

    def __init__(self):
        self.queries: GrowingTensor | None = None
        self.first = 0  # the token of the first query that was ever added
        #: The last queries of calls with several, such as a prompt, and the token after them. A
        #: cache can be cropped back to the end of such a call, even if thousands of tokens were
        #: generated since.
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
        """Return the `least` queries before a call, and remember the call's own.

        Arguments are as in `recent.RecentQueries.go_on`. No keys are compared, because the cache
        itself reports tokens that are taken back.

        Returns:
            [B, H, least, d]; None if these queries are not held.
        """
        # Queries that do not end where this call starts belong to other tokens.
        if self.queries is None or self.first + self.queries.length != start:
            self.queries = GrowingTensor(query)
            self.first = start
            self.prompts = []
        held = self.queries.view()
        before = held[:, :, held.shape[2] - least :] if held.shape[2] >= least > 0 else None
        self.queries.append(query.detach())
        if query.shape[2] > 1:
            # A copy: a view would keep the whole room alive.
            last = self.queries.view()[:, :, -count:].clone()
            self.prompts.append((start + query.shape[2], last))
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
        # Number of held queries that are left.
        left = length - self.first - self.queries.base
        self.queries.length = max(self.queries.base, min(self.queries.length, length - self.first))
        # Go on from a prompt instead if it has more queries before the new end.
        for stop, queries in self.prompts:
            of_prompt = queries[:, :, : length - stop] if stop > length else queries
            if stop >= length and of_prompt.shape[2] > left:
                self.queries = GrowingTensor(queries)
                self.first = length - of_prompt.shape[2]
                self.queries.append(of_prompt)
                left = of_prompt.shape[2]

    def select_rows(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        if self.queries is not None:
            self.queries.select_rows(rows)
            self.prompts = [
                (stop, queries[rows.to(queries.device)]) for stop, queries in self.prompts
            ]


# The cache


@dataclass(eq=False)
class Part:
    """Key heads that keep the same tokens, and their keys and values."""

    heads: list[int]
    reach: Reach
    tokens: Pair


Kept = TypeVar("Kept", bound=KeptWithKeys)


class LayerCache:
    """The keys and values of one layer, and the state that mechanisms keep with them.

    Args:
        key, value: [B, Hkv, n, d] and [B, Hkv, n, dv], for their shapes, dtypes and device; no
            token is added yet.
        keep: The tokens to keep if others may be evicted; None: all.
    """

    def __init__(self, key: Tensor, value: Tensor, keep: Keep = None):
        self.keep = keep
        self.reaches = keep if isinstance(keep, tuple) else (None,) * key.shape[1]
        if keep is not None and not (key.shape[1] == value.shape[1] == len(self.reaches)):
            raise ValueError(
                f"{EVICTING} was given {key.shape[1]} heads of keys and {value.shape[1]} of values, and the model was "
                f"made for {len(self.reaches)}; allowed: evict=False"
            )
        self.shortest = 0  # a crop must leave this many tokens
        self.beside: dict[Any, KeptWithKeys] = {}
        self.parts = []
        # Heads with the same reach evict the same tokens, so they share a tensor.
        kinds = dict.fromkeys(self.reaches)
        for reach in kinds:
            heads = [h for h, other in enumerate(self.reaches) if other == reach]
            if len(kinds) == 1:
                # Values may have another number of heads than keys, as long as all are kept
                # together.
                part_key, part_value = key, value
            else:
                part_key, part_value = slice_heads(key, heads), slice_heads(value, heads)
            tokens = GrowingTensor(part_key), GrowingTensor(part_value)
            self.parts.append(Part(heads=heads, reach=reach, tokens=tokens))

    @property
    def tokens(self) -> Pair:
        """Keys and values of the first part, usually the only one."""
        return self.parts[0].tokens

    @property
    def length(self) -> int:
        """Number of tokens that were added and not taken back, evicted ones included."""
        return self.tokens[0].length

    @property
    def has_evicted(self) -> bool:
        """Whether some tokens were evicted."""
        return any(tensor.gone for part in self.parts for tensor in part.tokens)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append tokens, [B, Hkv, n, d] and [B, Hkv, n, dv]."""
        for kept in self.beside.values():
            kept.before_append(self)
        for part in self.parts:
            for tensor, new in zip(part.tokens, (key, value), strict=True):
                tensor.append(new if len(self.parts) == 1 else slice_heads(new, part.heads))

    def show_tokens(self) -> tuple[Tensor, Tensor]:
        """Return keys and values for Transformers to pass on.

        Attention finds this cache by these tensors. If tokens may be evicted, they are NaN of the
        full length, and Transformers makes masks for this length. Attention then reads the kept
        tokens from the cache.
        """
        key, value = self.tokens
        if self.keep is None:
            shown = key.view(), value.view()
        else:
            heads = len(self.reaches)
            shown = key.make_placeholder(heads), value.make_placeholder(heads)
        for tensor in shown:
            attach(tensor, self)
        return shown

    def get_kept(self, name: Any, make: Callable[[], Kept]) -> Kept:
        """Return the state that is kept under a name; `make` creates it on first use."""
        if name not in self.beside:
            self.beside[name] = make()
        found: Any = self.beside[name]
        return found

    def crop(self, length: int) -> None:
        """Take back all tokens but the first `length`.

        Raises:
            ValueError: Tokens were evicted that would be read after such a crop.
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

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order (beams, repeated prompts)."""
        for part in self.parts:
            for tensor in part.tokens:
                tensor.select_rows(rows)
        for kept in self.beside.values():
            kept.select_rows(rows)

    def evict_unreachable(self, real: Tensor | None) -> None:
        """Evict tokens that no later query can see, even after a crop.

        A crop may take back up to `TAKEN_BACK` tokens.

        Args:
            real: Bool [B|1, M], the real tokens; None: all.
        """
        for part in self.parts:
            if part.reach is None:
                continue
            near, sinks = part.reach
            if real is None:
                keep_from = self.length + 1 - near - TAKEN_BACK
                keep_first = sinks
            else:
                # Rows share one tensor: tokens stay if any row needs them.
                count = real.cumsum(1)
                keep_from = int((count <= count[:, -1:] + 1 - near - TAKEN_BACK).sum(1).min())
                keep_first = int((count <= sinks).sum(1).max())
            gone = part.tokens[0].gone
            if keep_from > keep_first:
                for tensor in part.tokens:
                    tensor.evict(keep_from, keep_first)
            if part.tokens[0].gone > gone:
                self.shortest = self.length - TAKEN_BACK


def slice_heads(tensor: Tensor, heads: list[int]) -> Tensor:
    """Return some heads of [B, H, ...]; a view if they are consecutive."""
    first, last = heads[0], heads[-1]
    return tensor[:, first : last + 1] if last - first + 1 == len(heads) else tensor[:, heads]
