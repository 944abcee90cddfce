"""HSA as one operator with its gradient, for the compiler and for export.

What a mask hides decides which tree is used, and a tree decides the shapes of all steps: the compiler can look into
neither. So such a call is computed inside an operator as it is without a compiler. Its gradient computes it again, but
over windows, which have a kernel for it.
An operator's arguments are tensors, numbers and text, so a call comes apart: every tensor beside query, key and value
has a name, and a hierarchy is windows' sizes and spans, or parents, kinds and tokens of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...engines import working_dtype
from ...engines.graph_torch import refuse_in_operator
from ...engines.options import full_precision
from ...engines.serialize import autograd_inside_operator
from ...hierarchy import Hierarchy, Tree
from ...readable import can_read

#: Between two names of tensors, and between the kinds of families in one name.
BREAK, NEXT = "\x1f", "\x1e"

Named = list[tuple[str, Tensor]]


class Function(NamedTuple):
    """What the operator can compute.

    Args:
        compute: from (query, key and value; named tensors; sizes; numbers; scale) to the output and a second tensor.
        shape: of the second, from (query, key, numbers).
        pairs: how many logits all heads of a row compute, for FLOP counters: from the shapes of the query, of the key
            and, by name, of the named tensors, sizes and numbers.
        backward: gradients of all tensors, or None for one, from (gradient of the output, both results, and the
            arguments of `compute`). Where it is or gives None, autograd computes the function again.
    """

    compute: Callable
    shape: Callable
    pairs: Callable
    backward: Callable | None = None


FUNCTIONS: dict[str, Function] = {}


def register_function(
    name: str, shape: Callable, pairs: Callable, backward: Callable | None = None
):
    """Decorator: a function that the operator can compute; arguments as in `Function`."""

    def add_function(compute):
        FUNCTIONS[name] = Function(compute, shape, pairs, backward)
        return compute

    return add_function


def call_function(
    name: str,
    tensors: list[Tensor],
    named: Named,
    sizes: Sequence[int] | None,
    numbers: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What the function of this name computes; gradients reach all floating tensors but the mask."""
    numbers = [int(n) if isinstance(n, bool) else n for n in numbers]
    if (
        can_read(*tensors)
        and not torch.is_grad_enabled()
        and not torch._C._len_torch_dispatch_stack()
    ):
        # such as decoding, of which dispatch is a good part; modes, such as FLOP counters, see the operator
        return FUNCTIONS[name].compute(tensors, named, sizes, numbers, scale)
    if torch.onnx.is_in_onnx_export():
        raise ValueError(
            "hsa is exported to ONNX over windows alone; allowed: no hierarchy=, the same tokens as queries and keys "
            "(use_cache=False), a bool mask or none, and with tying='key' in an encoder refine_top_k=0"
        )
    names = BREAK.join([name, *(key for key, _ in named)])
    return hsa([*tensors, *(t for _, t in named)], names, sizes, numbers, scale)


def flatten_hierarchy(hierarchy: Hierarchy) -> tuple[list[int] | None, Named]:
    """Sizes of windows, and named tensors: what `unflatten_hierarchy` makes the hierarchy of."""
    if hierarchy.sizes is not None:
        spans = ("starts", hierarchy.starts), ("stops", hierarchy.stops)
        return list(hierarchy.sizes), [(name, t) for name, t in spans if t is not None]
    named = []
    for tree, tokens in zip(hierarchy.trees, hierarchy.tokens):
        named += [
            ("parents " + NEXT.join(tree.kind_names), tree.parents),
            ("kinds", tree.kinds),
            ("tokens", tokens),
        ]
    return None, named


def unflatten_hierarchy(named: Named, sizes: Sequence[int] | None, length: int) -> Hierarchy:
    """The hierarchy again; the same object for the same content, so that its layout is made once."""
    parts = [
        (k, t)
        for k, t in named
        if k.split(" ")[0] in ("starts", "stops", "parents", "kinds", "tokens")
    ]
    content = tuple((key, t.cpu().numpy().tobytes()) for key, t in parts)
    return _hierarchy_of(content, None if sizes is None else tuple(sizes), length)


@lru_cache(maxsize=16)
def _hierarchy_of(
    content: tuple[tuple[str, bytes], ...], sizes: tuple[int, ...] | None, length: int
) -> Hierarchy:
    parts = [torch.frombuffer(bytearray(data), dtype=torch.long) for _, data in content]
    if sizes is not None:
        spans = dict(zip((name for name, _ in content), parts))
        return Hierarchy(length, sizes=sizes, starts=spans.get("starts"), stops=spans.get("stops"))
    kinds = (tuple(name.partition(" ")[2].split(NEXT)) for name, _ in content[::3])
    return Hierarchy(length, tuple(map(Tree, parts[::3], parts[1::3], kinds)), tuple(parts[2::3]))


def _unflatten_call(
    tensors: Sequence[Tensor], names: str
) -> tuple[Function, Sequence[Tensor], Named]:
    function, *keys = names.split(BREAK)
    return FUNCTIONS[function], tensors[:3], list(zip(keys, tensors[3:], strict=True))


@torch.library.custom_op("hf_hyperattn::hsa", mutates_args=())
def hsa(
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int] | None,
    numbers: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The operator: output [B, H, N, dv], and what else the function that `names` begins with computes."""
    function, *arguments = _unflatten_call(tensors, names)
    out, second = function.compute(*arguments, sizes, numbers, scale)
    return out.contiguous(), second.contiguous()


@hsa.register_fake
def _(tensors, names, sizes, numbers, scale):
    function, (query, key, value), _ = _unflatten_call(tensors, names)
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=working_dtype(query))
    return out, out.new_empty(function.shape(query, key, numbers))


@torch.library.custom_op("hf_hyperattn::hsa_backward", mutates_args=())
def compute_hsa_gradients(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int] | None,
    numbers: Sequence[int],
    scale: float,
) -> list[Tensor]:
    """Gradients of all tensors that have some, zeros for the others."""
    function, features, named = _unflatten_call(tensors, names)
    with full_precision(grads[0].device):  # backward may be called under autocast
        gradients = None
        if function.backward is not None:
            gradients = function.backward(
                grads[0], *results, features, named, sizes, numbers, scale
            )
        if gradients is None:
            gradients = _by_autograd(function, grads, tensors, names, sizes, numbers, scale)
    return [
        torch.zeros_like(t, memory_format=torch.contiguous_format)
        if g is None
        else g.to(t.dtype).contiguous()
        for t, g in zip(tensors, gradients, strict=True)
    ]


def _by_autograd(
    function: Function, grads, tensors: Sequence[Tensor], names: str, *rest
) -> list[Tensor | None]:
    keys = [*["feature"] * 3, *names.split(BREAK)[1:]]
    learned = [
        t.is_floating_point() and key != "mask" for t, key in zip(tensors, keys, strict=True)
    ]
    with autograd_inside_operator():
        inputs = [t.detach().requires_grad_(learns) for t, learns in zip(tensors, learned)]
        results = function.compute(*_unflatten_call(inputs, names)[1:], *rest)
        results, grads = zip(*((t, g) for t, g in zip(results, grads) if t.requires_grad))
        leaves = [t for t, learns in zip(inputs, learned) if learns]
        of_leaves = iter(torch.autograd.grad(results, leaves, grads, allow_unused=True))
    return [next(of_leaves) if learns else None for learns in learned]


@compute_hsa_gradients.register_fake
def _(grads, results, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _save_call(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, *tensors)


def _pull_back_gradients(ctx, *grads):
    out, second, *tensors = ctx.saved_tensors
    grads = compute_hsa_gradients(
        [g.contiguous() for g in grads], [out, second], tensors, *ctx.rest
    )
    _, sizes, *_ = ctx.rest
    none = (
        [] if sizes is not None and not len(sizes) else None
    )  # an empty list counts as one of tensors
    return grads, None, none, None, None


hsa.register_autograd(_pull_back_gradients, setup_context=_save_call)
refuse_in_operator(
    compute_hsa_gradients, "hsa by its compiled kernel", "with tying='key' use backend='torch'"
)


def _count_flops(
    shapes: Sequence,
    names: str,
    sizes: Sequence[int] | None,
    numbers: Sequence[int],
    backward: bool,
) -> int:
    """Of the products: two a logit, in the gradients five."""
    function, (query, key, value), named = _unflatten_call(shapes, names)
    width, value_width = query[3], value[3]
    each = 3 * width + 2 * value_width if backward else width + value_width
    return int(2 * query[0] * function.pairs(query, key, dict(named), sizes, numbers) * each)


@register_flop_formula(hsa._opoverload._overloadpacket)
def _(tensors, names, sizes, numbers, *_, **__) -> int:
    return _count_flops(tensors, names, sizes, numbers, False)


@register_flop_formula(compute_hsa_gradients._opoverload._overloadpacket)
def _(grads, results, tensors, names, sizes, numbers, *_, **__) -> int:
    return _count_flops(tensors, names, sizes, numbers, True)
