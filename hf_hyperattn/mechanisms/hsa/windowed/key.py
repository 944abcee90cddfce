"""Key-tied attention (docs/hsa.md; arXiv 2509.15448): over windows pool keys and values once, then attend.

`key_tied` does both. `pool` and `attend` are the two halves, for callers that keep the means of earlier windows, such
as a cache: a new token changes one mean of every level, and `attend` reads only what the query's cover holds. Two
implementations agree, forward and backward: plain torch on any device (tiles.py), and for CPU a compiled kernel
(native.py, key.cpp). What is not of windows, and what these do not know, goes row by row (tree/masked_tree.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....engines import Options, working_dtype
from ....hierarchy import Hierarchy
from ....hierarchy.windows import checked_sizes
from .. import operator
from ..tree import masked_tree
from . import native, tiles
from .cover import Cover
from .means import Levels, pool, rows_by_span, span_lists

__all__ = ["BACKENDS", "Levels", "attend", "key_tied", "pool"]

#: What `backend` of `key_tied` may say.
BACKENDS = ("auto", "torch", "native", "rows")

#: A number for all heads, or one per query head.
PerHead = int | Sequence[int] | Tensor


def key_tied(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy | Sequence[int],
    *,
    near: PerHead = 0,
    sinks: PerHead = 0,
    refine_top_k: PerHead = 0,
    block_bias: float | Tensor | None = None,
    is_causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    sink_logit: Tensor | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    weights: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """softmax(S')·V with tied keys; S = scale · q·k + bias.

    Args:
        query: [B, H, N, d]; query i is the token `offset + i`: a full pass, the last N of M tokens, or a single step.
        key: [B, Hkv, M, d], Hkv dividing H. value: [B, Hkv, M, dv].
        hierarchy: of the M keys, or window sizes; padding is never seen, and a padded query gives 0.
        near, sinks, refine_top_k, block_bias: as in `functional.hierarchical_attention`.
        is_causal, window, mask, bias, dropout_p: as in `Options`. scale: None: 1/sqrt(d).
        sink_logit: one extra logit per head [H] that takes part in the softmax and has no value.
        weights: also return the attention weights [B, H, N, M].
        backend: "auto", "torch", "native" (the compiled kernel), or "rows" (the general way).

    Returns:
        [B, H, N, dv], float32, or float64 for float64 inputs; and the weights or None. Of blocks with equal scores,
        refinement opens the one that stands first. Gradients reach all tensors; the choice of blocks has none.
        Windows without mask, bias, sliding window, dropout and weights are computed in O(N · cover); all else in
        O(N · M) time and O(block · M) memory.

    Raises:
        ValueError: a hierarchy of another length or batch size, an unknown backend, or one that cannot do the call.
    """
    hierarchy = _fitting(hierarchy, key)
    rule: dict[str, Any] = dict(near=near, sinks=sinks, refine_top_k=refine_top_k, block_bias=block_bias)
    rule |= dict(is_causal=is_causal, offset=offset, scale=scale, sink_logit=sink_logit)
    general = {
        "a hierarchy that is not of windows": not hierarchy.is_windows,
        "a mask": mask is not None,
        "a bias": bias is not None,
        "a sliding window": window is not None and window < key.shape[2],
        "dropout": dropout_p > 0,
        "weights": weights,
    }
    reason = next((name for name, there in general.items() if there), None)
    if reason is None and ragged(hierarchy, refine_top_k, is_causal, key):
        reason = "refinement where the last window of a level has a single child"
    if reason is not None and backend not in ("auto", "rows"):
        raise ValueError(f"backend={backend!r} cannot compute {reason}; use backend='auto' or 'rows'")
    if reason is None and backend != "rows":
        levels = pool(key.to(working_dtype(query)), value, hierarchy.sizes or (), hierarchy.starts, hierarchy.stops)
        return _attend(query, levels, **rule, backend=backend), None
    dtype, heads = working_dtype(query), query.shape[1]
    four = lambda t: t if t is None else t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))
    options = Options(four(mask), four(bias), is_causal, window, offset, None, sink_logit, dropout_p)
    counts = lambda n: torch.tensor(per_head(n, heads), device=query.device)
    query = query.to(dtype) * (query.shape[-1] ** -0.5 if scale is None else scale)
    rules = counts(near), counts(sinks), counts(refine_top_k), per_head_tensor(block_bias, query)
    call = masked_tree.MaskedCall(*rules, options, weights)
    trees = masked_tree.trees_of(hierarchy, is_causal)
    return masked_tree.attend(query, key.to(dtype), value.to(dtype), trees, call)


def _fitting(hierarchy: Hierarchy | Sequence[int], key: Tensor) -> Hierarchy:
    """A hierarchy that fits the keys."""
    batch, length = key.shape[0], key.shape[2]
    if not isinstance(hierarchy, Hierarchy):
        return Hierarchy(length, sizes=checked_sizes(hierarchy))
    if hierarchy.length != length or hierarchy.rows not in (1, batch):
        raise ValueError(
            f"hierarchy has {hierarchy.rows} rows of {hierarchy.length} tokens, the keys {batch} of {length}; "
            "allowed: the same length, and one row or as many; Hierarchy.fitted makes it fit"
        )
    return hierarchy


def ragged(windows: Hierarchy | Levels, refine_top_k: PerHead, is_causal: bool, key: Tensor) -> bool:
    """Whether refinement meets a last window with a single child, which is that child: a token, or a lower block."""
    if is_causal or not any(per_head(refine_top_k, 1)):
        return False
    spans = rows_by_span(*span_lists(len(key), key.shape[2], windows.starts, windows.stops))
    return any(Cover(tuple(windows.sizes or ()), 0, 0, 0, False, b - a).has_chains() for a, b in spans)


def attend(
    query: Tensor,
    levels: Levels,
    *,
    near: PerHead = 0,
    sinks: PerHead = 0,
    refine_top_k: PerHead = 0,
    block_bias: float | Tensor | None = None,
    is_causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    sink_logit: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The second half of `key_tied`: attention to tokens and means that are there already. Arguments as there.

    Where windows are `ragged`, the means are computed anew.

    A single causal query reads O(near + sinks + top_k · Σ branching + blocks of the top level) of `levels`.
    """
    rule: dict[str, Any] = dict(near=near, sinks=sinks, refine_top_k=refine_top_k, block_bias=block_bias)
    rule |= dict(is_causal=is_causal, offset=offset, scale=scale, sink_logit=sink_logit, backend=backend)
    tokens = levels.keys[0]
    if ragged(levels, refine_top_k, is_causal, tokens):
        hierarchy = Hierarchy(tokens.shape[2], sizes=levels.sizes, starts=levels.starts, stops=levels.stops)
        return key_tied(query, tokens, levels.values[0], hierarchy, **rule)[0]
    return _attend(query, levels, **rule)


def _attend(
    query: Tensor,
    levels: Levels,
    near,
    sinks,
    refine_top_k,
    block_bias,
    is_causal,
    offset,
    scale,
    sink_logit,
    backend,
) -> Tensor:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    query, heads = query.to(levels.keys[0].dtype), query.shape[1]
    counts = per_head(near, heads), per_head(sinks, heads), per_head(refine_top_k, heads)
    bias, sink = (
        per_head_tensor(block_bias, query),
        None if sink_logit is None else sink_logit.to(query.dtype),
    )
    return attend_levels(query, levels, *counts, bias, sink, is_causal, offset, scale, backend)[0]


def attend_levels(
    query: Tensor, levels: Levels, near: list[int], sinks: list[int], top_k: list[int], block_bias: Tensor | None,
    sink_logit: Tensor | None, is_causal: bool, offset: int, scale: float, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, N, dv] and log-sum-exp [B, H, N] (+inf where a query sees nothing), as one operator.

    Args:
        query: [B, H, N, d] of the dtype of `levels`. near, sinks, top_k: one a head. block_bias, sink_logit: [H].
        is_causal, offset, scale, backend: as in `key_tied`.
    """
    (key, *keys), (value, *values) = levels.keys, [t.to(query.dtype) for t in levels.values]
    named = [(f"key {i}", t) for i, t in enumerate(keys, 1)] + [(f"value {i}", t) for i, t in enumerate(values, 1)]
    extras = {
        "block_bias": block_bias,
        "sink_logit": sink_logit,
        "starts": levels.starts,
        "stops": levels.stops,
    }
    named += [(name, t) for name, t in extras.items() if t is not None]
    numbers = [BACKENDS.index(backend), is_causal, offset, *near, *sinks, *top_k]
    return operator.call("windowed", [query, key, value], named, list(levels.sizes), numbers, scale)


def _call_of(tensors, named: operator.Named, sizes, numbers, scale):
    """What computes the call, `native`, the compiled kernel, or `tiles`, plain torch; and its arguments."""
    (query, key, value), extras, heads = tensors, dict(named), tensors[0].shape[1]
    keys, values = (
        [first, *(extras[f"{name} {i}"] for i in range(1, len(sizes) + 1))]
        for name, first in (("key", key), ("value", value))
    )
    spans = span_lists(len(query), key.shape[2], extras.get("starts"), extras.get("stops"))
    backend, is_causal, offset, *counts = numbers
    counts = [list(counts[i * heads : (i + 1) * heads]) for i in range(3)]
    compiled = BACKENDS[backend] != "torch" and native.serves(query)
    if BACKENDS[backend] == "native" and not compiled:
        raise ValueError(
            f"backend='native' cannot compute {query.dtype} on {query.device} here; allowed: float32 on the CPU, "
            "with a C++ compiler installed; use backend='auto'"
        )
    rules = (spans, sizes, *counts, bool(is_causal), offset, scale)
    arguments = (query, keys, values, extras.get("block_bias"), extras.get("sink_logit"), *rules)
    return native if compiled else tiles, arguments


def _backward(grad: Tensor, out: Tensor, lse: Tensor, tensors, named: operator.Named, *rest) -> list[Tensor | None]:
    way, arguments = _call_of(tensors, named, *rest)
    query, keys, values, bias, sink = way.backward(grad, out, lse, *arguments)
    gradients = {"block_bias": bias, "sink_logit": sink}
    for name, tables in (("key", keys), ("value", values)):
        gradients |= {f"{name} {i}": t for i, t in enumerate(tables)}
    return [query, keys[0], values[0], *(gradients.get(name) for name, _ in named)]


@operator.computes("windowed", lambda query, key, numbers: query.shape[:3], _backward)
def _forward(tensors, named: operator.Named, *rest) -> tuple[Tensor, Tensor]:
    way, arguments = _call_of(tensors, named, *rest)
    return way.forward(*arguments)


def per_head(value: PerHead, heads: int) -> list[int]:
    """One integer per head."""
    value = value.tolist() if isinstance(value, Tensor) else value
    value = [int(value)] if isinstance(value, int | float) else [int(v) for v in value]
    return value * heads if len(value) == 1 else value


def per_head_tensor(value: float | Tensor | None, like: Tensor) -> Tensor | None:
    """One number per head, as a tensor [H]."""
    if value is None:
        return None
    value = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)
    return value.expand(like.shape[1]).contiguous()
