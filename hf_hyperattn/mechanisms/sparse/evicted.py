"""Sparse rules over a cache that evicts the keys that no rule can see any more.

A window selects tokens by their distance. Over the first and the last tokens of a text, put next to
each other, it sees what it sees of the whole text. So a call runs on the kept keys with the same
rules and kernels. Query heads that share a key head keep what any of them needs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...engines import Options
from ...utils.attached import attach
from ..base import HostCall
from ..selection.cache import EVICTING, LayerCache, Part, Reach, slice_heads
from ..selection.places import FirstKey
from .head_rules import HeadRules


def find_reaches(rules: HeadRules, key_heads: int) -> tuple[Reach, ...]:
    """Return for each key head the tokens that its query heads see at any length.

    Args:
        rules: Of the query heads.
        key_heads: Number of key heads.

    Returns:
        (near, sinks) of each key head; None if one of its query heads may see any key.
    """
    group = len(rules.by_length[0][1]) // key_heads
    found: list[Reach] = []
    for first in range(0, group * key_heads, group):
        # Earlier queries are not kept for parts that evict. So a rule that reads them keeps all
        # keys.
        reaches = [
            None if rule.earlier else rule.reach
            for _, by_head in rules.by_length
            for rule in by_head[first : first + group]
        ]
        known = [reach for reach in reaches if reach is not None]
        if len(known) < len(reaches):
            found.append(None)
        else:
            found.append((max(near for near, _ in known), max(sinks for _, sinks in known)))
    return tuple(found)


def find_query_heads(cache: LayerCache, part: Part, heads: int) -> list[int]:
    """Return the query heads, out of `heads`, that read the keys of a part."""
    # Query heads of a group follow each other, as in grouped-query attention.
    group = heads // len(cache.reaches)
    return [h * group + i for h in part.heads for i in range(group)]


def check_reach(
    cache: LayerCache, call: HostCall, rules: HeadRules, window: int | None
) -> Tensor | None:
    """Raise if a call would read evicted keys.

    Args:
        cache: Of the layer.
        call: Of the attention layer.
        rules: Of its heads.
        window: Sliding window of the attention layer; None: none.

    Returns:
        Bool [B|1, M], the real tokens of the rows; None if all are.

    Raises:
        ValueError: The call would read evicted keys.
    """
    # The cache may have been made before the model was patched with other rules.
    for kept, asked in zip(cache.reaches, find_reaches(rules, len(cache.reaches)), strict=True):
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
        if part.reach is None or not part.tokens[0].gone:
            continue
        if _reads_evicted(part, part.reach, start, real, len(rules.lengths) > 1):
            raise ValueError(
                f"{EVICTING} has forgotten keys that this call reads: its padding is not where it was, its queries "
                "are not the last tokens, or rules for several lengths meet padding inside a row; allowed: the "
                "attention_mask of the earlier calls, continued, or evict=False"
            )
    return real


def _reads_evicted(
    part: Part,
    reach: tuple[int, int],
    start: int | Tensor,
    real: Tensor | None,
    has_lengths: bool,
) -> bool:
    """Return whether the rules of a part read one of its evicted keys.

    Args:
        part: Of the cache; keys from `head` to `base` are evicted.
        reach: (near, sinks) of the part.
        start: The key that belongs to query 0.
        real: Bool [B|1, M], the real tokens; None if all are.
        has_lengths: Whether there are rules for several lengths.
    """
    near, sinks = reach
    keys = part.tokens[0]
    if real is None:
        return bool(start + 1 - near < keys.base)
    if start < keys.base:
        return True
    lost = real[:, keys.head : keys.base]
    # Rules count real tokens. Compare the number of each evicted token with query 0.
    place = real.cumsum(1)[:, keys.head : keys.base] - 1
    before = real[:, :start].sum(1, keepdim=True)
    if bool((lost & ((place < sinks) | (place > before - near))).any()):
        return True
    # With rules for several lengths, the places of the kept tokens only tell the length if no
    # padding was evicted.
    return has_lengths and not bool(lost.all())


def make_part_call(
    cache: LayerCache, part: Part, call: HostCall, options: Options, real: Tensor | None
) -> HostCall:
    """Return the call for the heads of a part, over its kept keys.

    Args:
        cache: Of the layer.
        part: Of the cache.
        call: Of the attention layer, all heads.
        options: Of the call.
        real: The result of `check_reach`.
    """
    keys = part.tokens[0]
    key, value = (tensor.view() for tensor in part.tokens)
    heads = find_query_heads(cache, part, call.query.shape[1])
    if part.reach is None:
        # All keys are there, so the kernel may use the page summaries that the cache keeps.
        attach(key, cache)
    hides = any(given is not None for given in (options.mask, real, options.bias))
    # Masks and biases have a column for every token of the row. Take the columns of the kept keys.
    places = keys.find_places() if keys.gone and hides else slice(None)

    def slice_mask(mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask if mask.shape[1] == 1 else slice_heads(mask, heads)
        return mask if mask.shape[-1] == 1 else mask[..., places]

    options = replace(
        options,
        mask=slice_mask(options.mask),
        bias=slice_mask(options.bias),
        offset=max(0, options.offset - keys.gone),
        sinks=None if options.sinks is None else options.sinks[heads],
    )
    # The kept keys are a text of their own, in which everything after the evicted tokens has moved
    # forward.
    first = call.first
    if keys.gone:
        first = FirstKey(
            index=0,
            attention_mask=None if real is None else real[:, places],
            stop=None if first.stop is None else first.stop - keys.gone,
        )
    query = slice_heads(call.query, heads)
    return replace(call, query=query, key=key, value=value, options=options, first=first)
