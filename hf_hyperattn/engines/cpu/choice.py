"""What the CPU engine can compute; what it cannot goes to the blockwise engine."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from .. import blockwise, native
from ..options import Options
from ..score import PairScore
from . import decode, library, operator

logger = logging.getLogger("hf_hyperattn")


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """softmax(S)·V; arguments as in `reference.attend`, weights are not returned.

    What this engine cannot compute the blockwise engine does, after one line in the log for each reason.
    """
    out = decode.attend(score, value, options)
    if out is not None:
        return out, None
    reason = hindrance(score, value, options)
    if reason is None:
        return operator.attend(score, value, options), None
    say_once(reason)
    return blockwise.attend(score, value, options)


def suits(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether `auto` may take this engine."""
    return hindrance(score, value, options) is None


def hindrance(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Why the call cannot be computed here; None if it can."""
    if score.device.type != "cpu" or value.device.type != "cpu":
        return "its tensors are not on the CPU"
    if score.dtype != torch.float32 or value.dtype == torch.float64:
        return "it is in float64"
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (options.mask, options.bias)
    ):
        return "its mask or bias wants a gradient"
    spec = score.spec
    if library.ready(spec, options.softcap is not None):
        return None
    return library.refusal(spec) or f"{spec} is not compiled"


@functools.cache
def say_once(reason: str) -> None:
    """One line in the log for each reason; what could not be built has had its line there."""
    if "is not compiled" not in reason or not native.enabled():
        logger.warning("hf_hyperattn: backend='cpu' cannot compute a call: %s; blockwise is used", reason)
