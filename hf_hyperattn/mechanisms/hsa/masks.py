"""What masks say of a call of HSA: where keys end, and the hierarchy over the tokens that are no padding."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...engines import Options
from ...engines.selection import Texts
from ...hierarchy import Hierarchy
from ...hierarchy.batch import as_hierarchy
from ...hierarchy.windows import window_ids, windows_tree
from .tree.key import leave_out_whole_windows, trees_of, windows_over


def hierarchy_for(
    hierarchy: Hierarchy | Tensor | tuple[int, ...], batch: int, keys: int, is_causal: bool
) -> Hierarchy:
    """What the caller gave, for a call of so many rows and keys; `cut_hierarchy` takes away what comes after them."""
    if isinstance(hierarchy, tuple):
        make = Hierarchy.windows if torch.compiler.is_compiling() else make_windows
        return make(keys, hierarchy)
    hierarchy = as_hierarchy(hierarchy)
    if (
        is_causal and not hierarchy.is_windows
    ):  # in a prompt that comes in chunks, groups stay as it grows
        keys = max(keys, hierarchy.length)
    return hierarchy.fitted(batch, keys, growing=is_causal)


def cut_hierarchy(hierarchy: Hierarchy, keys: int) -> Hierarchy:
    """Trees of which there are only the first `keys` tokens so far; leaves to come stay, and no query sees them."""
    if hierarchy.length <= keys:
        return hierarchy
    return Hierarchy(
        keys, hierarchy.trees, tuple(places.clamp_max(keys) for places in hierarchy.tokens)
    )


@lru_cache(maxsize=16)
def make_windows(length: int, sizes: tuple[int, ...]) -> Hierarchy:
    """Windows without padding; one object for all layers, since what is worked out for it is kept with it."""
    return Hierarchy.windows(length, sizes)


def mask_is_causal(options: Options, is_causal: bool) -> bool:
    """Whether the mask alone says what causal queries see, which then are the last tokens: so Transformers calls."""
    return is_causal and not options.is_causal


def restrict_to_real(hierarchy: Hierarchy, real: Tensor, is_causal: bool = False) -> Hierarchy:
    """The hierarchy over the real tokens alone.

    A row of padding alone, which fills up a batch, keeps its hierarchy: nobody reads what it gets.

    Args:
        hierarchy: of these tokens, and perhaps of some to come.
        real: bool [B, keys].
        is_causal: then rows may be padding so far, such as the first chunk of a prompt with more of it at its left.
    """
    plain = hierarchy.is_windows and hierarchy.starts is None and hierarchy.stops is None
    return (_restrict_windows if plain else _restrict_trees)(hierarchy, real.cpu(), is_causal)


def _restrict_windows(hierarchy: Hierarchy, real: Tensor, is_causal: bool) -> Hierarchy:
    if bool(real.all()):
        return hierarchy
    there = real.any(1, keepdim=True)
    made = Hierarchy.windows(hierarchy.length, hierarchy.sizes or (), real | ~there)
    if (
        is_causal and made.starts is not None
    ):  # windows of a row of padding begin after all that there is
        made = replace(made, starts=made.starts.where(there[:, 0], hierarchy.length))
    if made.is_windows or not is_causal:
        return made
    sizes = leave_out_whole_windows(hierarchy.sizes or (), max(map(len, made.tokens)))
    rows = (windows_over(tokens, sizes, hierarchy.length, True) for tokens in made.tokens)
    parts: Any = zip(*rows)
    return Hierarchy(hierarchy.length, *parts)


def _restrict_trees(hierarchy: Hierarchy, real: Tensor, is_causal: bool) -> Hierarchy:
    ids = hierarchy.to_ids()
    ids = ids.expand(len(real), -1, -1) if len(ids) == 1 else ids
    real = torch.cat([real, ids[:, real.shape[1] :, 0] >= 0], 1)
    real = real | ~real.any(1, keepdim=True)
    if bool(((ids[..., 0] < 0) == ~real).all()):
        return hierarchy
    return Hierarchy.from_ids(ids.masked_fill(~real[..., None], -1), hierarchy.kind_names)


def lay_windows_by_text(hierarchy: Hierarchy, texts: Texts, is_causal: bool) -> Hierarchy:
    """Windows that begin again with every text.

    Args:
        hierarchy: of windows over the tokens of a call.
        texts: of its rows.
        is_causal: then the windows of every text are continued until all are complete, see `trees_of`.
    """
    number, place, length = texts.number.cpu(), texts.place.cpu(), hierarchy.length
    sizes = leave_out_whole_windows(hierarchy.sizes or (), int(place.max()) + 1)
    if not is_causal:
        of_windows = [window_ids(place.masked_fill(number < 0, -1), sizes)] if sizes else []
        return Hierarchy.from_ids(torch.cat([number[..., None], *of_windows], -1))
    trees, tokens = [], []
    for row in number:
        of_texts = [(row == text).nonzero()[:, 0] for text in range(int(row.max()) + 1)]
        leaves = torch.cat([windows_over(text, sizes, length, True)[1] for text in of_texts])
        trees.append(windows_tree(len(leaves), sizes))
        tokens.append(leaves)
    return Hierarchy(length, tuple(trees), tuple(tokens))


def drop_first_tokens(hierarchy: Hierarchy, first: int, sinks: int) -> tuple[Hierarchy, bool]:
    """The trees of causal queries under a mask, without the tokens that a cache has dropped.

    Leaves of dropped tokens stay, and nobody sees them: so every block keeps its place, and one that is cut through is
    not wholly visible. Whole windows of the top level that are gone are left out, so that the cost does not grow with
    what is gone. Windows are continued to the right.

    Args:
        hierarchy: of the row from its beginning.
        first: how many tokens of the row are gone.
        sinks: the most that a head asks for.

    Returns:
        The hierarchy over the keys that are left, and whether the sinks are among the windows that were left out.
    """
    skipped = False
    if hierarchy.is_windows:
        top = hierarchy.sizes[-1] if hierarchy.sizes else 1
        spans = torch.tensor([hierarchy.span(row) for row in range(hierarchy.rows)])
        skip = (first - spans[:, 0]).clamp_min(0) // top * top
        skipped = bool((skip >= max(sinks, 1)).all())
        if skipped:
            hierarchy = replace(hierarchy, starts=spans[:, 0] + skip, stops=spans[:, 1])
    left, trees, tokens = hierarchy.length - first, [], []
    for tree, places in trees_of(hierarchy, True):
        trees.append(tree)
        tokens.append(
            torch.where((places >= first) & (places < hierarchy.length), places - first, left)
        )
    return Hierarchy(left, tuple(trees), tuple(tokens)), skipped
