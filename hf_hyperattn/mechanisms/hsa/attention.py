"""Attention tied over a hierarchy: one call, whatever its tying, score and masks (arXiv 2509.15448; docs/hsa.md)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...engines import DOT, Options, PairScore, Piece, repeat_heads
from ...hierarchy import Hierarchy
from ...hierarchy.batch import as_hierarchy
from .both import both
from .config import Rule
from .key import attend, key_tied
from .levels import Levels
from .padding import real_tokens
from .store import Store

#: What `real_tokens` and `last_seen` said of masks that are alive: all layers of a model share one.
_SEEN, _STOPS = WeakIdKeyDictionary(), WeakIdKeyDictionary()


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

    Returns:
        The output [B, H, N, dv], and the weights or None, in the working dtype.

    Raises:
        ValueError: a score, softcap, mask, or dropout that the tying does not allow.
    """
    query, key = linear_features(score)
    if options.softcap is not None:
        raise ValueError(
            "hsa was called with a softcap, which is not linear in the keys; allowed: hosts without softcap"
        )
    stop = last_seen(options.mask, key.shape[2], is_causal)
    key, value, mask = key[:, :, :stop], value[:, :, :stop], options.mask
    mask = mask if mask is None or stop == options.mask.shape[-1] else mask[..., :stop]
    options = replace(options, mask=mask)
    hierarchy = hierarchy_for(hierarchy, len(query), stop, is_causal)
    real = None if mask is None else padding_of(mask, query.shape[2], is_causal)
    if real is not None:
        hierarchy = restricted(hierarchy, real)
    if rule.tying == "both":
        return tied_both(query, key, value, options, hierarchy, rule, real, weights)
    mask = mask if real is None else None
    offset = offset_of(options, query.shape[2], key.shape[2], real is not None, is_causal)
    if store is not None and not weights and mask is None and backend != "rows":
        levels = kept_levels(store, score, options, hierarchy, real, offset)
        if levels is not None:
            asked = dict(
                near=rule.near, sinks=rule.sinks, refine_top_k=rule.refine_top_k, block_bias=rule.block_bias
            )
            asked |= dict(is_causal=True, offset=offset, scale=1.0, sink_logit=options.sinks, backend=backend)
            return attend(query, levels, **asked), None
    return key_tied(
        query,
        key,
        value,
        hierarchy,
        near=rule.near,
        sinks=rule.sinks,
        refine_top_k=rule.refine_top_k,
        block_bias=rule.block_bias,
        is_causal=is_causal and mask is None,
        offset=offset,
        scale=1.0,
        sink_logit=options.sinks,
        window=options.window,
        mask=mask,
        bias=options.bias,
        dropout_p=options.dropout_p,
        weights=weights,
        backend=backend,
    )


def kept_levels(
    store: Store, score: PairScore, options: Options, hierarchy: Hierarchy, real: Tensor | None, offset: int
) -> Levels | None:
    """The means that a cache keeps, where they are what this call is about: None for scores with further features,
    other trees than windows, and everything that windows do not know.
    """
    length, queries = store.exact[0].length, score.query.shape[2]
    plain = len(score.pieces) == 1 and score.pieces[0].term is DOT and score.pieces[0].gate is None
    windowed = options.window is not None and options.window < length
    if not plain or windowed or options.bias is not None or options.dropout_p or not hierarchy.is_windows:
        return None
    if score.key.shape[2] != length or offset + queries != length or torch.is_grad_enabled():
        return None
    starts = None
    if real is not None and not bool(real.all()):
        starts = real.int().argmax(1)
        if bool((real.sum(1) != length - starts).any()):
            return None
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
    found = [_linear(score, piece) for piece in score.pieces]
    if len(found) == 1:
        return found[0]
    left, right = zip(*found, strict=True)
    heads = max(k.shape[1] for k in right)
    right = [repeat_heads(k, heads) if k.shape[1] > 1 else k.expand(-1, heads, -1, -1) for k in right]
    batch = max(t.shape[0] for t in (*left, *right))
    left, right = ([t.expand(batch, *t.shape[1:]) for t in side] for side in (left, right))
    return torch.cat(left, -1), torch.cat(right, -1)


def _linear(score: PairScore, piece: Piece) -> tuple[Tensor, Tensor]:
    dtype, heads = score.query.dtype, score.query.shape[1]
    if piece.term is DOT:
        left, right = score.query, score.key
    elif piece.features is not None:
        left, right = piece.features()
    elif piece.columns is not None:
        left, right = piece.columns()
    else:
        raise ValueError(
            f"hsa cannot be composed with the score {piece.term.name!r}, which is not linear in features of the key; "
            "allowed: the dot product, HyPE within the range of its columns, and the squared Lorentz distance"
        )
    if piece.gate is not None:
        left = left * piece.gate.to(left.dtype)[:, None, None]
    return left.to(dtype).expand(-1, heads, -1, -1), right.to(dtype)


def hierarchy_for(
    hierarchy: Hierarchy | Tensor | tuple[int, ...], batch: int, keys: int, is_causal: bool
) -> Hierarchy:
    """What the caller gave, for a call of so many rows and keys."""
    if isinstance(hierarchy, tuple):
        return windows(keys, hierarchy)
    return as_hierarchy(hierarchy).fitted(batch, keys, growing=is_causal)


@lru_cache(maxsize=16)
def windows(length: int, sizes: tuple[int, ...]) -> Hierarchy:
    """Windows without padding; one object for all layers, since what is worked out for it is kept with it."""
    return Hierarchy.windows(length, sizes)


def last_seen(mask: Tensor | None, keys: int, is_causal: bool) -> int:
    """How many keys there are so far; behind them a static cache has slots that are not filled yet."""
    if mask is None or not is_causal or mask.shape[-1] != keys:
        return keys
    known = _STOPS.get(mask)
    if known is None:
        seen = (
            (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
            .flatten(0, 2)
            .any(0)
        )
        known = _STOPS[mask] = int((seen * torch.arange(1, keys + 1, device=mask.device)).max()) or keys
    return known


def padding_of(mask: Tensor, queries: int, is_causal: bool) -> Tensor | None:
    """Bool [B, M], the keys that are no padding; None where the mask hides something else too."""
    known = _SEEN.get(mask)
    if known is None or known[:2] != (queries, is_causal):
        try:
            real = real_tokens(mask, queries, is_causal)
        except ValueError:
            real = None
        known = _SEEN[mask] = (queries, is_causal, real)
    return known[2]


def restricted(hierarchy: Hierarchy, real: Tensor) -> Hierarchy:
    """The hierarchy over the real tokens alone; one that was made for this padding is kept as it is."""
    last = hierarchy.__dict__.get("_last_restricted")
    if last is not None and last[0] is real:
        return last[1]
    real_cpu = real.cpu()
    if hierarchy.is_windows and hierarchy.starts is None and hierarchy.stops is None:
        whole = bool(real_cpu.all())
        found = hierarchy if whole else Hierarchy.windows(hierarchy.length, hierarchy.sizes, real_cpu)
    else:
        ids = hierarchy.to_ids()
        ids = ids.expand(len(real_cpu), -1, -1) if len(ids) == 1 else ids
        padded = (ids[..., 0] < 0) != ~real_cpu
        found = hierarchy
        if bool(padded.any()):
            found = Hierarchy.from_ids(ids.masked_fill(~real_cpu[..., None], -1), hierarchy.kind_names)
    hierarchy.__dict__["_last_restricted"] = (real, found)
    return found


def offset_of(options: Options, queries: int, keys: int, padded: bool, is_causal: bool) -> int:
    """Which token query 0 is: without a mask the first, as in SDPA, except for a single step, which is the last."""
    if padded or (is_causal and queries == 1 and not options.is_causal):
        return keys - queries
    return options.offset
