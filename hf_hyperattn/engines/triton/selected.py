"""Launch the kernels for attention to selected keys.

Here you learn how a call is split into launches, so that tables stay small.
"""

# A launch takes plain numbers where the functions of Triton declare constants.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..selected import HeadRule, SelectedKernel, differentiate_sinks, list_shapes
from ..selection import Lists
from .configs import choose_listed_config, pad_width
from .forward import combine_parts
from .launch import (
    count_parts,
    make_rows_dense,
    sum_shared_heads,
    use_device,
    with_strides,
)
from .listed import listed_backward_key, listed_backward_query, listed_forward
from .tables import (
    LEAST_BYTES,
    SHARE,
    ListedRules,
    Tables,
    find_readers,
    group_rules,
    make_tables,
    split_blocks,
)

#: Up to this many queries, the keys of a block are shared out to several programs.
FEW = 16


class ListedCall:
    """The arguments of a call in the layout that the kernels read.

    Args:
        has_grad: Whether the call is for the backward kernels.

    The other arguments are as in `SelectedKernel`.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chosen: Tensor,
        rules: Sequence[int],
        spans: Sequence[int],
        offset: int,
        scale: float,
        softcap: float,
        window: int,
        summaries: int,
        sinks: Tensor | None,
        bias: Tensor | None,
        has_grad: bool = False,
    ):
        self.query = make_rows_dense(query)
        self.key, self.value = (make_heads_compact(t) for t in (key, value))
        self.batch, self.heads, self.n, self.d = query.shape
        self.kv_heads, self.m = key.shape[1:3]
        self.dv = value.shape[-1]
        self.offset, self.summaries = offset, summaries
        self.sinks = None if sinks is None else sinks.float().contiguous()
        self.bias = None if bias is None else make_rows_dense(bias.float())
        self.chosen = Lists(chosen, list_shapes(rules, self.n, self.m))
        width = len(HeadRule._fields)
        of_heads = [HeadRule(*rules[i : i + width]) for i in range(0, len(rules), width)]
        widest = max(pad_width(self.d), pad_width(self.dv))
        item = max(t.element_size() for t in (query, key, value))
        self.config = choose_listed_config(widest, item, has_grad)
        self.groups = group_rules(
            of_heads, self.n, self.config.rows, self.config.columns, query.device
        )
        self.starts = list(spans[: self.batch])
        self.spans = torch.tensor(list(spans), dtype=torch.int32, device=query.device)
        self.spans = self.spans.unflatten(0, (2, self.batch))
        tensors = self.query, self.key, self.value
        used = sum(t.numel() * t.element_size() for t in tensors)
        self.most_bytes = max(LEAST_BYTES, int(used * SHARE))
        # The kernels write no rows of padding, so with padding the outputs must begin as zeros.
        self.is_padded = any(start > offset for start in self.starts)
        self.settings = {
            "Q": with_strides(self.query),
            "K": with_strides(self.key),
            "V": with_strides(self.value),
            "SPANS": self.spans,
            "BIAS": (None, (0, 0)) if self.bias is None else (self.bias, self.bias.stride()[:2]),
            "batch": self.batch,
            "heads": self.heads,
            "n": self.n,
            "m": self.m,
            "row_step": self.batch * self.heads * self.n,
            "offset": offset,
            "window": window,
            "summaries": summaries,
            "scale": scale,
            "softcap": softcap,
            "PLAIN": not softcap and bias is None and scale > 0,
            "D": self.d,
            "DV": self.dv,
            "GROUP": self.heads // self.kv_heads,
            "CAPPED": softcap != 0,
            "WINDOWED": window != 0,
            "BD": pad_width(self.d),
            "BDV": pad_width(self.dv),
            "BN": self.config.columns,
            "num_warps": self.config.warps,
            "num_stages": self.config.stages,
        }

    def list_launches(self) -> Iterator[tuple[ListedRules, int, int]]:
        """Yield the heads, the first block and the number of blocks of each launch."""
        for group in self.groups:
            for launch in split_blocks(
                group, self.batch, self.n, self.m, self.summaries, self.most_bytes
            ):
                yield group, *launch

    def make_tables(self, group: ListedRules, first: int, blocks: int) -> Tables:
        """Return the tables of a launch."""
        return make_tables(
            group,
            chosen=self.chosen,
            spans=self.spans,
            starts=self.starts,
            offset=self.offset,
            queries=self.n,
            keys=self.m,
            summaries=self.summaries,
            first=first,
            blocks=blocks,
            columns=self.config.columns,
        )

    def list_arguments(self, group: ListedRules, tables: Tables) -> dict[str, Any]:
        """Return the arguments that all kernels of a launch take."""
        return self.settings | {
            "TABLES": (tables.bits, tables.listed, tables.counts),
            "RULES": group.numbers,
            "members": len(group.heads),
            "pages": tables.bits.shape[3],
            "blocks": tables.blocks,
            "first_block": tables.first,
            "PAGE": group.page,
            "BM": group.rows,
        }


def make_heads_compact(t: Tensor) -> Tensor:
    """Return keys or values whose heads end below 2^31 numbers: `load_rows` counts in int32."""
    t = make_rows_dense(t)
    return t if t.shape[2] * t.stride(2) < 2**31 else t.contiguous()


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    rules: Sequence[int],
    spans: Sequence[int],
    offset: int,
    scale: float,
    softcap: float,
    window: int,
    summaries: int,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention; see `compute` of `SelectedKernel`. The output has the query's dtype."""
    call = ListedCall(
        query,
        key,
        value,
        chosen,
        rules,
        spans,
        offset,
        scale,
        softcap,
        window,
        summaries,
        sinks,
        bias,
    )
    shape = call.batch, call.heads, call.n
    make = query.new_zeros if call.is_padded else query.new_empty
    out = make((*shape, call.dv))
    # Rows of padding keep a largest logit of +inf, which makes their weights 0 in backward.
    lse = query.new_full((2, *shape), float("inf"), dtype=torch.float32)
    lse[1] = 0
    if not out.numel():
        return out, lse
    with use_device(query.device):
        parts, written = 1, {"OUT": out, "LSE": lse, "SUM": None}
        if call.n <= FEW:
            parts = count_parts(call.m, call.batch * call.heads, query.device)
        if parts > 1:
            written = {
                "OUT": query.new_zeros((parts, *shape, call.dv), dtype=torch.float32),
                "LSE": query.new_full((parts, *shape), float("-inf"), dtype=torch.float32),
                "SUM": query.new_zeros((parts, *shape), dtype=torch.float32),
            }
        for launch in call.list_launches():
            launch_forward(call, *launch, parts, written)
        if parts > 1:
            combine_parts[(lse[0].numel(),)](
                OUT=out,
                LSE=lse,
                SUM=written["SUM"],
                PART_OUT=written["OUT"],
                PART_TOP=written["LSE"],
                row_step=lse[0].numel(),
                PARTS=parts,
                FUSED=False,
                DV=call.dv,
                BP=triton.next_power_of_2(parts),
                BDV=pad_width(call.dv),
            )
    return out, lse


# Each launch is a function of its own, so that its tables are gone before the next ones are made.


def launch_forward(
    call: ListedCall, group: ListedRules, first: int, blocks: int, parts: int, written: dict
) -> None:
    """Compute the output of some blocks.

    Args:
        call: The call.
        group, first, blocks: From `ListedCall.list_launches`.
        parts: Number of programs that share the keys of a block.
        written: OUT, LSE and SUM of `listed_forward`.
    """
    arguments = call.list_arguments(group, call.make_tables(group, first, blocks))
    programs = call.batch * len(group.heads) * blocks * parts
    listed_forward[(programs,)](**arguments, **written, SINKS=call.sinks, PARTS=parts)


def launch_backward(
    call: ListedCall,
    group: ListedRules,
    first: int,
    blocks: int,
    read: dict,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    d_bias: Tensor | None,
) -> None:
    """Compute the gradients of the queries of some blocks; add to those of keys and values.

    Args:
        call: The call.
        group, first, blocks: From `ListedCall.list_launches`.
        read: GRAD, LSE and DELTA of the kernels.
        d_query: Written.
        d_key, d_value, d_bias: Float32 sums, to which this launch adds; None without a bias.
    """
    tables = call.make_tables(group, first, blocks)
    arguments = call.list_arguments(group, tables) | read
    programs = call.batch * len(group.heads)
    listed_backward_query[(programs * blocks,)](**arguments, D_Q=d_query)
    columns = call.config.columns
    readers = find_readers(
        group,
        tables,
        spans=call.spans,
        offset=call.offset,
        queries=call.n,
        keys=call.m,
        summaries=call.summaries,
        columns=columns,
    )
    listed_backward_key[(programs * -(-call.m // columns),)](
        **arguments, READERS=readers, D_K=d_key, D_V=d_value, D_BIAS=d_bias
    )


def compute_gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    rules: Sequence[int],
    spans: Sequence[int],
    offset: int,
    scale: float,
    softcap: float,
    window: int,
    summaries: int,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, sinks and bias; see `SelectedKernel`."""
    call = ListedCall(
        query,
        key,
        value,
        chosen,
        rules,
        spans,
        offset,
        scale,
        softcap,
        window,
        summaries,
        sinks,
        bias,
        has_grad=True,
    )
    # The kernels multiply in the dtype of the values.
    grad = make_rows_dense(grad.to(value.dtype))
    delta = (grad.float() * out).sum(-1)
    make = torch.zeros if call.is_padded else torch.empty
    d_query = make(query.shape, dtype=query.dtype, device=query.device)
    # Query heads that share a key head have sums of their own, in float32 until they are added.
    d_key = query.new_zeros((*query.shape[:2], call.m, call.d), dtype=torch.float32)
    d_value = query.new_zeros((*query.shape[:2], call.m, call.dv), dtype=torch.float32)
    d_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=torch.float32)
    if not (out.numel() and call.m):
        return (
            d_query.zero_(),
            torch.zeros_like(key),
            torch.zeros_like(value),
            differentiate_sinks(grad, sinks, out, lse),
            lse.new_zeros(0 if bias is None else bias.shape),
        )
    with use_device(query.device):
        read = {"GRAD": with_strides(grad), "LSE": lse, "DELTA": delta}
        for launch in call.list_launches():
            launch_backward(call, *launch, read, d_query, d_key, d_value, d_bias)
    return (
        d_query,
        sum_shared_heads(d_key, call.kv_heads).to(key.dtype),
        sum_shared_heads(d_value, call.kv_heads).to(value.dtype),
        differentiate_sinks(grad, sinks, out, lse),
        lse.new_empty(0) if d_bias is None else d_bias,
    )


#: Attention on a GPU, as a function and as an operator.
kernel = SelectedKernel(
    "hf_hyperattn::triton_selected", compute_attention, compute_gradients, None, "triton"
)
selected_attention = kernel.attend
