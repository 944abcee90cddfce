"""Sparse attention on a kernel: only visible pairs are computed.

Read here which calls and heads the kernels for CPUs and GPUs take, and how they are prepared for
them. Everything else runs under masks (`masking.py`), with the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...engines import DOT, Options, PairScore, attention, dot_score, repeat_heads, triton
from ...engines.cpu import selected
from ...engines.selected import BY, KEPT, HeadRule, SelectedKernel, shapes_of_choice
from ...engines.selection import Lists, Summaries
from ...utils.attached import attached_to
from ...utils.readable import can_read
from ..selection.cache import LayerCache
from ..selection.places import Reading
from .head_rules import HeadRules
from .masking import Text, make_rule_call, mask_by_rules
from .pages import PageRule, Pages
from .pages_kept import LastChoice, find_summaries
from .rules import Exact, SparseRule, Window

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is added by Transformers
#: A window of this many tokens covers every text.
EVERYTHING = 2**40
#: Numbers of keys that rules which choose in torch see at a time: in a prompt, and in decoding, where
#: a few heads at a time would take longer than the choice itself.
MOST_NUMBERS, MOST_DECODED = 2**22, 2**26
#: Queries whose pages are listed at a time, if torch lists them.
MOST_QUERIES = 4096
#: For each row of the batch: the first real key, and the index after the last one.
Spans = tuple[list[int], list[int]]


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """The tensors of a call, all in the one dtype that the kernel reads.

    Args:
        query: [B, H, earlier + N, d], the queries that choose pages: earlier ones, then the call's
            own.
        key: [B, Hkv, M, d], the keys that are searched.
        raw_query, raw_key: [B, H, N, d] and [B, Hkv, M, d], whose products are the attention
            logits.
        value: [B, Hkv, M, dv].
        bias: [B, H, M], added to the logits; None: none.
        earlier: Number of queries before the call in `query`.
    """

    query: Tensor
    key: Tensor
    raw_query: Tensor
    raw_key: Tensor
    value: Tensor
    bias: Tensor | None
    earlier: int


def attend_by_kernel(
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
    """Return the attention output, or None if the kernel does not compute this call.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d]; rules choose keys by these.
        score: Gives the attention logits. The kernel only computes dot products.
        value: [B, Hkv, M, dv].
        options, rules, window: As in `masking.mask_by_rules`.
        text: Where queries and keys stand, and the queries before them.
        backend: The requested engine.
        asker: Name of the layer; the cache stores the layer's choice of pages under it.

    Returns:
        [B, H, N, dv] in the dtype of the query, or None.
    """
    kernel, obstacle = find_kernel(query, key, score, value, backend)
    obstacle = obstacle or find_call_obstacle(score, options, text, key.shape[2], window)
    spans = None if obstacle else read_spans(text.reading, window)
    if kernel is None or spans is None:
        log_masked_call(query, obstacle or MASKED_SPANS)
        return None
    # Query 0 is key `last - n`. With rules for several lengths, each stretch is a kernel call of
    # its own.
    last, n = text.last or 0, query.shape[2]
    stretches = split_queries(rules, spans[0], last - n, n)
    if not stretches:
        return None
    known = [translate_rules(rules, place, query.shape[3]) for place, _ in stretches]
    # A head runs under a mask if the kernel does not know its rule in some stretch.
    rest = [h for h, of_head in enumerate(zip(*known, strict=True)) if None in of_head]
    if rest:
        log_masked_call(query, "a rule has no kernel")
    if len(rest) == query.shape[1]:
        return None
    inputs = convert_inputs(query, key, score, value, options, text)
    call = KernelCall(
        kernel=kernel,
        query=query,
        key=key,
        score=score,
        options=options,
        rules=rules,
        text=text,
        window=window,
        asker=asker,
        inputs=inputs,
        spans=spans,
    )
    out = call.attend(stretches, known)
    out = zero_hidden_rows(out.to(query.dtype), text.reading)
    # Heads with other rules run under masks, all at once.
    if not rest:
        return out
    others = attend_by_masks(rest, query, key, score, value, options, rules, text, window)
    return out.index_copy(1, torch.tensor(rest, device=out.device), others.to(out.dtype))


# Not frozen: a frozen class takes longer to make, and decoding makes one per layer and token.
@dataclass(eq=False)
class KernelCall:
    """A call that a kernel computes, stretch by stretch.

    Args:
        kernel: The kernel.
        query, key, score, options, rules, text, window, asker: As in `attend_by_kernel`.
        inputs: The tensors in the dtype of the kernel.
        spans: The real keys of each row.
    """

    kernel: SelectedKernel
    query: Tensor
    key: Tensor
    score: PairScore
    options: Options
    rules: HeadRules
    text: Text
    window: int | None
    asker: str
    inputs: KernelInputs
    spans: Spans

    def attend(self, stretches: list[tuple[int, range]], known: list) -> Tensor:
        """Return the output of all heads, [B, H, N, dv].

        Args:
            stretches: From `split_queries`.
            known: The kernel's rule of each head, for each stretch.
        """
        if self.kernel.chooses_pages and len(stretches) == 1:
            return self.attend_stretch(known[0], *stretches[0])
        inputs = self.inputs
        is_learned = torch.is_grad_enabled() and any(
            t.requires_grad for t in (inputs.raw_query, inputs.raw_key, inputs.value)
        )
        if not self.kernel.chooses_pages and not is_learned:
            stretches, known = cut_stretches(stretches, known)
        if len(stretches) == 1:
            return self.attend_stretch(known[0], *stretches[0])
        pairs = zip(known, stretches, strict=True)
        if is_learned:
            return torch.cat([self.attend_stretch(heads, *stretch) for heads, stretch in pairs], 2)
        # Parts and their concatenation would hold the output twice.
        out = inputs.value.new_empty(*self.query.shape[:3], inputs.value.shape[3])
        for heads, (place, queries) in pairs:
            out[:, :, queries.start : queries.stop] = self.attend_stretch(heads, place, queries)
        return out

    def attend_stretch(
        self, heads: tuple[HeadRule | None, ...], place: int, queries: range
    ) -> Tensor:
        """Return the output of one stretch.

        Args:
            heads: The kernel's rule of each head; None: unknown, with an arbitrary output.
            place: Index of the length in `rules.by_length`.
            queries: The queries of the stretch.
        """
        kernel_rules = [HeadRule(near=1) if rule is None else rule for rule in heads]
        offset = (self.text.last or 0) - self.query.shape[2]
        chosen = None
        if any(rule.page for rule in kernel_rules):
            chosen = self.choose_pages(place, kernel_rules, queries)
        return self.kernel.attend(
            self.inputs.raw_query[:, :, queries.start : queries.stop],
            self.inputs.raw_key,
            self.inputs.value,
            kernel_rules,
            chosen,
            spans=self.spans,
            offset=offset + queries.start,
            scale=self.score.scale,
            softcap=self.options.softcap,
            window=self.window,
            sinks=self.options.sinks,
            bias=self.inputs.bias,
        )

    def choose_pages(self, place: int, kernel_rules: Sequence[HeadRule], queries: range) -> Lists:
        """Return the pages that the queries of one stretch choose.

        In decoding, chunks that have chosen already go on with the choice in the cache.

        Args:
            place: Index of the length in `rules.by_length`.
            kernel_rules: The kernel's rule of each head.
            queries: The queries of the stretch.
        """
        # Number of keys up to the last query of the stretch, padding included.
        stop = (self.text.last or 0) - self.query.shape[2] + queries.stop
        # The cache describes all its keys. It does not fit a stretch that ends before the last one.
        cache = attached_to(self.inputs.key, LayerCache) if stop == self.key.shape[2] else None

        def find_pages(rules: Sequence[HeadRule], kept: Lists | None) -> Lists:
            own = self.list_pages(place, rules, queries)
            if not self.kernel.chooses_pages:
                return put_lists(own, rules, kept, self.key, len(queries))
            if own:
                kept = put_lists(own, rules, kept, self.key, len(queries))
            summaries = find_all_summaries(cache, self.inputs.key, kernel_rules, self.spans, own)
            query = self.inputs.query[:, :, : self.inputs.earlier + queries.stop]
            return selected.chosen_pages(
                query,
                self.inputs.key,
                rules,
                spans=self.spans,
                offset=stop - query.shape[2],
                earlier=query.shape[2] - len(queries),
                summaries=summaries,
                kept=kept,
                window=self.window,
            )

        # Only a decoding step can go on with the choice of the step before.
        if cache is None or len(queries) > 1:
            return find_pages(kernel_rules, None)
        last_choice = cache.get_kept(("choice", self.asker), LastChoice)
        return last_choice.choose_pages(kernel_rules, self.spans, stop, find_pages)

    def list_pages(
        self, place: int, kernel_rules: Sequence[HeadRule], queries: range
    ) -> dict[int, Tensor]:
        """Return the pages of the heads whose rules choose them in torch.

        Args:
            place: Index of the length in `rules.by_length`.
            kernel_rules: The kernel's rule of each head. `Pages` by `KEPT` go on with an earlier
                choice.
            queries: A range of the queries of the call.

        Returns:
            By head, int32 [B, chunks, most], as `Lists` holds them.
        """
        query, key, before = self.query, self.key, self.text.before
        heads_of: dict[PageRule, list[int]] = {}
        for h, rule in enumerate(self.rules.by_length[place][1]):
            own: PageRule | None = find_listing_rule(rule)
            # Exact type: a subclass may choose in another way.
            is_pages = type(rule) is Pages and not self.kernel.chooses_pages
            if isinstance(rule, Pages) and is_pages and kernel_rules[h].by != KEPT:
                own = rule
            if own is not None and kernel_rules[h].page:
                heads_of.setdefault(own, []).append(h)
        if not heads_of:
            return {}
        group = query.shape[1] // key.shape[1]
        # A few heads at a time: rules see float32 keys for each query head.
        most = MOST_NUMBERS if query.shape[2] > 1 else MOST_DECODED
        step = max(1, most // max(1, key.numel() // key.shape[1]))
        found: dict[int, Tensor] = {}
        # The choice of pages has no gradient.
        with torch.no_grad():
            for rule, all_heads in heads_of.items():
                for first in range(0, len(all_heads), step):
                    heads = all_heads[first : first + step]
                    text = replace(self.text, before=None if before is None else before[:, heads])
                    shared = key[:, [h // group for h in heads]]
                    call = make_rule_call(
                        query[:, heads], shared, self.score.scale, text, self.window
                    )
                    lists = rule.list_pages(call, queries)
                    found |= dict(zip(heads, lists.unbind(1), strict=True))
        return found


# Which calls the kernel takes


def find_kernel(
    query: Tensor, key: Tensor, score: PairScore, value: Tensor, backend: str
) -> tuple[SelectedKernel | None, str]:
    """Return the kernel for these tensors and this engine, and the reason if there is none.

    Args:
        query, key, score, value, backend: As in `attend_by_kernel`.
    """
    tensors = query, key, score.raw_query, score.raw_key, value
    if backend in ("auto", "cpu") and selected.serves(*tensors):
        return selected.kernel, ""
    # On CPUs the kernels for GPUs run only in Triton's interpreter, which is very slow.
    if backend == "triton" or (backend == "auto" and query.device.type == "cuda"):
        obstacle = triton.find_selected_obstacle(*tensors)
        if obstacle is None:
            # Imported here: Triton may be missing, and its import takes half a second.
            from ...engines.triton.selected import kernel

            return kernel, ""
        return None, obstacle
    return None, f"no kernel for backend={backend!r} on {query.device.type}"


def find_call_obstacle(
    score: PairScore, options: Options, text: Text, keys: int, window: int | None
) -> str:
    """Return why no kernel can compute a call; "" if one may.

    Args:
        score, options, text, window: As in `attend_by_kernel`.
        keys: M.
    """
    if not text.reading.is_causal:
        return "it is not causal"
    if not can_score(score, options, keys):
        return "it has dropout, a bias or a mask with a gradient, or scores other than dot products"
    if text.last is None or text.last > keys:  # unknown, or queries after the last key
        return "it is unknown which keys belong to the queries"
    if options.mask is None and window not in (None, options.window) and window < keys:
        # Nothing tells the kernel that this call hides keys outside the window.
        return "its sliding window is unknown to the mask"
    if not text.has_earlier_queries(text.places.queries):
        return "queries before the call are unknown"
    return ""


#: The reason if `read_spans` finds none.
MASKED_SPANS = "its mask hides more than padding, later keys and keys outside the window"


def log_masked_call(query: Tensor, obstacle: str) -> None:
    """Log once for each reason that a call on a GPU runs under a mask of all pairs."""
    if query.device.type == "cuda" and not torch.compiler.is_compiling():
        logger.warning_once(
            "hf_hyperattn: sparse rules run under a mask of all pairs on a GPU, which saves no time; the kernel does "
            f"not take this call: {obstacle}"
        )


def can_score(score: PairScore, options: Options, keys: int) -> bool:
    """Return whether the kernel computes this score with these options.

    The kernel computes dot products, with a softcap, sink logits, and a bias that is the same for
    all queries. It has no gradient of a bias or a mask.

    Args:
        score: Gives the attention logits.
        options: Of the call.
        keys: M.
    """
    is_dot = len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None
    if not is_dot or options.dropout_p or options.aggregation is not None:
        return False
    bias, mask = options.bias, options.mask
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (bias, mask)):
        return False
    if bias is None:
        return True
    if bias.ndim < 2 or bias.shape[-1] not in (1, keys):
        return False
    # A stride of 0 means that one row was expanded over the queries.
    return bias.shape[-2] == 1 or bias.stride(-2) == 0


def read_spans(reading: Reading, window: int | None) -> Spans | None:
    """Return the first real key of each row and the index after the last one.

    Args:
        reading: Of the call's mask.
        window: Sliding window of the attention layer; None: none.

    Returns:
        The spans. None if the mask hides anything but padding, later keys and keys outside the
        window, if padding stands between real keys, if keys were dropped, or if the mask cannot be
        read.
    """
    places = reading.places
    if reading.mask is None:
        return places.spans if places.is_whole else None
    if places.dropped or not can_read(reading.mask) or not reading.shows_by_place(window):
        return None
    return places.spans


# How a call is prepared for the kernel


def convert_inputs(
    query: Tensor, key: Tensor, score: PairScore, value: Tensor, options: Options, text: Text
) -> KernelInputs:
    """Return the tensors of a call in one dtype; arguments as in `attend_by_kernel`."""
    given = query, key, score.raw_query, score.raw_key, value
    # Under autocast, rotated queries and keys are float32 and values are rounded to half precision.
    dtype = query.dtype if len({t.dtype for t in given}) == 1 else torch.float32
    asking = query.to(dtype)
    searched = key.to(dtype)
    # Usually the tensors that rules see also give the logits. Then they are converted only once.
    raw_query = asking if score.raw_query is query else score.raw_query.to(dtype)
    raw_key = searched if score.raw_key is key else score.raw_key.to(dtype)
    earlier = 0
    if text.before is not None:
        asking = torch.cat([text.before.to(dtype), asking], 2)
        earlier = text.before.shape[2]
    return KernelInputs(
        query=asking,
        key=searched,
        raw_query=raw_query,
        raw_key=raw_key,
        value=value.to(dtype),
        bias=expand_key_bias(options.bias, query, key),
        earlier=earlier,
    )


def expand_key_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a bias that `can_score` allows as [B, H, M]; None without a bias."""
    if bias is None:
        return None
    batch, heads = query.shape[:2]
    return bias[..., :1, :].expand(batch, heads, 1, key.shape[2])[:, :, 0]


def split_queries(
    rules: HeadRules, starts: list[int], offset: int, queries: int
) -> list[tuple[int, range]] | None:
    """Split the queries of a call into stretches in which every head has one rule.

    Args:
        rules: Of the heads.
        starts: First real key of each row.
        offset: The key that belongs to query 0.
        queries: Number of queries.

    Returns:
        For each stretch, its place in `rules.by_length` and its queries. None if rows begin at
        different keys and would be split at different queries.
    """
    stretches = []
    first = 0
    for place, length in enumerate(rules.lengths[:-1]):
        # Lengths count real tokens, so a row that begins later is also split later.
        stops = {
            min(max(start + (length or 0) - offset, first), queries) for start in starts or [0]
        }
        if len(stops) > 1:
            return None
        stop = stops.pop()
        if stop > first:
            stretches.append((place, range(first, stop)))
        first = stop
    if first < queries:
        stretches.append((len(rules.lengths) - 1, range(first, queries)))
    return stretches


def cut_stretches(stretches: list[tuple[int, range]], known: list) -> tuple[list, list]:
    """Cut stretches into pieces of at most `MOST_QUERIES` queries.

    The lists of the pages that their queries choose then take little memory.

    Args:
        stretches: From `split_queries`.
        known: Something for each stretch; each piece gets that of its stretch.
    """
    pieces, of_pieces = [], []
    for (place, queries), own in zip(stretches, known, strict=True):
        for first in range(queries.start, queries.stop, MOST_QUERIES):
            pieces.append((place, range(first, min(first + MOST_QUERIES, queries.stop))))
            of_pieces.append(own)
    return pieces, of_pieces


@lru_cache(maxsize=256)
def translate_rules(rules: HeadRules, place: int, dim: int) -> tuple[HeadRule | None, ...]:
    """Return the kernel's rule of each head; None for rules it does not know.

    Args:
        rules: Of the heads. Calls of a layer share this object, and `HeadRules` compares by
            identity, so the cache finds the result again without comparing any rule.
        place: Index of the length in `rules.by_length`.
        dim: Width of a query.
    """
    length, heads = rules.by_length[place]
    if place == len(rules.by_length) - 1:
        length = None  # the last rules hold to the end of the text
    return tuple(None if cuts_chunk(rule, length) else translate_rule(rule, dim) for rule in heads)


def cuts_chunk(rule: SparseRule, length: int | None) -> bool:
    """Return whether a length cuts a chunk whose pages depend on all its queries.

    The kernel only gets the queries up to the length. `Pages` that choose by the whole chunk need
    later ones, too.

    Args:
        rule: Of one head.
        length: The rule holds up to this length; None: to the end.
    """
    if length is None or type(rule) is not Pages or rule.query != "chunk":
        return False
    return length % rule.chunk != 0


def translate_rule(rule: SparseRule, dim: int) -> HeadRule | None:
    """Return a rule in the kernel's form; None if the kernel does not know it.

    Args:
        rule: Of one head.
        dim: Width of a query.
    """
    # Compared by exact type: a subclass may define another `visible`.
    if type(rule) is Exact:
        return HeadRule(near=EVERYTHING)
    if type(rule) is Window:
        return HeadRule(near=rule.near, sinks=rule.sinks)
    if type(rule) is Pages:
        return HeadRule(
            near=rule.near,
            sinks=rule.sinks,
            page=rule.page,
            chunk=rule.chunk,
            top=rule.top,
            bounds=int(rule.summary == "bounds"),
            by=BY.index(rule.query),
            channels=rule.channels_of(dim),
        )
    own = find_listing_rule(rule)
    if own is None:
        return None
    # KEPT: torch chooses the pages, and the kernel reads them from a list.
    return HeadRule(
        near=own.near, sinks=own.sinks, page=own.page, chunk=own.chunk, top=own.top, by=KEPT
    )


# Pages that queries choose


def find_all_summaries(
    cache: LayerCache | None,
    key: Tensor,
    rules: Sequence[HeadRule],
    spans: Spans,
    own: dict[int, Tensor],
) -> list[Summaries | None]:
    """Return the summaries of pages that the cache of the keys keeps, by head; [] without a cache.

    Args:
        cache: Cache of the keys, or None.
        key: [B, Hkv, M, d].
        rules: The kernel's rule of each head.
        spans: The real keys of each row.
        own: Pages of heads whose rules choose them in torch, see `KernelCall.list_pages`.
    """
    if cache is None:
        return []
    # The summary of a page of one key is that key, which the cache already holds.
    return [
        find_summaries(cache, key, rule.page, rule.bounds, spans[0])
        if rule.page > 1 and h not in own
        else None
        for h, rule in enumerate(rules)
    ]


def find_listing_rule(rule: SparseRule) -> PageRule | None:
    """Return the rule if it lists its pages in torch; else None.

    The kernel finds the pages of `Pages` itself. It also computes which tokens are near, so a rule
    that overrides that method of `PageRule` runs under a mask.
    """
    if not isinstance(rule, PageRule) or type(rule) is Pages:
        return None
    # PageRule.__post_init__ sets chunk to 1 if query is "own". A subclass may not have called it.
    if rule.query == "own" and rule.chunk != 1:
        return None
    return None if rule.find_changed_method() else rule


def put_lists(
    own: dict[int, Tensor], rules: Sequence[HeadRule], kept: Lists | None, key: Tensor, queries: int
) -> Lists:
    """Return the known pages, with those in `own` put in for their heads.

    Args:
        own: By head, int32 [B, chunks, most].
        rules: The kernel's rule of each head.
        kept: Pages that are already known; None: none.
        key: [B, Hkv, M, d].
        queries: Number of queries that choose.
    """
    shapes = shapes_of_choice(rules, queries, key.shape[2])
    # -1: no page. Every head needs a table of its shape, also the heads that are not in `own`.
    if kept is None:
        parts = [
            torch.full((len(key), *shape), -1, dtype=torch.int32, device=key.device)
            for shape in shapes
        ]
    else:
        parts = kept.of_heads()
    rows = torch.cat([own.get(h, part).flatten(1) for h, part in enumerate(parts)], 1)
    return Lists(rows, shapes)


# Parts of the output that the kernel does not compute


def zero_hidden_rows(out: Tensor, reading: Reading) -> Tensor:
    """Set the output [B, H, N, dv] to 0 at queries that see no key.

    The kernel gets no mask, only where the real keys begin and end. Without this step, padded
    queries would attend to the real keys before them.
    """
    if reading.mask is None or reading.places.is_whole or not reading.has_padded_queries:
        return out
    return out.masked_fill(~reading.sees_something, 0.0)


def attend_by_masks(
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
    """Return the output of some heads under a mask, [B, len(heads), N, dv].

    Args:
        heads: Indices of these query heads.
        query, key, score, value, options, rules, text, window: As in `attend_by_kernel`, of all
            heads.
    """
    every = query.shape[1]

    def select_key_heads(t: Tensor) -> Tensor:
        return repeat_heads(t, every)[:, heads]

    def select_rows(t: Tensor | None) -> Tensor | None:
        # A mask or bias with one head for all stays as it is.
        return t[:, heads] if t is not None and t.ndim == 4 and t.shape[1] == every else t

    options = replace(
        options,
        mask=select_rows(options.mask),
        bias=select_rows(options.bias),
        sinks=None if options.sinks is None else options.sinks[heads],
    )
    text = replace(text, before=None if text.before is None else text.before[:, heads])
    # Rules select by the queries and keys of the call. The logits may come from other ones.
    hidden = mask_by_rules(
        query[:, heads],
        select_key_heads(key),
        score.scale,
        options,
        rules.select_rules(heads),
        text,
        window,
    )
    of_heads = dot_score(score.raw_query[:, heads], select_key_heads(score.raw_key), score.scale)
    return attention(of_heads, select_key_heads(value), hidden)[0]
