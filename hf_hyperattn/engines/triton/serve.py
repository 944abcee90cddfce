"""The GPU engine's face: what it can serve, and a call's tensors as its operators take them."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from ..options import Options
from ..score import PairScore, Source, parse_spec, repeat_heads
from .operator import attention
from .terms import triton_form

logger = logging.getLogger("hf_hyperattn")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """softmax(S)·V; arguments as in `reference.attend`, weights are not returned.

    Products are of half precision where the caller's tensors are, all else is float32. Gradients are the same from run
    to run.

    Raises:
        ValueError: the call asks for what the kernels cannot do; the message says what.
    """
    reason = hindrance(score, value, options)
    if reason is not None:
        raise ValueError(f"backend='triton' cannot compute this call: {reason}; use backend='auto'")
    source, points = source_of(score), (None, None)
    if score.points is not None:
        found = (
            score.points()
        )  # without gradient: it flows through the statistics of which the gap is a function
        points = [t.detach().float().contiguous() for t in (found.query, found.key)]
    query, key = source.query, source.key
    if query.dtype != key.dtype or query.dtype not in DTYPES:
        query, key = query.float(), key.float()
    (batch, heads, n, m), kv_heads, device = score.shape, key.shape[1], query.device
    row, column, head = score.numbers()
    factored = source.row is not None or source.column is not None
    if factored:
        new = lambda *shape: torch.ones(shape, device=device)
        row = [*row, new(batch, heads, n) if source.row is None else source.row]
        column = [*column, new(batch, kv_heads, m) if source.column is None else source.column]
    if any(t.shape[1] != kv_heads for t in column):
        column = [repeat_heads(t, heads) for t in column]
    out, _ = attention(
        query,
        key,
        value if value.dtype in DTYPES else value.float(),
        packed(row, -1, (batch, heads, n, 0), device),
        packed(column, -1, (batch, kv_heads, m, 0), device),
        packed(head, 0, (0, heads), device),
        options.mask,
        options.bias,
        options.sinks,
        torch.randint(2**62, (1,), device=device) if options.dropout_p else None,
        *points,
        score.spec,
        factored,
        query.shape[-1] if source.width is None else source.width,
        float(source.scale),
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
        options.dropout_p,
    )
    return out, None


def source_of(score: PairScore) -> Source:
    """What the features are made of, or the features as they are."""
    raw = score.raw
    return raw if raw is not None else Source(score.query, score.key, 1.0, (score.query, score.key))


def packed(numbers: list[Tensor], axis: int, none: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers as float32 along a new axis; where there are none, an empty tensor of that shape."""
    return torch.stack([t.float() for t in numbers], axis) if numbers else torch.empty(none, device=device)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def installed() -> bool:
    """Whether there is a Triton to import."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def too_old(index: int | None) -> bool:
    """Whether a GPU is one that Triton has no bfloat16 products for."""
    return torch.cuda.get_device_capability(index) < (8, 0)


def hindrance(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Why the call cannot be computed here; None if it can."""
    device = value.device
    reason = obstacle(score.spec, device.type, device.index)
    if reason is not None:
        return reason
    if torch.float64 in (score.dtype, value.dtype):
        return "it is in float64"
    if max(source_of(score).query.shape[-1], value.shape[-1]) > WIDEST:
        return f"heads are wider than {WIDEST}"
    given = [t for t in (options.mask, options.bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "masks and biases get no gradient"
    return None


@torch.compiler.assume_constant_result
def obstacle(spec: str, device: str, index: int | None) -> str | None:
    """What is in the way of this score on this device; None if nothing is. Does not change while a program runs."""
    if not installed():
        return "Triton is not installed"
    if not interpreted():
        if device != "cuda" or torch.version.hip is not None:
            return f"its kernels need tensors on a CUDA device, these are on {device}"
        if too_old(index):
            return "the GPU's compute capability is below 8.0"
    missing = [term.name for term, _ in parse_spec(spec) if triton_form(term) is None]
    return f"{missing[0]} has no Triton form" if missing else None


@functools.cache
def _told(reason: str) -> None:
    logger.warning("hf_hyperattn: the Triton kernels cannot compute a call (%s); another engine does", reason)


def suits(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether `auto` takes this engine: it can, and on a GPU. One line in the log says why it cannot there."""
    if value.device.type != "cuda":
        return False
    reason = hindrance(score, value, options)
    if reason is not None and not torch.compiler.is_compiling():
        _told(reason)
    return reason is None
