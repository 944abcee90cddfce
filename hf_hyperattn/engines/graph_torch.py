"""Evaluate a traced term and its derivative in torch.

Blocks then have the same slopes as compiled kernels. This module also holds the errors for second
derivatives, which no engine but `reference` has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from .trace import GRAD, NEAR, Node, Traced, Untraceable, trace_term

#: Torch functions for operators of a graph whose names in torch differ.
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
    """Return the graph of a term, or None if the term cannot be traced.

    Args:
        term: A `Term` (score.py).
        required: Raise instead of returning None. Default: return None.

    Raises:
        Untraceable: The term cannot be traced, and `required` is set.
    """
    try:
        return trace_term(term)
    except Untraceable:
        if required:
            raise
        return None


#: Advice in errors about second derivatives, for calls that have a `backend=` argument.
BY_REFERENCE = "use backend='reference', or in a model hf_hyperattn.set_backend(model, 'reference')"


def refuse_second_derivative(owner: str, instead: str = BY_REFERENCE) -> NoReturn:
    """Raise the error for a second derivative that does not exist.

    Args:
        owner: Name of the function without it, such as "backend='cpu'".
        instead: Advice for the message. Default: use `reference`.
    """
    raise RuntimeError(
        f"{owner} has no second derivative, which create_graph=True asked for; {instead}"
    )


def refuse_in_operator(backward, owner: str, instead: str = BY_REFERENCE) -> None:
    """Register an error as the derivative of an operator that computes gradients.

    Args:
        backward: The operator.
        owner, instead: As in `refuse_second_derivative`.
    """
    backward.register_autograd(lambda ctx, *grads: refuse_second_derivative(owner, instead))


class _Once(torch.autograd.Function):
    """Return the first `count` tensors without a derivative.

    Differentiating them by the other tensors raises an error.
    """

    @staticmethod
    def forward(ctx, owner: str, instead: str, count: int, *tensors: Tensor):
        ctx.said = owner, instead
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        refuse_second_derivative(*ctx.said)


class _FirstOnly(torch.autograd.Function):
    """Return a tensor whose gradient has no derivative of its own."""

    @staticmethod
    def forward(ctx, owner: str, tensor: Tensor):
        ctx.owner = owner
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        # `grad` is an origin too: differentiating by it is a second derivative as well.
        refused = refusing_second_derivatives([grad], *ctx.saved_tensors, grad, owner=ctx.owner)
        return None, refused[0]


def with_first_derivative_only(owner: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Mark the inputs of a torch function that has no second derivative.

    Asking for the second derivative then raises our error, which names `owner`, instead of torch's.
    """
    return tuple(_FirstOnly.apply(owner, t) if t.requires_grad else t for t in tensors)


def refusing_second_derivatives(
    gradients: Sequence[Tensor | None],
    *origins: Tensor | None,
    owner: str,
    instead: str = BY_REFERENCE,
) -> list[Tensor | None]:
    """Return gradients that raise an error when they are differentiated again.

    torch's `once_differentiable` is silent in two cases: if the second derivative is also reachable
    another way, and if the output was only summed. Here both raise.

    Args:
        gradients: Gradients that a backward pass has computed without a graph.
        origins: The tensors that they depend on.
        owner, instead: As in `refuse_second_derivative`.
    """
    there = [g for g in gradients if g is not None]
    known = [t for t in origins if t is not None]
    # Without create_graph=True, grad mode is off here and no second derivative can follow.
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in known):
        return list(gradients)
    # The origins are only passed to connect the gradients to them in autograd's graph.
    refused = iter(_Once.apply(owner, instead, len(there), *there, *known))
    return [g if g is None else next(refused) for g in gradients]


def evaluate_node(node: Node, values: dict[Node, Tensor]) -> Tensor:
    """Return the value of a node.

    Args:
        node: Node of a graph.
        values: Values of the leaves. Every value that is computed on the way is added.
    """
    if node not in values:
        if node.op == "number":
            # A tensor, because torch.maximum and torch.logical_and take no Python numbers.
            like = next(iter(values.values()))
            values[node] = torch.full((), node.value, dtype=like.dtype, device=like.device)
        else:
            function = MEANING.get(node.op) or getattr(torch, node.op)
            values[node] = function(*(evaluate_node(a, values) for a in node.args))
    return values[node]


def evaluate_with_vjp(
    t: Traced,
    dot: Tensor,
    row: Sequence[Tensor],
    column: Sequence[Tensor],
    head: Sequence[Tensor],
    squared: Tensor | None = None,
    near: Tensor | None = None,
) -> tuple[Tensor, Callable]:
    """Evaluate a term's graph; arguments and results as in `Term.vjp`.

    Args:
        t: The graph.
        dot, row, column, head: As in `Term`.
        squared: Squared distances, for a term that reads them.
        near: Bool, the distances that were computed from differences. Default None: none of them.
    """

    def leaf(op: str, place: int = 0) -> Node:
        return t.graph.add_node(op, value=place)

    values = {leaf("dot"): dot}
    for op, numbers in (("row", row), ("column", column), ("head", head)):
        for place, number in enumerate(numbers):
            values[leaf(op, place)] = number
    if squared is not None:
        values[leaf("squared_distance")] = squared
    logits = evaluate_node(t.logit, values)
    # The caller may overwrite the logits in place, so the derivative must not read this tensor.
    del values[t.logit]

    def pull_back(grad: Tensor) -> tuple:
        # A copy: values that depend on this gradient must not remain for the next call.
        known = dict(values)
        known[t.graph.add_node("local", value=GRAD)] = grad
        # A scalar False broadcasts to all pairs: no distance came from differences.
        none_near = torch.zeros((), dtype=torch.bool, device=dot.device)
        known[t.graph.add_node("near", value=NEAR)] = none_near if near is None else near
        gradients, distance = t.by_grad

        def evaluate_gradients(op: str, count: int) -> list[Tensor | None]:
            nodes = [gradients.get(leaf(op, i)) for i in range(count)]
            return [None if node is None else evaluate_node(node, known) for node in nodes]

        d_squared: tuple[Tensor, ...] = ()
        if near is not None:
            d_squared = (torch.where(near, evaluate_node(distance, known), 0.0),)
        return (
            evaluate_gradients("dot", 1)[0],
            evaluate_gradients("row", len(row)),
            evaluate_gradients("column", len(column)),
            evaluate_gradients("head", len(head)),
            *d_squared,
        )

    # A term that ignores the product is smaller than a tile. The clone makes it writable for the
    # engine.
    if logits.shape != dot.shape:
        logits = logits.expand(dot.shape).clone()
    return logits, pull_back
