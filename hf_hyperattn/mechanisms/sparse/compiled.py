"""Sparse attention by the compiled kernel (engines/cpu/selected.py), which computes the visible pairs alone.

It takes heads that are exact, have a window, or choose pages, of calls whose masks hide padding and what comes later.
Everything else goes the way of masks, with the same result: other heads beside those that it takes, and other calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...attached import attached_to
from ...engines import DOT, Options, PairScore, attention, dot_score, repeat_heads
from ...engines.cpu import selected
from ...engines.cpu.selected import BY, HeadRule
from ...engines.selection import Lists, Summaries
from ..selection.cache import LayerCache
from ..selection.places import Reading
from .masking import ByLength, Text, masked
from .pages import Pages
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
    rules: ByLength,
    text: Text,
    window: int | None = None,
    backend: str = "auto",
    asker: str = "",
) -> Tensor | None:
    """The output [B, H, N, dv] in the dtype of the query; None where the kernel does not compute this call.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d], which rules select by.
        score: what is attended by; a plain product.
        value: [B, Hkv, M, dv].
        options, rules, window: as in `masking.masked`.
        text: where queries and keys stand, and the queries before them.
        backend: the engine that was asked for.
        asker: the layer's name.
    """
    heads = rules_of_call(rules, query.shape[1], query.shape[3])
    rest = [h for h, rule in enumerate(heads) if rule is None]
    if len(rest) == len(heads) or backend not in ("auto", "cpu") or not is_plain(score, options, window):
        return None
    given = query, key, score.raw_query, score.raw_key, value
    if not all(map(selected.serves, given)):
        return None
    last, n = text.last, query.shape[2]
    if last is None or last > key.shape[2]:  # not known, or queries after the last key
        return None
    spans = text.reading.remember("spans", lambda: spans_of(text.reading))
    if spans is None or not text.reaches(n):
        return None
    # The kernel reads one dtype; under autocast rotated queries and keys are float32, and values are rounded.
    dtype = query.dtype if len({t.dtype for t in given}) == 1 else torch.float32
    asking, searched, values = query.to(dtype), key.to(dtype), value.to(dtype)
    raw_query = asking if score.raw_query is query else score.raw_query.to(dtype)
    raw_key = searched if score.raw_key is key else score.raw_key.to(dtype)
    chosen, known = None, [HeadRule(1) if rule is None else rule for rule in heads]
    if any(rule.page for rule in known):
        if text.before is not None:
            asking = torch.cat([text.before.to(dtype), asking], 2)
        chosen = chosen_pages(asking, searched, known, spans, last, n, asker)
    out = selected.selected_attention(
        raw_query, raw_key, values, known, chosen, spans=spans, offset=last - n, scale=score.scale
    ).to(query.dtype)
    out = zero_hidden_rows(out, text.reading)
    if not rest:
        return out
    others = by_masks(rest, query, key, score, value, options, rules, text)
    return out.index_copy(1, torch.tensor(rest), others.to(out.dtype))


def zero_hidden_rows(out: Tensor, reading: Reading) -> Tensor:
    """The output [B, H, N, dv] with zeros at the queries from which the mask hides every key.

    The kernel knows where padding lies, and gives a query there what causality leaves it.
    """
    if reading.mask is None or reading.places.is_whole or not reading.has_padded_queries:
        return out
    return out.masked_fill(~reading.sees_something, 0.0)


def chosen_pages(
    query: Tensor, key: Tensor, rules: Sequence[HeadRule], spans: Spans, last: int, queries: int, asker: str
) -> Lists:
    """What the last `queries` choose, with what the cache that gave the keys keeps; as `selected.chosen_pages`.

    Args:
        query: those before them, too. last: the place after the last one.
    """
    cache = attached_to(key, LayerCache) if last == key.shape[2] else None
    earlier, offset = query.shape[2] - queries, last - query.shape[2]
    summaries: list[Summaries | None] = []
    if cache is not None:  # the summary of a page of one key is that key, which nobody keeps twice
        summaries = [summaries_of(cache, key, r.page, r.bounds, spans[0]) if r.page > 1 else None for r in rules]

    def choose(rules: Sequence[HeadRule], kept: Lists | None) -> Lists:
        return selected.chosen_pages(
            query, key, rules, spans=spans, offset=offset, earlier=earlier, summaries=summaries, kept=kept
        )

    if cache is None or queries > 1:
        return choose(rules, None)
    return cache.kept(("choice", asker), LastChoice).choose(rules, spans, last, choose)


def by_masks(
    heads: list[int], query: Tensor, key: Tensor, score: PairScore, value: Tensor, options: Options, rules: ByLength,
    text: Text,
) -> Tensor:  # fmt: skip
    """Some heads alone, [B, len(heads), N, dv], as `masked` has them; arguments as in `attend`."""
    every = query.shape[1]
    of = lambda t: repeat_heads(t, every)[:, heads]
    mask = options.mask
    if mask is not None and mask.ndim == 4 and mask.shape[1] == every:
        mask = mask[:, heads]
    before = None if text.before is None else text.before[:, heads]
    rules = tuple((length, tuple((each * (every // len(each)))[h] for h in heads)) for length, each in rules)
    options, text = replace(options, mask=mask), replace(text, before=before)
    hidden = masked(query[:, heads], of(key), score.scale, options, rules, text)
    return attention(dot_score(score.raw_query[:, heads], of(score.raw_key), score.scale), of(value), hidden)[0]


def rules_of_call(rules: ByLength, heads: int, dim: int) -> list[HeadRule | None]:
    """The rule of each head for the kernel; None where it knows none, for all where rules change with the length."""
    if len(rules) != 1:
        return [None] * heads
    known = [rule_of_head(rule, dim) for rule in rules[0][1]]
    return known * (heads // len(known))


def rule_of_head(rule: SparseRule, dim: int) -> HeadRule | None:
    """A rule as the kernel takes it; of queries of `dim` numbers."""
    if type(rule) is Exact:
        return HeadRule(EVERYTHING)
    if type(rule) is Window:
        return HeadRule(rule.near, rule.sinks)
    if type(rule) is Pages:
        by, bounds = BY.index(rule.query), int(rule.summary == "bounds")
        return HeadRule(rule.near, rule.sinks, rule.page, rule.chunk, rule.top, bounds, by, rule.channels_of(dim))
    return None


def is_plain(score: PairScore, options: Options, window: int | None) -> bool:
    """Whether a call is a softmax of products, and hides nothing but what a mask hides."""
    dot = len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None
    more = options.bias, options.sinks, options.softcap, options.window, options.aggregation, window
    return dot and not options.dropout_p and all(x is None for x in more)


def spans_of(reading: Reading) -> Spans | None:
    """Of each row its first key and the end of its keys; None where more is hidden than padding or dropped."""
    places, real = reading.places, reading.places.real
    if reading.mask is None and places.is_whole:
        return places.spans
    if reading.mask is None or places.dropped or reading.mask.dtype != torch.bool:
        return None
    padding, stop = reading.real_if_only_padding, reading.stop
    if padding is None:
        return None
    same = bool(padding.all()) if real is None else torch.equal(padding, real[:, :stop].expand_as(padding))
    return places.spans if same else None
