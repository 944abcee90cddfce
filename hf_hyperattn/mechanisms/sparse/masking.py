"""Sparse rules as the mask of a call: where its tokens stand in their rows, and which keys its queries then see.

A rule knows texts without padding. So keys are laid by their places, the rules of all heads look at them, and what
they say goes back to where the keys stand, beside the masks that the call has anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...engines import Options, repeat_heads
from ...engines.options import read_visible
from ...engines.score import working_dtype
from ...readable import can_read, is_exporting, is_recorded
from ..base import START, FirstKey
from ..growing import TAKEN_BACK
from ..places import read_texts, real_of
from .recent import RecentQueries
from .rules import Exact, RuleCall, SparseRule, Window
from .selection import lay

#: The rules of all heads for one length, and for each such length, the shortest first.
Rules = tuple[SparseRule, ...]
ByLength = Sequence[tuple[int | None, Rules]]
#: What `check_one_text` says of chunked attention in decoding, and of hosts that do not pass their window.
GONE = "cache that drops tokens, of whose sliding window nobody tells attention"


@dataclass(frozen=True, eq=False)
class Places:
    """Where queries and keys stand in their rows.

    Args:
        query, row: int64 [B, N] and [B, dropped + M], the number of each token in its row; -1 for padding and empty
            slots.
        last: how many of the keys there are so far; None where that cannot be read.
        dropped: how many tokens a cache has dropped before key 0.
    """

    query: Tensor
    row: Tensor
    last: int | None
    dropped: int = 0

    @property
    def key(self) -> Tensor:
        """int64 [B, M], the numbers of the keys."""
        return self.row[:, self.dropped :]

    def slots(self, stop: int, count: int) -> int:
        """How many slots before `stop` hold the last `count` tokens of every row, or all that a row has."""
        if not stop:
            return 0
        row = self.row[:, :stop]
        last = (row >= (row.amax(1, keepdim=True) + 1 - count).clamp_min(0)).int()
        return int((last.amax(1) * (stop - last.argmax(1))).amax())


def places_of(query: Tensor, key: Tensor, options: Options, first: FirstKey = START) -> Places:
    """Where the tokens of a causal call stand.

    The mask, where it is all that hides, says it: queries are then the last keys that anybody sees. Else position says
    it: query 0 is key `options.offset`.

    Raises:
        ValueError: the call is exported or traced.
    """
    if is_exporting() or torch.jit.is_tracing():
        raise ValueError(
            "sparse rules cannot be exported or traced: pages and chunks are laid out for the lengths of a call; "
            "allowed: unpatch_model, or layers whose rules are all Exact()"
        )
    n, m, dropped = query.shape[2], key.shape[2], first.index or 0
    real, by_mask = real_keys(options.mask, len(query), m, key.device, first), not options.is_causal
    start: Tensor | int = options.offset
    if by_mask:
        stop: Tensor | int = m
        if n < m and options.mask is not None:
            stop = last_seen(options.mask, m) if first.stop is None else first.stop
        start = stop - n
    place = (real.cumsum(1) - 1).masked_fill(~real, -1)
    index = torch.arange(n, device=key.device) + start
    own = place[:, dropped:].gather(1, index.clamp(0, m - 1).expand(len(place), -1))
    last = int(start) + n if can_read(key, options.mask) else None
    return Places(own, place, last, dropped)


def real_keys(mask: Tensor | None, batch: int, keys: int, device: torch.device, first: FirstKey) -> Tensor:
    """Bool [B, dropped + M], which tokens of the rows are no padding."""
    dropped = first.index or 0
    real = real_of(first, dropped + keys)
    # Where Transformers made the mask (`stop` is known) of no padding, there is none: an indexer or a window hides too.
    if real is None and mask is not None and first.stop is None:
        real = torch.nn.functional.pad(read_visible(mask).any(1).any(1), (dropped, 0), value=True)
    if real is None:
        real = torch.ones(1, dropped + keys, dtype=torch.bool, device=device)
    return real.to(device).expand(batch, dropped + keys)


def check_one_text(options: Options, places: Places, rules: ByLength, window: int | None) -> None:
    """Refuse rows that hold several texts, or that are read in chunks, which rules would take for one whole text.

    Args:
        options, window: of the call, as in `masked`.
        places: where queries and keys stand.
        rules: those that count from the query alone may see such rows.

    Raises:
        ValueError: a real query does not see the real token before it, or a cache drops tokens without a window.
    """
    mask = options.mask
    if mask is None or all(map(is_local, rules_in(rules))):
        return
    # of a dropped token windows need nothing: what they would see of it, the host hides
    gone = places.dropped > 0 and window is None and not all(type(r) in (Exact, Window) for r in rules_in(rules))
    if gone or ((window is None or window > 1) and can_read(mask) and hides_previous(mask, places)):
        raise several_texts(GONE if gone else "mask that hides the token before one")


def check_unpacked(mask: Tensor | None, places: Places, queries: int, rules: ByLength) -> None:
    """Refuse a mask of a caller's own that packs several texts into a row; it may hide anything else.

    Args:
        mask: of a whole row: a call with fewer queries than keys is not looked at.
        places: where queries and keys stand.
        queries: N.
        rules: those that count from the query alone may see such rows.

    Raises:
        ValueError: a row holds several texts.
    """
    if mask is None or queries != mask.shape[-1] or not can_read(mask) or all(map(is_local, rules_in(rules))):
        return
    if read_texts(mask, places.key >= 0, queries, is_causal=True) is not None:
        raise several_texts("mask of several texts in a row")


def several_texts(what: str) -> ValueError:
    """The error for rows that rules do not know."""
    return ValueError(
        f"sparse was called with a {what} (packed texts, chunked attention), and its rules know rows of one whole "
        "text; allowed: one text a row, with padding, or layers= without this, or rules out of Exact() and "
        "Window(sinks=0)"
    )


@torch.no_grad()
def hides_previous(mask: Tensor, places: Places) -> bool:
    """Whether a mask hides from a real query the real token before it; one row for several queries hides padding."""
    if mask.shape[2] < places.query.shape[1]:
        return False
    key, before = places.key, places.query - 1
    size = key.shape[1] + places.dropped
    slot = key.new_full((len(key), size + 1), -1)  # where the tokens stand; those that are no keys are written last
    slot.scatter_(1, key.where(key >= 0, size), torch.arange(key.shape[1], device=key.device).expand_as(key))
    at = slot.gather(1, before.clamp(0, size))
    seen = read_visible(mask).any(1).expand(len(at), -1, -1).gather(2, at.clamp_min(0)[..., None])[..., 0]
    return bool(((before >= 0) & (at >= 0) & ~seen).any())


def rules_in(rules: ByLength) -> set[SparseRule]:
    """All rules, of every head and length."""
    return {rule for _, heads in rules for rule in heads}


def is_local(rule: SparseRule) -> bool:
    """Whether what a query sees does not depend on where its text begins."""
    return rule.is_exact or (type(rule) is Window and not rule.sinks)


def last_seen(mask: Tensor, keys: int) -> Tensor:
    """How many keys there are up to the last that some query sees."""
    seen = read_visible(mask).flatten(0, 2).any(0)
    return (seen.expand(keys) * torch.arange(1, keys + 1, device=mask.device)).amax()


@dataclass(frozen=True, eq=False)
class Text:
    """What is known of the texts that a call is of.

    Args:
        last: how many keys there are so far; None where that cannot be read.
        before: queries [B, H, T, d] that stood before those of the call; None where they are not known.
        earlier: how many of those the rules read.
        make: makes `places`, where queries and keys stand.
        is_whole: whether there is no padding, and nothing that a cache has dropped.
    """

    last: int | None
    before: Tensor | None
    earlier: int
    make: Callable[[], Places]
    is_whole: bool = False

    @property
    def places(self) -> Places:
        """Where queries and keys stand."""
        return self.make()

    def reaches(self, queries: int) -> bool:
        """Whether all queries are known that the selections of these many queries may read."""
        needed = min(self.earlier, (self.last or 0) - queries)
        return not needed or (self.before is not None and self.before.shape[2] >= needed)


@torch.no_grad()
def text_of(
    query: Tensor,
    key: Tensor,
    options: Options,
    rules: ByLength,
    first: FirstKey = START,
    recent: RecentQueries | None = None,
) -> Text:
    """What is known of a call's texts; to be called once a call, for it may change `recent`.

    Args:
        query, key, options, rules: as in `masked`.
        first: which token key 0 is.
        recent: the queries that calls with the same cache have left, None without a cache; this call leaves its own.

    Raises:
        ValueError: a selection that is shared among queries, in a decoding step that is compiled.
    """
    n, dropped = query.shape[2], first.index or 0
    plain = options.mask is None and first.stop is None and first.attention_mask is None and can_read(key)
    make: Callable[[], Places] = partial(places_of, query, key, options, first)
    last: int | None = options.offset + n if options.is_causal else key.shape[2]
    slots: Callable[[int, int], int] = min
    if not plain:
        places = make()
        make, last, slots = lambda: places, places.last, places.slots
    earlier = max(rule.earlier for _, rules_ in rules for rule in rules_)
    before = None
    if earlier and recent is not None and last is not None:
        start, stop = last - n, last + dropped
        # Some tokens may be taken back before the next call, as assisted decoding does.
        kept = earlier + 1 + TAKEN_BACK
        least, most = (slots(stop - n, tokens) for tokens in (earlier, kept))
        before = recent.find_before(query, key, start=start, least=least, most=most, dropped=dropped)
        recent.keep(query, key, start=start, before=before, count=slots(stop, kept), dropped=dropped)
        if before is not None and before.shape[2] > least:
            before = before[:, :, before.shape[2] - least :]
    elif earlier and is_recorded() and n < key.shape[2]:
        raise ValueError(
            "a sparse rule that shares a selection among queries cannot decode in a compiled or exported call; "
            "allowed: query='own', or decoding that is not compiled"
        )
    return Text(last, before, earlier, make, plain and not dropped)


def masked(
    query: Tensor,
    key: Tensor,
    scale: float,
    options: Options,
    rules: ByLength,
    text: Text | None = None,
    window: int | None = None,
) -> Options:
    """The options of a causal call, with what its rules hide hidden; a mask that is added keeps its gradient.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d], which rules select by.
        scale: the logit is scale · q·k.
        rules: for every length one rule a head (or one for all); those of a length hold for its tokens, from the end of
            the length before on, and those of the last one for all that follow.
        text: what `text_of` says of the call; None: of one whose first token is key 0, and nothing is kept.
        window: the host's sliding window.

    Raises:
        ValueError: a rule reads queries before those of the call, which are not known.
    """
    return options if all_exact(rules) else hide(options, _seen(query, key, scale, options, rules, text, window))


@torch.no_grad()
def _seen(query, key, scale, options: Options, rules: ByLength, text: Text | None, window: int | None) -> Tensor:
    """Bool [B, H, N, M], what the rules let be seen; arguments as in `masked`."""
    text = text_of(query, key, options, rules) if text is None else text
    places, heads = text.places, query.shape[1]
    call = rule_call(query, repeat_heads(key, heads), scale, places, text.before, window)
    seen = visible_of(rules, call)[:, :, call.earlier :]
    slots = places.key.clamp_min(0)[:, None, None].expand(*seen.shape[:3], -1)
    return seen.gather(3, slots) & (places.key >= 0)[:, None, None]


def all_exact(rules: ByLength) -> bool:
    """Whether nothing is hidden."""
    return all(rule.is_exact for _, heads in rules for rule in heads)


def hide(options: Options, seen: Tensor) -> Options:
    """The options with what is not `seen`, bool [B, H, N, M], hidden too."""
    mask = options.mask
    if mask is None or mask.dtype == torch.bool:
        return replace(options, mask=seen if mask is None else seen & mask)
    return replace(options, mask=torch.where(seen, mask, -torch.inf))


def rule_call(
    query: Tensor, key: Tensor, scale: float, places: Places, before: Tensor | None, window: int | None
) -> RuleCall:
    """What rules are shown: keys laid by their places, and the queries with those before them."""
    dtype = working_dtype(query, key)
    query, key = query.to(dtype), key.to(dtype)
    slots, place, count = key.shape[2] + places.dropped, places.query, 0
    if places.last is None or bool((places.key != torch.arange(key.shape[2], device=key.device)).any()):
        key = lay(key, places.key, slots)
    if before is not None:
        count, stop = before.shape[2], (places.last or 0) + places.dropped - query.shape[2]
        back = places.row[:, stop - count : stop]
        query, place = torch.cat([before.to(dtype), query], 2), torch.cat([back, place], 1)
    return RuleCall(query, key, scale, place, window, count)


def visible_of(rules: ByLength, call: RuleCall) -> Tensor:
    """Bool [B, H, N, M], what the rules of all heads and lengths let be seen; of tokens after a query, all."""
    seen = visible_by_head(rules[-1][1], call)
    for length, heads in reversed(rules[:-1]):
        seen = torch.where(call.places < (length or 0), visible_by_head(heads, call), seen)
    return seen | (call.tokens > call.places)


def visible_by_head(rules: Rules, call: RuleCall) -> Tensor:
    """The same for the rules of one length; each kind of rule looks at all its heads at once."""
    heads = call.query.shape[1]
    shape = (*call.query.shape[:3], call.key.shape[2])
    if len(set(rules)) == 1:
        return rules[0].visible(call).expand(shape)
    seen = torch.empty(shape, dtype=torch.bool, device=call.key.device)
    for rule in dict.fromkeys(rules):
        index = [h for h in range(heads) if rules[h] == rule]
        seen[:, index] = rule.visible(call.heads(index)).expand(shape[0], len(index), *shape[2:])
    return seen
