"""Compute key-tied attention (docs/hsa.md; arXiv 2509.15448).

This module shows when the compiled kernel computes a call and when plain torch does; both agree,
forward and backward.

The kernel for CPUs (native.py, engines/cpu/listed) computes the means of keys and values over
windows once. Each query then reads only the means and tokens that it attends to. The means of
earlier windows may come from a cache. On GPUs, listed.py does the same for causal calls. Plain
torch (tree/key.py) computes other trees, masks, devices and dtypes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....engines import Options, working_dtype
from ....hierarchy import Hierarchy
from ....utils.readable import can_read
from ....utils.torch_private import count_dispatch_modes
from .. import operator
from ..config import Rule
from ..pairs import count_query_pairs
from ..tree.key import attend_trees
from . import listed, native
from .native import Levels, pool_levels

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is added by Transformers

#: Values of `backend` in `attend_keys`; "rows" is an older name of "torch".
BACKENDS = ("auto", "torch", "native", "rows", "triton")


def attend_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    rule: Rule,
    options: Options,
    *,
    scale: float,
    backend: str = "auto",
    weights: bool = False,
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
        query: [B, H, N, d]; query i is token `options.offset + i`: a full pass, the last N of M
            tokens, or one step.
        key: [B, Hkv, M, d], Hkv dividing H.
        value: [B, Hkv, M, dv].
        hierarchy: Trees over the M keys. Padding is in no tree.
        rule: Its numbers may also be lists or tensors, and `block_bias` None.
        options: Mask and bias have four axes, and there is no softcap.
        scale: Factor of q·k.
        backend: "auto", "native" (the compiled kernel for CPUs), "triton" (the kernel for GPUs) or
            "torch".
        weights: Also return the attention weights [B, H, N, M].
        place: int64 [B, M], the number of each key in its text, from which the sinks count if a
            mask packs several texts into a row; None: its number in the row.

    Returns:
        [B, H, N, dv], float32, or float64 for float64 inputs, or from the kernel for GPUs in the
        dtype of the query; and the weights or None.

    Raises:
        ValueError: The backend cannot do the call.
    """
    dtype = working_dtype(query)
    rule, options = spread_heads(rule, options, query, dtype)
    obstacle = _find_obstacle(hierarchy, rule, options, key.shape[2], weights)
    if backend in ("native", "triton") and obstacle is not None:
        raise ValueError(
            f"backend={backend!r} cannot compute {obstacle}; use backend='auto' or 'torch'"
        )
    if obstacle is not None and backend == "auto":
        log_plain_torch(query, f"it has {obstacle}")
    readable = can_read(query)
    on_gpu = obstacle is None and readable and _gpu_kernel_serves(query, value, options, backend)
    # Dispatch modes such as FLOP counters need the operator.
    if on_gpu and not count_dispatch_modes():
        levels = Levels(hierarchy.sizes or (), (key,), (value,), hierarchy.starts, hierarchy.stops)
        return listed.attend_listed(query, levels, rule, options, scale), None
    # Convert to the working dtype, unless the kernel multiplies bfloat16 directly.
    if len({t.dtype for t in (query, key, value)}) > 1 or not native.takes_dtype(query):
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    serves = readable and (on_gpu or _kernel_serves(query, backend))
    # A tensor that cannot be read is being traced: the operator chooses again when it runs.
    if obstacle is None and (serves or not readable):
        sizes, spans = hierarchy.sizes or (), (hierarchy.starts, hierarchy.stops)
        # Dispatch takes a good part of a decoding step, so skip it without gradients.
        if serves and not torch.is_grad_enabled() and not count_dispatch_modes():
            levels = _pool_tokens(key, value, sizes, *spans)
            return attend_levels(query, levels, rule, options, scale, backend)[0], None
        return _call_operator(query, key, value, sizes, spans, rule, options, scale, backend), None
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out, _, shares = attend_trees(
        query * scale, key, value, hierarchy, rule, options, weights, place
    )
    return out, shares


def _find_obstacle(
    hierarchy: Hierarchy, rule: Rule, options: Options, keys: int, weights: bool
) -> str | None:
    """Return the first part of a call that the kernel cannot compute, or None.

    Args:
        hierarchy, options, weights: As in `attend_keys`.
        rule: As `spread_heads` returns it.
        keys: M.
    """
    parts = {
        "a mask": options.mask is not None,
        "a hierarchy that is not of windows": hierarchy.sizes is None,
        "a bias": options.bias is not None,
        "a sliding window": options.window is not None and options.window < keys,
        "dropout": options.dropout_p > 0,
        "weights": weights,
    }
    for name, there in parts.items():
        if there:
            return name
    # Causal windows are continued to the right, so that their last window is complete.
    if any(rule.refine_top_k) and not options.is_causal and has_chains(hierarchy):
        return "refinement where the last window of a level has a single child"
    return None


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
    rule: Rule,
    options: Options,
    scale: float,
    backend: str = "auto",
    lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attend to tokens and means, without gradients.

    A single causal query reads O(near + sinks + top_k · Σ branching + blocks of the top level) rows
    of the levels.

    Args:
        query: [B, H, N, d] of the dtype of the means, or of the tokens.
        levels: Tokens and means. If some tokens are evicted, refine_top_k must be 0.
        rule, scale, backend: As in `attend_keys`.
        options: `is_causal`, `offset` and `sinks` are read.
        lse: If False, the log-sum-exp may be None. Decoding with refinement is then faster in the
            kernel for CPUs, and the kernel for GPUs, which has none, can compute the call.

    Returns:
        Output [B, H, N, dv], and log-sum-exp [B, H, N], +inf if a query sees nothing.
    """
    dtype = working_dtype(query, levels.keys[-1])
    rule, options = spread_heads(rule, options, query, dtype)
    if _kernel_serves(query, backend):
        return native.compute_forward(query, levels, rule, options, scale, lse)
    key, value = levels.keys[0], levels.values[0]
    if not lse and levels.held is None and _gpu_kernel_serves(query, value, options, backend):
        return listed.attend_listed(query, levels, rule, options, scale), None
    # Plain torch computes its own means from the tokens.
    hierarchy = Hierarchy(
        key.shape[2], sizes=levels.sizes, starts=levels.starts, stops=levels.stops
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return attend_trees(query * scale, key, value, hierarchy, rule, options)[:2]


def _gpu_kernel_serves(query: Tensor, value: Tensor, options: Options, backend: str) -> bool:
    """Return whether the kernel for GPUs computes a call over windows.

    Raises:
        ValueError: backend="triton", and the kernel cannot compute the call.
    """
    is_asked = backend == "triton"
    if not (is_asked or (backend == "auto" and query.device.type == "cuda")):
        return False
    obstacle = listed.find_obstacle(query, value, options)
    if obstacle is None:
        return True
    if is_asked:
        raise ValueError(
            f"backend='triton' cannot compute this call: {obstacle}; use backend='auto' or 'torch'"
        )
    log_plain_torch(query, obstacle)
    return False


def log_plain_torch(query: Tensor, obstacle: str) -> None:
    """Log once for each reason that key-tied attention runs in plain torch on a GPU."""
    if query.device.type == "cuda" and not torch.compiler.is_compiling():
        logger.warning_once(
            "hf_hyperattn: hsa runs in plain torch on a GPU, which saves no time; the kernel does not take this call: "
            f"{obstacle}"
        )


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


def _pool_tokens(
    key: Tensor,
    value: Tensor,
    sizes: tuple[int, ...],
    starts: Tensor | None,
    stops: Tensor | None,
) -> Levels:
    """Return the levels of `pool_levels`, with tokens that the kernel reads directly."""
    levels = pool_levels(key, value, sizes, starts, stops)
    if not native.takes_dtype(key):
        return levels
    # `pool_levels` converts tokens to float32. The kernel multiplies bfloat16 tokens as they are.
    return replace(levels, keys=(key, *levels.keys[1:]), values=(value, *levels.values[1:]))


def _call_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: tuple[int, ...],
    spans: tuple[Tensor | None, Tensor | None],
    rule: Rule,
    options: Options,
    scale: float,
    backend: str,
) -> Tensor:
    """Return the output, as one operator that pools keys and values itself.

    Args:
        query, key, value, scale, backend: As in `attend_keys`.
        sizes: Window sizes, bottom first.
        spans: `starts` and `stops` of the windows.
        rule, options: As `spread_heads` returns them.
    """
    names = "block_bias", "sink_logit", "starts", "stops"
    extras = zip(names, (rule.block_bias, options.sinks, *spans), strict=True)
    named = [(name, t) for name, t in extras if t is not None]
    # `_read_call` reads these by position.
    numbers = [BACKENDS.index(backend), options.is_causal, options.offset]
    numbers += [*rule.near, *rule.sinks, *rule.refine_top_k]
    tensors = [query, key, value]
    return operator.call_function("windowed", tensors, named, list(sizes), numbers, scale)[0]


def _read_call(
    tensors, named: operator.Named, sizes, numbers, scale
) -> tuple[Tensor, Levels, Rule, Options, float, str]:
    """Return the arguments of `attend_levels` from those that `_call_operator` wrote."""
    query, key, value = tensors
    extras = dict(named)
    backend, is_causal, offset, *counts = numbers
    near, sinks, top_k = _split_by_head(counts, query.shape[1])
    rule = Rule(
        tying="key",
        near=near,
        sinks=sinks,
        refine_top_k=top_k,
        block_bias=extras.get("block_bias"),
    )
    options = Options(is_causal=bool(is_causal), offset=offset, sinks=extras.get("sink_logit"))
    spans = extras.get("starts"), extras.get("stops")
    # Means of the kernel for CPUs have no gradient. Other ways compute their own ones.
    if _kernel_serves(query, BACKENDS[backend]):
        levels = _pool_tokens(key, value, tuple(sizes), *spans)
    else:
        levels = Levels(tuple(sizes), (key,), (value,), *spans)
    return query, levels, rule, options, scale, BACKENDS[backend]


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
    query, levels, rule, options, scale, backend = _read_call(
        [t.float() for t in tensors], named, *rest
    )
    if not _kernel_serves(query, backend):
        return None
    *tokens, g_bias, g_sink = native.compute_backward(
        grad, out, lse, query, levels, rule, options, scale
    )
    gradients = {"block_bias": g_bias, "sink_logit": g_sink}
    return [*tokens, *(gradients.get(name) for name, _ in named)]


def _compute_output(*call) -> tuple[Tensor, Tensor]:
    """Compute the operator "windowed": output and log-sum-exp."""
    query, levels, rule, options, scale, backend = _read_call(*call)
    # Only the backward pass of the kernel for CPUs reads the log-sum-exp.
    needs_lse = _kernel_serves(query, backend)
    out, lse = attend_levels(query, levels, rule, options, scale, backend, needs_lse)
    out = out.to(working_dtype(query))
    return out, out.new_zeros(out.shape[:3]) if lse is None else lse


operator.FUNCTIONS["windowed"] = operator.Function(
    compute=_compute_output,
    shape=lambda query, key, numbers: query.shape[:3],
    pairs=_count_pairs,
    backward=_compute_gradients,
)


def spread_heads(
    rule: Rule, options: Options, query: Tensor, dtype: torch.dtype
) -> tuple[Rule, Options]:
    """Return a rule and options with one number per head.

    Args:
        rule: A number is for all heads, or there is one per head. `block_bias` may be None.
        options: Options of the call.
        query: [B, H, N, d], which gives the device and the number of heads.
        dtype: Of the results.

    Returns:
        The rule with lists of integers and a block bias [H] or None, and the options with sinks of
        this dtype.
    """
    heads, bias = query.shape[1], rule.block_bias
    if bias is not None:
        bias = torch.as_tensor(bias, dtype=dtype, device=query.device)
        bias = bias if bias.shape == (heads,) else bias.reshape(-1).expand(heads).contiguous()
    near, sinks, top_k = (
        list_by_head(counts, heads) for counts in (rule.near, rule.sinks, rule.refine_top_k)
    )
    rule = replace(rule, near=near, sinks=sinks, refine_top_k=top_k, block_bias=bias)
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(dtype))
    return rule, options


def list_by_head(value: int | Sequence[int] | Tensor, heads: int) -> list[int]:
    """Return one integer per head, from a number for all heads or one per head."""
    value = value.tolist() if isinstance(value, Tensor) else value
    value = [int(value)] if isinstance(value, int | float) else [int(v) for v in value]
    return value * heads if len(value) == 1 else value
