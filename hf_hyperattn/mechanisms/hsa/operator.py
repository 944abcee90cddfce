"""Wrap HSA calls as one custom operator with its gradient.

`torch.compile` and export need it. This module shows how masks and trees are hidden from the
compiler, and how a call becomes tensors, integers and text.

A mask decides which tree is used, and a tree decides the shapes of all steps, so the compiler can
trace neither. Inside the operator, the call runs as it does without a compiler. The backward pass
computes the call again with autograd; over windows the kernel has a backward pass of its own. The
arguments of an operator are tensors, numbers and text. Every tensor except query, key and value
therefore has a name. A hierarchy is passed as sizes and spans of windows, or as parents, kinds and
tokens of trees.
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
from ...utils.torch_private import find_packet

# Separators of the names of tensors, and of the kinds of families in one name. No name contains
# these characters.
BREAK, NEXT = "\x1f", "\x1e"

#: Names of tensors that make a hierarchy, before the first space of a name.
HIERARCHY_NAMES = ("starts", "stops", "parents", "kinds", "tokens")

#: Name of a tensor of group ids.
IDS = "ids"

Named = list[tuple[str, Tensor]]


class Function(NamedTuple):
    """Hold a function that the operator can compute.

    Args:
        compute: Takes (query, key and value; named tensors; sizes; numbers; scale). Returns the
            output and a second tensor.
        shape: Takes (query, key, numbers). Returns the shape of the second tensor.
        pairs: Returns the number of logits of all heads of a row, for FLOP counters. Takes the
            shapes of query and key, the shapes of the named tensors by name, sizes and numbers.
        backward: Takes the gradient of the output, both results, and the arguments of `compute`.
            Returns the gradients of all tensors, or None for a tensor without. If it is None or
            returns None, autograd computes the function again.
    """

    compute: Callable
    shape: Callable
    pairs: Callable
    backward: Callable | None = None


#: The functions by name. The modules that define them add them here.
FUNCTIONS: dict[str, Function] = {}


def call_function(
    name: str,
    tensors: list[Tensor],
    named: Named,
    sizes: Sequence[int] | None,
    numbers: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute a registered function.

    Gradients reach all floating tensors except the mask.

    Args:
        name: Name of the function.
        tensors: Query, key and value.
        named: The other tensors.
        sizes: Window sizes, bottom first; None: the hierarchy is in the named tensors.
        numbers: Integers or booleans that the function reads.
        scale: Factor of the products of queries and keys.

    Returns:
        The output [B, H, N, dv], and the second tensor of the function.

    Raises:
        ValueError: The call is exported to ONNX, which has no such operator.
    """
    numbers = [int(n) if isinstance(n, bool) else n for n in numbers]
    if torch.onnx.is_in_onnx_export():
        raise ValueError(
            "hsa is exported to ONNX over windows alone; allowed: no hierarchy=, the same tokens as queries and keys "
            "(use_cache=False), a bool mask or none, and with tying='key' in an encoder refine_top_k=0"
        )
    names = BREAK.join([name, *(key for key, _ in named)])
    return hsa([*tensors, *(t for _, t in named)], names, sizes, numbers, scale)


def flatten_hierarchy(
    hierarchy: Hierarchy | Tensor | tuple[int, ...],
) -> tuple[int, list[int] | None, Named]:
    """Return the length, the window sizes or None, and the named tensors of a hierarchy.

    `unflatten_hierarchy` makes the hierarchy again. Group ids and sizes without a length have
    length -1.
    """
    if isinstance(hierarchy, Tensor):
        return -1, None, [(IDS, hierarchy)]
    if isinstance(hierarchy, tuple):
        return -1, list(hierarchy), []
    length = hierarchy.length
    if hierarchy.sizes is not None:
        spans = ("starts", hierarchy.starts), ("stops", hierarchy.stops)
        return length, list(hierarchy.sizes), [(name, t) for name, t in spans if t is not None]
    named = []
    for tree, tokens in zip(hierarchy.trees, hierarchy.tokens):
        named += [
            # Names of kinds are text, so they travel in the name of a tensor.
            ("parents " + NEXT.join(tree.kind_names), tree.parents),
            ("kinds", tree.kinds),
            ("tokens", tokens),
        ]
    return length, None, named


def unflatten_hierarchy(
    named: Named, sizes: Sequence[int] | None, length: int
) -> Hierarchy | Tensor | tuple[int, ...]:
    """Return the hierarchy that `flatten_hierarchy` flattened.

    The same content gives the same object, so that its layout is made once.

    Args:
        named: Named tensors; those of other purposes are ignored.
        sizes: Window sizes or None.
        length: Number of tokens of a row, or -1.
    """
    windows = None if sizes is None else tuple(sizes)
    if length < 0:
        return dict(named)[IDS] if windows is None else windows
    parts = [(name, t) for name, t in named if name.split(" ")[0] in HIERARCHY_NAMES]
    content = tuple((name, t.cpu().numpy().tobytes()) for name, t in parts)
    return _make_hierarchy(content, windows, length)


@lru_cache(maxsize=16)
def _make_hierarchy(
    content: tuple[tuple[str, bytes], ...], sizes: tuple[int, ...] | None, length: int
) -> Hierarchy:
    """Return a hierarchy from the bytes of its tensors.

    Bytes can be a key of the cache; tensors cannot.
    """
    parts = [torch.frombuffer(bytearray(data), dtype=torch.long) for _, data in content]
    if sizes is not None:
        spans = dict(zip((name for name, _ in content), parts))
        return Hierarchy(length, sizes=sizes, starts=spans.get("starts"), stops=spans.get("stops"))
    # Each tree has three tensors: parents, kinds, tokens.
    kind_names = (tuple(name.partition(" ")[2].split(NEXT)) for name, _ in content[::3])
    trees = tuple(map(Tree, parts[::3], parts[1::3], kind_names))
    return Hierarchy(length, trees, tuple(parts[2::3]))


def _unflatten_call(
    tensors: Sequence[Tensor], names: str
) -> tuple[Function, Sequence[Tensor], Named]:
    """Return the function, the features and the named tensors of a call."""
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
    """Run the operator.

    It returns the output [B, H, N, dv] and the second tensor of the function.

    Args:
        tensors: Query, key, value, and the named tensors.
        names: Name of the function and of the named tensors, joined by `BREAK`.
        sizes, numbers, scale: As in `call_function`.
    """
    function, *arguments = _unflatten_call(tensors, names)
    out, second = function.compute(*arguments, sizes, numbers, scale)
    # The fake implementation below promises contiguous results.
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
    """Return the gradients of all tensors, zeros for tensors that have none.

    Args:
        grads: Gradients of the results.
        results: Results of `hsa`.
        tensors, names, sizes, numbers, scale: As in `hsa`.
    """
    function, features, named = _unflatten_call(tensors, names)
    # A backward pass may run under autocast, which must not lower the precision here.
    with full_precision(grads[0].device):
        gradients = None
        if function.backward is not None:
            gradients = function.backward(
                grads[0], *results, features, named, sizes, numbers, scale
            )
        if gradients is None:
            gradients = _gradients_by_autograd(
                function, grads, tensors, names, sizes, numbers, scale
            )
    # An operator cannot return None in a list of tensors.
    return [
        torch.zeros_like(t, memory_format=torch.contiguous_format)
        if g is None
        else g.to(t.dtype).contiguous()
        for t, g in zip(tensors, gradients, strict=True)
    ]


def _gradients_by_autograd(
    function: Function, grads, tensors: Sequence[Tensor], names: str, *rest
) -> list[Tensor | None]:
    """Return the gradients of all tensors by running the function again.

    Tensors that need no gradient have None.
    """
    # A mask needs no gradient: learned masks are refused before (`request.call_operator`).
    keys = [*["feature"] * 3, *names.split(BREAK)[1:]]
    learned = [
        t.is_floating_point() and key != "mask" for t, key in zip(tensors, keys, strict=True)
    ]
    with autograd_inside_operator():
        inputs = [t.detach().requires_grad_(learns) for t, learns in zip(tensors, learned)]
        results = function.compute(*_unflatten_call(inputs, names)[1:], *rest)
        # Results such as detached weights have no gradient.
        results, grads = zip(*((t, g) for t, g in zip(results, grads) if t.requires_grad))
        leaves = [t for t, learns in zip(inputs, learned) if learns]
        of_leaves = iter(torch.autograd.grad(results, leaves, grads, allow_unused=True))
    return [next(of_leaves) if learns else None for learns in learned]


@compute_hsa_gradients.register_fake
def _(grads, results, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _save_call(ctx, inputs, output):
    """Keep results and arguments for the backward pass."""
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, *tensors)


def _pull_back_gradients(ctx, *grads):
    """Return the gradients of the arguments of `hsa`."""
    out, second, *tensors = ctx.saved_tensors
    grads = compute_hsa_gradients(
        [g.contiguous() for g in grads], [out, second], tensors, *ctx.rest
    )
    _, sizes, *_ = ctx.rest
    # torch takes an empty list of sizes for an empty list of tensors, whose gradient must be a
    # list.
    none = [] if sizes is not None and not len(sizes) else None
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
    """Return the FLOPs of all products.

    Each logit needs two products forward and five backward.
    """
    function, (query, key, value), named = _unflatten_call(shapes, names)
    width, value_width = query[3], value[3]
    each = 3 * width + 2 * value_width if backward else width + value_width
    # A product of matrices [n, d] and [d, m] has 2·n·m·d FLOPs.
    return int(2 * query[0] * function.pairs(query, key, dict(named), sizes, numbers) * each)


@register_flop_formula(find_packet(hsa))
def _(tensors, names, sizes, numbers, *_, **__) -> int:
    return _count_flops(tensors, names, sizes, numbers, False)


@register_flop_formula(find_packet(compute_hsa_gradients))
def _(grads, results, tensors, names, sizes, numbers, *_, **__) -> int:
    return _count_flops(tensors, names, sizes, numbers, True)
