"""Key-tied attention over windows (math.md A4; arXiv 2509.15448): pool keys and values once, then attend.

`key_tied` does both. `pool` and `attend` are the two halves, for callers that keep the means of earlier windows, such
as a cache: a new token changes one mean of every level, and `attend` reads only what the query's cover holds. Two
implementations agree: plain torch (windows.py), and for CPU a compiled kernel (native.py), which has no backward of
its own. For the compiler and for export the operator is one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engines import working_dtype
from ...hierarchy import Hierarchy, Tree
from ...hierarchy.windows import checked_sizes, windows_tree
from . import rows, windows
from .windows import Gradients, Rows, Rule

#: What `backend` of `key_tied` may say.
BACKENDS = ("auto", "torch", "native", "rows")


@dataclass(frozen=True)
class Levels:
    """What can be attended to, bottom first: level 0 are the tokens, level l the means over windows of `sizes[l-1]`.

    Args:
        sizes: window sizes, bottom first, each dividing the next.
        keys: for every level, [B, Hkv, n_l, d]. Level 0 is as the call has it, padding included; block b of a level
            above holds the tokens start + b·w .. start + (b+1)·w - 1 of its row. Causal queries read complete blocks
            only, so the last incomplete one may be missing then.
        values: likewise, [B, Hkv, n_l, dv].
        starts: int64 [B], the first real token of every row; None: 0.
        stops: int64 [B], one past the last real token; None: all.
    """

    sizes: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    starts: Tensor | None = None
    stops: Tensor | None = None


def pool(
    key: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    starts: Tensor | None = None,
    stops: Tensor | None = None,
) -> Levels:
    """Means of keys and values over windows of every level, in O(M).

    Args:
        key: [B, Hkv, M, d]. value: [B, Hkv, M, dv]. Any floating dtype; means are float32, float64 for float64.
        sizes: window sizes, bottom first, each dividing the next.
        starts, stops: the real tokens of every row, int64 [B]; windows start at the first one.
    """
    dtype = working_dtype(key)
    key, value = key.to(dtype), value.to(dtype)
    keys, values = ((t, *_means(t, tuple(sizes), starts, stops)) for t in (key, value))
    return Levels(tuple(sizes), keys, values, starts, stops)


def _means(t: Tensor, sizes: tuple[int, ...], starts: Tensor | None, stops: Tensor | None) -> list[Tensor]:
    """[B, H, ceil(M / w), e] for every w of `sizes`; a mean without tokens is 0."""
    length, place = t.shape[2], torch.arange(t.shape[2], device=t.device)
    count = torch.full((1,), length, device=t.device)
    if starts is not None or stops is not None:
        first = torch.zeros_like(count) if starts is None else starts.to(t.device)
        count = (count if stops is None else stops.to(t.device)) - first
        index = (first[:, None] + place).clamp_max(length - 1).expand(len(t), -1)
        t = t.gather(2, index[:, None, :, None].expand(t.shape))
        t = t.masked_fill((place >= count[:, None])[:, None, :, None], 0.0)
    found, width = [], 1
    for size in sizes:
        blocks = -(-t.shape[2] * width // size) if width == 1 else -(-t.shape[2] // (size // width))
        t = torch.nn.functional.pad(t, (0, 0, 0, blocks * (size // width) - t.shape[2]))
        t = t.unflatten(2, (blocks, size // width)).sum(3)
        inside = (count[:, None] - size * torch.arange(blocks, device=t.device)).clamp(1, size)
        found.append(t / inside[:, None, :, None])
        width = size
    return found


def key_tied(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy | Sequence[int],
    *,
    starts: Tensor | None = None,
    stops: Tensor | None = None,
    near: int | Sequence[int] | Tensor = 0,
    sinks: int | Sequence[int] | Tensor = 0,
    refine_top_k: int | Sequence[int] | Tensor = 0,
    block_bias: float | Tensor | None = None,
    is_causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    column: Tensor | None = None,
    sink_logit: Tensor | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    weights: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """softmax(S')·V with tied keys; S = scale · q·k + column + bias.

    Args:
        query: [B, H, N, d]; query i is the token `offset + i`: a full pass, the last N of M tokens, or a single step.
        key: [B, Hkv, M, d], Hkv dividing H. value: [B, Hkv, M, dv].
        hierarchy: of the M keys; or window sizes, bottom first, each dividing the next (() is the flat tree).
        starts, stops: with window sizes, the real tokens of every row, int64 [B]. Padding is never seen; a padded
            query gives 0.
        near, sinks, refine_top_k: integers, one for all heads or one per query head. near >= M is exact attention.
        block_bias: added to the logit of closed blocks, a number or [H]; -inf drops them; None: 0.
        is_causal: query i sees tokens up to its own. Windows then count as continued to the right.
        scale: None: 1/sqrt(d).
        column: a term of the key alone, [B, Hkv or H, M], averaged over blocks like the logits.
        sink_logit: one extra logit per head [H] that takes part in the softmax and has no value.
        window: a sliding window: only keys with i - j < window, and where not causal j - i < window, are seen.
        mask: bool (True = take part) or additive. bias: added to the logits. Both broadcast to [B, H, N, M].
        dropout_p: probability that the weight of a pair is dropped.
        weights: also return the attention weights [B, H, N, M].
        backend: "auto", "torch", "native" (the compiled kernel), or "rows" (the general way).

    Returns:
        [B, H, N, dv], float32, or float64 for float64 inputs; and the weights or None. Of blocks with equal scores,
        refinement opens the one that stands first. Gradients reach all tensors; the choice of blocks has none.
        Windows without mask, bias, sliding window, dropout and weights are computed in O(N · cover); all else in
        O(N · M) time and O(block · M) memory.

    Raises:
        ValueError: a hierarchy of another length or batch size, an unknown backend, or one that cannot do the call.
    """
    query, key = with_column(query, key, column, scale)
    hierarchy = as_hierarchy(hierarchy, starts, stops, key)
    heads = query.shape[1]
    rule = {
        name: per_head(v, heads) for name, v in (("near", near), ("sinks", sinks), ("top_k", refine_top_k))
    }
    extras = {"block_bias": per_head_tensor(block_bias, query), "sink_logit": sink_logit}
    general = why_general(hierarchy, rule["top_k"], is_causal, window, mask, bias, dropout_p, weights, key)
    if general is not None and backend not in ("auto", "rows"):
        raise ValueError(f"backend={backend!r} cannot compute {general}; use backend='auto' or 'rows'")
    if general is None and backend != "rows":
        levels = pool(key, value, hierarchy.sizes, hierarchy.starts, hierarchy.stops)
        return _attend(
            query, levels, extras, **rule, is_causal=is_causal, offset=offset, backend=backend
        ), None
    index = {name: torch.tensor(v, device=query.device) for name, v in rule.items()}
    mask, bias = (t if t is None else t.reshape((1,) * (4 - t.dim()) + tuple(t.shape)) for t in (mask, bias))
    asked = rows.Asked(**index, **extras, is_causal=is_causal, offset=offset, window=window, mask=mask, bias=bias,
                       dropout_p=dropout_p)  # fmt: skip
    trees = trees_of(hierarchy, is_causal)
    return rows.attend(query, key, value.to(key.dtype), trees, asked, weights)


def as_hierarchy(hierarchy, starts: Tensor | None, stops: Tensor | None, key: Tensor) -> Hierarchy:
    """A hierarchy that fits the keys."""
    batch, length = key.shape[0], key.shape[2]
    if not isinstance(hierarchy, Hierarchy):
        return Hierarchy(length, sizes=checked_sizes(hierarchy), starts=starts, stops=stops)
    if hierarchy.length != length or hierarchy.rows not in (1, batch):
        raise ValueError(
            f"hierarchy has {hierarchy.rows} rows of {hierarchy.length} tokens, the keys {batch} of {length}; "
            "allowed: the same length, and one row or as many; Hierarchy.fitted makes it fit"
        )
    return hierarchy


def why_general(hierarchy, top_k, is_causal, window, mask, bias, dropout_p, weights, key) -> str | None:
    """What of a call only the general way computes, None if there is no such thing."""
    asked = {
        "a hierarchy that is not of windows": not hierarchy.is_windows,
        "a mask": mask is not None,
        "a bias": bias is not None,
        "a sliding window": window is not None and window < key.shape[2],
        "dropout": dropout_p > 0,
        "weights": weights,
    }
    for name, there in asked.items():
        if there:
            return name
    if is_causal or not any(top_k):
        return None
    for start, stop in spans(len(key), key.shape[2], hierarchy.starts, hierarchy.stops):
        if Rule(hierarchy.sizes, 0, 0, 0, False, stop - start).has_chains():
            return "refinement where the last window of a level has a single child"
    return None


def trees_of(hierarchy: Hierarchy, is_causal: bool) -> list[tuple[Tree, Tensor]]:
    """Trees with the tokens of their leaves; causal windows are continued until all of them are complete."""
    if not hierarchy.is_windows:
        return list(zip(hierarchy.trees, hierarchy.tokens, strict=True))
    found, trees = [], {}
    for start, stop in map(hierarchy.span, range(hierarchy.rows)):
        whole = hierarchy.sizes[-1] if hierarchy.sizes and is_causal else 1
        count = -(-(stop - start) // whole) * whole
        if count not in trees:
            trees[count] = windows_tree(count, hierarchy.sizes)
        tokens = torch.arange(start, start + count)
        tokens[stop - start :] = hierarchy.length  # leaves to come, which no query sees
        found.append((trees[count], tokens))
    return found


def with_column(
    query: Tensor, key: Tensor, column: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Scaled query and key whose product is scale · q·k + column: the column is one more key feature."""
    dtype = working_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key = query.to(dtype) * scale, key.to(dtype)
    if column is None:
        return query, key
    if column.shape[1] != key.shape[1]:
        key = key.repeat_interleave(column.shape[1] // key.shape[1], 1)
    key = torch.cat([key, column.to(dtype)[..., None]], -1)
    return torch.cat([query, torch.ones_like(query[..., :1])], -1), key


def attend(
    query: Tensor,
    levels: Levels,
    *,
    near: int | Sequence[int] | Tensor = 0,
    sinks: int | Sequence[int] | Tensor = 0,
    refine_top_k: int | Sequence[int] | Tensor = 0,
    block_bias: float | Tensor | None = None,
    is_causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    sink_logit: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The second half of `key_tied`: attention to tokens and means that are there already. Arguments as there.

    A single causal query reads O(near + sinks + top_k · Σ branching + blocks of the top level) of `levels`.
    """
    heads, dtype = query.shape[1], levels.keys[0].dtype
    query = query.to(dtype) * (query.shape[-1] ** -0.5 if scale is None else scale)
    extras = {"block_bias": per_head_tensor(block_bias, query), "sink_logit": sink_logit}
    rule = {
        name: per_head(v, heads) for name, v in (("near", near), ("sinks", sinks), ("top_k", refine_top_k))
    }
    return _attend(query, levels, extras, **rule, is_causal=is_causal, offset=offset, backend=backend)


def _attend(
    query: Tensor, levels: Levels, extras: dict, near, sinks, top_k, is_causal, offset, backend
) -> Tensor:
    extras = {name: t.to(query.dtype) for name, t in extras.items() if t is not None}
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    tensors = [query, *levels.keys, *levels.values, *extras.values()]
    out, _ = _forward(tensors, " ".join(extras), levels.starts, levels.stops, list(levels.sizes), near, sinks, top_k,
                      is_causal, offset, backend)  # fmt: skip
    return out


def per_head(value: int | Sequence[int] | Tensor, heads: int) -> list[int]:
    """One integer per head."""
    found = value.tolist() if isinstance(value, Tensor) else value
    found = [int(found)] * heads if isinstance(found, int | float) else [int(v) for v in found]
    return found * heads if len(found) == 1 else found


def per_head_tensor(value: float | Tensor | None, like: Tensor) -> Tensor | None:
    """One number per head, as a tensor [H]."""
    if value is None:
        return None
    value = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)
    return value.expand(like.shape[1]).contiguous()


@dataclass
class Call:
    """The operator's arguments, taken apart: tensors or their gradients, and what is asked."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    extras: dict[str, Tensor]

    @classmethod
    def parse(cls, tensors: Sequence[Tensor], extras: str, sizes: Sequence[int]) -> Call:
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
        rule: what is open, for queries and keys counted from `start`.
        rows, heads: of the batch and of the query heads.
        start, stop: the real tokens of these rows. queries: slice of those that are real.
    """

    rule: Rule
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


def spans(batch: int, length: int, starts: Tensor | None, stops: Tensor | None) -> dict:
    """Rows of a batch by (start, stop)."""
    starts = [0] * batch if starts is None else starts.tolist()
    stops = [length] * batch if stops is None else stops.tolist()
    found: dict[tuple[int, int], list[int]] = {}
    for row in range(batch):
        span = (starts[row % len(starts)], min(stops[row % len(stops)], length))
        found.setdefault(span, []).append(row)
    return found


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
            rule = Rule(() if flat else tuple(sizes), close, front, opened, is_causal, stop - start)
            yield Part(rule, together, which, start, stop, queries, offset)


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


def rows_of(part: Part, call: Call) -> tuple[Rows, list[Tensor], Tensor | None]:
    """Queries and keys, values, and the sink's logits of a part, grouped by key heads."""
    kv, group = grouped(part, call.query.shape[1], call.keys[0].shape[1])
    query = select(call.query, part.rows, part.heads)[:, :, part.queries]
    query = query.unflatten(1, (len(kv), group)).flatten(0, 1)
    levels = len(part.rule.sizes) + 1
    keys, values = (
        [select(t, part.rows, kv)[:, :, span].flatten(0, 1) for t, span in zip(tables[:levels], _spans(part))]
        for tables in (call.keys, call.values)
    )
    bias, sink = (
        None if t is None else t[part.heads].view(len(kv), group).repeat(len(part.rows), 1)
        for t in (call.extras.get("block_bias"), call.extras.get("sink_logit"))
    )
    return Rows(part.rule, part.first, query, keys, bias), values, sink


def _spans(part: Part) -> list[slice]:
    return [slice(part.start, part.stop), *[slice(None)] * len(part.rule.sizes)]


@torch.library.custom_op("hf_hyperattn::key_tied", mutates_args=())
def _forward(
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
    backend: str,
) -> tuple[Tensor, Tensor]:
    call = Call.parse(tensors, extras, sizes)
    out = call.query.new_zeros(*call.query.shape[:3], call.values[0].shape[-1])
    lse = call.query.new_full(call.query.shape[:3], float("inf"))
    length = call.keys[0].shape[2]
    for part in parts(call.query, length, starts, stops, sizes, near, sinks, top_k, is_causal, offset):
        here, values, sink = rows_of(part, call)
        found = windows.forward(here, values, sink)
        for whole, t in zip((out, lse), found, strict=True):
            _write(whole, t.unflatten(0, (len(part.rows), -1)).flatten(1, 2), part)
    return out, lse


def _write(whole: Tensor, t: Tensor, part: Part) -> None:
    """Put what was found for a part, [rows, heads, n, ...], in its place."""
    rows, heads = torch.tensor(part.rows)[:, None], torch.tensor(part.heads)[None]
    whole[:, :, part.queries][rows, heads] = t


@_forward.register_fake
def _(tensors, extras, starts, stops, sizes, *_):
    call = Call.parse(tensors, extras, sizes)
    out = call.query.new_empty(*call.query.shape[:3], call.values[0].shape[-1])
    return out, call.query.new_empty(call.query.shape[:3])


@torch.library.custom_op("hf_hyperattn::key_tied_backward", mutates_args=())
def _backward(
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
) -> list[Tensor]:
    call = Call.parse(tensors, extras, sizes)
    buffers = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
    whole = Call.parse(buffers, extras, sizes)
    length = call.keys[0].shape[2]
    for part in parts(call.query, length, starts, stops, sizes, near, sinks, top_k, is_causal, offset):
        here, values, sink = rows_of(part, call)
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
        windows.backward(here, values, *of_rows, into, sink)
        _collect(whole, into, part)
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


@_backward.register_fake
def _(grad, out, lse, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _save(ctx, inputs, output):
    tensors, ctx.extras, starts, stops, *rest = inputs
    ctx.rest, ctx.starts, ctx.stops = rest[:-1], starts, stops
    ctx.save_for_backward(*output, *tensors)


def _pullback(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    grads = _backward(grad.contiguous(), out, lse, tensors, ctx.extras, ctx.starts, ctx.stops, *ctx.rest)
    return grads, *[None] * (4 + len(ctx.rest))


_forward.register_autograd(_pullback, setup_context=_save)
