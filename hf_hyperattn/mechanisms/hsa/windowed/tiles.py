"""Key-tied attention over windows in plain torch, tile by tile: any device, forward and backward, never N x M numbers.

Rows of a batch with the same padding, and heads with the same rules, are computed together. A tile is a few bottom
windows of queries against their cover: the front and the top level are one product for all queries; the ranges that
move with the query are gathered once a window; only refinement gathers for every query. Backward computes every tile
again from the saved log-sum-exp. `keys` and `values` are tables of what can be attended to, bottom first: the tokens
(level 0), then the means of the windows of each level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree.masked_tree import weighted_sum
from .cover import Cover
from .means import rows_by_span

#: Numbers that the largest intermediate of one tile may have: on a CPU a few of its caches, elsewhere enough work.
TILE_ELEMENTS = 2**20
DEVICE_TILE_ELEMENTS = 2**26


def forward(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], block_bias, sink_logit, spans, *rules
) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and log-sum-exp [B, H, N], +inf where a query sees nothing; arguments as in `parts`."""
    out = query.new_zeros(*query.shape[:3], values[0].shape[-1])
    lse = query.new_full(query.shape[:3], float("inf"))
    for part in parts(query, keys, block_bias, spans, *rules):
        tables, sink = part.tables(values), part.per_head(sink_logit)
        part_out = out.new_empty(*part.query.shape[:3], out.shape[-1])
        part_lse = out.new_empty(part.query.shape[:3])
        for tile in part.tiles():
            numbers, total = tile.softmax(tables, sink)
            part_out[tile.heads, :, tile.here] = tile.unpadded(numbers)
            part_lse[tile.heads, :, tile.here] = tile.unpadded(total)[..., 0]
        part.write(out, part_out)
        part.write(lse, part_lse)
    return out, lse


def backward(
    grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, keys, values, block_bias, sink_logit, spans, *rules
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
    """Gradients of query, keys, values, block bias [H] and sink [H] (0 where there is none)."""
    zeros = lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format)
    g_query, g_keys, g_values = zeros(query), [*map(zeros, keys)], [*map(zeros, values)]
    g_bias, g_sink = (query.new_zeros(query.shape[1]) for _ in range(2))
    for part in parts(query, keys, block_bias, spans, *rules):
        tables, sink = part.tables(values), part.per_head(sink_logit)
        part_out, part_lse, part_grad = map(part.of_queries, (out, lse, grad))
        delta = (part_grad * part_out).sum(-1)
        into = part.gradients(tables)
        if sink is not None:
            part.add_per_head(g_sink, -(torch.exp(sink[..., None] - part_lse) * delta).sum(-1))
        for tile in part.tiles():
            tile.back(tables, part_grad, delta, part_lse, into)
        part.write(g_query, into.query * rules[-1])  # the scale
        part.add_tables(g_keys, into.keys)
        part.add_tables(g_values, into.values)
        part.add_per_head(g_bias, into.block_bias)
    return g_query, g_keys, g_values, g_bias, g_sink


def parts(
    query: Tensor, keys: Sequence[Tensor], block_bias: Tensor | None, spans, sizes, near, sinks, top_k,
    is_causal: bool, offset: int, scale: float,
) -> Iterator[CoverPart]:  # fmt: skip
    """The call cut into parts that have one cover each.

    Args:
        query: [B, H, N, d]. keys: tables [B, Hkv, n_l, d]. block_bias: [H] or None.
        spans: first real token of every row, and one past the last.
        sizes: of windows. near, sinks, top_k: one a head.
        offset: query i is token `offset + i`.
    """
    rules: dict[tuple[int, int, int], list[int]] = {}
    for head, rule in enumerate(zip(near, sinks, top_k)):
        rules.setdefault(rule, []).append(head)
    for (start, stop), rows in rows_by_span(*spans).items():
        queries = slice(max(0, start - offset), min(query.shape[2], stop - offset))
        if queries.stop <= queries.start:
            continue
        for rule, heads in rules.items():
            flat = rule[0] >= stop - start
            cover = Cover(() if flat else tuple(sizes), *rule, is_causal, stop - start)
            yield CoverPart(cover, rows, heads, start, queries, offset, scale, query, keys, block_bias)


@dataclass
class Gradients:
    """Where the tiles of a part add their gradients: like its queries, keys, values and block bias."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    block_bias: Tensor


class CoverPart:
    """Rows of a batch and heads with one cover, and their queries of consecutive positions that are real.

    Shapes: Z is rows times key heads, G the query heads that share one. query: [Z, G, n, d], scaled; keys: tables
    [Z, n_l, d]; bias [Z, G].
    """

    def __init__(
        self, cover: Cover, rows: list[int], heads: list[int], start: int, queries: slice, offset: int, scale: float,
        query: Tensor, keys: Sequence[Tensor], block_bias: Tensor | None,
    ):  # fmt: skip
        self.cover, self.rows, self.heads, self.queries = cover, rows, heads, queries
        self.span, self.first = slice(start, start + cover.tokens), offset + queries.start - start
        group = query.shape[1] // keys[0].shape[1]
        together = heads == list(range(query.shape[1]))  # else each head gets keys of its own
        self.kv_heads = list(range(keys[0].shape[1])) if together else [h // group for h in heads]
        self.group = group if together else 1
        self.query, self.keys = self.of_queries(query) * scale, self.tables(keys)
        zeros = self.query.new_zeros(self.query.shape[:2])
        bias = self.per_head(block_bias)
        self.bias = zeros if bias is None else bias

    def of_queries(self, t: Tensor) -> Tensor:
        """[Z, G, n, ...] of [B, H, N, ...]."""
        t = _select(t, self.rows, self.heads)[:, :, self.queries]
        return t.unflatten(1, (len(self.kv_heads), self.group)).flatten(0, 1)

    def write(self, whole: Tensor, t: Tensor) -> None:
        """Put [Z, G, n, ...] in its place in [B, H, N, ...]."""
        rows, heads = torch.tensor(self.rows)[:, None], torch.tensor(self.heads)[None]
        whole[:, :, self.queries][rows, heads] = t.unflatten(0, (len(self.rows), -1)).flatten(1, 2)

    def tables(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """[Z, n_l, e] of the levels of the cover; of tokens the real ones."""
        chosen = [_select(t, self.rows, self.kv_heads) for t in tables[: self.cover.top + 1]]
        return [(t if level else t[:, :, self.span]).flatten(0, 1) for level, t in enumerate(chosen)]

    def add_tables(self, whole: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
        """Add tables [Z, n_l, e] to those of the call."""
        where = torch.tensor(self.rows)[:, None], torch.tensor(self.kv_heads)[None]
        for level, (to, t) in enumerate(zip(whole, tables)):
            to = to if level else to[:, :, self.span]
            to.index_put_(where, t.unflatten(0, (len(self.rows), -1)), accumulate=True)

    def per_head(self, t: Tensor | None) -> Tensor | None:
        """[Z, G] of [H]."""
        return None if t is None else t[self.heads].view(-1, self.group).repeat(len(self.rows), 1)

    def add_per_head(self, whole: Tensor, t: Tensor) -> None:
        """Add [Z, G], summed over rows, to [H]."""
        whole[self.heads] += t.unflatten(0, (len(self.rows), -1)).sum(0).flatten()

    def gradients(self, values: Sequence[Tensor]) -> Gradients:
        """Zeros to add gradients to."""
        zeros = lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format)  # `spread` writes into views
        return Gradients(zeros(self.query), [*map(zeros, self.keys)], [*map(zeros, values)], zeros(self.bias))

    def tiles(self) -> Iterator[WindowTile]:
        """The queries cut at bottom windows, in a fixed order."""
        heads, group, n, dim = self.query.shape
        size, end = self.cover.bottom(), self.first + n
        each = self._numbers(group * (size if n > 1 else 1), max(dim, 1))
        most = TILE_ELEMENTS if self.query.device.type == "cpu" else DEVICE_TILE_ELEMENTS
        together = max(1, min(heads, most // each))
        many = max(1, most // (each * together))
        for z in range(0, heads, together):
            at = self.first
            while at < end:
                stop = min(end, (at // size + many) * size)
                yield WindowTile(self, slice(z, z + together), at, stop)
                at = stop

    def _numbers(self, queries: int, dim: int) -> int:
        """About how many numbers the largest intermediates of one bottom window with `queries` queries have."""
        cover = self.cover
        middle = torch.tensor([cover.tokens // 2 // cover.bottom()])
        ranges = [cover.moving(level, middle) for level in range(cover.top)]
        round_window = sum(int(last - first) for first, last in ranges)
        logits = queries * (round_window + sum(cover.front(level) for level in range(cover.top + 1)))
        opened = cover.top_k * max([cover.branching(level) for level in range(1, cover.top + 1)], default=0)
        return max(logits, round_window * dim, queries * opened * dim, 1)


def _select(t: Tensor, rows: list[int], heads: list[int]) -> Tensor:
    """Rows and heads of [B, H, ...], as a view where all are wanted."""
    t = t if rows == list(range(t.shape[0])) else t[rows]
    return t if heads == list(range(t.shape[1])) else t[:, heads]


@dataclass
class SeenBlocks:
    """Some of what a tile attends to: `logits` [Z, T, Q, C] of the blocks `index` of `level`, hidden ones at -inf.

    index: an int C for the first C blocks, or [T, C], or [Z, T, Q, C].
    """

    level: int
    index: int | Tensor
    logits: Tensor

    def combine(self, weights: Tensor, table: Tensor) -> Tensor:
        """[Z, T, Q, e]: the sum of rows of `table` [Z, n, e] with `weights` [Z, T, Q, C]."""
        if isinstance(self.index, int):
            sums = weighted_sum(weights.flatten(1, 2), table[:, : self.index])
            return sums.unflatten(1, weights.shape[1:3])
        rows = gather(table, self.index)
        if self.index.dim() == 2:
            return weighted_sum(weights, rows)
        return weighted_sum(weights.unsqueeze(-2), rows).squeeze(-2)

    def spread(self, weights: Tensor, rows: Tensor, into: Tensor) -> None:
        """Add to `into` [Z, n, e] the transpose of `combine`: weights [Z, T, Q, C] times rows [Z, T, Q, e]."""
        if isinstance(self.index, int):
            into[:, : self.index] += weights.flatten(1, 2).mT @ rows.flatten(1, 2)
            return
        if self.index.dim() == 2:
            index, sums = self.index.expand(len(into), -1, -1), weights.mT @ rows
        else:
            index, sums = self.index, weights.unsqueeze(-1) * rows.unsqueeze(-2)
        offsets = torch.arange(len(into), device=into.device) * into.shape[1]
        index = (index.flatten(1) + offsets[:, None]).flatten()
        into.view(-1, into.shape[2]).index_add_(0, index, sums.reshape(-1, into.shape[2]))

    def blocks(self) -> Tensor:
        """The blocks by number, int64, broadcastable to the logits."""
        if isinstance(self.index, int):
            return torch.arange(self.index, device=self.logits.device)
        return self.index[:, None] if self.index.dim() == 2 else self.index


class WindowTile:
    """The queries of a part at positions [start, stop), filled up to whole bottom windows, against their cover.

    Z of the key heads, T windows, Q queries of a window, of all heads that share keys: query [Z, T, Q, d].
    """

    def __init__(self, part: CoverPart, heads: slice, start: int, stop: int):
        self.part, self.cover, self.heads, device = part, part.cover, heads, part.query.device
        size = self.cover.bottom()
        low, rows = (start, 1) if stop - start == 1 else (start // size * size, size)
        self.count = -(-(stop - low) // rows)
        self.here, self.inside = slice(start - part.first, stop - part.first), slice(start - low, stop - low)
        self.rows = self.count * rows
        self.query, self.keys = self.padded(part.query), [table[heads] for table in part.keys]
        places = (low + torch.arange(self.rows, device=device)).view(self.count, rows)
        self.positions, self.windows = places.repeat(1, part.group), places[:, 0] // size
        self.block_bias = self.per_query(part.bias)

    def padded(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """[Z, T, Q, e] of the part's [Z, G, n, e], with rows of `fill` round the queries."""
        t = t[self.heads, :, self.here]
        padded = t.new_full((*t.shape[:2], self.rows, t.shape[3]), fill)
        padded[:, :, self.inside] = t
        return padded.unflatten(2, (self.count, -1)).transpose(1, 2).flatten(2, 3)

    def unpadded(self, t: Tensor) -> Tensor:
        """[Z, G, n, e] of [Z, T, Q, e]."""
        t = t.unflatten(2, (self.part.group, -1)).transpose(1, 2).flatten(2, 3)
        return t[:, :, self.inside]

    def per_query(self, t: Tensor) -> Tensor:
        """[Z, 1, Q, 1] of the part's [Z, G]."""
        return t[self.heads].repeat_interleave(self.rows // self.count, -1)[:, None, :, None]

    def softmax(self, values: Sequence[Tensor], sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp [Z, T, Q, 1]; the sink's logits [Z, G] take part without a value."""
        seen = self.seen()
        top = torch.stack([s.logits.amax(-1) for s in seen]).amax(0)[..., None]
        sink = None if sink is None else self.per_query(sink)
        top = top if sink is None else torch.maximum(top, sink)
        top = top.clamp_min(torch.finfo(top.dtype).min)
        weights = [s.logits.sub_(top).exp_() for s in seen]
        total = torch.stack([w.sum(-1, keepdim=True) for w in weights]).sum(0)
        total = total if sink is None else total + torch.exp(sink - top)
        total = total.clamp_min(torch.finfo(top.dtype).tiny)
        sums = sum(s.combine(w, values[s.level][self.heads]) for s, w in zip(seen, weights))
        return sums / total, top + total.log()

    def back(self, values: Sequence[Tensor], grad: Tensor, delta: Tensor, lse: Tensor, into: Gradients) -> None:
        """Add the tile's gradients; the selection of blocks has none."""
        grad, delta = self.padded(grad), self.padded(delta[..., None])
        lse = self.padded(lse[..., None], float("inf"))
        query = torch.zeros_like(self.query)
        for s in self.seen():
            weights = torch.exp(s.logits - lse)
            if self.inside.stop - self.inside.start < self.rows:  # rows round the queries, whose logits may be NaN
                weights.masked_fill_(lse.isposinf(), 0.0)
            s.spread(weights, grad, into.values[s.level][self.heads])
            g_logits = product(grad, values[s.level][self.heads], s.index).sub_(delta).mul_(weights)
            if not g_logits.sum().isfinite():  # hidden values may be NaN
                g_logits.masked_fill_(weights == 0, 0.0)
            query += s.combine(g_logits, self.keys[s.level])
            s.spread(g_logits, self.query, into.keys[s.level][self.heads])
            if s.level:
                tied = g_logits.masked_fill(self.tokens(s) <= 1, 0.0).sum((1, 3))
                into.block_bias[self.heads] += tied.unflatten(1, (self.part.group, -1)).sum(-1)
        into.query[self.heads, :, self.here] += self.unpadded(query)

    def seen(self) -> list[SeenBlocks]:
        """The whole cover, from the top level down."""
        cover, opened = [], None
        for level in range(self.cover.top, 0, -1):
            here = [*self.standing(level), *([] if opened is None else [self.candidates(level, *opened)])]
            if self.cover.top_k and here:
                opened = self.refine(level, here)
            for s in here:
                tokens = self.tokens(s)
                s.logits += torch.log(tokens)
                s.logits += torch.where(tokens > 1, self.block_bias, 0.0)  # a block of one token is that token
            cover += here
        cover += self.standing(0)
        return cover if opened is None else [*cover, self.candidates(0, *opened)]

    def standing(self, level: int) -> list[SeenBlocks]:
        """What the rules without score leave of `level`: closed blocks, or tokens for level 0."""
        cover = self.cover
        standing: list[SeenBlocks] = []
        if not cover.blocks(level):
            return standing
        front = cover.front(level)
        if front:
            index = torch.arange(front, device=self.query.device)
            standing.append(self.look_at(level, front, self.hidden(level, index)))
        first, last = cover.moving(level, self.windows)
        width = int((last - first).max())
        if width:
            index = first[:, None] + torch.arange(width, device=self.query.device)
            hidden = self.hidden(level, index) | ((index < front) | (index >= last[:, None]))[:, None]
            standing.append(self.look_at(level, index.clamp(0, cover.blocks(level) - 1), hidden))
        return standing

    def hidden(self, level: int, index: Tensor) -> Tensor:
        """Bool [T, Q or 1, C]: what of `index` [C] or [T, C] takes no part."""
        if level:
            return self.cover.hidden(level, index, self.windows)[:, None]
        index = index.expand(len(self.windows), -1)[:, None]
        hidden = (index < 0) | (index >= self.cover.tokens)
        return hidden | (index > self.positions[:, :, None]) if self.cover.is_causal else hidden

    def look_at(self, level: int, index: int | Tensor, hidden: Tensor) -> SeenBlocks:
        """Logits of the tile for the blocks `index` of a level, -inf where `hidden`."""
        logits = product(self.query, self.keys[level], index)
        return SeenBlocks(level, index, logits.masked_fill_(hidden, float("-inf")))

    def candidates(self, level: int, index: Tensor, hidden: Tensor) -> SeenBlocks:
        """The children that refinement has laid open."""
        blocks = self.cover.blocks(level)
        return self.look_at(level, index.clamp_max(blocks - 1), hidden | (index >= blocks))

    def tokens(self, seen: SeenBlocks) -> Tensor:
        """Real tokens of the blocks, broadcastable to the logits."""
        return self.cover.sizes_of(seen.level, seen.blocks()).to(self.query.dtype)

    def refine(self, level: int, seen: list[SeenBlocks]) -> tuple[Tensor, Tensor]:
        """Take the best `top_k` blocks out of `seen`; their children's index [Z, T, Q, k·f] and what of it is void.

        Equal scores go to the lower index.
        """
        shape = (*self.query.shape[:3], -1)
        scores = torch.cat([s.logits + torch.log(self.tokens(s)) for s in seen], -1).detach()
        index = torch.cat([s.blocks().expand(shape) for s in seen], -1)
        order = index.argsort(-1)
        order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        order = order[..., : self.cover.top_k]
        best = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
        for s, here in zip(seen, best.split([s.logits.shape[-1] for s in seen], -1), strict=True):
            s.logits.masked_fill_(here, float("-inf"))
        branching = self.cover.branching(level)
        children = index.gather(-1, order).unsqueeze(-1) * branching
        children = children + torch.arange(branching, device=index.device)
        void = torch.isneginf(scores.gather(-1, order)).unsqueeze(-1).expand(children.shape)
        return children.flatten(-2), void.flatten(-2)


def gather(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` [Z, n, e]: [Z, T, C, e] for an index [T, C], [Z, T, Q, C, e] for [Z, T, Q, C]."""
    if index.dim() == 2:
        return table[:, index]
    heads = torch.arange(len(table), device=table.device).view(-1, 1, 1, 1)
    return table[heads, index]


def product(query: Tensor, table: Tensor, index: int | Tensor) -> Tensor:
    """Logits [Z, T, Q, C] of query [Z, T, Q, d] with rows of `table` [Z, n, d]."""
    if isinstance(index, int):
        return (query.flatten(1, 2) @ table[:, :index].mT).unflatten(1, query.shape[1:3])
    rows = gather(table, index)
    return query @ rows.mT if index.dim() == 2 else (rows @ query.unsqueeze(-1)).squeeze(-1)
