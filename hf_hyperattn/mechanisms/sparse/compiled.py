"""Sparse attention by the compiled kernel (engines/cpu/selected.py), which computes the visible pairs alone.

It takes heads that are exact, have a window, or choose pages, of causal calls whose masks hide padding, later tokens,
and what lies outside the host's sliding window. Other heads and other calls go by masks, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ...attached import attached_to
from ...engines import DOT, Options, PairScore, attention, dot_score, repeat_heads
from ...engines.cpu import selected
from ...engines.cpu.selected import BY, KEPT, HeadRule, shapes_of_choice
from ...engines.selection import Lists, Summaries
from ...readable import can_read
from ..selection.cache import LayerCache
from ..selection.places import Reading
from .head_rules import HeadRules, Rules
from .masking import Text, masked, rule_call
from .pages import PageRule, Pages
from .pages_kept import LastChoice, summaries_of
from .rules import Exact, SparseRule, Window

#: More tokens than any text has.
EVERYTHING = 2**40
Spans = tuple[list[int], list[int]]


def attend(
    query: Tensor,
    key: Tensor,
    score: PairScore,
    value: Tensor,
    options: Options,
    rules: HeadRules,
    text: Text,
    window: int | None = None,
    backend: str = "auto",
    asker: str = "",
) -> Tensor | None:
    """The output [B, H, N, dv] in the dtype of the query; None where the kernel does not compute this call.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d]; rules choose keys by these.
        score: gives the logits. The kernel computes dot products alone.
        value: [B, Hkv, M, dv].
        options, rules, window: as in `masking.masked`.
        text: where queries and keys stand, and the queries before them.
        backend: the engine that was asked for.
        asker: the layer's name, under which the cache keeps its choice.
    """
    if (
        not text.reading.is_causal
        or backend not in ("auto", "cpu")
        or not is_served(score, options, key.shape[2])
    ):
        return None
    given = query, key, score.raw_query, score.raw_key, value
    if not selected.serves(*given):
        return None
    last, n = text.last, query.shape[2]
    if last is None or last > key.shape[2]:  # not known, or queries after the last key
        return None
    if options.mask is None and window not in (None, options.window) and window < key.shape[2]:
        return None  # nothing says that this call hides what lies outside the host's window
    spans = spans_of(text.reading, window)
    if spans is None or not text.reaches(n):
        return None
    stretches = stretches_of(rules, spans[0], last - n, n)
    if not stretches:
        return None
    known = [kernel_rules(rules, place, query.shape[3]) for place, _ in stretches]
    # A head goes by masks if the kernel does not know its rule in some stretch.
    rest = [h for h, of_head in enumerate(zip(*known, strict=True)) if None in of_head]
    if len(rest) == query.shape[1]:
        return None
    # The kernel reads one dtype; under autocast rotated queries and keys are float32, and values are rounded.
    dtype = query.dtype if len({t.dtype for t in given}) == 1 else torch.float32
    asking, searched, values = query.to(dtype), key.to(dtype), value.to(dtype)
    raw_query = asking if score.raw_query is query else score.raw_query.to(dtype)
    raw_key = searched if score.raw_key is key else score.raw_key.to(dtype)
    earlier = 0
    if text.before is not None:
        asking, earlier = torch.cat([text.before.to(dtype), asking], 2), text.before.shape[2]
    bias = bias_of_keys(options.bias, query, key)
    parts = []
    for heads, (place, queries) in zip(known, stretches, strict=True):
        # Heads that the kernel does not know get the cheapest rule. Their output is replaced below.
        of_heads = [HeadRule(1) if rule is None else rule for rule in heads]
        first, stop, chosen = queries.start, queries.stop, None
        if any(rule.page for rule in of_heads):
            own = lists_by_head(
                rules.by_length[place][1], query, key, score.scale, text, window, queries
            )
            chosen = chosen_pages(
                asking[:, :, : earlier + stop],
                searched,
                of_heads,
                spans,
                last - n + stop,
                len(queries),
                asker,
                window,
                own,
            )
        part = selected.selected_attention(
            raw_query[:, :, first:stop],
            raw_key,
            values,
            of_heads,
            chosen,
            spans=spans,
            offset=last - n + first,
            scale=score.scale,
            softcap=options.softcap,
            window=window,
            sinks=options.sinks,
            bias=bias,
        )
        parts.append(part)
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    out = zero_hidden_rows(out.to(query.dtype), text.reading)
    if not rest:
        return out
    others = by_masks(rest, query, key, score, value, options, rules, text, window)
    return out.index_copy(1, torch.tensor(rest), others.to(out.dtype))


def stretches_of(
    rules: HeadRules, starts: list[int], offset: int, queries: int
) -> list[tuple[int, range]] | None:
    """Cut the queries of a call into stretches, with one rule a head for each.

    Args:
        rules: of the heads.
        starts: the first real key of each row.
        offset: the key that is query 0's own.
        queries: how many there are.

    Returns:
        The place in `rules.by_length` and the queries of each stretch; None where rows that begin at different keys are
        cut at different queries.
    """
    found, first = [], 0
    for place, length in enumerate(rules.lengths[:-1]):
        stops = {
            min(max(start + (length or 0) - offset, first), queries) for start in starts or [0]
        }
        if len(stops) > 1:
            return None
        stop = stops.pop()
        if stop > first:
            found.append((place, range(first, stop)))
        first = stop
    if first < queries:
        found.append((len(rules.lengths) - 1, range(first, queries)))
    return found


def zero_hidden_rows(out: Tensor, reading: Reading) -> Tensor:
    """The output [B, H, N, dv] with zeros at the queries from which the mask hides every key.

    The kernel gets no mask, only where the real keys begin and end: it lets padding attend to the real keys before it.
    """
    if reading.mask is None or reading.places.is_whole or not reading.has_padded_queries:
        return out
    return out.masked_fill(~reading.sees_something, 0.0)


def chosen_pages(
    query: Tensor,
    key: Tensor,
    rules: Sequence[HeadRule],
    spans: Spans,
    last: int,
    queries: int,
    asker: str,
    window: int | None,
    own: dict[int, Tensor],
) -> Lists:
    """The pages that the last `queries` queries choose, as `selected.chosen_pages` has them.

    Summaries and earlier choices that the cache of these keys keeps are used.

    Args:
        query: the queries of this call, after earlier ones that are known.
        queries: how many are of this call.
        last: the number of keys up to the last query, padding included.
        window: the host's sliding window.
        own: the pages of heads whose rules choose them in torch, see `lists_by_head`.
    """
    cache = attached_to(key, LayerCache) if last == key.shape[2] else None
    earlier, offset = query.shape[2] - queries, last - query.shape[2]
    summaries: list[Summaries | None] = []
    if cache is not None:  # the summary of a page of one key is that key, which nobody keeps twice
        summaries = [
            summaries_of(cache, key, r.page, r.bounds, spans[0])
            if r.page > 1 and h not in own
            else None
            for h, r in enumerate(rules)
        ]

    def choose(rules: Sequence[HeadRule], kept: Lists | None) -> Lists:
        if own:
            kept = put_lists(own, rules, kept, key, queries)
        return selected.chosen_pages(
            query,
            key,
            rules,
            spans=spans,
            offset=offset,
            earlier=earlier,
            summaries=summaries,
            kept=kept,
            window=window,
        )

    if cache is None or queries > 1:
        return choose(rules, None)
    return cache.kept(("choice", asker), LastChoice).choose(rules, spans, last, choose)


def lists_by_head(
    rules: Rules,
    query: Tensor,
    key: Tensor,
    scale: float,
    text: Text,
    window: int | None,
    queries: range,
) -> dict[int, Tensor]:
    """The pages of heads whose rules choose them in torch, int32 [B, chunks, most] by head, as `Lists` has them.

    Args:
        rules: one for each head.
        query, key, scale, text, window: of the whole call, as in `attend`.
        queries: a range of the queries of the call.
    """
    listing = {h: own for h, rule in enumerate(rules) if (own := listing_rule(rule)) is not None}
    if not listing:
        return {}
    heads = list(listing)
    group = query.shape[1] // key.shape[1]
    before = None if text.before is None else text.before[:, heads]
    with torch.no_grad():
        shared = key[:, [h // group for h in heads]]
        call = rule_call(query[:, heads], shared, scale, replace(text, before=before), window)
        found: dict[int, Tensor] = {}
        for rule in dict.fromkeys(listing.values()):
            index = [i for i, h in enumerate(heads) if listing[h] == rule]
            lists = rule.list_pages(call.heads(index), queries)
            found |= {heads[i]: of_head for i, of_head in zip(index, lists.unbind(1), strict=True)}
    return found


def listing_rule(rule: SparseRule) -> PageRule | None:
    """Return the rule if it lists its pages in torch; else None.

    The kernel finds the pages of `Pages` itself. It knows which tokens are near: a rule that changes what `PageRule`
    says of them goes by masks.
    """
    if not isinstance(rule, PageRule) or type(rule) is Pages:
        return None
    if (
        rule.query == "own" and rule.chunk != 1
    ):  # a __post_init__ that leaves out that of PageRule, which makes it 1
        return None
    return None if rule.find_changed_method() else rule


def put_lists(
    own: dict[int, Tensor], rules: Sequence[HeadRule], kept: Lists | None, key: Tensor, queries: int
) -> Lists:
    """Return the pages that are known already, with those of the heads in `own`."""
    shapes = shapes_of_choice(rules, queries, key.shape[2])
    if kept is None:
        parts = [torch.full((len(key), *shape), -1, dtype=torch.int32) for shape in shapes]
    else:
        parts = kept.of_heads()
    return Lists(
        torch.cat([own.get(h, part).flatten(1) for h, part in enumerate(parts)], 1), shapes
    )


def by_masks(
    heads: list[int],
    query: Tensor,
    key: Tensor,
    score: PairScore,
    value: Tensor,
    options: Options,
    rules: HeadRules,
    text: Text,
    window: int | None,
) -> Tensor:
    """Some heads alone, [B, len(heads), N, dv], as `masked` has them; arguments as in `attend`."""
    every = query.shape[1]
    of = lambda t: repeat_heads(t, every)[:, heads]
    mask = options.mask
    if mask is not None and mask.ndim == 4 and mask.shape[1] == every:
        mask = mask[:, heads]
    before = None if text.before is None else text.before[:, heads]
    sinks = None if options.sinks is None else options.sinks[heads]
    bias = options.bias
    if bias is not None and bias.ndim == 4 and bias.shape[1] == every:
        bias = bias[:, heads]
    options, text = (
        replace(options, mask=mask, sinks=sinks, bias=bias),
        replace(text, before=before),
    )
    hidden = masked(
        query[:, heads], of(key), score.scale, options, rules.of_heads(heads), text, window
    )
    return attention(
        dot_score(score.raw_query[:, heads], of(score.raw_key), score.scale), of(value), hidden
    )[0]


@lru_cache(maxsize=256)
def kernel_rules(rules: HeadRules, place: int, dim: int) -> tuple[HeadRule | None, ...]:
    """Return the rule of each head for the kernel; None for heads whose rule it does not know.

    Args:
        rules: of the heads; calls of a layer share the object, by which the result is found again.
        place: of the length in `rules.by_length`.
        dim: numbers of a query.
    """
    length, heads = rules.by_length[place]
    if place == len(rules.by_length) - 1:
        length = None  # the last rules hold to the end of the text
    return tuple(None if cuts_chunk(rule, length) else rule_of_head(rule, dim) for rule in heads)


def cuts_chunk(rule: SparseRule, length: int | None) -> bool:
    """Return whether a rule that holds up to a length lacks queries there that a chunk chooses by.

    The kernel gets the queries up to the length alone. `Pages` that choose by the whole chunk also need those after it.
    """
    return (
        length is not None
        and type(rule) is Pages
        and rule.query == "chunk"
        and length % rule.chunk != 0
    )


def rule_of_head(rule: SparseRule, dim: int) -> HeadRule | None:
    """A rule as the kernel takes it; of queries of `dim` numbers."""
    if type(rule) is Exact:
        return HeadRule(EVERYTHING)
    if type(rule) is Window:
        return HeadRule(rule.near, rule.sinks)
    if type(rule) is Pages:
        by, bounds = BY.index(rule.query), int(rule.summary == "bounds")
        return HeadRule(
            rule.near,
            rule.sinks,
            rule.page,
            rule.chunk,
            rule.top,
            bounds,
            by,
            rule.channels_of(dim),
        )
    own = listing_rule(rule)
    return (
        None
        if own is None
        else HeadRule(own.near, own.sinks, own.page, own.chunk, own.top, by=KEPT)
    )


def is_served(score: PairScore, options: Options, keys: int) -> bool:
    """Whether the kernel computes this score with these options.

    It computes dot products, with a softcap, sink logits, and a bias that is the same for all queries. It has no
    gradient of a bias or a mask.
    """
    dot = len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None
    if not dot or options.dropout_p or options.aggregation is not None:
        return False
    bias, mask = options.bias, options.mask
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (bias, mask)):
        return False
    if bias is None:
        return True
    return (
        bias.ndim > 1
        and (bias.shape[-2] == 1 or bias.stride(-2) == 0)
        and bias.shape[-1] in (1, keys)
    )


def bias_of_keys(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """[B, H, M] of a bias that `is_served` allows."""
    return (
        None
        if bias is None
        else bias[..., :1, :].expand(*query.shape[:2], 1, key.shape[2])[:, :, 0]
    )


def spans_of(reading: Reading, window: int | None) -> Spans | None:
    """For each row of the batch the first real key, and the index after the last one.

    None if the mask hides other keys than padding, later ones and those outside the window, if padding stands between
    real keys, if keys were dropped, or if the mask cannot be read.
    """
    places = reading.places
    if reading.mask is None:
        return places.spans if places.is_whole else None
    if places.dropped or not can_read(reading.mask) or not reading.shows_by_place(window):
        return None
    return places.spans
