"""Attention tied over a hierarchy: one call, whatever its tying, score and masks (arXiv 2509.15448; docs/hsa.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...engines import DOT, Options, PairScore, ScoreTerm, repeat_heads
from ...hierarchy import Hierarchy
from ...readable import can_read, is_exporting, is_transformed
from ..selection.cache import EVICTING, KeepWindows, LayerCache
from ..selection.places import Reading, read_mask
from . import operator, portable
from .config import Rule
from .evicted import attend_evicted
from .masks import (
    cut,
    hierarchy_for,
    laid_by_text,
    mask_is_causal,
    restricted,
    without_first,
)
from .means_kept import levels_of
from .pairs import sibling_pairs
from .tree.both import both
from .windowed import native
from .windowed.key import attend_levels, key_tied
from .windowed.means import Levels

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Request:
    """What a call asks besides its score, values and masks.

    Args:
        hierarchy: of the M keys, as a `Hierarchy`, as group ids, or as window sizes; where attention is causal, of the
            first keys, whose groups the others continue.
        rule: how the call is tied.
        is_causal: whether queries see only earlier keys, also where a mask says it.
        backend: "auto", or with tying="key" one of `windowed.key.BACKENDS`.
        weights: also return the attention weights [B, H, N, M].
        cache: where keys and values come from one that keeps means; they are used where the call allows it.
        reading: what the mask of the call says; None: it is read here.
        evicted: whether a cache that is of no use to this call has not kept all keys: those of the call then are
            placeholders.
        chunk: after every so many tokens of a row the host's own attention begins again; 1 where it may hide any.
        position_ids: int64 [B|1, N] of the call, see `Reading.find_texts`.
        scale: what products of queries and keys are multiplied with.
    """

    hierarchy: Hierarchy | Tensor | tuple[int, ...]
    rule: Rule
    is_causal: bool
    backend: str = "auto"
    weights: bool = False
    cache: LayerCache | None = None
    reading: Reading | None = None
    evicted: bool = False
    chunk: int | None = None
    position_ids: Tensor | None = None
    scale: float = 1.0


def hierarchical(score: PairScore, value: Tensor, options: Options, request: Request) -> Result:
    """softmax(S')·V with logits tied over blocks of the hierarchy.

    Args:
        score: must be linear in key features: a dot product, also with HyPE, or the squared Lorentz distance.
        value: [B, Hkv, M, dv].
        options: masks and the rest. With tying="both" a mask may hide padding only.
        request: the hierarchy, and how the call is tied over it.

    Returns:
        The output [B, H, N, dv], and the weights or None, in the working dtype.

    Raises:
        ValueError: a score, softcap, mask, dropout or cache that the tying does not allow.
    """
    plain = len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None
    if plain and request.cache is not None and score.is_product:
        # The cache has what stands for these keys: they need no other dtype.
        query, key = score.raw_query.to(score.dtype) * score.scale, score.raw_key
    else:
        query, key = linear_features(score)
    value = repeat_heads(
        value, key.shape[1]
    )  # a term may have keys of its own for every query head
    if options.softcap is not None:
        raise ValueError(
            "hsa was called with a softcap, which is not linear in the keys; allowed: hosts without softcap"
        )
    if (is_exporting() or is_transformed()) and portable.supports(query, key, options, request):
        out, shares = portable.attend(query, key, value, options, request)
        return out, shares if request.weights else None
    if is_transformed():
        raise ValueError(
            "hsa was called inside torch.func's transforms, or for forward-mode derivatives, with what needs more than "
            "plain operators; allowed: windows over a whole row, a bool mask or none, and refinement where it is causal"
        )
    if not can_read(query, options.mask) and _needs_operator(options, request):
        return compiled(query, key, value, options, request)
    if request.cache is not None and not plain:  # its means are those of the host's keys
        request = replace(request, cache=None, evicted=request.cache.keep is not None)
    raw = score.raw_query, score.raw_key, value
    if plain and score.is_product and request.rule.tying == "key" and all(map(native.reads, raw)):
        query, key, request = (
            score.raw_query,
            score.raw_key,
            replace(request, scale=float(score.scale)),
        )
    return tied(query, key, value, options, request)


def tied(query: Tensor, key: Tensor, value: Tensor, options: Options, request: Request) -> Result:
    """`hierarchical` for features whose plain product is the score."""
    rule, is_causal = request.rule, request.is_causal
    reading = (
        read_mask(query, key, options, is_causal) if request.reading is None else request.reading
    )
    stop, dropped = reading.stop, reading.places.dropped
    spare = key.shape[2] - stop
    key, value, mask = key[:, :, :stop], value[:, :, :stop], options.mask
    mask = mask if mask is None or stop >= mask.shape[-1] else mask[..., :stop]
    hierarchy = hierarchy_for(request.hierarchy, len(query), dropped + stop, is_causal)
    real, place = None, None
    if mask is not None:
        real = reading.real_if_only_padding
        if real is None and rule.tying == "key":
            hierarchy, place = lay_under_mask(hierarchy, reading, request)
        else:
            there = reading.real_so_far if real is None else real
            hierarchy = restrict_once(hierarchy, there, reading, is_causal)
    hierarchy = cut(hierarchy, dropped + stop)
    if rule.tying == "both":
        key = key.to(query.dtype)
        out, weights = tied_both(
            query, key, value, replace(options, mask=mask), hierarchy, request, real
        )
    else:
        if options.mask is not None:
            options = replace(options, mask=mask if real is None or _learned(mask) else None)
        out, weights = _tied_keys(query, key, value, options, hierarchy, request, reading, place)
    # Where attention is not causal, a row of padding alone has the tree of a whole row.
    there = None if real is None or is_causal else real.any(1)[:, None, None, None]
    if there is not None and not bool(there.all()):
        out = out.masked_fill(~there, 0.0)
        weights = None if weights is None else weights.masked_fill(~there, 0.0)
    return out, weights if weights is None else torch.nn.functional.pad(weights, (0, spare))


def _tied_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    hierarchy: Hierarchy,
    request: Request,
    reading: Reading,
    place: Tensor | None = None,
) -> Result:
    """Key tying, by the means of the cache where they are what the call is about; padding is in no tree."""
    rule, mask, stop, dropped = request.rule, options.mask, key.shape[2], reading.places.dropped
    by_mask = mask_is_causal(options, request.is_causal)
    if mask is not None and by_mask:
        most = max(rule.sinks) if isinstance(rule.sinks, tuple) else rule.sinks
        hierarchy, without_sinks = without_first(hierarchy, dropped, most)
        rule = replace(rule, sinks=0) if without_sinks else rule
    ask = {
        "near": rule.near,
        "sinks": rule.sinks,
        "block_bias": rule.block_bias,
        "scale": request.scale,
        "sink_logit": options.sinks,
        "offset": stop - query.shape[2] if by_mask else options.offset,
    }
    plain = (
        mask is None
        and not dropped
        and not request.weights
        and request.backend in ("auto", "native")
    )
    cache = request.cache
    if cache is not None and plain:
        out = attend_cached(query, key, cache, hierarchy, options, rule, ask)
        if out is not None:
            return out, None
    if request.evicted or (cache is not None and cache.keep is not None):
        raise ValueError(
            "HierarchicalCache(evict=True) keeps too little for this call; allowed: windows, left padding and no other "
            "mask, no gradients, no attention weights; or evict=False"
        )
    return key_tied(
        query,
        key,
        value,
        hierarchy,
        is_causal=request.is_causal and (mask is None or options.is_causal),
        window=options.window,
        mask=mask,
        dropout_p=options.dropout_p,
        weights=request.weights,
        **ask,
        bias=None
        if options.bias is None or options.bias.shape[-1] == 1
        else options.bias[..., :stop],
        refine_top_k=rule.refine_top_k,
        backend=request.backend,
        place=place,
    )


def attend_cached(
    query: Tensor,
    key: Tensor,
    cache: LayerCache,
    hierarchy: Hierarchy,
    options: Options,
    rule: Rule,
    ask: dict,
) -> Tensor | None:
    """The output by the means that a cache keeps; None where they are not what this call is about.

    Args:
        ask: near, sinks, block_bias, scale, sink_logit and offset of the call.
    """
    check_kept(cache, rule)
    levels = cached_levels(cache, options, hierarchy, key, ask["offset"] + query.shape[2])
    # FLOP counters see operators alone.
    if levels is None or (cache.keep is None and torch._C._len_torch_dispatch_stack()):
        return None
    if levels.held is not None and not native.serves(query):
        return attend_evicted(query, levels, **ask)
    return attend_levels(
        query, levels, refine_top_k=rule.refine_top_k, is_causal=True, lse=False, **ask
    )[0]


def check_kept(cache: LayerCache, rule: Rule) -> None:
    """Raise where a cache has forgotten what this rule looks at, as after another patch.

    Raises:
        ValueError: It opens more tokens than were kept, or opens blocks by their scores.
    """
    keep = cache.keep
    if not isinstance(keep, KeepWindows):
        return
    largest = lambda x: max(x) if isinstance(x, tuple) else x
    near, sinks, top_k = map(largest, (rule.near, rule.sinks, rule.refine_top_k))
    if near > keep.near or sinks > keep.sinks or top_k:
        raise ValueError(
            f"{EVICTING} keeps {keep.near} near keys and {keep.sinks} first ones, and hsa asks for {near} and {sinks}, "
            f"with refine_top_k={top_k}; allowed: a cache that was made for this model, as it is patched now"
        )


def restrict_once(
    hierarchy: Hierarchy, real: Tensor | None, reading: Reading, is_causal: bool
) -> Hierarchy:
    """The hierarchy over the real tokens, made once for all layers."""
    if real is None:
        return hierarchy
    name = real is reading.real_if_only_padding, is_causal
    return reading.make_once(hierarchy, name, lambda: restricted(hierarchy, real, is_causal))


def lay_under_mask(
    hierarchy: Hierarchy, reading: Reading, request: Request
) -> tuple[Hierarchy, Tensor | None]:
    """The hierarchy under a mask that hides more than padding, and the number of each key in its text, int64 [B, M].

    Windows begin with every text, of which the mask may pack several into a row; other trees are what the caller says
    of the row. Numbers are None where rows hold one text.

    Args:
        hierarchy: of the keys that there are, and those that a cache has dropped.
        reading: of the mask.
    """
    texts = reading.find_texts(request.chunk, request.position_ids)
    if texts is not None and hierarchy.is_windows:
        if request.chunk is not None:  # position_ids may be others in the next call
            return laid_by_text(hierarchy, texts, request.is_causal), texts.place
        lay = lambda: laid_by_text(hierarchy, texts, request.is_causal)
        return reading.make_once(hierarchy, ("texts", request.is_causal), lay), texts.place
    return restrict_once(hierarchy, reading.real_so_far, reading, request.is_causal), None


def _learned(mask: Tensor | None) -> bool:
    """Whether a mask wants a gradient, also one that hides padding and no more."""
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()


def cached_levels(
    cache: LayerCache, options: Options, hierarchy: Hierarchy, key: Tensor, end: int
) -> Levels | None:
    """The means that a cache keeps, where they are what this call is about: None for other trees than windows, and
    everything that windows do not know.

    Args:
        end: one past the last query's token.
    """
    length = cache.length
    windowed = options.window is not None and options.window < length
    if windowed or options.bias is not None or options.dropout_p or not hierarchy.is_windows:
        return None
    if key.shape[2] != length or end != length or torch.is_grad_enabled():
        return None
    if isinstance(cache.keep, KeepWindows) and cache.keep.sizes != hierarchy.sizes:
        return None
    starts, stops = hierarchy.starts, hierarchy.stops
    if stops is not None and bool((stops != length).any()):
        return None
    return levels_of(
        cache, hierarchy.sizes or (), starts if starts is None else starts.expand(key.shape[0])
    )


def tied_both(
    query, key, value, options: Options, hierarchy: Hierarchy, request: Request, real
) -> Result:
    """`both`, after refusing what it has no meaning for."""
    refused = {
        "causal attention": options.is_causal,
        "a sliding window": options.window is not None,
        "attention sinks": options.sinks is not None,
        "attention dropout": bool(options.dropout_p),
        "a mask that hides more than padding": options.mask is not None and real is None,
        "a mask that wants a gradient": _learned(options.mask),
    }
    for name, there in refused.items():
        if there:
            raise ValueError(
                f"hsa with tying='both' was called with {name}, under which queries of a block differ; allowed: "
                "tying='key', or a call without it"
            )
    settings = dict(keep_diagonal=request.rule.keep_diagonal, position_bias=options.bias)
    out = both(query, key, value, hierarchy, 1.0, **settings)
    if not request.weights:
        return out, None
    every = torch.eye(key.shape[2], dtype=out.dtype, device=out.device).expand(
        *key.shape[:2], -1, -1
    )
    return out, both(query, key, every, hierarchy, 1.0, **settings)


def linear_features(score: PairScore) -> tuple[Tensor, Tensor]:
    """Features [B, H, N, e] and [B, H or Hkv, M, e] whose plain product is the score.

    Raises:
        ValueError: a term of the score is not linear in features of the key.
    """
    features = [_linear(score, term) for term in score.terms]
    if len(features) == 1:
        return features[0]
    queries, keys = zip(*features, strict=True)
    heads = max(k.shape[1] for k in keys)
    batch = max(t.shape[0] for t in (*queries, *keys))
    keys = tuple(
        repeat_heads(k, heads) if k.shape[1] > 1 else k.expand(-1, heads, -1, -1) for k in keys
    )
    joined = lambda side: torch.cat([t.expand(batch, *t.shape[1:]) for t in side], -1)
    return joined(queries), joined(keys)


def _linear(score: PairScore, term: ScoreTerm) -> tuple[Tensor, Tensor]:
    dtype, heads = score.query.dtype, score.query.shape[1]
    if term.term is DOT:
        left, right = score.query, score.key
    elif term.linear_features is not None:
        left, right = term.linear_features()
    elif term.low_rank_factors is not None:
        left, right, row = term.low_rank_factors()
        left = torch.cat([left, row[..., None]], -1)
        right = torch.cat([right, right.new_ones(*right.shape[:-1], 1)], -1)
    else:
        raise ValueError(
            f"hsa cannot be composed with the score {term.term.name!r}, which is not linear in features of the key; "
            "allowed: the dot product, HyPE within the range of its columns, and the squared Lorentz distance"
        )
    if term.gate is not None:
        left = left * term.gate.to(left.dtype)[:, None, None]
    return left.to(dtype).expand(-1, heads, -1, -1), right.to(dtype)


def _needs_operator(options: Options, request: Request) -> bool:
    """Whether a call that is being compiled has masks, biases or trees that the compiler cannot look into."""
    rule, hierarchy = request.rule, request.hierarchy
    if options.mask is not None or isinstance(hierarchy, Tensor):
        return True
    if rule.tying == "both":
        return False
    windows = isinstance(hierarchy, tuple) or hierarchy.is_windows
    top_k = rule.refine_top_k
    chains = not request.is_causal and any(top_k if isinstance(top_k, tuple) else (top_k,))
    return (
        not windows
        or chains
        or request.weights
        or options.window is not None
        or options.bias is not None
    )


def compiled(
    query: Tensor, key: Tensor, value: Tensor, options: Options, request: Request
) -> Result:
    """As `tied`, as one operator.

    Raises:
        ValueError: dropout, or a mask with a gradient.
    """
    if options.dropout_p:
        raise ValueError(
            "hsa with a mask and attention dropout cannot be compiled; allowed: attention_dropout=0, or no compiling"
        )
    if options.mask is not None and options.mask.requires_grad:
        raise ValueError(
            "hsa with a learned mask cannot be compiled; allowed: what is learned as position_bias"
        )
    rule, hierarchy, heads = request.rule, request.hierarchy, query.shape[1]
    block_bias = torch.as_tensor(rule.block_bias, dtype=query.dtype, device=query.device).expand(
        heads
    )
    extras = {
        "mask": options.mask,
        "bias": options.bias,
        "sinks": options.sinks,
        "block_bias": block_bias,
    }
    sizes: list[int] | None = None
    parts: operator.Named = []
    length = -1
    if isinstance(hierarchy, Tensor):
        parts = [("ids", hierarchy)]
    elif isinstance(hierarchy, tuple):
        sizes = list(hierarchy)
    else:
        (sizes, parts), length = operator.flatten(hierarchy), hierarchy.length
    counts = [
        list(x) if isinstance(x, tuple) else [x] * heads
        for x in (rule.near, rule.sinks, rule.refine_top_k)
    ]
    numbers = [
        length,
        options.offset,
        -1 if options.window is None else options.window,
        rule.tying == "both",
        rule.keep_diagonal,
        request.is_causal,
        options.is_causal,
        request.weights,
        request.chunk or 0,
        *counts[0],
        *counts[1],
        *counts[2],
    ]
    parts = [(name, t) for name, t in extras.items() if t is not None] + parts
    out, weights = operator.call("tied", [query, key, value], parts, sizes, numbers, 1.0)
    return out, weights if request.weights else None


def _shape_of_weights(query: Tensor, key: Tensor, numbers: Sequence[int]) -> tuple[int, ...]:
    return (*query.shape[:3], key.shape[2]) if numbers[7] else (0,)


def _pairs(query, key, named, sizes, numbers) -> float:
    """Of tying="both" over windows those of siblings; else every query looks at every node."""
    if numbers[3]:
        return query[1] * (sibling_pairs(key[2], sizes) if sizes is not None else query[2] * key[2])
    return query[1] * query[2] * key[2] * (1 + sum(1 / size for size in sizes or ()))


@operator.computes("tied", _shape_of_weights, _pairs)
def _compute_tied(tensors, named, sizes, numbers, scale) -> tuple[Tensor, Tensor]:
    length, offset, window, is_both, keep, is_causal, masked_causal, weights, chunk = numbers[:9]
    (query, key, value), extras, heads = tensors, dict(named), tensors[0].shape[1]
    near, sinks, top_k = (
        0 if is_both else tuple(numbers[9 + i * heads : 9 + (i + 1) * heads]) for i in range(3)
    )
    rule = Rule("both" if is_both else "key", bool(keep), near, sinks, top_k, extras["block_bias"])
    options = Options(
        mask=extras.get("mask"),
        bias=extras.get("bias"),
        is_causal=bool(masked_causal),
        window=None if window < 0 else window,
        offset=offset,
        sinks=extras.get("sinks"),
    )
    hierarchy = extras.get("ids")
    if hierarchy is None:
        hierarchy = tuple(sizes) if length < 0 else operator.unflatten(named, sizes, length)
    # weights have no gradient inside the operator
    request = Request(hierarchy, rule, bool(is_causal), weights=bool(weights), chunk=chunk or None)
    out, shown = tied(query, key, value, options, request)
    return out, out.new_empty(0) if shown is None else shown.detach()
