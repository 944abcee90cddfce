"""Key-tied attention (docs/hsa.md; arXiv 2509.15448): over windows pool keys and values once, then attend.

`key_tied` does both. `pool` and `attend` are the two halves, for callers that keep the means of earlier windows, such
as a cache: a new token changes one mean of every level, and `attend` reads only what the query's cover holds. Two
implementations agree, forward and backward: plain torch (windows.py), and for CPU a compiled kernel (native.py,
key.cpp). What is not of windows, and what these do not know, goes row by row (masked_tree.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....engines import working_dtype
from ....hierarchy import Hierarchy, Tree
from ....hierarchy.windows import checked_sizes, windows_tree
from ..tree import masked_tree as rows
from . import operator
from .cover import Cover
from .means import Levels, pool, spans

__all__ = ["BACKENDS", "Levels", "attend", "key_tied", "pool"]

#: What `backend` of `key_tied` may say.
BACKENDS = ("auto", "torch", "native", "rows")


def key_tied(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy | Sequence[int],
    *,
    starts: Tensor | None = None,
    stops: Tensor | None = None,
    near: int | Sequence[int] | Tensor = 0,
    sinks: int | Sequence[int] | Tensor = 0,
    refine_top_k: int | Sequence[int] | Tensor = 0,
    block_bias: float | Tensor | None = None,
    is_causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    column: Tensor | None = None,
    sink_logit: Tensor | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    weights: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """softmax(S')·V with tied keys; S = scale · q·k + column + bias.

    Args:
        query: [B, H, N, d]; query i is the token `offset + i`: a full pass, the last N of M tokens, or a single step.
        key: [B, Hkv, M, d], Hkv dividing H. value: [B, Hkv, M, dv].
        hierarchy: of the M keys; or window sizes, bottom first, each dividing the next (() is the flat tree).
        starts, stops: with window sizes, the real tokens of every row, int64 [B]. Padding is never seen; a padded
            query gives 0.
        near, sinks, refine_top_k: integers, one for all heads or one per query head. near >= M is exact attention.
        block_bias: added to the logit of closed blocks, a number or [H]; -inf drops them; None: 0.
        is_causal: query i sees tokens up to its own. Windows then count as continued to the right.
        scale: None: 1/sqrt(d).
        column: a term of the key alone, [B, Hkv or H, M], averaged over blocks like the logits.
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
    query, key, scale = with_column(query, key, column, scale)
    hierarchy = as_hierarchy(hierarchy, starts, stops, key)
    heads = query.shape[1]
    rule = {
        name: per_head(v, heads) for name, v in (("near", near), ("sinks", sinks), ("top_k", refine_top_k))
    }
    extras = {"block_bias": per_head_tensor(block_bias, query), "sink_logit": sink_logit}
    general = why_general(hierarchy, rule["top_k"], is_causal, window, mask, bias, dropout_p, weights, key)
    if general is not None and backend not in ("auto", "rows"):
        raise ValueError(f"backend={backend!r} cannot compute {general}; use backend='auto' or 'rows'")
    if general is None and backend != "rows":
        levels = pool(key, value, hierarchy.sizes, hierarchy.starts, hierarchy.stops)
        return _attend(query, levels, extras, **rule, is_causal=is_causal, offset=offset, scale=scale,
                       backend=backend), None  # fmt: skip
    index = {name: torch.tensor(v, device=query.device) for name, v in rule.items()}
    mask, bias = (t if t is None else t.reshape((1,) * (4 - t.dim()) + tuple(t.shape)) for t in (mask, bias))
    asked = rows.Asked(**index, **extras, is_causal=is_causal, offset=offset, window=window, mask=mask, bias=bias,
                       dropout_p=dropout_p)  # fmt: skip
    trees = trees_of(hierarchy, is_causal)
    return rows.attend(query * scale, key, value.to(key.dtype), trees, asked, weights)


def as_hierarchy(hierarchy, starts: Tensor | None, stops: Tensor | None, key: Tensor) -> Hierarchy:
    """A hierarchy that fits the keys."""
    batch, length = key.shape[0], key.shape[2]
    if not isinstance(hierarchy, Hierarchy):
        return Hierarchy(length, sizes=checked_sizes(hierarchy), starts=starts, stops=stops)
    if hierarchy.length != length or hierarchy.rows not in (1, batch):
        raise ValueError(
            f"hierarchy has {hierarchy.rows} rows of {hierarchy.length} tokens, the keys {batch} of {length}; "
            "allowed: the same length, and one row or as many; Hierarchy.fitted makes it fit"
        )
    return hierarchy


def why_general(hierarchy, top_k, is_causal, window, mask, bias, dropout_p, weights, key) -> str | None:
    """What of a call only the general way computes, None if there is no such thing."""
    asked = {
        "a hierarchy that is not of windows": not hierarchy.is_windows,
        "a mask": mask is not None,
        "a bias": bias is not None,
        "a sliding window": window is not None and window < key.shape[2],
        "dropout": dropout_p > 0,
        "weights": weights,
    }
    for name, there in asked.items():
        if there:
            return name
    if ragged(hierarchy.sizes, top_k, is_causal, key, hierarchy.starts, hierarchy.stops):
        return "refinement where the last window of a level has a single child"
    return None


def ragged(sizes, top_k, is_causal: bool, key: Tensor, starts: Tensor | None, stops: Tensor | None) -> bool:
    """Whether refinement meets a last window with a single child, which is that child: a token, or a lower block."""
    if is_causal or not any(top_k):
        return False
    rows = spans(len(key), key.shape[2], starts, stops)
    return any(Cover(tuple(sizes), 0, 0, 0, False, stop - start).has_chains() for start, stop in rows)


def trees_of(hierarchy: Hierarchy, is_causal: bool) -> list[tuple[Tree, Tensor]]:
    """Trees with the tokens of their leaves; causal windows are continued until all of them are complete."""
    if not hierarchy.is_windows:
        return list(zip(hierarchy.trees, hierarchy.tokens, strict=True))
    found, trees = [], {}
    for start, stop in map(hierarchy.span, range(hierarchy.rows)):
        whole = hierarchy.sizes[-1] if hierarchy.sizes and is_causal else 1
        count = -(-(stop - start) // whole) * whole
        if count not in trees:
            trees[count] = windows_tree(count, hierarchy.sizes)
        tokens = torch.arange(start, start + count)
        tokens[stop - start :] = hierarchy.length  # leaves to come, which no query sees
        found.append((trees[count], tokens))
    return found


def with_column(
    query: Tensor, key: Tensor, column: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, float]:
    """Query, key and scale whose scaled product is scale · q·k + column: the column is one more key feature."""
    dtype = working_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key = query.to(dtype), key.to(dtype)
    if column is None:
        return query, key, scale
    if column.shape[1] != key.shape[1]:
        key = key.repeat_interleave(column.shape[1] // key.shape[1], 1)
    key = torch.cat([key, column.to(dtype)[..., None]], -1)
    return torch.cat([query * scale, torch.ones_like(query[..., :1])], -1), key, 1.0


def attend(
    query: Tensor,
    levels: Levels,
    *,
    near: int | Sequence[int] | Tensor = 0,
    sinks: int | Sequence[int] | Tensor = 0,
    refine_top_k: int | Sequence[int] | Tensor = 0,
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
    heads, dtype = query.shape[1], levels.keys[0].dtype
    if ragged(
        levels.sizes, per_head(refine_top_k, heads), is_causal, levels.keys[0], levels.starts, levels.stops
    ):
        out, _ = key_tied(
            query, levels.keys[0], levels.values[0], levels.sizes, starts=levels.starts, stops=levels.stops,
            near=near, sinks=sinks, refine_top_k=refine_top_k, block_bias=block_bias, offset=offset, scale=scale,
            sink_logit=sink_logit, backend=backend,
        )  # fmt: skip
        return out
    query, scale = query.to(dtype), query.shape[-1] ** -0.5 if scale is None else scale
    extras = {"block_bias": per_head_tensor(block_bias, query), "sink_logit": sink_logit}
    rule = {
        name: per_head(v, heads) for name, v in (("near", near), ("sinks", sinks), ("top_k", refine_top_k))
    }
    return _attend(
        query, levels, extras, **rule, is_causal=is_causal, offset=offset, scale=scale, backend=backend
    )


def _attend(
    query: Tensor, levels: Levels, extras: dict, near, sinks, top_k, is_causal, offset, scale, backend
) -> Tensor:
    extras = {name: t.to(query.dtype) for name, t in extras.items() if t is not None}
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    tensors = [query, *levels.keys, *levels.values, *extras.values()]
    out, _ = operator.forward(tensors, " ".join(extras), levels.starts, levels.stops, list(levels.sizes), near, sinks,
                              top_k, is_causal, offset, float(scale), backend)  # fmt: skip
    return out


def per_head(value: int | Sequence[int] | Tensor, heads: int) -> list[int]:
    """One integer per head."""
    found = value.tolist() if isinstance(value, Tensor) else value
    found = [int(found)] * heads if isinstance(found, int | float) else [int(v) for v in found]
    return found * heads if len(found) == 1 else found


def per_head_tensor(value: float | Tensor | None, like: Tensor) -> Tensor | None:
    """One number per head, as a tensor [H]."""
    if value is None:
        return None
    value = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)
    return value.expand(like.shape[1]).contiguous()
