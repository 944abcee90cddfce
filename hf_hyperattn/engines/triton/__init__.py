"""The GPU engine: Triton kernels with their own backward pass.

Here you learn which calls the engine can compute. Importing this package does not import Triton.

    operator.py      custom operators of torch and their gradients
    launch.py        from tensors to launched kernels
    configs.py       tile sizes
    selected.py      attention to listed keys: launches, operator and gradients
    tables.py        which keys a block of queries sees
    listed.py        the kernels of attention to listed keys
    forward.py       the forward kernel
    backward.py      the backward kernels
    tile.py          one tile of logits, for all kernels
    arithmetic.py    functions of one number
    norms.py         norms of rows

engines/emit_triton.py writes the functions of a score from its terms.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from ...utils.readable import can_read, is_transformed
from .. import serialize
from ..emit_triton import trace_score
from ..options import Options
from ..score import PairScore
from . import operator

__all__ = ["attend", "supports", "unsupported_reason"]

logger = logging.getLogger("hf_hyperattn")

#: Dtypes that the kernels read.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Largest number of components of a vector: configs.py has no tiles for wider ones.
WIDEST = 256


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """Compute softmax(S)·V of a supported call.

    Tensors in half precision are multiplied in half precision; everything else is computed in
    float32. Gradients do not change from run to run.

    Args:
        score, value, options: As in `reference.attend`. `unsupported_reason` must be None.

    Returns:
        The output, float32 [B, H, N, dv], and None: attention weights are not returned.
    """
    return serialize.call_operator(
        operator.forward, score.score_key, True, score, value, options, convert=convert_dtypes
    )


def convert_dtypes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert vectors to dtypes that the kernels read.

    Queries and keys must share a dtype; values may have another.
    """
    if query.dtype != key.dtype or query.dtype not in DTYPES:
        query, key = query.float(), key.float()
    return query, key, value if value.dtype in DTYPES else value.float()


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which accepts any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_installed() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def is_too_old(index: int | None) -> bool:
    """Return whether Triton has no bfloat16 products for a GPU."""
    return torch.cuda.get_device_capability(index) < (8, 0)


def unsupported_reason(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Return why the engine cannot compute a call; None if it can."""
    device = value.device
    reason = find_obstacle(score.score_key, options.softcap is not None, device.type, device.index)
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


def find_selected_obstacle(*tensors: Tensor) -> str | None:
    """Return why the kernels for listed keys cannot compute a call; None if they can.

    Args:
        tensors: Queries, keys and values.
    """
    device = tensors[0].device
    reason = find_device_obstacle(device.type, device.index)
    if reason is not None:
        return reason
    if any(t.dtype not in DTYPES for t in tensors):
        return "it is in float64"
    if max(t.shape[-1] for t in tensors) > WIDEST:
        return f"heads are wider than {WIDEST}"
    if not can_read(*tensors) or is_transformed():
        return "it is compiled, exported, or inside a transform of torch.func"
    return None


@torch.compiler.assume_constant_result
def find_obstacle(score_key: str, capped: bool, device: str, index: int | None) -> str | None:
    """Return why the kernels cannot compute a score on a device; None if they can.

    The answer does not change while a program runs, so traced calls treat it as a constant.
    """
    return find_device_obstacle(device, index) or trace_score(score_key, capped)[1]


@torch.compiler.assume_constant_result
def find_device_obstacle(device: str, index: int | None) -> str | None:
    """Return why no kernel can run on a device; None if they can."""
    if not is_installed():
        return "Triton is not installed"
    if not is_interpreted():
        # ROCm builds also call their device "cuda", but the kernels were never run on one.
        if device != "cuda" or torch.version.hip is not None:
            return f"its kernels need tensors on a CUDA device, these are on {device}"
        if is_too_old(index):
            return "the GPU's compute capability is below 8.0"
    return None


@functools.cache
def log_once(reason: str) -> None:
    """Log one line per reason."""
    logger.warning(
        "hf_hyperattn: the Triton kernels cannot compute a call (%s); another engine does", reason
    )


def supports(score: PairScore, value: Tensor, options: Options) -> bool:
    """Return whether `backend="auto"` may take this engine.

    If the tensors are on a GPU and the engine cannot compute the call, one log line says why.
    """
    # Only on a GPU: on a CPU the interpreter is far slower than the other engines.
    if value.device.type != "cuda":
        return False
    reason = unsupported_reason(score, value, options)
    # A log line would end the graph of a compiled call.
    if reason is not None and not torch.compiler.is_compiling():
        log_once(reason)
    return reason is None
