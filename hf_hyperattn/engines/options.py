"""Settings of an attention call besides the score, such as masks and softcap.

The functions below say which pairs of queries and keys these settings hide.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

#: An additive mask hides a pair if it adds this or less. The bound covers the lowest number of
#: every dtype. It also covers the -10000 of older models, which bfloat16 rounds to -9984, with a
#: small bias added.
HIDDEN = -9_900.0


def read_visible(mask: Tensor) -> Tensor:
    """Return a bool mask that is True at visible pairs.

    This is the only place that defines which pairs an additive mask hides.
    """
    # NaN counts as visible, so that it spreads to the output and is noticed.
    return mask if mask.dtype == torch.bool else ~(mask <= HIDDEN)


def hide_with_infinity(mask: Tensor) -> Tensor:
    """Return an additive mask with -inf at hidden pairs, or a bool mask unchanged.

    A query whose keys are all at -1e4 then sees nothing, as under a bool mask. Without -inf,
    softmax would return the mean of all values for it.
    """
    return mask if mask.dtype == torch.bool else mask.masked_fill(mask <= HIDDEN, float("-inf"))


@dataclass(frozen=True, eq=False)
class Aggregation:
    """An average of values that is not a plain mean, such as the Einstein midpoint.

    It averages columns that are made from the values, and makes the result from the averaged
    columns. Engines that read each key and value once use two readers (score.py) instead of
    `columns` and `finish`:

    - `<name> lift` reads the sum of a value's squares. It returns the factor for the value, and
      more numbers to average.
    - `<name> land` reads the sum of squares of the averaged value, the averaged numbers, and the
      sum of the weights. That sum is below 1 if there are sinks. It returns the factor for the
      averaged value.

    Args:
        name: Prefix of the names of the two readers.
        columns: Function from values [B, Hkv, M, dv] in the working dtype to columns [B, Hkv or H,
            M, e].
        finish: Function from averaged columns [B, H, N, e], and whether there are sinks, to the
            result [B, H, N, dv].
        parameters: Parameters of the readers: numbers, or tensors [H] or [1].
        gate: Share of the result [H]; the plain mean gets 1 - gate. Default None: no mean.
    """

    name: str
    columns: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor, bool], Tensor]
    parameters: tuple[Tensor | float, ...] = ()
    gate: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """Settings that every engine must honour.

    A pair is visible if mask, causality and window all allow it.

    Args:
        mask: Bool (True = visible) or additive float, broadcastable to [B, H, N, M]. An additive
            mask hides a pair if it adds `HIDDEN` or less. Default None hides nothing.
        bias: Additive term of the logits, broadcastable to [B, H, N, M], such as T5's relative
            positions.
        is_causal: Show key j to query i only if j <= i (top-left alignment, as in torch's SDPA).
        window: Show key j to query i only if i - j < window and, if not causal, j - i < window.
        offset: Position of query 0 among the keys, for `is_causal` and `window`.
        softcap: Cap c of c · tanh(S / c), for the first term of the score and terms with `capped`.
        sinks: One extra logit per query head [H] that is in the softmax but has no value.
        dropout_p: Probability that a weight is dropped, in [0, 1).
        aggregation: Average of the values; None (default) for their mean. Engines that do not
            support it never get it.
        any_rounding: Allow `auto` to compute a plain dot product by a faster kernel than SDPA, with
            other last digits.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    offset: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    aggregation: Aggregation | None = None
    any_rounding: bool = False


def check_broadcast(
    name: str, tensor: Tensor | None, shape: tuple[int, int, int, int]
) -> Tensor | None:
    """Return a mask or bias with four axes.

    Args:
        name: Name of the argument, for errors.
        tensor: The mask or bias, or None.
        shape: Shape (B, H, N, M) of the logits.

    Raises:
        ValueError: The tensor has another dtype than bool or floating point, or does not broadcast
            to `shape`.
    """
    if tensor is None:
        return None
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; allowed: bool (True = take part) or floating point (added)"
        )
    # From the last axis on, as in broadcasting. `strict=False`: leading axes may be missing.
    fits = tensor.dim() <= 4 and all(
        a in (1, b) for a, b in zip(reversed(tensor.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to [batch, heads, queries, "
            f"keys] = {tuple(shape)}"
        )
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def position_mask(
    options: Options, rows: tuple[int, int], columns: tuple[int, int], device
) -> Tensor | None:
    """Return which pairs causality and the window show.

    Args:
        options: The settings; masks are ignored.
        rows: Queries [start, stop).
        columns: Keys [start, stop).
        device: Device of the result.

    Returns:
        Bool [rows, columns], or None if every pair is visible.
    """
    # None instead of all True, so that callers skip the masking.
    if not options.is_causal and options.window is None:
        return None
    i = torch.arange(*rows, device=device)[:, None]
    return visible_pairs(options, i, torch.arange(*columns, device=device)[None, :])


def visible_pairs(options: Options, i: Tensor, j: Tensor) -> Tensor | None:
    """Return which pairs causality and the window show, for given queries and keys.

    Args:
        options: The settings; masks are ignored.
        i: Numbers of queries, int64.
        j: Numbers of keys, int64; broadcasts against `i`.

    Returns:
        Bool of the broadcast shape, or None if every pair is visible.
    """
    if not options.is_causal and options.window is None:
        return None
    i = i + options.offset
    visible = (j <= i) if options.is_causal else torch.ones_like(i - j, dtype=torch.bool)
    # A causal window only looks back, because later keys are hidden already.
    if options.window is not None:
        visible = visible & (i - j < options.window)
        if not options.is_causal:
            visible = visible & (j - i < options.window)
    return visible


def key_range(options: Options, rows: range, keys: int) -> range:
    """Return the keys that at least one query sees, by causality and the window only.

    Args:
        options: The settings; masks are ignored.
        rows: The queries.
        keys: Number M of keys of the call.
    """
    # The first row sees farthest back, and the last row sees farthest ahead.
    start, stop = 0, keys
    if options.window is not None:
        start = max(0, rows.start + options.offset - options.window + 1)
        stop = min(keys, rows.stop - 1 + options.offset + options.window)
    if options.is_causal:
        stop = min(keys, rows.stop + options.offset)
    # An offset may put all rows before the first key or behind the last: the range is empty then,
    # never reversed.
    start = min(start, keys)
    return range(start, max(stop, start))


def full_precision(device: torch.device) -> AbstractContextManager:
    """Return a context without autocast.

    Autocast would round products, and the columns of a midpoint exceed the range of float16.
    """
    kind = device.type
    # In this order: torch raises an error if a device without autocast is asked.
    on = has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


# torch 2.13 and later can trace this question; earlier compilers need the answer as a constant.
@torch.compiler.assume_constant_result
def has_autocast(kind: str) -> bool:
    """Return whether devices of this type support autocast; "meta" does not."""
    return torch.amp.is_autocast_available(kind)
