"""The refusal of caches that were pruned in the middle, for mechanisms that count the cached keys.

Eviction methods drop keys from the middle of a cache and go on with the `position_ids` of the whole text. Nothing in
the call says which tokens the keys that are left belong to, so that distances, windows and pages cannot be counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attached import attach, attached_to
from ..engines.selection import Places
from ..readable import can_read
from .base import HostCall
from .selection.places import KnownOfMask


@dataclass(frozen=True)
class CheckedIds:
    """What was found in position ids, which all layers of a model share.

    Args:
        about: The numbers of queries, of keys and of dropped keys, the version of the ids, and what is known of the
            mask.
        found: See `find_disagreeing`.
    """

    about: tuple
    found: tuple[int, int] | None


def refuse_pruned(call: HostCall, mechanism: str) -> None:
    """Raise if `position_ids` place the queries of a call elsewhere than the number of cached keys does.

    They may count the slots of a row, or its real tokens, as `generate` does for a row that is padded at its left. Ids
    of several axes (M-RoPE) count images in their own way and say nothing here.

    Args:
        call: The call of an attention layer.
        mechanism: The name for the error.

    Raises:
        ValueError: A real query stands at neither place.
    """
    ids, keys = call.keywords.get("position_ids"), call.key.shape[2]
    queries, mask = call.query.shape[2], call.options.mask
    if ids is None or queries == keys or not call.is_causal or call.first.index is None:
        return
    if ids.dim() != 2 or ids.shape[1] != queries:
        return
    # Ids made in inference mode have no version; the model makes new ones for every call.
    version = None if ids.is_inference() else ids._version
    about = queries, keys, call.first.index, version, attached_to(mask, KnownOfMask)
    checked = attached_to(ids, CheckedIds)
    if checked is None or checked.about != about:
        if not can_read(ids, mask, call.first.attention_mask):
            return
        places = call.read_mask().places
        about = *about[:4], attached_to(mask, KnownOfMask)  # which the reading may have made
        checked = CheckedIds(about, find_disagreeing(places, ids, int(places.start) + places.dropped))
        attach(ids, checked)
    if checked.found is not None:
        position, before = checked.found
        raise ValueError(
            f"{mechanism} counts the keys of the cache, and position_ids={position} disagrees with the {before} that "
            "stand before this query: the cache was pruned in the middle, filled with other position_ids, or holds "
            "packed texts; allowed: caches that drop keys at their ends alone, position_ids that count the keys, or a "
            f"model without {mechanism}"
        )


def find_disagreeing(places: Places, ids: Tensor, start: int) -> tuple[int, int] | None:
    """Return the position of a query that stands elsewhere, and the tokens before it; None if there is none.

    Args:
        places: Where the queries and keys of the call stand.
        ids: Its position ids, int64 [B or 1, N].
        start: The slot of the first query, counted from the beginning of the rows.
    """
    slots = torch.arange(start, start + ids.shape[1], device=ids.device)
    wrong = ids != slots
    if not bool(wrong.any()):  # as in nearly every call: the tokens are not counted
        return None
    numbers = (places.count - 1)[:, start : start + ids.shape[1]].to(ids.device)
    if places.real is not None:
        is_query = places.real[:, start : start + ids.shape[1]].to(ids.device)
        by_slots = (wrong & is_query).any(1, keepdim=True)
        by_tokens = ((ids != numbers) & is_query).any(1, keepdim=True)
        wrong = wrong & is_query & by_slots & by_tokens
        if not bool(wrong.any()):
            return None
    row, query = wrong.nonzero()[0].tolist()
    return int(ids.expand(len(wrong), -1)[row, query]), int(numbers.expand(len(wrong), -1)[row, query])
