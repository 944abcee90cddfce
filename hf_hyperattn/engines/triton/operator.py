"""The kernels as operators of torch, with their gradients, so that compilers and exporters see one node.

Kernels are imported with the first call: Triton may be missing, and nothing here costs at import.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..flops import count_flops


@torch.library.custom_op("hf_hyperattn::triton", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    column: Tensor,
    head: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    points_query: Tensor | None,
    points_key: Tensor | None,
    score_key: str,
    factored: bool,
    width: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and log-sum-exp [B, H, N], float32.

    Args:
        query: [B, H, N, d], of one dtype with `key`: what products are computed of, see `PairScore.raw_query`.
        key: [B, Hkv, M, d].
        value: [B, Hkv, M, dv].
        row, column, head: all statistics of queries [B, H, N, r] and of keys [B, H or Hkv, M, c], all parameters and
            gates [p, H], piece by piece, float32.
        mask, bias: as in `Options`, four axes, without gradient.
        sinks: [H].
        seed: of dropout, int64 [1].
        points_query, points_key: as in `Points`, where differences may be asked for.
        score_key: the score's terms.
        factored: whether the last number in `row` and `column` is what the vectors are multiplied with.
        width: of each vector this many numbers count for the product.
        scale: what all products are multiplied with.
        is_causal, window, offset, softcap, dropout_p: as in `Options`.
    """
    from . import launch

    points = None if points_query is None or points_key is None else (points_query, points_key)
    call = launch.TritonCall(
        *(query, key, value, row, column, head, mask, bias, sinks, seed, points),
        *(score_key, factored, width, scale, is_causal, window, offset, softcap, dropout_p),
    )
    return launch.forward(call)


@attention.register_fake
def _(query, key, value, *_):
    shape = query.shape[:3]
    return (
        query.new_empty(*shape, value.shape[-1], dtype=torch.float32),
        query.new_empty(shape, dtype=torch.float32),
    )


@torch.library.custom_op("hf_hyperattn::triton_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    column: Tensor,
    head: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    points_query: Tensor | None,
    points_key: Tensor | None,
    needs_row: bool,
    needs_column: bool,
    needs_head: bool,
    score_key: str,
    factored: bool,
    width: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, row, column and head; of the last three as far as needed, else empty."""
    from . import launch

    points = None if points_query is None or points_key is None else (points_query, points_key)
    call = launch.TritonCall(
        *(query, key, value, row, column, head, mask, bias, None, seed, points),
        *(score_key, factored, width, scale, is_causal, window, offset, softcap, dropout_p),
    )
    return launch.backward(call, grad, out, lse, (needs_row, needs_column, needs_head))


@attention_backward.register_fake
def _(
    grad,
    out,
    lse,
    query,
    key,
    value,
    row,
    column,
    head,
    m,
    b,
    s,
    p,
    q,
    by_row,
    by_column,
    by_head,
    *_,
):
    nothing = (*row.shape[:3], 0), (*column.shape[:3], 0), (0, head.shape[1])
    needs_grad = zip((row, column, head), (by_row, by_column, by_head), nothing, strict=True)
    return (
        *(t.new_empty(t.shape) for t in (query, key, value)),
        *(t.new_empty(t.shape if w else nothing) for t, w, nothing in needs_grad),
    )


def _save(ctx, inputs, output):
    tensors, ctx.rest = inputs[:12], inputs[12:]
    sinks = tensors[8]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors[:8], *tensors[9:], sinks)


def _pullback(ctx, grad, _grad_lse):
    out, lse, *tensors, sinks = ctx.saved_tensors
    needs, d_sinks = ctx.needs_input_grad, None
    gradients = attention_backward(grad, out, lse, *tensors, *needs[3:6], *ctx.rest)
    if needs[8]:
        weight = torch.exp(sinks[:, None] - lse)
        d_sinks = -(weight * (grad * out).sum(-1)).sum((0, 2))
    main = [g if need else None for g, need in zip(gradients, needs)]
    return *main, None, None, d_sinks, *[None] * (len(needs) - 9)


attention.register_autograd(_pullback, setup_context=_save)
count_flops(attention)
count_flops(attention_backward, at=3, backward=True)
