"""Compute one HSA call, whatever its tying, score and masks.

This module shows how a call is prepared (score, hierarchy, mask, cache) and which implementation
computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...engines import DOT, Options, PairScore, ScoreTerm, repeat_heads, triton
from ...hierarchy import Hierarchy
from ...hierarchy.batch import as_hierarchy
from ...utils.readable import can_read, is_exporting, is_transformed
from ..selection.cache import LayerCache
from ..selection.places import Reading, read_mask
from . import operator, portable
from .config import Rule, list_numbers
from .masks import drop_first_tokens, lay_under_mask
from .means_kept import attend_cached, check_not_evicted
from .pairs import count_sibling_pairs
from .tree.both import attend_both
from .windowed import native
from .windowed.key import attend_keys, list_by_head

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
        check_not_evicted(request.cache)
        request = replace(request, cache=None)
    return attend_tied(query, key, value, options, request, scale)


def _takes_raw_vectors(score: PairScore, value: Tensor, request: Request) -> bool:
    """Return whether a product of plain vectors can be computed from the vectors themselves.

    Attention then reads a cache in place of these keys, or a kernel multiplies numbers in half
    precision.
    """
    if not score.is_product or request.rule.tying != "key":
        return False
    raw = score.raw_query, score.raw_key, value
    if request.cache is not None or all(map(native.takes_dtype, raw)):
        return True
    return value.device.type == "cuda" and triton.find_selected_obstacle(*raw) is None


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
    stop = reading.stop

    # Step 1: remove the empty slots of a static cache, which lie behind the last query's own key.
    spare = key.shape[2] - stop
    key, value = key[:, :, :stop], value[:, :, :stop]
    mask = options.mask
    if mask is not None and stop < mask.shape[-1]:
        mask = mask[..., :stop]
        options = replace(options, mask=mask)

    # Step 2: fit the hierarchy to the keys, and leave padding out of it.
    real = None if mask is None else reading.real_if_only_padding
    if rule.tying == "both":
        check_tied_both(options, real)
    tokens = reading.places.dropped + stop
    hierarchy, place = fit_hierarchy(request.hierarchy, len(query), tokens, is_causal), None
    if mask is not None:
        hierarchy, place = lay_under_mask(
            hierarchy, reading, is_causal, request.chunk, request.position_ids
        )
    if hierarchy.length > tokens:
        hierarchy = cut_hierarchy(hierarchy, tokens)

    # Step 3: attend.
    if rule.tying == "both":
        key = key.to(query.dtype)
        out, weights = attend_tied_both(query, key, value, options, hierarchy, request)
    else:
        if real is not None and not _needs_gradient(mask):
            # A mask that hides padding only is dropped: padding is in no tree, and the kernel takes
            # no masks.
            options = replace(options, mask=None)
        out, weights = _attend_tied_keys(
            query, key, value, options, hierarchy, request, tokens - stop, scale, place
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


def fit_hierarchy(
    hierarchy: Hierarchy | Tensor | tuple[int, ...], batch: int, keys: int, is_causal: bool
) -> Hierarchy:
    """Return the caller's hierarchy, fitted to a batch.

    Args:
        hierarchy: A `Hierarchy`, group ids, or window sizes.
        batch: Number of rows.
        keys: Number of keys. In causal attention, trees may be longer than this (see
            `cut_hierarchy`).
        is_causal: Whether attention is causal.
    """
    if isinstance(hierarchy, tuple):
        # A compiler cannot trace `lru_cache`.
        compiling = torch.compiler.is_compiling()
        return Hierarchy(keys, sizes=hierarchy) if compiling else make_windows(keys, hierarchy)
    hierarchy = as_hierarchy(hierarchy)
    if is_causal and not hierarchy.is_windows:
        # A prompt may come in chunks. Its trees cover the whole prompt from the first chunk on.
        keys = max(keys, hierarchy.length)
    return hierarchy.fitted(batch, keys, growing=is_causal)


@lru_cache(maxsize=16)
def make_windows(length: int, sizes: tuple[int, ...]) -> Hierarchy:
    """Return windows without padding, the same object for all layers.

    Results are cached with a hierarchy object (see `layout_of`), so layers must share it.
    """
    return Hierarchy(length, sizes=sizes)


def cut_hierarchy(hierarchy: Hierarchy, keys: int) -> Hierarchy:
    """Return the trees over the first `keys` tokens.

    Leaves of later tokens stay in the trees. They all refer to token `keys`, which no query sees.
    """
    tokens = tuple(places.clamp_max(keys) for places in hierarchy.tokens)
    return Hierarchy(keys, hierarchy.trees, tokens)


def _attend_tied_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    hierarchy: Hierarchy,
    request: Request,
    dropped: int,
    scale: float,
    place: Tensor | None,
) -> Result:
    """Attend with tying="key", from the cached means if the cache fits the call.

    Args:
        query, key, value, options, request, scale: As in `attend_tied`, without empty slots.
        hierarchy: Trees over the real keys; padding is in no tree.
        dropped: Number of tokens of a row that a cache has dropped before the keys.
        place: int64 [B, M], the number of each key in its text; None: its number in the row.
    """
    rule, mask, stop = request.rule, options.mask, key.shape[2]
    # Transformers calls causal attention with a mask, and the queries are then the last tokens.
    by_mask = request.is_causal and not options.is_causal
    if mask is not None and by_mask:
        hierarchy, without_sinks = drop_first_tokens(
            hierarchy, dropped, max(list_numbers(rule.sinks))
        )
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
    cache = request.cache
    if cache is not None:
        if mask is None and not dropped and not request.weights:
            out = attend_cached(query, stop, cache, hierarchy, rule, options, scale)
            if out is not None:
                return out, None
        check_not_evicted(cache)
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


def _needs_gradient(mask: Tensor | None) -> bool:
    """Return whether a mask needs a gradient, even if it hides padding only."""
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()


def check_tied_both(options: Options, real: Tensor | None) -> None:
    """Raise if the queries of a block would differ, which tying="both" does not allow.

    Args:
        options: Options of the call.
        real: bool [B, N] if the mask hides padding only, else None.

    Raises:
        ValueError: An option that differs between the queries of a block.
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


def attend_tied_both(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    hierarchy: Hierarchy,
    request: Request,
) -> Result:
    """Attend with tying="both".

    Args:
        query, key, value, options, request: As in `attend_tied`.
        hierarchy: Trees over the real tokens.
    """
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
    if not request.is_causal and any(list_numbers(rule.refine_top_k)):
        return True
    return request.weights or options.window is not None or options.bias is not None


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
    rule, heads = request.rule, query.shape[1]
    block_bias = torch.as_tensor(rule.block_bias, dtype=query.dtype, device=query.device)
    extras = {
        "mask": options.mask,
        "bias": options.bias,
        "sinks": options.sinks,
        "block_bias": block_bias.expand(heads),
    }
    length, sizes, parts = operator.flatten_hierarchy(request.hierarchy)
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
    request = Request(
        hierarchy=operator.unflatten_hierarchy(named, sizes, length),
        rule=rule,
        is_causal=bool(is_causal),
        weights=bool(weights),
        chunk=chunk or None,
    )
    out, shown = attend_tied(query, key, value, options, request)
    # The weights have no gradient inside the operator.
    return out, out.new_empty(0) if shown is None else shown.detach()


operator.FUNCTIONS["tied"] = operator.Function(
    compute=_compute_tied, shape=_shape_of_weights, pairs=_count_pairs
)
