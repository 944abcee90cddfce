"""Pass a score and its options through a custom operator.

Arguments of an operator can only be tensors, numbers and strings. The operators of all engines take
the same arguments. `call_operator` writes them and `read_arguments` reads them:

- `tensors`: queries, keys, values, then the statistics of rows and columns, the parameters of
  heads, and the tensors named by `extras`. Float32 queries and keys with bfloat16 values hold
  bfloat16 numbers (`upcast_for_grad`).
- `score_key`: the terms, see `PairScore.score_key`.
- `extras`: names of tensors that only some calls have, separated by spaces.
- `width`: how many numbers of each vector are multiplied.
- `scale`: factor of all products.
- `is_causal`, `window`, `offset`, `softcap`, `dropout_p`: as in `Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.torch_private import DispatchKey, force_keys, read_excluded_keys, read_included_keys
from .flops import count_flops
from .graph_torch import refuse_in_operator
from .options import Options
from .score import Numbers, PairScore, Term, is_upcast, parse_score_key

#: Arguments after the tensors. SymInt, because exported programs keep lengths and widths symbolic.
_SETTINGS = (
    "str score_key, str extras, SymInt width, float scale, bool is_causal, SymInt? window, SymInt offset, "
    "float? softcap, float dropout_p"
)
#: Schemas of an engine's operator and of the operator of its gradients, for
#: `torch.library.custom_op`.
FORWARD = f"(Tensor[] tensors, {_SETTINGS}) -> (Tensor, Tensor)"
BACKWARD = f"(Tensor grad, Tensor out, Tensor lse, Tensor[] tensors, bool[] needs_grad, {_SETTINGS}) -> Tensor[]"

#: Dtypes of vectors for kernels that take the caller's vectors.
RAW_DTYPES = (torch.float32, torch.bfloat16)
#: Extras that get gradients from such kernels.
LEARNED = ("query_factor", "key_factor", "sinks")


def call_operator(
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
        operator: Returns the output and a tensor that its gradients need.
        score_key: `score.score_key`.
        raw: Pass the caller's vectors if possible, instead of the score's features.
        score, value, options: As in `reference.attend`.
        convert: Function from the caller's (query, key, value) to dtypes that the operator takes.
            Default: one of RAW_DTYPES for all three.

    Returns:
        The output [B, H, N, dv], and None for the weights.
    """
    rows, columns, heads, factors = collect_numbers(score)
    # A kernel can make features only if they are the vectors times one factor each.
    if raw and (score.make_features is None or factors is not None):
        query, key = score.raw_query, score.raw_key
        query, key, value = (convert or convert_to_raw)(query, key, value)
        scale, width = float(score.scale), score.width
    else:
        query, key = score.features()
        value = value.to(query.dtype)
        scale, width = 1.0, None
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    if not raw and score.points is not None:
        points = score.points()
        extras["points_query"], extras["points_key"] = points.query, points.key
    if options.dropout_p:
        # A tensor, so that a compiled program draws a new seed in each run.
        # Kernels take a 32-bit seed, on the device of the values. Blocks read it in Python, so it stays
        # on the CPU.
        largest = 2**31 if raw else 2**62
        extras["seed"] = torch.randint(largest, (1,), device=value.device if raw else None)
    if raw and factors is not None:
        extras["query_factor"], extras["key_factor"] = factors
    # A list of tensors cannot contain None, so absent ones are left out of the list and of the
    # names.
    given = {name: tensor for name, tensor in extras.items() if tensor is not None}
    out, _ = operator(
        [query, key, value, *rows, *columns, *heads, *given.values()],
        score_key,
        " ".join(given),
        query.shape[-1] if width is None else width,
        scale,
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
        options.dropout_p,
    )
    return out, None


def collect_numbers(
    score: PairScore,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], tuple[Tensor, Tensor] | None]:
    """Return the numbers of all terms, and the factors if a term has some.

    Returns:
        Row statistics, column statistics, head parameters, and factors or None. A term's gate
        stands behind its head parameters.
    """
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    heads: list[Tensor] = []
    factors = None
    for term in score.terms:
        # As `term.numbers()` does, but without another call for every term of every prefill.
        if term.statistics is None:
            numbers = Numbers(term.row, term.column, term.head)
        else:
            numbers = term.statistics()
        rows += numbers.row
        columns += numbers.column
        heads += numbers.head
        if numbers.factors is not None:
            factors = numbers.factors
        if term.gate is not None:
            heads.append(term.gate)
    return rows, columns, heads, factors


def convert_to_raw(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in one dtype of RAW_DTYPES.

    Upcast queries and keys stay as they are.
    """
    if query.dtype == key.dtype == value.dtype and query.dtype in RAW_DTYPES:
        return query, key, value
    if is_upcast_call(query, key, value):
        return query, key, value
    return query.float(), key.float(), value.float()


def is_upcast_call(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether queries and keys are upcast, and values are bfloat16.

    Kernels take all three in bfloat16, and return the gradients of queries and keys in float32.
    """
    return value.dtype == torch.bfloat16 and is_upcast(query) and is_upcast(key)


@dataclass
class OperatorCall:
    """Arguments of an operator by name.

    Args:
        query, key, value: As in `call_operator`.
        row, column, head: Numbers of all terms, see `collect_numbers`.
        extras: Tensors that only some calls have, by name.
        terms: Terms of the score, each with whether it has a gate and whether it is capped.
        score_key, width, scale: As in `call_operator`.
        options: Options without tensors; those are in `extras`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    row: list[Tensor]
    column: list[Tensor]
    head: list[Tensor]
    extras: dict[str, Tensor]
    terms: tuple[tuple[Term, bool, bool], ...]
    score_key: str
    width: int
    scale: float
    options: Options


def read_arguments(
    tensors: Sequence[Tensor], score_key: str, extras: str, width: int, scale: float, *options
) -> OperatorCall:
    """Return the arguments of an operator by name.

    Args:
        tensors: The tensors, or a list of gradients or flags in the same order.
        score_key, extras, width, scale, options: Further arguments in the order of the schema.
    """
    terms = parse_score_key(score_key)
    # The terms alone tell how many tensors of each kind there are.
    rows_at = 3
    columns_at = rows_at + sum(term.rows for term, _, _ in terms)
    heads_at = columns_at + sum(term.columns for term, _, _ in terms)
    extras_at = heads_at + sum(term.heads + gated for term, gated, _ in terms)
    query, key, value = tensors[:rows_at]
    is_causal, window, offset, softcap, dropout_p = options
    return OperatorCall(
        query=query,
        key=key,
        value=value,
        row=list(tensors[rows_at:columns_at]),
        column=list(tensors[columns_at:heads_at]),
        head=list(tensors[heads_at:extras_at]),
        extras=dict(zip(extras.split(), tensors[extras_at:], strict=True)),
        terms=terms,
        score_key=score_key,
        width=width,
        scale=scale,
        options=Options(
            is_causal=is_causal,
            window=window,
            offset=offset,
            softcap=softcap,
            dropout_p=dropout_p,
        ),
    )


def shape_gradients(
    tensors: Sequence[Tensor], extras: str, learned: Callable[[str], bool]
) -> list[tuple[int, ...]]:
    """Return the shapes of the gradients of an operator's tensors.

    Args:
        tensors: The tensors.
        extras: Names of the last ones.
        learned: Function from the name of an extra to whether it has a gradient. If not, the shape
            is (0,).
    """
    names = extras.split()
    main = len(tensors) - len(names)
    # An operator returns a tensor for every input. An empty one means "no gradient".
    full = [tuple(t.shape) for t in tensors]
    return full[:main] + [
        shape if learned(name) else (0,) for name, shape in zip(names, full[main:], strict=True)
    ]


def fake_output(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """Return what kernels return, without computing it, for the compiler.

    Returns:
        The output [B, H, N, dv] and two numbers per row [2, B, H, N], in float32.
    """
    query, _, value = tensors[:3]
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    return out, out.new_empty(2, *query.shape[:3])


def fake_gradients(
    grad, out, lse, tensors: Sequence[Tensor], needs_grad, score_key, extras: str, *settings
) -> list[Tensor]:
    """Return what kernels return as gradients, without computing them.

    The compiler uses it.
    """
    sizes = shape_gradients(tensors, extras, LEARNED.__contains__)
    return [t.new_empty(size) for t, size in zip(tensors, sizes, strict=True)]


def register_gradients(forward, backward, name: str, pairwise: bool = True) -> None:
    """Register the gradient of an operator, and the FLOPs of both with FLOP counters.

    Args:
        forward: The operator. It returns an output, and a tensor that its gradients need.
        backward: The operator of its gradients. Its arguments are the output's gradient, the
            results of `forward`, the tensors, which of them need a gradient, and the further
            arguments.
        name: Name of the engine, for the error of a second derivative.
        pairwise: Whether it computes the products of pairwise attention, whose FLOPs are counted.
            Default: yes.
    """

    def save_tensors(ctx, inputs, output):
        tensors, *ctx.rest = inputs
        ctx.save_for_backward(*output, *tensors)

    def pull_back(ctx, grad, _):
        out, lse, *tensors = ctx.saved_tensors
        needs_grad = list(ctx.needs_input_grad[0])
        # Kernels read the gradient as a dense array, but autograd may pass an expanded one.
        gradients = backward(grad.contiguous(), out, lse, tensors, needs_grad, *ctx.rest)
        # Autograd requires the dtype of the input, and engines may compute in float32.
        grads = [
            gradient.to(tensor.dtype) if needed else None
            for gradient, tensor, needed in zip(gradients, tensors, needs_grad, strict=True)
        ]
        return grads, *[None] * len(ctx.rest)

    forward.register_autograd(pull_back, setup_context=save_tensors)
    # torch's own error would name the operator, but not the `backend=` that has a second
    # derivative.
    refuse_in_operator(backward, f"backend={name!r}")
    if pairwise:
        count_flops(forward)
        # The tensors follow grad, out and lse.
        count_flops(backward, at=3, backward=True)


@contextmanager
def autograd_inside_operator():
    """Turn autograd on inside an operator, where torch excludes it from dispatch."""
    excluded = read_excluded_keys()
    # The names of these keys differ between versions of torch.
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutogradCPU"):
        if hasattr(DispatchKey, name):
            excluded = excluded.remove(getattr(DispatchKey, name))
    with force_keys(read_included_keys(), excluded), torch.enable_grad():
        yield
