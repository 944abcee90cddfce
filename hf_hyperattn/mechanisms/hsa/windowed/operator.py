"""Key-tied attention over windows as one operator, with its gradient: one node for the compiler and for export.

Rows of a batch with the same padding, and heads with the same rules, are computed together; the compiled kernel takes
them all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....engines.options import full_precision
from . import native, windows
from .cover import Cover
from .means import span_lists, spans
from .windows import Gradients, Rows


@dataclass
class Call:
    """The operator's arguments, taken apart: tensors or their gradients, and what is asked."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    extras: dict[str, Tensor]

    @classmethod
    def parse(cls, tensors: Sequence[Tensor], extras: str, sizes: Sequence[int]) -> Call:
        """From the flat tensors that autograd hands over.

        Args:
            tensors: query, keys and values of every level, then the extras.
            extras: names of the extras, with spaces between them.
            sizes: of the windows, one a level above the tokens.
        """
        levels, names = len(sizes) + 1, extras.split()
        found = list(tensors)
        return cls(
            found[0],
            found[1 : 1 + levels],
            found[1 + levels : 1 + 2 * levels],
            dict(zip(names, found[1 + 2 * levels :], strict=True)),
        )


@dataclass(frozen=True)
class Part:
    """Rows of a batch and heads that are computed alike, and which of the queries stand at real tokens.

    Args:
        cover: what is open, for queries and keys counted from `start`.
        rows, heads: of the batch and of the query heads.
        start, stop: the real tokens of these rows. queries: slice of those that are real.
    """

    cover: Cover
    rows: list[int]
    heads: list[int]
    start: int
    stop: int
    queries: slice
    offset: int

    @property
    def first(self) -> int:
        """Position of the first real query."""
        return self.offset + self.queries.start - self.start


def compiled(query: Tensor, backend: str) -> bool:
    """Whether the compiled kernel computes the call."""
    if backend == "torch":
        return False
    if native.serves(query):
        return True
    if backend == "native":
        raise ValueError(
            f"backend='native' cannot compute {query.dtype} on {query.device} here; allowed: float32 on the CPU, "
            "with a C++ compiler installed; use backend='auto'"
        )
    return False


def parts(
    query: Tensor, length: int, starts, stops, sizes, near, sinks, top_k, is_causal: bool, offset: int
) -> Iterator[Part]:
    """The call cut into parts."""
    batch, heads, n, _ = query.shape
    settings: dict[tuple[int, int, int], list[int]] = {}
    for h in range(heads):
        settings.setdefault((near[h], sinks[h], top_k[h]), []).append(h)
    for (start, stop), together in spans(batch, length, starts, stops).items():
        queries = slice(max(0, start - offset), min(n, stop - offset))
        if queries.stop <= queries.start:
            continue
        for (close, front, opened), which in settings.items():
            flat = close >= stop - start
            cover = Cover(() if flat else tuple(sizes), close, front, opened, is_causal, stop - start)
            yield Part(cover, together, which, start, stop, queries, offset)


def select(t: Tensor, rows: list[int], heads: list[int]) -> Tensor:
    """Rows and heads of [B, H, ...], as a view where all are wanted."""
    t = t if rows == list(range(t.shape[0])) else t[rows]
    return t if heads == list(range(t.shape[1])) else t[:, heads]


def grouped(part: Part, heads: int, kv_heads: int) -> tuple[list[int], int]:
    """The key heads that a part needs, and how many of its query heads share each one, in order."""
    group = heads // kv_heads
    if part.heads == list(range(heads)):
        return list(range(kv_heads)), group
    return [h // group for h in part.heads], 1


def rows_of(part: Part, call: Call, scale: float) -> tuple[Rows, list[Tensor], Tensor | None]:
    """Queries and keys, values, and the sink's logits of a part, grouped by key heads."""
    kv, group = grouped(part, call.query.shape[1], call.keys[0].shape[1])
    query = select(call.query, part.rows, part.heads)[:, :, part.queries] * scale
    query = query.unflatten(1, (len(kv), group)).flatten(0, 1)
    levels = len(part.cover.sizes) + 1
    keys, values = (
        [select(t, part.rows, kv)[:, :, span].flatten(0, 1) for t, span in zip(tables[:levels], _spans(part))]
        for tables in (call.keys, call.values)
    )
    bias, sink = (
        None if t is None else t[part.heads].view(len(kv), group).repeat(len(part.rows), 1)
        for t in (call.extras.get("block_bias"), call.extras.get("sink_logit"))
    )
    return Rows(part.cover, part.first, query, keys, bias), values, sink


def _spans(part: Part) -> list[slice]:
    return [slice(part.start, part.stop), *[slice(None)] * len(part.cover.sizes)]


@torch.library.custom_op("hf_hyperattn::key_tied", mutates_args=())
def forward(
    tensors: Sequence[Tensor],
    extras: str,
    starts: Tensor | None,
    stops: Tensor | None,
    sizes: Sequence[int],
    near: Sequence[int],
    sinks: Sequence[int],
    top_k: Sequence[int],
    is_causal: bool,
    offset: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The operator: output [B, H, N, dv] and log-sum-exp [B, H, N] (+inf where a query sees nothing)."""
    call = Call.parse(tensors, extras, sizes)
    if compiled(call.query, backend):
        limits = span_lists(len(call.query), call.keys[0].shape[2], starts, stops)
        return native.forward(call.query, call.keys, call.values, call.extras.get("block_bias"),
                              call.extras.get("sink_logit"), limits, sizes, near, sinks, top_k, is_causal, offset,
                              scale)  # fmt: skip
    out = call.query.new_zeros(*call.query.shape[:3], call.values[0].shape[-1])
    lse = call.query.new_full(call.query.shape[:3], float("inf"))
    length = call.keys[0].shape[2]
    for part in parts(call.query, length, starts, stops, sizes, near, sinks, top_k, is_causal, offset):
        here, values, sink = rows_of(part, call, scale)
        found = windows.forward(here, values, sink)
        for whole, t in zip((out, lse), found, strict=True):
            _write(whole, t.unflatten(0, (len(part.rows), -1)).flatten(1, 2), part)
    return out, lse


def _write(whole: Tensor, t: Tensor, part: Part) -> None:
    """Put what was found for a part, [rows, heads, n, ...], in its place."""
    rows, heads = torch.tensor(part.rows)[:, None], torch.tensor(part.heads)[None]
    whole[:, :, part.queries][rows, heads] = t


@forward.register_fake
def _(tensors, extras, starts, stops, sizes, *_):
    call = Call.parse(tensors, extras, sizes)
    out = call.query.new_empty(*call.query.shape[:3], call.values[0].shape[-1])
    return out, call.query.new_empty(call.query.shape[:3])


@torch.library.custom_op("hf_hyperattn::key_tied_backward", mutates_args=())
def backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    extras: str,
    starts: Tensor | None,
    stops: Tensor | None,
    sizes: Sequence[int],
    near: Sequence[int],
    sinks: Sequence[int],
    top_k: Sequence[int],
    is_causal: bool,
    offset: int,
    scale: float,
    backend: str,
) -> list[Tensor]:
    """Gradients of all tensors, by computing every tile again."""
    call = Call.parse(tensors, extras, sizes)
    if compiled(call.query, backend):
        limits = span_lists(len(call.query), call.keys[0].shape[2], starts, stops)
        query, keys, values, *heads = native.backward(
            grad, out, lse, call.query, call.keys, call.values, call.extras.get("block_bias"),
            call.extras.get("sink_logit"), limits, sizes, near, sinks, top_k, is_causal, offset, scale,
        )  # fmt: skip
        named = dict(zip(("block_bias", "sink_logit"), heads))
        return [query, *keys, *values, *(named[name].clone() for name in call.extras)]
    buffers = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
    whole = Call.parse(buffers, extras, sizes)
    length = call.keys[0].shape[2]
    for part in parts(call.query, length, starts, stops, sizes, near, sinks, top_k, is_causal, offset):
        here, values, sink = rows_of(part, call, scale)
        into = Gradients(
            torch.zeros_like(here.query),
            [torch.zeros_like(t) for t in here.keys],
            [torch.zeros_like(t) for t in values],
            None if here.block_bias is None else torch.zeros_like(here.block_bias),
            None if sink is None else torch.zeros_like(sink),
        )
        of_rows = (
            select(t, part.rows, part.heads)[:, :, part.queries].reshape(*here.query.shape[:3], *t.shape[3:])
            for t in (out, lse, grad)
        )
        with full_precision(grad.device):  # backward may be called under autocast
            windows.backward(here, values, *of_rows, into, sink)
        _collect(whole, into, part)
    whole.query.mul_(scale)
    return buffers


def _collect(whole: Call, into: Gradients, part: Part) -> None:
    """Add a part's gradients to those of the call."""
    kv, _ = grouped(part, whole.query.shape[1], whole.keys[0].shape[1])
    rows = len(part.rows)
    query = into.query.unflatten(0, (rows, -1)).flatten(1, 2)
    _write(whole.query, query, part)
    for tables, found in ((whole.keys, into.keys), (whole.values, into.values)):
        for table, t, span in zip(tables, found, _spans(part)):
            where = (torch.tensor(part.rows)[:, None], torch.tensor(kv)[None])
            table[:, :, span].index_put_(where, t.unflatten(0, (rows, -1)), accumulate=True)
    for name, t in (("block_bias", into.block_bias), ("sink_logit", into.sink_logit)):
        if name in whole.extras:
            whole.extras[name][part.heads] += t.unflatten(0, (rows, -1)).sum(0).flatten()


@backward.register_fake
def _(grad, out, lse, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _save(ctx, inputs, output):
    tensors, ctx.extras, starts, stops, *rest = inputs
    ctx.rest, ctx.starts, ctx.stops = rest, starts, stops
    ctx.save_for_backward(*output, *tensors)


def _pullback(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    grads = backward(grad.contiguous(), out, lse, tensors, ctx.extras, ctx.starts, ctx.stops, *ctx.rest)
    sizes, *rest = ctx.rest
    none = [] if not sizes else None  # the dispatcher takes an empty list for one of tensors
    return grads, None, None, None, none, *[None] * len(rest)


forward.register_autograd(_pullback, setup_context=_save)
