"""Compute one HSA call, whatever its tying, score and masks.

This module shows how a call is prepared (score, hierarchy, mask, cache) and which implementation
computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...engines import DOT, Options, PairScore, ScoreTerm, repeat_heads
from ...hierarchy import Hierarchy
from ...utils.readable import can_read, is_exporting, is_transformed
from ...utils.torch_private import count_dispatch_modes
from ..selection.cache import EVICTING, KeepWindows, LayerCache
from ..selection.places import Reading, read_mask
from . import operator, portable
from .config import Rule
from .evicted import attend_evicted
from .masks import (
    cut_hierarchy,
    drop_first_tokens,
    hierarchy_for,
    lay_windows_by_text,
    mask_is_causal,
    restrict_to_real,
)
from .means_kept import read_levels
from .pairs import count_sibling_pairs
from .tree.both import attend_both
from .windowed import native
from .windowed.key import attend_keys, attend_levels, list_by_head
from .windowed.native import Levels

#: The output [B, H, N, dv], and the weights [B, H, N, M] or None.
Result = tuple[Tensor, Tensor | None]

# The operator "tied" takes a list of integers (see `call_operator`). Shapes and FLOP counts read
# these two of them.
IS_BOTH, WEIGHTS = 3, 7
# The integers before the three lists of one integer per head.
SINGLE_NUMBERS = 9


@dataclass(frozen=True)
class Request:
    """Hold the options of an HSA call that are not its score, values or masks.

    Args:
        hierarchy: Trees over the M keys: a `Hierarchy`, group ids, or window sizes. In causal
            attention it may cover only the first keys; later keys continue its groups.
        rule: Tying and its settings.
        is_causal: Whether queries see only earlier keys, also if only the mask says so.
        backend: "auto", or with tying="key" one of `windowed.key.BACKENDS`. A request with a cache
            has "auto".
        weights: Also return the attention weights [B, H, N, M].
        cache: Cache of the keys and values that keeps means, or None. The means are used if the
            call allows it.
        reading: Facts read from the mask; None: read them in this call.
        evicted: Whether a cache that this call cannot use has evicted keys. The keys of the call
            are then placeholders.
        chunk: The layer's own attention starts again after this many tokens of a row. 1 if it may
            hide any token.
        position_ids: int64 [B|1, N] of the call, see `Reading.find_texts`.
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


def attend_hierarchically(
    score: PairScore, value: Tensor, options: Options, request: Request
) -> Result:
    """Compute softmax(S')·V with logits tied over blocks of the hierarchy.

    Args:
        score: Must be linear in key features: a dot product, also with HyPE, or the squared Lorentz
            distance.
        value: [B, Hkv, M, dv].
        options: Masks and the other options of an engine. With tying="both" a mask may hide padding
            only.
        request: The hierarchy, and the tying over it.

    Returns:
        The output [B, H, N, dv], and the weights or None, in the working dtype.

    Raises:
        ValueError: The tying does not allow this score, softcap, mask, dropout or cache.
    """
    if options.softcap is not None:
        raise ValueError(
            "hsa was called with a softcap, which is not linear in the keys; allowed: attention layers without "
            "softcap"
        )
    exporting = is_exporting() or is_transformed()
    plain = len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None
    readable = can_read(score.raw_query, options.mask)
    scale = 1.0
    # Plain operators and the custom operator take features whose product is the score.
    if readable and not exporting and plain and _takes_raw_vectors(score, value, request):
        # Converting the keys, or multiplying them by the scale, would be wasted work: the products
        # are multiplied by it.
        query, key, scale = score.raw_query, score.raw_key, float(score.scale)
    else:
        query, key = linear_features(score)
    # A term may have different keys for every query head. Values then need as many heads.
    value = repeat_heads(value, key.shape[1])
    if exporting and portable.supports_call(query, key, options, request):
        out, shares = portable.attend_densely(query, key, value, options, request)
        return out, shares if request.weights else None
    if is_transformed():
        raise ValueError(
            "hsa was called inside torch.func's transforms, or for forward-mode derivatives, with options that need "
            "more than plain operators; allowed: windows over a whole row, a bool mask or none, and refinement if "
            "causal"
        )
    if not readable and _needs_operator(options, request):
        return call_operator(query, key, value, options, request)
    if request.cache is not None and not plain:
        # The cache keeps means of the layer's keys, not of the features of this score.
        request = replace(request, cache=None, evicted=request.cache.keep is not None)
    return attend_tied(query, key, value, options, request, scale)


def _takes_raw_vectors(score: PairScore, value: Tensor, request: Request) -> bool:
    """Return whether a product of plain vectors can be computed from the vectors themselves.

    Attention then reads a cache in place of these keys, or the kernel multiplies bfloat16 numbers.
    """
    if not score.is_product or request.rule.tying != "key":
        return False
    raw = score.raw_query, score.raw_key, value
    return request.cache is not None or all(map(native.takes_dtype, raw))


def attend_tied(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    request: Request,
    scale: float = 1.0,
) -> Result:
    """Compute `attend_hierarchically` for features whose plain product is the score.

    Args:
        query: Features [B, H, N, e].
        key: Features [B, H or Hkv, M, e].
        value: [B, Hkv, M, dv].
        options: As in `attend_hierarchically`.
        request: As in `attend_hierarchically`.
        scale: Factor of the products of queries and keys.

    Returns:
        The output [B, H, N, dv], and the weights [B, H, N, M] or None.
    """
    rule, is_causal = request.rule, request.is_causal
    reading = request.reading
    if reading is None:
        reading = read_mask(query, key, options, is_causal)
    stop, dropped = reading.stop, reading.places.dropped

    # Step 1: remove the empty slots of a static cache, which lie behind the last query's own key.
    spare = key.shape[2] - stop
    key, value = key[:, :, :stop], value[:, :, :stop]
    mask = options.mask
    if mask is not None and stop < mask.shape[-1]:
        mask = mask[..., :stop]

    # Step 2: fit the hierarchy to the keys, and leave padding out of it.
    hierarchy = hierarchy_for(request.hierarchy, len(query), dropped + stop, is_causal)
    real, place = None, None
    if mask is not None:
        real = reading.real_if_only_padding
        if real is None and rule.tying == "key":
            hierarchy, place = lay_under_mask(hierarchy, reading, request)
        else:
            there = reading.real_so_far if real is None else real
            hierarchy = restrict_once(hierarchy, there, reading, is_causal)
    hierarchy = cut_hierarchy(hierarchy, dropped + stop)

    # Step 3: attend.
    if rule.tying == "both":
        key = key.to(query.dtype)
        masked = replace(options, mask=mask)
        out, weights = attend_tied_both(query, key, value, masked, hierarchy, request, real)
    else:
        if options.mask is not None:
            # A mask that hides padding only is dropped: padding is in no tree, and the kernel takes
            # no masks.
            options = replace(options, mask=mask if real is None or _needs_gradient(mask) else None)
        out, weights = _attend_tied_keys(
            query, key, value, options, hierarchy, request, reading, scale, place
        )

    # Step 4: zero causal rows that hold padding only. If not causal, such a row keeps the tree of a
    # whole row.
    there = None if real is None or is_causal else real.any(1)[:, None, None, None]
    if there is not None and not bool(there.all()):
        out = out.masked_fill(~there, 0.0)
        weights = None if weights is None else weights.masked_fill(~there, 0.0)
    if weights is not None:
        weights = torch.nn.functional.pad(weights, (0, spare))
    return out, weights


def _attend_tied_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    hierarchy: Hierarchy,
    request: Request,
    reading: Reading,
    scale: float,
    place: Tensor | None = None,
) -> Result:
    """Attend with tying="key", from the cached means if the cache fits the call.

    Args:
        query, key, value, options, request, scale: As in `attend_tied`, without empty slots.
        hierarchy: Trees over the real keys; padding is in no tree.
        reading: Facts read from the mask.
        place: int64 [B, M], the number of each key in its text; None: its number in the row.
    """
    rule, mask = request.rule, options.mask
    stop, dropped = key.shape[2], reading.places.dropped
    by_mask = mask_is_causal(options, request.is_causal)
    if mask is not None and by_mask:
        hierarchy, without_sinks = drop_first_tokens(hierarchy, dropped, _find_largest(rule.sinks))
        # Sinks count from the first leaf. Without the first windows they would open blocks of later
        # tokens.
        rule = replace(rule, sinks=0) if without_sinks else rule
    bias = options.bias
    if bias is not None and bias.shape[-1] == 1:
        # It is the same for all keys. Softmax does not change, unless a sink has no bias.
        bias = None if options.sinks is None else bias.expand(*bias.shape[:-1], stop)
    elif bias is not None:
        bias = bias[..., :stop]
    options = replace(
        options,
        bias=bias,
        is_causal=request.is_causal and (mask is None or options.is_causal),
        offset=stop - query.shape[2] if by_mask else options.offset,
    )
    plain = mask is None and not dropped and not request.weights
    cache = request.cache
    if cache is not None and plain:
        out = attend_cached(query, key, cache, hierarchy, options, rule, scale)
        if out is not None:
            return out, None
    if request.evicted or (cache is not None and cache.keep is not None):
        raise ValueError(
            "HierarchicalCache(evict=True) keeps too little for this call; allowed: windows, left padding and no other "
            "mask, no gradients, no attention weights; or evict=False"
        )
    return attend_keys(
        query,
        key,
        value,
        hierarchy,
        rule,
        options,
        scale=scale,
        backend=request.backend,
        weights=request.weights,
        place=place,
    )


def attend_cached(
    query: Tensor,
    key: Tensor,
    cache: LayerCache,
    hierarchy: Hierarchy,
    options: Options,
    rule: Rule,
    scale: float,
) -> Tensor | None:
    """Return the output from cached means, or None if they do not fit.

    Args:
        query, key, hierarchy, scale: As in `attend_tied`.
        cache: Cache of the keys and values.
        options: Options of the call, with the place of its queries.
        rule: Settings of the tying.

    Returns:
        [B, H, N, dv] or None.
    """
    check_kept(cache, rule)
    levels = cached_levels(cache, options, hierarchy, key, options.offset + query.shape[2])
    # FLOP counters see only operators, so under a dispatch mode the call must go through one.
    if levels is None or (cache.keep is None and count_dispatch_modes()):
        return None
    if levels.held is not None and not native.can_serve(query):
        return attend_evicted(query, levels, rule, options, scale)
    return attend_levels(query, levels, rule, options, scale, lse=False)[0]


def check_kept(cache: LayerCache, rule: Rule) -> None:
    """Raise if a cache has evicted keys that this rule needs.

    This happens if the model was patched again after the cache was made.

    Raises:
        ValueError: The rule opens more tokens than were kept, or opens blocks by their scores.
    """
    keep = cache.keep
    if not isinstance(keep, KeepWindows):
        return
    near, sinks, top_k = map(_find_largest, (rule.near, rule.sinks, rule.refine_top_k))
    if near > keep.near or sinks > keep.sinks or top_k:
        raise ValueError(
            f"{EVICTING} keeps {keep.near} near keys and {keep.sinks} first ones, and hsa asks for {near} and {sinks}, "
            f"with refine_top_k={top_k}; allowed: a cache that was made for this model, as it is patched now"
        )


def _find_largest(value) -> int:
    """Return the largest number of all heads."""
    return max(value) if isinstance(value, tuple) else value


def restrict_once(
    hierarchy: Hierarchy, real: Tensor | None, reading: Reading, is_causal: bool
) -> Hierarchy:
    """Return the hierarchy over the real tokens, computed once for all layers.

    Args:
        hierarchy: Trees over the tokens of the call.
        real: bool [B, keys]; None: all tokens are real.
        reading: Facts of the mask, which keep the result.
        is_causal: Whether attention is causal.
    """
    if real is None:
        return hierarchy
    # A mask can be read in two ways, and both results may be needed under one mask.
    name = real is reading.real_if_only_padding, is_causal
    make = lambda: restrict_to_real(hierarchy, real, is_causal)
    return reading.make_once(hierarchy, name, make)


def lay_under_mask(
    hierarchy: Hierarchy, reading: Reading, request: Request
) -> tuple[Hierarchy, Tensor | None]:
    """Return the hierarchy under a mask that hides more than padding.

    Windows start again with every text if the mask packs several texts into a row. Other trees stay
    as the caller defined them.

    Args:
        hierarchy: Trees over the present keys and the keys that a cache has dropped.
        reading: Facts of the mask.
        request: The request of the call.

    Returns:
        The hierarchy, and the number of each key in its text, int64 [B, M]; None if each row holds
        one text.
    """
    is_causal = request.is_causal
    texts = reading.find_texts(request.chunk, request.position_ids)
    if texts is None or not hierarchy.is_windows:
        return restrict_once(hierarchy, reading.real_so_far, reading, is_causal), None
    lay = lambda: lay_windows_by_text(hierarchy, texts, is_causal)
    if request.chunk is not None:
        # The texts depend on position_ids here, which may change under the same mask: do not
        # remember the result.
        return lay(), texts.place
    return reading.make_once(hierarchy, ("texts", is_causal), lay), texts.place


def _needs_gradient(mask: Tensor | None) -> bool:
    """Return whether a mask needs a gradient, even if it hides padding only."""
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()


def cached_levels(
    cache: LayerCache, options: Options, hierarchy: Hierarchy, key: Tensor, end: int
) -> Levels | None:
    """Return the cached tokens and means, or None if the call cannot use them.

    The means fit causal attention over plain windows over all cached keys, without sliding window,
    bias, dropout and gradients.

    Args:
        cache: Cache of the keys and values.
        options: Options of the call.
        hierarchy: Trees over the keys.
        key: Keys of the call, [B, Hkv, M, d].
        end: One past the last query's token.
    """
    length = cache.length
    windowed = options.window is not None and options.window < length
    if windowed or options.bias is not None or options.dropout_p or not hierarchy.is_windows:
        return None
    if key.shape[2] != length or end != length or torch.is_grad_enabled():
        return None
    # Incomplete windows have no mean in a cache, and queries that see later tokens need it.
    if not options.is_causal:
        return None
    if isinstance(cache.keep, KeepWindows) and cache.keep.sizes != hierarchy.sizes:
        return None
    starts, stops = hierarchy.starts, hierarchy.stops
    if stops is not None and bool((stops != length).any()):
        return None
    starts = starts if starts is None else starts.expand(key.shape[0])
    return read_levels(cache, hierarchy.sizes or (), starts)


def attend_tied_both(
    query, key, value, options: Options, hierarchy: Hierarchy, request: Request, real
) -> Result:
    """Attend with tying="both", after refusing options that it cannot have.

    Args:
        query, key, value, options, request: As in `attend_tied`.
        hierarchy: Trees over the real tokens.
        real: bool [B, N] if the mask hides padding only, else None.

    Raises:
        ValueError: An option under which the queries of one block would differ.
    """
    refused = {
        "causal attention": options.is_causal,
        "a sliding window": options.window is not None,
        "attention sinks": options.sinks is not None,
        "attention dropout": bool(options.dropout_p),
        "a mask that hides more than padding": options.mask is not None and real is None,
        "a mask that wants a gradient": _needs_gradient(options.mask),
    }
    for name, there in refused.items():
        if there:
            raise ValueError(
                f"hsa with tying='both' was called with {name}, under which queries of a block differ; allowed: "
                "tying='key', or a call without it"
            )
    settings = dict(keep_diagonal=request.rule.keep_diagonal, position_bias=options.bias)
    out = attend_both(query, key, value, hierarchy, 1.0, **settings)
    if not request.weights:
        return out, None
    # The algorithm never forms the weights P. With the identity as values, its output is P·I = P.
    identity = torch.eye(key.shape[2], dtype=out.dtype, device=out.device)
    identity = identity.expand(*key.shape[:2], -1, -1)
    return out, attend_both(query, key, identity, hierarchy, 1.0, **settings)


def linear_features(score: PairScore) -> tuple[Tensor, Tensor]:
    """Return features of queries and keys whose plain product is the score.

    Their shapes are [B, H, N, e] and [B, H or Hkv, M, e].

    Raises:
        ValueError: A term of the score is not linear in features of the key.
    """
    features = [_linear_term(score, term) for term in score.terms]
    if len(features) == 1:
        return features[0]
    queries, keys = zip(*features, strict=True)
    heads = max(k.shape[1] for k in keys)
    batch = max(t.shape[0] for t in (*queries, *keys))
    keys = tuple(
        repeat_heads(k, heads) if k.shape[1] > 1 else k.expand(-1, heads, -1, -1) for k in keys
    )
    # A sum of products is one product of the joined features.
    return _join_features(queries, batch), _join_features(keys, batch)


def _join_features(features: Sequence[Tensor], batch: int) -> Tensor:
    """Return features of several terms as one tensor, for all rows of the batch."""
    return torch.cat([t.expand(batch, *t.shape[1:]) for t in features], -1)


def _linear_term(score: PairScore, term: ScoreTerm) -> tuple[Tensor, Tensor]:
    """Return the features whose plain product is one term of the score."""
    dtype, heads = score.query.dtype, score.query.shape[1]
    if term.term is DOT:
        left, right = score.query, score.key
    elif term.linear_features is not None:
        left, right = term.linear_features()
    elif term.low_rank_factors is not None:
        left, right, row = term.low_rank_factors()
        # A number per query is a product with a feature of the keys that is always 1.
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
    """Return whether a compiled call must be hidden from the compiler.

    Masks, biases and trees decide which shapes a call has, which the compiler cannot trace.
    """
    rule, hierarchy = request.rule, request.hierarchy
    if options.mask is not None or isinstance(hierarchy, Tensor):
        return True
    if rule.tying == "both":
        return False
    if not (isinstance(hierarchy, tuple) or hierarchy.is_windows):
        return True
    # Without causality, refinement may meet windows with a single child, which depend on the
    # length.
    if not request.is_causal and _refines(rule):
        return True
    return request.weights or options.window is not None or options.bias is not None


def _refines(rule: Rule) -> bool:
    """Return whether any head opens blocks by their scores."""
    top_k = rule.refine_top_k
    return any(top_k if isinstance(top_k, tuple) else (top_k,))


def call_operator(
    query: Tensor, key: Tensor, value: Tensor, options: Options, request: Request
) -> Result:
    """Compute `attend_tied` as one operator, which the compiler does not look into.

    Raises:
        ValueError: Dropout, or a mask with a gradient.
    """
    if options.dropout_p:
        raise ValueError(
            "hsa with a mask and attention dropout cannot be compiled; allowed: attention_dropout=0, or no compiling"
        )
    if options.mask is not None and options.mask.requires_grad:
        raise ValueError(
            "hsa with a learned mask cannot be compiled; allowed: learn a position_bias instead"
        )
    rule, hierarchy = request.rule, request.hierarchy
    heads = query.shape[1]
    block_bias = torch.as_tensor(rule.block_bias, dtype=query.dtype, device=query.device)
    extras = {
        "mask": options.mask,
        "bias": options.bias,
        "sinks": options.sinks,
        "block_bias": block_bias.expand(heads),
    }
    # A length of -1 stands for a hierarchy that is made from ids or sizes inside the operator.
    sizes: list[int] | None = None
    parts: operator.Named = []
    length = -1
    if isinstance(hierarchy, Tensor):
        parts = [("ids", hierarchy)]
    elif isinstance(hierarchy, tuple):
        sizes = list(hierarchy)
    else:
        sizes, parts = operator.flatten_hierarchy(hierarchy)
        length = hierarchy.length
    # `_compute_tied` reads these by position.
    numbers = [
        length,
        options.offset,
        -1 if options.window is None else options.window,
        rule.tying == "both",  # IS_BOTH
        rule.keep_diagonal,
        request.is_causal,
        options.is_causal,
        request.weights,  # WEIGHTS
        request.chunk or 0,
        *list_by_head(rule.near, heads),
        *list_by_head(rule.sinks, heads),
        *list_by_head(rule.refine_top_k, heads),
    ]
    parts = [(name, t) for name, t in extras.items() if t is not None] + parts
    out, weights = operator.call_function("tied", [query, key, value], parts, sizes, numbers, 1.0)
    return out, weights if request.weights else None


def _shape_of_weights(query: Tensor, key: Tensor, numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the operator's second result.

    It is the weights, or an empty tensor.
    """
    return (*query.shape[:3], key.shape[2]) if numbers[WEIGHTS] else (0,)


def _count_pairs(query, key, named, sizes, numbers) -> float:
    """Return how many logits a row has, from the shapes of its tensors."""
    heads, queries, keys = query[1], query[2], key[2]
    if not numbers[IS_BOTH]:
        # A head looks at every node of the tree: at all tokens, and at keys / size windows of each
        # size.
        return heads * queries * keys * (1 + sum(1 / size for size in sizes or ()))
    if sizes is None:
        return heads * queries * keys
    return heads * count_sibling_pairs(keys, sizes)


@operator.register_function("tied", _shape_of_weights, _count_pairs)
def _compute_tied(tensors, named, sizes, numbers, scale) -> tuple[Tensor, Tensor]:
    """Compute the operator "tied" from the arguments that `call_operator` wrote."""
    query, key, value = tensors
    extras, heads = dict(named), query.shape[1]
    length, offset, window, is_both, keep, is_causal, masked_causal, weights, chunk = numbers[
        :SINGLE_NUMBERS
    ]
    first = [SINGLE_NUMBERS + i * heads for i in range(3)]
    near, sinks, top_k = (0 if is_both else tuple(numbers[i : i + heads]) for i in first)
    rule = Rule(
        tying="both" if is_both else "key",
        keep_diagonal=bool(keep),
        near=near,
        sinks=sinks,
        refine_top_k=top_k,
        block_bias=extras["block_bias"],
    )
    options = Options(
        mask=extras.get("mask"),
        bias=extras.get("bias"),
        is_causal=bool(masked_causal),
        window=None if window < 0 else window,
        offset=offset,
        sinks=extras.get("sinks"),
    )
    hierarchy = extras.get("ids")
    if hierarchy is None and length < 0:
        hierarchy = tuple(sizes)
    elif hierarchy is None:
        hierarchy = operator.unflatten_hierarchy(named, sizes, length)
    request = Request(
        hierarchy=hierarchy,
        rule=rule,
        is_causal=bool(is_causal),
        weights=bool(weights),
        chunk=chunk or None,
    )
    out, shown = attend_tied(query, key, value, options, request)
    # The weights have no gradient inside the operator.
    return out, out.new_empty(0) if shown is None else shown.detach()
