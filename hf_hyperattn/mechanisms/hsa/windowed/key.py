"""Key-tied attention (docs/hsa.md; arXiv 2509.15448): over windows pool keys and values once, then attend.

`key_tied` does both. `pool` and `attend` are the two halves, for callers that keep the means of earlier windows, such
as a cache: a new token changes one mean of every level, and `attend` reads only what the query's cover holds. Two
implementations agree, forward and backward: plain torch on any device (tiles.py), and for CPU a compiled kernel
(native.py, key.cpp). What is not of windows, and what these do not know, goes row by row (tree/masked_tree.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....engines import working_dtype
from ....hierarchy import Hierarchy
from ....hierarchy.windows import checked_sizes
from ..tree import masked_tree
from . import operator
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
        hierarchy: of the M keys; padding is never seen, and a padded query gives 0. Or window sizes, bottom first,
            each dividing the next (() is the flat tree).
        near, sinks, refine_top_k: integers, one for all heads or one per query head. near >= M is exact attention.
        block_bias: added to the logit of closed blocks, a number or [H]; -inf drops them; None: 0.
        is_causal: query i sees tokens up to its own. Windows then count as continued to the right.
        scale: None: 1/sqrt(d).
        sink_logit: one extra logit per head [H] that takes part in the softmax and has no value.
        window: a sliding window: only keys with i - j < window, and where not causal j - i < window, are seen.
        mask: bool (True = take part) or additive. bias: added to the logits. Both broadcast to [B, H, N, M].
        dropout_p: probability that the weight of a pair is dropped.
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
    rule = dict(near=near, sinks=sinks, refine_top_k=refine_top_k, block_bias=block_bias)
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
        levels = pool(key.to(working_dtype(query)), value, hierarchy.sizes, hierarchy.starts, hierarchy.stops)
        return _attend(query, levels, **rule, backend=backend), None
    return _masked(query, key, value, hierarchy, rule, window=window, mask=mask, bias=bias, dropout_p=dropout_p,
                   weights=weights)  # fmt: skip


def _masked(query: Tensor, key: Tensor, value: Tensor, hierarchy: Hierarchy, rule: dict, **more):
    """The general way."""
    dtype, heads = working_dtype(query), query.shape[1]
    scale = query.shape[-1] ** -0.5 if rule["scale"] is None else rule["scale"]
    counts = (rule["near"], rule["sinks"], rule["refine_top_k"])
    counts = [torch.tensor(per_head(n, heads), device=query.device) for n in counts]
    four = lambda t: t if t is None else t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))
    more |= {"mask": four(more["mask"]), "bias": four(more["bias"])}
    query, key, value = (t.to(dtype) for t in (query, key, value))
    call = masked_tree.MaskedCall(
        *counts, per_head_tensor(rule["block_bias"], query), rule["sink_logit"], rule["is_causal"], rule["offset"],
        **more,
    )  # fmt: skip
    trees = masked_tree.trees_of(hierarchy, rule["is_causal"])
    return masked_tree.attend(query * scale, key, value, trees, call)


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
    return any(Cover(tuple(windows.sizes), 0, 0, 0, False, b - a).has_chains() for a, b in spans)


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
    rule = dict(near=near, sinks=sinks, refine_top_k=refine_top_k, block_bias=block_bias)
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
    counts = [per_head(n, heads) for n in (near, sinks, refine_top_k)]
    of_heads = (
        per_head_tensor(block_bias, query),
        sink_logit if sink_logit is None else sink_logit.to(query.dtype),
    )
    keys, values = list(levels.keys), [t.to(query.dtype) for t in levels.values]
    out, _ = operator.forward(query, keys, values, *of_heads, levels.starts, levels.stops, list(levels.sizes), *counts,
                              is_causal, offset, scale, backend)  # fmt: skip
    return out


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
