"""What masks say of a call: where keys end, which tokens are padding, and where queries and keys stand in a row."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...engines import Options
from ...hierarchy import Hierarchy
from ...hierarchy.batch import as_hierarchy
from ...hierarchy.windows import windows_tree
from ..base import FirstKey
from .padding import real_tokens
from .windowed.key import trees_of

#: What was found out about masks that are alive, with their version: all layers of a model share one.
_STOPS, _SEEN = WeakIdKeyDictionary(), WeakIdKeyDictionary()


def hierarchy_for(
    hierarchy: Hierarchy | Tensor | tuple[int, ...], batch: int, keys: int, is_causal: bool
) -> Hierarchy:
    """What the caller gave, for a call of so many rows and keys; `cut` takes away what comes after them."""
    if isinstance(hierarchy, tuple):
        make = Hierarchy.windows if torch.compiler.is_compiling() else windows
        return make(keys, hierarchy)
    found = as_hierarchy(hierarchy)
    if (
        is_causal and not found.is_windows
    ):  # in a prompt that comes in chunks, groups do not change as it grows
        keys = max(keys, found.length)
    return found.fitted(batch, keys, growing=is_causal)


def cut(hierarchy: Hierarchy, keys: int) -> Hierarchy:
    """Trees of which there are only the first `keys` tokens so far; leaves to come stay, and no query sees them."""
    if hierarchy.length <= keys:
        return hierarchy
    return Hierarchy(keys, hierarchy.trees, tuple(places.clamp_max(keys) for places in hierarchy.tokens))


@lru_cache(maxsize=16)
def windows(length: int, sizes: tuple[int, ...]) -> Hierarchy:
    """Windows without padding; one object for all layers, since what is worked out for it is kept with it."""
    return Hierarchy.windows(length, sizes)


def last_seen(mask: Tensor | None, queries: int, keys: int, is_causal: bool) -> int:
    """How many keys there are so far; behind them a static cache has slots that are not filled yet.

    The last of the queries is the last key there is; where it is padding in every row, nobody sees it.
    """
    if mask is None or not is_causal or mask.shape[-1] != keys:
        return keys
    asked, known = (queries, version_of(mask)), _STOPS.get(mask)
    if known is None or None in asked or known[0] != asked:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        seen = seen.flatten(0, 1).any(0).expand(queries, -1)
        stop = keys
        if not bool(seen[:, -1].any()) and bool(seen.any()):
            ends = keys - seen.flip(-1).byte().argmax(-1)  # one past the last key that a query sees
            ahead = ends.where(seen.any(-1), 0) - torch.arange(queries, device=mask.device)
            stop = min(keys, int(ahead.max()) - 1 + queries)
        known = _STOPS[mask] = (asked, stop)
    return known[1]


def version_of(t: Tensor) -> int | None:
    """Changes with the content of a tensor; None where that cannot be told."""
    return None if t.is_inference() else t._version


def says_all(options: Options, is_causal: bool) -> bool:
    """Whether the mask alone says what causal queries see, which then are the last tokens: so Transformers calls."""
    return is_causal and not options.is_causal


def padding_of(mask: Tensor, queries: int, is_causal: bool, position_hides: bool = False) -> Tensor | None:
    """Bool [B, M], the keys that are no padding; None where the mask hides something else too.

    Args:
        mask: as in `Options`.
        queries: N; where causal, queries are the last of the M tokens.
        is_causal: whether the mask itself hides from a query the tokens after it.
        position_hides: whether query i sees no token after i, whatever the mask says of them.
    """
    asked, known = (queries, is_causal, position_hides, version_of(mask)), _SEEN.get(mask)
    if known is not None and None not in asked and known[0] == asked:
        return known[1]
    try:
        real = _real(mask, queries, is_causal, position_hides)
    except ValueError:
        real = None
    _SEEN[mask] = (asked, real)
    return real


def _real(mask: Tensor, queries: int, is_causal: bool, position_hides: bool) -> Tensor | None:
    keys = mask.shape[-1]
    if position_hides and 1 < mask.shape[2] <= keys:  # tokens after the last query are seen by none
        later = torch.ones(queries, queries, dtype=torch.bool, device=mask.device).triu(1)
        seen = mask[..., :queries].masked_fill(later, False if mask.dtype == torch.bool else float("-inf"))
        return torch.nn.functional.pad(real_tokens(seen, queries, True), (0, keys - queries), value=True)
    if is_causal or queries == keys:
        return real_tokens(mask, queries, is_causal)
    return real_tokens(mask, keys) if mask.shape[2] == 1 else None


def restricted(hierarchy: Hierarchy, real: Tensor, is_causal: bool = False) -> Hierarchy:
    """The hierarchy over the real tokens alone; one that was made for this padding is kept as it is.

    Args:
        hierarchy: of these tokens, and perhaps of some to come.
        real: bool [B, keys].
        is_causal: then rows may be padding so far, such as the first chunk of a prompt with more of it at its left.
    """
    last = hierarchy.__dict__.get("_last_restricted")
    if last is not None and last[0] is real:
        return last[1]
    real_cpu = real.cpu()
    if hierarchy.is_windows and hierarchy.starts is None and hierarchy.stops is None:
        laid = real_cpu | ~real_cpu.any(1, keepdim=True) if is_causal else real_cpu
        whole = bool(real_cpu.all())
        found = hierarchy if whole else Hierarchy.windows(hierarchy.length, hierarchy.sizes, laid)
        if is_causal and found.starts is not None:  # windows of such a row begin after all that there is
            found = replace(found, starts=found.starts.where(real_cpu.any(1), hierarchy.length))
        found = found if found.is_windows or not is_causal else continued(found, hierarchy.sizes)
    else:
        ids = hierarchy.to_ids()
        ids = ids.expand(len(real_cpu), -1, -1) if len(ids) == 1 else ids
        real_cpu = torch.cat([real_cpu, ids[:, real_cpu.shape[1] :, 0] >= 0], 1)
        padded = (ids[..., 0] < 0) != ~real_cpu
        found = hierarchy
        if bool(padded.any()):
            found = Hierarchy.from_ids(ids.masked_fill(~real_cpu[..., None], -1), hierarchy.kind_names)
    hierarchy.__dict__["_last_restricted"] = (real, found)
    return found


def continued(hierarchy: Hierarchy, sizes: tuple[int, ...]) -> Hierarchy:
    """Windows over tokens with padding between them, continued to the right until all of them are complete."""
    trees, tokens = [], []
    for places in hierarchy.tokens:
        more = -len(places) % sizes[-1] if sizes else 0
        trees.append(windows_tree(len(places) + more, sizes))
        tokens.append(torch.nn.functional.pad(places, (0, more), value=hierarchy.length))
    return Hierarchy(hierarchy.length, tuple(trees), tuple(tokens))


def real_of(first: FirstKey, keys: int) -> Tensor | None:
    """Bool [B, keys]: the real ones of the first tokens of a row, by the model's attention_mask."""
    if first.attention_mask is None:
        return None
    known, version = _SEEN.get(first.attention_mask), version_of(first.attention_mask)
    if known is not None and version is not None and known[0] == (keys, version):
        return known[1]
    real = first.attention_mask[:, :keys].bool()
    real = torch.nn.functional.pad(real, (0, keys - real.shape[1]), value=True)
    _SEEN[first.attention_mask] = ((keys, version), real)
    return real


def without_first(hierarchy: Hierarchy, first: int, sinks: int) -> tuple[Hierarchy, bool]:
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
        tokens.append(torch.where((places >= first) & (places < hierarchy.length), places - first, left))
    return Hierarchy(left, tuple(trees), tuple(tokens)), skipped
