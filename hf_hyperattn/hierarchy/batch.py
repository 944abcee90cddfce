"""Hierarchies of a batch: one tree a row, or fixed windows kept as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..attached import attach, attached_to
from .ids import checked_ids, checked_mask, extended_ids, ids_of_tree, levels_of, tree_of_ids
from .shapes import add_special_ids, joined_ids, quadtree_ids, span_parents
from .text import Level, checked_levels, outline_ids
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
    def windows(
        cls, length: int, sizes: Sequence[int], attention_mask: Tensor | None = None
    ) -> Hierarchy:
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
            len(parents) > 0
            and not isinstance(parents[0], int)
            and torch.as_tensor(parents[0]).dim()
        )
        every: list[Any] = [parents, tokens, kinds] if several else [[parents], [tokens], [kinds]]
        every = [e if e is not None else [None] * len(every[0]) for e in every]
        trees = tuple(
            Tree.from_parents(p, k, kind_names) for p, k in zip(every[0], every[2], strict=True)
        )
        return cls.of_trees(trees, every[1], length)

    @classmethod
    def of_trees(
        cls, trees: Sequence[Tree], tokens: Sequence | None = None, length: int | None = None
    ) -> Hierarchy:
        """A batch of trees that are there already; arguments as in `from_parents`."""
        tokens = [None] * len(trees) if tokens is None else tokens
        places = tuple(checked_tokens(t, tree) for t, tree in zip(tokens, trees, strict=True))
        least = max(int(t[-1]) + 1 for t in places)
        length = least if length is None else length
        if length < least:
            raise ValueError(
                f"length={length} is not allowed; allowed: at least {least}, for all leaves to have a token"
            )
        return cls(length, tuple(trees), places)

    @classmethod
    def from_segment_ids(cls, ids: Tensor, kind_names: Sequence[str] = ("",)) -> Hierarchy:
        """Tokens with equal ids form a group.

        Args:
            ids: integers [length] or [batch, length]; or [batch, length, levels], coarse to fine, where a group is
                known by its ids from the coarsest level down. Negative: padding.
            kind_names: names of the kinds in ids that `to_ids` made.

        Raises:
            ValueError: another shape, a row without tokens, or fewer names than kinds.
        """
        ids = checked_ids(ids)
        trees, tokens = zip(*(tree_of_ids(row, tuple(kind_names)) for row in ids), strict=True)
        return cls(ids.shape[1], trees, tokens)

    from_ids = from_segment_ids

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[int, int]], length: int) -> Hierarchy:
        """Groups of neighbouring tokens, given by (first token, one past the last); tokens in none are under the root.

        Raises:
            ValueError: a span without tokens or beyond them, or two that overlap without one holding the other.
        """
        return cls.of_trees([Tree.from_parents(span_parents(list(spans), length))])

    @classmethod
    def from_text(
        cls,
        text: str | Sequence,
        offsets: Tensor | Sequence,
        levels: Sequence[Level] = ("paragraph", "sentence", "word"),
        attention_mask: Tensor | None = None,
        sequence_ids: Sequence | None = None,
    ) -> Hierarchy:
        """The outline of texts, over their tokens; special tokens are children of the root.

        Args:
            text: a text; or a list with one a row, where a pair of texts is a tuple.
            offsets: what a fast tokenizer gives with `return_offsets_mapping=True`: [length, 2] or [batch, length, 2].
            levels: coarse to fine, of "paragraph", "line", "sentence", "word", "markdown" (sections under headings),
                "code" (blocks by indentation), "python" (classes and functions), or functions from a text to a list of
                levels, each the ascending places of characters at which its parts begin.
            attention_mask: [batch, length], 0 at padding; None: there is none.
            sequence_ids: for pairs, `encoding.sequence_ids(row)` of every row: 0 or 1 a token, None at special ones.

        Returns:
            One tree a row. The kinds of its families are "text" (under the root; "pair" where there are two) and the
            levels' names.

        Raises:
            ValueError: an unknown level, offsets beyond the text, numbers of rows that differ.
        """
        return cls.from_ids(
            *outline_ids(text, offsets, checked_levels(levels), attention_mask, sequence_ids)
        )

    @classmethod
    def quadtree(
        cls,
        rows: int,
        columns: int,
        before: int = 0,
        after: int = 0,
        factor: int = 2,
        kind: str = "image",
    ) -> Hierarchy:
        """Patches of an image in raster order, in cells of 2 x 2, 4 x 4, ... patches.

        Args:
            rows, columns: numbers of patches; they need not be powers of two.
            before, after: numbers of special tokens (CLS, registers) around the patches, children of the root.
            factor: how many cells a side make one of the next level.
            kind: name of the kind of the root's family; that of the cells is "cell".

        Raises:
            ValueError: no patches, or a factor below 2.
        """
        ids = add_special_ids(quadtree_ids(rows, columns, factor), before, after)
        return cls.from_ids(ids[None], ("", kind, "cell"))

    @classmethod
    def join(cls, parts: Sequence[Hierarchy | int], kind: str = "signals") -> Hierarchy:
        """Several signals that follow each other in one sequence, each a child of one new root.

        Args:
            parts: hierarchies, such as one of a text and one of an image; a number stands for so many special tokens,
                children of the new root. Rows: the same number everywhere, or 1.
            kind: name of the kind of the new root's family. The kinds of the parts keep their names.

        Raises:
            ValueError: no hierarchy, or numbers of rows that differ.
        """
        return cls.from_ids(*joined_ids(parts, kind))

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
        trees = tuple(windows_tree(stop - start, self.sizes or ()) for start, stop in spans)
        return Hierarchy(self.length, trees, tuple(torch.arange(*span) for span in spans))

    def to_ids(self) -> Tensor:
        """The tensor form, int64 [rows, length, levels]: coarse to fine, -1 at padding. `from_ids` reads it."""
        if self.is_windows and self.sizes:
            spans = torch.tensor([self.span(row) for row in range(self.rows)])
            index = torch.arange(self.length)
            inside = (index >= spans[:, :1]) & (index < spans[:, 1:])
            return window_ids(torch.where(inside, index - spans[:, :1], -1), self.sizes)
        trees, tokens = self.materialised.trees, self.materialised.tokens
        levels = max(map(levels_of, trees))
        return torch.stack([ids_of_tree(t, k, self.length, levels) for t, k in zip(trees, tokens)])

    @property
    def kind_names(self) -> tuple[str, ...]:
        """Names of the kinds of families, "" first."""
        return max((t.kind_names for t in self.trees), key=len, default=("",))

    def fitted(self, batch: int, length: int, growing: bool = True) -> Hierarchy:
        """The same for a call of so many rows and keys.

        Rows are repeated one by one where the batch holds several of each (beams, several answers to a prompt). With
        `growing`, new tokens at the end continue the windows, or are siblings of the last token, and slots beyond are
        cut off: a causal host that generates has more keys than the prompt, and in chunks it has less.

        Raises:
            ValueError: the batch is no multiple of the rows, or the length differs where nothing grows.
        """
        if (batch, length) == (self.rows, self.length) or (
            self.rows == 1 and length == self.length
        ):
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
        fitted = self if length == self.length else self._resize_rows(length)
        fitted = fitted if fitted.rows in (1, batch) else fitted._repeat_rows(batch // fitted.rows)
        self.__dict__["_last_fitted"] = ((batch, length), fitted)
        return fitted

    def _repeat_rows(self, times: int) -> Hierarchy:
        """Every row so many times in succession."""
        index = [row for row in range(self.rows) for _ in range(times)]
        if self.is_windows:
            starts, stops = (t if t is None else t[index] for t in (self.starts, self.stops))
            return replace(self, starts=starts, stops=stops)
        trees, tokens = (self.trees[row] for row in index), (self.tokens[row] for row in index)
        return replace(self, trees=tuple(trees), tokens=tuple(tokens))

    def _resize_rows(self, length: int) -> Hierarchy:
        """With so many tokens: new ones continue the last windows or groups, missing ones are cut off."""
        if self.is_windows:
            stops = self.stops
            if stops is not None:
                stops = torch.where(stops == self.length, length, stops.clamp(max=length))
            return replace(self, length=length, stops=stops)
        ids = self.to_ids()[:, :length]
        return type(self).from_ids(extended_ids(ids, length - self.length), self.kind_names)

    def to(self, *_, **__) -> Hierarchy:
        """Itself: a hierarchy lives on the CPU, and what it gives to attention is moved there."""
        return self


def checked_tokens(tokens, tree: Tree) -> Tensor:
    """The token of every leaf, ascending, int64 [leaves]."""
    tokens = torch.arange(tree.leaves) if tokens is None else torch.as_tensor(tokens).cpu().long()
    if tokens.shape != (tree.leaves,):
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)}; allowed: one a leaf, ({tree.leaves},)"
        )
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
    # Tensors made in inference mode count no versions: those are compared with what was read.
    content: Any = value.clone() if value.is_inference() else value._version
    known = attached_to(value, ReadIds)
    if known is None or not (
        torch.equal(known.content, content) if value.is_inference() else known.content == content
    ):
        known = ReadIds(content, Hierarchy.from_ids(value))
        attach(value, known)
    return known.hierarchy


@dataclass(frozen=True, eq=False)
class ReadIds:
    """What group ids were read as.

    Args:
        content: The ids, or the version of their tensor.
        hierarchy: What they mean.
    """

    content: Any
    hierarchy: Hierarchy
