"""Compute key-tied attention (docs/hsa.md; arXiv 2509.15448).

This module shows when the compiled kernel computes a call and when plain torch does; both agree,
forward and backward.

The kernel (native.py, engines/cpu/listed) computes the means of keys and values over windows once.
Each query then reads only the means and tokens that it attends to. The means of earlier windows may
come from a cache. Plain torch (tree/key.py) computes other trees, masks, devices and dtypes.
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
from ....utils.readable import can_read
from .. import operator
from ..pairs import count_query_pairs
from ..tree import key as tree_key
from . import native
from .means import Levels, pool_levels, span_lists, unpool_gradients

#: Values of `backend` in `key_tied`; "rows" is an older name of "torch".
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
    """Compute softmax(S')·V with tied keys; S = scale · q·k + bias.

    Windows without mask, bias, sliding window, dropout and weights take O(N · cover) time in the
    kernel. Other calls take O(N · M) time and O(block · M) memory. Gradients reach all tensors. The
    choice of blocks is not differentiable.

    Of blocks with equal scores, refinement opens the first one. The kernel adds up the scores of
    refined blocks in a different order than other scores. Scores of equal keys may therefore differ
    by rounding, the same in every pass.

    Args:
        query: [B, H, N, d]; query i is token `offset + i`: a full pass, the last N of M tokens, or
            one step.
        key: [B, Hkv, M, d], Hkv dividing H.
        value: [B, Hkv, M, dv].
        hierarchy: Trees over the M keys, or window sizes. Padding is never seen, and a padded query
            gives 0.
        near, sinks, refine_top_k, block_bias: As in `functional.hierarchical_attention`.
        is_causal, window, mask, bias, dropout_p: As in `Options`.
        scale: Factor of q·k; None: 1/sqrt(d).
        sink_logit: [H], one more logit per head that is used in the softmax and has no value.
        weights: Also return the attention weights [B, H, N, M].
        backend: "auto", "native" (the compiled kernel), or "torch".
        place: int64 [B, M], the number of each key in its text, from which `sinks` counts if a mask
            packs several texts into a row; None: its number in the row.

    Returns:
        [B, H, N, dv], float32, or float64 for float64 inputs; and the weights or None.

    Raises:
        ValueError: A hierarchy of another length or batch size, an unknown backend, or one that
            cannot do the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    hierarchy = _fit_hierarchy(hierarchy, key)
    dtype, heads = working_dtype(query), query.shape[1]
    sink_logit = None if sink_logit is None else sink_logit.to(dtype)
    counts: Any = [per_head(count, heads) for count in (near, sinks, refine_top_k)]
    block_bias = per_head_tensor(block_bias, query, dtype)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)

    # Choose the implementation.
    settings = {
        "a mask": mask is not None,
        "a hierarchy that is not of windows": not hierarchy.is_windows,
        "a bias": bias is not None,
        "a sliding window": window is not None and window < key.shape[2],
        "dropout": dropout_p > 0,
        "weights": weights,
    }
    obstacle = _find_obstacle(settings, hierarchy, any(counts[2]) and not is_causal)
    if backend == "native" and obstacle is not None:
        raise ValueError(
            f"backend='native' cannot compute {obstacle}; use backend='auto' or 'torch'"
        )
    readable = can_read(query)
    serves = readable and _kernel_serves(query, backend)
    # Convert to the working dtype, unless the kernel multiplies bfloat16 directly.
    if len({t.dtype for t in (query, key, value)}) > 1 or not native.takes_dtype(query):
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # A tensor that cannot be read is being traced: the operator chooses again when it runs.
    if obstacle is None and (serves or not readable):
        out = _call_operator(
            query,
            key,
            value,
            hierarchy,
            counts=counts,
            block_bias=block_bias,
            sink_logit=sink_logit,
            is_causal=is_causal,
            offset=offset,
            scale=scale,
            backend=backend,
        )
        return out, None

    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    options = Options(
        mask=_with_four_axes(mask),
        bias=_with_four_axes(bias),
        is_causal=is_causal,
        window=window,
        offset=offset,
        sinks=sink_logit,
        dropout_p=dropout_p,
    )
    out, _, shares = _attend_by_torch(
        query * scale, key, value, hierarchy, counts, block_bias, options, weights, place
    )
    return out, shares


def _with_four_axes(t: Tensor | None) -> Tensor | None:
    """Return a mask or bias with missing axes added in front, or None."""
    return t if t is None else t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))


def _find_obstacle(
    settings: dict[str, bool], hierarchy: Hierarchy, refines_both_sides: bool
) -> str | None:
    """Return the first part of a call that the kernel cannot compute, or None.

    Args:
        settings: Parts that the kernel cannot compute, and whether the call has them.
        hierarchy: Trees over the keys.
        refines_both_sides: Whether the call refines without being causal.
    """
    for name, there in settings.items():
        if there:
            return name
    # Causal windows are continued to the right, so that their last window is complete.
    if refines_both_sides and has_chains(hierarchy):
        return "refinement where the last window of a level has a single child"
    return None


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
    """Return the results of `tree.key.attend_trees`.

    These are output, log-sum-exp, and weights or None. The query must be scaled.
    """
    near, sinks, top_k = (torch.tensor(count, device=query.device) for count in counts)
    call = tree_key.KeyTying(
        near=near,
        sinks=sinks,
        top_k=top_k,
        block_bias=block_bias,
        options=options,
        weights=weights,
        place=place,
    )
    trees = tree_key.trees_of(hierarchy, options.is_causal)
    return tree_key.attend_trees(query, key, value, trees, call)


def _fit_hierarchy(hierarchy: Hierarchy | Sequence[int], key: Tensor) -> Hierarchy:
    """Return a hierarchy over the keys, from a hierarchy or from window sizes."""
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
    """Return whether the last window of some level has a single child.

    The child is a token or a lower window. Such a window and its child are one node of the tree
    (`Tree` collapses them), and refinement must not count both.
    """
    widths = (1, *(hierarchy.sizes or ()))
    for start, stop in map(hierarchy.span, range(hierarchy.rows)):
        blocks = [-(-(stop - start) // width) for width in widths]
        for level in range(1, len(widths)):
            children, parents = blocks[level - 1], blocks[level]
            branching = widths[level] // widths[level - 1]
            # All parents but the last are full. A level with one window is the root, which is no
            # block.
            if parents > 1 and children - (parents - 1) * branching == 1:
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
    """Attend to tokens and means, without gradients.

    A single causal query reads O(near + sinks + top_k · Σ branching + blocks of the top level) rows
    of the levels.

    Args:
        query: [B, H, N, d] of the dtype of the means, or of the tokens.
        levels: Tokens and means. If some tokens are evicted, refine_top_k must be 0.
        near, sinks, refine_top_k, block_bias, sink_logit, is_causal, offset, scale, backend: As in
            `key_tied`.
        lse: If False, the log-sum-exp may be None. Decoding with refinement is then faster in the
            kernel.

    Returns:
        Output [B, H, N, dv], and log-sum-exp [B, H, N], +inf if a query sees nothing.
    """
    counts: Any = [per_head(count, query.shape[1]) for count in (near, sinks, refine_top_k)]
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    dtype = working_dtype(query, levels.keys[-1])
    block_bias = per_head_tensor(block_bias, query, dtype)
    sink_logit = None if sink_logit is None else sink_logit.to(dtype)
    if _kernel_serves(query, backend):
        arguments = _kernel_arguments(
            levels, counts, block_bias, sink_logit, is_causal, offset, scale
        )
        return native.compute_forward(query, lse=lse, **arguments)
    # Plain torch computes its own means from the tokens.
    key, value = levels.keys[0], levels.values[0]
    hierarchy = Hierarchy(
        key.shape[2], sizes=levels.sizes, starts=levels.starts, stops=levels.stops
    )
    options = Options(is_causal=is_causal, offset=offset, sinks=sink_logit)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _attend_by_torch(query * scale, key, value, hierarchy, counts, block_bias, options)[:2]


def _kernel_serves(query: Tensor, backend: str) -> bool:
    """Return whether the kernel computes a call with this query.

    Raises:
        ValueError: backend="native", and the kernel cannot compute the call.
    """
    serves = backend in ("auto", "native") and native.can_serve(query)
    if backend == "native" and not serves:
        raise ValueError(
            f"backend='native' cannot compute {query.dtype} on {query.device} here; allowed: float32, bfloat16 and "
            "float16 on the CPU, with a C++ compiler installed; use backend='auto'"
        )
    return serves


def _kernel_arguments(
    levels: Levels, counts, block_bias, sink_logit, is_causal: bool, offset: int, scale: float
) -> dict[str, Any]:
    """Return the arguments of `native.compute_forward` after the query, by name.

    Args:
        levels: Tokens and means.
        counts: near, sinks and refine_top_k, one integer per head each.
        block_bias, sink_logit: [H] or None.
        is_causal, offset, scale: As in `key_tied`.
    """
    batch, length = len(levels.keys[0]), levels.keys[0].shape[2]
    # With evicted tokens, the table of tokens is shorter than the text.
    length, held = levels.held or (length, ((0, 0),) * len(levels.keys))
    near, sinks, top_k = counts
    return {
        "keys": levels.keys,
        "values": levels.values,
        "block_bias": block_bias,
        "sink_logit": sink_logit,
        "spans": span_lists(batch, length, levels.starts, levels.stops),
        "sizes": levels.sizes,
        "held": [n for of_level in held for n in of_level],
        "near": near,
        "sinks": sinks,
        "top_k": top_k,
        "is_causal": is_causal,
        "offset": offset,
        "scale": scale,
    }


def _call_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    *,
    counts: list[list[int]],
    block_bias: Tensor | None,
    sink_logit: Tensor | None,
    is_causal: bool,
    offset: int,
    scale: float,
    backend: str,
) -> Tensor:
    """Return the output, as one operator that pools keys and values itself.

    Args:
        query, key, value, is_causal, offset, scale, backend: As in `key_tied`.
        hierarchy: Windows.
        counts: near, sinks and refine_top_k, one integer per head each.
        block_bias, sink_logit: [H] or None.
    """
    extras = {
        "block_bias": block_bias,
        "sink_logit": sink_logit,
        "starts": hierarchy.starts,
        "stops": hierarchy.stops,
    }
    named = [(name, t) for name, t in extras.items() if t is not None]
    near, sinks, top_k = counts
    # `_read_call` reads these by position.
    numbers = [BACKENDS.index(backend), is_causal, offset, *near, *sinks, *top_k]
    sizes = list(hierarchy.sizes or ())
    return operator.call_function("windowed", [query, key, value], named, sizes, numbers, scale)[0]


def _read_call(
    tensors, named: operator.Named, sizes, numbers, scale
) -> tuple[Tensor, Levels, dict[str, Any], str]:
    """Return query, levels, settings and backend of an operator call.

    `_call_operator` wrote the arguments. The settings are arguments of `attend_levels` by name.
    """
    query, key, value = tensors
    extras, heads = dict(named), query.shape[1]
    backend, is_causal, offset, *counts = numbers
    near, sinks, top_k = _split_by_head(counts, heads)
    levels = pool_levels(key, value, tuple(sizes), extras.get("starts"), extras.get("stops"))
    if native.takes_dtype(query):
        # `pool_levels` converts tokens to float32. The kernel multiplies the bfloat16 tokens
        # directly.
        levels = replace(levels, keys=(key, *levels.keys[1:]), values=(value, *levels.values[1:]))
    settings = {
        "near": near,
        "sinks": sinks,
        "refine_top_k": top_k,
        "block_bias": extras.get("block_bias"),
        "sink_logit": extras.get("sink_logit"),
        "is_causal": bool(is_causal),
        "offset": offset,
        "scale": scale,
    }
    return query, levels, settings, BACKENDS[backend]


def _split_by_head(counts: Sequence[int], heads: int) -> list[Sequence[int]]:
    """Return near, sinks and refine_top_k, which stand one after the other."""
    return [counts[i * heads : (i + 1) * heads] for i in range(3)]


def _count_pairs(query, key, named, sizes, numbers) -> float:
    """Return how many logits a row has, from the shapes of its tensors."""
    _, is_causal, _, *counts = numbers
    heads, queries, keys = query[1], query[2], key[2]
    return sum(
        count_query_pairs(queries, keys, sizes, near, sinks, top_k, is_causal)
        for near, sinks, top_k in zip(*_split_by_head(counts, heads))
    )


def _compute_gradients(
    grad: Tensor, out: Tensor, lse: Tensor, tensors, named: operator.Named, *rest
) -> list[Tensor | None] | None:
    """Return the gradients of all tensors, or None to let autograd compute them."""
    # The backward kernel takes float32 only.
    query, levels, settings, backend = _read_call([t.float() for t in tensors], named, *rest)
    if not _kernel_serves(query, backend):
        return None
    arguments = _kernel_arguments(
        levels,
        counts=[settings[name] for name in ("near", "sinks", "refine_top_k")],
        block_bias=settings["block_bias"],
        sink_logit=settings["sink_logit"],
        is_causal=settings["is_causal"],
        offset=settings["offset"],
        scale=settings["scale"],
    )
    g_query, keys, values, g_bias, g_sink = native.compute_backward(
        grad, out, lse, query, **arguments
    )
    # A mean passes its gradient on to its tokens.
    spans = span_lists(len(query), levels.keys[0].shape[2], levels.starts, levels.stops)
    tokens = [unpool_gradients(tables, levels.sizes, *spans) for tables in (keys, values)]
    gradients = {"block_bias": g_bias, "sink_logit": g_sink}
    return [g_query, *tokens, *(gradients.get(name) for name, _ in named)]


@operator.register_function(
    "windowed", lambda query, key, numbers: query.shape[:3], _count_pairs, _compute_gradients
)
def _compute_output(*call) -> tuple[Tensor, Tensor]:
    """Compute the operator "windowed": output and log-sum-exp."""
    query, levels, settings, backend = _read_call(*call)
    out: Any = attend_levels(query, levels, **settings, backend=backend)
    return out


def per_head(value: PerHead, heads: int) -> list[int]:
    """Return one integer per head.

    Args:
        value: A number for all heads, or one per head.
        heads: Number of query heads.
    """
    value = value.tolist() if isinstance(value, Tensor) else value
    value = [int(value)] if isinstance(value, int | float) else [int(v) for v in value]
    return value * heads if len(value) == 1 else value


def per_head_tensor(
    value: float | Tensor | None, like: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return a tensor [H] with one number per head, or None.

    Args:
        value: A number for all heads, a tensor of 1 or H numbers, or None.
        like: Query [B, H, N, d], which gives the device and the number of heads.
        dtype: Of the result.
    """
    if value is None:
        return None
    heads = like.shape[1]
    value = torch.as_tensor(value, dtype=dtype, device=like.device)
    return value if value.shape == (heads,) else value.reshape(-1).expand(heads).contiguous()
