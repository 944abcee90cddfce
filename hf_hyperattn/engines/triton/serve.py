"""The GPU engine's face: what it can serve, and a call's tensors as its operators take them."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from ..options import Options
from ..score import PairScore, parse_score_key, repeat_heads
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
    reason = unsupported_reason(score, value, options)
    if reason is not None:
        raise ValueError(f"backend='triton' cannot compute this call: {reason}; use backend='auto'")
    return compute(score, value, options)


def compute(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """A call that `unsupported_reason` has nothing against."""
    points: list[Tensor | None] = [None] * 2
    if score.points is not None:  # without gradient: it flows through the statistics that distances are functions of
        between = score.points()
        points = [t.detach().float().contiguous() for t in (between.query, between.key)]
    numbers = [term.numbers() for term in score.terms]
    factors = next((x.factors for x in numbers if x.factors is not None), None)
    query, key, scale, width = score.raw_query, score.raw_key, float(score.scale), score.width
    if score.make_features is not None and factors is None:
        (query, key), scale, width = score.features(), 1.0, None
    if query.dtype != key.dtype or query.dtype not in DTYPES:
        query, key = query.float(), key.float()
    (batch, heads, n, m), kv_heads, device = score.shape, key.shape[1], query.device
    row, column = [t for x in numbers for t in x.row], [t for x in numbers for t in x.column]
    head = [t for x, term in zip(numbers, score.terms) for t in (*x.head, term.gate) if t is not None]
    if factors is not None:
        row, column = [*row, factors[0]], [*column, factors[1]]
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
        score.score_key,
        factors is not None,
        query.shape[-1] if width is None else width,
        scale,
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
        options.dropout_p,
    )
    return out, None


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


def unsupported_reason(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Why the call cannot be computed here; None if it can."""
    device = value.device
    reason = obstacle(score.score_key, device.type, device.index)
    if reason is not None:
        return reason
    if torch.float64 in (score.dtype, value.dtype):
        return "it is in float64"
    if max(score.raw_query.shape[-1], value.shape[-1]) > WIDEST:
        return f"heads are wider than {WIDEST}"
    masks = [t for t in (options.mask, options.bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in masks):
        return "masks and biases get no gradient"
    return None


@torch.compiler.assume_constant_result
def obstacle(score_key: str, device: str, index: int | None) -> str | None:
    """What is in the way of this score on this device; None if nothing is. Does not change while a program runs."""
    if not installed():
        return "Triton is not installed"
    if not interpreted():
        if device != "cuda" or torch.version.hip is not None:
            return f"its kernels need tensors on a CUDA device, these are on {device}"
        if too_old(index):
            return "the GPU's compute capability is below 8.0"
    missing = [term.name for term, *_ in parse_score_key(score_key) if triton_form(term) is None]
    return f"{missing[0]} has no Triton form" if missing else None


@functools.cache
def log_once(reason: str) -> None:
    """One line in the log for each reason."""
    logger.warning("hf_hyperattn: the Triton kernels cannot compute a call (%s); another engine does", reason)


def supports(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether `auto` takes this engine: it can, and on a GPU. One line in the log says why it cannot there."""
    if value.device.type != "cuda":
        return False
    reason = unsupported_reason(score, value, options)
    if reason is not None and not torch.compiler.is_compiling():
        log_once(reason)
    return reason is None
