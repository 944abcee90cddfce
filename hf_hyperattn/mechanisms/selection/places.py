"""The one reader of attention masks: where the queries of a call stand among its keys, and what is padding.

What a mask says is read at most once for all layers of a model, and kept with the mask for as long as that lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...attached import attach, attached_to
from ...engines.options import HIDDEN, Options, read_visible
from ...engines.selection import Places, Texts, computed_once
from ...hierarchy import Hierarchy
from ...readable import can_read


@dataclass(frozen=True)
class FirstKey:
    """What the model says of the keys of a call, where it made the mask itself.

    Args:
        index: Tokens that the cache of a sliding window has dropped before key 0; None where that cannot be told.
        attention_mask: The model's padding mask [B, dropped + M], or its beginning; None where there is none.
        stop: How many of the keys of the call are there so far: behind them a static cache has empty slots. None: the
            mask is of another make.
    """

    index: int | None = 0
    attention_mask: Tensor | None = None
    stop: int | Tensor | None = None

    @property
    def is_known(self) -> bool:
        """Whether the model has made the mask, so that its padding mask says all about padding."""
        return self.stop is not None

    @computed_once
    def keys(self) -> int | None:
        """`stop` as a number."""
        return None if self.stop is None else int(self.stop)

    def real(self, tokens: int) -> Tensor | None:
        """Return bool [B, tokens], which of the first tokens of the rows are real; None without a padding mask."""
        mask = self.attention_mask
        if mask is None:
            return None
        return pad(mask[:, :tokens].bool(), (0, max(0, tokens - mask.shape[1])), value=True)


#: Nothing is dropped.
START = FirstKey()


def within_indices(mask: Tensor | None, indices: Tensor | None, keys: int) -> Tensor | None:
    """The mask that leaves only the keys an indexer chose: DeepSeek's sparse attention and its kin.

    Under names other than "eager" and "sdpa" these families pass `indices` [B, N, top_k] beside the mask, which they
    otherwise fold in themselves.
    """
    if indices is None:
        return mask
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def before_indexer(first: FirstKey, mask: Tensor | None, batch: int, keys: int) -> FirstKey:
    """`first` with what the mask says of padding before an indexer hides other keys in it."""
    if first.stop is not None or first.index is None:
        return first
    if mask is None:
        return FirstKey(first.index, stop=keys)
    real = read_visible(mask[..., :keys]).any(1).any(1).expand(batch, keys)
    return FirstKey(
        first.index, real, (real * torch.arange(1, keys + 1, device=real.device)).amax()
    )


class KnownOfMask:
    """What was read from a mask so far, and what the model said of it when it made it.

    Args:
        mask: The mask; it is not kept.
        first: What the model said.
        is_ours: Whether `family_mask` made it for a call of a model. Nobody changes such a mask.
    """

    def __init__(self, mask: Tensor, first: FirstKey = START, is_ours: bool = False):
        self.first, self.is_ours = first, is_ours
        # Nobody but its model sees a mask of ours. The memory of others may be changed without a trace, as by numpy.
        self.content = None if is_ours else mask.detach().clone()
        self.version = None if mask.is_inference() else mask._version
        self.readings: dict[tuple, dict[Any, Any]] = {}

    def fits(self, mask: Tensor) -> bool:
        """Whether the mask is as it was."""
        if self.content is None:
            return mask.is_inference() or self.version == mask._version
        return self.content.shape == mask.shape and torch.equal(self.content, mask)


@lru_cache(maxsize=8)
def facts_without_mask(about: tuple) -> dict[Any, Any]:
    """Return the facts of calls of this kind that have no mask, whose position says all.

    `lru_cache` returns the same dict for the same kind, and callers add to it: a table of the last 8 kinds of calls.
    """
    return {}


def known_facts(mask: Tensor | None, key: Tensor, first: FirstKey, about: tuple) -> dict[Any, Any]:
    """Return the facts that were read for calls of this kind with this mask, to which more can be added.

    Args:
        mask: The mask of a call, or None.
        key: Of the call.
        first: What the model says of the keys.
        about: All else that the facts depend on.
    """
    if not can_read(key, mask):
        return {}
    about = (
        *about,
        torch.is_inference_mode_enabled(),
    )  # what was made in it cannot be used for gradients later
    if mask is None:
        return facts_without_mask(about) if first is START else {}
    known = attached_to(mask, KnownOfMask)
    if known is None or not known.fits(mask):
        known = KnownOfMask(mask, START if known is None else known.first)
        attach(mask, known)
    return known.readings.setdefault(about, {})


@dataclass(frozen=True, eq=False)
class Reading:
    """What the mask of a call says, and what its position says where there is no mask.

    Args:
        mask: Bool (True = take part) or additive, [B|1, H|1, N|1, M]; None where nothing is hidden by it.
        batch, queries, keys: B, N, M.
        device: Of the keys.
        is_causal: Whether queries see only earlier keys.
        by_position: Whether causality is not in the mask: query i sees no key after `offset` + i.
        offset: See `by_position`.
        grows: Whether this is a prefix LM, which is not causal, and whose queries are the newest keys all the same.
        first: What the model says of the keys.
        facts: What was read already, for all layers.
    """

    mask: Tensor | None
    batch: int
    queries: int
    keys: int
    device: torch.device
    is_causal: bool
    first: FirstKey  # without a default, which the compiler of torch 2.11 cannot follow
    by_position: bool = False
    offset: int = 0
    grows: bool = False
    facts: dict[Any, Any] = field(default_factory=dict)

    @property
    def given(self) -> Tensor:
        """The mask, for what is asked only where there is one."""
        assert self.mask is not None
        return self.mask

    def remember(self, name: Any, read: Callable) -> Any:
        """Return `read()`, which is called once for all layers."""
        if name not in self.facts:
            self.facts[name] = read()
        return self.facts[name]

    def remember_of(self, hierarchy: Hierarchy, name: Any, make: Callable) -> Hierarchy:
        """Return `make()`, which is called once for all layers that have this hierarchy.

        Args:
            hierarchy: What the result is made from.
            name: Tells results of one hierarchy apart.
            make: Makes the result.
        """
        made = self.remember("hierarchies", WeakKeyDictionary).setdefault(hierarchy, {})
        if name not in made:
            result = make()
            made[name] = (
                None if result is hierarchy else result
            )  # a table must not refer to its own keys
        return hierarchy if made[name] is None else made[name]

    @property
    def places(self) -> Places:
        """Where queries and keys stand."""
        return self.remember("places", self._find_places)

    @property
    def stop(self) -> int:
        """How many of the keys are looked at: those up to the last query's own, or all without causality."""
        if not (self.is_causal or self.grows) or self.places.stop is None:
            return self.keys
        return self.places.stop

    def _find_places(self) -> Places:
        start, dropped = self._find_start(), self.first.index or 0
        return Places(
            self.batch, self.queries, self.keys, self.device, start, dropped, self._find_real(start)
        )

    def _find_start(self) -> int | Tensor:
        n, m = self.queries, self.keys
        if n == m:
            return 0
        if self.by_position:
            return self.offset
        if self.first.keys is not None:
            return min(max(0, self.first.keys - n), max(0, m - n))
        if self.mask is None:
            return m - n
        # A causal query's own key is the last one that it sees.
        _, last, any_seen = self.ends
        if self.is_causal:
            start = (
                torch.where(any_seen, last, 0) - torch.arange(n, device=self.given.device)
            ).amax()
        else:
            start = last.where(any_seen, -1).amax() + 1 - n
        start = start.clamp(0, m - n)
        return int(start) if can_read(self.mask) else start

    def _find_real(self, start: int | Tensor) -> Tensor | None:
        dropped, first = self.first.index or 0, self.first
        real = first.real(dropped + self.keys)
        # Where the model made the mask and gave no padding mask, what is hidden is hidden by a window or an indexer.
        if real is None and self.mask is not None and not first.is_known:
            real = pad(self._seen_by_some(start), (dropped, 0), value=True)
        if real is None:
            return None
        real = real.to(self.device)
        if first.keys is not None and first.keys < self.keys:
            real = real & (
                torch.arange(dropped + self.keys, device=self.device) < dropped + first.keys
            )
        return None if can_read(real) and bool(real.all()) else real

    def _seen_by_some(self, start: int | Tensor) -> Tensor:
        """Bool [B|1, M], the keys that some query sees."""
        return self.seen(start).any(1).expand(-1, self.keys)

    def seen(self, start: int | Tensor) -> Tensor:
        """Return bool [B|1, N|1, M|1], the keys that each query sees in some head.

        A mask with one row for all queries is returned without causality by position.

        Args:
            start: The key that is query 0's own.
        """
        seen = read_visible(self.given).any(1)
        if not self.by_position or seen.shape[1] == 1:
            return seen
        key = torch.arange(self.keys, device=seen.device)
        return seen & (key <= torch.arange(self.queries, device=seen.device)[:, None] + start)

    @property
    def real_so_far(self) -> Tensor | None:
        """Bool [B|1, dropped + stop], the real tokens; None where all are real, or where nothing says it.

        Nothing says it where the last queries of a row come with a mask of another make than the model's: a key that it
        hides from all of them may be a real token that a sliding window has left behind.
        """
        places, first = self.places, self.first
        says_model = first.is_known or first.attention_mask is not None
        if places.real is None or not (says_model or self.by_position or self.queries == self.keys):
            return None
        return places.real[:, : places.dropped + self.stop]

    @property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first and the last key that the mask shows, and whether there is one, each [B|1, H|1, N|1]."""
        return self.remember("ends", lambda: seen_ends(self.given, self.keys))

    @property
    def real_if_only_padding(self) -> Tensor | None:
        """Bool [B, stop], the real keys, if the mask hides padding and, in a causal call, later tokens, and no more.

        None without a mask, where it hides more, and where that cannot be told.
        """
        return self.remember("real if only padding", self._find_real_if_only_padding)

    def _find_real_if_only_padding(self) -> Tensor | None:
        mask, stop, first = self.mask, self.stop, self.first
        if mask is None or first.index:
            return None
        mask = mask if mask.shape[-1] == stop else mask[..., :stop].expand(*mask.shape[:-1], stop)
        by_mask = (self.is_causal or self.grows) and not self.by_position
        try:
            if self.by_position and not self.offset and mask.shape[2] > 1:
                # Position hides the tokens after a query anyway, whatever the mask says of them.
                later = torch.ones(self.queries, stop, dtype=torch.bool, device=mask.device).triu(1)
                mask = mask.masked_fill(later, False if mask.dtype == torch.bool else -torch.inf)
                real = real_tokens(mask, self.queries, is_causal=True)
            elif by_mask or self.queries == stop:
                real = real_tokens(mask, self.queries, is_causal=by_mask)
            elif mask.shape[2] == 1:
                real = real_tokens(mask, stop)
            else:
                return None
        except ValueError:
            return None
        if (
            self.queries < stop and first.is_known
        ):  # what is hidden may be hidden by a window, or an indexer
            known = first.real(stop)
            known = (
                torch.ones_like(real) if known is None else known.to(real.device).expand_as(real)
            )
            if not torch.equal(real, known):
                return None
        return real.expand(self.batch, stop)

    def shows_by_place(self, window: int | None) -> bool:
        """Whether the mask shows real queries what their place does, and no more: the real keys up to their own.

        An additive mask must add 0 to them. The rows of padded queries do not matter.

        Args:
            window: The host's sliding window: only the last `window` of these keys, padding included; None: all.
        """
        return self.remember(("shows by place", window), lambda: self._shows_by_place(window))

    def _shows_by_place(self, window: int | None) -> bool:
        mask, places, keys = self.given, self.places, self.keys
        key = torch.arange(keys, device=mask.device)
        own = torch.arange(self.queries, device=mask.device)[:, None] + places.start
        expected = key <= own
        shown = read_visible(mask[..., :keys])
        shown = shown & expected if self.by_position else shown
        expected = expected if window is None else expected & (key > own - window)
        if places.real is not None:
            expected = expected & places.real[:, None, None, places.dropped :].to(mask.device)
        same = shown == expected
        if mask.dtype != torch.bool:
            same = same & ((mask[..., :keys] == 0) | ~shown)
        if self.has_padded_queries:
            same = same | (places.query_numbers < 0)[:, None, :, None].to(mask.device)
        return bool(same.all())

    @property
    def has_padded_queries(self) -> bool:
        """Whether some query is padding."""
        return self.remember(
            "has padded queries", lambda: bool((self.places.query_numbers < 0).any())
        )

    @property
    def sees_something(self) -> Tensor:
        """Bool [B|1, H|1, N|1, 1], the queries from which the mask does not hide every key."""
        return self.remember(
            "sees something", lambda: read_visible(self.given).any(-1, keepdim=True)
        )

    @property
    def hides_previous(self) -> bool:
        """Whether the mask hides from a real query the real token before it."""
        return self.remember("hides previous", lambda: bool(self.find_hidden_previous().any()))

    def find_hidden_previous(self) -> Tensor:
        """Return bool [B|1, N]: whether a query is real and the mask hides the real token before it."""
        return find_hidden_previous(self.given, self.places)

    def texts(self, chunk: int | None = None, position_ids: Tensor | None = None) -> Texts | None:
        """Return the texts of rows that hold several; None where no row does.

        A text begins at a token if no query from there on sees a token before it, and no earlier query sees it or a
        later one. All keys between the first and the last that a query sees count as seen.

        Args:
            chunk: The host's own attention begins again after every so many tokens, which begins no text.
            position_ids: int64 [B|1, N], which begin at 0 again where a text begins at the end of such a chunk.

        Raises:
            ValueError: A text begins among the queries, and keys before them come from a cache.
        """
        starts = self.find_text_starts(chunk, position_ids)
        if starts is None:
            return None
        if self.queries < self.stop:
            raise ValueError(
                "a mask packs several texts into one row, whose earlier keys come from a cache; allowed: packed texts "
                "in one call with use_cache=False, or one text a row"
            )
        return self._number_texts(starts)

    def find_text_starts(
        self, chunk: int | None = None, position_ids: Tensor | None = None
    ) -> Tensor | None:
        """Return bool [B|1, N], the queries at which a text begins after another; None if there are none.

        Args:
            chunk, position_ids: See `texts`.
        """
        read = lambda: none_if_all_false(self.mark_text_starts(chunk, position_ids))
        if chunk is None:
            return self.remember("text starts", read)
        if self.queries < self.stop:  # where chunks begin among cached keys is not known
            return None
        return read()

    def _real_keys(self) -> Tensor:
        """Bool [B|1, stop], the keys that are no padding."""
        real = self.real_so_far
        if real is None:
            return torch.ones(1, self.stop, dtype=torch.bool, device=self.given.device)
        return real[:, real.shape[1] - self.stop :].to(self.given.device)

    def mark_text_starts(
        self, chunk: int | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return bool [B|1, N], the queries at which a text begins after another, also where this cannot be read.

        Args:
            chunk, position_ids: See `texts`.
        """
        keys, real = self.stop, self._real_keys()
        # Queries are the last of the keys that are looked at. In a call that is not causal, query 0 is key `offset`.
        start = keys - self.queries if self.is_causal or self.grows else self.offset
        seen = self.seen(start)[..., :keys].expand(-1, self.queries, keys) & real[:, None]
        bits, sees = seen.to(torch.uint8), seen.any(-1)
        first = bits.argmax(-1).where(sees, keys)
        last = (keys - 1 - bits.flip(-1).argmax(-1)).where(sees, -1)
        own = slice(start, start + self.queries)
        place = real.cumsum(1)[:, own] - 1
        starts = text_starts(first, last, start) & real[:, own] & (place > 0)
        if chunk is not None:
            # Transformers counts the slots of a chunk from the first real token of a row.
            slots = torch.arange(keys, device=real.device)[own] - real.int().argmax(1, keepdim=True)
            inside = slots % chunk != 0
            if (
                position_ids is not None
                and position_ids.shape[-1] == self.queries
                and position_ids.dim() == 2
            ):
                inside = inside | (position_ids.to(real.device) == 0)
            starts = starts & inside
        return starts

    def _number_texts(self, starts: Tensor) -> Texts:
        real = self._real_keys()
        place = real.cumsum(1) - 1
        return Texts(
            starts.cumsum(1).masked_fill(~real, -1), place - (place * starts).cummax(1).values
        )


def read_mask(
    query: Tensor,
    key: Tensor,
    options: Options,
    is_causal: bool,
    first: FirstKey = START,
    grows: bool = False,
) -> Reading:
    """Return the reading of a call's mask, which shares what other layers have read.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d].
        options: With the mask, and whether position hides later keys.
        is_causal, first, grows: As in `Reading`.
    """
    call: dict[str, Any] = dict(
        batch=query.shape[0],
        queries=query.shape[2],
        keys=key.shape[2],
        device=key.device,
        is_causal=is_causal,
        by_position=options.is_causal,
        offset=options.offset,
        grows=grows,
    )
    facts = known_facts(options.mask, key, first, tuple(call.values()))
    return Reading(options.mask, first=first, facts=facts, **call)


def seen_ends(mask: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last key that a mask [B|1, H|1, N|1, M|1] shows, and whether there is one, each [B|1, H|1, N|1]."""
    seen = read_visible(mask)
    seen = seen.expand(*seen.shape[:3], keys)
    ones = seen.to(torch.uint8)
    return ones.argmax(-1), keys - 1 - ones.flip(-1).argmax(-1), seen.any(-1)


def real_tokens(mask: Tensor, queries: int, is_causal: bool = False) -> Tensor:
    """Return bool [B|1, M], the keys that some query sees, if the mask hides nothing from a real query but the others.

    Args:
        mask: bool (True = take part) or additive (0, or what `read_visible` takes for hidden),
            [B, 1 or H, 1 or N, M]. With fewer queries than keys, queries are the last ones.
        queries: N.
        is_causal: whether the mask hides from a query the tokens after it.

    Raises:
        ValueError: the mask hides a real token from a real query, or adds other numbers.
    """
    seen, keys = read_visible(mask), mask.shape[-1]
    odd = mask[seen & (mask != 0)] if mask.dtype != torch.bool else mask[:0]
    if odd.numel():
        raise ValueError(
            f"the attention mask adds {float(odd[0]):g} to a logit; allowed: 0 where visible and "
            f"{HIDDEN:,.0f} or less elsewhere; terms of the logits come as position_bias"
        )
    real = seen.any(1).any(1)
    place = torch.arange(keys, device=mask.device)
    expected = real[:, None, None, :]
    if is_causal:
        expected = expected & (place <= place[keys - queries :, None])
    wrong = (seen != expected) & real[:, None, keys - queries :, None]
    if bool(wrong.any()):
        b, h, i, j = wrong.nonzero()[0].tolist()
        shown = bool(seen.expand(-1, -1, queries, -1)[b, h, i, j])
        raise ValueError(
            f"the attention mask {'shows' if shown else 'hides'} token {j} {'to' if shown else 'from'} query {i} of "
            f"row {b}; allowed: masks that hide padding{', and the tokens after a query,' if is_causal else ''} and "
            "nothing else"
        )
    return real


def text_starts(first: Tensor, last: Tensor, start: int = 0) -> Tensor:
    """Return bool [B|1, N]: whether a text begins at the token of each query, see `Reading.texts`.

    Args:
        first, last: int64 [B|1, N], the first and the last key that each query sees; M and -1 where it sees none.
        start: the key that is query 0's own.
    """
    token = torch.arange(start, start + first.shape[1], device=first.device)
    query = token[:, None]
    back = (first[..., None] < token) & (token <= query)
    ahead = (query < token) & (token <= last[..., None])
    return ~(back | ahead).any(1)


def none_if_all_false(found: Tensor) -> Tensor | None:
    """Return a bool tensor, or None if nothing in it is True."""
    return found if bool(found.any()) else None


def find_hidden_previous(mask: Tensor, places: Places) -> Tensor:
    """Return bool [B|1, N]: whether a query is real and a mask hides the real token before it.

    One row for all queries hides padding, and nothing from a single query.
    """
    if mask.shape[2] < places.queries:
        return torch.zeros(1, places.queries, dtype=torch.bool, device=mask.device)
    mask = mask.detach().expand(*mask.shape[:3], places.keys)
    key, before = (
        numbers.expand(places.batch, -1)
        for numbers in (places.key_numbers, places.query_numbers - 1)
    )
    size = places.keys + places.dropped
    # The key that holds each token of a row, -1 for none. Padding is written to one more column.
    index = torch.arange(places.keys, device=key.device).expand_as(key)
    key_of_token = key.new_full((len(key), size + 1), -1).scatter(
        1, key.where(key >= 0, size), index
    )
    at = key_of_token.gather(1, before.clamp(0, size))
    # One key a query is looked at, before anything is computed for all of them.
    column = at.clamp_min(0)[:, None, :, None].expand(-1, mask.shape[1], -1, -1)
    seen = read_visible(mask.expand(len(at), -1, -1, -1).gather(3, column)).any(1)[..., 0]
    return (before >= 0) & (at >= 0) & ~seen
