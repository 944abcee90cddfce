"""Attention tied over a hierarchy: one call, whatever its tying, score and masks (arXiv 2509.15448; docs/hsa.md)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...engines import DOT, Options, PairScore, ScoreTerm, repeat_heads
from ...hierarchy import Hierarchy
from ...readable import can_read
from ..base import START, FirstKey
from .both import both
from .config import Rule
from .following import attend_following
from .kept import attend_kept
from .key import attend, key_tied
from .levels import Levels
from .masks import (
    cut,
    hierarchy_for,
    last_seen,
    padding_of,
    real_of,
    restricted,
    says_all,
    without_first,
)
from .store import Store


@dataclass(frozen=True)
class Asked:
    """What a call asks besides its score, values and masks; arguments of `hierarchical`.

    `forgets`: whether the cache has not kept all keys; those of the call then are placeholders.
    """

    hierarchy: Hierarchy | Tensor | tuple[int, ...]
    rule: Rule
    is_causal: bool
    backend: str = "auto"
    weights: bool = False
    store: Store | None = None
    first: FirstKey = field(default_factory=FirstKey)
    forgets: bool = False


def hierarchical(
    score: PairScore,
    value: Tensor,
    options: Options,
    *,
    hierarchy: Hierarchy | Tensor | tuple[int, ...],
    rule: Rule,
    is_causal: bool,
    backend: str = "auto",
    weights: bool = False,
    store: Store | None = None,
    first: FirstKey = START,
) -> tuple[Tensor, Tensor | None]:
    """softmax(S')·V with logits tied over blocks of the hierarchy.

    Args:
        score: must be linear in key features: a dot product, also with HyPE, or the squared Lorentz distance.
        value: [B, Hkv, M, dv].
        options: masks and the rest. With tying="both" a mask may hide padding only.
        hierarchy: of the M keys, as a `Hierarchy`, as group ids, or as window sizes; where attention is causal, of the
            first keys, whose groups the others continue.
        is_causal: whether queries see only earlier keys, also where a mask says it.
        backend: "auto", or with tying="key" one of `key.BACKENDS`.
        weights: also return the attention weights [B, H, N, M].
        store: the cache's, where keys and values come from one; its means are used where the call allows it.
        first: which token key 0 is, where the cache of a sliding window has dropped some.

    Returns:
        The output [B, H, N, dv], and the weights or None, in the working dtype.

    Raises:
        ValueError: a score, softcap, mask, dropout or cache that the tying does not allow.
    """
    query, key = linear_features(score)
    value = repeat_heads(value, key.shape[1])  # a piece may have keys of its own for every query head
    if options.softcap is not None:
        raise ValueError(
            "hsa was called with a softcap, which is not linear in the keys; allowed: hosts without softcap"
        )
    if first.index is None:
        raise ValueError(
            "hsa was called with a sliding window and keys of which nobody says where they begin, so that windows "
            "cannot be laid; allowed: a mask that Transformers makes (a 2D attention_mask or none), or use_cache=False"
        )
    asked = Asked(hierarchy, rule, is_causal, backend, weights, store, first)
    if not can_read(query, options.mask):
        from . import compiled  # it calls this module

        if compiled.wanted(options, asked):
            return compiled.run(query, key, value, options, asked)
    plain = len(score.terms) == 1 and score.terms[0].term is DOT and score.terms[0].gate is None
    forgets = store is not None and store.keep is not None
    asked = replace(asked, store=store if plain else None, forgets=forgets)
    out, found = tied(query, key, value, options, asked)
    if found is None or found.shape[3] == key.shape[2]:
        return out, found
    return out, torch.nn.functional.pad(found, (0, key.shape[2] - found.shape[3]))


def tied(
    query: Tensor, key: Tensor, value: Tensor, options: Options, asked: Asked
) -> tuple[Tensor, Tensor | None]:
    """`hierarchical` for features whose plain product is the score."""
    rule, n, causal, dropped = asked.rule, query.shape[2], asked.is_causal, asked.first.index
    says = says_all(options, causal)
    stop = asked.first.keys if says else None
    stop = (
        max(n, last_seen(options.mask, n, key.shape[2], causal)) if stop is None else min(stop, key.shape[2])
    )
    key, value, mask = key[:, :, :stop], value[:, :, :stop], options.mask
    mask = mask if mask is None or stop == mask.shape[-1] else mask[..., :stop]
    hierarchy = hierarchy_for(asked.hierarchy, len(query), dropped + stop, causal)
    from_start = options.is_causal and not options.offset
    real = None if mask is None or dropped else padding_of(mask, n, says, from_start)
    outside = None if mask is None else real_of(asked.first, dropped + stop)
    if real is not None and n < stop and asked.first.stop is not None and not _same(real, outside):
        real = None  # hidden by a sliding window, or by an indexer
    if real is not None or outside is not None:
        hierarchy = restricted(hierarchy, outside if real is None else real, causal)
    hierarchy = cut(hierarchy, dropped + stop)
    if rule.tying == "both":
        return tied_both(query, key, value, replace(options, mask=mask), hierarchy, rule, real, asked.weights)
    mask = mask if real is None else None
    if mask is not None and says:
        hierarchy, without_sinks = without_first(hierarchy, dropped, _most(rule.sinks))
        rule = replace(rule, sinks=0) if without_sinks else rule
    offset = stop - n if says else options.offset
    ask = dict(near=rule.near, sinks=rule.sinks, refine_top_k=rule.refine_top_k, block_bias=rule.block_bias)
    ask |= dict(offset=offset, scale=1.0, sink_logit=options.sinks, backend=asked.backend)
    if (
        asked.store is not None
        and mask is None
        and not (dropped or asked.weights)
        and asked.backend != "rows"
    ):
        levels = kept_levels(asked.store, options, hierarchy, key, offset + n)
        if levels is not None and asked.store.forgetful:
            del ask["backend"], ask["refine_top_k"]
            newest = n == 1 and asked.store.starts is None and offset + 1 == asked.store.exact[0].length
            return (attend_following if newest else attend_kept)(query, asked.store, **ask), None
        if levels is not None:
            return attend(query, levels, is_causal=True, **ask), None
    if asked.forgets:
        raise ValueError(
            "HierarchicalCache(evict=True) keeps too little for this call; allowed: windows, left padding and no other "
            "mask, no gradients, no attention weights; or evict=False"
        )
    return key_tied(
        query,
        key,
        value,
        hierarchy,
        is_causal=causal and (mask is None or options.is_causal),
        window=options.window,
        mask=mask,
        bias=None if options.bias is None or options.bias.shape[-1] == 1 else options.bias[..., :stop],
        dropout_p=options.dropout_p,
        weights=asked.weights,
        **ask,
    )


def _same(real: Tensor, outside: Tensor | None) -> bool:
    """Whether what a mask shows of the keys are all real tokens that there are."""
    return (
        bool(real.all()) if outside is None else torch.equal(real.expand_as(outside), outside.to(real.device))
    )


def _most(value) -> int:
    return max(value) if isinstance(value, tuple) else value


def kept_levels(store: Store, options: Options, hierarchy: Hierarchy, key: Tensor, end: int) -> Levels | None:
    """The means that a cache keeps, where they are what this call is about: None for other trees than windows, and
    everything that windows do not know.

    Args:
        end: one past the last query's token.
    """
    length = store.exact[0].length
    windowed = options.window is not None and options.window < length
    if windowed or options.bias is not None or options.dropout_p or not hierarchy.is_windows:
        return None
    if key.shape[2] != length or end != length or torch.is_grad_enabled():
        return None
    if store.keep is not None and store.keep.sizes != hierarchy.sizes:
        return None
    starts, stops = hierarchy.starts, hierarchy.stops
    if stops is not None and bool((stops != length).any()):
        return None
    starts = starts if starts is None else starts.expand(key.shape[0])
    return store.levels(hierarchy.sizes, starts)


def tied_both(query, key, value, options: Options, hierarchy: Hierarchy, rule: Rule, real, weights: bool):
    """`both`, after refusing what it has no meaning for."""
    refused = {
        "causal attention": options.is_causal,
        "a sliding window": options.window is not None,
        "attention sinks": options.sinks is not None,
        "attention dropout": bool(options.dropout_p),
        "a mask that hides more than padding": options.mask is not None and real is None,
    }
    for name, asked in refused.items():
        if asked:
            raise ValueError(
                f"hsa with tying='both' was called with {name}, under which queries of a block differ; allowed: "
                "tying='key', or a call without it"
            )
    settings = dict(keep_diagonal=rule.keep_diagonal, position_bias=options.bias)
    out = both(query, key, value, hierarchy, 1.0, **settings)
    if not weights:
        return out, None
    every = torch.eye(key.shape[2], dtype=out.dtype, device=out.device).expand(*key.shape[:2], -1, -1)
    return out, both(query, key, every, hierarchy, 1.0, **settings)


def linear_features(score: PairScore) -> tuple[Tensor, Tensor]:
    """Features [B, H, N, e] and [B, H or Hkv, M, e] whose plain product is the score.

    Raises:
        ValueError: a piece of the score is not linear in features of the key.
    """
    found = [_linear(score, term) for term in score.terms]
    if len(found) == 1:
        return found[0]
    left, right = zip(*found, strict=True)
    heads = max(k.shape[1] for k in right)
    right = [repeat_heads(k, heads) if k.shape[1] > 1 else k.expand(-1, heads, -1, -1) for k in right]
    batch = max(t.shape[0] for t in (*left, *right))
    left, right = ([t.expand(batch, *t.shape[1:]) for t in side] for side in (left, right))
    return torch.cat(left, -1), torch.cat(right, -1)


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
