"""Call the compiled CPU kernel of key-tied attention.

The kernel is in engines/cpu/listed/windows.cpp. This module shows what the kernel reads (tokens,
and one mean for each window), how tensors become its C structures, and how gradients of means
return to the tokens.

Sums are float32. In a forward pass, tokens and queries may be in half precision, as caches keep
them. The kernel multiplies bfloat16 queries and tokens directly if the CPU can. Gradients are
computed in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....engines import Options, working_dtype
from ....engines.cpu import library
from ....engines.cpu.library import longs
from ....utils.readable import can_read
from ..config import Rule

# Head dimensions are padded to a multiple of the widest registers: 16 floats of AVX-512.
LANES = 16

# The dtypes that tokens may have. `Kind` in listed/windows.h has the same codes.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Levels:
    """Hold keys and values by level.

    Level 0 holds tokens, and level l the means over windows of `sizes[l-1]` tokens.

    Args:
        sizes: Window sizes, bottom first, each dividing the next.
        keys: For every level, [B, Hkv, n_l, d]. Level 0 holds the tokens of the call, padding
            included. Block b of a level above holds tokens start + b·w to start + (b+1)·w - 1 of
            its row. The last block may be missing if it is incomplete: causal queries read complete
            blocks only. Means are in the working dtype. Tokens of a cache may be in half precision.
        values: As `keys`, [B, Hkv, n_l, dv].
        starts: int64 [B], the first real token of every row; None: 0.
        stops: int64 [B], one past the last real token; None: the last token is real.
        held: None if nothing is evicted. Else the number of tokens of the text, and for every level
            the number of rows kept at the front of its tables, and the number of rows evicted after
            them.
    """

    sizes: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    starts: Tensor | None = None
    stops: Tensor | None = None
    held: tuple[int, tuple[tuple[int, int], ...]] | None = None


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


def pad_levels(levels: Levels) -> Levels:
    """Return the levels with tables that `pad_to_vectors` has padded."""
    keys, values = (tuple(map(pad_to_vectors, tables)) for tables in (levels.keys, levels.values))
    return replace(levels, keys=keys, values=values)


def _cut_padding(t: Tensor, width: int) -> Tensor:
    """Return the tensor without the columns that `pad_to_vectors` added."""
    return t if t.shape[-1] == width else t[..., :width].contiguous()


def build_call(
    query: Tensor,
    levels: Levels,
    rule: Rule,
    options: Options,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> tuple[KernelCall, list]:
    """Return the structure that the kernel reads, and objects to keep alive.

    Args:
        query: [B, H, N, d], padded, as the levels.
        levels: Tokens and means.
        rule: As `spread_rule` returns it.
        options: `is_causal`, `offset` and `sinks` are read.
        scale: Factor of q·k.
        out: [B, H, N, dv], which the kernel writes.
        lse: [B, H, N], which the kernel writes; None: not needed.
    """
    # With evicted tokens, the table of tokens is shorter than the text.
    whole = levels.keys[0].shape[2], ((0, 0),) * len(levels.keys)
    length, held = levels.held or whole
    starts, stops = span_lists(len(query), length, levels.starts, levels.stops)
    # A window that holds all tokens is the root, and open to every query. The kernel reserves
    # memory for all children that a window may have, and loops over them, so a huge size would cost
    # both.
    longest = max((stop - start for start, stop in zip(starts, stops, strict=True)), default=0)
    sizes = [size for size in levels.sizes if size < longest]

    # The structure holds only addresses of these C arrays, so Python must keep the arrays alive
    # during the call.
    arrays = {
        "keys": list_pointers(levels.keys),
        "values": list_pointers(levels.values),
        "key_steps": list_strides(levels.keys),
        "value_steps": list_strides(levels.values),
        "widths": longs([1, *sizes]),
        "held": longs([count for of_level in held for count in of_level]),
        "near": longs(rule.near),
        "sinks": longs(rule.sinks),
        "top_k": longs(rule.refine_top_k),
        "starts": longs(starts),
        "stops": longs(stops),
    }
    addresses = {name: ctypes.addressof(array) for name, array in arrays.items()}
    extras = [
        None if t is None else t.float().contiguous() for t in (rule.block_bias, options.sinks)
    ]
    bias, sink = (None if t is None else t.data_ptr() for t in extras)
    call = KernelCall(
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        query=query.data_ptr(),
        query_steps=tuple(query.stride()[:3]),
        levels=len(sizes),
        kind=KINDS[levels.keys[0].dtype],
        query_kind=KINDS[query.dtype],
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=levels.keys[0].shape[1],
        queries=query.shape[2],
        dim=query.shape[3],
        value_dim=levels.values[0].shape[3],
        block_bias=bias,
        sink_logit=sink,
        is_causal=options.is_causal,
        offset=options.offset,
        threads=torch.get_num_threads(),
        scale=scale,
        **addresses,
    )
    return call, [extras, arrays]


def compute_forward(
    query: Tensor, levels: Levels, rule: Rule, options: Options, scale: float, lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, H, N, dv] and the log-sum-exp [B, H, N] or None.

    Args:
        query: [B, H, N, d], converted to float32 if tokens have another dtype. With bfloat16
            queries and tokens on a CPU that multiplies bfloat16, more than 4 neighbouring queries
            round the weights of shared tokens to bfloat16.
        levels: Tokens of any dtype in `KINDS`, and means in float32.
        rule, options, scale: As in `build_call`.
        lse: If False, return None for the log-sum-exp, and compute a few refining queries one by
            one. Their scores then round differently than in a backward pass, which might open other
            blocks.
    """
    keys, values = levels.keys, levels.values
    # The structure has one field for the dtype of keys and values.
    if keys[0].dtype != values[0].dtype:
        keys, values = (tuple(t.float() for t in tables) for tables in (keys, values))
        levels = replace(levels, keys=keys, values=values)
    # Queries have the dtype of the tokens, or float32.
    if query.dtype != keys[0].dtype:
        query = query.float()
    query, levels = pad_to_vectors(query), pad_levels(levels)
    value_width = levels.values[0].shape[-1]
    out = query.new_empty(*query.shape[:3], value_width, dtype=torch.float32)
    sums = out.new_empty(query.shape[:3]) if lse else None
    call, alive = build_call(query, levels, rule, options, scale, out, sums)
    library.core().hyper_windows_forward(ctypes.byref(call))
    del alive  # Not before the kernel has returned.
    return _cut_padding(out, values[0].shape[-1]), sums


def compute_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    levels: Levels,
    rule: Rule,
    options: Options,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, tokens' keys and values, block bias [H] and sink [H].

    The last two are 0 if the call has no block bias or sink.

    Args:
        grad: Gradient of the output, [B, H, N, dv].
        out, lse: Results of `compute_forward`.
        query, levels: As in `compute_forward`, in float32, nothing evicted.
        rule, options, scale: As in `build_call`.
    """
    width, value_width = query.shape[-1], levels.values[0].shape[-1]
    query, levels = pad_to_vectors(query), pad_levels(levels)
    grad, out = (pad_to_vectors(t).contiguous() for t in (grad, out))
    lse = lse.contiguous()
    call, alive = build_call(query, levels, rule, options, scale, out, lse)

    # The kernel adds to these buffers, so they start at 0.
    g_query = query.new_zeros(query.shape)
    g_keys, g_values = (
        [query.new_zeros(t.shape) for t in tables] for tables in (levels.keys, levels.values)
    )
    # Gradients of block bias and sink by row and head: threads work on different rows and heads,
    # and must not write to the same number.
    g_bias, g_sink = query.new_zeros(2, *query.shape[:2])
    row_counts = longs([t.shape[2] for t in levels.keys])
    tables = [list_pointers(g_keys), list_pointers(g_values), row_counts]
    key_table, value_table, row_table = map(ctypes.addressof, tables)
    gradients = KernelGradients(
        grad=grad.data_ptr(),
        query=g_query.data_ptr(),
        keys=key_table,
        values=value_table,
        rows=row_table,
        block_bias=g_bias.data_ptr(),
        sink_logit=g_sink.data_ptr(),
    )
    library.core().hyper_windows_backward(ctypes.byref(call), ctypes.byref(gradients))
    del alive
    g_key = unpool_gradients([_cut_padding(t, width) for t in g_keys], levels)
    g_value = unpool_gradients([_cut_padding(t, value_width) for t in g_values], levels)
    return _cut_padding(g_query, width), g_key, g_value, g_bias.sum(0), g_sink.sum(0)


def pool_levels(
    key: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    starts: Tensor | None = None,
    stops: Tensor | None = None,
) -> Levels:
    """Return keys and values with their means over windows of every level, in O(M).

    Without the kernel, only the tokens are returned: plain torch computes means from its own trees.

    Args:
        key: [B, Hkv, M, d], any floating dtype. Means are float32.
        value: [B, Hkv, M, dv].
        sizes: Window sizes, bottom first, each dividing the next.
        starts, stops: The real tokens of every row, int64 [B]; windows start at the first one.
            None: all are real.
    """
    dtype = working_dtype(key)
    tables = key.to(dtype), value.to(dtype)
    if can_serve(tables[0]):
        spans = span_lists(len(key), key.shape[2], starts, stops)
        keys, values = ((t, *pool_windows(t, sizes, *spans)) for t in tables)
    else:
        keys, values = ((t,) for t in tables)
    return Levels(tuple(sizes), keys, values, starts, stops)


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


def unpool_gradients(tables: Sequence[Tensor], levels: Levels) -> Tensor:
    """Return the gradients of tokens [B, H, M, e].

    Gradients of means are added to the gradients of their tokens. The first table is changed in
    place, and returned.

    Args:
        tables: Gradients of every level, tokens first.
        levels: For the sizes and the spans of its rows.
    """
    tokens, sizes = tables[0], levels.sizes
    starts, stops = span_lists(len(tokens), tokens.shape[2], levels.starts, levels.stops)
    counts = torch.tensor(stops) - torch.tensor(starts)
    above: Tensor | None = None
    # From the top level down, add to each block the gradient that its parent passes on to each
    # token.
    for level in range(len(sizes), 0, -1):
        blocks = torch.arange(tables[level].shape[2])
        # Tokens in each block: the last one of a row may be incomplete. At least 1, since padded
        # blocks are divided too.
        inside = (counts[:, None] - sizes[level - 1] * blocks).clamp(1, sizes[level - 1])
        each = tables[level] / inside[:, None, :, None]
        if above is not None:
            # A huge window has fewer children than its size allows: do not repeat beyond the
            # existing blocks.
            children = min(sizes[level] // sizes[level - 1], len(blocks))
            each += above.repeat_interleave(children, 2)[:, :, : len(blocks)]
        above = each
    if above is not None:
        children = min(sizes[0], tokens.shape[2])
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            by_token = above[row].repeat_interleave(children, 1)
            tokens[row, :, start:stop] += by_token[:, : stop - start]
    return tokens


def span_lists(
    batch: int, length: int, starts: Tensor | None, stops: Tensor | None
) -> tuple[list[int], list[int]]:
    """Return the first real token of every row, and one past the last.

    Args:
        batch: Number of rows.
        length: Number of tokens of a row, padding included.
        starts, stops: int64 [B or 1], or None: 0 and `length`.
    """
    first = [0] * batch if starts is None else starts.tolist()
    last = [length] * batch if stops is None else [min(stop, length) for stop in stops.tolist()]
    if not batch:
        return [], []
    return first * (batch // len(first)), last * (batch // len(last))
