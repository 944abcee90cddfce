"""Keys and values of which every key head keeps those alone that the rules of its query heads can still look at.

A window looks at tokens by how far they are: what it sees of a text is what it sees of the text's first and last
tokens, put beside each other. So a call is computed of what is kept, by the same rules and kernels. Query heads that
share a key head need what any of them needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...engines import Options
from ...readable import is_recorded
from ..base import HostCall
from ..growing import TAKEN_BACK, GrowingTensor
from ..selection.places import FirstKey
from .masking import ByLength
from .page_cache import PAGE_CACHES, PageCache

#: The `HeadCache` that keys and values come from, while they live.
HEAD_CACHES: WeakIdKeyDictionary = WeakIdKeyDictionary()
#: As `SparseRule.reach`.
Reach = tuple[int, int] | None
EVICTING = "HierarchicalCache(evict=True)"


def head_cache_of(call: HostCall) -> HeadCache | None:
    """The cache that keys and values come from; None where there is none.

    Raises:
        ValueError: the host has changed one of them, of which the cache has not kept all.
    """
    if is_recorded():
        return None
    cache, other = HEAD_CACHES.get(call.key), HEAD_CACHES.get(call.value)
    if cache is not other:
        raise ValueError(
            f"{EVICTING} cannot serve a host that changes keys or values after they were cached; allowed: evict=False"
        )
    return cache


def reaches_of(rules: ByLength, key_heads: int) -> tuple[Reach, ...]:
    """Of each key head what its query heads see, at all lengths; None where one of them may look at any key."""
    group, found = len(rules[0][1]) // key_heads, []
    for first in range(0, group * key_heads, group):
        asked = [None if r.earlier else r.reach for _, each in rules for r in each[first : first + group]]
        known = [reach for reach in asked if reach is not None]
        widest = max(near for near, _ in known or [(0, 0)]), max(sinks for _, sinks in known or [(0, 0)])
        found.append(widest if len(known) == len(asked) else None)
    return tuple(found)


def of_heads(tensor: Tensor, heads: list[int]) -> Tensor:
    """Heads of [B, H, ...], as a view where they follow each other."""
    first, last = heads[0], heads[-1]
    return tensor[:, first : last + 1] if last - first + 1 == len(heads) else tensor[:, heads]


@dataclass(eq=False)
class Part:
    """Key heads that keep the same, and their keys and values."""

    heads: list[int]
    reach: Reach
    tokens: tuple[GrowingTensor, GrowingTensor]


class HeadCache:
    """The keys and values of one layer.

    Args:
        key: [B, Hkv, n, d] and
        value: [B, Hkv, n, dv]: what the first tokens look like; nothing is added yet.
        reaches: of each key head.
    """

    def __init__(self, key: Tensor, value: Tensor, reaches: tuple[Reach, ...]):
        if key.shape[1] != len(reaches) or value.shape[1] != len(reaches):
            raise ValueError(
                f"{EVICTING} was given {key.shape[1]} heads of keys and {value.shape[1]} of values, and the model was "
                f"made for {len(reaches)}; allowed: evict=False"
            )
        self.reaches, self.pages, self.least = reaches, PageCache(), 0  # tokens that must be left
        self.parts = []
        for reach in dict.fromkeys(reaches):
            heads = [h for h, other in enumerate(reaches) if other == reach]
            self.parts.append(Part(heads, reach, (GrowingTensor(key[:, heads]), GrowingTensor(value[:, heads]))))

    @property
    def tokens(self) -> list[GrowingTensor]:
        """Of all parts."""
        return [tensor for part in self.parts for tensor in part.tokens]

    def shown(self) -> tuple[Tensor, Tensor]:
        """Placeholders of the length that masks are made for."""
        key, value = (t.placeholder(len(self.reaches)) for t in self.parts[0].tokens)
        return key, value

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens."""
        for part in self.parts:
            for tensor, new in zip(part.tokens, (key, value), strict=True):
                tensor.append(of_heads(new, part.heads))

    def query_heads(self, part: Part, heads: int) -> list[int]:
        """The query heads of a part, of all."""
        group = heads // len(self.reaches)
        return [h * group + i for h in part.heads for i in range(group)]

    def checked(self, call: HostCall, rules: ByLength, window: int | None) -> Tensor | None:
        """Bool [B, M], which tokens of the rows are no padding; None where all are.

        Raises:
            ValueError: the call would read what is forgotten.
        """
        for kept, asked in zip(self.reaches, reaches_of(rules, len(self.reaches)), strict=True):
            if kept is not None and (asked is None or asked[0] > kept[0] or asked[1] > kept[1]):
                raise ValueError(
                    f"{EVICTING} keeps {kept[0]} near keys and {kept[1]} first ones of a head whose rules look at "
                    "more; allowed: a cache that was made for this model, as it is patched now"
                )
        if window is not None:
            raise ValueError(f"{EVICTING} cannot serve a layer with a sliding window; allowed: evict=False")
        places = call.read_mask().places
        start, real = places.start, places.real
        for part in self.parts:
            keys = part.tokens[0]
            if part.reach is None or not keys.gone:
                continue
            near, sinks = part.reach
            wrong = start + 1 - near < keys.base
            if real is not None:
                lost, count = real[:, keys.head : keys.base], real.cumsum(1)
                before = real[:, :start].sum(1, keepdim=True)
                place = count[:, keys.head : keys.base] - 1
                wrong = start < keys.base or bool((lost & ((place < sinks) | (place > before - near))).any())
                wrong = wrong or (len(rules) > 1 and not bool(lost.all()))  # places of what is left tell no length
            if wrong:
                raise ValueError(
                    f"{EVICTING} has forgotten keys that this call reads: its padding is not where it was, its queries "
                    "are not the last tokens, or rules for several lengths meet padding inside a row; allowed: the "
                    "attention_mask of the earlier calls, continued, or evict=False"
                )
        return real

    def part_of_call(self, part: Part, call: HostCall, options: Options, real: Tensor | None) -> HostCall:
        """A call of the heads of a part alone, of what is kept of their keys."""
        key, value = (tensor.view() for tensor in part.tokens)
        grown, heads, first = part.tokens[0], self.query_heads(part, call.query.shape[1]), call.first
        if part.reach is None:
            PAGE_CACHES[key] = self.pages
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
        return replace(call, query=of_heads(call.query, heads), key=key, value=value, options=options, first=first)

    def forget(self, real: Tensor | None) -> None:
        """Forget what no query sees from here on, nor from `TAKEN_BACK` tokens before.

        Args:
            real: bool [B, M], which tokens are no padding; None: all.
        """
        length = self.tokens[0].length
        for part in self.parts:
            if part.reach is None:
                continue
            near, sinks = part.reach
            first, head = length + 1 - near - TAKEN_BACK, sinks
            if real is not None:
                count = real.cumsum(1)
                first = int((count <= count[:, -1:] + 1 - near - TAKEN_BACK).sum(1).min())
                head = int((count <= sinks).sum(1).max())
            gone = part.tokens[0].gone
            for tensor in part.tokens:
                if first > head:
                    tensor.evict(first, head)
            if part.tokens[0].gone > gone:
                self.least = length - TAKEN_BACK

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`.

        Raises:
            ValueError: more is to be taken back than can be.
        """
        if length < self.least:
            raise ValueError(
                f"{EVICTING} cannot go back to {length} tokens, only to {self.least}; allowed: at most {TAKEN_BACK} "
                "tokens at once, reset(), or evict=False"
            )
        for tensor in self.tokens:
            tensor.length = min(tensor.length, length)
        self.pages.crop(length)

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order."""
        for tensor in self.tokens:
            tensor.pick(rows)
        self.pages.pick(rows)
