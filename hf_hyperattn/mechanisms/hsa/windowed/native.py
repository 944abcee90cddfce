"""The compiled kernel of key-tied attention (engines/cpu/listed/windows.cpp) on the CPU, forward and backward.

Sums are float32. In a forward pass tokens may be in half precision, as caches keep them, and queries with them; queries
and tokens in bfloat16 are multiplied as they are where the CPU can. Gradients are computed in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ....engines.cpu import library
from ....engines.cpu.library import longs
from ....readable import can_read

#: Head dimensions are filled up to a multiple of the widest registers.
LANES = 16

#: The dtypes that tokens may have, as `Kind` of listed/windows.h counts them.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _make_fields(kind, names: str) -> list:
    return [(name, kind) for name in names.split()]


class KernelCall(ctypes.Structure):
    """`struct Windows` of listed/windows.h."""

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
    """`struct WindowGradients` of listed/windows_backward.h."""

    _fields_ = _make_fields(ctypes.c_void_p, "grad query keys values rows block_bias sink_logit")


def can_serve(t: Tensor) -> bool:
    """Whether the kernel can compute a call with this query."""
    suitable = t.dtype in KINDS and t.device.type == "cpu" and can_read(t)
    return suitable and library.core_is_ready()


def takes_dtype(t: Tensor) -> bool:
    """Whether the kernel takes queries, keys and values of this dtype as they are: bfloat16."""
    return t.dtype == torch.bfloat16 and can_serve(t)


def list_pointers(tensors: Sequence[Tensor]):
    """An array of their addresses."""
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def list_strides(tensors: Sequence[Tensor]):
    """Strides of batch, head and row of each."""
    return longs([s for t in tensors for s in t.stride()[:3]])


def pad_to_vectors(t: Tensor) -> Tensor:
    """The tensor with rows that are whole vectors and contiguous; itself where they are."""
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
    """The structure that the kernel reads, and what must live as long as it."""
    # A window that holds all tokens is the root, and open to every query. The kernel makes room, and loops, for all
    # children that a window may have.
    longest = max(stop - start for start, stop in zip(*spans, strict=True)) if spans[0] else 0
    sizes = [size for size in sizes if size < longest]
    extras = [None if t is None else t.float().contiguous() for t in (block_bias, sink_logit)]
    arrays = [longs(v) for v in ([1, *sizes], held, near, sinks, top_k, *spans)]
    tables = [list_pointers(keys), list_pointers(values), list_strides(keys), list_strides(values)]
    address = ctypes.addressof
    call = KernelCall(
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        query.data_ptr(),
        tuple(query.stride()[:3]),
        len(sizes),
        *map(address, tables),
        *map(address, arrays[:2]),
        KINDS[keys[0].dtype],
        KINDS[query.dtype],
        query.shape[0],
        query.shape[1],
        keys[0].shape[1],
        query.shape[2],
        query.shape[3],
        values[0].shape[3],
        *map(address, arrays[2:5]),
        *(None if t is None else t.data_ptr() for t in extras),
        *map(address, arrays[5:]),
        is_causal,
        offset,
        torch.get_num_threads(),
        scale,
    )
    return call, [extras, arrays, tables]


def compute_forward(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *rest, lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, dv] and log-sum-exp [B, H, N].

    Args:
        query: [B, H, N, d], read in float32 if tokens have another dtype. If queries and tokens are bfloat16,
            and the CPU multiplies such numbers, more than 4 neighbouring queries round their weights to
            bfloat16 for the tokens that they share.
        keys, values: Of every level, tokens first, of any dtype in `KINDS`; means are float32.
        rest: As in `build_call`.
        lse: False: None takes the place of the log-sum-exp, and a few queries that refine are computed one by one.
            Their scores are then rounded otherwise than in a backward pass, which might open other blocks.
    """
    if keys[0].dtype != values[0].dtype:
        keys, values = ([t.float() for t in tables] for tables in (keys, values))
    if query.dtype != keys[0].dtype:
        query = query.float()
    width = values[0].shape[-1]
    query, keys, values = (
        pad_to_vectors(query),
        [*map(pad_to_vectors, keys)],
        [*map(pad_to_vectors, values)],
    )
    out = query.new_empty(*query.shape[:3], values[0].shape[-1], dtype=torch.float32)
    sums = out.new_empty(query.shape[:3]) if lse else None
    call, alive = build_call(query, keys, values, out, sums, *rest)
    library.core().hyper_windows_forward(ctypes.byref(call))
    del alive
    return _cut_padding(out, width), sums


def _cut_padding(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else t[..., :width].contiguous()


def compute_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *rest,
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
    """Gradients of query, keys, values, block bias [H] and sink [H] (0 where there is none)."""
    width, value_width = query.shape[-1], values[0].shape[-1]
    query, keys, values = (
        pad_to_vectors(query),
        [*map(pad_to_vectors, keys)],
        [*map(pad_to_vectors, values)],
    )
    grad, out, lse = (
        pad_to_vectors(grad).contiguous(),
        pad_to_vectors(out).contiguous(),
        lse.contiguous(),
    )
    call, alive = build_call(query, keys, values, out, lse, *rest)
    zeros = lambda t: query.new_zeros(t.shape)
    g_query, g_keys, g_values = zeros(query), [*map(zeros, keys)], [*map(zeros, values)]
    heads = query.new_zeros(2, *query.shape[:2])
    tables = [list_pointers(g_keys), list_pointers(g_values), longs([t.shape[2] for t in keys])]
    gradients = KernelGradients(
        grad.data_ptr(),
        g_query.data_ptr(),
        *map(ctypes.addressof, tables),
        *(h.data_ptr() for h in heads),
    )
    library.core().hyper_windows_backward(ctypes.byref(call), ctypes.byref(gradients))
    del alive
    g_keys, g_values = (
        [_cut_padding(t, width) for t in g_keys],
        [_cut_padding(t, value_width) for t in g_values],
    )
    return _cut_padding(g_query, width), g_keys, g_values, heads[0].sum(0), heads[1].sum(0)


def pool_windows(
    t: Tensor, sizes: Sequence[int], starts: list[int], stops: list[int]
) -> list[Tensor]:
    """Means of [B, H, M, e] over windows of every size, [B, H, ceil(M / w), e] each."""
    t = t if t.stride(-1) == 1 else t.contiguous()
    counts = [t.shape[2], *(-(-t.shape[2] // size) for size in sizes)]
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
