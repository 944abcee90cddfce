"""Attention to selected keys: the interface of its kernels.

Read here what a kernel is told about the rule of each head, how a call is checked, and how a kernel
becomes an operator of torch with gradients. The kernels are in cpu/selected.py and
triton/selected.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.readable import is_recorded
from ..utils.torch_private import count_dispatch_modes
from .graph_torch import refuse_in_operator
from .selection import Lists


class HeadRule(NamedTuple):
    """Which keys j <= p a query at position p sees. Positions count from the first real key.

    Without pages: the keys j < sinks, and the keys j > p - near.

    With pages, c is the first position of the query's chunk. The query sees the keys j < sinks, the
    chosen pages, and all keys from the page on that contains c - near + 1.

    Args:
        near: Number of nearest keys. Without pages, a number not below the length gives full
            attention.
        sinks: Number of first keys.
        page: Keys of a page; 0 if no pages are chosen.
        chunk: Number of queries that share a choice.
        top: Number of pages that a chunk chooses.
        bounds: 1: score a page by the smallest and largest value of its keys in each channel; 0: by
            their mean.
        by: What a chunk chooses by, an index into `BY`, or `KEPT`.
        channels: Number of channels that score a page: those with the largest absolute values in
            the chunk's query. 0: all.
    """

    near: int
    sinks: int = 0
    page: int = 0
    chunk: int = 1
    top: int = 0
    bounds: int = 0
    by: int = 0
    channels: int = 0


#: What a chunk chooses by, `By` of listed/choice.h: each query by itself, the first query of the
#: chunk, the mean of the previous chunk, or the mean of the chunk.
BY = ("own", "first", "previous", "chunk")
#: `by` of a head whose choice is given.
KEPT = len(BY)


@lru_cache(maxsize=512)
def flatten_rules(rules: tuple[HeadRule, ...]) -> tuple[int, ...]:
    """Return the numbers of all rules, one after the other."""
    return tuple(number for rule in rules for number in rule)


def list_shapes(rules: Sequence[int], queries: int, keys: int) -> tuple[tuple[int, int], ...]:
    """Return the size of each head's table of pages.

    Args:
        rules: The numbers of all `HeadRule`, one after the other.
        queries, keys: Number of queries that choose, and of keys.

    Returns:
        For each head, the largest number of chunks, and the largest number of pages that a chunk
        chooses.
    """
    width = len(HeadRule._fields)
    shapes = []
    for i in range(0, len(rules), width):
        rule = HeadRule(*rules[i : i + width])
        if rule.page:
            # One chunk more at each end: padding decides where in its chunk the first query stands.
            shapes.append((queries // rule.chunk + 2, min(rule.top, keys // rule.page)))
        else:
            shapes.append((0, 0))
    return tuple(shapes)


def shapes_of_choice(
    rules: Sequence[HeadRule], queries: int, keys: int
) -> tuple[tuple[int, int], ...]:
    """Return for each head the most chunks, and the most pages that a chunk chooses."""
    return list_shapes(flatten_rules(tuple(rules)), queries, keys)


def check_choice(chosen: Tensor, batch: int, shapes: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError unless the chosen pages have the shape that the kernels read.

    Args:
        chosen: `Lists.rows`.
        batch: B.
        shapes: From `list_shapes`.
    """
    shape = batch, sum(chunks * most for chunks, most in shapes)
    if chosen.shape != shape or chosen.dtype != torch.int32:
        raise ValueError(
            f"selected attention: chosen is {chosen.dtype} {list(chosen.shape)} "
            f"where these queries and rules have int32 {list(shape)}; give what chosen_pages returns"
        )


def check_spans(starts: Sequence[int], stops: Sequence[int], keys: int) -> None:
    """Raise ValueError unless all spans lie in the keys that the kernels read."""
    if not all(0 <= start <= stop <= keys for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(
            f"selected attention: spans {starts}, {stops}; allowed: 0 <= start <= stop <= {keys} keys"
        )


def is_direct(*tensors: Tensor) -> bool:
    """Return whether a kernel may be called without an operator.

    It may if the call needs no gradients, and if no dispatch mode or recording watches operators.
    """
    # For one generated token, torch's dispatcher takes longer than the kernel.
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not (learned or is_recorded() or count_dispatch_modes())


class SelectedKernel:
    """A kernel for attention to selected keys, as a function and as an operator with gradients.

    Args:
        name: Name of the operator; the backward operator's name is this and "_backward".
        compute: Computes attention. Arguments: query, key, value, chosen, rules, spans, offset,
            scale, softcap, window, sinks, bias, as in `attend`; `chosen` is `Lists.rows`, `rules`
            comes from `flatten_rules`, `spans` has all starts and then all stops, and 0 means no
            softcap and no window. Returns the output [B, H, N, dv], and `lse`, float32 [2, B, H,
            N]: the largest logit of each row, and 1 over its sum of weights.
        differentiate: Returns the gradients of query, key, value and sinks in their dtypes; the
            last is empty without sinks. Arguments: grad, the results of `compute`, its arguments.
        returned: Dtype of the output of `compute`; None: that of the query.
        backend: Name of the engine, for errors.

    Attributes:
        chooses_pages: Whether the engine has a function that chooses the pages of `Pages`: the
            compiled library for CPUs has one. For other kernels torch chooses.
    """

    def __init__(
        self,
        name: str,
        compute: Callable,
        differentiate: Callable,
        returned: torch.dtype | None,
        backend: str,
    ):
        self.compute = compute
        self.chooses_pages = backend == "cpu"
        self.operator = torch.library.custom_op(name, compute, mutates_args=())
        gradients = torch.library.custom_op(f"{name}_backward", differentiate, mutates_args=())

        def make_fake_output(query, key, value, *settings):
            dtype = query.dtype if returned is None else returned
            out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=dtype)
            return out, query.new_empty(2, *query.shape[:3], dtype=torch.float32)

        def make_fake_gradients(grad, out, lse, query, key, value, *settings):
            sinks = settings[-2]
            like = lse if sinks is None else sinks
            d_query, d_key, d_value = (t.new_empty(t.shape) for t in (query, key, value))
            return d_query, d_key, d_value, like.new_empty(0 if sinks is None else sinks.shape)

        def save_for_backward(ctx, inputs, output):
            query, key, value, chosen, *ctx.settings, sinks, bias = inputs
            ctx.save_for_backward(*output, query, key, value, chosen, sinks, bias)

        def pull_back(ctx, grad, _):
            *saved, sinks, bias = ctx.saved_tensors
            *vectors, d_sinks = gradients(grad, *saved, *ctx.settings, sinks, bias)
            # No gradients for `chosen`, the six settings, and the bias.
            return *vectors, *[None] * 7, None if sinks is None else d_sinks, None

        self.operator.register_fake(make_fake_output)
        gradients.register_fake(make_fake_gradients)
        self.operator.register_autograd(pull_back, setup_context=save_for_backward)
        refuse_in_operator(gradients, f"backend={backend!r}")

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: Sequence[HeadRule],
        chosen: Lists | None = None,
        *,
        spans: tuple[Sequence[int], Sequence[int]] | None = None,
        offset: int = 0,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention in which every head has its own sparse rule.

        Args:
            query: [B, H, N, d], in a dtype of the kernel. Query i stands at key i + offset.
            key, value: [B, Hkv, M, d] and [B, Hkv, M, dv].
            rules: One rule for each query head.
            chosen: Pages of each chunk. None: no pages are chosen.
            spans: Starts and stops, one per batch element: the first key that is not padding, and
                the end of these keys. Positions, chunks and pages count from the first. None: no
                key is padding.
            offset: Index of the key that belongs to query 0; it counts padding, too.
            scale: Factor of the dot products. None: 1 / sqrt(d).
            softcap: Logits become softcap * tanh(logit / softcap). None: no cap.
            window: Sliding window of the attention layer: a query sees only the last `window`
                keys. None: no window.
            sinks: [H], learned sink logits: each takes weight in the softmax but has no value. They
                have nothing to do with `HeadRule.sinks`, the number of first keys.
            bias: [B, H, M], added to the logits of each key after the softcap. It gets no gradient.

        Returns:
            [B, H, N, dv] in the dtype of the query; 0 for queries before the first key.

        Raises:
            ValueError: Rules, pages or spans do not fit the call.
        """
        batch, heads, n, d = query.shape
        if len(rules) != heads:
            raise ValueError(
                f"selected attention: {len(rules)} rules for {heads} heads; give one HeadRule a head"
            )
        flat = flatten_rules(tuple(rules))
        shapes = list_shapes(flat, n, key.shape[2])
        if chosen is None:
            places = sum(chunks * most for chunks, most in shapes)
            chosen = Lists(query.new_full((batch, places), -1, dtype=torch.int32), shapes)
        starts, stops = spans or ([0] * batch, [key.shape[2]] * batch)
        check_spans(starts, stops, key.shape[2])
        check_choice(chosen.rows, batch, shapes)
        scale = float(d**-0.5 if scale is None else scale)
        learnable = [query, key, value]
        if sinks is not None:
            learnable.append(sinks)
        run = self.compute if is_direct(*learnable) else self.operator
        settings = flat, [*starts, *stops], offset, scale, softcap or 0.0, window or 0
        out, _ = run(query, key, value, chosen.rows, *settings, sinks, bias)
        return out.to(query.dtype)


def differentiate_sinks(grad: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the sinks, [H]; empty without sinks.

    Args:
        grad, out: [B, H, N, dv].
        sinks: [H] or None.
        lse: See `SelectedKernel`.
    """
    if sinks is None:
        return lse.new_empty(0)
    top, share = lse
    # A share of 0 marks a row of padding, which sees nothing. A sink has no value, so raising its
    # weight by a little changes the output by minus that much of it.
    weight = torch.where(share > 0, torch.exp(sinks.float()[:, None] - top) * share, 0.0)
    return -(weight * (grad.float() * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
