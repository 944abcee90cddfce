"""Choose the engine of an attention call: by name, or the fastest for `auto`.

The decision is made once for each kind of call (`resolve_engine`). Later calls look it up by their
key (`describe_call`).
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..utils.readable import is_exporting, is_recorded, is_transformed
from ..utils.torch_private import count_dispatch_modes, find_transform, read_forward_level
from . import blockwise, cpu, dense, native, reference, sdpa, triton
from .options import Options, check_broadcast, full_precision, hide_with_infinity
from .score import DOT, PairScore, repeat_heads, requires_backward, working_dtype

#: Engines by name: `attend(score, value, options) -> (output, weights or None)`.
ENGINES: dict[str, Callable] = {}

#: The function that computes each known kind of call: `run(score, value, options) -> (output,
#: weights or None)`.
RESOLVED: dict[tuple, Callable] = {}

#: Up to this many logits, mechanisms with their own tiles compute the whole matrix, because that is
#: less work.
DENSE_ELEMENTS = 2**14


def register_engine(name: str, attend: Callable) -> None:
    """Add an engine.

    Args:
        name: Name for `backend=`.
        attend: Function `(score, value, options) -> (output, weights or None)` that agrees with
            `reference`.

    Raises:
        ValueError: An engine of this name is registered already.
    """
    if name in ENGINES:
        raise ValueError(f"engine {name!r} is registered already")
    ENGINES[name] = attend
    RESOLVED.clear()


def attend_or_refuse(
    name: str, engine, score: PairScore, value: Tensor, options: Options
) -> tuple[Tensor, None]:
    """Run an engine that supports only some calls.

    Raises:
        ValueError: The engine cannot compute this call. The message names the reason.
    """
    reason = engine.unsupported_reason(score, value, options)
    if reason is not None:
        raise ValueError(f"backend={name!r} cannot compute this call: {reason}; use backend='auto'")
    return engine.attend(score, value, options)


register_engine("reference", reference.attend)
register_engine("blockwise", blockwise.attend)
register_engine("sdpa", partial(attend_or_refuse, "sdpa", sdpa))
register_engine("cpu", cpu.attend)
register_engine("triton", partial(attend_or_refuse, "triton", triton))

#: The same engines without the check, for `auto`: `choose_engine` has checked support already.
UNCHECKED = {"sdpa": sdpa.attend, "triton": triton.attend}


def available_engines() -> tuple[str, ...]:
    """Return the names that `backend=` accepts, `auto` first."""
    return ("auto", *ENGINES)


def check_backend(backend: str) -> str:
    """Return `backend` if it is a known name.

    Raises:
        ValueError: Unknown name. The message lists the known ones.
    """
    if backend != "auto" and backend not in ENGINES:
        raise ValueError(
            f"backend={backend!r} is unknown; allowed: {', '.join(available_engines())}"
        )
    return backend


def check_transforms(backend: str) -> None:
    """Reject engines with custom operators inside torch.func transforms.

    Raises:
        ValueError: `backend` is "blockwise", "cpu" or "triton", and a torch.func transform or
            forward-mode differentiation is active. Derivatives would be lost there, or the call
            would fail.
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
    """Compute softmax(score)·V.

    Args:
        score: Pair score of queries [B, H, N, d] and keys [B, Hkv, M, d].
        value: Values [B, Hkv, M, dv].
        options: Masks, causality, window, softcap, sinks, dropout; None (default) for none of them.
        backend: A name from `available_engines()`.
        weights: Also return the attention weights. Only `reference` and `auto` support this.

    Returns:
        The output [B, H, N, dv] in the score's dtype (float32 or float64), and the attention
        weights [B, H, N, M] or None.

    Raises:
        ValueError: Unknown backend, or a mask that does not broadcast to [B, H, N, M].
    """
    options = options or Options()
    device = score.raw_query.device
    if options.mask is not None or options.bias is not None or options.sinks is not None:
        options = check_options(options, score)
    # A recorded call serves other lengths later, so its decision must not depend on a key with
    # these lengths.
    if weights or torch.compiler.is_compiling() or torch.jit.is_tracing():
        with full_precision(device):
            attend = resolve_engine(score, value, options, backend, weights)
            out, attention_weights = attend(score, value, options)
        return out, attention_weights if weights else None
    key = describe_call(score, value, options, backend)
    run = RESOLVED.get(key)
    if run is None:
        run = RESOLVED[key] = resolve_engine(score, value, options, backend, False)
    # A decoding step takes this path: entering an empty context costs more than asking for
    # autocast.
    if device.type in ("cpu", "cuda") and not torch.is_autocast_enabled(device.type):
        return run(score, value, options)
    with full_precision(device):
        return run(score, value, options)


def describe_call(score: PairScore, value: Tensor, options: Options, backend: str) -> tuple:
    """Return the kind of a call, as a key of `RESOLVED`.

    The key holds everything that `resolve_engine` reads.

    A decision that reads one more property needs it here too, or calls that differ in it share an
    engine.
    """
    query, key = score.raw_query, score.raw_key
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    # Sizes count only by the thresholds that they exceed, so that a growing cache keeps its kind.
    size = batch * heads * queries * keys
    lengths = (
        queries <= cpu.FEW and queries < keys,
        bisect_left((dense.DECODED, dense.COMPILED, dense.PLAIN), size),
    )
    tensors = (
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        value.device,
        max(width, value.shape[-1]),
        torch.is_grad_enabled() and requires_backward(score, value, options),
    )
    mask, bias = options.mask, options.bias
    aggregation = options.aggregation
    requested = (
        options.any_rounding,
        options.softcap is None,
        bool(options.dropout_p),
        mask is not None and mask.requires_grad,
        bias is not None and bias.requires_grad,
        aggregation and (aggregation.name, aggregation.gate is None),
    )
    # Kernels that are not operators are invisible to dispatch modes, such as FLOP counters, and to
    # torch.func.
    surroundings = (
        count_dispatch_modes() == 0,
        find_transform() is None and read_forward_level() < 0,
        os.environ.get(native.SETTING),
    )
    terms = [
        (
            term.term,
            term.gate is None,
            term.capped,
            None if term.reader is None else term.reader.name,
            term.low_rank_factors is None,
            term.statistics is None,
        )
        for term in score.terms
    ]
    features = (score.width is None, score.make_features is None)
    return backend, lengths, tensors, requested, surroundings, features, *terms


def resolve_engine(
    score: PairScore, value: Tensor, options: Options, backend: str, weights: bool
) -> Callable:
    """Return the function that computes calls of this kind.

    Args:
        score, value, options: One call of this kind.
        backend: A name from `available_engines()`.
        weights: Whether the attention weights are returned.

    Returns:
        `run(score, value, options) -> (output, weights or None)`.

    Raises:
        ValueError: Unknown backend, or one that cannot return weights or cannot run inside
            torch.func.
    """
    automatic = check_backend(backend) == "auto"
    if options.aggregation is not None:
        return resolve_aggregation(score, value, options, backend, weights)
    may_round = options.any_rounding and automatic and not weights
    if may_round and compiled_tiles_pay(score, value, options):
        return cpu.resolve(score, value, options)
    name = choose_engine(score, value, options, weights) if automatic else backend
    if weights and name != "reference":
        raise ValueError(f"backend={name!r} returns no weights; use backend='reference' or 'auto'")
    check_transforms(name)
    compiling = torch.compiler.is_compiling()
    if automatic and not weights and not compiling and depends_on_call(score, name):
        return attend_with_fastest
    # Asked by function, not by name: tests and outsiders may replace the engine under the name.
    if ENGINES[name] is cpu.attend:
        return cpu.resolve(score, value, options)
    attend = UNCHECKED.get(name, ENGINES[name]) if automatic else ENGINES[name]
    return attend if weights else partial(drop_weights, attend)


def resolve_aggregation(
    score: PairScore, value: Tensor, options: Options, backend: str, weights: bool
) -> Callable:
    """Return the function for calls with an `Aggregation`.

    Arguments as in `resolve_engine`.
    """
    fits = backend == "cpu" or (backend == "auto" and prefers_decode_kernel(score, value, options))
    layout = cpu.decodes(score, value, options) if fits and not weights else None
    # Only the decoding kernel knows aggregations. All other engines average columns that are made
    # beforehand.
    if layout is None:
        return partial(average_columns, partial(attention, backend=backend, weights=weights))
    return partial(cpu.kernels.decode, layout)


def average_columns(
    attend: Callable, score: PairScore, value: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Compute a call with an `Aggregation` by an engine that only takes plain means.

    Args:
        attend: Function `(score, value, options) -> (output, weights or None)`; gets no
            aggregation.
        score, value, options: The call.

    Returns:
        The output [B, H, N, dv], and the weights or None.
    """
    aggregation = options.aggregation
    assert aggregation is not None
    width = value.shape[-1]
    value = value.to(working_dtype(score.raw_query, score.raw_key, value))
    columns = aggregation.columns(value)
    # A gate mixes the result with the plain mean: both are averaged in one pass over the weights.
    if aggregation.gate is not None:
        columns = torch.cat([repeat_heads(value, columns.shape[1]), columns], dim=-1)
    score = score.with_repeated_keys(columns.shape[1])
    out, weights = attend(score, columns, replace(options, aggregation=None))
    if aggregation.gate is None:
        return aggregation.finish(out, options.sinks is not None), weights
    mean = out[..., :width]
    aggregated = aggregation.finish(out[..., width:], options.sinks is not None)
    gate = aggregation.gate.to(mean.dtype)[:, None, None]
    return mean + gate * (aggregated - mean), weights


def drop_weights(attend: Callable, *call) -> tuple[Tensor, None]:
    """Run an engine and return its output without the weights."""
    return attend(*call)[0], None


def depends_on_call(score: PairScore, name: str) -> bool:
    """Return whether the lengths or masks of a call decide on its engine.

    Args:
        score: The pair score.
        name: Engine that `choose_engine` returned for one call of this kind.
    """
    return name in ("blockwise", "sdpa", "reference") or is_plain(score)


def attend_with_fastest(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """Choose an engine for this one call and run it."""
    name = choose_engine(score, value, options, False)
    return UNCHECKED.get(name, ENGINES[name])(score, value, options)[0], None


def choose_engine(score: PairScore, value: Tensor, options: Options, weights: bool) -> str:
    """Return the name of the engine that `auto` uses.

    A plain dot product goes to SDPA and any other score to compiled tiles. Where no compiled engine
    supports the call, SDPA takes scores that it can express as a dot product with a bias. The rest
    goes to `blockwise`, or to `reference` if the whole matrix is faster (dense.py).
    """
    # Exported programs must load without this package, and torch.func knows plain operators only.
    if weights or is_exporting() or is_transformed():
        return "reference"
    if prefers_decode_kernel(score, value, options):
        return "cpu"
    # While compiling no length is read: that would add a guard, and one program serves all lengths.
    compiling = torch.compiler.is_compiling()
    # Before the engines are asked, because asking compiles their kernels. A toy-sized call is not
    # worth that.
    if not compiling and math.prod(score.shape) <= dense.COMPILED:
        return "reference"
    tiles = "cpu" if cpu.supports(score, value, options) else "blockwise"
    if triton.supports(score, value, options):
        tiles = "triton"
    # Compiled tiles evaluate further terms faster than SDPA multiplies the extra columns for them.
    if compiling or (tiles != "blockwise" and len(score.terms) > 1):
        return tiles
    if sdpa.supports(score, value, options):
        return "sdpa"
    if tiles == "blockwise":
        training = requires_backward(score, value, options)
        if dense.is_fastest(score.shape, training, compiled=False):
            return "reference"
    return tiles


def prefers_decode_kernel(score: PairScore, value: Tensor, options: Options) -> bool:
    """Return whether `auto` uses the CPU kernel for a few queries (a decoding step)."""
    # A single term without a reader is left to SDPA, except where `any_rounding` allows the kernel.
    one_product = len(score.terms) == 1 and score.terms[0].reader is None
    large = not is_recorded() and math.prod(score.shape) > dense.DECODED
    return large and not one_product and cpu.decodes(score, value, options) is not None


def compiled_tiles_pay(score: PairScore, value: Tensor, options: Options) -> bool:
    """Return whether compiled CPU tiles compute a plain dot product faster than SDPA."""
    if not is_plain(score) or is_exporting() or torch.jit.is_tracing() or is_transformed():
        return False
    # Lengths are not read while compiling, because reading them would add a guard.
    if not torch.compiler.is_compiling():
        size = math.prod(score.shape)
        if size > dense.DECODED and cpu.decodes(score, value, options) is not None:
            return True
        if size <= dense.PLAIN:
            return False
    return cpu.supports(score, value, options)


def is_plain(score: PairScore) -> bool:
    """Return whether the score is the dot product and nothing else."""
    return len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None


def check_options(options: Options, score: PairScore) -> Options:
    """Return options with checked shapes and the dtypes that engines expect.

    Args:
        options: Options of the caller.
        score: Pair score of the call.

    Returns:
        Options with mask and bias [B|1, H|1, N|1, M|1] and sinks [H]. Floating-point tensors have
        the score's dtype, and additive masks are -inf at hidden pairs.

    Raises:
        ValueError: A tensor that does not broadcast, or has a dtype that is not allowed.
    """
    if options.mask is None and options.bias is None and options.sinks is None:
        return options
    shape = score.shape
    dtype = score.dtype
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
