"""Key-tied attention (docs/hsa.md; arXiv 2509.15448), by the way that serves a call.

Two ways agree, forward and backward. The compiled kernel (native.py, engines/cpu/listed) computes means of keys and
values over windows once. Each query reads the means and tokens that it attends to. Means of earlier windows may come
from a cache. Other trees, masks, devices and dtypes go through plain torch (tree/key.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....engines import Options, working_dtype
from ....hierarchy import Hierarchy
from ....hierarchy.windows import checked_sizes
from ....readable import can_read
from .. import operator
from ..pairs import count_query_pairs
from ..tree import key as tree_key
from . import native
from .means import Levels, pool_levels, span_lists, unpool_gradients

#: What `backend` of `key_tied` may say; "rows" is an older name of "torch".
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
    place: Tensor | None = None,
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
        backend: "auto", "native" (the compiled kernel), or "torch".
        place: int64 [B, M], the number of each key in its text, which `sinks` counts by, where a mask packs several
            texts into a row; None: in its row.

    Returns:
        [B, H, N, dv], float32, or float64 for float64 inputs; and the weights or None. Of blocks with equal scores,
        refinement opens the one that stands first; the kernel adds up the scores of blocks that it has laid open in
        another order than the others', so that those of equal keys may differ by rounding, in every pass alike.
        Gradients reach all tensors; the choice of blocks has none.
        The kernel computes windows without mask, bias, sliding window, dropout and weights in O(N · cover); all else
        takes O(N · M) time and O(block · M) memory.

    Raises:
        ValueError: a hierarchy of another length or batch size, an unknown backend, or one that cannot do the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    hierarchy, dtype, heads = _fit_hierarchy(hierarchy, key), working_dtype(query), query.shape[1]
    sink_logit = None if sink_logit is None else sink_logit.to(dtype)
    counts: Any = [per_head(count, heads) for count in (near, sinks, refine_top_k)]
    block_bias = per_head_tensor(block_bias, query, dtype)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    obstacles = {
        "a mask": mask is not None,
        "a hierarchy that is not of windows": not hierarchy.is_windows,
        "a bias": bias is not None,
        "a sliding window": window is not None and window < key.shape[2],
        "dropout": dropout_p > 0,
        "weights": weights,
        "refinement where the last window of a level has a single child": not is_causal
        and any(counts[2])
        and has_chains(hierarchy),
    }
    obstacle = next((name for name, there in obstacles.items() if there), None)
    if backend == "native" and obstacle is not None:
        raise ValueError(
            f"backend='native' cannot compute {obstacle}; use backend='auto' or 'torch'"
        )
    readable = can_read(query)
    serves = readable and _kernel_serves(query, backend)
    if len({t.dtype for t in (query, key, value)}) > 1 or not native.takes_dtype(query):
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if obstacle is None and (serves or not readable):
        rest: Any = (*counts, block_bias, sink_logit, is_causal, offset, scale, backend)
        return _call_operator(query, key, value, hierarchy, *rest), None
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    four = lambda t: t if t is None else t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))
    options = Options(
        four(mask), four(bias), is_causal, window, offset, None, sink_logit, dropout_p
    )
    out, _, shares = _attend_by_torch(
        query * scale, key, value, hierarchy, counts, block_bias, options, weights, place
    )
    return out, shares


def _attend_by_torch(
    query,
    key,
    value,
    hierarchy: Hierarchy,
    counts,
    block_bias,
    options: Options,
    weights=False,
    place=None,
):
    """`tree.key.attend_trees`: output, log-sum-exp, and weights or None; the query is scaled."""
    near, sinks, top_k = (torch.tensor(count, device=query.device) for count in counts)
    call = tree_key.KeyTying(near, sinks, top_k, block_bias, options, weights, place)
    return tree_key.attend_trees(
        query, key, value, tree_key.trees_of(hierarchy, options.is_causal), call
    )


def _fit_hierarchy(hierarchy: Hierarchy | Sequence[int], key: Tensor) -> Hierarchy:
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


def has_chains(hierarchy: Hierarchy) -> bool:
    """Whether the last window of a level has a single child, and so is that child: a token, or a lower block."""
    widths = (1, *(hierarchy.sizes or ()))
    for start, stop in map(hierarchy.span, range(hierarchy.rows)):
        blocks = [-(-(stop - start) // width) for width in widths]
        pairs = zip(widths, widths[1:], blocks, blocks[1:])
        if any(
            many > 1 and (many - 1) * (large // small) == few - 1
            for small, large, few, many in pairs
        ):
            return True
    return False


def attend_levels(
    query: Tensor,
    levels: Levels,
    near: PerHead = 0,
    sinks: PerHead = 0,
    refine_top_k: PerHead = 0,
    block_bias: float | Tensor | None = None,
    sink_logit: Tensor | None = None,
    is_causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    backend: str = "auto",
    lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, dv] and log-sum-exp [B, H, N] (+inf where a query sees nothing), without gradients.

    A single causal query reads O(near + sinks + top_k · Σ branching + blocks of the top level) of the levels.

    Args:
        query: [B, H, N, d] of the dtype of the means, or of the tokens.
        levels: what there is to attend to. Where some tokens are forgotten, refine_top_k must be 0.
        near, sinks, refine_top_k, block_bias, sink_logit, is_causal, offset, scale, backend: as in `key_tied`.
        lse: False: the log-sum-exp may be None. Decoding with refinement then takes less time on the kernel.
    """
    counts: Any = [per_head(count, query.shape[1]) for count in (near, sinks, refine_top_k)]
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    dtype, key, value = working_dtype(query, levels.keys[-1]), levels.keys[0], levels.values[0]
    block_bias = per_head_tensor(block_bias, query, dtype)
    sink_logit = None if sink_logit is None else sink_logit.to(dtype)
    if _kernel_serves(query, backend):
        arguments = _kernel_call(levels, counts, block_bias, sink_logit, is_causal, offset, scale)
        return native.compute_forward(query, *arguments, lse=lse)
    hierarchy = Hierarchy(
        key.shape[2], sizes=levels.sizes, starts=levels.starts, stops=levels.stops
    )
    options = Options(is_causal=is_causal, offset=offset, sinks=sink_logit)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _attend_by_torch(query * scale, key, value, hierarchy, counts, block_bias, options)[:2]


def _kernel_serves(query: Tensor, backend: str) -> bool:
    """Whether the kernel computes a call with this query."""
    serves = backend in ("auto", "native") and native.can_serve(query)
    if backend == "native" and not serves:
        raise ValueError(
            f"backend='native' cannot compute {query.dtype} on {query.device} here; allowed: float32, bfloat16 and "
            "float16 on the CPU, with a C++ compiler installed; use backend='auto'"
        )
    return serves


def _kernel_call(
    levels: Levels, counts, block_bias, sink_logit, is_causal: bool, offset: int, scale: float
) -> tuple:
    """What `native.compute_forward` takes after the query."""
    batch, length = len(levels.keys[0]), levels.keys[0].shape[2]
    length, held = levels.held or (length, ((0, 0),) * len(levels.keys))
    spans = span_lists(batch, length, levels.starts, levels.stops)
    rows = [n for of_level in held for n in of_level]
    rule = (spans, levels.sizes, rows, *counts, is_causal, offset, scale)
    return levels.keys, levels.values, block_bias, sink_logit, *rule


def _call_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    near,
    sinks,
    top_k,
    block_bias,
    sink_logit,
    is_causal: bool,
    offset: int,
    scale: float,
    backend: str,
) -> Tensor:
    """The output, as one operator that pools keys and values itself; arguments as in `attend_levels`."""
    extras = {
        "block_bias": block_bias,
        "sink_logit": sink_logit,
        "starts": hierarchy.starts,
        "stops": hierarchy.stops,
    }
    named = [(name, t) for name, t in extras.items() if t is not None]
    numbers = [BACKENDS.index(backend), is_causal, offset, *near, *sinks, *top_k]
    return operator.call_function(
        "windowed", [query, key, value], named, list(hierarchy.sizes or ()), numbers, scale
    )[0]


def _read_call(
    tensors, named: operator.Named, sizes, numbers, scale
) -> tuple[Tensor, Levels, Any, str]:
    """What `_call_operator` wrote: the query, levels, the rest of the arguments of `attend_levels`, and the backend."""
    (query, key, value), extras, heads = tensors, dict(named), tensors[0].shape[1]
    backend, is_causal, offset, *counts = numbers
    counts = [counts[i * heads : (i + 1) * heads] for i in range(3)]
    levels = pool_levels(key, value, tuple(sizes), extras.get("starts"), extras.get("stops"))
    if native.takes_dtype(query):  # tokens as they came
        levels = replace(levels, keys=(key, *levels.keys[1:]), values=(value, *levels.values[1:]))
    rule = (
        *counts,
        extras.get("block_bias"),
        extras.get("sink_logit"),
        bool(is_causal),
        offset,
        scale,
    )
    return query, levels, rule, BACKENDS[backend]


def _count_pairs(query, key, named, sizes, numbers) -> float:
    _, is_causal, _, *counts = numbers
    rules: Any = zip(*(counts[i * query[1] : (i + 1) * query[1]] for i in range(3)))
    return sum(
        count_query_pairs(query[2], key[2], sizes, near, sinks, top_k, is_causal)
        for near, sinks, top_k in rules
    )


def _compute_gradients(grad: Tensor, out: Tensor, lse: Tensor, *call) -> list[Tensor | None] | None:
    features, *others = call
    query, levels, (*counts, bias, sink, is_causal, offset, scale), backend = _read_call(
        [t.float() for t in features], *others
    )
    if not _kernel_serves(query, backend):
        return None
    arguments = _kernel_call(levels, counts, bias, sink, is_causal, offset, scale)
    g_query, keys, values, g_bias, g_sink = native.compute_backward(
        grad, out, lse, query, *arguments
    )
    spans = span_lists(len(query), levels.keys[0].shape[2], levels.starts, levels.stops)
    tokens = [unpool_gradients(tables, levels.sizes, *spans) for tables in (keys, values)]
    gradients = {"block_bias": g_bias, "sink_logit": g_sink}
    return [g_query, *tokens, *(gradients.get(name) for name, _ in call[1])]


@operator.register_function(
    "windowed", lambda query, key, numbers: query.shape[:3], _count_pairs, _compute_gradients
)
def _compute_output(*call) -> tuple[Tensor, Tensor]:
    query, levels, rule, backend = _read_call(*call)
    rest: Any = (*rule, backend)
    return attend_levels(query, levels, *rest)


def per_head(value: PerHead, heads: int) -> list[int]:
    """One integer per head."""
    value = value.tolist() if isinstance(value, Tensor) else value
    value = [int(value)] if isinstance(value, int | float) else [int(v) for v in value]
    return value * heads if len(value) == 1 else value


def per_head_tensor(
    value: float | Tensor | None, like: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """One number per head of the query `like`, as a tensor [H] of this dtype."""
    if value is None:
        return None
    value = torch.as_tensor(value, dtype=dtype, device=like.device).reshape(-1)
    return value.expand(like.shape[1]).contiguous()
