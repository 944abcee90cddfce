"""Which engine computes a call: by name, or `auto`, the fastest one that can do what is asked.

What computes a kind of call is found out once (`resolve`) and kept; a call looks up its kind and runs that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..readable import is_exporting, is_recorded, is_transformed
from . import blockwise, cpu, dense, native, reference, sdpa, triton
from .options import Options, check_broadcast, full_precision, hide_with_infinity
from .score import DOT, PairScore, learns, repeat_heads, working_dtype

#: Engines by name: `attend(score, value, options) -> (output, weights or None)`.
ENGINES: dict[str, Callable] = {}

#: What computes each kind of call that was met: `run(score, value, options) -> (output, weights or None)`.
RESOLVED: dict[tuple, Callable] = {}

#: Up to this many logits mechanisms with tiles of their own take the whole matrix, which then is less to do.
DENSE_ELEMENTS = 2**14


def register_engine(name: str, attend: Callable) -> None:
    """Add an engine. It must agree with `reference`; a second one of the same name is refused."""
    if name in ENGINES:
        raise ValueError(f"engine {name!r} is registered already")
    ENGINES[name] = attend
    RESOLVED.clear()


def attend_or_refuse(
    name: str, engine, score: PairScore, value: Tensor, options: Options
) -> tuple[Tensor, None]:
    """One of the engines that cannot do everything; ValueError where a call asks for more, which it names."""
    reason = engine.unsupported_reason(score, value, options)
    if reason is not None:
        raise ValueError(f"backend={name!r} cannot compute this call: {reason}; use backend='auto'")
    return engine.attend(score, value, options)


register_engine("reference", reference.attend)
register_engine("blockwise", blockwise.attend)
register_engine("sdpa", partial(attend_or_refuse, "sdpa", sdpa))
register_engine("cpu", cpu.attend)
register_engine("triton", partial(attend_or_refuse, "triton", triton))

#: Those of them that `auto` has asked already whether they can.
UNCHECKED = {"sdpa": sdpa.attend, "triton": triton.attend}


def available_engines() -> tuple[str, ...]:
    """Names that `backend=` takes, `auto` first."""
    return ("auto", *ENGINES)


def check_backend(backend: str) -> str:
    """The name of an engine, or a ValueError that lists those there are."""
    if backend != "auto" and backend not in ENGINES:
        raise ValueError(
            f"backend={backend!r} is unknown; allowed: {', '.join(available_engines())}"
        )
    return backend


def check_transforms(backend: str) -> None:
    """Refuse an engine that is an operator of its own where that would lose derivatives, or fail.

    Raises:
        ValueError: inside torch.func's transforms and forward-mode derivatives, of "blockwise", "cpu" and "triton".
    """
    if backend in ("blockwise", "cpu", "triton") and is_transformed():
        raise ValueError(
            f"backend={backend!r} cannot compute this call: torch.func's transforms and forward-mode derivatives know "
            "plain operators alone; use backend='auto' or 'reference'"
        )


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
        score: the pair score of queries [B, H, N, d] and keys [B, Hkv, M, d].
        value: [B, Hkv, M, dv].
        options: masks, causality, window, softcap, sinks, dropout; None for none of them.
        backend: a name out of `available_engines()`.
        weights: also return the attention weights [B, H, N, M]; only `reference` and `auto` can.

    Returns:
        The output [B, H, N, dv] in the score's dtype (float32 or float64), and the weights or None.

    Raises:
        ValueError: unknown backend, or a mask that does not broadcast to [B, H, N, M].
    """
    options = options or Options()
    query, key = score.raw_query, score.raw_key
    if options.mask is not None or options.bias is not None or options.sinks is not None:
        options = checked(options, score)
    if weights or torch.compiler.is_compiling() or torch.jit.is_tracing():
        with full_precision(query.device):
            out, attention_weights = resolve(score, value, options, backend, weights)(
                score, value, options
            )
        return out, attention_weights if weights else None
    (batch, heads, n, width), m = query.shape, key.shape[2]
    size = batch * heads * n * m
    kind: list = [
        backend,
        n <= cpu.FEW and n < m,
        size <= dense.DECODED,
        size <= dense.COMPILED,
        options.any_rounding,
        size <= dense.PLAIN,
        max(width, value.shape[-1]),
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        value.device,
        learns(score, value, options) if torch.is_grad_enabled() else False,
        options.softcap is None,
        bool(options.dropout_p),
        _get_current_dispatch_mode() is None,
        peek_interpreter_stack() is None and forward_ad._current_level < 0,
        os.environ.get(native.SETTING),
        score.width is None,
        score.make_features is None,
        options.aggregation and (options.aggregation.name, options.aggregation.gate is None),
    ]
    for tensor in (options.mask, options.bias):
        kind.append(tensor is not None and tensor.requires_grad)
    for term in score.terms:
        reader = None if term.reader is None else term.reader.name
        kind += (term.term, term.gate is None, term.capped, reader, term.low_rank_factors is None)
        kind.append(term.statistics is None)
    run = RESOLVED.get(tuple(kind))
    if run is None:
        run = RESOLVED[tuple(kind)] = resolve(score, value, options, backend, False)
    if query.device.type in ("cpu", "cuda") and not torch.is_autocast_enabled(query.device.type):
        return run(score, value, options)
    with full_precision(query.device):
        return run(score, value, options)


def resolve(
    score: PairScore, value: Tensor, options: Options, backend: str, weights: bool
) -> Callable:
    """What computes calls of this kind, `run(score, value, options) -> (output, weights or None)`."""
    if options.aggregation is not None:
        fits = check_backend(backend) == "cpu" or (
            backend == "auto" and decodes(score, value, options)
        )
        layout = cpu.decodes(score, value, options) if fits and not weights else None
        if layout is None:
            return partial(average_columns, partial(attention, backend=backend, weights=weights))
        return partial(cpu.kernels.decode, layout)
    if (
        options.any_rounding
        and backend == "auto"
        and not weights
        and tiles_pay(score, value, options)
    ):
        return cpu.resolve(score, value, options)
    name = choose(score, value, options, weights) if check_backend(backend) == "auto" else backend
    if weights and name != "reference":
        raise ValueError(f"backend={name!r} returns no weights; use backend='reference' or 'auto'")
    check_transforms(name)
    if (
        backend == "auto"
        and not weights
        and not torch.compiler.is_compiling()
        and depends_on_call(score, name)
    ):
        return attend_by_choice
    if ENGINES[name] is cpu.attend:
        return cpu.resolve(score, value, options)
    attend = UNCHECKED.get(name, ENGINES[name]) if backend == "auto" else ENGINES[name]
    return attend if weights else partial(without_weights, attend)


def average_columns(
    attend: Callable, score: PairScore, value: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """A call with an `Aggregation`, by `attend(score, value, options) -> (output, weights or None)` without one."""
    aggregation, width = options.aggregation, value.shape[-1]
    assert aggregation is not None
    value = value.to(working_dtype(score.raw_query, score.raw_key, value))
    columns = aggregation.columns(value)
    if aggregation.gate is not None:
        columns = torch.cat([repeat_heads(value, columns.shape[1]), columns], dim=-1)
    score = score.with_repeated_keys(columns.shape[1])
    out, weights = attend(score, columns, replace(options, aggregation=None))
    if aggregation.gate is None:
        return aggregation.finish(out, options.sinks is not None), weights
    mean = out[..., :width]
    found = aggregation.finish(out[..., width:], options.sinks is not None)
    return mean + aggregation.gate.to(mean.dtype)[:, None, None] * (found - mean), weights


def without_weights(attend: Callable, *call) -> tuple[Tensor, None]:
    """An engine's output."""
    return attend(*call)[0], None


def depends_on_call(score: PairScore, name: str) -> bool:
    """Whether single calls of a kind go to different engines: by their lengths, or by what SDPA can do."""
    return name in ("blockwise", "sdpa", "reference") or is_plain(score)


def attend_by_choice(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """The call by the engine that is the fastest for it."""
    name = choose(score, value, options, False)
    return UNCHECKED.get(name, ENGINES[name])(score, value, options)[0], None


def choose(score: PairScore, value: Tensor, options: Options, weights: bool) -> str:
    """The engine for `auto`: SDPA for a plain dot product, compiled tiles for all else; where they cannot serve, SDPA
    for what it can add to a dot product, then blocks, or the whole matrix where that is faster to do (dense.py).
    """
    if (
        weights or is_exporting() or is_transformed()
    ):  # of plain operators, a program too, which needs nothing of ours
        return "reference"
    compiling = (
        torch.compiler.is_compiling()
    )  # no guard on lengths: a compiled or exported call serves all of them
    size = 0 if compiling else math.prod(score.shape)
    if decodes(score, value, options):
        return "cpu"
    if not compiling and size <= dense.COMPILED:  # nothing is built for a toy
        return "reference"
    tiles = "cpu" if cpu.supports(score, value, options) else "blockwise"
    if triton.supports(score, value, options):
        tiles = "triton"
    if compiling or (
        tiles != "blockwise" and len(score.terms) > 1
    ):  # faster than biases as columns
        return tiles
    if sdpa.supports(score, value, options):
        return "sdpa"
    if tiles == "blockwise" and dense.pays(
        score.shape, learns(score, value, options), compiled=False
    ):
        return "reference"
    return tiles


def decodes(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether `auto` takes the kernel for a few queries."""
    one_product = len(score.terms) == 1 and score.terms[0].reader is None
    large = not is_recorded() and math.prod(score.shape) > dense.DECODED
    return large and not one_product and cpu.decodes(score, value, options) is not None


def tiles_pay(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether compiled tiles compute a plain dot product faster than SDPA; its lengths are not asked while tracing."""
    if not is_plain(score) or is_exporting() or torch.jit.is_tracing() or is_transformed():
        return False
    if not torch.compiler.is_compiling():
        size = math.prod(score.shape)
        if size > dense.DECODED and cpu.decodes(score, value, options) is not None:
            return True
        if size <= dense.PLAIN:
            return False
    return cpu.supports(score, value, options)


def is_plain(score: PairScore) -> bool:
    """Whether the score is the dot product and nothing else."""
    return len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None


def checked(options: Options, score: PairScore) -> Options:
    """Options whose masks have four axes and the working dtype; additive ones are -inf where they hide."""
    if options.mask is None and options.bias is None and options.sinks is None:
        return options
    shape, dtype = score.shape, score.dtype
    heads = shape[1]
    mask = check_broadcast("attn_mask", options.mask, shape)
    if mask is not None and mask.dtype != torch.bool:
        mask = hide_with_infinity(mask).to(dtype)
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
