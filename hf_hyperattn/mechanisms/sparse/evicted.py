"""Sparse rules over a cache that has forgotten what no rule of a key head can look at any more.

A window looks at tokens by how far they are: what it sees of a text is what it sees of the text's first and last
tokens, put beside each other. So a call is computed of what is kept, by the same rules and kernels. Query heads that
share a key head need what any of them needs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...attached import attach
from ...engines import Options
from ..base import HostCall
from ..selection.cache import EVICTING, LayerCache, Part, Reach, of_heads
from ..selection.places import FirstKey
from .head_rules import HeadRules


def reaches_of(rules: HeadRules, key_heads: int) -> tuple[Reach, ...]:
    """Of each key head what its query heads see, at all lengths; None where one of them may look at any key."""
    group, found = len(rules.by_length[0][1]) // key_heads, []
    for first in range(0, group * key_heads, group):
        asked = [
            None if r.earlier else r.reach
            for _, each in rules.by_length
            for r in each[first : first + group]
        ]
        known = [reach for reach in asked if reach is not None]
        widest = (
            max(near for near, _ in known or [(0, 0)]),
            max(sinks for _, sinks in known or [(0, 0)]),
        )
        found.append(widest if len(known) == len(asked) else None)
    return tuple(found)


def query_heads_of(cache: LayerCache, part: Part, heads: int) -> list[int]:
    """The query heads of a part, out of all."""
    group = heads // len(cache.reaches)
    return [h * group + i for h in part.heads for i in range(group)]


def check_reach(
    cache: LayerCache, call: HostCall, rules: HeadRules, window: int | None
) -> Tensor | None:
    """Bool [B|1, M], which tokens of the rows are no padding; None where all are.

    Raises:
        ValueError: the call would read what is forgotten.
    """
    for kept, asked in zip(cache.reaches, reaches_of(rules, len(cache.reaches)), strict=True):
        if kept is not None and (asked is None or asked[0] > kept[0] or asked[1] > kept[1]):
            raise ValueError(
                f"{EVICTING} keeps {kept[0]} near keys and {kept[1]} first ones of a head whose rules look at "
                "more; allowed: a cache that was made for this model, as it is patched now"
            )
    if window is not None:
        raise ValueError(
            f"{EVICTING} cannot serve a layer with a sliding window; allowed: evict=False"
        )
    places = call.read_mask().places
    start, real = places.start, places.real
    for part in cache.parts:
        keys = part.tokens[0]
        if part.reach is None or not keys.gone:
            continue
        near, sinks = part.reach
        wrong = start + 1 - near < keys.base
        if real is not None:
            lost, count = real[:, keys.head : keys.base], real.cumsum(1)
            before = real[:, :start].sum(1, keepdim=True)
            place = count[:, keys.head : keys.base] - 1
            wrong = start < keys.base or bool(
                (lost & ((place < sinks) | (place > before - near))).any()
            )
            # With rules for several lengths, the places of what is left do not tell the length.
            wrong = wrong or (len(rules.lengths) > 1 and not bool(lost.all()))
        if wrong:
            raise ValueError(
                f"{EVICTING} has forgotten keys that this call reads: its padding is not where it was, its queries "
                "are not the last tokens, or rules for several lengths meet padding inside a row; allowed: the "
                "attention_mask of the earlier calls, continued, or evict=False"
            )
    return real


def call_of_part(
    cache: LayerCache, part: Part, call: HostCall, options: Options, real: Tensor | None
) -> HostCall:
    """A call of the heads of a part alone, of what is kept of their keys."""
    key, value = (tensor.view() for tensor in part.tokens)
    grown, heads, first = (
        part.tokens[0],
        query_heads_of(cache, part, call.query.shape[1]),
        call.first,
    )
    if part.reach is None:
        attach(key, cache)
    hides = any(given is not None for given in (options.mask, real, options.bias))
    places = grown.places() if grown.gone and hides else slice(None)

    def of(mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask if mask.shape[1] == 1 else of_heads(mask, heads)
        return mask if mask.shape[-1] == 1 else mask[..., places]

    options = replace(
        options,
        mask=of(options.mask),
        bias=of(options.bias),
        offset=max(0, options.offset - grown.gone),
        sinks=None if options.sinks is None else options.sinks[heads],
    )
    if grown.gone:
        stop = None if first.stop is None else first.stop - grown.gone
        first = FirstKey(0, None if real is None else real[:, places], stop)
    return replace(
        call, query=of_heads(call.query, heads), key=key, value=value, options=options, first=first
    )
