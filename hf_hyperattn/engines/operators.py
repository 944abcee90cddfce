"""What makes an operator differentiable: forward and backward are operators, and this is all that joins them."""

from __future__ import annotations

from typing import Any


def differentiable(forward: Any, backward: Any) -> None:
    """Give an operator its gradient.

    Args:
        forward: `forward(tensors, *rest) -> (output, what its gradients need beside it)`, of `torch.library.custom_op`.
        backward: the operator of its gradients, called with the output's gradient, what `forward` returned, its
            tensors, which of them want a gradient, and its further arguments; a gradient for each tensor.
    """

    def save(ctx, inputs, output):
        tensors, *ctx.rest = inputs
        ctx.save_for_backward(*output, *tensors)

    def pullback(ctx, grad, _):
        out, rest, *tensors = ctx.saved_tensors
        needs_grad = list(ctx.needs_input_grad[0])
        grads = backward(grad.contiguous(), out, rest, tensors, needs_grad, *ctx.rest)
        kept = [g.to(t.dtype) if n else None for g, t, n in zip(grads, tensors, needs_grad, strict=True)]
        return kept, *[None] * len(ctx.rest)

    forward.register_autograd(pullback, setup_context=save)
