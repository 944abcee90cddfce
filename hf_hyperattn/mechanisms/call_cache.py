"""The cache of a call: `find_layer_cache` finds it, `refuse_pruned` refuses a pruned one.

Eviction methods drop keys from the middle of a cache and go on with the `position_ids` of the whole
text. Then it is unknown which tokens the kept keys belong to, and distances, windows and pages
would be counted wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engines.selection import Places
from ..utils.attached import attach, attached_to
from ..utils.readable import can_read, is_recorded
from .base import HostCall
from .selection.cache import EVICTING, LayerCache
from .selection.places import KnownOfMask

#: The attribute of a cache that holds the shift of its conversation's position ids, see
#: `find_shift`.
SHIFT = "_hyperattn_shift"


@dataclass(frozen=True)
class CheckedIds:
    """The result of checking position ids, which all layers of a model share.

    Args:
        about: The numbers of queries, keys and dropped keys, the version of the ids, and the
            `KnownOfMask` of the mask.
        shift: The number at which the ids of the conversation begin; None if unknown.
        found: See `find_disagreeing`.
    """

    about: tuple
    shift: int | None
    found: tuple[int, int] | None


def find_layer_cache(key: Tensor, value: Tensor, mechanism: str, kind: type) -> LayerCache | None:
    """Return the cache that keys and values come from.

    Args:
        key, value: Of an attention call.
        mechanism: The name for errors.
        kind: The type of `LayerCache.keep` that the mechanism can read, for a cache that may evict.

    Returns:
        The cache; None if keys and values do not come from the same one, and in recorded calls.

    Raises:
        ValueError: The cache evicts for another mechanism.
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


def refuse_pruned(call: HostCall, mechanism: str) -> None:
    """Raise if the `position_ids` of a call disagree with the number of cached keys.

    Ids may count the slots of a row, or its real tokens, as `generate` does with left padding. They
    may begin at any number, which the first call of a conversation stores on its cache. Ids with
    several axes (M-RoPE) count images in their own way and are not checked.

    A pruned cache is not detected in these calls:

    - Compiled calls. A check in their graph would need the number at which the ids begin, which is
      stored on the cache.
    - Models that pass no `position_ids` to their attention layers: Falcon, GPT-Neo and GPT-BigCode,
      whose forward has them, and BLOOM and MPT, which have none.

    A mechanism that is used by name does not see the cache, and some caches take no attributes.
    Then ids must begin at 0, and the error says so.

    Args:
        call: Of an attention layer.
        mechanism: The name for the error.

    Raises:
        ValueError: The id of a real query fits neither way of counting.
    """
    # Checked once per model call: all its layers get the same ids, so the result is attached to
    # them.
    ids, cache = call.keywords.get("position_ids"), call.cache
    if ids is None or not _can_check(call, ids):
        return
    mask = call.options.mask
    queries, keys = call.query.shape[2], call.key.shape[2]
    # Ids made in inference mode have no version; the model makes new ones for every call.
    version = None if ids.is_inference() else ids._version
    about = queries, keys, call.first.index, version, attached_to(mask, KnownOfMask)
    checked = attached_to(ids, CheckedIds)
    # Layers that are called without the cache rely on layers that were called with it.
    if cache is not None:
        shift = find_notes(cache).get(SHIFT)
    else:
        shift = None if checked is None else checked.shift
    if checked is None or checked.about != about or checked.shift != shift:
        places = call.read_mask().places
        start = int(places.start) + places.dropped
        # The first call of a conversation: note where its ids begin.
        if start == 0 and cache is not None:
            shift = find_notes(cache)[SHIFT] = find_shift(places, ids)
        found = None if queries == keys else find_disagreeing(places, ids, start, shift or 0)
        # Read again, because `read_mask` may have attached it just now.
        about = *about[:4], attached_to(mask, KnownOfMask)
        checked = CheckedIds(about=about, shift=shift, found=found)
        attach(ids, checked)
    if checked.found is not None:
        position, before = checked.found
        begun = f", counted from {shift}," if shift else ""
        unknown = ""
        if shift is None:
            unknown = (
                "; position_ids that begin at another number than 0 need patch_model, and a cache that takes "
                "attributes and whose first call was not compiled"
            )
        raise ValueError(
            f"{mechanism} counts the keys of the cache, and position_ids={position}{begun} disagrees with the {before} "
            "that stand before this query: the cache was pruned in the middle, filled with other position_ids, or "
            "holds packed texts; allowed: caches that drop keys at their ends alone, position_ids that count the keys, "
            f"or a model without {mechanism}{unknown}"
        )


def _can_check(call: HostCall, ids: Tensor) -> bool:
    """Return whether the position ids of a call can be checked, or their shift noted."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if not call.is_causal or call.first.index is None:
        return False
    # All keys are of this call: nothing was pruned, and no cache is there to note the shift on.
    if queries == keys and call.cache is None:
        return False
    if ids.dim() != 2 or ids.shape[1] != queries:
        return False
    return can_read(ids, call.options.mask, call.first.attention_mask)


def find_notes(cache: Any) -> dict:
    """Return the attributes of a cache, a dict that takes notes.

    For a class with `__slots__`, which takes no attributes, return a new dict: its notes are lost.
    """
    # Some models wrap the self-attention part of an encoder-decoder cache again in every call. The
    # part itself lasts.
    return getattr(getattr(cache, "self_attention_cache", cache), "__dict__", {})


def find_shift(places: Places, ids: Tensor) -> int:
    """Return the number at which the position ids of a conversation begin.

    0 if they do not count tokens.

    Args:
        places: Where the queries and keys of its first call stand.
        ids: The position ids of this call, int64 [B or 1, N].
    """
    if find_disagreeing(places, ids, 0) is None:
        return 0
    # The first real token of the first row, and its id. It counts either the slots before it, or no
    # token.
    slot = 0 if places.real is None else int(places.real[0, : ids.shape[1]].int().argmax())
    first = int(ids[0, slot])
    by_slots, by_tokens = first - slot, first
    for shift in (by_slots, by_tokens):
        if find_disagreeing(places, ids, 0, shift) is None:
            return shift
    return 0


def find_disagreeing(
    places: Places, ids: Tensor, start: int, shift: int = 0
) -> tuple[int, int] | None:
    """Return a position id that fits no way of counting, and the tokens before it.

    Args:
        places: Where the queries and keys of the call stand.
        ids: Its position ids, int64 [B or 1, N].
        start: The slot of the first query, counted from the beginning of the rows.
        shift: The number at which the ids begin.

    Returns:
        (position id, number of tokens); None if all ids fit.
    """
    first = start + shift
    slots = torch.arange(first, first + ids.shape[1], device=ids.device)
    wrong = ids != slots
    # True in nearly every call. Then real tokens need not be counted.
    if not bool(wrong.any()):
        return None
    numbers = (places.count - 1)[:, start : start + ids.shape[1]].to(ids.device)
    if places.real is not None:
        is_query = places.real[:, start : start + ids.shape[1]].to(ids.device)
        # A row is wrong if neither way of counting fits all of its real queries.
        by_slots = (wrong & is_query).any(1, keepdim=True)
        by_tokens = ((ids != numbers + shift) & is_query).any(1, keepdim=True)
        wrong = wrong & is_query & by_slots & by_tokens
        if not bool(wrong.any()):
            return None
    row, query = wrong.nonzero()[0].tolist()
    position = ids.expand(len(wrong), -1)[row, query]
    before = numbers.expand(len(wrong), -1)[row, query]
    return int(position), int(before)
