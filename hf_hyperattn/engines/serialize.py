"""How a score and its options pass through a custom operator, whose arguments are tensors, numbers and strings.

Every engine's operator takes the same arguments, which `call` writes and `read` reads:

    tensors    queries, keys, values, all statistics of rows, of columns and of heads, then those that `extras` names;
               queries and keys in float32 beside values in bfloat16 hold bfloat16 numbers (`upcast_for_grad`)
    score_key  the terms, see `PairScore.score_key`
    extras     names of tensors that not every call has, with a space between them
    width      how many numbers of each vector are multiplied
    scale      what products are multiplied with
    is_causal, window, offset, softcap, dropout_p   as in `Options`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .flops import count_flops
from .graph_torch import refuse_in_operator
from .options import Options
from .score import PairScore, Term, is_upcast, parse_score_key

_SETTINGS = (
    "str score_key, str extras, SymInt width, float scale, bool is_causal, SymInt? window, SymInt offset, "
    "float? softcap, float dropout_p"
)
#: The schemas of an engine's operator, and of that of its gradients, for `torch.library.custom_op`.
FORWARD = f"(Tensor[] tensors, {_SETTINGS}) -> (Tensor, Tensor)"
BACKWARD = f"(Tensor grad, Tensor out, Tensor lse, Tensor[] tensors, bool[] needs_grad, {_SETTINGS}) -> Tensor[]"

#: What kernels that take vectors as they are take them in, and the extras that they have gradients of.
RAW_DTYPES = (torch.float32, torch.bfloat16)
LEARNED = ("query_factor", "key_factor", "sinks")


def call(
    operator: Callable,
    score_key: str,
    raw: bool,
    score: PairScore,
    value: Tensor,
    options: Options,
    convert: Callable | None = None,
) -> tuple[Tensor, None]:
    """Call an engine's operator.

    Args:
        operator: returns the output and what its gradients need beside it.
        score_key: the score's.
        raw: whether it takes the vectors as they are, or the score's features.
        score, value, options: as in `reference.attend`.
        convert: gives queries, keys and values as they are the dtypes that the operator takes; None: one of RAW_DTYPES.
    """
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    if raw:
        query, key, scale, width = score.raw_query, score.raw_key, float(score.scale), score.width
        if convert is not None:
            query, key, value = convert(query, key, value)
        elif not (
            query.dtype == key.dtype == value.dtype and query.dtype in RAW_DTYPES
        ) and not upcast(query, key, value):
            query, key, value = query.float(), key.float(), value.float()
    else:
        (query, key), scale, width = score.features(), 1.0, None
        value = value.to(query.dtype)
    if not raw and score.points is not None:
        points = score.points()
        extras["points_query"], extras["points_key"] = points.query, points.key
    if options.dropout_p:
        extras["seed"] = torch.randint(
            2**31 if raw else 2**62, (1,), device=value.device if raw else None
        )
    lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    rows, columns, heads = lists
    for term in score.terms:
        row, column, head, factors = (
            (term.row, term.column, term.head, None)
            if term.statistics is None
            else term.statistics()
        )
        rows += row
        columns += column
        heads += head
        if raw and factors is not None:
            extras["query_factor"], extras["key_factor"] = factors
        if term.gate is not None:
            heads.append(term.gate)
    if raw and score.make_features is not None and "query_factor" not in extras:
        (query, key), scale, width = score.features(), 1.0, None
        value = value.to(query.dtype)
    for name in [*extras]:
        if extras[name] is None:
            del extras[name]
    out, _ = operator(
        [query, key, value, *rows, *columns, *heads, *extras.values()],
        score_key,
        " ".join(extras),
        query.shape[-1] if width is None else width,
        scale,
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
        options.dropout_p,
    )
    return out, None


def upcast(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether values are in bfloat16 beside queries and keys that hold such numbers in float32, which is how their
    gradients are wanted (`upcast_for_grad`): kernels take all three in bfloat16.
    """
    return value.dtype == torch.bfloat16 and is_upcast(query) and is_upcast(key)


@dataclass
class OperatorCall:
    """An operator's arguments by their names."""

    query: Tensor
    key: Tensor
    value: Tensor
    row: list[Tensor]
    column: list[Tensor]
    head: list[Tensor]
    extras: dict[str, Tensor]
    terms: tuple[
        tuple[Term, bool, bool], ...
    ]  # each with whether it has a gate, and whether softcap acts on it
    score_key: str
    width: int
    scale: float
    options: Options  # its tensors are in `extras`


def read(
    tensors: Sequence[Tensor], score_key: str, extras: str, width: int, scale: float, *options
) -> OperatorCall:
    """The arguments by name; also of a list of gradients in the order of the tensors."""
    terms, counts = parse_score_key(score_key), [3, 0, 0, 0]
    for term, gated, _ in terms:
        counts[1] += term.rows
        counts[2] += term.columns
        counts[3] += term.heads + gated
    parts, start = [], 0
    for count in counts:
        parts.append(list(tensors[start : start + count]))
        start += count
    (query, key, value), row, column, head = parts
    is_causal, window, offset, softcap, dropout_p = options
    named = dict(zip(extras.split(), tensors[start:], strict=True))
    kept = Options(None, None, is_causal, window, offset, softcap, None, dropout_p)
    return OperatorCall(
        query, key, value, row, column, head, named, terms, score_key, width, scale, kept
    )


def shapes(
    tensors: Sequence[Tensor], extras: str, learned: Callable[[str], bool]
) -> list[tuple[int, ...]]:
    """Shapes of the gradients of an operator's tensors: their own, but empty for an extra that has none."""
    names = extras.split()
    main = len(tensors) - len(names)
    full = [tuple(t.shape) for t in tensors]
    return full[:main] + [
        s if learned(n) else (0,) for n, s in zip(names, full[main:], strict=True)
    ]


def fake_output(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """For the compiler, what kernels return: the output [B, H, N, dv] and two numbers a row, in float32."""
    query, _, value = tensors[:3]
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    return out, out.new_empty(2, *query.shape[:3])


def fake_gradients(
    grad, out, lse, tensors: Sequence[Tensor], needs_grad, score_key, extras: str, *settings
) -> list[Tensor]:
    """For the compiler, the gradients that kernels return."""
    sizes = shapes(tensors, extras, LEARNED.__contains__)
    return [t.new_empty(size) for t, size in zip(tensors, sizes, strict=True)]


def differentiable(forward, backward, name: str, pairwise: bool = True) -> None:
    """Give an operator its gradient, and let FLOP counters know both.

    Args:
        forward: the operator, which returns an output and what its gradients need beside it.
        backward: the operator of its gradients, called with the output's gradient, what `forward` returned, its
            tensors, which of them want a gradient, and its further arguments.
        name: the engine, for the error of a second derivative.
        pairwise: whether it does the products of pairwise attention, whose FLOPs are counted.
    """

    def save(ctx, inputs, output):
        tensors, *ctx.rest = inputs
        ctx.save_for_backward(*output, *tensors)

    def pullback(ctx, grad, _):
        out, lse, *tensors = ctx.saved_tensors
        needs_grad = list(ctx.needs_input_grad[0])
        gradients = backward(grad.contiguous(), out, lse, tensors, needs_grad, *ctx.rest)
        grads = [
            g.to(t.dtype) if n else None
            for g, t, n in zip(gradients, tensors, needs_grad, strict=True)
        ]
        return grads, *[None] * len(ctx.rest)

    forward.register_autograd(pullback, setup_context=save)
    refuse_in_operator(backward, f"backend={name!r}")
    if pairwise:
        count_flops(forward)
        count_flops(backward, at=3, backward=True)


@contextmanager
def autograd_inside_operator():
    """Autograd, which torch excludes from the dispatch of what runs inside an operator."""
    keys, included = torch._C.DispatchKey, torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutogradCPU"):
        excluded = excluded.remove(getattr(keys, name)) if hasattr(keys, name) else excluded
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
