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

    A key may also be a *summary*, for example the mean of a window. Summaries stand before all
    texts, and are seen only by queries whose chunk lists them.

    Without pages: the keys j < sinks, and the keys j > p - near.

    With pages, c is the first position of the query's chunk. The query sees the keys j < sinks, the
    chosen pages, and all keys from the page on that contains c - near + 1. With by=`SUMMARIES` or
    `ROWS` the chunk has chosen single rows instead of pages.

    Args:
        near: Number of nearest keys. Without pages, a number not below the length gives full
            attention.
        sinks: Number of first keys.
        page: Keys of a page; 0 if no pages are chosen.
        chunk: Number of queries that share a choice.
        top: Number of pages that a chunk chooses, or of the rows that it lists.
        bounds: 1: score a page by the smallest and largest value of its keys in each channel; 0: by
            their mean.
        by: What a chunk chooses by, an index into `BY`; or `KEPT`, `SUMMARIES` or `ROWS`.
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
#: `by` of a head whose choice is given: as pages; as summaries, numbered from 0; or as rows, which
#: are the summaries and then the keys from the first real one on. Only the GPU kernel has the last two.
KEPT, SUMMARIES, ROWS = range(len(BY), len(BY) + 3)


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
            most = keys if rule.by in (SUMMARIES, ROWS) else keys // rule.page
            shapes.append((queries // rule.chunk + 2, min(rule.top, most)))
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


def check_spans(starts: Sequence[int], stops: Sequence[int], keys: int, first: int = 0) -> None:
    """Raise ValueError unless all spans lie in the keys that the kernels read.

    Args:
        starts, stops: Of each batch element.
        keys: Number of keys, summaries included.
        first: Number of summaries before the keys.
    """
    if not all(first <= start <= stop <= keys for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(
            f"selected attention: spans {starts}, {stops}; allowed: {first} <= start <= stop <= {keys} keys"
        )


def check_summaries(
    rules: Sequence[HeadRule], summaries: int, window: int | None, is_on_cpu: bool
) -> None:
    """Raise ValueError unless summaries, rules and the engine fit together.

    Args:
        rules: Of all heads.
        summaries, window: As in `SelectedKernel.attend`.
        is_on_cpu: Whether the kernel is that for CPUs.
    """
    listing = [rule.by in (SUMMARIES, ROWS) for rule in rules]
    if (summaries or any(listing)) and (not all(listing) or is_on_cpu or window is not None):
        raise ValueError(
            f"selected attention: {summaries} summaries, {sum(listing)} of {len(rules)} rules that list rows, "
            f"window={window}; allowed: summaries with rows listed by every rule, on a GPU, without a window"
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
            scale, softcap, window, summaries, sinks, bias, as in `attend`; `chosen` is
            `Lists.rows`, `rules` comes from `flatten_rules`, `spans` has all starts and then all
            stops, and 0 means no softcap and no window. Returns the output [B, H, N, dv], and
            `lse`, float32 [2, B, H, N]: the largest logit of each row, and 1 over its sum of
            weights.
        differentiate: Returns the gradients of query, key, value and sinks in their dtypes, and
            that of the bias in float32. The gradient of the sinks is empty without sinks. The
            gradient of the bias is empty without a bias, and if the engine does not compute it.
            Arguments: grad, the results of `compute`, its arguments.
        returned: Dtype of the output of `compute`; None: that of the query.
        backend: Name of the engine, for errors.

    Attributes:
        chooses_pages: Whether the engine has a function that chooses the pages of `Pages`: the
            compiled library for CPUs has one. For other kernels torch chooses.
        differentiates_bias: Whether the engine computes the gradient of the bias. Only the engine
            for GPUs does.
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
        self.differentiates_bias = backend == "triton"
        self.operator = torch.library.custom_op(name, compute, mutates_args=())
        gradients = torch.library.custom_op(f"{name}_backward", differentiate, mutates_args=())

        def make_fake_output(query, key, value, *settings):
            dtype = query.dtype if returned is None else returned
            out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=dtype)
            return out, query.new_empty(2, *query.shape[:3], dtype=torch.float32)

        def make_fake_gradients(grad, out, lse, query, key, value, *settings):
            sinks, bias = settings[-2:]
            d_query, d_key, d_value = (t.new_empty(t.shape) for t in (query, key, value))
            d_sinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
            d_bias = lse.new_empty(0)
            if bias is not None and self.differentiates_bias:
                d_bias = lse.new_empty(bias.shape)
            return d_query, d_key, d_value, d_sinks, d_bias

        def save_for_backward(ctx, inputs, output):
            query, key, value, chosen, *ctx.settings, sinks, bias = inputs
            ctx.save_for_backward(*output, query, key, value, chosen, sinks, bias)

        def pull_back(ctx, grad, _):
            *saved, sinks, bias = ctx.saved_tensors
            *vectors, d_sinks, d_bias = gradients(grad, *saved, *ctx.settings, sinks, bias)
            d_sinks = None if sinks is None else d_sinks
            d_bias = d_bias.to(bias.dtype) if d_bias.numel() else None
            # No gradients for `chosen` and the seven settings.
            return *vectors, *[None] * 8, d_sinks, d_bias

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
        summaries: int = 0,
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
            summaries: Number of first rows of `key` and `value` that are summaries; 0: none. Spans
                and the offset count them. There may be no window then, and rules choose by
                `SUMMARIES` or `ROWS`.
            sinks: [H], learned sink logits: each takes weight in the softmax but has no value. They
                have nothing to do with `HeadRule.sinks`, the number of first keys.
            bias: [B, H, M], added to the logits of each key after the softcap. Only the kernel for
                GPUs has its gradient.

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
        check_summaries(rules, summaries, window, self.chooses_pages)
        flat = flatten_rules(tuple(rules))
        shapes = list_shapes(flat, n, key.shape[2])
        if chosen is None:
            places = sum(chunks * most for chunks, most in shapes)
            chosen = Lists(query.new_full((batch, places), -1, dtype=torch.int32), shapes)
        starts, stops = spans or ([summaries] * batch, [key.shape[2]] * batch)
        check_spans(starts, stops, key.shape[2], summaries)
        check_choice(chosen.rows, batch, shapes)
        if bias is not None and bias.requires_grad and not self.differentiates_bias:
            raise ValueError(
                "selected attention: a bias that needs a gradient on a CPU; allowed: bias.detach(), or a GPU"
            )
        scale = float(d**-0.5 if scale is None else scale)
        learnable = [query, key, value]
        learnable += [t for t in (sinks, bias) if t is not None]
        run = self.compute if is_direct(*learnable) else self.operator
        capped, windowed = softcap or 0.0, window or 0
        settings = flat, [*starts, *stops], offset, scale, capped, windowed, summaries
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
