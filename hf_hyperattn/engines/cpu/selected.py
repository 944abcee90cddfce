"""Attention by rules of the heads (listed/forward.h): first keys, nearest keys, pages that chunks of queries chose."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...readable import can_read, is_recorded, is_transformed
from ..graph_torch import refuse_in_operator
from ..selection import Lists, Summaries
from . import library
from .kernels import chunks_of

#: `struct Selected`, `struct SelectedGradients`, `struct Choice`, `struct Matrix` and `struct Summaries` of
#: listed/blocks.h, listed/backward.h, listed/choice.h and call.h.
SELECTED = struct.Struct("7q P3q P3q P3q 3q P P q 2P 2f q P P3q 2P")
GRADIENTS = struct.Struct("2P q 2P")
CHOICE = struct.Struct("q 2P")
MATRIX = struct.Struct("P3q")
SUMMARIES = struct.Struct("P3q P3q 7q 3P")
#: A backward pass on several threads is not cut into parts of fewer queries.
LEAST_PART = 256


class HeadRule(NamedTuple):
    """What keys j <= p a query at position p sees.

    Without pages: j < sinks, j > p - near. With pages: j < sinks, the pages that its chunk has chosen, and all from the
    page on in which c - near + 1 lies, where c is the first position of its chunk.

    Args:
        near: the nearest keys; without pages, a number not below the length makes the head exact.
        sinks: the first keys.
        page: keys of a page; 0: no pages are chosen.
        chunk: queries that share a choice.
        top: how many pages before those a chunk chooses.
        bounds: pages are scored by the least and the largest of their keys, not by their means.
        by: what a chunk chooses by, a place in `BY`.
        channels: how many channels score a page, those of largest size in what the chunk chooses by; 0: all.
    """

    near: int
    sinks: int = 0
    page: int = 0
    chunk: int = 1
    top: int = 0
    bounds: int = 0
    by: int = 0
    channels: int = 0


#: A query by itself, the first query of its chunk, the mean of the chunk before, the mean of its own chunk.
BY = ("own", "first", "previous", "chunk")
#: `by` of a head whose choice is known already.
KEPT = len(BY)


def serves(*tensors: Tensor) -> bool:
    """Whether the compiled kernel can compute a call with these queries, keys and values."""
    suitable = all(
        t.dtype in (torch.float32, torch.bfloat16) and t.device.type == "cpu" for t in tensors
    )
    return suitable and can_read(*tensors) and not is_transformed() and library.core_is_ready()


class Layout(NamedTuple):
    """The rules of all heads as the kernel reads them.

    Args:
        rules: `struct Rule` of each head.
        shapes: of each head, how many chunks the queries lie in at most, and how many pages a chunk chooses at most.
        places: how many numbers the chosen pages of a row take.
    """

    rules: Any
    shapes: tuple[tuple[int, int], ...]
    places: int


def layout_of(rules: Sequence[int], queries: int, keys: int) -> Layout:
    """The layout of the rules of all heads, given as the numbers of one `HeadRule` after the other."""
    return _layout(tuple(rules), _shapes_of(rules, queries, keys))


def _shapes_of(rules: Sequence[int], queries: int, keys: int) -> tuple[tuple[int, int], ...]:
    width, shapes = len(HeadRule._fields), []
    for i in range(0, len(rules), width):
        rule = HeadRule(*rules[i : i + width])
        shapes.append(
            (queries // rule.chunk + 2, min(rule.top, keys // rule.page)) if rule.page else (0, 0)
        )
    return tuple(shapes)


@lru_cache(maxsize=512)  # of each layer one; longer texts have the same shapes
def _layout(rules: tuple[int, ...], shapes: tuple[tuple[int, int], ...]) -> Layout:
    numbers, places, width = [], 0, len(HeadRule._fields)
    for i, (chunks, most) in enumerate(shapes):
        numbers += [*rules[i * width : (i + 1) * width], places, most]
        places += chunks * most
    return Layout(library.longs(numbers), shapes, places)


@lru_cache(maxsize=512)
def _flat(rules: tuple[HeadRule, ...]) -> tuple[int, ...]:
    return tuple(number for rule in rules for number in rule)


def shapes_of_choice(
    rules: Sequence[HeadRule], queries: int, keys: int
) -> tuple[tuple[int, int], ...]:
    """`Layout.shapes` of these rules."""
    return layout_of(_flat(tuple(rules)), queries, keys).shapes


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def pack(
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
    """`struct Selected`, and what must live as long as it."""
    sinks = None if sinks is None else sinks.float().contiguous()
    bias = None if bias is None else _rows(bias.float())
    of_bias = (0, 0, 0, 0) if bias is None else (bias.data_ptr(), *bias.stride())
    query, key, value = tensors
    layout = layout_of(rules, query.shape[2] - earlier, key.shape[2])
    batch, matrices = query.shape[0], [n for t in tensors for n in (t.data_ptr(), *t.stride()[:3])]
    arrays = layout.rules, library.longs(spans[:batch]), library.longs(spans[batch:])
    rules_at, starts, stops = map(ctypes.addressof, arrays)
    call = SELECTED.pack(
        *query.shape[:2],
        key.shape[1],
        query.shape[2],
        key.shape[2],
        query.shape[3],
        value.shape[3],
        *matrices,
        query.dtype != torch.float32,
        offset,
        torch.get_num_threads(),
        rules_at,
        chosen.data_ptr(),
        chosen.shape[1],
        starts,
        stops,
        scale,
        softcap,
        window,
        0 if sinks is None else sinks.data_ptr(),
        *of_bias,
        out.data_ptr(),
        lse.data_ptr(),
    )
    return call, [arrays, tensors, chosen, sinks, bias]


def compute(
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
    """Output [B, H, N, dv] in float32; of each row the largest logit and 1 over its sum of weights, [2, B, H, N]."""
    tensors = [_rows(t) for t in (query, key, value)]
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(2, *query.shape[:3])
    places = rules, spans, offset, scale
    call, alive = pack(
        tensors, chosen.contiguous(), *places, out, lse, 0, softcap, window, sinks, bias
    )
    library.core().hyper_selected_forward(call)
    del alive
    return out, lse


forward = torch.library.custom_op("hf_hyperattn::selected", compute, mutates_args=())


@forward.register_fake
def _(query, key, value, chosen, rules, spans, offset, scale, softcap, window, sinks, bias):
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
    """Gradients of query, key, value and sinks, in their dtype; the last is empty without sinks."""
    tensors, core = [_rows(t) for t in (query, key, value)], library.core()
    grad, out, lse = grad.float().contiguous(), out.contiguous(), lse.contiguous()
    places = rules, spans, offset, scale
    call, alive = pack(
        tensors, chosen.contiguous(), *places, out, lse, 0, softcap, window, sinks, bias
    )
    parts = chunks_of(key.shape[0] * key.shape[1], -(-query.shape[2] // LEAST_PART))
    d_query = grad.new_empty(query.shape)
    padded = [core.hyper_padded(ctypes.c_int64(t.shape[-1])) for t in (key, value)]
    sums = [grad.new_zeros(parts, *key.shape[:3], width) for width in padded]
    slots = GRADIENTS.pack(
        grad.data_ptr(), d_query.data_ptr(), parts, *(t.data_ptr() for t in sums)
    )
    core.hyper_selected_backward(call, slots)
    del alive
    d_key, d_value = (
        t.sum(0)[..., : like.shape[-1]].to(like.dtype).clone()
        for t, like in zip(sums, (key, value), strict=True)
    )
    d_sinks = grad.new_empty(0) if sinks is None else _gradient_of_sinks(grad, sinks, out, lse)
    return d_query.to(query.dtype), d_key, d_value, d_sinks


@gradients.register_fake
def _(
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


def _save(ctx, inputs, output):
    *tensors, ctx.rules, ctx.spans, ctx.offset, ctx.scale, ctx.softcap, ctx.window, sinks, bias = (
        inputs
    )
    ctx.save_for_backward(*output, *tensors, sinks, bias)


def _pullback(ctx, grad, _):
    *saved, sinks, bias = ctx.saved_tensors
    rest = ctx.rules, ctx.spans, ctx.offset, ctx.scale, ctx.softcap, ctx.window
    *found, of_sinks = gradients(grad, *saved, *rest, sinks, bias)
    return *found, *[None] * 7, None if sinks is None else of_sinks, None


def _gradient_of_sinks(grad: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """[H]: a sink has no value, so that its weight counts with minus the output."""
    top, share = lse  # a share of 0: padding, which sees nothing
    weight = torch.where(share > 0, torch.exp(sinks.float()[:, None] - top) * share, 0.0)
    return -(weight * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


forward.register_autograd(_pullback, setup_context=_save)
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
    """What `chosen_pages` returns."""
    tensors = [_rows(t) for t in (query, key, key)]
    shape = _choice_shape(query, key.shape[2], rules, earlier)
    chosen = query.new_empty(shape, dtype=torch.int32) if kept is None else kept.clone()
    out = query.new_empty(0, dtype=torch.float32)
    call, alive = pack(tensors, chosen, rules, spans, offset, 1.0, out, out, earlier, window=window)
    empty = MATRIX.pack(0, 0, 0, 0)
    of_heads = b"".join(
        MATRIX.pack(t.data_ptr(), *t.stride()[:3]) if t.numel() else empty for t in summaries
    )
    matrices = ctypes.create_string_buffer(of_heads or empty * query.shape[1])
    slots = CHOICE.pack(earlier, chosen.data_ptr(), ctypes.addressof(matrices))
    library.core().hyper_selected_choice(call, slots)
    del alive, matrices
    return chosen


choice = torch.library.custom_op("hf_hyperattn::selected_choice", compute_choice, mutates_args=())


def is_direct(*tensors: Tensor) -> bool:
    """Whether torch needs to know nothing of a call: it wants no gradients, and nobody counts or records operators.

    For one generated token torch's dispatcher takes longer than the kernel.
    """
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not (learned or is_recorded() or torch._C._len_torch_dispatch_stack())


def _choice_shape(query: Tensor, keys: int, rules: Sequence[int], earlier: int) -> tuple[int, int]:
    shapes = _shapes_of(
        rules, query.shape[2] - earlier, keys
    )  # numbers may be symbols here, which have no hash
    return query.shape[0], sum(chunks * most for chunks, most in shapes)


@choice.register_fake
def _(query, key, rules, spans, offset, earlier, summaries, kept=None, window=0):
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
    """The pages that chunks of queries choose: of equal scores the first pages; arithmetic is float32.

    Args:
        query, key, rules, spans: as in `selected_attention`; no gradient passes.
        offset: where query 0 stands.
        earlier: so many of the first queries are there for the choice alone.
        summaries: of each head the pages' summaries as `page_summaries` makes them, of all pages that are complete, or
            None; none: they are made from the keys.
        kept: what this returned for an earlier query of the same chunks: heads whose rule is by `KEPT` have that.
        window: the host's sliding window. A page is not chosen if the window hides one of its keys before the chunk
            ends.

    Returns:
        The pages, as `selected_attention` takes them.
    """
    starts, stops = spans or ([0] * len(query), [key.shape[2]] * len(query))
    _check_spans(starts, stops, key.shape[2])
    flat = _flat(tuple(rules))
    layout = layout_of(flat, query.shape[2] - earlier, key.shape[2])
    if kept is not None:
        _check_choice(kept.rows, len(query), layout)
    elif any(rule.by == KEPT for rule in rules):
        raise ValueError("selected attention: a head's choice is said to be kept; give kept")
    query, key = query.detach(), key.detach()
    run = compute_choice if is_direct() else choice
    rows = [query.new_empty(0) if of_head is None else of_head.rows for of_head in summaries]
    known = None if kept is None else kept.rows
    places = flat, [*starts, *stops], offset, earlier
    return Lists(run(query, key, *places, rows, known, window or 0), layout.shapes)


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
    """Write summaries of pages: the mean of their keys, or with bounds the largest and then the least, by channel.

    Args:
        key: [B, Hkv, M, d], float32 or bfloat16, on the CPU.
        out: float32 [B, Hkv, P, d], with bounds [B, Hkv, P, 2 d].
        page: keys of a page.
        starts: of each row its first key. begin, end: of each row the pages that are written, all of them complete.
    """
    key = _rows(key)
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
    shape = batch, layout.places
    if chosen.shape != shape or chosen.dtype != torch.int32:
        raise ValueError(
            f"selected attention: chosen is {chosen.dtype} {list(chosen.shape)} where these queries and rules have"
            f" int32 "
            f"{list(shape)}; give what chosen_pages returns"
        )


def _check_spans(starts: Sequence[int], stops: Sequence[int], keys: int) -> None:
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
    """Causal attention with a rule for every head.

    Args:
        query: [B, H, N, d], float32 or bfloat16; query i stands at key i + offset.
        key, value: [B, Hkv, M, d] and [B, Hkv, M, dv].
        rules: one for each query head.
        chosen: the pages of each chunk, all before its opening. None: no pages are chosen.
        spans: of each batch element the first key that is no padding, and the end of those; positions, chunks and pages
            count from the first. None: all are keys.
        scale: of the logits; None: 1 / sqrt(d).
        softcap: logits become softcap · tanh(logit / softcap).
        window: the host's sliding window: a query sees no key that stands `window` or more places before it.
        sinks: [H], a logit of each head that takes part in the softmax and has no value.
        bias: [B, H, M], added to the logits of each key, after the softcap; it gets no gradient.

    Returns:
        [B, H, N, dv] in the dtype of the query; 0 for queries before the first key.

    Raises:
        ValueError: rules, pages or spans do not fit the call.
    """
    batch, heads, n, d = query.shape
    if len(rules) != heads:
        raise ValueError(
            f"selected attention: {len(rules)} rules for {heads} heads; give one HeadRule a head"
        )
    flat = _flat(tuple(rules))
    layout = layout_of(flat, n, key.shape[2])
    if chosen is None:
        chosen = Lists(query.new_full((batch, layout.places), -1, dtype=torch.int32), layout.shapes)
    starts, stops = spans or ([0] * batch, [key.shape[2]] * batch)
    _check_spans(starts, stops, key.shape[2])
    _check_choice(chosen.rows, batch, layout)
    scale = float(d**-0.5 if scale is None else scale)
    run = (
        compute
        if is_direct(query, key, value, *(t for t in (sinks,) if t is not None))
        else forward
    )
    extras = softcap or 0.0, window or 0, sinks, bias
    out, _ = run(query, key, value, chosen.rows, flat, [*starts, *stops], offset, scale, *extras)
    return out.to(query.dtype)
