"""Which tokens are padding, read from a mask that hides nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def real_tokens(mask: Tensor, queries: int, is_causal: bool = False) -> Tensor:
    """Bool [B, M]: the keys that are no padding. The rows of padded queries are not looked at.

    Args:
        mask: bool (True = take part) or additive (0 or -inf, or the lowest numbers of the dtype),
            [B, 1 or H, 1 or N, M]. With fewer queries than keys, queries are the last ones.
        queries: N.
        is_causal: whether the mask hides from a query the tokens after it.

    Raises:
        ValueError: the mask hides a real token from a real query, or adds other numbers.
    """
    seen = mask if mask.dtype == torch.bool else _visible(mask)
    keys = seen.shape[-1]
    real = seen.any(1).any(1)
    place = torch.arange(keys, device=mask.device)
    expected = real[:, None, None, :]
    if is_causal:
        expected = expected & (place <= place[keys - queries :, None])
    matters = real[:, None, keys - queries :, None]
    wrong = ((seen != expected) & matters).nonzero()[:1].tolist()
    if wrong:
        b, h, i, j = wrong[0]
        shown = bool(seen.expand(-1, -1, queries, -1)[b, h, i, j])
        raise ValueError(
            f"the attention mask {'shows' if shown else 'hides'} token {j} {'to' if shown else 'from'} query {i} of "
            f"row {b}; allowed: masks that hide padding{', and the tokens after a query,' if is_causal else ''} and "
            "nothing else"
        )
    return real


def _visible(mask: Tensor) -> Tensor:
    """An additive mask as bool."""
    seen = mask > torch.finfo(mask.dtype).min / 2
    odd = mask[seen & (mask != 0)]
    if odd.numel():
        raise ValueError(
            f"the attention mask adds {float(odd[0]):g} to a logit; allowed: 0 where visible and -inf or the dtype's "
            "lowest number elsewhere; terms of the logits come as position_bias"
        )
    return seen
