"""Hold the hierarchies of a batch: one tree per row, or fixed windows.

This module shows all ways to make a `Hierarchy`, and how it follows a batch that is repeated or
grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..utils.attached import attach, attached_to
from .ids import checked_ids, checked_mask, extended_ids, ids_of_tree, levels_of, tree_of_ids
from .shapes import add_special_ids, joined_ids, quadtree_ids, span_parents
from .text import Level, checked_levels, outline_ids
from .tree import Tree
from .windows import checked_sizes, window_ids, windows_tree


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """Trees over the tokens of a batch.

    Make one with `windows`, `from_parents`, `from_segment_ids` and the other class methods. A
    hierarchy has one of two forms. Either `trees` and `tokens` hold one entry per row, or one entry
    for all rows. Or the groups are windows: then `sizes` holds their sizes, and `starts` and
    `stops` limit the real tokens of each row.

    Args:
        length: Number of tokens of a row, padding included.
        trees: One tree per row, or one for all rows.
        tokens: For each tree, int64 [leaves]: the token of every leaf, in order. Padding is in no
            tree.
        sizes: Window sizes, bottom first; None: the groups are in `trees`.
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
        """Make fixed windows, the same in every row.

        Windows start at a row's first real token.

        Args:
            length: Number of tokens, padding included.
            sizes: Window sizes in tokens, bottom first, each dividing the next; () is the flat
                tree.
            attention_mask: [B, length], 0 or False at padding; None: no padding. If padding lies
                between real tokens, windows count real tokens only.

        Returns:
            Windows stored as numbers, or as trees if padding lies between real tokens.

        Raises:
            ValueError: Sizes that do not divide each other; a mask of another length, or a row
                without real tokens.
        """
        sizes = checked_sizes(sizes)
        if length < 1:
            raise ValueError(f"length={length} is not allowed; allowed: at least 1")
        if attention_mask is None:
            return cls(length, sizes=sizes)
        real = checked_mask(attention_mask, length)
        # argmax finds the first 1: the first real token, and from the end the last one.
        starts = real.int().argmax(1)
        stops = length - real.flip(1).int().argmax(1)
        # Padding at the ends only: numbers are enough.
        if bool((real.sum(1) == stops - starts).all()):
            return cls(length, sizes=sizes, starts=starts, stops=stops)
        # Windows count real tokens only, so each row needs its own tree.
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
        """Make one tree for all rows, or one for each row, from parent pointers.

        Args:
            parents: One entry per node, the leaves first in token order, -1 for the root. A list of
                these makes one tree per row, and `tokens` and `kinds` are then lists, too.
            tokens: The token of every leaf; None: token i is leaf i.
            length: Number of tokens, padding included; None: the length of the longest row.
            kinds: The kind of the family below every node; None: no kinds.
            kind_names: Names of the kinds, "" first.

        Raises:
            ValueError: A cycle, orphans, several roots, inner nodes without tokens.
        """
        # A tensor of one row holds tensors without dimensions.
        several = (
            len(parents) > 0
            and not isinstance(parents[0], int)
            and torch.as_tensor(parents[0]).dim()
        )
        rows: Any = parents if several else [parents]
        tokens_by_row: Any = tokens if several else [tokens]
        kinds_by_row: Any = kinds if several else [kinds]
        if kinds_by_row is None:
            kinds_by_row = [None] * len(rows)
        trees = tuple(
            Tree.from_parents(p, k, kind_names) for p, k in zip(rows, kinds_by_row, strict=True)
        )
        return cls.of_trees(trees, tokens_by_row, length)

    @classmethod
    def of_trees(
        cls, trees: Sequence[Tree], tokens: Sequence | None = None, length: int | None = None
    ) -> Hierarchy:
        """Make a batch from existing trees.

        Args:
            trees: One tree per row, or one for all rows.
            tokens: For each tree, the token of every leaf; None: token i is leaf i.
            length: As in `from_parents`.

        Raises:
            ValueError: A leaf without a token, or tokens that do not ascend.
        """
        tokens = [None] * len(trees) if tokens is None else tokens
        places = tuple(checked_tokens(t, tree) for t, tree in zip(tokens, trees, strict=True))
        # Tokens ascend, so the last one is the largest.
        least = max(int(t[-1]) + 1 for t in places)
        length = least if length is None else length
        if length < least:
            raise ValueError(
                f"length={length} is not allowed; allowed: at least {least}, for all leaves to have a token"
            )
        return cls(length, tuple(trees), places)

    @classmethod
    def from_segment_ids(cls, ids: Tensor, kind_names: Sequence[str] = ("",)) -> Hierarchy:
        """Make groups of the tokens with equal ids.

        Args:
            ids: Integers [length] or [batch, length]; or [batch, length, levels], coarse to fine,
                in which a group is identified by its ids from the coarsest level down. Negative:
                padding.
            kind_names: Names of the kinds in ids that `to_ids` made.

        Raises:
            ValueError: Another shape, a row without tokens, or fewer names than kinds.
        """
        ids = checked_ids(ids)
        trees, tokens = zip(*(tree_of_ids(row, tuple(kind_names)) for row in ids), strict=True)
        return cls(ids.shape[1], trees, tokens)

    # The shorter name, for ids with several levels.
    from_ids = from_segment_ids

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[int, int]], length: int) -> Hierarchy:
        """Make groups of neighbouring tokens.

        Tokens in no group are children of the root.

        Args:
            spans: (first token, one past the last) of every group, in any order.
            length: Number of tokens.

        Raises:
            ValueError: A span without tokens or beyond them, or two spans that overlap without one
                inside the other.
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
        """Make the outline of texts over their tokens.

        Special tokens are children of the root.

        Args:
            text: A text, or a list with one text per row. A pair of texts is a tuple.
            offsets: Result of a fast tokenizer with `return_offsets_mapping=True`: [length, 2] or
                [batch, length, 2].
            levels: Coarse to fine: "paragraph", "line", "sentence", "word", "markdown" (sections
                under headings), "code" (blocks by indentation), "python" (classes and functions),
                or functions. A function takes a text and returns a list of levels, each the
                ascending numbers of the characters at which its parts begin.
            attention_mask: [batch, length], 0 at padding; None: no padding.
            sequence_ids: For pairs, `encoding.sequence_ids(row)` of every row: 0 or 1 per token,
                None at special tokens.

        Returns:
            One tree per row. The kinds of its families are "text" (under the root; "pair" for two
            texts) and the names of the levels.

        Raises:
            ValueError: An unknown level, offsets beyond the text, numbers of rows that differ.
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
        """Make a quadtree of an image.

        Patches are in raster order, and cells have 2 x 2, 4 x 4, ... patches.

        Args:
            rows, columns: Numbers of patches; they need not be powers of two.
            before, after: Numbers of special tokens (CLS, registers) around the patches, children
                of the root.
            factor: Number of cells a side that make one cell of the next level.
            kind: Name of the kind of the root's family. The kind of cells is "cell".

        Raises:
            ValueError: No patches, or a factor below 2.
        """
        ids = add_special_ids(quadtree_ids(rows, columns, factor), before, after)
        # Names of the kinds 1 and 2 of `quadtree_ids`.
        return cls.from_ids(ids[None], ("", kind, "cell"))

    @classmethod
    def join(cls, parts: Sequence[Hierarchy | int], kind: str = "signals") -> Hierarchy:
        """Join several signals that follow each other in one sequence.

        Each signal is a child of one new root.

        Args:
            parts: Hierarchies, for example of a text and of an image, with the same number of rows
                or 1. An integer is a number of special tokens, children of the new root.
            kind: Name of the kind of the new root's family. The kinds of the parts keep their
                names.

        Raises:
            ValueError: No hierarchy, or numbers of rows that differ.
        """
        return cls.from_ids(*joined_ids(parts, kind))

    @property
    def is_windows(self) -> bool:
        """Return whether the groups are windows stored as numbers."""
        return self.sizes is not None

    @property
    def rows(self) -> int:
        """Return the number of different rows; 1 fits any batch."""
        if self.is_windows:
            return 1 if self.starts is None else len(self.starts)
        return len(self.trees)

    def span(self, row: int) -> tuple[int, int]:
        """Return the first real token of a row of windows, and one past the last."""
        # A hierarchy with one row serves every row of a batch.
        row = row if self.rows > 1 else 0
        start = 0 if self.starts is None else int(self.starts[row])
        stop = self.length if self.stops is None else int(self.stops[row])
        return start, stop

    def tree(self, row: int = 0) -> Tree:
        """Return the tree of one row."""
        return self.materialised.trees[row if self.rows > 1 else 0]

    def tokens_of(self, row: int = 0) -> Tensor:
        """Return int64 [leaves], the token of every leaf of one row."""
        return self.materialised.tokens[row if self.rows > 1 else 0]

    @cached_property
    def materialised(self) -> Hierarchy:
        """Return this hierarchy with `trees` and `tokens`, also for windows."""
        if not self.is_windows:
            return self
        spans = [self.span(row) for row in range(self.rows)]
        trees = tuple(windows_tree(stop - start, self.sizes or ()) for start, stop in spans)
        return Hierarchy(self.length, trees, tuple(torch.arange(*span) for span in spans))

    def to_ids(self) -> Tensor:
        """Return the group ids, int64 [rows, length, levels], coarse to fine.

        Padding has -1. `from_ids` makes the hierarchy again.
        """
        if self.is_windows and self.sizes:
            # The ids of windows follow from places, without building trees.
            spans = torch.tensor([self.span(row) for row in range(self.rows)])
            index = torch.arange(self.length)
            inside = (index >= spans[:, :1]) & (index < spans[:, 1:])
            # Places count from a row's first real token, where its windows start.
            return window_ids(torch.where(inside, index - spans[:, :1], -1), self.sizes)
        trees, tokens = self.materialised.trees, self.materialised.tokens
        # One tensor holds all rows, so the deepest tree decides the number of levels.
        levels = max(map(levels_of, trees))
        return torch.stack([ids_of_tree(t, k, self.length, levels) for t, k in zip(trees, tokens)])

    @property
    def kind_names(self) -> tuple[str, ...]:
        """Return the names of the kinds of families, "" first."""
        # Without given names, a row names only its own kinds. The longest tuple has all names.
        return max((t.kind_names for t in self.trees), key=len, default=("",))

    def fitted(self, batch: int, length: int, growing: bool = True) -> Hierarchy:
        """Return this hierarchy for a call with this number of rows and keys.

        If the batch holds every row several times (beams, several answers to a prompt), rows are
        repeated one by one. With `growing`, new tokens at the end continue the windows, or are
        siblings of the last token, and tokens beyond `length` are cut off. A causal model that
        generates has more keys than the prompt; a prompt in chunks has fewer.

        Args:
            batch: Number of rows.
            length: Number of keys.
            growing: Whether the length may differ.

        Raises:
            ValueError: The batch is no multiple of the rows, or the length differs without
                `growing`.
        """
        if self.rows in (1, batch) and length == self.length:
            return self
        # All layers of a model ask for the same sizes, and share the layout of one object.
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
        # Resize first, because there are fewer rows before they are repeated.
        fitted = self if length == self.length else self._resize_rows(length)
        fitted = fitted if fitted.rows in (1, batch) else fitted._repeat_rows(batch // fitted.rows)
        # The dataclass is frozen, so the result is written to its dict.
        self.__dict__["_last_fitted"] = ((batch, length), fitted)
        return fitted

    def _repeat_rows(self, times: int) -> Hierarchy:
        """Return the hierarchy with every row repeated in succession."""
        index = [row for row in range(self.rows) for _ in range(times)]
        if self.is_windows:
            starts, stops = (t if t is None else t[index] for t in (self.starts, self.stops))
            return replace(self, starts=starts, stops=stops)
        trees = tuple(self.trees[row] for row in index)
        tokens = tuple(self.tokens[row] for row in index)
        return replace(self, trees=trees, tokens=tokens)

    def _resize_rows(self, length: int) -> Hierarchy:
        """Return the hierarchy with another length.

        New tokens continue the last windows or groups. Missing tokens are cut off.
        """
        if self.is_windows:
            stops = self.stops
            if stops is not None:
                # A row that ends with the text grows with it. A row with padding after it does not.
                stops = torch.where(stops == self.length, length, stops.clamp(max=length))
            return replace(self, length=length, stops=stops)
        # Ids can be cut and extended without looking at the shape of the trees.
        ids = self.to_ids()[:, :length]
        return type(self).from_ids(extended_ids(ids, length - self.length), self.kind_names)

    def to(self, *_, **__) -> Hierarchy:
        """Return the hierarchy itself, which stays on the CPU.

        Attention moves the tensors that it needs.
        """
        return self


def checked_tokens(tokens, tree: Tree) -> Tensor:
    """Return the token of every leaf, ascending, int64 [leaves].

    Args:
        tokens: The tokens; None: token i is leaf i.
        tree: Tree of the leaves.

    Raises:
        ValueError: Another number of tokens than leaves, or tokens that do not ascend.
    """
    tokens = torch.arange(tree.leaves) if tokens is None else torch.as_tensor(tokens).cpu().long()
    if tokens.shape != (tree.leaves,):
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)}; allowed: one a leaf, ({tree.leaves},)"
        )
    # Leaves are numbered in token order: the causal order of a tree relies on this.
    if bool((tokens < 0).any()) or bool((tokens.diff() <= 0).any()):
        raise ValueError(
            "tokens are not in ascending order; allowed: leaves in the order of their tokens, each once"
        )
    return tokens


def as_hierarchy(value: Hierarchy | Tensor) -> Hierarchy:
    """Return the argument of `model(..., hierarchy=...)` as a `Hierarchy`.

    A tensor of group ids is read once, and the result is kept while the tensor lives.

    Raises:
        ValueError: Neither a `Hierarchy` nor group ids.
    """
    if isinstance(value, Hierarchy):
        return value
    if not isinstance(value, Tensor):
        raise ValueError(
            f"hierarchy is a {type(value).__name__}; allowed: a Hierarchy, or group ids as an integer tensor "
            "[batch, length, levels]"
        )
    known = attached_to(value, ReadIds)
    if known is None or not known.fits(value):
        # A tensor made in inference mode has no version, so its ids themselves are kept for
        # comparison.
        content = value.clone() if value.is_inference() else value._version
        known = ReadIds(content, Hierarchy.from_ids(value))
        attach(value, known)
    return known.hierarchy


@dataclass(frozen=True, eq=False)
class ReadIds:
    """Hold the hierarchy that was read from group ids.

    Args:
        content: The ids, or the version of their tensor.
        hierarchy: The hierarchy of these ids.
    """

    content: Any
    hierarchy: Hierarchy

    def fits(self, value: Tensor) -> bool:
        """Return whether the ids are unchanged since they were read."""
        if value.is_inference():
            return torch.equal(self.content, value)
        # torch raises the version with every change in place.
        return self.content == value._version
