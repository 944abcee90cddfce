"""Hierarchies of a batch: one tree a row, or fixed windows kept as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .ids import checked_ids, extended_ids, ids_of_tree, levels_of, tree_of_ids
from .tree import Tree
from .windows import checked_sizes, window_ids, windows_tree


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """Trees over the tokens of a batch. Make one with `windows`, `from_parents`, `from_segment_ids`, ...

    Either `trees` and `tokens` hold one entry a row, or one entry for all rows; or `sizes` says that the groups are
    windows, and `starts` and `stops` between which tokens of a row they lie.

    Args:
        length: number of tokens of a row, padding included.
        trees: one tree a row, or one for all.
        tokens: for each tree, int64 [leaves]: the token of every leaf, in order. Padding is in none.
        sizes: of windows, bottom first.
        starts: int64 [B], the first real token of every row; None: 0 everywhere.
        stops: int64 [B], one past the last real token; None: `length` everywhere.
    """

    length: int
    trees: tuple[Tree, ...] = ()
    tokens: tuple[Tensor, ...] = ()
    sizes: tuple[int, ...] | None = None
    starts: Tensor | None = None
    stops: Tensor | None = None

    @classmethod
    def windows(cls, length: int, sizes: Sequence[int], attention_mask: Tensor | None = None) -> Hierarchy:
        """Fixed windows, the same in every row; they start at a row's first real token.

        Args:
            length: number of tokens, padding included.
            sizes: tokens in a window, bottom first, each dividing the next; () is the flat tree.
            attention_mask: [B, length], 0 or False at padding. Where padding lies between real tokens, windows are
                laid over the real ones.

        Raises:
            ValueError: sizes that do not divide each other; a mask of another length, or a row without real tokens.
        """
        sizes = checked_sizes(sizes)
        if length < 1:
            raise ValueError(f"length={length} is not allowed; allowed: at least 1")
        if attention_mask is None:
            return cls(length, sizes=sizes)
        real = checked_mask(attention_mask, length)
        starts = real.int().argmax(1)
        stops = length - real.flip(1).int().argmax(1)
        if bool((real.sum(1) == stops - starts).all()):
            return cls(length, sizes=sizes, starts=starts, stops=stops)
        tokens = tuple(row.nonzero()[:, 0] for row in real)
        return cls(length, tuple(windows_tree(len(t), sizes) for t in tokens), tokens)

    @classmethod
    def from_parents(
        cls,
        parents,
        tokens: Tensor | None = None,
        length: int | None = None,
        kinds=None,
        kind_names: Sequence[str] = ("",),
    ) -> Hierarchy:
        """A tree for all rows, or (a list of lists) one for each.

        Args:
            parents: one entry a node, the leaves first in token order, -1 for the root; or a list of such.
            tokens: the token of every leaf; None: token i is leaf i. A list of such where `parents` is one.
            length: number of tokens, padding included; None: of the longest row.
            kinds: the kind of the family below every node, or a list of such.
            kind_names: names of the kinds, "" first.

        Raises:
            ValueError: a cycle, orphans, several roots, inner nodes without tokens.
        """
        several = (
            len(parents) > 0 and not isinstance(parents[0], int) and torch.as_tensor(parents[0]).dim() > 0
        )
        every = [parents, tokens, kinds] if several else [[parents], [tokens], [kinds]]
        every = [e if e is not None else [None] * len(every[0]) for e in every]
        trees = tuple(Tree.from_parents(p, k, kind_names) for p, k in zip(every[0], every[2], strict=True))
        return cls.of_trees(trees, every[1], length)

    @classmethod
    def of_trees(
        cls, trees: Sequence[Tree], tokens: Sequence | None = None, length: int | None = None
    ) -> Hierarchy:
        """A batch of trees that are there already; arguments as in `from_parents`."""
        tokens = [None] * len(trees) if tokens is None else tokens
        found = tuple(checked_tokens(t, tree) for t, tree in zip(tokens, trees, strict=True))
        least = max(int(t[-1]) + 1 for t in found)
        length = least if length is None else length
        if length < least:
            raise ValueError(
                f"length={length} is not allowed; allowed: at least {least}, for all leaves to have a token"
            )
        return cls(length, tuple(trees), found)

    @classmethod
    def from_segment_ids(cls, ids: Tensor, kind_names: Sequence[str] = ("",)) -> Hierarchy:
        """Tokens with equal ids form a group.

        Args:
            ids: integers [length] or [batch, length]; or [batch, length, levels], coarse to fine, where a group is
                known by its ids from the coarsest level down. Negative: padding.
            kind_names: names of the kinds in ids that `to_ids` made.

        Raises:
            ValueError: another shape, or a row without tokens.
        """
        ids = checked_ids(ids)
        trees, tokens = zip(*(tree_of_ids(row, tuple(kind_names)) for row in ids), strict=True)
        return cls(ids.shape[1], trees, tokens)

    from_ids = from_segment_ids

    @property
    def is_windows(self) -> bool:
        """Whether the groups are windows that are kept as numbers."""
        return self.sizes is not None

    @property
    def rows(self) -> int:
        """Number of rows it tells apart; 1 fits any batch."""
        if self.is_windows:
            return 1 if self.starts is None else len(self.starts)
        return len(self.trees)

    def span(self, row: int) -> tuple[int, int]:
        """First real token of a row of windows, and one past the last."""
        row = row if self.rows > 1 else 0
        start = 0 if self.starts is None else int(self.starts[row])
        return start, self.length if self.stops is None else int(self.stops[row])

    def tree(self, row: int = 0) -> Tree:
        """The tree of one row."""
        return self.materialised.trees[row if self.rows > 1 else 0]

    def tokens_of(self, row: int = 0) -> Tensor:
        """int64 [leaves], the token of every leaf of one row."""
        return self.materialised.tokens[row if self.rows > 1 else 0]

    @cached_property
    def materialised(self) -> Hierarchy:
        """The same with `trees` and `tokens`, also for windows."""
        if not self.is_windows:
            return self
        spans = [self.span(row) for row in range(self.rows)]
        made = {count: windows_tree(count, self.sizes) for count in {stop - start for start, stop in spans}}
        tokens = tuple(torch.arange(*span) for span in spans)
        return Hierarchy(self.length, tuple(made[b - a] for a, b in spans), tokens)

    def to_ids(self) -> Tensor:
        """The tensor form, int64 [rows, length, levels]: coarse to fine, -1 at padding. `from_ids` reads it."""
        if self.is_windows and self.sizes:
            spans = torch.tensor([self.span(row) for row in range(self.rows)])
            index = torch.arange(self.length)
            inside = (index >= spans[:, :1]) & (index < spans[:, 1:])
            return window_ids(torch.where(inside, index - spans[:, :1], -1), self.sizes)
        found = self.materialised
        levels = max(map(levels_of, found.trees))
        rows = [
            ids_of_tree(t, k, self.length, levels) for t, k in zip(found.trees, found.tokens, strict=True)
        ]
        return torch.stack(rows)

    def fitted(self, batch: int, length: int, growing: bool = True) -> Hierarchy:
        """The same for a call of so many rows and keys.

        Rows are repeated one by one where the batch holds several of each (beams, several answers to a prompt). With
        `growing`, new tokens at the end continue the windows, or are siblings of the last token, and slots beyond are
        cut off: a causal host that generates has more keys than the prompt, and in chunks it has less.

        Raises:
            ValueError: the batch is no multiple of the rows, or the length differs where nothing grows.
        """
        if (batch, length) == (self.rows, self.length) or (self.rows == 1 and length == self.length):
            return self
        last = self.__dict__.get("_last_fitted")
        if last is not None and last[0] == (batch, length):
            return last[1]
        if self.rows != 1 and batch % self.rows:
            raise ValueError(
                f"the hierarchy has {self.rows} rows, the batch {batch}; allowed: 1, or a number that divides the "
                "batch"
            )
        if length != self.length and not growing:
            raise ValueError(
                f"the hierarchy covers {self.length} tokens, attention has {length}; allowed: equal numbers, padding "
                "and special tokens included"
            )
        found = self if length == self.length else self.resized(length)
        found = found if found.rows in (1, batch) else found.repeated(batch // found.rows)
        self.__dict__["_last_fitted"] = ((batch, length), found)
        return found

    def repeated(self, times: int) -> Hierarchy:
        """Every row so many times in succession."""
        index = [row for row in range(self.rows) for _ in range(times)]
        pick = lambda t: None if t is None else t[index]
        if self.is_windows:
            return replace(self, starts=pick(self.starts), stops=pick(self.stops))
        return replace(
            self, trees=tuple(self.trees[i] for i in index), tokens=tuple(self.tokens[i] for i in index)
        )

    def resized(self, length: int) -> Hierarchy:
        """With so many tokens: new ones continue the last windows or groups, missing ones are cut off."""
        if self.is_windows:
            stops = self.stops
            if stops is not None:
                stops = torch.where(stops == self.length, length, stops.clamp(max=length))
            return replace(self, length=length, stops=stops)
        ids = self.to_ids()[:, :length]
        return Hierarchy.from_ids(extended_ids(ids, length - self.length), self.kind_names)

    @property
    def kind_names(self) -> tuple[str, ...]:
        """Names of the kinds of families, "" first."""
        return max((t.kind_names for t in self.trees), key=len, default=("",))

    def to(self, *_, **__) -> Hierarchy:
        """Itself: a hierarchy lives on the CPU, and what it gives to attention is moved there."""
        return self


def checked_mask(mask: Tensor, length: int) -> Tensor:
    """A padding mask as bool [B, length]."""
    mask = torch.as_tensor(mask)
    if mask.dim() != 2 or mask.shape[1] != length:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; allowed: [batch, {length}]")
    real = (mask != 0).cpu()
    if not bool(real.any(1).all()):
        raise ValueError("attention_mask has a row without real tokens; allowed: at least one in every row")
    return real


def checked_tokens(tokens, tree: Tree) -> Tensor:
    """The token of every leaf, ascending, int64 [leaves]."""
    tokens = torch.arange(tree.leaves) if tokens is None else torch.as_tensor(tokens).cpu().long()
    if tokens.shape != (tree.leaves,):
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; allowed: one a leaf, ({tree.leaves},)")
    if bool((tokens < 0).any()) or bool((tokens.diff() <= 0).any()):
        raise ValueError(
            "tokens are not in ascending order; allowed: leaves in the order of their tokens, each once"
        )
    return tokens


def as_hierarchy(value: Hierarchy | Tensor) -> Hierarchy:
    """What `model(..., hierarchy=...)` takes, as a `Hierarchy`; a tensor is read once and remembered while it lives.

    Raises:
        ValueError: neither a `Hierarchy` nor group ids.
    """
    if isinstance(value, Hierarchy):
        return value
    if not isinstance(value, Tensor):
        raise ValueError(
            f"hierarchy is a {type(value).__name__}; allowed: a Hierarchy, or group ids as an integer tensor "
            "[batch, length, levels]"
        )
    version = None if value.is_inference() else value._version
    known = _READ.get(value)
    if known is None or known[0] != version:
        known = _READ[value] = (version, Hierarchy.from_ids(value))
    return known[1]


_READ = WeakIdKeyDictionary()
