"""What is added to the logits of pairs: which keys j and k a query sees through masks, causality and windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...engines.options import Options


@dataclass(frozen=True)
class Windows:
    """How far keys may be from a query i.

    Args:
        first: w1, for j; None for any distance.
        second: w2, for k.
        back: windows look back only, i - w < j <= i; else |i - j| < w.
    """

    first: int | None = None
    second: int | None = None
    back: bool = False


def of_first(options: Options, windows: Windows, rows: range, columns: range, like: Tensor) -> Tensor:
    """What is added for j, [B|1, H|1, R, J]: -inf for the hidden, the mask's numbers, the bias.

    Args:
        options: mask and bias have four axes; they are cut to these rows and columns.
        like: gives dtype and device.
    """
    j = torch.arange(columns.start, columns.stop, device=like.device)[None]
    found = _hidden(options, windows.first, windows.back, _places(options, rows, like), j, like)[None, None]
    for t in (options.mask, options.bias):
        if t is not None:
            found = found + _numbers(_cut(_cut(t, 2, rows), 3, columns), like)
    return found


def of_second(
    options: Options, windows: Windows, rows: range, index: Tensor, keys: int, like: Tensor
) -> Tensor:
    """What is added for k, [B|1, H|1, R, C]: -inf for the hidden, and the mask's numbers.

    Args:
        index: which keys, int64 [R|1, C]; those outside 0 .. keys - 1 are hidden.
        keys: M.
    """
    hidden = _hidden(options, windows.second, windows.back, _places(options, rows, like), index, like)
    found = hidden.masked_fill((index < 0) | (index >= keys), float("-inf"))[None, None]
    if options.mask is None:
        return found
    mask = _cut(options.mask, 2, rows)
    if mask.shape[3] > 1:
        mask = mask.expand(-1, -1, len(rows), -1)
        at = index.clamp(0, keys - 1).expand(len(rows), -1).expand(*mask.shape[:3], -1)
        mask = mask.gather(3, at)
    return found + _numbers(mask, like)


def _places(options: Options, rows: range, like: Tensor) -> Tensor:
    """Where these queries stand among the keys, [R, 1]."""
    return torch.arange(rows.start, rows.stop, device=like.device)[:, None] + options.offset


def _hidden(options: Options, window: int | None, back: bool, i: Tensor, j: Tensor, like: Tensor) -> Tensor:
    """0 where causality and both windows let i see j, -inf elsewhere, [R, C]."""
    visible = torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool, device=like.device)
    if options.is_causal or (back and window is not None):
        visible = visible & (j <= i)
    for width, one_sided in ((window, back), (options.window, options.is_causal)):
        if width is not None:
            visible = visible & (i - j < width)
            if not one_sided:
                visible = visible & (j - i < width)
    zeros = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill_(~visible, float("-inf"))


def _cut(t: Tensor, axis: int, part: range) -> Tensor:
    return t if t.shape[axis] == 1 else t.narrow(axis, part.start, len(part))


def _numbers(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, float("-inf"))
