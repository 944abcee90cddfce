"""The GPU engine: Triton kernels with their own backward pass.

    operator.py    the operators of torch and their gradients
    launch.py      from tensors to launched kernels; configs.py: tile sizes
    forward.py, backward.py, tile.py   the kernels; arithmetic.py: functions of one number; norms.py: those of rows

A score's functions are written from its terms (engines/emit_triton.py). Importing the package does not import Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from .. import serialize
from ..emit_triton import trace_score
from ..options import Options
from ..score import PairScore
from . import operator

__all__ = ["attend", "supports", "unsupported_reason"]

logger = logging.getLogger("hf_hyperattn")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """softmax(S)·V of a call that `unsupported_reason` has nothing against; arguments as in `reference.attend`.

    Products are of half precision where the caller's tensors are, all else is float32. Gradients are the same from run
    to run.
    """
    return serialize.call_operator(
        operator.forward, score.score_key, True, score, value, options, convert=mixed_dtypes
    )


def mixed_dtypes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors as the kernels take them: queries and keys of one dtype, values of any."""
    if query.dtype != key.dtype or query.dtype not in DTYPES:
        query, key = query.float(), key.float()
    return query, key, value if value.dtype in DTYPES else value.float()


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
    reason = obstacle(score.score_key, options.softcap is not None, device.type, device.index)
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
def obstacle(score_key: str, capped: bool, device: str, index: int | None) -> str | None:
    """What is in the way of this score on this device; None if nothing is. Does not change while a program runs."""
    return obstacle_of_device(device, index) or trace_score(score_key, capped)[1]


@torch.compiler.assume_constant_result
def obstacle_of_device(device: str, index: int | None) -> str | None:
    """What is in the way of all kernels on this device; None if nothing is."""
    if not installed():
        return "Triton is not installed"
    if not interpreted():
        if device != "cuda" or torch.version.hip is not None:
            return f"its kernels need tensors on a CUDA device, these are on {device}"
        if too_old(index):
            return "the GPU's compute capability is below 8.0"
    return None


@functools.cache
def log_once(reason: str) -> None:
    """One line in the log for each reason."""
    logger.warning(
        "hf_hyperattn: the Triton kernels cannot compute a call (%s); another engine does", reason
    )


def supports(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether `auto` takes this engine: it can, and on a GPU. One line in the log says why it cannot there."""
    if value.device.type != "cuda":
        return False
    reason = unsupported_reason(score, value, options)
    if reason is not None and not torch.compiler.is_compiling():
        log_once(reason)
    return reason is None
