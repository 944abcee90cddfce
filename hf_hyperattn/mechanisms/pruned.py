"""The refusal of caches that were pruned in the middle, for mechanisms that count the cached keys.

Eviction methods drop keys from the middle of a cache and go on with the `position_ids` of the whole text. Nothing in
the call says which tokens the keys that are left belong to, so that distances, windows and pages cannot be counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attached import attach, attached_to
from ..engines.selection import Places
from ..readable import can_read
from .base import HostCall
from .selection.places import KnownOfMask

#: Where a cache keeps the shift of its conversation's position ids, see `find_shift`.
SHIFT = "_hyperattn_shift"


@dataclass(frozen=True)
class CheckedIds:
    """What was found in position ids, which all layers of a model share.

    Args:
        about: The numbers of queries, of keys and of dropped keys, the version of the ids, and what is known of the
            mask.
        shift: The number at which the ids of the conversation begin; None if nothing has noted it.
        found: See `find_disagreeing`.
    """

    about: tuple
    shift: int | None
    found: tuple[int, int] | None


def refuse_pruned(call: HostCall, mechanism: str) -> None:
    """Raise if `position_ids` place the queries of a call elsewhere than the number of cached keys does.

    They may count the slots of a row, or its real tokens, as `generate` does for a row that is padded at its left. They
    may begin at any number, which the first call of a conversation leaves on its cache. Ids of several axes (M-RoPE)
    count images in their own way and say nothing here.

    Nothing is raised, and a pruned cache is taken for a whole one, in these calls:

    - Calls that are compiled. A check in their graph would have to know the number at which the ids begin, and the
      cache that it was left on is not seen there.
    - Models that give their attention layers no `position_ids`: Falcon, GPT-Neo and GPT-BigCode, whose forward has
      them, and BLOOM and MPT, which have none.

    Used by name, a mechanism does not see the cache, and where it cannot take attributes nothing is left on it. Ids
    must begin at 0 there, and the error says so.

    Args:
        call: The call of an attention layer.
        mechanism: The name for the error.

    Raises:
        ValueError: A real query stands at neither place.
    """
    ids, keys, cache = call.keywords.get("position_ids"), call.key.shape[2], call.cache
    queries, mask = call.query.shape[2], call.options.mask
    if (
        ids is None
        or not call.is_causal
        or call.first.index is None
        or (queries == keys and cache is None)
    ):
        return
    if (
        ids.dim() != 2
        or ids.shape[1] != queries
        or not can_read(ids, mask, call.first.attention_mask)
    ):
        return
    # Ids made in inference mode have no version; the model makes new ones for every call.
    version = None if ids.is_inference() else ids._version
    about = queries, keys, call.first.index, version, attached_to(mask, KnownOfMask)
    checked = attached_to(ids, CheckedIds)
    # Layers that are called without the cache go by those that were called with it.
    if cache is not None:
        shift = notes_of(cache).get(SHIFT)
    else:
        shift = None if checked is None else checked.shift
    if checked is None or checked.about != about or checked.shift != shift:
        places = call.read_mask().places
        start = int(places.start) + places.dropped
        if start == 0 and cache is not None:
            shift = notes_of(cache)[SHIFT] = find_shift(places, ids)
        found = None if queries == keys else find_disagreeing(places, ids, start, shift or 0)
        about = *about[:4], attached_to(mask, KnownOfMask)  # which the reading may have made
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


def notes_of(cache: Any) -> dict:
    """Return the attributes of a cache; those of a class with slots, which has no room for ours, are not kept.

    Of an encoder-decoder cache the part for self-attention counts, which some models wrap again at every call.
    """
    return getattr(getattr(cache, "self_attention_cache", cache), "__dict__", {})


def find_shift(places: Places, ids: Tensor) -> int:
    """Return the number at which the position ids of a conversation begin, from its first call; 0 if they do not count.

    Args:
        places: Where the queries and keys of the call stand.
        ids: Its position ids, int64 [B or 1, N].
    """
    if find_disagreeing(places, ids, 0) is None:
        return 0
    slot = 0 if places.real is None else int(places.real[0, : ids.shape[1]].int().argmax())
    first = int(ids[0, slot])
    by_slots, by_tokens = first - slot, first
    shifts = (
        shift for shift in (by_slots, by_tokens) if find_disagreeing(places, ids, 0, shift) is None
    )
    return next(shifts, 0)


def find_disagreeing(
    places: Places, ids: Tensor, start: int, shift: int = 0
) -> tuple[int, int] | None:
    """Return the position id of a query that stands elsewhere, and the tokens before it; None if there is none.

    Args:
        places: Where the queries and keys of the call stand.
        ids: Its position ids, int64 [B or 1, N].
        start: The slot of the first query, counted from the beginning of the rows.
        shift: The number at which the ids begin.
    """
    first = start + shift
    slots = torch.arange(first, first + ids.shape[1], device=ids.device)
    wrong = ids != slots
    if not bool(wrong.any()):  # as in nearly every call: the tokens are not counted
        return None
    numbers = (places.count - 1)[:, start : start + ids.shape[1]].to(ids.device)
    if places.real is not None:
        is_query = places.real[:, start : start + ids.shape[1]].to(ids.device)
        by_slots = (wrong & is_query).any(1, keepdim=True)
        by_tokens = ((ids != numbers + shift) & is_query).any(1, keepdim=True)
        wrong = wrong & is_query & by_slots & by_tokens
        if not bool(wrong.any()):
            return None
    row, query = wrong.nonzero()[0].tolist()
    return int(ids.expand(len(wrong), -1)[row, query]), int(
        numbers.expand(len(wrong), -1)[row, query]
    )
