"""The one reader of attention masks: where queries stand, and what is padding.

A mask is read at most once for all layers of a model. The result is stored for as long as the mask
lives.
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

from ...engines.options import HIDDEN, Options, read_visible
from ...engines.selection import Places, Texts, computed_once
from ...hierarchy import Hierarchy
from ...utils.attached import attach, attached_to
from ...utils.readable import can_read


@dataclass(frozen=True)
class FirstKey:
    """Where the keys of a call begin and end, for masks that the model made itself.

    Args:
        index: Number of tokens that the cache of a sliding window has dropped before key 0; None if
            unknown.
        attention_mask: The model's padding mask [B, dropped + M], or its beginning; None without
            one.
        stop: Number of keys so far; behind them a static cache has empty slots. None: the model did
            not make the mask.
        readings: The facts of this call without a mask, by the kind of call. A request of continuous
            batching has its own, which live for one step. None: see `find_facts`.
    """

    index: int | None = 0
    attention_mask: Tensor | None = None
    stop: int | Tensor | None = None
    readings: dict[tuple, dict[Any, Any]] | None = field(default=None, compare=False)

    @property
    def is_known(self) -> bool:
        """Whether the model made the mask, so that its padding mask is complete."""
        return self.stop is not None

    @computed_once
    def keys(self) -> int | None:
        """`stop` as an integer, read from its tensor once."""
        return None if self.stop is None else int(self.stop)

    def read_real(self, tokens: int) -> Tensor | None:
        """Return bool [B, tokens], the real ones among the first tokens of the rows.

        None without a padding mask.
        """
        mask = self.attention_mask
        if mask is None:
            return None
        # Tokens after the end of the padding mask are real.
        return pad(mask[:, :tokens].bool(), (0, max(0, tokens - mask.shape[1])), value=True)


#: The default: nothing is dropped, and the model did not make the mask.
START = FirstKey()


def apply_indices(mask: Tensor | None, indices: Tensor | None, keys: int) -> Tensor | None:
    """Return a mask that also hides the keys that an indexer did not choose.

    Args:
        mask: Of the call; None: nothing is hidden.
        indices: int64 [B, N, top_k], the chosen keys; None: no indexer.
        keys: M.
    """
    # DeepSeek's sparse attention and similar models: they pass `indices` under implementation names
    # other than "eager" and "sdpa". Under these two names they apply the indices to the mask
    # themselves.
    if indices is None:
        return mask
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def read_unindexed(first: FirstKey, mask: Tensor | None, batch: int, keys: int) -> FirstKey:
    """Return `first` with the padding of a mask before `apply_indices`.

    Afterwards, padding and keys that the indexer hides cannot be told apart.

    Args:
        first: Of the call.
        mask: Of the call, before `apply_indices`; None: nothing is hidden.
        batch, keys: B, M.
    """
    if first.stop is not None or first.index is None:
        return first
    if mask is None:
        return FirstKey(first.index, stop=keys)
    real = read_visible(mask[..., :keys]).any(1).any(1).expand(batch, keys)
    stop = (real * torch.arange(1, keys + 1, device=real.device)).amax()
    return FirstKey(index=first.index, attention_mask=real, stop=stop)


# What all layers share of a mask


class KnownOfMask:
    """Everything that is known of a mask: the facts read so far, and its `FirstKey`.

    Args:
        mask: The mask. No reference to it is stored.
        first: Where its keys begin and end.
        is_ours: Whether `family_mask` made it for a call of a model. Such a mask is never changed.
    """

    def __init__(self, mask: Tensor, first: FirstKey = START, is_ours: bool = False):
        self.first, self.is_ours = first, is_ours
        # Only its model sees a mask of ours. Other masks may be changed without a new version, for
        # instance by numpy, so their content is compared.
        self.content = None if is_ours else mask.detach().clone()
        self.version = None if mask.is_inference() else mask._version
        self.readings: dict[tuple, dict[Any, Any]] = {}

    def is_unchanged(self, mask: Tensor) -> bool:
        """Return whether the mask is as it was."""
        if self.content is None:
            return mask.is_inference() or self.version == mask._version
        return self.content.shape == mask.shape and torch.equal(self.content, mask)


@lru_cache(maxsize=8)
def facts_without_mask(about: tuple) -> dict[Any, Any]:
    """Return the facts of calls of this kind without a mask.

    They depend only on the sizes of the call.

    Args:
        about: The kind of call, see `find_facts`.
    """
    # `lru_cache` returns the same dict for the same kind, and callers add to it. So this is a table
    # of 8 kinds.
    return {}


def find_facts(mask: Tensor | None, key: Tensor, first: FirstKey, about: tuple) -> dict[Any, Any]:
    """Return the facts read so far for calls of this kind with this mask.

    Callers add more to the dict.

    Args:
        mask: Of a call; None: none.
        key: Of the call.
        first: Where its keys begin and end.
        about: The kind of call: everything else that the facts depend on.
    """
    if not can_read(key, mask):
        return {}
    # Tensors made in inference mode cannot be used for gradients later.
    about = (*about, torch.is_inference_mode_enabled())
    if mask is None and first.readings is not None:
        return first.readings.setdefault(about, {})
    if mask is None:
        return facts_without_mask(about) if first is START else {}
    known = attached_to(mask, KnownOfMask)
    if known is None or not known.is_unchanged(mask):
        known = KnownOfMask(mask, START if known is None else known.first)
        attach(mask, known)
    return known.readings.setdefault(about, {})


@dataclass(frozen=True, eq=False)
class Reading:
    """A reader of the mask of a call.

    Without a mask, the sizes of the call tell where its queries stand.

    Args:
        mask: Bool (True = take part) or additive, [B|1, H|1, N|1, M]; None: it hides nothing.
        batch, queries, keys: B, N, M.
        device: Of the keys.
        is_causal: Whether queries see no key after their own.
        first: Where the keys begin and end.
        by_position: Whether causality is not in the mask: query i sees no key after `offset` + i.
        offset: See `by_position`.
        grows: Whether this is a prefix LM: it is not causal, but its queries are the newest keys.
        facts: Results that were read already, shared by all layers.
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
        """The mask, for methods that are only called if there is one."""
        assert self.mask is not None
        return self.mask

    def read_once(self, name: Any, read: Callable) -> Any:
        """Return `read()`, which is called once for all layers.

        Args:
            name: Of the fact.
            read: Computes it.
        """
        if name not in self.facts:
            self.facts[name] = read()
        return self.facts[name]

    def make_once(self, hierarchy: Hierarchy, name: Any, make: Callable) -> Hierarchy:
        """Return `make()`, which is called once for all layers that have this hierarchy.

        Args:
            hierarchy: Source of the result.
            name: Of the result, among the results of this hierarchy.
            make: Makes the result.
        """
        made = self.read_once("hierarchies", WeakKeyDictionary).setdefault(hierarchy, {})
        if name not in made:
            result = make()
            # A value of a WeakKeyDictionary must not refer to its key, which would then never be
            # freed.
            made[name] = None if result is hierarchy else result
        return hierarchy if made[name] is None else made[name]

    @property
    def places(self) -> Places:
        """Where queries and keys stand."""
        return self.read_once("places", self._find_places)

    @property
    def stop(self) -> int:
        """Number of keys that can be seen: up to the last query's own, or all."""
        if not (self.is_causal or self.grows):
            return self.keys
        start = self.places.start
        return start + self.queries if isinstance(start, int) else self.keys

    def _find_places(self) -> Places:
        """Return where queries and keys stand."""
        start = self._find_start()
        return Places(
            batch=self.batch,
            queries=self.queries,
            keys=self.keys,
            device=self.device,
            start=start,
            dropped=self.first.index or 0,
            real=self._find_real(start),
        )

    def _find_start(self) -> int | Tensor:
        """Return the key of query 0; a tensor without axes if it cannot be read."""
        n, m = self.queries, self.keys
        # The cheap cases first; reading the mask comes last.
        if n == m:
            return 0
        if self.by_position:
            return self.offset
        if self.first.is_known:
            return min(max(0, self.first.keys - n), max(0, m - n))
        if self.mask is None:
            return m - n
        # Only a foreign mask is left to tell. A causal query's own key is the last one that it
        # sees.
        _, last, any_seen = self.ends
        if self.is_causal:
            number = torch.arange(n, device=self.given.device)
            start = (torch.where(any_seen, last, 0) - number).amax()
        else:
            start = last.where(any_seen, -1).amax() + 1 - n
        start = start.clamp(0, m - n)
        return int(start) if can_read(self.mask) else start

    def _find_real(self, start: int | Tensor) -> Tensor | None:
        """Return bool [B|1, dropped + M], the real tokens; None if all are."""
        dropped, first = self.first.index or 0, self.first
        real = first.read_real(dropped + self.keys)
        # If the model made the mask and has no padding mask, a window or an indexer hides keys, and
        # not padding.
        if real is None and self.mask is not None and not first.is_known:
            real = pad(self._seen_by_some(start), (dropped, 0), value=True)
        if real is None:
            return None
        real = real.to(self.device)
        # Empty slots of a static cache are not real.
        if first.is_known and first.keys < self.keys:
            number = torch.arange(dropped + self.keys, device=self.device)
            real = real & (number < dropped + first.keys)
        return None if can_read(real) and bool(real.all()) else real

    def _seen_by_some(self, start: int | Tensor) -> Tensor:
        """Return bool [B|1, M], the keys that some query sees."""
        return self.find_seen(start).any(1).expand(-1, self.keys)

    def find_seen(self, start: int | Tensor) -> Tensor:
        """Return bool [B|1, N|1, M|1], the keys that each query sees in some head.

        A mask with one row for all queries is returned without causality by position.

        Args:
            start: The key that belongs to query 0.
        """
        seen = read_visible(self.given).any(1)
        if not self.by_position or seen.shape[1] == 1:
            return seen
        key = torch.arange(self.keys, device=seen.device)
        return seen & (key <= torch.arange(self.queries, device=seen.device)[:, None] + start)

    @property
    def real_so_far(self) -> Tensor | None:
        """Bool [B

        1, dropped + stop], the real tokens; None if all are, or unknown.
        """
        places, first = self.places, self.first
        # Unknown: the last queries of a row, under a mask that the model did not make. A key that
        # it hides from all of them may be a real token outside a sliding window.
        says_model = first.is_known or first.attention_mask is not None
        if places.real is None or not (says_model or self.by_position or self.queries == self.keys):
            return None
        return places.real[:, : places.dropped + self.stop]

    @property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """First and last key that each query sees, and whether it sees one.

        Each has the shape [B|1, H|1, N|1].
        """
        return self.read_once("ends", lambda: find_ends(self.given, self.keys))

    @property
    def real_if_only_padding(self) -> Tensor | None:
        """Bool [B, stop], the real keys, if the mask only hides padding.

        In a causal call it may also hide later tokens.

        None without a mask, if it hides more, and if that is unknown.
        """
        return self.read_once("real if only padding", self._find_real_if_only_padding)

    def _find_real_if_only_padding(self) -> Tensor | None:
        """Compute `real_if_only_padding`."""
        mask, first = self.mask, self.first
        stop = self.stop
        # A row that lost its first tokens is not whole.
        if mask is None or first.index:
            return None
        if mask.shape[-1] != stop:
            mask = mask[..., :stop].expand(*mask.shape[:-1], stop)
        by_mask = (self.is_causal or self.grows) and not self.by_position
        try:
            if self.by_position and not self.offset and mask.shape[2] > 1:
                # Position hides the tokens after a query anyway, even if the mask shows them.
                later = torch.ones(self.queries, stop, dtype=torch.bool, device=mask.device).triu(1)
                mask = mask.masked_fill(later, False if mask.dtype == torch.bool else -torch.inf)
                real = real_tokens(mask, self.queries, is_causal=True)
            elif by_mask or self.queries == stop:
                real = real_tokens(mask, self.queries, is_causal=by_mask)
            elif mask.shape[2] == 1:
                # One row for all queries shows what is padding, whichever keys belong to the
                # queries.
                real = real_tokens(mask, stop)
            else:
                return None
        except ValueError:  # the mask hides more than padding
            return None
        if self.queries < stop and first.is_known:
            # A window or an indexer may hide early keys from these queries. The padding mask knows.
            known = first.read_real(stop)
            if known is None:
                known = torch.ones_like(real)
            if not torch.equal(real, known.to(real.device).expand_as(real)):
                return None
        return real.expand(self.batch, stop)

    def shows_by_place(self, window: int | None, piece: int | None = None) -> bool:
        """Return whether real queries see exactly the real keys up to their own.

        An additive mask must add 0 to them. The rows of padded queries do not matter.

        Args:
            window: Sliding window of the attention layer: only the last `window` of these keys,
                padding included. None: all.
            piece: Only keys of the query's own piece of the row; pieces have this many tokens.
                None: the row is one piece.
        """
        name = "shows by place", window, piece
        return self.read_once(name, lambda: self._shows_by_place(window, piece))

    def _shows_by_place(self, window: int | None, piece: int | None) -> bool:
        """Compute `shows_by_place`."""
        mask, places = self.given, self.places
        keys = self.keys
        key = torch.arange(keys, device=mask.device)
        own = torch.arange(self.queries, device=mask.device)[:, None] + places.start
        expected = key <= own
        shown = read_visible(mask[..., :keys])
        shown = shown & expected if self.by_position else shown
        expected = expected if window is None else expected & (key > own - window)
        expected = expected if piece is None else expected & (key // piece == own // piece)
        if places.real is not None:
            expected = expected & places.real[:, None, None, places.dropped :].to(mask.device)
        same = shown == expected
        # The kernel gets no mask, so nothing may be added to visible logits.
        if mask.dtype != torch.bool:
            same = same & ((mask[..., :keys] == 0) | ~shown)
        if self.has_padded_queries:
            same = same | (places.query_numbers < 0)[:, None, :, None].to(mask.device)
        return bool(same.all())

    @property
    def has_padded_queries(self) -> bool:
        """Whether some query is padding."""
        return self.read_once(
            "has padded queries", lambda: bool((self.places.query_numbers < 0).any())
        )

    @property
    def sees_something(self) -> Tensor:
        """Bool [B|1, H|1, N|1, 1], the queries that see some key."""
        return self.read_once(
            "sees something", lambda: read_visible(self.given).any(-1, keepdim=True)
        )

    @property
    def hides_previous(self) -> bool:
        """Whether the mask hides from a real query the real token before it."""
        return self.read_once("hides previous", lambda: bool(self.find_hidden_previous().any()))

    def find_hidden_previous(self) -> Tensor:
        """Return bool [B

        1, N], whether a query's previous token is hidden from it.|See the function
        `find_hidden_previous`.
        """
        return find_hidden_previous(self.given, self.places)

    def find_texts(
        self, chunk: int | None = None, position_ids: Tensor | None = None
    ) -> Texts | None:
        """Return the texts of rows that hold several; None if no row does.

        A text begins at a token if no query from there on sees a token before it, and no earlier
        query sees it or a later one. All keys between the first and the last that a query sees
        count as seen.

        Args:
            chunk: Size of the chunks after which the layer's own attention begins again, which
                begins no text. None: no chunks.
            position_ids: int64 [B|1, N]. They begin at 0 again if a text begins at the end of such
                a chunk.

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
        """Return bool [B

        1, N], the queries at which a further text begins.|None if there are none.

        Args:
            chunk, position_ids: See `find_texts`.
        """

        def read_starts() -> Tensor | None:
            return none_if_all_false(self.mark_text_starts(chunk, position_ids))

        if chunk is None:
            return self.read_once("text starts", read_starts)
        if self.queries < self.stop:  # it is unknown where chunks begin among cached keys
            return None
        # Not shared: layers of one model may have chunks or not, and position ids are no part of
        # the mask.
        return read_starts()

    def _real_keys(self) -> Tensor:
        """Return bool [B|1, stop], the keys that are no padding."""
        real = self.real_so_far
        if real is None:
            return torch.ones(1, self.stop, dtype=torch.bool, device=self.given.device)
        return real[:, real.shape[1] - self.stop :].to(self.given.device)

    def mark_text_starts(
        self, chunk: int | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return bool [B

        1, N], the queries at which a further text begins.

        Works also if values cannot be read, as in compiled calls.

        Args:
            chunk, position_ids: See `find_texts`.
        """
        keys, real = self.stop, self._real_keys()
        # Queries are the last visible keys. In a call that is not causal, query 0 is key `offset`.
        start = keys - self.queries if self.is_causal or self.grows else self.offset
        seen = self.find_seen(start)[..., :keys].expand(-1, self.queries, keys) & real[:, None]
        # `argmax` gives the first of equal values, so that it finds the first 1; it takes no bool.
        bits = seen.to(torch.uint8)
        sees = seen.any(-1)
        first = bits.argmax(-1).where(sees, keys)
        last = (keys - 1 - bits.flip(-1).argmax(-1)).where(sees, -1)
        own = slice(start, start + self.queries)
        place = real.cumsum(1)[:, own] - 1
        starts = text_starts(first, last, start) & real[:, own] & (place > 0)
        if chunk is not None:
            # Transformers counts the slots of a chunk from the first real token of a row.
            slots = torch.arange(keys, device=real.device)[own] - real.int().argmax(1, keepdim=True)
            is_text = slots % chunk != 0
            if (
                position_ids is not None
                and position_ids.shape[-1] == self.queries
                and position_ids.dim() == 2
            ):
                # Position ids that begin again tell a text from a chunk.
                is_text = is_text | (position_ids.to(real.device) == 0)
            starts = starts & is_text
        return starts

    def _number_texts(self, starts: Tensor) -> Texts:
        """Return the texts of rows whose further texts begin at `starts`, bool [B|1, N]."""
        real = self._real_keys()
        number = starts.cumsum(1).masked_fill(~real, -1)
        place = real.cumsum(1) - 1
        # The largest place of a start so far is the place of the text's first token.
        first = (place * starts).cummax(1).values
        return Texts(number=number, place=place - first)


def read_mask(
    query: Tensor,
    key: Tensor,
    options: Options,
    is_causal: bool,
    first: FirstKey = START,
    grows: bool = False,
) -> Reading:
    """Return the reading of a call's mask, which shares results with other layers.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d].
        options: With the mask, and whether position hides later keys.
        is_causal, first, grows: As in `Reading`.
    """
    # Facts are shared by calls that agree in all of these values.
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
    facts = find_facts(options.mask, key, first, tuple(call.values()))
    return Reading(options.mask, first=first, facts=facts, **call)


def find_ends(mask: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and last key that each query sees, and whether it sees one.

    Each has the shape [B|1, H|1, N|1].

    Args:
        mask: [B|1, H|1, N|1, M|1].
        keys: M.
    """
    seen = read_visible(mask)
    seen = seen.expand(*seen.shape[:3], keys)
    ones = seen.to(torch.uint8)
    return ones.argmax(-1), keys - 1 - ones.flip(-1).argmax(-1), seen.any(-1)


def real_tokens(mask: Tensor, queries: int, is_causal: bool = False) -> Tensor:
    """Return bool [B

    1, M], the real keys of a mask that only hides padding.|With `is_causal`, the mask also hides
    the tokens after a query.

    Args:
        mask: Bool (True = take part) or additive (0, or a number that `read_visible` takes for
            hidden), [B, 1 or H, 1 or N, M]. With fewer queries than keys, queries are the last
            ones.
        queries: N.
        is_causal: Whether the mask hides the tokens after a query from it.

    Raises:
        ValueError: The mask hides a real token from a real query, or adds other numbers.
    """
    seen, keys = read_visible(mask), mask.shape[-1]
    odd = mask[seen & (mask != 0)] if mask.dtype != torch.bool else mask[:0]
    if odd.numel():
        raise ValueError(
            f"the attention mask adds {float(odd[0]):g} to a logit; allowed: 0 where visible and "
            f"{HIDDEN:,.0f} or less elsewhere; terms of the logits come as position_bias"
        )
    # A key is real if some query sees it. Then every real query must see it.
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
    """Return bool [B

    1, N], whether a text begins at the token of each query.|See `Reading.find_texts` for the
    definition.

    Args:
        first, last: int64 [B|1, N], the first and the last key that each query sees; M and -1 if it
            sees none.
        start: The key that belongs to query 0.
    """
    # [B|1, query, token]: no text begins at a token if a query from there on sees back beyond it,
    # or an earlier query sees ahead to it.
    token = torch.arange(start, start + first.shape[1], device=first.device)
    query = token[:, None]
    back = (first[..., None] < token) & (token <= query)
    ahead = (query < token) & (token <= last[..., None])
    return ~(back | ahead).any(1)


def none_if_all_false(found: Tensor) -> Tensor | None:
    """Return a bool tensor, or None if nothing in it is True."""
    return found if bool(found.any()) else None


def find_hidden_previous(mask: Tensor, places: Places) -> Tensor:
    """Return bool [B

    1, N], whether a query's previous token is hidden from it.|Only real queries and real tokens
    count.

    Args:
        mask: Bool (True = take part) or additive, [B|1, H|1, N|1, M].
        places: Where the queries and keys stand.
    """
    # One row for all queries can only hide padding.
    if mask.shape[2] < places.queries:
        return torch.zeros(1, places.queries, dtype=torch.bool, device=mask.device)
    mask = mask.detach().expand(*mask.shape[:3], places.keys)
    key = places.key_numbers.expand(places.batch, -1)
    before = (places.query_numbers - 1).expand(places.batch, -1)
    size = places.keys + places.dropped
    # The key that holds each token of a row, -1 for none. Padding is written to one more column.
    index = torch.arange(places.keys, device=key.device).expand_as(key)
    key_of_token = key.new_full((len(key), size + 1), -1)
    key_of_token = key_of_token.scatter(1, key.where(key >= 0, size), index)
    at = key_of_token.gather(1, before.clamp(0, size))
    # Gather one key for each query first: then nothing of the size [N, M] is computed.
    column = at.clamp_min(0)[:, None, :, None].expand(-1, mask.shape[1], -1, -1)
    previous = mask.expand(len(at), -1, -1, -1).gather(3, column)
    seen = read_visible(previous).any(1)[..., 0]
    return (before >= 0) & (at >= 0) & ~seen
