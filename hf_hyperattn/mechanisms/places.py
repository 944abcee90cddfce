"""Where the queries of a host's call stand among its keys, for mechanisms that need a query's own key or value."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import HostCall

#: Additive masks hide a pair below this: the smallest number of any dtype, and the -10000 of older models, which is
#: -9984 in bfloat16 and may have something added.
HIDDEN = -9_900.0


def first_query(call: HostCall, mechanism: str, host: str = "this layer") -> int | Tensor:
    """The key that is the first query's own; the next query's is the next one.

    A number where the call says one: queries and keys are of one sequence, or the cache says how many keys there are.
    Else read from the mask, int64 of no axes: a causal query's own key is the last one that it sees.

    Args:
        mechanism, host: names for the error.

    Raises:
        ValueError: the call does not tell.
    """
    n, m = call.query.shape[2], call.key.shape[2]
    if n == m:
        return 0
    if not call.is_causal:
        raise ValueError(
            f"{mechanism} cannot tell which of {m} keys are those of the {n} queries in {host}, which is not causal; "
            "allowed: self-attention over one sequence, choose such layers with layers=..."
        )
    if call.first.keys is not None:
        return call.first.keys - n
    mask = call.options.mask
    if mask is None:
        return m - 1 if n == 1 else call.options.offset
    _, last, any_seen = seen_ends(mask, m)
    last = torch.where(any_seen, last, 0) - torch.arange(n, device=mask.device)
    return last.amax().clamp(0, m - n)


def seen_ends(mask: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last key that a mask [B|1, H|1, N|1, M|1] shows, and whether there is one, each [B|1, H|1, N|1]."""
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    seen = seen.expand(*seen.shape[:3], keys)
    ones = seen.to(torch.uint8)
    return ones.argmax(-1), keys - 1 - ones.flip(-1).argmax(-1), seen.any(-1)
