"""Which queries see keys beyond the window of j."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import HostCall
from ..places import seen_ends


def cut_rows(call: HostCall, start: int | Tensor, window: int) -> Tensor:
    """Queries that would lose keys to the window, bool [B|1, H|1, N].

    Args:
        start: the key that is the first query's own.
        window: w1.
    """
    n, m, options = call.query.shape[2], call.key.shape[2], call.options
    i = torch.arange(n, device=call.query.device) + start
    if options.mask is not None:
        low, high, seen = seen_ends(options.mask, m)
    else:
        low, high, seen = torch.zeros_like(i), torch.full_like(i, m - 1), torch.ones_like(i, dtype=torch.bool)
        if options.is_causal:
            high = i
        if options.window is not None:
            low = (i - options.window + 1).clamp_min(0)
            high = torch.minimum(high, i + options.window - 1)
    ahead = 0 if call.is_causal else window - 1
    cut = ((low <= i - window) | (high > i + ahead)) & seen
    return cut if cut.dim() == 3 else cut[None, None]
