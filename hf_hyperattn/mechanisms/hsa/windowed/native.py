"""Call the compiled CPU kernel of key-tied attention.

The kernel is in engines/cpu/listed/windows.cpp. This module shows how tensors become the C
structures of the kernel, forward and backward.

Sums are float32. In a forward pass, tokens and queries may be in half precision, as caches keep
them. The kernel multiplies bfloat16 queries and tokens directly if the CPU can. Gradients are
computed in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ....engines.cpu import library
from ....engines.cpu.library import longs
from ....utils.readable import can_read

# Head dimensions are padded to a multiple of the widest registers: 16 floats of AVX-512.
LANES = 16

# The dtypes that tokens may have. `Kind` in listed/windows.h has the same codes.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _make_fields(kind, names: str) -> list:
    """Return ctypes fields of one type from names that are separated by spaces."""
    return [(name, kind) for name in names.split()]


class KernelCall(ctypes.Structure):
    """Mirror `struct Windows` of listed/windows.h: same fields in the same order."""

    _fields_ = [
        *_make_fields(ctypes.c_void_p, "out lse query"),
        ("query_steps", ctypes.c_int64 * 3),
        ("levels", ctypes.c_int64),
        *_make_fields(ctypes.c_void_p, "keys values key_steps value_steps widths held"),
        *_make_fields(ctypes.c_int64, "kind query_kind batch heads kv_heads queries dim value_dim"),
        *_make_fields(ctypes.c_void_p, "near sinks top_k block_bias sink_logit starts stops"),
        *_make_fields(ctypes.c_int64, "is_causal offset threads"),
        ("scale", ctypes.c_float),
    ]


class KernelGradients(ctypes.Structure):
    """Mirror `struct WindowGradients` of listed/windows_backward.h."""

    _fields_ = _make_fields(ctypes.c_void_p, "grad query keys values rows block_bias sink_logit")


def can_serve(t: Tensor) -> bool:
    """Return whether the kernel can compute a call with this query."""
    suitable = t.dtype in KINDS and t.device.type == "cpu" and can_read(t)
    return suitable and library.core_is_ready()


def takes_dtype(t: Tensor) -> bool:
    """Return whether the kernel takes tensors of this dtype directly: bfloat16."""
    return t.dtype == torch.bfloat16 and can_serve(t)


def list_pointers(tensors: Sequence[Tensor]):
    """Return a C array of the tensors' addresses."""
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def list_strides(tensors: Sequence[Tensor]):
    """Return a C array of the strides of batch, head and row of each tensor."""
    return longs([s for t in tensors for s in t.stride()[:3]])


def pad_to_vectors(t: Tensor) -> Tensor:
    """Return the tensor with contiguous rows of whole vectors.

    It is not copied if its rows are such already.
    """
    spare = -t.shape[-1] % LANES
    t = torch.nn.functional.pad(t, (0, spare)) if spare else t
    return t if t.stride(-1) == 1 else t.contiguous()


def build_call(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    out: Tensor,
    lse: Tensor | None,
    block_bias: Tensor | None,
    sink_logit: Tensor | None,
    spans: tuple[list[int], list[int]],
    sizes: Sequence[int],
    held: Sequence[int],
    near: list[int],
    sinks: list[int],
    top_k: list[int],
    is_causal: bool,
    offset: int,
    scale: float,
) -> tuple[KernelCall, list]:
    """Return the structure that the kernel reads, and objects to keep alive.

    Args:
        query: [B, H, N, d].
        keys, values: Of every level, tokens first, [B, Hkv, n_l, ...].
        out: [B, H, N, dv], which the kernel writes.
        lse: [B, H, N], which the kernel writes; None: not needed.
        block_bias, sink_logit: [H] or None.
        spans: First real token of every row, and one past the last.
        sizes: Window sizes, bottom first.
        held: For each level, the number of rows kept at the front of its table, and the number
            evicted after them.
        near, sinks, top_k: One integer per head.
        is_causal, offset, scale: As in `windowed.key.key_tied`.
    """
    # A window that holds all tokens is the root, and open to every query. The kernel reserves
    # memory for all children that a window may have, and loops over them, so a huge size would cost
    # both.
    longest = max(stop - start for start, stop in zip(*spans, strict=True)) if spans[0] else 0
    sizes = [size for size in sizes if size < longest]

    # The structure holds only addresses of these C arrays, so Python must keep the arrays alive
    # during the call.
    starts, stops = spans
    arrays = {
        "keys": list_pointers(keys),
        "values": list_pointers(values),
        "key_steps": list_strides(keys),
        "value_steps": list_strides(values),
        "widths": longs([1, *sizes]),
        "held": longs(held),
        "near": longs(near),
        "sinks": longs(sinks),
        "top_k": longs(top_k),
        "starts": longs(starts),
        "stops": longs(stops),
    }
    addresses = {name: ctypes.addressof(array) for name, array in arrays.items()}
    extras = [None if t is None else t.float().contiguous() for t in (block_bias, sink_logit)]
    bias, sink = (None if t is None else t.data_ptr() for t in extras)
    call = KernelCall(
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        query=query.data_ptr(),
        query_steps=tuple(query.stride()[:3]),
        levels=len(sizes),
        kind=KINDS[keys[0].dtype],
        query_kind=KINDS[query.dtype],
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=keys[0].shape[1],
        queries=query.shape[2],
        dim=query.shape[3],
        value_dim=values[0].shape[3],
        block_bias=bias,
        sink_logit=sink,
        is_causal=is_causal,
        offset=offset,
        threads=torch.get_num_threads(),
        scale=scale,
        **addresses,
    )
    return call, [extras, arrays]


def compute_forward(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *, lse: bool = True, **rest
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, H, N, dv] and the log-sum-exp [B, H, N] or None.

    Args:
        query: [B, H, N, d], converted to float32 if tokens have another dtype. With bfloat16
            queries and tokens on a CPU that multiplies bfloat16, more than 4 neighbouring queries
            round the weights of shared tokens to bfloat16.
        keys, values: Of every level, tokens first, of any dtype in `KINDS`; means are float32.
        rest: The other arguments of `build_call`, by name.
        lse: If False, return None for the log-sum-exp, and compute a few refining queries one by
            one. Their scores then round differently than in a backward pass, which might open other
            blocks.
    """
    # The structure has one field for the dtype of keys and values.
    if keys[0].dtype != values[0].dtype:
        keys, values = ([t.float() for t in tables] for tables in (keys, values))
    # Queries have the dtype of the tokens, or float32.
    if query.dtype != keys[0].dtype:
        query = query.float()
    width = values[0].shape[-1]
    query = pad_to_vectors(query)
    keys = [*map(pad_to_vectors, keys)]
    values = [*map(pad_to_vectors, values)]
    out = query.new_empty(*query.shape[:3], values[0].shape[-1], dtype=torch.float32)
    sums = out.new_empty(query.shape[:3]) if lse else None
    call, alive = build_call(query, keys, values, out, sums, **rest)
    library.core().hyper_windows_forward(ctypes.byref(call))
    del alive  # Not before the kernel has returned.
    return _cut_padding(out, width), sums


def _cut_padding(t: Tensor, width: int) -> Tensor:
    """Return the tensor without the columns that `pad_to_vectors` added."""
    return t if t.shape[-1] == width else t[..., :width].contiguous()


def compute_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    **rest,
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
    """Return the gradients of query, keys, values, block bias [H] and sink [H].

    The last two are 0 if the call has no block bias or sink.

    Args:
        grad: Gradient of the output, [B, H, N, dv].
        out, lse: Results of `compute_forward`.
        query, keys, values: As in `compute_forward`, in float32.
        rest: The other arguments of `build_call`, by name.
    """
    width, value_width = query.shape[-1], values[0].shape[-1]
    query = pad_to_vectors(query)
    keys = [*map(pad_to_vectors, keys)]
    values = [*map(pad_to_vectors, values)]
    grad = pad_to_vectors(grad).contiguous()
    out = pad_to_vectors(out).contiguous()
    lse = lse.contiguous()
    call, alive = build_call(query, keys, values, out, lse, **rest)

    # The kernel adds to these buffers, so they start at 0.
    g_query = query.new_zeros(query.shape)
    g_keys = [query.new_zeros(t.shape) for t in keys]
    g_values = [query.new_zeros(t.shape) for t in values]
    # Gradients of block bias and sink by row and head: threads work on different rows and heads,
    # and must not write to the same number.
    g_bias, g_sink = query.new_zeros(2, *query.shape[:2])
    tables = [list_pointers(g_keys), list_pointers(g_values), longs([t.shape[2] for t in keys])]
    key_table, value_table, row_counts = map(ctypes.addressof, tables)
    gradients = KernelGradients(
        grad=grad.data_ptr(),
        query=g_query.data_ptr(),
        keys=key_table,
        values=value_table,
        rows=row_counts,
        block_bias=g_bias.data_ptr(),
        sink_logit=g_sink.data_ptr(),
    )
    library.core().hyper_windows_backward(ctypes.byref(call), ctypes.byref(gradients))
    del alive
    g_keys = [_cut_padding(t, width) for t in g_keys]
    g_values = [_cut_padding(t, value_width) for t in g_values]
    return _cut_padding(g_query, width), g_keys, g_values, g_bias.sum(0), g_sink.sum(0)


def pool_windows(
    t: Tensor, sizes: Sequence[int], starts: list[int], stops: list[int]
) -> list[Tensor]:
    """Return the means over windows of every size, [B, H, ceil(M / w), e] each.

    Args:
        t: [B, H, M, e].
        sizes: Window sizes w, bottom first.
        starts, stops: First real token of every row, and one past the last.
    """
    t = t if t.stride(-1) == 1 else t.contiguous()
    counts = [t.shape[2], *(-(-t.shape[2] // size) for size in sizes)]
    # The kernel computes the sums of a level from the level below, tokens first.
    tables = [t, *(t.new_empty(*t.shape[:2], n, t.shape[3]) for n in counts[1:])]
    library.core().hyper_windows_pool(
        ctypes.c_void_p(t.data_ptr()),
        list_strides([t]),
        *(ctypes.c_int64(n) for n in (*t.shape[:2], t.shape[3])),
        longs(starts),
        longs(stops),
        ctypes.c_int64(len(sizes)),
        longs([1, *sizes]),
        list_pointers(tables),
        longs(counts),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return tables[1:]
