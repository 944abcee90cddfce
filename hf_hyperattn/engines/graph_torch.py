"""A traced term in torch, with the derivative of its graph: in blocks it has the slopes that compiled kernels have.

torch's own differentiation would give NaN where a branch that is not taken has an infinite slope (see trace.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from .trace import GRAD, NEAR, Node, Traced, Untraceable, trace

#: What an operator of a graph is in torch, where that has another name.
MEANING: dict[str, Callable[..., Tensor]] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "max": torch.maximum,
    "min": torch.minimum,
    "detach": lambda a: a,
    "acosh1p": lambda y, root: torch.log1p(y + root),
    "cosh_of_sinh": lambda sine: torch.hypot(sine, torch.ones_like(sine)),
}


@lru_cache(maxsize=256)
def graph_of(term, required: bool = False) -> Traced | None:
    """A term's graph; None where it has none.

    Raises:
        Untraceable: it has none, and is `required` to have one.
    """
    try:
        return trace(term)
    except Untraceable:
        if required:
            raise
        return None


#: What gives second derivatives in place of an engine, where `backend=` can choose among those of pair scores.
BY_REFERENCE = "use backend='reference', or in a model hf_hyperattn.set_backend(model, 'reference')"


def refuse_second_derivative(owner: str, instead: str = BY_REFERENCE) -> NoReturn:
    """Raise the error of a second derivative that `owner`, such as "backend='cpu'", does not have."""
    raise RuntimeError(
        f"{owner} has no second derivative, which create_graph=True asked for; {instead}"
    )


def refuse_in_operator(backward, owner: str, instead: str = BY_REFERENCE) -> None:
    """Let an operator that computes gradients say in one sentence that they have no derivatives of their own."""
    backward.register_autograd(lambda ctx, *grads: refuse_second_derivative(owner, instead))


class _Once(torch.autograd.Function):
    """The first `count` tensors as they are; the others are what these were made of."""

    @staticmethod
    def forward(ctx, owner: str, instead: str, count: int, *tensors: Tensor):
        ctx.said = owner, instead
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        refuse_second_derivative(*ctx.said)


class _FirstOnly(torch.autograd.Function):
    """A tensor as it is; its gradient has no derivative of its own."""

    @staticmethod
    def forward(ctx, owner: str, tensor: Tensor):
        ctx.owner = owner
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return None, refusing_second_derivatives([grad], *ctx.saved_tensors, grad, owner=ctx.owner)[
            0
        ]


def with_first_derivative_only(owner: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Inputs of a function of torch without a second derivative, which then is refused in our words."""
    return tuple(_FirstOnly.apply(owner, t) if t.requires_grad else t for t in tensors)


def refusing_second_derivatives(
    gradients: Sequence[Tensor | None],
    *origins: Tensor | None,
    owner: str,
    instead: str = BY_REFERENCE,
) -> list[Tensor | None]:
    """Gradients that a backward pass has made without a graph, of these tensors.

    Differentiated again they are an error whichever way that comes. torch's `once_differentiable` is silent where
    the second derivative is asked of tensors that other ways lead to as well, and where the output was only summed.
    """
    there = [g for g in gradients if g is not None]
    known = [t for t in origins if t is not None]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in known):
        return list(gradients)
    found = iter(_Once.apply(owner, instead, len(there), *there, *known))
    return [g if g is None else next(found) for g in gradients]


def evaluate(node: Node, values: dict[Node, Tensor]) -> Tensor:
    """A node's value, from those of leaves; adds what it computes to them."""
    if node not in values:
        if node.op == "number":
            like = next(iter(values.values()))
            values[node] = torch.full((), node.value, dtype=like.dtype, device=like.device)
        else:
            function = MEANING.get(node.op) or getattr(torch, node.op)
            values[node] = function(*(evaluate(a, values) for a in node.args))
    return values[node]


def vjp(
    t: Traced,
    dot: Tensor,
    row: Sequence[Tensor],
    column: Sequence[Tensor],
    head: Sequence[Tensor],
    squared: Tensor | None = None,
    near: Tensor | None = None,
) -> tuple[Tensor, Callable]:
    """As `Term.vjp`.

    Args:
        squared: the squared distances, for a term that reads them.
        near: which of them are from differences, bool; None: no one.
    """
    leaf = lambda op, place=0: t.graph.node(op, value=place)
    values = {leaf("dot"): dot}
    values |= {
        leaf(op, i): x
        for op, numbers in zip(("row", "column", "head"), (row, column, head))
        for i, x in enumerate(numbers)
    }
    if squared is not None:
        values[leaf("squared_distance")] = squared
    logits = evaluate(t.logit, values)
    del values[t.logit]  # the caller may overwrite it

    def pullback(grad):
        known = dict(values)  # what depends on the gradient is not kept
        known[t.graph.node("local", value=GRAD)] = grad
        none_near = torch.zeros((), dtype=torch.bool, device=dot.device)
        known[t.graph.node("near", value=NEAR)] = none_near if near is None else near
        gradients, distance = t.by_grad

        def of(op: str, count: int) -> list[Tensor | None]:
            nodes = [gradients.get(leaf(op, i)) for i in range(count)]
            return [None if node is None else evaluate(node, known) for node in nodes]

        d_squared = () if near is None else (torch.where(near, evaluate(distance, known), 0.0),)
        return (
            of("dot", 1)[0],
            of("row", len(row)),
            of("column", len(column)),
            of("head", len(head)),
            *d_squared,
        )

    return logits if logits.shape == dot.shape else logits.expand(dot.shape).clone(), pullback
