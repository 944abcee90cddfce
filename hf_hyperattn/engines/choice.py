"""Which engine computes a call: by name, or `auto`, the fastest one that can do what is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from . import blockwise, cpu, reference, sdpa, triton
from .options import Options, check_broadcast, full_precision
from .score import PairScore

#: Engines by name: `attend(score, value, options) -> (output, weights or None)`.
ENGINES: dict[str, Callable] = {}

#: Up to this many logits `auto` takes the dense engine, which then has less to do than cutting tiles.
DENSE_ELEMENTS = 2**14


def register_engine(name: str, attend: Callable) -> None:
    """Add an engine. It must agree with `reference`; a second one of the same name is refused."""
    if name in ENGINES:
        raise ValueError(f"engine {name!r} is registered already")
    ENGINES[name] = attend


register_engine("reference", reference.attend)
register_engine("blockwise", blockwise.attend)
register_engine("sdpa", sdpa.attend)
register_engine("cpu", cpu.attend)
register_engine("triton", triton.attend)


def available_engines() -> tuple[str, ...]:
    """Names that `backend=` takes, `auto` first."""
    return ("auto", *ENGINES)


def choose(score: PairScore, value: Tensor, options: Options, weights: bool) -> str:
    """The engine for `auto`: SDPA where the score is a dot product and what SDPA can add to it, else compiled tiles
    where there are such, else blocks.
    """
    tiles = "cpu" if cpu.suits(score, value, options) else "blockwise"
    if triton.suits(score, value, options):
        tiles = "triton"
    if torch.compiler.is_compiling():  # no guard on lengths: a compiled or exported call serves all of them
        return "reference" if weights else tiles
    small = math.prod(score.shape) <= DENSE_ELEMENTS
    if weights or small:
        return "reference"
    if tiles == "triton" and len(score.pieces) > 1:  # biases are no columns there
        return tiles
    return "sdpa" if sdpa.suits(score, value, options) else tiles


def attention(
    score: PairScore,
    value: Tensor,
    options: Options | None = None,
    *,
    backend: str = "auto",
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(score)·V.

    Args:
        score: the pair score, features [B, H, N, d] and [B, Hkv, M, d].
        value: [B, Hkv, M, dv].
        options: masks, causality, window, softcap, sinks, dropout; None for none of them.
        backend: a name out of `available_engines()`.
        weights: also return the attention weights [B, H, N, M]; only `reference` and `auto` can.

    Returns:
        The output [B, H, N, dv] in the score's dtype (float32 or float64), and the weights or None.

    Raises:
        ValueError: unknown backend, or a mask that does not broadcast to [B, H, N, M].
    """
    options = checked(options or Options(), score)
    if backend not in ("auto", *ENGINES):
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(available_engines())}")
    name = choose(score, value, options, weights) if backend == "auto" else backend
    if weights and name != "reference":
        raise ValueError(f"backend={name!r} returns no weights; use backend='reference' or 'auto'")
    with full_precision(score.device):
        out, found = ENGINES[name](score, value, options)
    return out, found if weights else None


def checked(options: Options, score: PairScore) -> Options:
    """Options whose masks have four axes and the working dtype."""
    shape, dtype = score.shape, score.dtype
    heads = shape[1]
    mask = check_broadcast("attn_mask", options.mask, shape)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    bias = check_broadcast("bias", options.bias, shape)
    sinks = options.sinks
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}; allowed: one value per query head, ({heads},)"
        )
    return replace(
        options,
        mask=mask,
        bias=None if bias is None else bias.to(dtype),
        sinks=None if sinks is None else sinks.to(dtype),
    )
