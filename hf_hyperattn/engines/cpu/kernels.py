"""Call the compiled kernels of core.cpp: attention, decoding and norms of rows.

Here you learn how tensors become the C++ structures of call.h, backward.h, decode.h and norms.h.
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

from ...utils.readable import is_exporting, is_transformed
from ...utils.torch_private import count_dispatch_modes, is_wrapped, read_forward_level
from .. import native, serialize, triton
from ..graph_torch import refuse_in_operator
from ..options import Options
from ..score import DistanceTerm, PairScore
from . import library

# Forward and backward are custom operators: one node for the compiler, for export and for
# checkpointing. Decoding calls its kernel directly. Between two decoding steps a model reads all
# its weights, so nothing of ours is left in the caches of the CPU, and the time of a step depends
# on how little code runs before the kernel.

#: `struct Call` of call.h. Vectors, masks and biases are packed in place: address, strides.
CALL = struct.Struct("P7q P3q P3q P3q q 5P P4q P4q 5q P 2f 2I f 2P")
#: `struct Slots` of backward.h.
SLOTS = struct.Struct("2P q 5P 3P q 2P")
#: `struct Decode` of decode.h.
DECODE = struct.Struct("P 2q 2P P q P q")
#: Bytes of `struct Parameter` of decode.h, an address and a step.
PARAMETER_BYTES = 16
#: `struct NormCall` of norms.h.
NORMS = struct.Struct("P3q 8q 3P")
#: `Call::half` for bfloat16 vectors whose gradients are wanted in float32, `kWhole` of call.h.
WHOLE = 2

#: Tasks per thread of a backward pass, at least, if threads cannot share the heads evenly.
TASKS = 4
#: With at most this many numbers, plain torch computes the norms of rows as fast as the kernel.
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
    """Pack `struct Call`.

    Args:
        table: Address of the score's `ScoreTable`.
        vectors: Queries, keys and values.
        statistics: Statistics of rows, statistics of columns, and parameters of heads. A parameter
            is a tensor [H] or the address of H float32 numbers.
        extras: Tensors that not every call has, by name.
        options: Options of the call; its tensors are read from `extras`.
        width: Number of components that are multiplied.
        scale: Factor of all products.
        out, lse: Written by the kernel.

    Returns:
        The packed structure, and the objects that must stay alive as long as it is used.
    """
    query, key, value = vectors
    batch, heads, n, _ = query.shape
    kv_heads, m = key.shape[1:3]
    # The structure holds only addresses. Tensors made on the way would be freed too early.
    alive: list = []
    matrices = _address_vectors(vectors, alive)
    half = 0
    if value.dtype != torch.float32:
        half = WHOLE if query.dtype == torch.float32 else 1
    rows = _address_statistics(statistics[0], heads, alive)
    columns = _address_statistics(statistics[1], heads, alive)
    parameters = _address_parameters(statistics[2], alive)
    learned = []
    for name in serialize.LEARNED:
        extra = extras.get(name)
        if extra is not None:
            extra = extra.contiguous()
            alive.append(extra)
        learned.append(0 if extra is None else extra.data_ptr())
    query_factor, key_factor, sinks = learned
    pairs: list[int] = []
    mask = extras.get("mask")
    for extra in (mask, extras.get("bias")):
        if extra is None:
            pairs += (0, 0, 0, 0, 0)
        else:
            pairs += (extra.data_ptr(), *extra.expand(batch, heads, n, m).stride())
    sizes = batch, heads, kv_heads, n, m, width, value.shape[-1]
    drop = options.dropout_p
    call = CALL.pack(
        table,
        *sizes,
        *matrices,
        half,
        query_factor,
        key_factor,
        rows,
        columns,
        parameters,
        *pairs,
        mask is not None and mask.dtype == torch.bool,
        options.is_causal,
        options.window or 0,
        options.offset,
        torch.get_num_threads(),
        sinks,
        scale,
        options.softcap or 0.0,
        # A pair is dropped if its 32 random bits are below this number.
        min(int(drop * 2**32), 2**32 - 1),
        int(extras["seed"]) if drop else 0,
        1 / (1 - drop),
        out.data_ptr(),
        lse.data_ptr(),
    )
    return call, alive


def _address_vectors(vectors: tuple[Tensor, Tensor, Tensor], alive: list) -> list[int]:
    """Return address and strides of each tensor, in the dtype of the values."""
    matrices: list[int] = []
    dtype = vectors[2].dtype
    for t in vectors:
        # float32 next to bfloat16 values holds bfloat16 numbers: nothing is lost
        # (`serialize.upcast`).
        if t.dtype != dtype:
            t = t.to(dtype)
            alive.append(t)
        if t.stride(-1) != 1 and t.shape[-1] != 1:
            t = t.contiguous()
            alive.append(t)
        matrices += (t.data_ptr(), *t.stride()[:3])
    return matrices


def _address_statistics(tensors: Sequence[Tensor], heads: int, alive: list) -> int:
    """Return the address of an array of `struct Numbers`, one for each statistic.

    A structure holds an address, two strides, and the number of query heads per head.
    """
    numbers: list[int] = []
    for t in tensors:
        if t.stride(-1) != 1 and t.shape[-1] != 1:
            t = t.contiguous()
            alive.append(t)
        numbers += (t.data_ptr(), *t.stride()[:2], heads // t.shape[1])
    alive.append((ctypes.c_int64 * len(numbers))(*numbers))
    return ctypes.addressof(alive[-1])


def _address_parameters(parameters: Sequence, alive: list) -> int:
    """Return the address of an array of addresses, each of one parameter [H]."""
    addresses: list[int] = []
    for parameter in parameters:
        if isinstance(parameter, Tensor):
            parameter = parameter.contiguous()
            alive.append(parameter)
            parameter = parameter.data_ptr()
        addresses.append(parameter)
    alive.append((ctypes.c_int64 * len(addresses))(*addresses))
    return ctypes.addressof(alive[-1])


@torch.library.custom_op("hf_hyperattn::cpu", mutates_args=(), schema=serialize.FORWARD)
def forward(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """Compute attention; arguments as in `serialize`.

    Returns:
        The output, float32 [B, H, N, dv], and `Call::lse`, float32 [2, B, H, N].
    """
    a = serialize.read_arguments(tensors, *settings)
    out = a.query.new_empty(*a.query.shape[:3], a.value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(2, *a.query.shape[:3])
    capped = a.options.softcap is not None
    loaded = library.TABLES.get((a.score_key, capped, "")) or library.require_score(
        a.score_key, capped
    )
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
    """Return the gradients of all tensors; empty for extras that cannot learn."""
    a = serialize.read_arguments(tensors, *settings)
    loaded = library.require_score(a.score_key, a.options.softcap is not None)
    vectors, statistics = (a.query, a.key, a.value), (a.row, a.column, a.head)
    call, alive = pack_call(
        loaded.table, vectors, statistics, a.extras, a.options, a.width, a.scale, out, lse
    )
    found = compute_gradients(a, call, loaded.core, grad.float().contiguous(), lse)
    del alive
    return found


forward.register_fake(serialize.fake_output)
gradients.register_fake(serialize.fake_gradients)
serialize.register_gradients(forward, gradients, "cpu")


def compute_gradients(
    a: serialize.OperatorCall, call: bytes, core: ctypes.CDLL, grad: Tensor, lse: Tensor
) -> list[Tensor]:
    """Run the backward kernel.

    Args:
        a: The operator's arguments by name.
        call: The packed `struct Call`.
        core: The engine.
        grad: Gradient of the output, float32 [B, H, N, dv], contiguous.
        lse: `Call::lse`, as `forward` returned it.

    Returns:
        The gradients in the order of the operator's tensors; empty for extras that cannot learn.
    """
    batch, heads, n, _ = a.query.shape
    kv_heads, m = a.key.shape[1:3]
    delta = _compute_deltas(call, core, grad)
    chunks = count_chunks(batch * kv_heads, -(-m // core.hyper_tile_keys()))

    # Memory that the kernel writes. Every chunk of keys has its own sums for queries and rows.
    query, key, value = (t.new_empty(t.shape) for t in (a.query, a.key, a.value))
    padded = core.hyper_padded(ctypes.c_int64(a.width))
    # If the sums have the shape of the gradient, they use its memory.
    in_place = query.dtype == torch.float32 and chunks == 1 and padded == query.shape[-1]
    sums = query.zero_() if in_place else lse.new_zeros(chunks, batch, heads, n, padded)
    row, column, head = _allocate_sums(a, chunks, lse)
    factors: dict[str, Tensor] = {
        name: lse.new_empty(a.extras[name].shape)
        for name in ("query_factor", "key_factor")
        if name in a.extras
    }

    # The tables must live until the kernel returns.
    column_heads = (ctypes.c_int64 * len(column))(*(t.shape[1] for t in column))
    tables = make_address_table(row), make_address_table(column), column_heads
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
            address_of(factors["query_factor"]) if "query_factor" in factors else 0,
            address_of(factors["key_factor"]) if "key_factor" in factors else 0,
        ),
    )

    # Sum the chunks, always in the same order.
    row = [t.sum(0) for t in row]
    head = head.sum((0, 1))
    by_sink = None
    if "sinks" in a.extras:
        by_sink = differentiate_sinks(a.extras["sinks"], lse, delta)
        factors["sinks"] = by_sink.sum((0, 2))
    if a.head:
        residue, *means = row[len(a.row) :]
        # A sink is a pair of its row with slopes of 0, so only the residue includes it.
        if by_sink is not None:
            residue = residue + by_sink
        head = centred(head, residue, means)
    parameters = (t.clone() for t in head.float().unbind(-1))
    extras = (factors.get(name, lse.new_empty(0)) for name in a.extras)
    return [query, key, value, *row[: len(a.row)], *column, *parameters, *extras]


def _compute_deltas(call: bytes, core: ctypes.CDLL, grad: Tensor) -> Tensor:
    """Return the sum of grad * out of each row, [B, H, N], for its softmax's derivative."""
    delta = grad.new_empty(grad.shape[:3])
    core.hyper_deltas(call, ctypes.c_void_p(address_of(grad)), ctypes.c_void_p(address_of(delta)))
    return delta


def _allocate_sums(
    a: serialize.OperatorCall, chunks: int, like: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return memory for the gradients of rows, columns and parameters (`struct Slots`)."""
    (batch, heads, n, _), m = a.query.shape, a.key.shape[2]
    # A score with parameters also gets the residue and the mean slopes of each row (backward.h).
    mean_count = 1 + len(a.head) if a.head else 0
    row = [like.new_zeros(chunks, batch, heads, n) for _ in range(len(a.row) + mean_count)]
    column = [like.new_empty(batch, t.shape[1], m) for t in a.column]
    # float64: a sum over all pairs, in which most terms cancel.
    head = like.new_zeros(chunks, batch, heads, len(a.head), dtype=torch.float64)
    return row, column, head


def differentiate_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of each row by its head's sink, [B, H, N]."""
    # A row whose only key is a sink of -inf has a maximum of -inf. Its weight is 0; -inf - -inf is
    # NaN.
    top = lse[0].masked_fill(lse[0] == float("-inf"), float("inf"))
    return -torch.exp(sinks[:, None] - top) * lse[1] * delta


def address_of(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Return the address of a tensor that a kernel reads or writes as a dense array.

    The kernels see only addresses: they would write beyond the end of an array of another dtype,
        device or layout.

    Raises:
        TypeError: The tensor is not of this dtype, not on the CPU, or not contiguous.
    """
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TypeError(
            f"a kernel was given a {tensor.dtype} tensor on {tensor.device} with strides {tensor.stride()}; allowed: "
            f"{dtype}, on the CPU, contiguous; please report this as a fault of hf_hyperattn"
        )
    return tensor.data_ptr()


def make_address_table(tensors: Sequence[Tensor]):
    """Return an array of the addresses of float32 tensors."""
    return (ctypes.c_void_p * len(tensors))(*map(address_of, tensors))


def centred(head: Tensor, residue: Tensor, means: list[Tensor]) -> Tensor:
    """Subtract the mean slope of each row from the gradients of parameters.

    backward.h explains why: the gradients of a row's logits sum to 0 except for rounding, and large
    slopes amplify that residue.

    Args:
        head: Gradients of the parameters, float64 [H, parameters].
        residue: Sum of the gradients of each row's logits, [B, H, N].
        means: Mean slope of each row, [B, H, N] for each parameter.
    """
    residue = residue.double()
    return head - torch.stack([(residue * mean).sum((0, 2)) for mean in means], -1)


def count_chunks(heads: int, blocks: int) -> int:
    """Return how many chunks the keys of a head are split into for the threads.

    Args:
        heads: Tasks without splitting, one per batch element and key head.
        blocks: Largest number of chunks.
    """
    threads = torch.get_num_threads()
    # Without chunks there is nothing to add up, so keys are split only if threads would wait.
    if threads == 1 or heads % threads == 0 or heads >= TASKS * threads:
        return 1
    return max(1, min(blocks, -(-TASKS * threads // heads)))


@dataclass(frozen=True)
class DecodeLayout:
    """What stays the same between decoding steps of one kind of score.

    Args:
        loaded: The score's library.
        reader: Index of the term whose statistics the kernel reads from the vectors, or None.
        needs_dot: Whether a term needs dot products.
        rows, columns: Place of each statistic among those that are passed; -1 if the kernel reads
            it.
    """

    loaded: library.Loaded
    reader: int | None
    needs_dot: bool
    rows: ctypes.Array
    columns: ctypes.Array


def plan_decoding(score: PairScore, options: Options) -> DecodeLayout | None:
    """Return how the decoding kernel computes a score; None if it cannot."""
    terms = score.terms
    readers = [(i, t.reader.name) for i, t in enumerate(terms) if t.reader is not None]
    reader, name = readers[0] if readers else (None, "")
    if options.aggregation is not None:
        if reader is None:
            return None
        name += f" > {options.aggregation.name}"
    # The kernel reads for one term. The statistics of another term would have to be made of all
    # keys in each step, and it takes distances from differences only for the term that it reads
    # for.
    unread = [t for i, t in enumerate(terms) if i != reader]
    if any(t.statistics is not None or isinstance(t.term, DistanceTerm) for t in unread):
        return None
    text = "" if reader is None else f"{reader} {name}"
    loaded = library.load(score.score_key, options.softcap is not None, text)
    if loaded is None:
        return None
    return DecodeLayout(
        loaded=loaded,
        reader=reader,
        needs_dot=reader is None or len(terms) > 1,
        rows=_place_statistics([t.term.rows for t in terms], reader),
        columns=_place_statistics([t.term.columns for t in terms], reader),
    )


def _place_statistics(counts: list[int], reader: int | None) -> ctypes.Array:
    """Return the places of statistics, given how many each term has."""
    places: list[int] = []
    passed = 0
    for i, count in enumerate(counts):
        if i == reader:
            places += [-1] * count
        else:
            places += range(passed, passed + count)
            passed += count
    return (ctypes.c_int64 * len(places))(*places)


def decode(
    layout: DecodeLayout, score: PairScore, value: Tensor, options: Options
) -> tuple[Tensor, None]:
    """Compute attention of a few queries, reading every key once.

    Args:
        layout: From `plan_decoding`, for a score of this kind.
        score, value, options: As in `reference.attend`.

    Returns:
        The output, float32 [B, H, N, dv], and None: attention weights are not returned.
    """
    query = score.raw_query
    rows, columns, numbers, parameters = _collect_numbers(layout, score)
    averages: Sequence[Tensor | float] = ()
    gate = None
    if options.aggregation is not None:
        averages, gate = options.aggregation.parameters, options.aggregation.gate
    alive: list[Tensor] = []
    # The gate of the averages comes last.
    steps = _step_parameters((*parameters, *averages, 0.0 if gate is None else gate), alive)
    flat = (ctypes.c_int64 * len(steps))(*steps)
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(query.shape[:3])
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    call, packed = pack_call(
        layout.loaded.table,
        (query, score.raw_key, value),
        (rows, columns, numbers),
        extras,
        options,
        query.shape[-1],
        score.scale,
        out,
        lse,
    )
    start, count = ctypes.addressof(flat), len(parameters)
    slots = DECODE.pack(
        start,
        count,
        layout.needs_dot,
        ctypes.addressof(layout.rows),
        ctypes.addressof(layout.columns),
        start + PARAMETER_BYTES * count,
        len(averages),
        # Address and step of the gate. A null address stands for no gate.
        0 if gate is None else steps[-2],
        steps[-1],
    )
    layout.loaded.core.hyper_decode(call, slots)
    del packed, alive
    return out, None


def _collect_numbers(
    layout: DecodeLayout, score: PairScore
) -> tuple[list[Tensor], list[Tensor], list, Sequence[Tensor | float]]:
    """Return statistics of rows, of columns, parameters of heads, and of the reader."""
    heads = score.raw_query.shape[1]
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    numbers: list = []
    parameters: Sequence[Tensor | float] = ()
    for i, term in enumerate(score.terms):
        head: Sequence[Tensor | float]
        if i == layout.reader and term.reader is not None:
            parameters, head = term.reader.parameters, term.reader.head
        else:
            rows += term.row
            columns += term.column
            head = term.head
        for number in head:
            if isinstance(number, Tensor):
                numbers.append(number.float().expand(heads))
            else:
                numbers.append(repeat_number(number, heads)[1])
        if term.gate is not None:
            numbers.append(term.gate)
    return rows, columns, numbers, parameters


def _step_parameters(parameters: Sequence[Tensor | float], alive: list[Tensor]) -> list[int]:
    """Return address and step of each parameter.

    The step is 1 for one number per head, and 0 for one number for all heads.
    """
    steps: list[int] = []
    for number in parameters:
        if isinstance(number, Tensor):
            number = number.float().contiguous()
            alive.append(number)
            steps += (number.data_ptr(), int(number.numel() > 1))
        else:
            steps += (repeat_number(number, 1)[1], 0)
    return steps


# The cache keeps the array alive, and saves making it in every step.
@lru_cache(maxsize=1024)
def repeat_number(number: float, count: int) -> tuple[ctypes.Array, int]:
    """Return a float32 array of `count` times the same number, and its address."""
    array = (ctypes.c_float * count)(*[number] * count)
    return array, ctypes.addressof(array)


def norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm of each row without overflow or underflow of squares.

    Args:
        x: [B, H, L, d].
        dtype: Dtype of the arithmetic and of the result.

    Returns:
        [B, H, L].
    """
    if is_norm_kernel_usable(x, dtype):
        return measure_rows(x, x.shape[-1], True)
    x = x.to(dtype)
    size = x.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    return torch.linalg.vector_norm(x / size, dim=-1) * size.squeeze(-1)


def squared_norms(vectors: Sequence[Tensor], dtype: torch.dtype, width: int) -> list[Tensor]:
    """Return the squared norms of the first `width` components of each row.

    Args:
        vectors: Tensors [B, H, L, d].
        dtype: Dtype of the arithmetic and of the result.
        width: Components that count.

    Returns:
        One tensor [B, H, L] for each tensor.
    """
    squares: list[Tensor] = []
    # The engine, if the kernel may be called directly, as the operator does but without its
    # overhead. Not while a call is recorded, if operators are watched, or in forward-mode
    # differentiation: these need to see an operator.
    direct: Any = None
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not (recorded or count_dispatch_modes() or read_forward_level() >= 0):
        direct = library.CORES.get(os.environ.get(native.SETTING))
    for x in vectors:
        # `raw` first: while tracing, a question about lengths would become a guard.
        raw = (
            direct is not None
            and dtype == torch.float32
            and x.dtype in serialize.RAW_DTYPES
            and type(x) is Tensor
        )
        learns = x.requires_grad and torch.is_grad_enabled()
        if not raw or learns or x.numel() <= SMALL or x.device.type != "cpu" or is_wrapped(x):
            squares.append(_square_rows(x, dtype, width))
            continue
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = x.new_empty(x.shape[:3], dtype=torch.float32)
        # `raw` is False without the engine.
        direct.hyper_norms(pack_norms(x, width, False, out))  # type: ignore[union-attr]
        squares.append(out)
    return squares


def _square_rows(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Return the squared norms of one tensor by an operator."""
    if is_norm_kernel_usable(x, dtype):
        return measure_rows(x, width, False)
    return x[..., :width].to(dtype).square().sum(-1)


def is_norm_kernel_usable(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a compiled kernel can compute the norms faster than plain torch."""
    # An exported program and torch.func's transforms compute norms by torch's own operators.
    if is_exporting() or is_transformed():
        return False
    if not torch.compiler.is_compiling() and x.numel() <= SMALL:
        return False
    if dtype != torch.float32 or x.dtype not in (*serialize.RAW_DTYPES, torch.float16):
        return False
    if x.is_cuda:
        return triton.find_device_obstacle(x.device.type, x.device.index) is None
    return x.device.type == "cpu" and x.dtype != torch.float16 and library.core_is_ready()


def pack_norms(
    x: Tensor,
    width: int,
    root: bool,
    out: Tensor,
    grad: Tensor | None = None,
    to: Tensor | None = None,
) -> bytes:
    """Pack `struct NormCall`; `grad` and `to` are for the backward pass only."""
    return NORMS.pack(
        x.data_ptr(),
        *x.stride()[:3],
        x.dtype == torch.bfloat16,
        *x.shape[:3],
        width,
        x.shape[3],
        root,
        torch.get_num_threads(),
        out.data_ptr(),
        0 if grad is None else grad.data_ptr(),
        0 if to is None else to.data_ptr(),
    )


@torch.library.custom_op("hf_hyperattn::norms", mutates_args=())
def measure_rows(x: Tensor, width: int, root: bool) -> Tensor:
    """Return the norm of the first `width` numbers of each row, float32 [B, H, L].

    Without `root`, return its square.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(x.shape[:3], dtype=torch.float32)
    if x.is_cuda:
        # Not at the top: Triton may not be installed.
        from ..triton import norms

        norms.write_norms(x, width, root, out)
    else:
        library.core().hyper_norms(pack_norms(x, width, root, out))
    return out


@measure_rows.register_fake
def _fake_norms(x, width, root):
    return x.new_empty(x.shape[:3], dtype=torch.float32)


@torch.library.custom_op("hf_hyperattn::norms_backward", mutates_args=())
def differentiate_rows(grad: Tensor, x: Tensor, out: Tensor, width: int, root: bool) -> Tensor:
    """Return the gradient of the rows from the gradient of their norms `out`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    grad = grad.contiguous()
    to = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.is_cuda:
        from ..triton import norms

        norms.write_gradient(grad, x, out, width, root, to)
    else:
        library.core().hyper_norms_backward(pack_norms(x, width, root, out, grad, to))
    return to


@differentiate_rows.register_fake
def _fake_gradient_of_norms(grad, x, out, width, root):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_for_backward(ctx, inputs, output):
    x, ctx.width, ctx.root = inputs
    ctx.save_for_backward(x, output)


def _pull_back(ctx, grad):
    return differentiate_rows(grad, *ctx.saved_tensors, ctx.width, ctx.root), None, None


measure_rows.register_autograd(_pull_back, setup_context=_save_for_backward)
refuse_in_operator(differentiate_rows, "backend='cpu'")
