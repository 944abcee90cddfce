"""The refusal of caches that were pruned in the middle, for mechanisms that count the cached keys.

Eviction methods drop keys from the middle of a cache and go on with the `position_ids` of the whole text. Nothing in
the call says which tokens the keys that are left belong to, so that distances, windows and pages cannot be counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from ..engines.options import read_visible
from ..readable import can_read
from .base import HostCall
from .places import first_query, real_of, remembered

#: The answers for position ids that are alive: all layers of a model share one tensor.
_DISAGREEING = WeakIdKeyDictionary()


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
    queries = call.query.shape[2]
    if ids is None or queries == keys or not call.is_causal or call.first.index is None:
        return
    if ids.dim() != 2 or ids.shape[1] != queries or not can_read(ids, call.options.mask, call.first.attention_mask):
        return
    # In a layer that lost more keys than the others, the mask says more than there are.
    start = min(int(first_query(call, mechanism)), keys - queries) + call.first.index
    padding = call.options.mask if call.first.attention_mask is None else call.first.attention_mask
    about: tuple = (start, queries)
    if padding is not None:
        about += (WeakIdRef(padding), None if padding.is_inference() else padding._version)
    found = remembered(_DISAGREEING, ids, about, lambda: find_disagreeing(call, ids, start))
    if found is not None:
        position, before = found
        raise ValueError(
            f"{mechanism} counts the keys of the cache, and position_ids={position} disagrees with the {before} that "
            "stand before this query: the cache was pruned in the middle, or filled with other position_ids; allowed: "
            "caches that drop keys at their ends alone, position_ids that count the keys, or a model without "
            f"{mechanism}"
        )


def find_disagreeing(call: HostCall, ids: Tensor, start: int) -> tuple[int, int] | None:
    """Return the position of a query that stands elsewhere, and the tokens before it; None if there is none.

    Args:
        call: The call of an attention layer.
        ids: Its position ids, int64 [B or 1, N].
        start: The slot of the first query, counted from the beginning of the rows.
    """
    slots = torch.arange(start, start + ids.shape[1], device=ids.device)
    real = real_of(call.first, start + ids.shape[1])
    mask, dropped = call.options.mask, call.first.index or 0
    if real is None and mask is not None:
        seen = read_visible(mask).any(1).any(1)
        seen = seen.expand(-1, call.key.shape[2])[:, : start + ids.shape[1] - dropped]
        real = torch.nn.functional.pad(seen, (dropped, 0), value=True)
    wrong = ids != slots
    if real is not None:
        real = real.to(ids.device)
        is_query, places = real[:, start:], (real.cumsum(1) - 1)[:, start:]
        by_slots = (wrong & is_query).any(1, keepdim=True)
        by_tokens = ((ids != places) & is_query).any(1, keepdim=True)
        wrong = wrong & is_query & by_slots & by_tokens
    if not bool(wrong.any()):
        return None
    row, query = wrong.nonzero()[0].tolist()
    place = start + query if real is None else int((real.cumsum(1) - 1).expand(len(wrong), -1)[row, start + query])
    return int(ids.expand(len(wrong), -1)[row, query]), place
