"""From tensors to launched kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .backward import attention_backward_key, attention_backward_query
from .compose import Functions, functions
from .configs import Config, configs, few, padded, tuned
from .forward import attention_forward, combine
from .tile import INTERPRETED

if INTERPRETED.value:
    from . import interpreter  # noqa: F401  mends Triton's interpreter

#: Up to this many rows that share a key head go into one program, and the keys are split (decoding).
FEW = 64
#: Keys of one part, at least, and parts of one sequence, at most.
PART, MOST_PARTS = 256, 64


@dataclass
class TritonCall:
    """The arguments of the operators (see operator.py), and what follows from them."""

    query: Tensor
    key: Tensor
    value: Tensor
    row: Tensor
    column: Tensor
    head: Tensor
    mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    points: tuple[Tensor, Tensor] | None
    score_key: str
    factored: bool
    width: int
    scale: float
    is_causal: bool
    window: int | None
    offset: int
    softcap: float | None
    dropout_p: float

    def __post_init__(self):
        self.query, self.key, self.value = map(lined, (self.query, self.key, self.value))
        # of all else kernels know no strides
        for name in ("row", "column", "head", "sinks"):
            t = getattr(self, name)
            setattr(self, name, None if t is None else t.contiguous())
        if self.points is not None:
            self.points = self.points[0].contiguous(), self.points[1].contiguous()
        self.batch, self.heads, self.n, self.d = self.query.shape
        _, self.kv_heads, self.m, _ = self.key.shape
        self.dv = self.value.shape[-1]

    @property
    def functions(self) -> Functions:
        return functions(self.score_key)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in (self.batch, self.heads, self.n, self.m, self.dv)

    @property
    def fused(self) -> bool:
        """See `tile.weights`: not beside numbers that are added, of which -3.4e38 may be all that a row sees."""
        added = self.bias is not None or (self.mask is not None and self.mask.dtype != torch.bool)
        return not added and not INTERPRETED.value

    @property
    def size(self) -> tuple[int, int]:
        """What decides about tiles: the width of vectors, padded, and the bytes of a number."""
        item = max(self.query.element_size(), self.value.element_size())
        return max(padded(self.d), padded(self.dv)), item

    def numbers(self) -> dict:
        """The arguments that all kernels share, by name."""
        made, points = self.functions, self.points or (None, None)
        shape = (self.batch, self.heads, self.n, self.m)
        mask, bias = (None if t is None else t.expand(shape) for t in (self.mask, self.bias))
        truth = mask is not None and mask.dtype == torch.bool
        return {
            "Q": self.query,
            "K": self.key,
            "V": self.value,
            "ROW": self.row,
            "COLUMN": self.column,
            "HEAD": self.head,
            "MASK": mask.view(torch.uint8) if mask is not None and truth else mask,
            "BIAS": bias,
            "SEED": self.seed,
            "POINTS_Q": points[0],
            "POINTS_K": points[1],
            "q_strides": self.query.stride()[:3],
            "k_strides": self.key.stride()[:3],
            "v_strides": self.value.stride()[:3],
            "mask_strides": (0, 0, 0, 0) if mask is None else mask.stride(),
            "bias_strides": (0, 0, 0, 0) if bias is None else bias.stride(),
            "heads": self.heads,
            "n": self.n,
            "m": self.m,
            "column_heads": self.column.shape[1],
            "offset": self.offset,
            "window": self.window or 0,
            "scale": None if self.scale == 1 else self.scale,
            "softcap": self.softcap or 0.0,
            "dropout": self.dropout_p,
            "SCORE": made.score,
            "INEXACT": made.inexact if self.points else None,
            "NOISE": noise(self.d, self.query.element_size()),
            "ROWS": self.row.shape[-1] - self.factored,
            "COLUMNS": self.column.shape[-1] - self.factored,
            "HEADS": self.head.shape[0],
            "FACTORS": int(self.factored),
            "FUSED": self.fused,
            "D": self.d,
            "W": self.width,
            "DV": self.dv,
            "P": self.points[0].shape[-1] if self.points else 1,
            "GROUP": self.heads // self.kv_heads,
            "CAUSAL": self.is_causal,
            "WINDOWED": self.window is not None,
            "CAP": self.softcap is not None,
            "TRUTH": truth,
            "BD": padded(self.d),
            "BDV": padded(self.dv),
        }

    def run(self, name: str, kernel, lines: tuple[int, int, int], arguments: dict, numbers: int) -> None:
        """Launch a kernel for every block of `lines[2]` rows or columns of lines[0] x lines[1] heads; the lines that it
        walks over have so many numbers.
        """
        optional = (self.window, self.mask, self.bias, self.seed)
        kind = (
            *(name, self.score_key, self.size, self.query.dtype, self.value.dtype, self.query.device),
            *(self.is_causal, self.n >= 1024, *(x is None for x in optional)),
        )

        def launch(config: Config) -> None:
            walked, other = (config.columns, config.rows) if name == "key" else (config.rows, config.columns)
            grid = (triton.cdiv(lines[2], walked) * lines[0] * lines[1],)
            kernel[grid](
                **arguments,
                PACK=pack(numbers, other, config.warps),
                BM=config.rows,
                BN=config.columns,
                num_warps=config.warps,
                num_stages=config.stages,
            )

        long = self.points is not None or (self.functions.long and name != "forward")
        tuned(kind, configs(name, *self.size, long), launch)


def pack(numbers: int, lines: int, warps: int) -> int:
    """In how wide a tile the numbers of so many lines are read, see `tile.load_records`: where it has fewer elements
    than there are threads, the compiler reads number by number after all.
    """
    return min(16, max(2, int(triton.next_power_of_2(max(1, numbers))), 32 * warps // lines)) if numbers <= 16 else 1


def noise(width: int, item: int) -> float:
    """What rounding may leave of |q|² + |k|² - 2 q·k where q = k, as a share of |q|².

    A few units in the last place come from norms and factors. Tensor cores cut off what falls below the last place of a
    product's sum as it grows, half a unit on average with every 8 numbers they add to it, 4 of float32 (Fasi et al.,
    Numerical behavior of NVIDIA tensor cores, 2021), all in the same direction.
    """
    return torch.finfo(torch.float32).eps * (4 + width / (16 if item == 2 else 8))


def lined(t: Tensor) -> Tensor:
    """The tensor with the numbers of a vector side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def on(device: torch.device):
    """The device's context: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward(call: TritonCall) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and log-sum-exp [B, H, N], float32; rows that see nothing are 0 and +inf."""
    like, shape = call.query, (call.batch, call.heads, call.n)
    out = like.new_empty(*shape, call.dv, dtype=torch.float32)
    lse = like.new_empty(shape, dtype=torch.float32)
    if call.empty:
        return out.zero_(), lse.fill_(float("inf"))
    arguments = call.numbers() | {"SINKS": call.sinks, "row_step": lse.numel()}
    arguments["SHARED"] = call.column.shape[1] == call.kv_heads
    lines = call.n * call.heads // call.kv_heads
    with on(like.device):
        if lines <= FEW and call.m >= 2 * PART:
            split(call, arguments, lines, out, lse)
        else:
            arguments |= {"OUT": out, "LSE": lse, "SUM": None, "PACKED": False, "PARTS": 1}
            call.run("forward", attention_forward, shape, arguments, call.column.shape[-1])
    return out, lse


def split(call: TritonCall, arguments: dict, lines: int, out: Tensor, lse: Tensor) -> None:
    """The forward kernel with rows together and keys in parts, and the sum of the parts."""
    rows = 16 if lines <= 16 else 32
    blocks = call.batch * call.kv_heads * int(triton.cdiv(lines, rows))
    parts = parts_for(call.m, blocks, out.device)
    target: tuple[Tensor, Tensor, Tensor | None] = (out, lse, None)
    if parts > 1:
        top, total = (lse.new_empty(parts, *lse.shape) for _ in range(2))
        target = (out.new_empty(parts, *out.shape), top, total)
    arguments |= dict(zip(("OUT", "LSE", "SUM"), target)) | {"PACKED": True, "PARTS": parts}
    columns, stages = few(*call.size)
    kernels: tuple[Any, Any] = attention_forward, combine  # which take a launch's own arguments too
    wide = pack(call.column.shape[-1], columns, 4)
    kernels[0][(blocks * parts,)](**arguments, PACK=wide, BM=rows, BN=columns, num_warps=4, num_stages=stages)
    if parts > 1:
        kernels[1][(lse.numel(),)](
            out,
            lse,
            target[2],
            target[0],
            target[1],
            lse.numel(),
            PARTS=parts,
            FUSED=call.fused,
            DV=call.dv,
            BP=triton.next_power_of_2(parts),
            BDV=arguments["BDV"],
        )


def parts_for(keys: int, blocks: int, device: torch.device) -> int:
    """Into how many parts, a power of two, keys are split: about two programs for each multiprocessor."""
    chips = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    most = max(1, min(MOST_PARTS, keys // PART, 2 * chips // blocks))
    return 2 ** (most.bit_length() - 1)


def backward(
    call: TritonCall, grad: Tensor, out: Tensor, lse: Tensor, needs_grad: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, row, column and head; of the last three as far as needs_grad, else empty."""
    grad = lined(grad.to(call.value.dtype))  # products are of that dtype
    made, factors = call.functions, int(call.factored)
    new: Callable = lambda *shape: call.query.new_empty(shape, dtype=torch.float32)
    shape, key_shape = (call.batch, call.heads, call.n), (call.batch, call.heads, call.m)
    shared_dtype = None if call.heads == call.kv_heads else torch.float32  # for shared keys one sum of each query head
    d_query = torch.empty_like(call.query, memory_format=torch.contiguous_format)
    d_key, d_value = (t.new_empty((*key_shape, t.shape[-1]), dtype=shared_dtype) for t in (call.key, call.value))
    d_row = new(*shape, (len(made.rows) + factors) * needs_grad[0])
    d_column = new(*key_shape, (len(made.columns) + factors) * needs_grad[1])
    d_head = new(len(made.heads) * needs_grad[2], *shape)
    if call.empty:
        for t in (d_query, d_key, d_value, d_row, d_column, d_head):
            t.zero_()
    else:
        # of each query: its statistics, its factor, and what the first kernel leaves there for the second
        record = new(*shape, call.row.shape[-1] + 2)
        record[..., :-2] = call.row
        shared = call.numbers() | {"GRAD": grad, "grad_strides": grad.stride()[:3], "PULL": made.pull}
        rows = {"ROW": call.row, "OUT": out, "LSE": lse, "D_Q": d_query, "D_ROW": d_row, "D_HEAD": d_head}
        rows |= {"D_ROWS": len(made.rows) * needs_grad[0], "D_FACTORS": factors * needs_grad[0]}
        rows |= {"D_HEADS": d_head.shape[0], "row_step": lse.numel()}
        columns = {"D_K": d_key, "D_V": d_value, "D_COLUMN": d_column}
        columns |= {"D_COLUMNS": len(made.columns) * needs_grad[1], "D_FACTORS": factors * needs_grad[1]}
        shared["RECORD"] = record
        with on(call.query.device):
            call.run("query", attention_backward_query, shape, shared | rows, call.column.shape[-1])
            del shared["ROW"]
            call.run("key", attention_backward_key, key_shape, shared | columns, record.shape[-1])
    d_key, d_value = (
        shared_sum(t, call.kv_heads).to(like.dtype) for t, like in ((d_key, call.key), (d_value, call.value))
    )
    d_column = shared_sum(d_column, call.column.shape[1])
    if needs_grad[0]:
        d_row = spread(d_row, made.rows, call.row)
    if needs_grad[1]:
        d_column = spread(d_column, made.columns, call.column)
    d_head = d_head.sum((1, 3))
    if needs_grad[2]:
        full = torch.zeros_like(call.head)
        for place, gradient in zip(made.heads, d_head, strict=True):
            full[place] = gradient
        d_head = full
    return d_query, d_key, d_value, d_row, d_column, d_head


def shared_sum(t: Tensor, heads: int) -> Tensor:
    """Summed over the query heads [B, H, ...] that share one of `heads`."""
    return t if t.shape[1] == heads else t.unflatten(1, (heads, -1)).sum(2)


def spread(gradients: Tensor, moving: tuple[int, ...], like: Tensor) -> Tensor:
    """Gradients of the statistics that have one, and of a factor after them, among zeros for the others."""
    if gradients.shape[-1] == like.shape[-1]:
        return gradients
    factor = [like.shape[-1] - 1] * (gradients.shape[-1] - len(moving))
    full = torch.zeros_like(like)
    full[..., [*moving, *factor]] = gradients
    return full
