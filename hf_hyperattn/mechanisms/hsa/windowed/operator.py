"""Key-tied attention over windows as one operator, with its gradient: one node for the compiler and for export."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import native, tiles
from .means import span_lists


def way(query: Tensor, backend: str):
    """What computes the call: `native`, the compiled kernel, or `tiles`, plain torch.

    Raises:
        ValueError: backend="native" where the kernel cannot.
    """
    if backend != "torch" and native.serves(query):
        return native
    if backend == "native":
        raise ValueError(
            f"backend='native' cannot compute {query.dtype} on {query.device} here; allowed: float32 on the CPU, "
            "with a C++ compiler installed; use backend='auto'"
        )
    return tiles


@torch.library.custom_op("hf_hyperattn::key_tied", mutates_args=())
def forward(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    block_bias: Tensor | None,
    sink_logit: Tensor | None,
    starts: Tensor | None,
    stops: Tensor | None,
    sizes: Sequence[int],
    near: Sequence[int],
    sinks: Sequence[int],
    top_k: Sequence[int],
    is_causal: bool,
    offset: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The operator: output [B, H, N, dv] and log-sum-exp [B, H, N] (+inf where a query sees nothing).

    Args:
        query: [B, H, N, d]. keys, values: tables of the tokens and of every level's means, bottom first.
        block_bias, sink_logit: [H]. near, sinks, top_k: one a head. The rest as in `key.key_tied`.
    """
    spans = span_lists(len(query), keys[0].shape[2], starts, stops)
    rules = spans, sizes, near, sinks, top_k, is_causal, offset, scale
    return way(query, backend).forward(query, keys, values, block_bias, sink_logit, *rules)


@forward.register_fake
def _(query, keys, values, *_):
    return query.new_empty(*query.shape[:3], values[0].shape[-1]), query.new_empty(query.shape[:3])


@torch.library.custom_op("hf_hyperattn::key_tied_backward", mutates_args=())
def backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    block_bias: Tensor | None,
    sink_logit: Tensor | None,
    starts: Tensor | None,
    stops: Tensor | None,
    sizes: Sequence[int],
    near: Sequence[int],
    sinks: Sequence[int],
    top_k: Sequence[int],
    is_causal: bool,
    offset: int,
    scale: float,
    backend: str,
) -> list[Tensor]:
    """Gradients of query, keys, values, block bias and sink, by computing every tile again."""
    spans = span_lists(len(query), keys[0].shape[2], starts, stops)
    rules = spans, sizes, near, sinks, top_k, is_causal, offset, scale
    g_query, g_keys, g_values, g_bias, g_sink = way(query, backend).backward(
        grad, out, lse, query, keys, values, block_bias, sink_logit, *rules
    )
    return [g_query, *g_keys, *g_values, g_bias.clone(), g_sink.clone()]


@backward.register_fake
def _(grad, out, lse, query, keys, values, *_):
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, *keys, *values)]
    return [*like, query.new_empty(query.shape[1]), query.new_empty(query.shape[1])]


def _save(ctx, inputs, output):
    query, keys, values, *heads, ctx.starts, ctx.stops = inputs[:7]
    ctx.levels, ctx.given, ctx.rest = len(keys), [t is not None for t in heads], inputs[7:]
    ctx.save_for_backward(*output, query, *keys, *values, *(t for t in heads if t is not None))


def _pullback(ctx, grad, _grad_lse):
    out, lse, query, *rest = ctx.saved_tensors
    n = ctx.levels
    keys, values, extra = rest[:n], rest[n : 2 * n], iter(rest[2 * n :])
    heads = [next(extra) if given else None for given in ctx.given]
    grads = backward(
        grad.contiguous(), out, lse, query, keys, values, *heads, ctx.starts, ctx.stops, *ctx.rest
    )
    of_heads = [g if given else None for g, given in zip(grads[1 + 2 * n :], ctx.given)]
    none = [] if not ctx.rest[0] else None  # the dispatcher takes an empty list for one of tensors
    return grads[0], grads[1 : 1 + n], grads[1 + n : 1 + 2 * n], *of_heads, None, None, none, *[None] * 7


forward.register_autograd(_pullback, setup_context=_save)
