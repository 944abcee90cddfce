"""Sparse rules as a mask: which keys the queries of a call may see.

Rules know texts without padding. So keys are moved to their places in the text, rules decide there,
and the result is moved back to the positions of the keys and combined with the mask of the call.
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
from ...utils.readable import can_read, is_exporting, is_recorded, raise_if
from ..selection.cache import QueriesKept
from ..selection.growing import TAKEN_BACK
from ..selection.places import Reading, read_mask
from ..selection.recent import RecentQueries
from .head_rules import HeadRules, Rules
from .pages import PageRule
from .rules import Exact, RuleCall, Window
from .selection import scatter_rows

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is added by Transformers
#: Rules defined in this package have a module name that begins with this.
OUR_RULES = __package__ or ""
#: Completions of `SEVERAL_TEXTS`: chunked attention in decoding, and attention layers that do not
#: pass their window.
GONE = "cache that drops tokens, in a layer that does not pass its sliding window"
HIDDEN_PREVIOUS = "mask that hides the token before one"
PACKED = "mask of several texts in a row"
#: The error for rows that rules do not know.
SEVERAL_TEXTS = (
    "sparse was called with a {} (packed texts, chunked attention), and its rules know rows of one whole text; "
    "allowed: one text a row, with padding, or layers= without this, or rules out of Exact() and Window(sinks=0)"
)


# Checks of masks that rules cannot describe


def check_one_text(reading: Reading, rules: HeadRules, window: int | None) -> None:
    """Raise if rows hold several texts or are read in chunks.

    Rules would take such a row for one whole text.

    Args:
        reading: Of the call's mask.
        rules: Of all heads. Rules that count only from the query may see such rows.
        window: Sliding window of the attention layer; None: none.

    Raises:
        ValueError: A real query does not see the real token before it, or a cache drops tokens
            without a window.
    """
    mask = reading.mask
    if mask is None or rules.are_local:
        return
    # `Exact` and `Window` need nothing of dropped tokens: the attention layer hides from them what
    # they would see.
    by_place = any(type(rule) not in (Exact, Window) for rule in rules.every_rule)
    if reading.places.dropped > 0 and window is None and by_place:
        raise ValueError(SEVERAL_TEXTS.format(GONE))
    # With a window of one token, every query only sees itself.
    if window is not None and window <= 1:
        return
    if not can_read(mask):
        raise_if(reading.find_hidden_previous(), SEVERAL_TEXTS.format(HIDDEN_PREVIOUS))
    elif reading.hides_previous:
        raise ValueError(SEVERAL_TEXTS.format(HIDDEN_PREVIOUS))


def check_unpacked(reading: Reading, rules: HeadRules) -> None:
    """Raise if a caller's own mask packs several texts into a row.

    Such a mask may hide any other keys.

    Args:
        reading: Of the mask.
        rules: Of all heads. Rules that count only from the query may see such rows.

    Raises:
        ValueError: A row holds several texts.
    """
    mask = reading.mask
    if mask is None or rules.are_local:
        return
    if not can_read(mask):
        raise_if(reading.mark_text_starts(), SEVERAL_TEXTS.format(PACKED))
    elif reading.find_text_starts() is not None:
        raise ValueError(SEVERAL_TEXTS.format(PACKED))


# Where the tokens of a call stand in their texts


@dataclass(frozen=True, eq=False)
class Text:
    """Where the queries and keys of a call stand in their texts.

    Args:
        reading: Of the call's mask.
        last: Number of keys so far; None if it cannot be read.
        before: Queries [B, H, T, d] that stood before the call; None if they are unknown.
        earlier: Number of earlier queries that the rules read.
    """

    reading: Reading
    last: int | None
    before: Tensor | None
    earlier: int

    @property
    def places(self) -> Places:
        """Where queries and keys stand."""
        return self.reading.places

    def has_earlier_queries(self, queries: int) -> bool:
        """Return whether `before` holds all queries that this many queries may need."""
        needed = min(self.earlier, (self.last or 0) - queries)
        return not needed or (self.before is not None and self.before.shape[2] >= needed)


@torch.no_grad()
def read_text(
    query: Tensor,
    key: Tensor,
    reading: Reading,
    rules: HeadRules,
    recent: RecentQueries | QueriesKept | None = None,
) -> Text:
    """Return where the tokens of a call stand in their texts.

    Run it once per call, because it changes `recent`.

    Args:
        query, key, rules: As in `mask_by_rules`.
        reading: Of the call's mask.
        recent: Queries left by earlier calls with the same cache; this call adds its own. None: no
            cache.

    Raises:
        ValueError: The call is exported or traced, or it is a compiled decoding step whose queries
            share a selection.
    """
    if is_exporting() or torch.jit.is_tracing():
        raise ValueError(
            "sparse rules cannot be exported or traced: pages and chunks are laid out for the lengths of a call; "
            "allowed: unpatch_model, or layers whose rules are all Exact()"
        )
    n, places = query.shape[2], reading.places
    last = places.stop if can_read(key, reading.mask) else None
    earlier = rules.earlier
    before = None
    if earlier and recent is not None and last is not None:
        # Counted from the beginning of the row, including tokens that a cache has dropped.
        stop = last + places.dropped
        # Keep more than needed: assisted decoding takes some tokens back before the next call.
        kept = earlier + 1 + TAKEN_BACK
        before = recent.go_on(
            query,
            key,
            start=last - n,
            least=places.count_slots(stop - n, earlier),
            most=places.count_slots(stop - n, kept),
            count=places.count_slots(stop, kept),
            dropped=places.dropped,
        )
    elif earlier and is_recorded() and n < key.shape[2]:
        raise ValueError(
            "a sparse rule that shares a selection among queries cannot decode in a compiled or exported call; "
            "allowed: query='own', or decoding that is not compiled"
        )
    return Text(reading=reading, last=last, before=before, earlier=earlier)


# The mask


def mask_by_rules(
    query: Tensor,
    key: Tensor,
    scale: float,
    options: Options,
    rules: HeadRules,
    text: Text | None = None,
    window: int | None = None,
) -> Options:
    """Return the options of a call with a mask that also hides what its rules hide.

    An additive mask keeps its gradient.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d], as rules see them.
        scale: The attention logit is scale · q·k.
        options: Of the call.
        rules: One for each query head.
        text: The result of `read_text`. None: a causal call whose first token is key 0, without a
            cache.
        window: Sliding window of the attention layer; None: none.

    Raises:
        ValueError: A rule reads earlier queries that are not known.
    """
    if rules.are_exact:
        return options
    log_masked_rules(rules)
    return hide_unseen(options, _find_seen(query, key, scale, options, rules, text, window))


@torch.no_grad()
def _find_seen(
    query, key, scale, options: Options, rules: HeadRules, text: Text | None, window: int | None
) -> Tensor:
    """Return bool [B, H, N, M], the keys that rules show.

    Arguments are as in `mask_by_rules`.
    """
    if text is None:
        text = read_text(query, key, read_mask(query, key, options, True), rules)
    key_numbers = text.places.key_numbers
    call = make_rule_call(query, repeat_heads(key, query.shape[1]), scale, text, window)
    # The first rows belong to earlier queries, which are in the call for the selection only.
    seen = find_visible(rules, call)[:, :, call.earlier :]
    # Move the result from tokens of the text back to keys of the call. Padding has the number -1.
    slots = key_numbers.clamp_min(0)[:, None, None].expand(*seen.shape[:3], -1)
    return seen.gather(3, slots) & (key_numbers >= 0)[:, None, None]


def hide_unseen(options: Options, seen: Tensor) -> Options:
    """Return the options with a mask that also hides keys that are not seen.

    Args:
        options: Of the call.
        seen: Bool [B, H, N, M].
    """
    mask = options.mask
    if mask is None:
        return replace(options, mask=seen)
    if mask.dtype == torch.bool:
        return replace(options, mask=seen & mask)
    return replace(options, mask=torch.where(seen, mask, -torch.inf))


def make_rule_call(
    query: Tensor, key: Tensor, scale: float, text: Text, window: int | None
) -> RuleCall:
    """Return the call as rules see it.

    Keys are at their places in the text, and the call's queries follow earlier ones.

    Args:
        query, key: [B, H, N, d] and [B, H, M, d].
        scale, text, window: As in `mask_by_rules`.
    """
    places, before = text.places, text.before
    # Selections are made in float32 at least: in half precision, close scores round to one number.
    dtype = working_dtype(query, key)
    query = query.to(dtype)
    key = key.to(dtype)
    place = places.query_numbers.expand(len(query), -1)
    # Without padding and dropped tokens, key j is token j already.
    if text.last is None or not places.is_whole:
        key = scatter_rows(key, places.key_numbers, key.shape[2] + places.dropped)
    count = 0
    if before is not None:
        count = before.shape[2]
        stop = (text.last or 0) + places.dropped - query.shape[2]
        back = places.numbers[:, stop - count : stop].expand(len(query), -1)
        query = torch.cat([before.to(dtype), query], 2)
        place = torch.cat([back, place], 1)
    return RuleCall(
        query=query,
        key=key,
        scale=scale,
        place=place,
        window=window,
        earlier=count,
        lengths=None if text.reading.is_causal else count_tokens(places),
    )


def count_tokens(places: Places) -> Tensor:
    """Return int64 [B|1], the number of real tokens in each row."""
    if places.real is None:
        return torch.full((1,), places.keys, device=places.device)
    return places.real.sum(1)


def find_visible(rules: HeadRules, call: RuleCall) -> Tensor:
    """Return bool [B, H, N, M], the keys that the rules of all lengths show.

    The mask of the call hides later tokens, so all of them count as visible here. In a call that is
    not causal, padded queries see everything, as far as the mask of the model lets them.
    """
    seen = find_visible_by_head(rules.by_length[-1][1], call)
    # From the longest length to the shortest, so that the rules of the shortest that fits win.
    for length, heads in reversed(rules.by_length[:-1]):
        seen = torch.where(call.places < (length or 0), find_visible_by_head(heads, call), seen)
    return seen | (call.tokens > call.places if call.is_causal else call.places < 0)


def find_visible_by_head(rules: Rules, call: RuleCall) -> Tensor:
    """Return bool [B, H, N, M], the keys that the rules of one length show."""
    batch, heads, queries = call.query.shape[:3]
    keys = call.key.shape[2]
    if len(set(rules)) == 1:
        return rules[0].visible(call).expand(batch, heads, queries, keys)
    seen = torch.empty(batch, heads, queries, keys, dtype=torch.bool, device=call.key.device)
    # Heads with equal rules are computed together.
    for rule in dict.fromkeys(rules):
        index = [h for h in range(heads) if rules[h] == rule]
        seen[:, index] = rule.visible(call.heads(index)).expand(batch, len(index), queries, keys)
    return seen


# The log line for rules that a user expects on the kernel


def log_masked_rules(rules: HeadRules) -> None:
    """Log once for each rule from outside this package that it runs under a mask."""
    if torch.compiler.is_compiling():
        return
    for kind, name in dict.fromkeys((type(rule), rule.name) for rule in rules.every_rule):
        if not kind.__module__.startswith(OUR_RULES):
            logger.warning_once(
                f"hf_hyperattn: the sparse rule {name!r} runs under a mask of all pairs, which saves no time. "
                + explain_mask(kind)
            )


def explain_mask(kind: type) -> str:
    """Return the sentence that explains why a foreign rule runs under a mask.

    Args:
        kind: Its class, from outside this package.
    """
    served = "causal calls on a CPU in float32 and bfloat16, and on a GPU"
    if not issubclass(kind, PageRule):
        return f"Rules that derive from hf_hyperattn.rules.PageRule run on the kernel in {served}."
    changed = kind.find_changed_method()
    if changed:
        return f"It overrides PageRule.{changed}, which the kernel computes itself. Define score_pages alone."
    return f"The kernel does not take this call. It takes {served}; docs/rules.md lists the exceptions."
