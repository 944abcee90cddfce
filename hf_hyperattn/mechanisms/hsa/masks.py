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
from ..base import FirstKey
from .key import trees_of
from .padding import real_tokens

#: What was found out about masks that are alive, with their version: all layers of a model share one.
_STOPS, _SEEN = WeakIdKeyDictionary(), WeakIdKeyDictionary()


def hierarchy_for(
    hierarchy: Hierarchy | Tensor | tuple[int, ...], batch: int, keys: int, is_causal: bool
) -> Hierarchy:
    """What the caller gave, for a call of so many rows and keys."""
    if isinstance(hierarchy, tuple):
        make = Hierarchy.windows if torch.compiler.is_compiling() else windows
        return make(keys, hierarchy)
    return as_hierarchy(hierarchy).fitted(batch, keys, growing=is_causal)


@lru_cache(maxsize=16)
def windows(length: int, sizes: tuple[int, ...]) -> Hierarchy:
    """Windows without padding; one object for all layers, since what is worked out for it is kept with it."""
    return Hierarchy.windows(length, sizes)


def last_seen(mask: Tensor | None, keys: int, is_causal: bool) -> int:
    """How many keys there are so far; behind them a static cache has slots that are not filled yet."""
    if mask is None or not is_causal or mask.shape[-1] != keys:
        return keys
    known, version = _STOPS.get(mask), version_of(mask)
    if known is None or version is None or known[0] != version:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        seen = seen.flatten(0, 2).any(0)
        stop = int((seen * torch.arange(1, keys + 1, device=mask.device)).max()) or keys
        known = _STOPS[mask] = (version, stop)
    return known[1]


def version_of(t: Tensor) -> int | None:
    """Changes with the content of a tensor; None where that cannot be told."""
    return None if t.is_inference() else t._version


def says_all(options: Options, is_causal: bool) -> bool:
    """Whether the mask alone says what causal queries see, which then are the last tokens: so Transformers calls."""
    return is_causal and not options.is_causal


def padding_of(mask: Tensor, queries: int, is_causal: bool) -> Tensor | None:
    """Bool [B, M], the keys that are no padding; None where the mask hides something else too.

    Args:
        mask: as in `Options`.
        queries: N; where causal, queries are the last of the M tokens.
        is_causal: whether the mask itself hides from a query the tokens after it.
    """
    asked, known = (queries, is_causal, version_of(mask)), _SEEN.get(mask)
    if known is not None and None not in asked and known[0] == asked:
        return known[1]
    try:
        real = _real(mask, queries, is_causal)
    except ValueError:
        real = None
    _SEEN[mask] = (asked, real)
    return real


def _real(mask: Tensor, queries: int, is_causal: bool) -> Tensor | None:
    keys = mask.shape[-1]
    if is_causal or queries == keys:
        return real_tokens(mask, queries, is_causal)
    return real_tokens(mask, keys) if mask.shape[2] == 1 else None


def restricted(hierarchy: Hierarchy, real: Tensor) -> Hierarchy:
    """The hierarchy over the real tokens alone; one that was made for this padding is kept as it is."""
    last = hierarchy.__dict__.get("_last_restricted")
    if last is not None and last[0] is real:
        return last[1]
    real_cpu = real.cpu()
    if hierarchy.is_windows and hierarchy.starts is None and hierarchy.stops is None:
        whole = bool(real_cpu.all())
        found = hierarchy if whole else Hierarchy.windows(hierarchy.length, hierarchy.sizes, real_cpu)
    else:
        ids = hierarchy.to_ids()
        ids = ids.expand(len(real_cpu), -1, -1) if len(ids) == 1 else ids
        padded = (ids[..., 0] < 0) != ~real_cpu
        found = hierarchy
        if bool(padded.any()):
            found = Hierarchy.from_ids(ids.masked_fill(~real_cpu[..., None], -1), hierarchy.kind_names)
    hierarchy.__dict__["_last_restricted"] = (real, found)
    return found


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
