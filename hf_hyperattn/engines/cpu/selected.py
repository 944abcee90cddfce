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

from ...utils.readable import can_read, is_recorded, is_transformed
from ...utils.torch_private import count_dispatch_modes
from ..graph_torch import refuse_in_operator
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


class HeadRule(NamedTuple):
    """Which keys j <= p a query at position p sees.

    Without pages: the keys j < sinks, and the keys j > p - near.

    With pages, c is the first position of the query's chunk. The query sees the keys j < sinks, the
    chosen pages, and all keys from the page on that contains c - near + 1.

    Args:
        near: Number of nearest keys. Without pages, a number not below the length gives full
            attention.
        sinks: Number of first keys.
        page: Keys of a page; 0 if no pages are chosen.
        chunk: Number of queries that share a choice.
        top: Number of pages that a chunk chooses.
        bounds: 1: score a page by the smallest and largest value of its keys in each channel; 0: by
            their mean.
        by: What a chunk chooses by, an index into `BY`, or `KEPT`.
        channels: Number of channels that score a page: those with the largest absolute values in
            the chunk's query. 0: all.
    """

    near: int
    sinks: int = 0
    page: int = 0
    chunk: int = 1
    top: int = 0
    bounds: int = 0
    by: int = 0
    channels: int = 0


#: What a chunk chooses by, `By` of listed/choice.h: each query by itself, the first query of the
#: chunk, the mean of the previous chunk, or the mean of the chunk.
BY = ("own", "first", "previous", "chunk")
#: `by` of a head whose choice is given.
KEPT = len(BY)


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
    return _make_cached_layout(tuple(rules), _list_shapes(rules, queries, keys))


def _list_shapes(rules: Sequence[int], queries: int, keys: int) -> tuple[tuple[int, int], ...]:
    """Return `Layout.shapes`."""
    width = len(HeadRule._fields)
    shapes = []
    for i in range(0, len(rules), width):
        rule = HeadRule(*rules[i : i + width])
        if rule.page:
            # One chunk more at each end: padding decides where in its chunk the first query stands.
            shapes.append((queries // rule.chunk + 2, min(rule.top, keys // rule.page)))
        else:
            shapes.append((0, 0))
    return tuple(shapes)


# One entry per layer. While text is generated, shapes stay the same.
@lru_cache(maxsize=512)
def _make_cached_layout(rules: tuple[int, ...], shapes: tuple[tuple[int, int], ...]) -> Layout:
    numbers: list[int] = []
    places, width = 0, len(HeadRule._fields)
    for i, (chunks, most) in enumerate(shapes):
        numbers += [*rules[i * width : (i + 1) * width], places, most]
        places += chunks * most
    return Layout(library.longs(numbers), shapes, places)


@lru_cache(maxsize=512)
def _flatten_rules(rules: tuple[HeadRule, ...]) -> tuple[int, ...]:
    """Return the numbers of all rules, one after the other."""
    return tuple(number for rule in rules for number in rule)


def shapes_of_choice(
    rules: Sequence[HeadRule], queries: int, keys: int
) -> tuple[tuple[int, int], ...]:
    """Return for each head the most chunks, and the most pages that a chunk chooses."""
    return make_layout(_flatten_rules(tuple(rules)), queries, keys).shapes


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
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention; the arguments are those of `pack_selected`.

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


# The function stays callable by itself, without torch's dispatcher: see `is_direct`.
forward = torch.library.custom_op("hf_hyperattn::selected", compute_attention, mutates_args=())


@forward.register_fake
def _fake_attention(
    query, key, value, chosen, rules, spans, offset, scale, softcap, window, sinks, bias
):
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    return out, out.new_empty(2, *query.shape[:3])


@torch.library.custom_op("hf_hyperattn::selected_backward", mutates_args=())
def gradients(
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
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks in their dtypes.

    The last one is empty without sinks.
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
    d_sinks = grad.new_empty(0) if sinks is None else _differentiate_sinks(grad, sinks, out, lse)
    return d_query.to(query.dtype), d_key, d_value, d_sinks


@gradients.register_fake
def _fake_gradients(
    grad,
    out,
    lse,
    query,
    key,
    value,
    chosen,
    rules,
    spans,
    offset,
    scale,
    softcap,
    window,
    sinks,
    bias,
):
    d_sinks = (
        grad.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    )
    return *(t.new_empty(t.shape) for t in (query, key, value)), d_sinks


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.rules, ctx.spans, ctx.offset, ctx.scale, ctx.softcap, ctx.window, sinks, bias = (
        inputs
    )
    ctx.save_for_backward(*output, *tensors, sinks, bias)


def _pull_back(ctx, grad, _):
    *saved, sinks, bias = ctx.saved_tensors
    rest = ctx.rules, ctx.spans, ctx.offset, ctx.scale, ctx.softcap, ctx.window
    *vectors, d_sinks = gradients(grad, *saved, *rest, sinks, bias)
    # No gradients for `chosen`, the six settings, and the bias.
    return *vectors, *[None] * 7, None if sinks is None else d_sinks, None


def _differentiate_sinks(grad: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the sinks, [H]."""
    top, share = lse
    # A share of 0 marks a row of padding, which sees nothing. A sink has no value, so raising its
    # weight by a little changes the output by minus that much of it.
    weight = torch.where(share > 0, torch.exp(sinks.float()[:, None] - top) * share, 0.0)
    return -(weight * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


forward.register_autograd(_pull_back, setup_context=_save_for_backward)
refuse_in_operator(gradients, "backend='cpu'")


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


def is_direct(*tensors: Tensor) -> bool:
    """Return whether the kernel may be called without an operator.

    It may if the call needs no gradients, and if no dispatch mode or recording watches operators.
    """
    # For one generated token, torch's dispatcher takes longer than the kernel.
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not (learned or is_recorded() or count_dispatch_modes())


def _choice_shape(query: Tensor, keys: int, rules: Sequence[int], earlier: int) -> tuple[int, int]:
    # Not `make_layout`: while a call is traced, numbers are symbols, which the cache cannot hash.
    shapes = _list_shapes(rules, query.shape[2] - earlier, keys)
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
    _check_spans(starts, stops, key.shape[2])
    flat = _flatten_rules(tuple(rules))
    layout = make_layout(flat, query.shape[2] - earlier, key.shape[2])
    if kept is not None:
        _check_choice(kept.rows, len(query), layout)
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


def _check_choice(chosen: Tensor, batch: int, layout: Layout) -> None:
    """Raise ValueError unless `chosen` has the shape that the kernel reads."""
    shape = batch, layout.places
    if chosen.shape != shape or chosen.dtype != torch.int32:
        raise ValueError(
            f"selected attention: chosen is {chosen.dtype} {list(chosen.shape)} "
            f"where these queries and rules have int32 {list(shape)}; give what chosen_pages returns"
        )


def _check_spans(starts: Sequence[int], stops: Sequence[int], keys: int) -> None:
    """Raise ValueError unless all spans lie in the keys that the kernel reads."""
    if not all(0 <= start <= stop <= keys for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(
            f"selected attention: spans {starts}, {stops}; allowed: 0 <= start <= stop <= {keys} keys"
        )


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Sequence[HeadRule],
    chosen: Lists | None = None,
    *,
    spans: tuple[Sequence[int], Sequence[int]] | None = None,
    offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute causal attention in which every head has its own sparse rule.

    Args:
        query: [B, H, N, d], float32 or bfloat16. Query i stands at key i + offset.
        key, value: [B, Hkv, M, d] and [B, Hkv, M, dv].
        rules: One rule for each query head.
        chosen: Pages of each chunk, from `chosen_pages`. None: no pages are chosen.
        spans: Starts and stops, one per batch element: the first key that is not padding, and the
            end of these keys. Positions, chunks and pages count from the first. None: no key is
            padding.
        offset: Position of query 0 among the keys.
        scale: Factor of the dot products. None: 1 / sqrt(d).
        softcap: Logits become softcap * tanh(logit / softcap). None: no cap.
        window: Sliding window of the attention layer: a query sees only the last `window` keys.
            None: no window.
        sinks: [H], one logit per head that takes weight in the softmax but has no value.
        bias: [B, H, M], added to the logits of each key after the softcap. It gets no gradient.

    Returns:
        [B, H, N, dv] in the dtype of the query; 0 for queries before the first key.

    Raises:
        ValueError: Rules, pages or spans do not fit the call.
    """
    batch, heads, n, d = query.shape
    if len(rules) != heads:
        raise ValueError(
            f"selected attention: {len(rules)} rules for {heads} heads; give one HeadRule a head"
        )
    flat = _flatten_rules(tuple(rules))
    layout = make_layout(flat, n, key.shape[2])
    if chosen is None:
        chosen = Lists(query.new_full((batch, layout.places), -1, dtype=torch.int32), layout.shapes)
    starts, stops = spans or ([0] * batch, [key.shape[2]] * batch)
    _check_spans(starts, stops, key.shape[2])
    _check_choice(chosen.rows, batch, layout)
    scale = float(d**-0.5 if scale is None else scale)
    learnable = [query, key, value]
    if sinks is not None:
        learnable.append(sinks)
    run = compute_attention if is_direct(*learnable) else forward
    settings = flat, [*starts, *stops], offset, scale, softcap or 0.0, window or 0
    out, _ = run(query, key, value, chosen.rows, *settings, sinks, bias)
    return out.to(query.dtype)
