"""Fit a hierarchy to the mask of one HSA call.

This module shows how masks change the trees over which attention is tied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...engines.selection import Texts
from ...hierarchy import Hierarchy
from ...hierarchy.windows import window_ids, windows_tree
from ..selection.places import Reading
from .tree.key import leave_out_whole_windows, trees_of, windows_over


def lay_under_mask(
    hierarchy: Hierarchy,
    reading: Reading,
    is_causal: bool,
    chunk: int | None,
    position_ids: Tensor | None = None,
) -> tuple[Hierarchy, Tensor | None]:
    """Return the hierarchy under a mask, computed once for all layers.

    Padding is left out. If the mask packs several texts into a row, windows start again with every
    text, and other trees stay as the caller defined them.

    Args:
        hierarchy: Trees over the present keys and the keys that a cache has dropped.
        reading: Facts of the mask, which keep the result.
        is_causal: Whether attention is causal.
        chunk, position_ids: As in `Reading.find_texts`.

    Returns:
        The hierarchy, and the number of each key in its text, int64 [B, M]; None if each row holds
        one text.
    """
    real = reading.real_if_only_padding
    if real is None:
        texts = reading.find_texts(chunk, position_ids)
        if texts is not None and hierarchy.is_windows:
            lay = lambda: lay_windows_by_text(hierarchy, texts, is_causal)
            if chunk is not None:
                # The texts depend on position_ids here, which may change under the same mask: do
                # not remember the result.
                return lay(), texts.place
            return reading.make_once(hierarchy, ("texts", is_causal), lay), texts.place
        real = reading.real_so_far
    if real is None:
        return hierarchy, None
    restrict = lambda: restrict_to_real(hierarchy, real, is_causal)
    return reading.make_once(hierarchy, ("real", is_causal), restrict), None


def restrict_to_real(hierarchy: Hierarchy, real: Tensor, is_causal: bool) -> Hierarchy:
    """Return the hierarchy over the real tokens.

    A row that holds padding only keeps its hierarchy. Its output is never used.

    Args:
        hierarchy: Trees over the tokens, and perhaps over tokens to come.
        real: bool [B, keys].
        is_causal: Whether attention is causal. A row may then hold padding only so far, for example
            in the first chunk of a left-padded prompt.
    """
    plain = hierarchy.is_windows and hierarchy.starts is None and hierarchy.stops is None
    restrict = _restrict_windows if plain else _restrict_trees
    return restrict(hierarchy, real.cpu(), is_causal)


def _restrict_windows(hierarchy: Hierarchy, real: Tensor, is_causal: bool) -> Hierarchy:
    """Return windows laid over the real tokens."""
    if bool(real.all()):
        return hierarchy
    there = real.any(1, keepdim=True)
    made = Hierarchy.windows(hierarchy.length, hierarchy.sizes or (), real | ~there)
    if is_causal and made.starts is not None:
        # Real tokens of these rows come later, so their windows start after all present tokens.
        made = replace(made, starts=made.starts.where(there[:, 0], hierarchy.length))
    if made.is_windows or not is_causal:
        return made
    # Padding lies between real tokens. Causal windows must be complete, so continue each row's
    # windows to the right.
    sizes = leave_out_whole_windows(hierarchy.sizes or (), max(map(len, made.tokens)))
    rows = [windows_over(tokens, sizes, hierarchy.length, True) for tokens in made.tokens]
    parts: Any = zip(*rows)
    return Hierarchy(hierarchy.length, *parts)


def _restrict_trees(hierarchy: Hierarchy, real: Tensor, is_causal: bool) -> Hierarchy:
    """Return trees without the leaves of padding."""
    ids = hierarchy.to_ids()
    ids = ids.expand(len(real), -1, -1) if len(ids) == 1 else ids
    # The mask says nothing about tokens to come: the hierarchy does.
    real = torch.cat([real, ids[:, real.shape[1] :, 0] >= 0], 1)
    real = real | ~real.any(1, keepdim=True)
    if bool(((ids[..., 0] < 0) == ~real).all()):
        return hierarchy
    return Hierarchy.from_ids(ids.masked_fill(~real[..., None], -1), hierarchy.kind_names)


def lay_windows_by_text(hierarchy: Hierarchy, texts: Texts, is_causal: bool) -> Hierarchy:
    """Return windows that start again with every text of a packed row.

    Args:
        hierarchy: Windows over the tokens of a call.
        texts: Texts of its rows.
        is_causal: Whether attention is causal. The windows of every text are then continued until
            all are complete, see `trees_of`.
    """
    number, place = texts.number.cpu(), texts.place.cpu()
    length = hierarchy.length
    sizes = leave_out_whole_windows(hierarchy.sizes or (), int(place.max()) + 1)
    if not is_causal:
        places = place.masked_fill(number < 0, -1)
        levels = [window_ids(places, sizes)] if sizes else []
        # The text is the coarsest group: the root has one child for each text.
        return Hierarchy.from_ids(torch.cat([number[..., None], *levels], -1))
    trees, tokens = [], []
    for row in number:
        of_texts = [(row == text).nonzero()[:, 0] for text in range(int(row.max()) + 1)]
        # A causal query sees no other text, so complete windows of all texts can stand in one line
        # of leaves.
        leaves = torch.cat([windows_over(text, sizes, length, True)[1] for text in of_texts])
        trees.append(windows_tree(len(leaves), sizes))
        tokens.append(leaves)
    return Hierarchy(length, tuple(trees), tuple(tokens))


def drop_first_tokens(hierarchy: Hierarchy, first: int, sinks: int) -> tuple[Hierarchy, bool]:
    """Return causal trees without the tokens that a cache has dropped.

    Leaves of dropped tokens stay, and no query sees them. Every block keeps its place, and a block
    that loses some of its tokens is not wholly visible. Whole windows of the top level are left
    out, so that the cost does not grow with the number of dropped tokens. Windows are continued to
    the right.

    Args:
        hierarchy: Trees over the rows from their beginnings.
        first: Number of dropped tokens of a row.
        sinks: Largest `sinks` of all heads.

    Returns:
        The hierarchy over the remaining keys, and whether the windows that were left out hold the
        sinks.
    """
    skipped = False
    if hierarchy.is_windows:
        top = hierarchy.sizes[-1] if hierarchy.sizes else 1
        spans = torch.tensor([hierarchy.span(row) for row in range(hierarchy.rows)])
        skip = (first - spans[:, 0]).clamp_min(0) // top * top
        # All rows must lose their sinks, because one rule serves all rows.
        skipped = bool((skip >= max(sinks, 1)).all())
        if skipped:
            hierarchy = replace(hierarchy, starts=spans[:, 0] + skip, stops=spans[:, 1])
    left = hierarchy.length - first
    trees, tokens = [], []
    for tree, places in trees_of(hierarchy, True):
        present = (places >= first) & (places < hierarchy.length)
        trees.append(tree)
        tokens.append(torch.where(present, places - first, left))
    return Hierarchy(left, tuple(trees), tuple(tokens)), skipped
