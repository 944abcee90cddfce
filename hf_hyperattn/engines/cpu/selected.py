"""Call the compiled kernels for sparse rules: first, nearest and chosen keys.

Here you learn how the rule of each head reaches the kernels of listed/forward.h, and how pages are
chosen.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...utils.readable import can_read, is_transformed
from ..selected import (
    KEPT,
    HeadRule,
    SelectedKernel,
    check_choice,
    check_spans,
    differentiate_sinks,
    flatten_rules,
    is_direct,
    list_shapes,
)
from ..selection import Lists, Summaries
from . import library
from .kernels import count_chunks

#: `struct Selected` of listed/blocks.h.
SELECTED = struct.Struct("7q P3q P3q P3q 3q P P q 2P 2f q P P3q 2P")
#: `struct SelectedGradients` of listed/backward.h.
GRADIENTS = struct.Struct("2P q 2P")
#: `struct Choice` of listed/choice.h.
CHOICE = struct.Struct("q 2P")
#: `struct Matrix` of call.h.
MATRIX = struct.Struct("P3q")
#: `struct Summaries` of listed/choice.h.
SUMMARIES = struct.Struct("P3q P3q 7q 3P")
#: Smallest number of queries of a part, if a backward pass is split for several threads.
LEAST_PART = 256


def serves(*tensors: Tensor) -> bool:
    """Return whether the compiled kernels can compute a call with these tensors."""
    suitable = all(
        t.dtype in (torch.float32, torch.bfloat16) and t.device.type == "cpu" for t in tensors
    )
    return suitable and can_read(*tensors) and not is_transformed() and library.core_is_ready()


class Layout(NamedTuple):
    """The rules of all heads in the layout that the kernels read.

    Args:
        rules: Array of `struct Rule`, one per head.
        shapes: For each head, the largest number of chunks, and the largest number of pages that a
            chunk chooses.
        places: Length of a row of `chosen`, which holds the pages of all heads and chunks.
    """

    rules: Any
    shapes: tuple[tuple[int, int], ...]
    places: int


def make_layout(rules: Sequence[int], queries: int, keys: int) -> Layout:
    """Return the layout of the rules of all heads.

    Args:
        rules: The numbers of all `HeadRule`, one after the other.
        queries, keys: Number of queries that choose, and of keys.
    """
    return _make_cached_layout(tuple(rules), list_shapes(rules, queries, keys))


# One entry per layer. While text is generated, shapes stay the same.
@lru_cache(maxsize=512)
def _make_cached_layout(rules: tuple[int, ...], shapes: tuple[tuple[int, int], ...]) -> Layout:
    numbers: list[int] = []
    places, width = 0, len(HeadRule._fields)
    for i, (chunks, most) in enumerate(shapes):
        numbers += [*rules[i * width : (i + 1) * width], places, most]
        places += chunks * most
    return Layout(library.longs(numbers), shapes, places)


def _make_rows_dense(t: Tensor) -> Tensor:
    """Return the tensor with the components of each vector side by side in memory."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def pack_selected(
    tensors: Sequence[Tensor],
    chosen: Tensor,
    rules: Sequence[int],
    spans: Sequence[int],
    offset: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    earlier: int = 0,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[bytes, list]:
    """Pack `struct Selected`.

    Args:
        tensors: Queries, keys and values, with dense rows.
        chosen: Chosen pages, int32 [B, places].
        rules: As in `make_layout`.
        spans: The start of every batch element, then the stop of every one; see
            `selected_attention`.
        offset, scale, softcap, window, sinks, bias: As in `selected_attention`; 0 for no softcap
            and no window.
        out, lse: Written by the kernel.
        earlier: Number of first queries that only take part in the choice.

    Returns:
        The packed structure, and the objects that must stay alive as long as it is used.
    """
    query, key, value = tensors
    batch = query.shape[0]
    layout = make_layout(rules, query.shape[2] - earlier, key.shape[2])
    matrices = [n for t in tensors for n in (t.data_ptr(), *t.stride()[:3])]
    arrays = layout.rules, library.longs(spans[:batch]), library.longs(spans[batch:])
    rules_at, starts, stops = map(ctypes.addressof, arrays)
    sinks = None if sinks is None else sinks.float().contiguous()
    bias_fields: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        bias = _make_rows_dense(bias.float())
        bias_fields = (bias.data_ptr(), *bias.stride())
    call = SELECTED.pack(
        # batch, heads, kv_heads, queries, keys, dim, value_dim
        *query.shape[:2],
        key.shape[1],
        query.shape[2],
        key.shape[2],
        query.shape[3],
        value.shape[3],
        # query, key, value, half
        *matrices,
        query.dtype != torch.float32,
        offset,
        torch.get_num_threads(),
        rules_at,
        # chosen, places
        chosen.data_ptr(),
        chosen.shape[1],
        starts,
        stops,
        scale,
        softcap,
        window,
        0 if sinks is None else sinks.data_ptr(),
        *bias_fields,
        out.data_ptr(),
        lse.data_ptr(),
    )
    return call, [arrays, tensors, chosen, sinks, bias]


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    rules: Sequence[int],
    spans: Sequence[int],
    offset: int,
    scale: float,
    softcap: float,
    window: int,
    summaries: int,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention; the arguments are those of `pack_selected`.

    `summaries` is always 0, since only the kernel for GPUs has them.

    Returns:
        The output, float32 [B, H, N, dv]. Then [2, B, H, N]: the largest logit of each row, and 1
        over its sum of weights, which the backward pass needs.
    """
    tensors = [_make_rows_dense(t) for t in (query, key, value)]
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(2, *query.shape[:3])
    call, alive = pack_selected(
        tensors,
        chosen.contiguous(),
        rules,
        spans,
        offset,
        scale,
        out,
        lse,
        softcap=softcap,
        window=window,
        sinks=sinks,
        bias=bias,
    )
    library.core().hyper_selected_forward(call)
    del alive
    return out, lse


def compute_gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    rules: Sequence[int],
    spans: Sequence[int],
    offset: int,
    scale: float,
    softcap: float,
    window: int,
    summaries: int,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks in their dtypes, and an empty tensor.

    The gradient of the sinks is empty, too, if there are none. The empty tensor stands for the
    gradient of the bias, which this kernel does not have.
    """
    core = library.core()
    tensors = [_make_rows_dense(t) for t in (query, key, value)]
    grad, out, lse = grad.float().contiguous(), out.contiguous(), lse.contiguous()
    call, alive = pack_selected(
        tensors,
        chosen.contiguous(),
        rules,
        spans,
        offset,
        scale,
        out,
        lse,
        softcap=softcap,
        window=window,
        sinks=sinks,
        bias=bias,
    )
    # Each part of the queries has its own sums for keys and values, added in a fixed order.
    parts = count_chunks(key.shape[0] * key.shape[1], -(-query.shape[2] // LEAST_PART))
    d_query = grad.new_empty(query.shape)
    padded = [core.hyper_padded(ctypes.c_int64(t.shape[-1])) for t in (key, value)]
    sums = [grad.new_zeros(parts, *key.shape[:3], width) for width in padded]
    slots = GRADIENTS.pack(
        grad.data_ptr(), d_query.data_ptr(), parts, *(t.data_ptr() for t in sums)
    )
    core.hyper_selected_backward(call, slots)
    del alive
    # The kernel pads rows to whole registers.
    d_key, d_value = (
        t.sum(0)[..., : like.shape[-1]].to(like.dtype).clone()
        for t, like in zip(sums, (key, value), strict=True)
    )
    d_sinks = differentiate_sinks(grad, sinks, out, lse)
    return d_query.to(query.dtype), d_key, d_value, d_sinks, lse.new_empty(0)


#: Attention on the CPU, as a function and as an operator.
kernel = SelectedKernel(
    "hf_hyperattn::selected", compute_attention, compute_gradients, torch.float32, "cpu"
)
selected_attention = kernel.attend


def compute_choice(
    query: Tensor,
    key: Tensor,
    rules: Sequence[int],
    spans: Sequence[int],
    offset: int,
    earlier: int,
    summaries: Sequence[Tensor],
    kept: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Return the rows of `chosen_pages`, int32 [B, places].

    Args:
        summaries: For each head its summaries, or an empty tensor. No tensors: the kernel makes
            them.
        kept: Rows of an earlier choice, for heads by `KEPT`.

    The other arguments are as in `chosen_pages`.
    """
    tensors = [_make_rows_dense(t) for t in (query, key, key)]
    shape = _choice_shape(query, key.shape[2], rules, earlier)
    chosen = query.new_empty(shape, dtype=torch.int32) if kept is None else kept.clone()
    # A choice uses neither values, nor the scale, nor the outputs: others stand in for them.
    out = query.new_empty(0, dtype=torch.float32)
    call, alive = pack_selected(
        tensors, chosen, rules, spans, offset, 1.0, out, out, earlier, window=window
    )
    empty = MATRIX.pack(0, 0, 0, 0)
    packed = b"".join(
        MATRIX.pack(t.data_ptr(), *t.stride()[:3]) if t.numel() else empty for t in summaries
    )
    matrices = ctypes.create_string_buffer(packed or empty * query.shape[1])
    slots = CHOICE.pack(earlier, chosen.data_ptr(), ctypes.addressof(matrices))
    library.core().hyper_selected_choice(call, slots)
    del alive, matrices
    return chosen


choice = torch.library.custom_op("hf_hyperattn::selected_choice", compute_choice, mutates_args=())


def _choice_shape(query: Tensor, keys: int, rules: Sequence[int], earlier: int) -> tuple[int, int]:
    # Not `make_layout`: while a call is traced, numbers are symbols, which the cache cannot hash.
    shapes = list_shapes(rules, query.shape[2] - earlier, keys)
    return query.shape[0], sum(chunks * most for chunks, most in shapes)


@choice.register_fake
def _fake_choice(query, key, rules, spans, offset, earlier, summaries, kept=None, window=0):
    return query.new_empty(_choice_shape(query, key.shape[2], rules, earlier), dtype=torch.int32)


def chosen_pages(
    query: Tensor,
    key: Tensor,
    rules: Sequence[HeadRule],
    *,
    spans: tuple[Sequence[int], Sequence[int]] | None = None,
    offset: int = 0,
    earlier: int = 0,
    summaries: Sequence[Summaries | None] = (),
    kept: Lists | None = None,
    window: int | None = None,
) -> Lists:
    """Choose pages for chunks of queries.

    Scores are computed in float32. Ties go to the earliest page.

    Args:
        query, key, rules, spans: As in `selected_attention`. No gradients are computed.
        offset: Position of query 0 among the keys.
        earlier: Number of first queries that only take part in the choice; no pages are returned
            for them.
        summaries: For each head the summaries of all complete pages, from `page_summaries`, or
            None. Empty: summaries are made from the keys.
        kept: Result for an earlier query of the same chunks. Heads with the rule `KEPT` copy it.
        window: Sliding window of the attention layer. A page is not chosen if the window hides one
            of its keys before the chunk ends.

    Returns:
        The pages, as `selected_attention` takes them.

    Raises:
        ValueError: The spans or `kept` do not fit the call, or `kept` is missing.
    """
    starts, stops = spans or ([0] * len(query), [key.shape[2]] * len(query))
    check_spans(starts, stops, key.shape[2])
    flat = flatten_rules(tuple(rules))
    layout = make_layout(flat, query.shape[2] - earlier, key.shape[2])
    if kept is not None:
        check_choice(kept.rows, len(query), layout.shapes)
    elif any(rule.by == KEPT for rule in rules):
        raise ValueError("selected attention: a head's choice is said to be kept; give kept")
    query, key = query.detach(), key.detach()
    run = compute_choice if is_direct() else choice
    rows = [query.new_empty(0) if summary is None else summary.rows for summary in summaries]
    known = None if kept is None else kept.rows
    spans_flat = [*starts, *stops]
    chosen = run(query, key, flat, spans_flat, offset, earlier, rows, known, window or 0)
    return Lists(chosen, layout.shapes)


@torch.no_grad()
def page_summaries(
    key: Tensor,
    out: Tensor,
    page: int,
    bounds: int,
    starts: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
) -> None:
    """Write summaries of pages: the mean of their keys, or bounds of each channel.

    Args:
        key: [B, Hkv, M, d], float32 or bfloat16, on the CPU.
        out: Written, float32 [B, Hkv, P, d]. With bounds [B, Hkv, P, 2 d]: the largest values, then
            the smallest.
        page: Keys of a page.
        bounds: 1 for bounds, 0 for means.
        starts: For each row its first key.
        begin, end: For each row the range of pages to write. All of them must be complete.
    """
    key = _make_rows_dense(key)
    arrays = library.longs(starts), library.longs(begin), library.longs(end)
    call = SUMMARIES.pack(
        key.data_ptr(),
        *key.stride()[:3],
        out.data_ptr(),
        *out.stride()[:3],
        key.dtype != torch.float32,
        *key.shape[:2],
        key.shape[3],
        page,
        bounds,
        torch.get_num_threads(),
        *map(ctypes.addressof, arrays),
    )
    library.core().hyper_page_summaries(call)
