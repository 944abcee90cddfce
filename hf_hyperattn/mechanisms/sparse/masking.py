"""Sparse rules as the mask of a call: where its tokens stand in their rows, and which keys its queries then see.

A rule knows texts without padding. So keys are laid by their places, the rules of all heads look at them, and what
they say goes back to where the keys stand, beside the masks that the call has anyway.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...engines import Options, repeat_heads
from ...engines.score import working_dtype
from ...engines.selection import Places
from ...readable import can_read, is_exporting, is_recorded, raise_if
from ..selection.cache import QueriesKept
from ..selection.growing import TAKEN_BACK
from ..selection.places import Reading, read_mask
from ..selection.recent import RecentQueries
from .head_rules import HeadRules, Rules
from .pages import PageRule
from .rules import Exact, RuleCall, Window
from .selection import lay

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'
#: Where the rules of this package are defined.
OUR_RULES = __package__ or ""
#: What `check_one_text` says of chunked attention in decoding, and of hosts that do not pass their window.
GONE = "cache that drops tokens, of whose sliding window nobody tells attention"
HIDDEN_PREVIOUS = "mask that hides the token before one"
PACKED = "mask of several texts in a row"
#: The error for rows that rules do not know.
SEVERAL_TEXTS = (
    "sparse was called with a {} (packed texts, chunked attention), and its rules know rows of one whole text; "
    "allowed: one text a row, with padding, or layers= without this, or rules out of Exact() and Window(sinks=0)"
)


def check_one_text(reading: Reading, rules: HeadRules, window: int | None) -> None:
    """Refuse rows that hold several texts, or that are read in chunks, which rules would take for one whole text.

    Args:
        reading: of the call's mask.
        rules: those that count from the query alone may see such rows.
        window: as in `masked`.

    Raises:
        ValueError: a real query does not see the real token before it, or a cache drops tokens without a window.
    """
    mask = reading.mask
    if mask is None or rules.are_local:
        return
    # of a dropped token windows need nothing: what they would see of it, the host hides
    by_place = any(type(rule) not in (Exact, Window) for rule in rules.every)
    gone = reading.places.dropped > 0 and window is None and by_place
    if gone:
        raise ValueError(SEVERAL_TEXTS.format(GONE))
    if window is not None and window <= 1:
        return
    if not can_read(mask):
        raise_if(reading.find_hidden_previous(), SEVERAL_TEXTS.format(HIDDEN_PREVIOUS))
    elif reading.hides_previous:
        raise ValueError(SEVERAL_TEXTS.format(HIDDEN_PREVIOUS))


def check_unpacked(reading: Reading, rules: HeadRules) -> None:
    """Refuse a mask of a caller's own that packs several texts into a row; it may hide anything else.

    Args:
        reading: of the mask.
        rules: those that count from the query alone may see such rows.

    Raises:
        ValueError: a row holds several texts.
    """
    mask = reading.mask
    if mask is None or rules.are_local:
        return
    if not can_read(mask):
        raise_if(reading.mark_text_starts(), SEVERAL_TEXTS.format(PACKED))
    elif reading.find_text_starts() is not None:
        raise ValueError(SEVERAL_TEXTS.format(PACKED))


@dataclass(frozen=True, eq=False)
class Text:
    """What is known of the texts that a call is of.

    Args:
        reading: of the call's mask.
        last: how many keys there are so far; None where that cannot be read.
        before: queries [B, H, T, d] that stood before those of the call; None where they are not known.
        earlier: how many of those the rules read.
    """

    reading: Reading
    last: int | None
    before: Tensor | None
    earlier: int

    @property
    def places(self) -> Places:
        """Where queries and keys stand."""
        return self.reading.places

    def reaches(self, queries: int) -> bool:
        """Whether all queries are known that the selections of these many queries may read."""
        needed = min(self.earlier, (self.last or 0) - queries)
        return not needed or (self.before is not None and self.before.shape[2] >= needed)


@torch.no_grad()
def text_of(
    query: Tensor,
    key: Tensor,
    reading: Reading,
    rules: HeadRules,
    recent: RecentQueries | QueriesKept | None = None,
) -> Text:
    """What is known of a call's texts; to be called once a call, for it may change `recent`.

    Args:
        query, key, rules: as in `masked`.
        reading: of the call's mask.
        recent: the queries that calls with the same cache have left, None without a cache; this call leaves its own.

    Raises:
        ValueError: the call is exported or traced, or a selection is shared among queries in a decoding step that is
            compiled.
    """
    if is_exporting() or torch.jit.is_tracing():
        raise ValueError(
            "sparse rules cannot be exported or traced: pages and chunks are laid out for the lengths of a call; "
            "allowed: unpatch_model, or layers whose rules are all Exact()"
        )
    n, places = query.shape[2], reading.places
    last, dropped = places.stop if can_read(key, reading.mask) else None, places.dropped
    earlier = rules.earlier
    before = None
    if earlier and recent is not None and last is not None:
        start, stop = last - n, last + dropped
        # Some tokens may be taken back before the next call, as assisted decoding does.
        kept = earlier + 1 + TAKEN_BACK
        least, most = (places.count_slots(stop - n, tokens) for tokens in (earlier, kept))
        count = places.count_slots(stop, kept)
        before = recent.go_on(
            query, key, start=start, least=least, most=most, count=count, dropped=dropped
        )
    elif earlier and is_recorded() and n < key.shape[2]:
        raise ValueError(
            "a sparse rule that shares a selection among queries cannot decode in a compiled or exported call; "
            "allowed: query='own', or decoding that is not compiled"
        )
    return Text(reading, last, before, earlier)


def masked(
    query: Tensor,
    key: Tensor,
    scale: float,
    options: Options,
    rules: HeadRules,
    text: Text | None = None,
    window: int | None = None,
) -> Options:
    """The options of a call, with what its rules hide hidden; a mask that is added keeps its gradient.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d], which rules select by.
        scale: the logit is scale · q·k.
        rules: one for each query head.
        text: what `text_of` says of the call; None: of a causal one whose first token is key 0, and nothing is kept.
        window: the host's sliding window.

    Raises:
        ValueError: a rule reads queries before those of the call, which are not known.
    """
    if rules.are_exact:
        return options
    log_masked_rules(rules)
    return hide(options, _seen(query, key, scale, options, rules, text, window))


def log_masked_rules(rules: HeadRules) -> None:
    """Say once of each rule from outside this package that it runs under a mask."""
    if torch.compiler.is_compiling():
        return
    for kind, name in dict.fromkeys((type(rule), rule.name) for rule in rules.every):
        if not kind.__module__.startswith(OUR_RULES):
            logger.warning_once(
                f"hf_hyperattn: the sparse rule {name!r} runs under a mask of all pairs, which saves no time. "
                + explain_mask(kind)
            )


def explain_mask(kind: type) -> str:
    """Return the sentence that says why a rule of this class from outside this package runs under a mask."""
    served = "causal calls on the CPU in float32 and bfloat16"
    if not issubclass(kind, PageRule):
        return f"Rules that derive from hf_hyperattn.rules.PageRule run on the kernel in {served}."
    changed = kind.find_changed_method()
    if changed:
        return f"It overrides PageRule.{changed}, which the kernel computes itself. Define score_pages alone."
    return f"The kernel does not take this call. It takes {served}; docs/selection.md lists the exceptions."


@torch.no_grad()
def _seen(
    query, key, scale, options: Options, rules: HeadRules, text: Text | None, window: int | None
) -> Tensor:
    """Bool [B, H, N, M], what the rules let be seen; arguments as in `masked`."""
    text = (
        text_of(query, key, read_mask(query, key, options, True), rules) if text is None else text
    )
    places, heads = text.places, query.shape[1]
    call = rule_call(query, repeat_heads(key, heads), scale, text, window)
    seen = visible_of(rules, call)[:, :, call.earlier :]
    slots = places.key_numbers.clamp_min(0)[:, None, None].expand(*seen.shape[:3], -1)
    return seen.gather(3, slots) & (places.key_numbers >= 0)[:, None, None]


def hide(options: Options, seen: Tensor) -> Options:
    """The options with what is not `seen`, bool [B, H, N, M], hidden too."""
    mask = options.mask
    if mask is None or mask.dtype == torch.bool:
        return replace(options, mask=seen if mask is None else seen & mask)
    return replace(options, mask=torch.where(seen, mask, -torch.inf))


def rule_call(query: Tensor, key: Tensor, scale: float, text: Text, window: int | None) -> RuleCall:
    """What rules are shown: keys laid by their places, and the queries with those before them."""
    dtype, places, before = working_dtype(query, key), text.places, text.before
    query, key = query.to(dtype), key.to(dtype)
    slots, place, count = (
        key.shape[2] + places.dropped,
        places.query_numbers.expand(len(query), -1),
        0,
    )
    if text.last is None or not places.is_whole:
        key = lay(key, places.key_numbers, slots)
    if before is not None:
        count, stop = before.shape[2], (text.last or 0) + places.dropped - query.shape[2]
        back = places.numbers[:, stop - count : stop].expand(len(query), -1)
        query, place = torch.cat([before.to(dtype), query], 2), torch.cat([back, place], 1)
    lengths = None if text.reading.is_causal else count_tokens(places)
    return RuleCall(query, key, scale, place, window, count, lengths)


def count_tokens(places: Places) -> Tensor:
    """Return int64 [B|1], the real tokens of each row."""
    if places.real is None:
        return torch.full((1,), places.keys, device=places.device)
    return places.real.sum(1)


def visible_of(rules: HeadRules, call: RuleCall) -> Tensor:
    """Bool [B, H, N, M], what the rules of all heads and lengths let be seen.

    Causality is in the mask: of tokens after a query, all are seen here. So are all by padding in calls that are not
    causal, as far as the mask of the model lets it.
    """
    seen = visible_by_head(rules.by_length[-1][1], call)
    for length, heads in reversed(rules.by_length[:-1]):
        seen = torch.where(call.places < (length or 0), visible_by_head(heads, call), seen)
    return seen | (call.tokens > call.places if call.is_causal else call.places < 0)


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
