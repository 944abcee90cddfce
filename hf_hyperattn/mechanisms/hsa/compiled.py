"""Calls whose masks, biases and trees the compiler cannot look into, as one operator with its gradient.

What a mask hides decides which tree is used, so such a call is computed as it is without a compiler, inside the
operator; its gradient computes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from ...engines import Options
from ...hierarchy import Hierarchy
from . import attention
from .config import Rule

#: What may be given besides query, key and value, in the order in which it is passed on.
EXTRAS = ("mask", "bias", "sinks", "block_bias", "hierarchy")


def wanted(options: Options, asked: attention.Asked) -> bool:
    """Whether a call that is being compiled needs the operator."""
    if options.mask is not None or isinstance(asked.hierarchy, Tensor):
        return True
    if asked.rule.tying == "both":
        return False
    windows = isinstance(asked.hierarchy, tuple) or asked.hierarchy.is_windows
    top_k = asked.rule.refine_top_k
    chains = not asked.is_causal and any(top_k if isinstance(top_k, tuple) else (top_k,))
    return not windows or chains or asked.weights or options.window is not None or options.bias is not None


def run(query: Tensor, key: Tensor, value: Tensor, options: Options, asked: attention.Asked):
    """As `attention.tied`.

    Raises:
        ValueError: dropout, a mask with a gradient, or a `Hierarchy` that is not given as group ids.
    """
    if options.dropout_p:
        raise ValueError(
            "hsa with a mask and attention dropout cannot be compiled; allowed: attention_dropout=0, or no compiling"
        )
    if options.mask is not None and options.mask.requires_grad:
        raise ValueError(
            "hsa with a learned mask cannot be compiled; allowed: what is learned as position_bias"
        )
    tree = asked.hierarchy
    if isinstance(tree, Hierarchy) and tree.is_windows and tree.starts is None and tree.stops is None:
        asked = replace(asked, hierarchy=tuple(tree.sizes))
    if not isinstance(asked.hierarchy, Tensor | tuple):
        raise ValueError(
            "hsa cannot compile a mask or tying='key' with a Hierarchy; allowed: its ids, hierarchy.to_ids()"
        )
    rule, heads = asked.rule, query.shape[1]
    block_bias = torch.as_tensor(rule.block_bias, dtype=query.dtype, device=query.device).expand(heads)
    found = (options.mask, options.bias, options.sinks, block_bias, asked.hierarchy)
    extras = [t if isinstance(t, Tensor) else None for t in found]
    names = " ".join(name for name, t in zip(EXTRAS, extras, strict=True) if t is not None)
    sizes = list(asked.hierarchy) if isinstance(asked.hierarchy, tuple) else None
    counts = [
        list(x) if isinstance(x, tuple) else [x] * heads for x in (rule.near, rule.sinks, rule.refine_top_k)
    ]
    flags = (rule.tying == "both", rule.keep_diagonal, asked.is_causal, options.is_causal, asked.weights)
    flags = [int(flag) for flag in flags]  # torch.jit.trace takes no list of bools
    tensors = [query, key, value, *(t for t in extras if t is not None)]
    out, weights = tied(tensors, names, sizes, *counts, flags, options.window, options.offset)
    return out, weights if asked.weights else None


def taken_apart(tensors, names, sizes, near, sinks, top_k, flags, window, offset):
    """The arguments of `attention.tied`."""
    found = dict(zip(names.split(), tensors[3:], strict=True))
    both, keep, causal, masked_causal, weights = map(bool, flags)
    numbers = (tuple(near), tuple(sinks), tuple(top_k)) if not both else (0, 0, 0)
    rule = Rule("both" if both else "key", keep, *numbers, found.get("block_bias"))
    options = Options(
        mask=found.get("mask"),
        bias=found.get("bias"),
        is_causal=masked_causal,
        window=window,
        offset=offset,
        sinks=found.get("sinks"),
    )
    hierarchy = found["hierarchy"] if sizes is None else tuple(sizes)
    return *tensors[:3], options, attention.Asked(hierarchy, rule, causal, weights=weights)


@torch.library.custom_op("hf_hyperattn::hsa", mutates_args=())
def tied(
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int] | None,
    near: Sequence[int],
    sinks: Sequence[int],
    top_k: Sequence[int],
    flags: Sequence[int],
    window: int | None,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """The operator: output [B, H, N, dv], and the weights [B, H, N, M], empty where nobody asked for them."""
    out, weights = attention.tied(
        *taken_apart(tensors, names, sizes, near, sinks, top_k, flags, window, offset)
    )
    if weights is None:
        return out.contiguous(), out.new_empty(0)
    missing = tensors[1].shape[2] - weights.shape[3]
    return out.contiguous(), torch.nn.functional.pad(weights, (0, missing)).contiguous()


@tied.register_fake
def _(tensors, names, sizes, near, sinks, top_k, flags, window, offset):
    query, key, value = tensors[:3]
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(*query.shape[:3], key.shape[2]) if flags[4] else query.new_empty(0)


@torch.library.custom_op("hf_hyperattn::hsa_backward", mutates_args=())
def backward(
    grad: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int] | None,
    near: Sequence[int],
    sinks: Sequence[int],
    top_k: Sequence[int],
    flags: Sequence[int],
    window: int | None,
    offset: int,
) -> list[Tensor]:
    """Gradients of all tensors that have some, zeros for the others."""
    learned = [
        i for i, t in enumerate(tensors) if t.is_floating_point() and not (i > 2 and _is_mask(names, i))
    ]

    def gradients() -> tuple[Tensor | None, ...]:
        whole = [t.detach().requires_grad_(i in learned) for i, t in enumerate(tensors)]
        out, _ = attention.tied(
            *taken_apart(whole, names, sizes, near, sinks, top_k, [*flags[:4], False], window, offset)
        )
        return torch.autograd.grad(out, [whole[i] for i in learned], grad, allow_unused=True)

    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
    # autograd is switched off inside an operator, for this thread alone
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(gradients).result()
    for i, t in zip(learned, found, strict=True):
        grads[i] = grads[i] if t is None else t.contiguous()
    return grads


def _is_mask(names: str, index: int) -> bool:
    return names.split()[index - 3] == "mask"


@backward.register_fake
def _(grad, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _save(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*tensors)


def _pullback(ctx, grad, _grad_weights):
    grads = backward(grad.contiguous(), list(ctx.saved_tensors), *ctx.rest)
    return grads, *[None] * len(ctx.rest)


tied.register_autograd(_pullback, setup_context=_save)
