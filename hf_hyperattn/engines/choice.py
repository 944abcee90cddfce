"""Which engine computes a call: by name, or `auto`, the fastest one that can do what is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from . import blockwise, cpu, dense, reference, sdpa, triton
from .options import Options, check_broadcast, full_precision
from .score import PairScore

#: Engines by name: `attend(score, value, options) -> (output, weights or None)`.
ENGINES: dict[str, Callable] = {}

#: Up to this many logits mechanisms with tiles of their own take the whole matrix, which then is less to do.
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
    """The engine for `auto`: SDPA for a plain dot product, compiled tiles for all else; where they cannot serve, SDPA
    for what it can add to a dot product, then blocks, or the whole matrix where that is faster to do (dense.py).
    """
    if weights:
        return "reference"
    compiling = (
        torch.compiler.is_compiling()
    )  # no guard on lengths: a compiled or exported call serves all of them
    if not compiling and math.prod(score.shape) <= dense.COMPILED:  # nothing is built for a toy
        return "reference"
    tiles = "cpu" if cpu.suits(score, value, options) else "blockwise"
    if triton.suits(score, value, options):
        tiles = "triton"
    if compiling or (tiles != "blockwise" and len(score.pieces) > 1):  # faster than biases as columns
        return tiles
    if sdpa.suits(score, value, options):
        return "sdpa"
    if tiles == "blockwise" and dense.pays(score.shape, learns(score, value), compiled=False):
        return "reference"
    return tiles


def decoded(score: PairScore, value: Tensor, options: Options) -> Tensor | None:
    """The output for a few queries against many keys, where the compiled engine has a way of its own for them; None
    where it has not, or SDPA serves as well.
    """
    alone = len(score.pieces) == 1 and score.pieces[0].reader is None
    if alone or torch.compiler.is_compiling() or math.prod(score.shape) <= dense.DECODED:
        return None
    return cpu.decode.attend(score, value, options)


def learns(score: PairScore, value: Tensor) -> bool:
    """Whether there will be a backward pass, as far as queries, keys, values and what heads have tell."""
    if not torch.is_grad_enabled():
        return False
    raw = score.raw or score
    own = [t for p in score.pieces for t in (*p.head, p.gate) if t is not None]
    return any(t.requires_grad for t in (raw.query, raw.key, value, *own))


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
    if backend == "auto" and not weights:
        out = decoded(score, value, options)
        if out is not None:
            return out, None
    name = choose(score, value, options, weights) if backend == "auto" else backend
    if weights and name != "reference":
        raise ValueError(f"backend={name!r} returns no weights; use backend='reference' or 'auto'")
    with full_precision(score.device):
        out, found = ENGINES[name](score, value, options)
    return out, found if weights else None


def checked(options: Options, score: PairScore) -> Options:
    """Options whose masks have four axes and the working dtype."""
    if options.mask is None and options.bias is None and options.sinks is None:
        return options
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
