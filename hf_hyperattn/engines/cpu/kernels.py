"""Calls of the compiled kernels (core.cpp): attention forward and backward, decoding, norms of rows.

Structures are packed as call.h, backward.h, decode.h and norms.h declare them. Forward and backward are operators: one
node for the compiler, for export and for checkpointing. A step of decoding is called as it is: between two of them a
model reads all its weights, and finds nothing of ours in the caches of the CPU, so what counts is how little there is
to do on the way.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...readable import is_exporting, is_transformed
from .. import native, serialize, triton
from ..graph_torch import refuse_in_operator
from ..options import Options
from ..score import DistanceTerm, PairScore
from . import library

#: `struct Call`, with the matrices' and masks' addresses and strides in place.
CALL = struct.Struct("P7q P3q P3q P3q q 5P P4q P4q 5q P 2f 2I f 2P")
#: `struct Slots`, `struct Decode` and `struct NormCall`.
SLOTS = struct.Struct("2P q 5P 3P q 2P")
DECODE = struct.Struct("P 2q 2P P q P q")
NORMS = struct.Struct("P3q 8q 3P")
#: `Call::half` of bfloat16 vectors whose gradients are wanted in float32, `kWhole`.
WHOLE = 2

#: A backward pass is cut into at least this many tasks a thread, where there are more threads than heads to share.
TASKS = 4
#: Up to this many numbers the norms of rows are as fast in plain torch.
SMALL = 4096


def pack_call(
    table: int,
    vectors: tuple[Tensor, Tensor, Tensor],
    statistics: tuple[Sequence[Tensor], Sequence[Tensor], Sequence],
    extras: Mapping[str, Any],
    options: Options,
    width: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[bytes, list]:
    """`struct Call`, and what must live as long as it.

    Args:
        vectors: queries, keys and values.
        statistics: of rows, of columns, and parameters of heads: [H] each, or addresses of as many numbers.
        extras: the tensors that not every call has.
    """
    query, key, value = vectors
    (batch, heads, n, _), kv_heads, m = query.shape, key.shape[1], key.shape[2]
    alive: list = []
    matrices: list[int] = []
    half = 0 if value.dtype == torch.float32 else WHOLE if query.dtype == torch.float32 else 1
    for t in vectors:
        if t.dtype != value.dtype:  # see `serialize`
            t = t.to(value.dtype)
            alive.append(t)
        if t.stride(-1) != 1 and t.shape[-1] != 1:
            t = t.contiguous()
            alive.append(t)
        matrices += (t.data_ptr(), *t.stride()[:3])
    tables = []
    for tensors in statistics[:2]:
        numbers: list[int] = []
        for t in tensors:
            if t.stride(-1) != 1 and t.shape[-1] != 1:
                t = t.contiguous()
                alive.append(t)
            numbers += (t.data_ptr(), *t.stride()[:2], heads // t.shape[1])
        alive.append((ctypes.c_int64 * len(numbers))(*numbers))
        tables.append(ctypes.addressof(alive[-1]))
    heads_at: list[int] = []
    for number in statistics[2]:
        if isinstance(number, Tensor):
            number = number.contiguous()
            alive.append(number)
            number = number.data_ptr()
        heads_at.append(number)
    alive.append((ctypes.c_int64 * len(heads_at))(*heads_at))
    tables.append(ctypes.addressof(alive[-1]))
    addresses = []
    for name in serialize.LEARNED:
        extra = extras.get(name)
        if extra is not None:
            extra = extra.contiguous()
            alive.append(extra)
        addresses.append(0 if extra is None else extra.data_ptr())
    pairs: list[int] = []
    mask = extras.get("mask")
    for extra in (mask, extras.get("bias")):
        pairs += (
            (0,) * 5
            if extra is None
            else (extra.data_ptr(), *extra.expand(batch, heads, n, m).stride())
        )
    drop, mask_is_bool = options.dropout_p, mask is not None and mask.dtype == torch.bool
    call = CALL.pack(
        table,
        batch,
        heads,
        kv_heads,
        n,
        m,
        width,
        value.shape[-1],
        *matrices,
        half,
        *addresses[:2],
        *tables,
        *pairs,
        mask_is_bool,
        options.is_causal,
        options.window or 0,
        options.offset,
        torch.get_num_threads(),
        addresses[2],
        scale,
        options.softcap or 0.0,
        min(int(drop * 2**32), 2**32 - 1),
        int(extras["seed"]) if drop else 0,
        1 / (1 - drop),
        out.data_ptr(),
        lse.data_ptr(),
    )
    return call, alive


@torch.library.custom_op("hf_hyperattn::cpu", mutates_args=(), schema=serialize.FORWARD)
def forward(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and, of each row, what `Call::lse` says, [2, B, H, N]; arguments as `serialize` has them."""
    a = serialize.read_arguments(tensors, *settings)
    out = a.query.new_empty(*a.query.shape[:3], a.value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(2, *a.query.shape[:3])
    capped = a.options.softcap is not None
    loaded = library.TABLES.get((a.score_key, capped, "")) or library.require(a.score_key, capped)
    vectors, statistics = (a.query, a.key, a.value), (a.row, a.column, a.head)
    call, alive = pack_call(
        loaded.table, vectors, statistics, a.extras, a.options, a.width, a.scale, out, lse
    )
    loaded.core.hyper_forward(call)
    del alive
    return out, lse


@torch.library.custom_op("hf_hyperattn::cpu_backward", mutates_args=(), schema=serialize.BACKWARD)
def gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs_grad: Sequence[bool],
    *settings,
) -> list[Tensor]:
    """Gradients of all tensors; empty for the extras that have none."""
    a = serialize.read_arguments(tensors, *settings)
    loaded = library.require(a.score_key, a.options.softcap is not None)
    vectors, statistics = (a.query, a.key, a.value), (a.row, a.column, a.head)
    call, alive = pack_call(
        loaded.table, vectors, statistics, a.extras, a.options, a.width, a.scale, out, lse
    )
    all_gradients = backward(a, call, loaded.core, grad.float().contiguous(), lse)
    del alive
    return all_gradients


forward.register_fake(serialize.fake_output)
gradients.register_fake(serialize.fake_gradients)
serialize.register_gradients(forward, gradients, "cpu")


def backward(
    a: serialize.OperatorCall, call: bytes, core: ctypes.CDLL, grad: Tensor, lse: Tensor
) -> list[Tensor]:
    """All gradients, in the order of the operator's tensors; empty ones for what has none."""
    (batch, heads, n, _), (_, kv_heads, m, _) = a.query.shape, a.key.shape
    delta = lse.new_empty(a.query.shape[:3])
    core.hyper_deltas(call, ctypes.c_void_p(address_of(grad)), ctypes.c_void_p(address_of(delta)))
    chunks = chunks_of(batch * kv_heads, -(-m // core.hyper_tile_keys()))
    query, key, value = (t.new_empty(t.shape) for t in (a.query, a.key, a.value))
    padded = core.hyper_padded(ctypes.c_int64(a.width))
    # where the sums have the shape of the gradient they need no memory of their own
    in_place = query.dtype == torch.float32 and chunks == 1 and padded == query.shape[-1]
    sums = query.zero_() if in_place else lse.new_zeros(chunks, batch, heads, n, padded)
    extra = (
        1 + len(a.head) if a.head else 0
    )  # of each row the residue and the mean slopes (see backward.h)
    row = [lse.new_zeros(chunks, batch, heads, n) for _ in range(len(a.row) + extra)]
    column = [lse.new_empty(batch, t.shape[1], m) for t in a.column]
    head = lse.new_zeros(chunks, batch, heads, len(a.head), dtype=torch.float64)
    factors = {
        name: lse.new_empty(a.extras[name].shape)
        for name in serialize.LEARNED[:2]
        if name in a.extras
    }
    column_heads = (ctypes.c_int64 * len(column))(*(t.shape[1] for t in column))
    tables = pointers(row), pointers(column), column_heads
    core.hyper_backward(
        call,
        SLOTS.pack(
            address_of(grad),
            address_of(delta),
            chunks,
            address_of(sums),
            *map(ctypes.addressof, tables),
            address_of(head, torch.float64),
            address_of(query, a.query.dtype),
            address_of(key, a.key.dtype),
            address_of(value, a.value.dtype),
            query.shape[-1],
            *(address_of(factors[n]) if n in factors else 0 for n in serialize.LEARNED[:2]),
        ),
    )
    row = [t.sum(0) for t in row]
    if "sinks" in a.extras:
        top = lse[0].masked_fill(
            lse[0] == float("-inf"), float("inf")
        )  # a row of nothing but a sink of -inf
        of_sinks = -torch.exp(a.extras["sinks"][:, None] - top) * lse[1] * delta
        factors["sinks"] = of_sinks.sum((0, 2))
    head = head.sum((0, 1))
    if a.head:
        residue, *means = row[len(a.row) :]
        if "sinks" in a.extras:  # a sink is a pair of its row, whose slopes are 0
            residue = residue + of_sinks
        head = centred(head, residue, means)
    heads_of = (t.clone() for t in head.float().unbind(-1))
    extras = (factors.get(name, lse.new_empty(0)) for name in a.extras)
    return [query, key, value, *row[: len(a.row)], *column, *heads_of, *extras]


def address_of(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Return the address of a tensor that a kernel reads or writes as a dense array.

    The kernels see addresses alone: an array of another dtype, device or layout would be written beyond its end.

    Raises:
        TypeError: The tensor is not of this dtype, not on the CPU, or not contiguous.
    """
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TypeError(
            f"a kernel was given a {tensor.dtype} tensor on {tensor.device} with strides {tensor.stride()}; allowed: "
            f"{dtype}, on the CPU, contiguous; please report this as a fault of hf_hyperattn"
        )
    return tensor.data_ptr()


def pointers(tensors: Sequence[Tensor]):
    """Return an array of the addresses of float32 tensors."""
    return (ctypes.c_void_p * len(tensors))(*map(address_of, tensors))


def centred(head: Tensor, residue: Tensor, means: list[Tensor]) -> Tensor:
    """Gradients of the parameters [H, heads], float64, as if the mean slope of each row had been taken off.

    Args:
        head: the gradients.
        residue: what the gradients of each row's logits add up to, [B, H, N]; 0 but for rounding.
        means: for each parameter the mean slope of each row, [B, H, N].
    """
    residue = residue.double()
    return head - torch.stack([(residue * mean).sum((0, 2)) for mean in means], -1)


def chunks_of(heads: int, blocks: int) -> int:
    """Into how many chunks the keys of a head are cut, so that every thread has something to do."""
    threads = torch.get_num_threads()
    if threads == 1 or heads % threads == 0 or heads >= TASKS * threads:
        return 1
    return max(1, min(blocks, -(-TASKS * threads // heads)))


@dataclass(frozen=True)
class DecodeLayout:
    """What a step of decoding needs to know of a kind of score.

    Args:
        loaded: its library.
        reader: which term reads its statistics from vectors, or None.
        needs_dot: whether any term reads products.
        rows, columns: the place of each statistic among those that are there, -1 where it is read.
    """

    loaded: library.Loaded
    reader: int | None
    needs_dot: bool
    rows: ctypes.Array
    columns: ctypes.Array


def decode_layout(score: PairScore, options: Options) -> DecodeLayout | None:
    """How the kernel for few queries computes this score; None where it does not."""
    terms = score.terms
    readers = [(i, t.reader.name) for i, t in enumerate(terms) if t.reader is not None]
    reader, name = readers[0] if readers else (None, "")
    if options.aggregation is not None:
        if reader is None:
            return None
        name += f" > {options.aggregation.name}"
    unread = [t for i, t in enumerate(terms) if i != reader]
    if any(t.statistics is not None or isinstance(t.term, DistanceTerm) for t in unread):
        return None  # they would be made of all keys; and distances are taken from differences where they are read
    text = "" if reader is None else f"{reader} {name}"
    loaded = library.load(score.score_key, options.softcap is not None, text)
    if loaded is None:
        return None
    places = (
        _places([getattr(t.term, name) for t in terms], reader) for name in ("rows", "columns")
    )
    return DecodeLayout(loaded, reader, reader is None or len(terms) > 1, *places)


def _places(counts: list[int], reader: int | None) -> ctypes.Array:
    places: list[int] = []
    there = 0
    for i, n in enumerate(counts):
        places += [-1] * n if i == reader else range(there, there + n)
        there += n * (i != reader)
    return (ctypes.c_int64 * len(places))(*places)


def decode(
    layout: DecodeLayout, score: PairScore, value: Tensor, options: Options
) -> tuple[Tensor, None]:
    """softmax(S)·V of a few queries in float32, [B, H, N, dv]; keys are read once, with all that scores need."""
    query, heads = score.raw_query, score.raw_query.shape[1]
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    numbers: list = []
    alive: list[Tensor] = []
    parameters: Sequence[Tensor | float] = ()
    averages: Sequence[Tensor | float] = ()
    for i, term in enumerate(score.terms):
        head: Sequence[Tensor | float]
        if i == layout.reader and term.reader is not None:
            parameters, head = term.reader.parameters, term.reader.head
        else:
            rows += term.row
            columns += term.column
            head = term.head
        for number in head:
            number = (
                number.float().expand(heads)
                if isinstance(number, Tensor)
                else repeated(number, heads)[1]
            )
            numbers.append(number)
        if term.gate is not None:
            numbers.append(term.gate)
    gate = None
    if options.aggregation is not None:
        averages, gate = options.aggregation.parameters, options.aggregation.gate
    steps: list[int] = []
    for number in (
        *parameters,
        *averages,
        0.0 if gate is None else gate,
    ):  # a number for each head, or one for all
        if isinstance(number, Tensor):
            number = number.float().contiguous()
            alive.append(number)
            steps += (number.data_ptr(), int(number.numel() > 1))
        else:
            steps += (repeated(number, 1)[1], 0)
    flat = (ctypes.c_int64 * len(steps))(*steps)
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(query.shape[:3])
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    vectors, statistics = (query, score.raw_key, value), (rows, columns, numbers)
    call, kept = pack_call(
        layout.loaded.table,
        vectors,
        statistics,
        extras,
        options,
        query.shape[-1],
        score.scale,
        out,
        lse,
    )
    places = ctypes.addressof(layout.rows), ctypes.addressof(layout.columns)
    at, count = ctypes.addressof(flat), len(parameters)
    average = at + 16 * count, len(averages), 0 if gate is None else steps[-2], steps[-1]
    layout.loaded.core.hyper_decode(
        call, DECODE.pack(at, count, layout.needs_dot, *places, *average)
    )
    del kept, alive
    return out, None


@lru_cache(maxsize=1024)
def repeated(number: float, count: int) -> tuple[ctypes.Array, int]:
    """A number as many times in float32, and where that is."""
    array = (ctypes.c_float * count)(*[number] * count)
    return array, ctypes.addressof(array)


def norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of each row, [B, H, L] of [B, H, L, d]; no square overflows or underflows."""
    if norms_compiled(x, dtype):
        return row_norms(x, x.shape[-1], True)
    x = x.to(dtype)
    size = x.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    return torch.linalg.vector_norm(x / size, dim=-1) * size.squeeze(-1)


def squared_norms(vectors: Sequence[Tensor], dtype: torch.dtype, width: int) -> list[Tensor]:
    """The sums of the squares of the first `width` numbers of each row, [B, H, L] for each tensor [B, H, L, d]."""
    squares: list[Tensor] = []
    direct: Any = None
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not recorded and _get_current_dispatch_mode() is None and forward_ad._current_level < 0:
        direct = library.CORES.get(os.environ.get(native.SETTING))
    for x in vectors:
        # while tracing no question about lengths, which would be a guard
        raw = (
            direct is not None
            and dtype == torch.float32
            and x.dtype in serialize.RAW_DTYPES
            and type(x) is Tensor
        )
        learns = x.requires_grad and torch.is_grad_enabled()
        if (
            not raw
            or learns
            or x.numel() <= SMALL
            or x.device.type != "cpu"
            or is_functorch_wrapped_tensor(x)
        ):
            squares.append(_squared_norms(x, dtype, width))
            continue
        x = (
            x if x.stride(-1) == 1 else x.contiguous()
        )  # as the operator does it, without its overhead
        squares.append(x.new_empty(x.shape[:3], dtype=torch.float32))
        half, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
        numbers = half, *x.shape[:3], width, x.shape[3], False, threads
        call = NORMS.pack(x.data_ptr(), *x.stride()[:3], *numbers, squares[-1].data_ptr(), 0, 0)
        direct.hyper_norms(call)  # type: ignore[union-attr]  # `raw` says that it is there
    return squares


def _squared_norms(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    if norms_compiled(x, dtype):
        return row_norms(x, width, False)
    return x[..., :width].to(dtype).square().sum(-1)


def norms_compiled(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves; for a few rows it does not pay, and an exported program has none."""
    if is_exporting() or is_transformed():
        return False
    if not torch.compiler.is_compiling() and x.numel() <= SMALL:
        return False
    if dtype != torch.float32 or x.dtype not in (*serialize.RAW_DTYPES, torch.float16):
        return False
    if x.is_cuda:
        return triton.obstacle_of_device(x.device.type, x.device.index) is None
    return x.device.type == "cpu" and x.dtype != torch.float16 and library.core_is_ready()


def pack_norms(
    x: Tensor,
    width: int,
    root: bool,
    out: Tensor,
    grad: Tensor | None = None,
    to: Tensor | None = None,
):
    """`struct NormCall`."""
    threads, addresses = (
        torch.get_num_threads(),
        (0 if t is None else t.data_ptr() for t in (out, grad, to)),
    )
    half = x.dtype == torch.bfloat16
    return NORMS.pack(
        x.data_ptr(),
        *x.stride()[:3],
        half,
        *x.shape[:3],
        width,
        x.shape[3],
        root,
        threads,
        *addresses,
    )


@torch.library.custom_op("hf_hyperattn::norms", mutates_args=())
def row_norms(x: Tensor, width: int, root: bool) -> Tensor:
    """The norms of the rows' first `width` numbers, or their squares, float32 [B, H, L]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(x.shape[:3], dtype=torch.float32)
    if x.is_cuda:
        from ..triton import norms  # Triton may be missing

        norms.forward(x, width, root, out)
    else:
        library.core().hyper_norms(pack_norms(x, width, root, out))
    return out


@row_norms.register_fake
def _(x, width, root):
    return x.new_empty(x.shape[:3], dtype=torch.float32)


@torch.library.custom_op("hf_hyperattn::norms_backward", mutates_args=())
def row_norms_backward(grad: Tensor, x: Tensor, out: Tensor, width: int, root: bool) -> Tensor:
    """The gradient of the rows."""
    x, grad = x if x.stride(-1) == 1 else x.contiguous(), grad.contiguous()
    to = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.is_cuda:
        from ..triton import norms

        norms.backward(grad, x, out, width, root, to)
    else:
        library.core().hyper_norms_backward(pack_norms(x, width, root, out, grad, to))
    return to


@row_norms_backward.register_fake
def _(grad, x, out, width, root):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    x, ctx.width, ctx.root = inputs
    ctx.save_for_backward(x, output)


def _pullback(ctx, grad):
    return row_norms_backward(grad, *ctx.saved_tensors, ctx.width, ctx.root), None, None


row_norms.register_autograd(_pullback, setup_context=_save)
refuse_in_operator(row_norms_backward, "backend='cpu'")
