"""What an attention call asks of an engine besides the score: masks, causality, windows, caps, sinks, dropout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

#: An additive mask hides a pair where it adds this or less. It holds for the lowest number of every dtype and for the
#: -10000 of older models, which bfloat16 rounds to -9984 and which may have a bias added.
HIDDEN = -9_900.0


def read_visible(mask: Tensor) -> Tensor:
    """Return bool, True where a mask hides nothing: the one place that says what an additive mask hides."""
    # NaN is visible, so that it spreads and is noticed.
    return mask if mask.dtype == torch.bool else ~(mask <= HIDDEN)


def hide_with_infinity(mask: Tensor) -> Tensor:
    """Return an additive mask with -inf wherever it hides; a bool mask as it is.

    A query whose keys are all at -1e4 then sees nothing, as under a bool mask. With the numbers as they came, softmax
    would give it the mean of all values.
    """
    return mask if mask.dtype == torch.bool else mask.masked_fill(mask <= HIDDEN, float("-inf"))


@dataclass(frozen=True, eq=False)
class Aggregation:
    """An average of values that is no plain mean: of columns that are made of them, of which the result is made.

    Engines that read each key and value once make the columns on the way, as two readers (score.py) say. `<name> lift`
    takes the sum of a value's squares; from it come what the value is multiplied with before it is averaged, and
    numbers to average beside it. `<name> land` takes the sum of the squares of that average, the averaged numbers, and
    the sum of the weights, which sinks leave below 1; from them comes what the average is multiplied with.

    Args:
        name: of the two readers.
        columns: from values [B, Hkv, M, dv] in the working dtype to [B, Hkv or H, M, e].
        finish: from the averaged columns [B, H, N, e], and whether there are sinks, to the result [B, H, N, dv].
        parameters: what the readers take: numbers, or tensors [H] or [1].
        gate: [H], how much of the result there is beside the mean, which gets 1 - gate; None for all.
    """

    name: str
    columns: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor, bool], Tensor]
    parameters: tuple[Tensor | float, ...] = ()
    gate: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """Everything an engine must honour. The parts that hide pairs intersect.

    Args:
        mask: bool (True = take part) or additive float, broadcastable to [B, H, N, M]; None hides nothing. An additive
            mask hides where it adds `HIDDEN` or less.
        bias: an additive term of the logits, broadcastable to [B, H, N, M], such as T5's relative positions.
        is_causal: key j is visible to query i where j <= i (top-left, as in torch's SDPA).
        window: key j is visible to query i where i - j < window, and where not causal also j - i < window.
        offset: position of query 0 among the keys, for `is_causal` and `window`.
        softcap: c · tanh(S / c) on the first piece of the score, and on those that take its place.
        sinks: one extra logit per query head [H] that takes part in the softmax and has no value.
        dropout_p: probability that a weight is dropped, in [0, 1).
        aggregation: how values are averaged; None for their mean. Engines that do not know it never see it.
        any_rounding: whether `auto` may compute a plain dot product by another kernel than SDPA where that is faster:
            its last digits differ.
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
    """`tensor` with four axes, or an error if it does not broadcast to `shape` = (B, H, N, M)."""
    if tensor is None:
        return None
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; allowed: bool (True = take part) or floating point (added)"
        )
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
    """Bool of what causality and the window leave visible of rows and columns [start, stop); None if everything is."""
    if not options.is_causal and options.window is None:
        return None
    i = torch.arange(*rows, device=device)[:, None]
    return visible_pairs(options, i, torch.arange(*columns, device=device)[None, :])


def visible_pairs(options: Options, i: Tensor, j: Tensor) -> Tensor | None:
    """The same of queries i and keys j, int64 that broadcast; None if everything is visible."""
    if not options.is_causal and options.window is None:
        return None
    i = i + options.offset
    visible = (j <= i) if options.is_causal else torch.ones_like(i - j, dtype=torch.bool)
    if options.window is not None:
        visible = visible & (i - j < options.window)
        if not options.is_causal:
            visible = visible & (j - i < options.window)
    return visible


def key_range(options: Options, rows: range, keys: int) -> range:
    """The keys that some query of `rows` can see, by causality and the window alone."""
    start, stop = 0, keys
    if options.window is not None:
        start = max(0, rows.start + options.offset - options.window + 1)
        stop = min(keys, rows.stop - 1 + options.offset + options.window)
    if options.is_causal:
        stop = min(keys, rows.stop + options.offset)
    return range(min(start, keys), max(stop, min(start, keys)))


def full_precision(device: torch.device) -> AbstractContextManager:
    """Autocast switched off where it is on: it rounds products, and a midpoint's columns leave float16's range."""
    kind = device.type
    on = has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


@torch.compiler.assume_constant_result  # needless from torch 2.13 on, whose compiler reads this question itself
def has_autocast(kind: str) -> bool:
    """Whether devices of this type know autocast at all ("meta" does not)."""
    return torch.amp.is_autocast_available(kind)
