"""The CPU engine: attention in C++ tiles, with gradients.

Here you learn which calls it computes, and how; the blockwise engine computes the others. The
kernels are called in kernels.py and written in core.cpp.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...utils.readable import is_recorded, is_transformed
from ...utils.torch_private import count_dispatch_modes
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

#: Largest number of queries of a decoding step, if there are more keys than queries.
FEW = 4


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """Compute softmax(S)·V.

    Args:
        score, value, options: As in `reference.attend`.

    Returns:
        The output, float32 [B, H, N, dv], and None: attention weights are not returned.
    """
    return resolve(score, value, options)(score, value, options)


def resolve(score: PairScore, value: Tensor, options: Options) -> Callable:
    """Return the function that computes calls of this kind.

    It is the decoding kernel, the operator, or the blockwise engine. The last one is logged with
    the reason.
    """
    layout = decodes(score, value, options)
    if layout is not None:
        return partial(kernels.decode, layout)
    reason = unsupported_reason(score, value, options)
    if reason is None:
        return partial(serialize.call_operator, kernels.forward, score.score_key, True)
    # A log line would end the graph of a compiled call.
    if not torch.compiler.is_compiling():
        log_once(reason)
    return blockwise.attend


def decodes(score: PairScore, value: Tensor, options: Options) -> kernels.DecodeLayout | None:
    """Return how the decoding kernel computes a call; None if it cannot.

    It cannot if there are more than a few queries, or if the call needs gradients.
    """
    query, key = score.raw_query, score.raw_key
    # First, before any question about lengths: its answer would become a guard of a recorded call.
    if is_recorded():
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
    # The kernel is called without an operator, which FLOP counters and other modes would miss.
    watched = count_dispatch_modes() or is_transformed()
    return kernels.plan_decoding(score, options) if readable and not watched else None


def supports(score: PairScore, value: Tensor, options: Options) -> bool:
    """Return whether `backend="auto"` may take this engine."""
    return unsupported_reason(score, value, options) is None


def unsupported_reason(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Return why the engine cannot compute a call; None if it can."""
    if score.device.type != "cpu" or value.device.type != "cpu":
        return "its tensors are not on the CPU"
    if score.dtype != torch.float32 or value.dtype == torch.float64:
        return "it is in float64"
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (options.mask, options.bias)
    ):
        return "its mask or bias wants a gradient"
    key = score.score_key
    if library.can_load(key, options.softcap is not None):
        return None
    return library.find_refusal(key) or f"{key} is not compiled"


@functools.cache
def log_once(reason: str) -> None:
    """Log one line per reason."""
    # `native` has already logged why a library could not be built.
    if "is not compiled" not in reason or not native.is_enabled():
        logger.warning(
            "hf_hyperattn: backend='cpu' cannot compute a call: %s; blockwise is used", reason
        )
