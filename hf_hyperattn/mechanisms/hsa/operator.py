"""HSA as one operator with its gradient, for the compiler and for export.

What a mask hides decides which tree is used, and a tree decides the shapes of all steps: the compiler can look into
neither. So such a call is computed inside an operator as it is without a compiler, and its gradient computes it again.
An operator's arguments are tensors, numbers and text, so a call comes apart: every tensor beside query, key and value
has a name, and a hierarchy is windows' sizes and spans, or parents, kinds and tokens of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from ...engines.options import full_precision
from ...hierarchy import Hierarchy, Tree

#: Between two names of tensors, and between the kinds of families in one name.
BREAK, NEXT = "\x1f", "\x1e"

Named = list[tuple[str, Tensor]]

#: What the operator can compute: a function of (query, key and value; named tensors; sizes; numbers; scale) to two
#: tensors, and one of (query, key, numbers) to the shape of the second.
COMPUTED: dict[str, tuple[Callable, Callable]] = {}


def computes(name: str, shape: Callable):
    """Decorator: a function that the operator can compute; `shape` of its second result."""

    def register(function):
        COMPUTED[name] = function, shape
        return function

    return register


def call(
    name: str,
    tensors: list[Tensor],
    named: Named,
    sizes: Sequence[int] | None,
    numbers: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What the function of this name computes; gradients reach all floating tensors but the mask."""
    names = BREAK.join([name, *(key for key, _ in named)])
    numbers = [int(n) if isinstance(n, bool) else n for n in numbers]
    return hsa([*tensors, *(t for _, t in named)], names, sizes, numbers, scale)


def flatten(hierarchy: Hierarchy) -> tuple[list[int] | None, Named]:
    """Sizes of windows, and named tensors: what `unflatten` makes the hierarchy of."""
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


def unflatten(named: Named, sizes: Sequence[int] | None, length: int) -> Hierarchy:
    """The hierarchy again; the same object for the same content, so that its layout is made once."""
    parts = [(k, t) for k, t in named if k.split(" ")[0] in ("starts", "stops", "parents", "kinds", "tokens")]
    content = tuple((key, t.cpu().numpy().tobytes()) for key, t in parts)
    return _unflatten(content, None if sizes is None else tuple(sizes), length)


@lru_cache(maxsize=16)
def _unflatten(
    content: tuple[tuple[str, bytes], ...], sizes: tuple[int, ...] | None, length: int
) -> Hierarchy:
    parts = [torch.frombuffer(bytearray(data), dtype=torch.long) for _, data in content]
    if sizes is not None:
        return Hierarchy(length, sizes=sizes, **dict(zip((name for name, _ in content), parts)))
    kinds = (tuple(name.partition(" ")[2].split(NEXT)) for name, _ in content[::3])
    return Hierarchy(length, tuple(map(Tree, parts[::3], parts[1::3], kinds)), tuple(parts[2::3]))


def _compute(tensors: Sequence[Tensor], names: str, *rest) -> tuple[Tensor, Tensor]:
    function, *keys = names.split(BREAK)
    return COMPUTED[function][0](tensors[:3], list(zip(keys, tensors[3:], strict=True)), *rest)


@torch.library.custom_op("hf_hyperattn::hsa", mutates_args=())
def hsa(
    tensors: Sequence[Tensor], names: str, sizes: Sequence[int] | None, numbers: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """The operator: output [B, H, N, dv], and what else the function that `names` begins with computes."""
    out, second = _compute(tensors, names, sizes, numbers, scale)
    return out.contiguous(), second.clone(memory_format=torch.contiguous_format)


@hsa.register_fake
def _(tensors, names, sizes, numbers, scale):
    query, key, value = tensors[:3]
    shape = COMPUTED[names.split(BREAK)[0]][1](query, key, numbers)
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(shape)


@torch.library.custom_op("hf_hyperattn::hsa_backward", mutates_args=())
def backward(
    grad: Tensor,
    grad_second: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int] | None,
    numbers: Sequence[int],
    scale: float,
) -> list[Tensor]:
    """Gradients of all tensors that have some, zeros for the others."""
    keys = [*["feature"] * 3, *names.split(BREAK)[1:]]
    learned = [i for i, t in enumerate(tensors) if t.is_floating_point() and keys[i] != "mask"]
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
    with autograd_inside_operator(), full_precision(grad.device):  # backward may be called under autocast
        inputs = [t.detach().requires_grad_(i in learned) for i, t in enumerate(tensors)]
        outputs = zip(_compute(inputs, names, sizes, numbers, scale), (grad, grad_second))
        outs, outer = zip(*((out, g) for out, g in outputs if out.requires_grad))
        some = torch.autograd.grad(outs, [inputs[i] for i in learned], outer, allow_unused=True)
    for i, t in zip(learned, some, strict=True):
        grads[i] = grads[i] if t is None else t.contiguous()
    return grads


@backward.register_fake
def _(grad, grad_second, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


@contextmanager
def autograd_inside_operator():
    """Autograd, which torch excludes from the dispatch of what runs inside an operator."""
    keys, included = torch._C.DispatchKey, torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutogradCPU"):
        excluded = excluded.remove(getattr(keys, name)) if hasattr(keys, name) else excluded
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _save(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*tensors)


def _pullback(ctx, grad, grad_second):
    grads = backward(grad.contiguous(), grad_second.contiguous(), list(ctx.saved_tensors), *ctx.rest)
    names, sizes, *_ = ctx.rest
    none = [] if sizes is not None and not len(sizes) else None  # an empty list counts as one of tensors
    return grads, None, none, None, None


hsa.register_autograd(_pullback, setup_context=_save)
