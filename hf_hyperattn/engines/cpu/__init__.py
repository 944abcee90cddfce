"""Attention in C++ tiles on the CPU, float32 and bfloat16, forward and backward (see kernels.py and core.cpp).

What this engine cannot compute goes to the blockwise engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...readable import is_recorded, is_transformed
from .. import blockwise, native, serialize
from ..options import Options
from ..score import PairScore, requires_backward
from . import kernels, library
from .kernels import norms, squared_norms

__all__ = [
    "attend",
    "decodes",
    "norms",
    "resolve",
    "squared_norms",
    "supports",
    "unsupported_reason",
]

logger = logging.getLogger("hf_hyperattn")

#: Up to this many queries against more keys are few: a step of decoding.
FEW = 4


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """softmax(S)·V; arguments as in `reference.attend`, weights are not returned."""
    return resolve(score, value, options)(score, value, options)


def resolve(score: PairScore, value: Tensor, options: Options) -> Callable:
    """What computes calls of this kind: decoding, the operator, or the blocks, of which a line in the log says why."""
    layout = decodes(score, value, options)
    if layout is not None:
        return partial(kernels.decode, layout)
    reason = unsupported_reason(score, value, options)
    if reason is None:
        return partial(serialize.call_operator, kernels.forward, score.score_key, True)
    if not torch.compiler.is_compiling():  # which a line in the log would end the graph of
        log_once(reason)
    return blockwise.attend


def decodes(score: PairScore, value: Tensor, options: Options) -> kernels.DecodeLayout | None:
    """How a few queries are computed in one reading of the keys; None where there are more, or something learns."""
    query, key = score.raw_query, score.raw_key
    if is_recorded():  # first: no guard on lengths, which an exported call would be bound by
        return None
    few = query.shape[2] <= FEW and query.shape[2] < key.shape[2]
    plain = query.dtype in serialize.RAW_DTYPES and query.dtype == key.dtype == value.dtype
    on_cpu = query.device.type == key.device.type == value.device.type == "cpu"
    if (
        not (few and plain and on_cpu)
        or options.dropout_p
        or requires_backward(score, value, options)
    ):
        return None
    readable = score.is_product or any(t.reader is not None for t in score.terms)
    watched = (
        _get_current_dispatch_mode() or is_transformed()
    )  # who counts operators sees none here
    return kernels.decode_layout(score, options) if readable and not watched else None


def supports(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether `auto` may take this engine."""
    return unsupported_reason(score, value, options) is None


def unsupported_reason(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Why the call cannot be computed here; None if it can."""
    if score.device.type != "cpu" or value.device.type != "cpu":
        return "its tensors are not on the CPU"
    if score.dtype != torch.float32 or value.dtype == torch.float64:
        return "it is in float64"
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (options.mask, options.bias)
    ):
        return "its mask or bias wants a gradient"
    key = score.score_key
    if library.ready(key, options.softcap is not None):
        return None
    return library.refusal(key) or f"{key} is not compiled"


@functools.cache
def log_once(reason: str) -> None:
    """One line in the log for each reason; what could not be built has had its line there."""
    if "is not compiled" not in reason or not native.is_enabled():
        logger.warning(
            "hf_hyperattn: backend='cpu' cannot compute a call: %s; blockwise is used", reason
        )
