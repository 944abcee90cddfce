"""From an operator's tensors to launched kernels, and from what these write to gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..emit_triton import emit_functions
from ..score import repeat_heads
from ..serialize import LEARNED, OperatorCall
from .arithmetic import compiled
from .backward import attention_backward_key, attention_backward_query
from .configs import Config, configs, few, padded, tuned
from .forward import attention_forward, combine
from .tile import INTERPRETED

if INTERPRETED.value:
    from . import interpreter  # noqa: F401  mends Triton's interpreter

#: Up to this many rows that share a key head go into one program, and the keys are split (decoding).
FEW = 64
#: Keys of one part, at least, and parts of one sequence, at most.
PART, MOST_PARTS = 256, 64


class TritonCall:
    """The arguments of an operator as the kernels take them: the numbers of a row or column side by side."""

    def __init__(self, a: OperatorCall):
        self.a, self.options = a, a.options
        self.query, self.key, self.value = map(lined, (a.query, a.key, a.value))
        self.batch, self.heads, self.n, self.d = self.query.shape
        _, self.kv_heads, self.m, _ = self.key.shape
        self.dv = self.value.shape[-1]
        extra = a.extras.get
        self.mask, self.bias, self.seed = extra("mask"), extra("bias"), extra("seed")
        self.sinks = None if extra("sinks") is None else a.extras["sinks"].contiguous()
        self.factored = "query_factor" in a.extras
        row = [*a.row, a.extras["query_factor"]] if self.factored else a.row
        column = [*a.column, a.extras["key_factor"]] if self.factored else a.column
        if any(t.shape[1] != self.kv_heads for t in column):
            column = [repeat_heads(t, self.heads) for t in column]
        self.row = packed(row, -1, (self.batch, self.heads, self.n, 0), self.query)
        self.column = packed(column, -1, (self.batch, self.kv_heads, self.m, 0), self.query)
        self.head = packed(a.head, 0, (0, self.heads), self.query)
        capped = a.options.softcap is not None
        self.emitted, self.functions = (
            emit_functions(a.score_key, capped),
            functions(a.score_key, capped),
        )
        #: Whether squared distances are read.
        self.measures = "is_inexact" in self.functions
        #: Whether there is nothing to compute.
        self.empty = 0 in (self.batch, self.heads, self.n, self.m, self.dv)
        # see `tile.weights`: not beside numbers that are added, of which -3.4e38 may be all that a row sees
        added = self.bias is not None or (self.mask is not None and self.mask.dtype != torch.bool)
        self.fused = not added and not INTERPRETED.value
        #: What decides about tiles: the width of vectors, padded, and the bytes of a number.
        item = max(self.query.element_size(), self.value.element_size())
        self.size = max(padded(self.d), padded(self.dv)), item
        self.narrowest = min(padded(self.d), padded(self.dv))

    def numbers(self) -> dict:
        """The arguments that all kernels share, by name."""
        functions, options = self.functions, self.options
        shape = (self.batch, self.heads, self.n, self.m)
        mask, bias = (None if t is None else t.expand(shape) for t in (self.mask, self.bias))
        truth = mask is not None and mask.dtype == torch.bool
        pairs = lambda t: (None, (0, 0, 0, 0)) if t is None else (t, t.stride())
        return {
            "Q": strided(self.query),
            "K": strided(self.key),
            "V": strided(self.value),
            "NUMBERS": (self.row, self.column, self.head),
            "MASKS": (
                pairs(mask.view(torch.uint8) if mask is not None and truth else mask),
                pairs(bias),
            ),
            "SEED": self.seed,
            "heads": self.heads,
            "n": self.n,
            "m": self.m,
            "column_heads": self.column.shape[1],
            "offset": options.offset,
            "window": options.window or 0,
            "scale": None if self.a.scale == 1 else self.a.scale,
            "softcap": options.softcap or 0.0,
            "dropout": options.dropout_p,
            "SCORE": functions["score"],
            "DISTANCE": functions.get("by_product"),
            "INEXACT": functions.get("is_inexact"),
            "MARGIN": functions.get("margin"),
            "BOUND": functions.get("bound"),
            "POINTS": functions.get("factors"),
            "SLACK": slack(self.d, self.query.element_size()),
            "ROWS": self.row.shape[-1] - self.factored,
            "COLUMNS": self.column.shape[-1] - self.factored,
            "HEADS": self.head.shape[0],
            "FACTORS": int(self.factored),
            "FUSED": self.fused,
            "D": self.d,
            "W": self.a.width,
            "DV": self.dv,
            "P": self.a.width - self.emitted.left_out,
            "GROUP": self.heads // self.kv_heads,
            "CAUSAL": options.is_causal,
            "WINDOWED": options.window is not None,
            "TRUTH": truth,
            "BD": padded(self.d),
            "BDV": padded(self.dv),
        }

    def run(
        self, name: str, kernel, lines: tuple[int, int, int], arguments: dict, numbers: int
    ) -> None:
        """Launch a kernel for every block of `lines[2]` rows or columns of lines[0] x lines[1] heads; the lines that it
        walks over have so many numbers.
        """
        optional = (self.options.window, self.mask, self.bias, self.seed)
        kind = (
            *(
                name,
                self.a.score_key,
                self.size,
                self.narrowest,
                self.query.dtype,
                self.value.dtype,
                self.query.device,
            ),
            *(self.options.is_causal, self.n >= 1024, *(x is None for x in optional)),
        )

        def launch(config: Config) -> None:
            walked, other = (
                (config.columns, config.rows) if name == "key" else (config.rows, config.columns)
            )
            programs = int(triton.cdiv(lines[2], walked)) * lines[0] * lines[1]
            # twice where distances are read, see `tile.nothing_to_do`
            doubt = self.query.new_empty(programs, dtype=torch.int32) if self.measures else None
            for careful in (False, True) if self.measures else (False,):
                kernel[(programs,)](
                    **arguments,
                    DOUBT=doubt,
                    CAREFUL=careful,
                    PACK=pack(numbers, other, config.warps),
                    BM=config.rows,
                    BN=config.columns,
                    num_warps=config.warps,
                    num_stages=config.stages,
                )

        tuned(kind, configs(name, *self.size, self.narrowest), launch)


@lru_cache(maxsize=256)
def functions(score_key: str, capped: bool) -> dict[str, Callable]:
    """The Triton functions of a score by name, see `Emitted`."""
    owner, texts = f"{score_key}{' capped' * capped}", emit_functions(score_key, capped).texts
    return {name: compiled(owner, name, text) for name, text in texts.items()}


def packed(numbers: Sequence[Tensor], axis: int, none: tuple[int, ...], like: Tensor) -> Tensor:
    """Numbers as float32 along a new axis; where there are none, an empty tensor of that shape."""
    numbers = [t.float() for t in numbers]
    return torch.stack(numbers, axis) if numbers else like.new_empty(none, dtype=torch.float32)


def pack(numbers: int, lines: int, warps: int) -> int:
    """In how wide a tile the numbers of so many lines are read, see `tile.load_records`: where it has fewer elements
    than there are threads, the compiler reads number by number after all.
    """
    return (
        min(16, max(2, int(triton.next_power_of_2(max(1, numbers))), 32 * warps // lines))
        if numbers <= 16
        else 1
    )


def slack(width: int, item: int) -> float:
    """What rounding may leave of |q|² + |k|² - 2 q·k where q = k, in shares of 4 units in the last place of |q|².

    These come from norms and factors. Tensor cores cut off what falls below the last place of a product's sum as it
    grows, half a unit on average with every 8 numbers they add to it, 4 of float32 (Fasi et al., Numerical behavior of
    NVIDIA tensor cores, 2021), all in the same direction.
    """
    return 1 + width / (64 if item == 2 else 32)


def lined(t: Tensor) -> Tensor:
    """The tensor with the numbers of a vector side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def strided(t: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Vectors as kernels take them."""
    return t, t.stride()[:3]


def on(device: torch.device):
    """The device's context: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward(call: TritonCall) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and, of each row, what `store_sums` says, [2, B, H, N], float32; rows that see nothing are 0
    and +inf.
    """
    like, shape = call.query, (call.batch, call.heads, call.n)
    out = like.new_empty(*shape, call.dv, dtype=torch.float32)
    lse = like.new_ones(2, *shape, dtype=torch.float32)
    if call.empty:
        return out.zero_(), lse.fill_(float("inf"))
    arguments = call.numbers() | {"SINKS": call.sinks, "row_step": lse[0].numel()}
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
        top, total = (lse.new_empty(parts, *lse[0].shape) for _ in range(2))
        target = (out.new_empty(parts, *out.shape), top, total)
    arguments |= dict(zip(("OUT", "LSE", "SUM"), target)) | {"PACKED": True, "PARTS": parts}
    arguments |= {
        "DOUBT": None,
        "CAREFUL": call.measures,
    }  # one launch more would take longer than branching
    columns, stages = few(*call.size)
    kernels: tuple[Any, Any] = attention_forward, combine  # which take a launch's own arguments too
    wide = pack(call.column.shape[-1], columns, 4)
    kernels[0][(blocks * parts,)](
        **arguments, PACK=wide, BM=rows, BN=columns, num_warps=4, num_stages=stages
    )
    if parts > 1:
        sizes = {
            "PARTS": parts,
            "FUSED": call.fused,
            "DV": call.dv,
            "BP": triton.next_power_of_2(parts),
        }
        rows = lse[0].numel()
        kernels[1][(rows,)](
            *(out, lse, target[2], target[0], target[1], rows), **sizes, BDV=arguments["BDV"]
        )


def parts_for(keys: int, blocks: int, device: torch.device) -> int:
    """Into how many parts, a power of two, keys are split: about two programs for each multiprocessor."""
    chips = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 8
    )
    most = max(1, min(MOST_PARTS, keys // PART, 2 * chips // blocks))
    return 2 ** (most.bit_length() - 1)


def backward(
    call: TritonCall, grad: Tensor, out: Tensor, lse: Tensor, needs: OperatorCall
) -> list[Tensor]:
    """Gradients of all tensors of the operator in their order; `needs` says whose statistics' and parameters' count."""
    made, like = call.emitted, call.query
    grad = lined(grad.to(call.value.dtype))  # products are of that dtype
    shape, key_shape = (call.batch, call.heads, call.n), (call.batch, call.heads, call.m)
    by_key = (
        None if call.heads == call.kv_heads else torch.float32
    )  # for shared keys one sum of each query head
    d_query = torch.empty_like(like, memory_format=torch.contiguous_format)
    d_key, d_value = (
        t.new_zeros((*key_shape, t.shape[-1]), dtype=by_key) for t in (call.key, call.value)
    )
    rows = made.rows if any(needs.row) else ()
    columns = made.columns if any(needs.column) else ()
    heads = made.heads if any(needs.head) else ()
    row_factor, column_factor = (
        int(bool(needs.extras.get(n, False))) for n in ("query_factor", "key_factor")
    )
    new = lambda *shape: like.new_zeros(shape, dtype=torch.float32)
    d_row, d_column = (
        new(*shape, len(rows) + row_factor),
        new(*key_shape, len(columns) + column_factor),
    )
    d_head = new(len(heads), *shape)
    if call.empty:
        d_query.zero_()
    else:
        # of each query: its statistics, its factor, and what the first kernel leaves there for the second
        record = new(*shape, call.row.shape[-1] + (2 if call.fused else 3))
        record[..., : call.row.shape[-1]] = call.row
        shared = call.numbers() | {
            "GRAD": strided(grad),
            "SLOPES": call.functions["slopes"],
            "RECORD": record,
        }
        by_row: dict = {
            "SINKS": call.sinks,
            "OUT": out,
            "LSE": lse,
            "D_Q": d_query,
            "D_ROW": d_row,
            "D_HEAD": d_head,
        }
        by_row |= {
            "D_ROWS": len(rows),
            "D_FACTORS": row_factor,
            "D_HEADS": len(heads),
            "row_step": lse[0].numel(),
        }
        by_column: dict = {"D_K": d_key, "D_V": d_value, "D_COLUMN": d_column}
        by_column |= {"D_COLUMNS": len(columns), "D_FACTORS": column_factor}
        with on(like.device):
            call.run(
                "query", attention_backward_query, shape, shared | by_row, call.column.shape[-1]
            )
            call.run("key", attention_backward_key, key_shape, shared | by_column, record.shape[-1])
    d_key, d_value = (
        shared_sum(d, call.kv_heads).to(t.dtype)
        for d, t in ((d_key, call.key), (d_value, call.value))
    )
    by_name: dict[str, Tensor] = {}
    if row_factor:
        by_name["query_factor"] = d_row[..., -1].clone()
    if column_factor:
        by_name["key_factor"] = shared_sum(d_column[..., -1], call.kv_heads).clone()
    if "sinks" in call.a.extras:
        weight = torch.exp(call.a.extras["sinks"][:, None] - lse[0]) * lse[1]
        by_name["sinks"] = -(weight * (grad * out).sum(-1)).sum((0, 2))
    extras = call.a.extras.items()
    return [
        *(d_query, d_key, d_value),
        *unpacked(d_row, rows, call.a.row),
        *unpacked(d_column, columns, call.a.column),
        *unpacked(d_head.sum((1, 3), dtype=torch.float64).float().mT, heads, call.a.head),
        *(
            by_name.get(n, t.new_zeros(t.shape if n in LEARNED else 0, dtype=torch.float32))
            for n, t in extras
        ),
    ]


def unpacked(gradients: Tensor, places: tuple[int, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of these statistics [B, H or Hkv, L] or parameters [H]: of those at these places they lie side by
    side in [..., k], those of others are 0.
    """
    by_place = dict(
        zip(places, gradients.unbind(-1), strict=False)
    )  # after them may come that of a factor
    return [
        (shared_sum(by_place[i], t.shape[1]) if t.dim() > 1 else by_place[i]).clone()
        if i in by_place
        else torch.zeros_like(t, dtype=torch.float32)
        for i, t in enumerate(tensors)
    ]


def shared_sum(t: Tensor, heads: int) -> Tensor:
    """Summed over the query heads [B, H, ...] that share one of `heads`."""
    return t if t.shape[1] == heads else t.unflatten(1, (heads, -1)).sum(2)
