"""Compute key-tied attention by the GPU kernel for listed keys (engines/triton/listed.py).

This module shows how closed blocks become keys of that kernel.

All tokens of a closed block of w tokens have the same logit and, together, the block's mean value
(docs/hsa.md). So the block is one key, the mean of its keys, with log(w) and the block bias added
to its logit. The kernel gets the means of all levels before the tokens, as *summaries*, and for
each query a list of the means that it attends to. It finds near and first tokens by itself. Tokens of
blocks that refinement opened are listed.

Means are computed in float32 and rounded to the dtype of the tokens, as the kernel reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ....engines import Options, repeat_heads, triton
from ....engines.selected import ROWS, SUMMARIES, HeadRule, shapes_of_choice
from ....engines.selection import Lists
from ...selection.best import select_best
from ..config import Rule
from ..open_blocks import is_seen
from .native import Levels, span_lists

#: Most numbers of the lists, or of the scores of refinement, that exist at a time.
MOST_NUMBERS = 2**23
#: Most bytes of keys and values that are copied at a time. One key head is copied even if it has more.
MOST_COPIED = 2**25


def find_obstacle(query: Tensor, value: Tensor, options: Options) -> str | None:
    """Return why the kernel cannot compute a call; None if it can.

    Args:
        query, value, options: As in `key.attend_keys`, with windows, and without mask, bias,
            sliding window, dropout and weights.
    """
    if not options.is_causal:
        return "it is not causal"
    return triton.find_selected_obstacle(query, value)


def attend_listed(
    query: Tensor, levels: Levels, rule: Rule, options: Options, scale: float
) -> Tensor:
    """Compute causal attention with tied keys; gradients reach all tensors.

    Args:
        query: [B, H, N, d].
        levels: Tokens, and means or none of them. Nothing is evicted.
        rule: As `key.spread_heads` returns it.
        options: `offset` and `sinks` are read.
        scale: Factor of q·k.

    Returns:
        [B, H, N, dv] in the dtype of the query, or float32 if the tokens have another one.
    """
    query, levels = share_dtype(query, levels)
    learnable = [query, levels.keys[0], levels.values[0], rule.block_bias, options.sinks]
    is_learned = torch.is_grad_enabled() and any(
        t.requires_grad for t in learnable if isinstance(t, Tensor)
    )
    shape = *query.shape[:3], levels.values[0].shape[3]
    out = None if is_learned else query.new_empty(shape)
    of_heads = []
    for key_heads in split_key_heads(levels):
        call, heads = cut_heads(key_heads, query, levels, rule, options, scale)
        parts = []
        for queries in call.split_queries():
            part = call.attend(queries)
            if out is None:
                parts.append(part)
            else:
                # Parts and their concatenation would hold the output twice.
                out[:, heads, queries.start : queries.stop] = part
        if out is None:
            of_heads.append(torch.cat(parts, 2))
    return torch.cat(of_heads, 1) if out is None else out


def split_key_heads(levels: Levels) -> list[slice]:
    """Return the key heads whose tokens and means are copied at a time."""
    key, value = levels.keys[0], levels.values[0]
    of_head = sum(t[:, :1].numel() * t.element_size() for t in (key, value))
    step = max(1, MOST_COPIED // max(1, of_head))
    return [slice(first, first + step) for first in range(0, key.shape[1], step)]


def cut_heads(
    key_heads: slice, query: Tensor, levels: Levels, rule: Rule, options: Options, scale: float
) -> tuple[TiedCall, slice]:
    """Return the call of some key heads, and the query heads that share them.

    Args:
        key_heads: From `split_key_heads`.
        query, levels, rule, options, scale: As in `attend_listed`.
    """
    group = query.shape[1] // levels.keys[0].shape[1]
    heads = slice(key_heads.start * group, key_heads.stop * group)
    keys, values = (
        tuple(t[:, key_heads] for t in tables) for tables in (levels.keys, levels.values)
    )
    bias, sinks = (None if t is None else t[heads] for t in (rule.block_bias, options.sinks))
    near, first_tokens, top_k = (x[heads] for x in (rule.near, rule.sinks, rule.refine_top_k))
    call = TiedCall(
        query[:, heads],
        replace(levels, keys=keys, values=values),
        replace(rule, near=near, sinks=first_tokens, refine_top_k=top_k, block_bias=bias),
        replace(options, sinks=sinks),
        scale,
    )
    return call, heads


def share_dtype(query: Tensor, levels: Levels) -> tuple[Tensor, Levels]:
    """Return query and tokens in one dtype: their own, or float32 if they have several."""
    key, value = levels.keys[0], levels.values[0]
    if len({t.dtype for t in (query, key, value)}) == 1:
        return query, levels
    keys, values = (key.float(), *levels.keys[1:]), (value.float(), *levels.values[1:])
    return query.float(), replace(levels, keys=keys, values=values)


class TiedCall:
    """A call in the form that the kernel reads.

    Args:
        query, levels, rule, options, scale: As in `attend_listed`.

    Attributes:
        sizes: Window sizes, bottom first, without those that no query finds closed.
        means: Means of keys over the windows of each level, [B, Hkv, n_l, d], float32.
        summaries: Number of means of a head.
        key, value: [B, Hkv, summaries + M, d] and [..., dv], the means of all levels, bottom first,
            and then the tokens.
        bias: float32 [B, H, summaries + M], added to the logits.
        spans: First real row of each batch element among these, and the end of its real rows.
    """

    def __init__(self, query: Tensor, levels: Levels, rule: Rule, options: Options, scale: float):
        self.query, self.rule, self.options, self.scale = query, rule, options, scale
        key, value = (tables[0] for tables in (levels.keys, levels.values))
        batch, _, length, _ = key.shape
        self.starts, stops = span_lists(batch, length, levels.starts, levels.stops)
        # A window as long as the text is open to all its queries. One size stays, for the near
        # tokens.
        count = max(1, sum(size < length for size in levels.sizes))
        self.sizes: tuple[int, ...] = levels.sizes[:count] or (max(1, length),)
        has_means = len(levels.keys) > 1
        self.means, values = (
            self._cut_incomplete(tables[1 : count + 1], length)
            if has_means
            else pool_complete(tables[0], self.sizes, self.starts)
            for tables in (levels.keys, levels.values)
        )
        self.means, values = (self._hide_padding(tables, stops) for tables in (self.means, values))
        self.counts = tuple(t.shape[2] for t in self.means)
        self.summaries = sum(self.counts)
        self.key = torch.cat([*(t.to(key.dtype) for t in self.means), key], 2)
        self.value = torch.cat([*(t.to(value.dtype) for t in values), value], 2)
        self.spans = (
            [self.summaries + start for start in self.starts],
            [self.summaries + stop for stop in stops],
        )
        self.bias = self._make_bias()

    def attend(self, queries: range) -> Tensor:
        """Return the output of some queries, [B, H, n, dv]."""
        from ....engines.triton.selected import kernel  # Triton may be missing.

        query, hidden = self.query[:, :, queries.start : queries.stop], self._find_padding(queries)
        if hidden is not None:
            # NaN there would reach the gradients of keys, although the output is dropped.
            query = query.masked_fill(hidden, 0.0)
        out = kernel.attend(
            query,
            self.key,
            self.value,
            *self.list_rows(queries),
            spans=self.spans,
            offset=self.summaries + self.options.offset + queries.start,
            scale=self.scale,
            summaries=self.summaries,
            sinks=self.options.sinks,
            bias=self.bias,
        )
        return out if hidden is None else out.masked_fill(hidden, 0.0)

    def _find_padding(self, queries: range) -> Tensor | None:
        """Return the queries behind the text, bool [B, 1, n, 1]; None if there are none."""
        first, last = (self.options.offset + at for at in (queries.start, queries.stop))
        ends = [stop - self.summaries for stop in self.spans[1]]
        if min(ends, default=last) >= last:
            return None
        place = torch.arange(first, last, device=self.query.device)
        return (place >= torch.tensor(ends, device=place.device)[:, None])[:, None, :, None]

    def _cut_incomplete(self, tables: Sequence[Tensor], length: int) -> list[Tensor]:
        """Return given means without that of a last window which is not complete."""
        return [t[:, :, : length // size] for t, size in zip(tables, self.sizes, strict=True)]

    def _hide_padding(self, means: list[Tensor], stops: list[int]) -> list[Tensor]:
        """Return means with zeros for the windows that end behind a text.

        Only queries behind the text list them. But these share tiles with queries of the text, and
        NaN times a weight of 0 is NaN.
        """
        ends = [stop - start for start, stop in zip(self.starts, stops, strict=True)]
        hidden = []
        for t, size in zip(means, self.sizes, strict=True):
            if any(end < t.shape[2] * size for end in ends):
                last = (1 + torch.arange(t.shape[2], device=t.device)) * size
                is_hidden = last > torch.tensor(ends, device=t.device)[:, None]
                t = t.masked_fill(is_hidden[:, None, :, None], 0.0)
            hidden.append(t)
        return hidden

    def _make_bias(self) -> Tensor:
        """Return what is added to the logits: log(w) and the block bias for means of w tokens."""
        batch, heads = self.query.shape[:2]
        parts = [
            torch.full((count,), math.log(size), dtype=torch.float32, device=self.query.device)
            for count, size in zip(self.counts, self.sizes, strict=True)
        ]
        of_blocks = torch.cat(parts).expand(heads, -1)
        if self.rule.block_bias is not None:
            of_blocks = of_blocks + self.rule.block_bias.float()[:, None]
        bias = torch.nn.functional.pad(of_blocks, (0, self.key.shape[2] - self.summaries))
        return bias.expand(batch, -1, -1)

    def split_queries(self) -> list[range]:
        """Return the queries whose lists are made at a time."""
        batch, heads, n, _ = self.query.shape
        longest = 1
        if any(self.rule.refine_top_k):
            longest = self.summaries + max(self.rule.refine_top_k) * self.sizes[0]
        # Without refinement, the queries of a window share a list.
        of_query = max(1, batch * heads) * max(1, longest, self.summaries // self.sizes[0])
        step = max(self.sizes[0], MOST_NUMBERS // of_query)
        return [range(first, min(first + step, n)) for first in range(0, n, step)] or [range(0)]

    def list_rows(self, queries: range) -> tuple[list[HeadRule], Lists]:
        """Return the rules that the kernel computes, and the rows that queries attend to.

        Args:
            queries: A range of the queries of the call.
        """
        heads_of: dict[tuple[int, int, int], list[int]] = {}
        numbers = zip(self.rule.near, self.rule.sinks, self.rule.refine_top_k, strict=True)
        for head, numbers_of_head in enumerate(numbers):
            heads_of.setdefault(numbers_of_head, []).append(head)
        rules: dict[int, HeadRule] = {}
        tables: dict[int, Tensor] = {}
        for (near, sinks, top_k), heads in heads_of.items():
            if top_k:
                lists = self._list_refined(queries, heads, near, sinks, top_k)
            else:
                lists = self._list_closed(queries, near, sinks)
            head_rule = make_head_rule(self.sizes[0], near, sinks, bool(top_k), lists.shape[3])
            for place, head in enumerate(heads):
                rules[head] = head_rule
                tables[head] = lists[:, place if top_k else 0].flatten(1)
        in_order = [rules[head] for head in range(len(rules))]
        rows = torch.cat([tables[head] for head in range(len(tables))], 1)
        return in_order, Lists(rows, shapes_of_choice(in_order, len(queries), self.key.shape[2]))

    def _place_first_queries(self, queries: range) -> list[int]:
        """Return the position of the first real query of each row of the batch."""
        return [max(0, self.options.offset + queries.start - start) for start in self.starts]

    def _list_closed(self, queries: range, near: int, sinks: int) -> Tensor:
        """Return the closed blocks that the queries of each window attend to.

        Returns:
            int32 [B, 1, windows, most], numbers of summaries, and -1 behind them. The first window
            is that of the first real query.
        """
        size = self.sizes[0]
        first = tuple(place // size for place in self._place_first_queries(queries))
        # Without padding all rows of the batch have the same lists.
        lists = list_closed_blocks(
            self.sizes,
            self.counts,
            near,
            sinks,
            first[:1] if len(set(first)) == 1 else first,
            len(queries) // size + 2,
            self.query.device,
        )
        return lists.expand(len(first), -1, -1)[:, None]

    def _list_refined(
        self, queries: range, heads: list[int], near: int, sinks: int, top_k: int
    ) -> Tensor:
        """Return the rows that each query attends to besides near and first tokens.

        Returns:
            int32 [B, heads, queries + 2, most], closed blocks and tokens of opened ones, and -1
            behind them. The first query is the first real one.
        """
        if not len(queries):
            return self.query.new_full((len(self.starts), len(heads), 2, 0), -1, dtype=torch.int32)
        # Each list belongs to one query. The last two lists belong to none, and more of them in a
        # row with padding.
        place = torch.arange(len(queries) + 2, device=self.query.device)
        first = torch.tensor(self._place_first_queries(queries), device=place.device)[:, None]
        starts = torch.tensor(self.starts, device=place.device)[:, None]
        place = first + place
        index = place + starts - self.options.offset - queries.start
        is_there = (index < len(queries))[:, None, :, None]
        index = index.clamp_max(len(queries) - 1)[:, None, :, None]
        asking = self.query[:, :, queries.start : queries.stop].detach()
        numbers = max(1, place.numel()) * max(1, self.counts[0])
        step = max(1, MOST_NUMBERS // numbers)
        parts = []
        for at in range(0, len(heads), step):
            some_heads = heads[at : at + step]
            query = asking[:, some_heads].float()
            query = query.gather(2, index.expand(-1, len(some_heads), -1, query.shape[3]))
            means = [
                repeat_heads(t.detach().float(), asking.shape[1])[:, some_heads] for t in self.means
            ]
            scores = [query @ t.mT * self.scale for t in means]
            parts.append(
                self._open_best(scores, place[:, None, :, None], is_there, near, sinks, top_k)
            )
        most = max(t.shape[3] for t in parts)
        parts = [torch.nn.functional.pad(t, (0, most - t.shape[3]), value=-1) for t in parts]
        return torch.cat(parts, 1)

    def _open_best(
        self,
        scores: list[Tensor],
        place: Tensor,
        is_there: Tensor,
        near: int,
        sinks: int,
        top_k: int,
    ) -> Tensor:
        """Open the blocks with the largest scores, level by level, and return the rows.

        Args:
            scores: Mean logits of the blocks of each level, [B, heads, queries, n_l].
            place: Positions of the queries, [B, 1, queries, 1].
            is_there: Bool, False for lists without a query.
            near, sinks, top_k: Of the heads.
        """
        closed: list[Tensor] = []
        opened = torch.zeros_like(scores[-1], dtype=torch.bool)
        for level in range(len(scores), 0, -1):
            score, size = scores[level - 1], self.sizes[level - 1]
            block = torch.arange(score.shape[3], device=score.device)
            candidates = is_seen(self.sizes, level, block, place, near, sinks) & is_there
            if level < len(scores):
                # Children of opened blocks are candidates on their own level.
                children = opened.repeat_interleave(self.sizes[level] // size, 3)
                spare = score.shape[3] - children.shape[3]
                candidates = candidates | torch.nn.functional.pad(children, (0, spare))
            opened = select_best(score + math.log(size), candidates, top_k)
            closed.insert(0, candidates & ~opened)
        blocks = list_marked(torch.cat(closed, 3))
        opened_blocks = list_marked(opened, top_k)[..., None]
        tokens = opened_blocks * self.sizes[0] + torch.arange(self.sizes[0], device=place.device)
        tokens = (tokens + self.summaries).masked_fill(opened_blocks < 0, -1).flatten(3)
        return torch.cat([blocks, tokens], 3).to(torch.int32)


def make_head_rule(window: int, near: int, sinks: int, is_refined: bool, top: int) -> HeadRule:
    """Return the rule of a head in the kernel's form.

    Args:
        window: Tokens of the smallest windows.
        near, sinks: As in `config.Rule`.
        is_refined: Whether each query lists rows of its own.
        top: Most rows of a list.
    """
    # The kernel rounds down to whole windows from the query on; HSA counts from the first token of
    # the query's window. With a multiple of the window both give the same token.
    windows = -(-(max(near, 1) - 1) // window)
    return HeadRule(
        near=windows * window + 1,
        sinks=-(-sinks // window) * window,
        page=window,
        chunk=1 if is_refined else window,
        top=top,
        by=ROWS if is_refined else SUMMARIES,
    )


def list_marked(marks: Tensor, most: int | None = None) -> Tensor:
    """Return the numbers of the marked entries of each row, ascending, and -1 behind them.

    Args:
        marks: Bool [..., X].
        most: No row has more marks; None: the largest count is read.
    """
    count = marks.shape[-1]
    if most is None:
        most = int(marks.sum(-1).max()) if marks.numel() else 0
    number = torch.arange(count, device=marks.device).where(marks, count)
    number = number.topk(min(most, count), largest=False).values
    return number.masked_fill(number == count, -1)


# The layers of a model ask for the same lists, one after the other. A long prompt has several lists
# for each rule (`split_queries`).
@lru_cache(maxsize=32)
def list_closed_blocks(
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    near: int,
    sinks: int,
    first: tuple[int, ...],
    windows: int,
    device: torch.device,
) -> Tensor:
    """Return the closed blocks that the queries of some windows attend to.

    Args:
        sizes: Window sizes, bottom first.
        counts: Number of blocks of each level.
        near, sinks: As in `config.Rule`.
        first: Numbers of the first windows, one for each row of the result.
        windows: Number of windows.
        device: Of the result.

    Returns:
        int32 [rows, windows, most], see `list_marked`. Blocks of all levels count on, bottom first.
    """
    window = torch.tensor(first, dtype=torch.long, device=device)[:, None]
    place = (window + torch.arange(windows, device=device))[..., None] * sizes[0]
    seen = [
        is_seen(sizes, level, torch.arange(count, device=device), place, near, sinks)
        for level, count in enumerate(counts, 1)
    ]
    return list_marked(torch.cat(seen, 2)).to(torch.int32)


def pool_complete(t: Tensor, sizes: Sequence[int], starts: Sequence[int]) -> list[Tensor]:
    """Return the means over complete windows of each size, float32 [B, H, M // w, e].

    Args:
        t: [B, H, M, e].
        sizes: Window sizes w, bottom first, each dividing the next.
        starts: First real token of each row, where its windows begin. Windows that would end
            behind the text repeat the last token.
    """
    if any(starts):
        length = t.shape[2]
        index = torch.tensor(list(starts), device=t.device)[:, None]
        index = (index + torch.arange(length, device=t.device)).clamp_max(length - 1)
        t = t.gather(2, index[:, None, :, None].expand_as(t))
    means, width = [], 1
    for size in sizes:
        branching = size // width
        count = t.shape[2] // branching
        t = (
            t[:, :, : count * branching]
            .unflatten(2, (count, branching))
            .mean(3, dtype=torch.float32)
        )
        means.append(t)
        width = size
    return means
