"""Launch the Triton kernels: from an operator's tensors to programs and back.

Here you learn how the arguments of the kernels are laid out in memory, and when keys are split.
"""

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
from .arithmetic import compile_function
from .backward import attention_backward_key, attention_backward_query
from .configs import Config, list_configs, pad_width, run_tuned, tile_for_few_queries
from .forward import attention_forward, combine_parts
from .tile import INTERPRETED

if INTERPRETED.value:
    from . import interpreter  # noqa: F401  # repairs Triton's interpreter

#: Largest number of rows that share a key head in one program; then keys are split (decoding).
FEW = 64
#: Smallest number of keys of a part.
PART = 256
#: Largest number of parts of a sequence.
MOST_PARTS = 64


class TritonCall:
    """The arguments of an operator in the layout that the kernels read.

    The statistics of a row or a column lie next to each other, so that a kernel loads them as one
    tile.

    Args:
        operator_call: The operator's arguments by name.
    """

    def __init__(self, operator_call: OperatorCall):
        self.operator_call = operator_call
        self.options = operator_call.options
        self.query = make_rows_dense(operator_call.query)
        self.key = make_rows_dense(operator_call.key)
        self.value = make_rows_dense(operator_call.value)
        self.batch, self.heads, self.n, self.d = self.query.shape
        self.kv_heads, self.m = self.key.shape[1:3]
        self.dv = self.value.shape[-1]
        #: Whether there is nothing to compute.
        self.empty = 0 in (self.batch, self.heads, self.n, self.m, self.dv)

        extras = operator_call.extras
        self.mask, self.bias, self.seed = extras.get("mask"), extras.get("bias"), extras.get("seed")
        self.sinks = extras["sinks"].contiguous() if "sinks" in extras else None
        self._stack_statistics()

        capped = self.options.softcap is not None
        self.emitted = emit_functions(operator_call.score_key, capped)
        self.functions = compile_functions(operator_call.score_key, capped)
        #: Whether the score reads squared distances.
        self.measures = "is_inexact" in self.functions
        # Fused weights fail for logits of about -3.4e38 (`tile.compute_weights`), which additive
        # masks and biases may make.
        added = self.bias is not None or (self.mask is not None and self.mask.dtype != torch.bool)
        self.fused = not added and not INTERPRETED.value

        # Tile sizes depend on both padded widths, and on the bytes of a number.
        widths = pad_width(self.d), pad_width(self.dv)
        item = max(self.query.element_size(), self.value.element_size())
        self.size = max(widths), item
        self.narrowest = min(widths)

    def _stack_statistics(self) -> None:
        """Stack statistics along a last axis, and parameters of heads along a first one."""
        given = self.operator_call
        self.factored = "query_factor" in given.extras
        row, column = given.row, given.column
        if self.factored:
            row = [*row, given.extras["query_factor"]]
            column = [*column, given.extras["key_factor"]]
        # One tensor holds all statistics of keys. If one has a value per query head, all get one.
        if any(t.shape[1] != self.kv_heads for t in column):
            column = [repeat_heads(t, self.heads) for t in column]
        self.row = stack_numbers(row, -1, (self.batch, self.heads, self.n, 0), self.query)
        self.column = stack_numbers(column, -1, (self.batch, self.kv_heads, self.m, 0), self.query)
        self.head = stack_numbers(given.head, 0, (0, self.heads), self.query)

    def shared_arguments(self) -> dict:
        """Return the arguments that all kernels take, by name."""
        functions, options = self.functions, self.options
        shape = (self.batch, self.heads, self.n, self.m)
        mask, bias = (None if t is None else t.expand(shape) for t in (self.mask, self.bias))
        truth = mask is not None and mask.dtype == torch.bool
        if mask is not None and truth:
            mask = mask.view(torch.uint8)
        return {
            "Q": with_strides(self.query),
            "K": with_strides(self.key),
            "V": with_strides(self.value),
            "NUMBERS": (self.row, self.column, self.head),
            "MASKS": (with_pair_strides(mask), with_pair_strides(bias)),
            "SEED": self.seed,
            "heads": self.heads,
            "n": self.n,
            "m": self.m,
            "column_heads": self.column.shape[1],
            "offset": options.offset,
            "window": options.window or 0,
            # None removes the multiplication from the kernel.
            "scale": None if self.operator_call.scale == 1 else self.operator_call.scale,
            "softcap": options.softcap or 0.0,
            "dropout": options.dropout_p,
            "SCORE": functions["score"],
            "DISTANCE": functions.get("by_product"),
            "INEXACT": functions.get("is_inexact"),
            "MARGIN": functions.get("margin"),
            "BOUND": functions.get("bound"),
            "POINTS": functions.get("factors"),
            "SLACK": estimate_slack(self.d, self.query.element_size()),
            **dict.fromkeys(("SPLIT_ROW", "SPLIT_COLUMN", "SPLIT")),
            "ROWS": self.row.shape[-1] - self.factored,
            "COLUMNS": self.column.shape[-1] - self.factored,
            "HEADS": self.head.shape[0],
            "FACTORS": int(self.factored),
            "FUSED": self.fused,
            "D": self.d,
            "W": self.operator_call.width,
            "DV": self.dv,
            "P": self.operator_call.width - self.emitted.left_out,
            "GROUP": self.heads // self.kv_heads,
            "CAUSAL": options.is_causal,
            "WINDOWED": options.window is not None,
            "TRUTH": truth,
            "BD": pad_width(self.d),
            "BDV": pad_width(self.dv),
        }

    def split_arguments(self) -> dict:
        """Return the arguments of kernels that read a separable term as products."""
        layout, functions = self.emitted.split, self.functions
        if layout is None:
            return {}
        return {
            "SCORE": functions["split_score"],
            "SPLIT_ROW": functions["split_row"],
            "SPLIT_COLUMN": functions["split_column"],
            "SPLIT": (layout.row_at, layout.column_at, layout.columns, layout.rows),
        }

    def run_kernel(
        self,
        name: str,
        kernel,
        lines: tuple[int, int, int],
        arguments: dict,
        numbers: int,
        first: dict,
    ) -> None:
        """Launch a kernel with the best config for this kind of call.

        Args:
            name: "forward", "query" or "key"; see configs.py.
            kernel: The Triton function.
            lines: Batch elements, heads, and rows or columns that are shared out to programs.
            arguments: Arguments of the kernel, without the config.
            numbers: Statistics of each line that a program walks over.
            first: Arguments that are different in the first of two runs.
        """
        layout = self.emitted.split
        split_numbers = 0
        if layout is not None:
            split_numbers = (
                layout.rows
                if name == "key"
                else layout.columns
                if name == "forward"
                else max(layout.columns, layout.sums)
            )
        twice = self.measures or layout is not None

        def launch_config(config: Config) -> None:
            own, walked = config.rows, config.columns
            if name == "key":
                own, walked = walked, own
            programs = int(triton.cdiv(lines[2], own)) * lines[0] * lines[1]
            # Some kernels run twice, see `tile.can_skip_program`.
            doubt = self.query.new_empty(programs, dtype=torch.int32) if twice else None
            for careful in (False, True) if twice else (False,):
                kernel[(programs,)](
                    **(arguments if careful else arguments | first),
                    DOUBT=doubt,
                    CAREFUL=careful,
                    PACK=choose_pack(numbers, walked, config.warps),
                    SPLIT_PACK=fit_pack(split_numbers, walked, config.warps),
                    BM=config.rows,
                    BN=config.columns,
                    num_warps=config.warps,
                    num_stages=config.stages,
                )

        configs = list_configs(name, *self.size, self.narrowest)
        run_tuned(self._describe_kind(name), configs, launch_config)

    def _describe_kind(self, name: str) -> tuple:
        """Return what the best config of a kernel depends on."""
        optional = (self.options.window, self.mask, self.bias, self.seed)
        return (
            name,
            self.operator_call.score_key,
            self.size,
            self.narrowest,
            self.query.dtype,
            self.value.dtype,
            self.query.device,
            self.options.is_causal,
            self.n >= 1024,
            *(x is None for x in optional),
        )


@lru_cache(maxsize=256)
def compile_functions(score_key: str, capped: bool) -> dict[str, Callable]:
    """Return the Triton functions of a score by name; see `Emitted`."""
    owner = f"{score_key}{' capped' * capped}"
    texts = emit_functions(score_key, capped).texts
    return {name: compile_function(owner, name, text) for name, text in texts.items()}


def stack_numbers(
    numbers: Sequence[Tensor], axis: int, none: tuple[int, ...], like: Tensor
) -> Tensor:
    """Stack tensors as float32 along a new axis, or return an empty tensor.

    Args:
        numbers: The tensors.
        axis: The new axis.
        none: Shape of the result if there are no tensors.
        like: A tensor on the device of the result.
    """
    numbers = [t.float() for t in numbers]
    return torch.stack(numbers, axis) if numbers else like.new_empty(none, dtype=torch.float32)


def choose_pack(numbers: int, lines: int, warps: int) -> int:
    """Return PACK, the width of the tile in which `tile.load_records` loads numbers.

    Args:
        numbers: Numbers of a line.
        lines: Lines of a tile.
        warps: Warps of a program.
    """
    return 1 if numbers > 16 else fit_pack(numbers, lines, warps)


def fit_pack(numbers: int, lines: int, warps: int) -> int:
    """Return the width of a tile that holds the numbers of each line; at most 16 of them.

    The arguments are as in `choose_pack`.
    """
    fitting = int(triton.next_power_of_2(max(1, numbers)))
    # If a tile has fewer elements than there are threads (32 per warp), the compiler loads number
    # by number after all.
    filling = 32 * warps // lines
    return min(16, max(2, fitting, filling))


def estimate_slack(width: int, item: int) -> float:
    """Return the rounding error of |q|² + |k|² - 2 q·k where q = k.

    The unit is 4 eps |q|², with the eps of float32.

    Args:
        width: Components of a vector.
        item: Bytes of a component.
    """
    # 1 for the norms and factors. The rest is for tensor cores: they cut off what falls below the
    # last place of a growing sum, half a unit on average per 8 numbers they add (4 in float32),
    # always in the same direction (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021).
    return 1 + width / (64 if item == 2 else 32)


def make_rows_dense(t: Tensor) -> Tensor:
    """Return the tensor with the components of each vector side by side in memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def with_strides(t: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return vectors as the kernels take them: the tensor and three strides."""
    return t, t.stride()[:3]


def with_pair_strides(t: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return a mask or bias as the kernels take it: with four strides, 0 without one."""
    return (None, (0, 0, 0, 0)) if t is None else (t, t.stride())


def use_device(device: torch.device):
    """Return a context that makes the device current: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward(call: TritonCall) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Returns:
        The output, float32 [B, H, N, dv], and the sums of rows, float32 [2, B, H, N]; see
        `forward.store_sums`. Rows that see nothing have an output of 0 and a first sum of +inf.
    """
    like, shape = call.query, (call.batch, call.heads, call.n)
    out = like.new_empty(*shape, call.dv, dtype=torch.float32)
    # Ones: with fused weights the kernel leaves the second half as it is, and the gradient of sinks
    # multiplies with it.
    lse = like.new_ones(2, *shape, dtype=torch.float32)
    if call.empty:
        return out.zero_(), lse.fill_(float("inf"))
    arguments = call.shared_arguments() | {"SINKS": call.sinks, "row_step": lse[0].numel()}
    arguments["SHARED"] = call.column.shape[1] == call.kv_heads
    lines = call.n * call.heads // call.kv_heads
    with use_device(like.device):
        if lines <= FEW and call.m >= 2 * PART:
            forward_in_parts(call, arguments, lines, out, lse)
        else:
            arguments |= {"OUT": out, "LSE": lse, "SUM": None, "PACKED": False, "PARTS": 1}
            numbers, first = call.column.shape[-1], call.split_arguments()
            call.run_kernel("forward", attention_forward, shape, arguments, numbers, first)
    return out, lse


def forward_in_parts(
    call: TritonCall, arguments: dict, lines: int, out: Tensor, lse: Tensor
) -> None:
    """Compute attention for few queries against many keys.

    Rows that share a key head share a program, and programs share the keys.

    Args:
        call: The call.
        arguments: Arguments of the forward kernel, to which this function adds.
        lines: Rows that share a key head.
        out, lse: Written.
    """
    rows = 16 if lines <= 16 else 32
    blocks = call.batch * call.kv_heads * int(triton.cdiv(lines, rows))
    parts = count_parts(call.m, blocks, out.device)
    part_out, part_top = out, lse
    part_sum: Tensor | None = None
    if parts > 1:
        part_out = out.new_empty(parts, *out.shape)
        part_top = lse.new_empty(parts, *lse[0].shape)
        part_sum = torch.empty_like(part_top)
    arguments |= {"OUT": part_out, "LSE": part_top, "SUM": part_sum}
    arguments |= {"PACKED": True, "PARTS": parts}
    # Careful at once: for so few rows a second launch takes longer than the branch that it avoids.
    arguments |= {"DOUBT": None, "CAREFUL": call.measures}
    columns, stages = tile_for_few_queries(*call.size)
    # Any: a launch takes arguments of its own, which the functions do not declare.
    kernels: tuple[Any, Any] = attention_forward, combine_parts
    kernels[0][(blocks * parts,)](
        **arguments,
        PACK=choose_pack(call.column.shape[-1], columns, 4),
        SPLIT_PACK=2,
        BM=rows,
        BN=columns,
        num_warps=4,
        num_stages=stages,
    )
    if parts > 1:
        row_count = lse[0].numel()
        kernels[1][(row_count,)](
            OUT=out,
            LSE=lse,
            SUM=part_sum,
            PART_OUT=part_out,
            PART_TOP=part_top,
            row_step=row_count,
            PARTS=parts,
            FUSED=call.fused,
            DV=call.dv,
            BP=triton.next_power_of_2(parts),
            BDV=arguments["BDV"],
        )


def count_parts(keys: int, blocks: int, device: torch.device) -> int:
    """Return the number of parts that keys are split into, a power of two."""
    multiprocessors = 8
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    # About two programs for each multiprocessor keep all of them busy.
    most = max(1, min(MOST_PARTS, keys // PART, 2 * multiprocessors // blocks))
    return 2 ** (most.bit_length() - 1)


class Gradients:
    """The tensors that the backward kernels write, zeros at first.

    Args:
        call: The call.
        needs: For each tensor of the operator, whether it needs a gradient.

    Attributes:
        rows, columns, heads: Places of the statistics and parameters that get gradients.
        row_factor, column_factor: 1 if the factors of queries or keys get gradients, else 0.
        query, key, value: [B, H, N, d], [B, H, M, d] and [B, H, M, dv].
        row, column, head: float32 [B, H, N, rows + factor], [B, H, M, columns + factor] and [heads,
            B, H, N].
    """

    def __init__(self, call: TritonCall, needs: OperatorCall):
        places = call.emitted
        self.rows = places.rows if any(needs.row) else ()
        self.columns = places.columns if any(needs.column) else ()
        self.heads = places.heads if any(needs.head) else ()
        self.row_factor = int(bool(needs.extras.get("query_factor", False)))
        self.column_factor = int(bool(needs.extras.get("key_factor", False)))

        shape = (call.batch, call.heads, call.n)
        key_shape = (call.batch, call.heads, call.m)
        # Shared keys get one gradient per query head. These are summed later, so they stay in
        # float32 until then.
        dtype = None if call.heads == call.kv_heads else torch.float32
        self.query = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        self.key = call.key.new_zeros((*key_shape, call.d), dtype=dtype)
        self.value = call.value.new_zeros((*key_shape, call.dv), dtype=dtype)
        rows, columns = len(self.rows) + self.row_factor, len(self.columns) + self.column_factor
        self.row = call.query.new_zeros((*shape, rows), dtype=torch.float32)
        self.column = call.query.new_zeros((*key_shape, columns), dtype=torch.float32)
        self.head = call.query.new_zeros((len(self.heads), *shape), dtype=torch.float32)


def backward(
    call: TritonCall, grad: Tensor, out: Tensor, lse: Tensor, needs: OperatorCall
) -> list[Tensor]:
    """Compute the gradients of all tensors of the operator.

    Args:
        call: The call.
        grad: Gradient of the output, [B, H, N, dv].
        out, lse: Results of `forward`.
        needs: For each tensor of the operator, whether it needs a gradient. Only statistics and
            parameters are skipped.

    Returns:
        The gradients in the order of the operator's tensors; empty for extras that have none.
    """
    # The kernels multiply in the dtype of the values.
    grad = make_rows_dense(grad.to(call.value.dtype))
    gradients = Gradients(call, needs)
    if call.empty:
        gradients.query.zero_()
    else:
        run_backward_kernels(call, gradients, grad, out, lse)

    given = call.operator_call
    # Summed in float64: the gradient of a parameter sums over all rows, and most terms cancel.
    d_head = gradients.head.sum((1, 3), dtype=torch.float64).float().mT
    return [
        gradients.query,
        sum_shared_heads(gradients.key, call.kv_heads).to(call.key.dtype),
        sum_shared_heads(gradients.value, call.kv_heads).to(call.value.dtype),
        *unstack_gradients(gradients.row, gradients.rows, given.row),
        *unstack_gradients(gradients.column, gradients.columns, given.column),
        *unstack_gradients(d_head, gradients.heads, given.head),
        *list_extra_gradients(call, gradients, grad, out, lse),
    ]


def list_split_arguments(
    call: TritonCall, gradients: Gradients
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the first run of each backward kernel: query and key.

    In it, a separable term of the score is a sum of products.
    """
    by_row, by_column = call.split_arguments(), call.split_arguments()
    layout = call.emitted.split
    if layout is None:
        return by_row, by_column
    by_row["SLOPES"] = by_column["SLOPES"] = call.functions["split_slopes"]
    if gradients.heads:
        by_row |= {
            "D_HEADS": len(gradients.heads) - layout.heads,
            "SPLIT_HEADS": layout.heads,
            "SPLIT_SUMS": layout.sums,
            "SPLIT_ONES": layout.constants,
            "PULL": call.functions["pull_split"],
        }
    return by_row, by_column


def run_backward_kernels(
    call: TritonCall, gradients: Gradients, grad: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Launch both backward kernels, which write `gradients`.

    The other arguments are as in `backward`.
    """
    shape, key_shape = (call.batch, call.heads, call.n), (call.batch, call.heads, call.m)
    # A record holds what the key kernel reads of a row: its statistics, its factor, and 2 or 3
    # numbers that the query kernel appends.
    width = call.row.shape[-1]
    record = grad.new_zeros((*shape, width + (2 if call.fused else 3)), dtype=torch.float32)
    record[..., :width] = call.row
    shared = call.shared_arguments() | {
        "GRAD": with_strides(grad),
        "SLOPES": call.functions["slopes"],
        "RECORD": record,
    }
    by_row = {
        "SINKS": call.sinks,
        "OUT": out,
        "LSE": lse,
        "D_Q": gradients.query,
        "D_ROW": gradients.row,
        "D_HEAD": gradients.head,
        "D_ROWS": len(gradients.rows),
        "D_FACTORS": gradients.row_factor,
        "D_HEADS": len(gradients.heads),
        "SPLIT_HEADS": 0,
        "SPLIT_SUMS": 0,
        "SPLIT_ONES": 0,
        "PULL": None,
        "row_step": lse[0].numel(),
    }
    by_column = {
        "D_K": gradients.key,
        "D_V": gradients.value,
        "D_COLUMN": gradients.column,
        "D_COLUMNS": len(gradients.columns),
        "D_FACTORS": gradients.column_factor,
    }
    first_by_row, first_by_column = list_split_arguments(call, gradients)
    # The query kernel first: the key kernel reads the record that it completes.
    with use_device(grad.device):
        call.run_kernel(
            "query",
            attention_backward_query,
            shape,
            shared | by_row,
            call.column.shape[-1],
            first_by_row,
        )
        call.run_kernel(
            "key",
            attention_backward_key,
            key_shape,
            shared | by_column,
            record.shape[-1],
            first_by_column,
        )


def list_extra_gradients(
    call: TritonCall, gradients: Gradients, grad: Tensor, out: Tensor, lse: Tensor
) -> list[Tensor]:
    """Return the gradients of the operator's extras in their order.

    Extras that cannot learn get an empty tensor, and those that ask for no gradient get zeros. The
    arguments are as in `run_backward_kernels`.
    """
    extras = call.operator_call.extras
    by_name: dict[str, Tensor] = {}
    if gradients.row_factor:
        by_name["query_factor"] = gradients.row[..., -1].clone()
    if gradients.column_factor:
        by_name["key_factor"] = sum_shared_heads(gradients.column[..., -1], call.kv_heads).clone()
    if "sinks" in extras:
        # A sink has no value, so its logit's gradient is its weight times minus the row's sum of
        # GRAD * OUT.
        weight = torch.exp(extras["sinks"][:, None] - lse[0]) * lse[1]
        by_name["sinks"] = -(weight * (grad * out).sum(-1)).sum((0, 2))
    for name, t in extras.items():
        if name not in by_name:
            shape = t.shape if name in LEARNED else 0
            by_name[name] = t.new_zeros(shape, dtype=torch.float32)
    return [by_name[name] for name in extras]


def unstack_gradients(
    gradients: Tensor, places: tuple[int, ...], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Return one gradient for each statistic [B, H or Hkv, L] or parameter [H].

    Args:
        gradients: [..., k], the gradients of the tensors at `places`; gradients of a factor may
            follow.
        places: Indices of the tensors that have gradients. The others get zeros.
        tensors: The statistics or parameters.
    """
    # Not strict: the gradient of a factor has no place.
    by_place = dict(zip(places, gradients.unbind(-1), strict=False))
    found = []
    for i, t in enumerate(tensors):
        if i not in by_place:
            found.append(torch.zeros_like(t, dtype=torch.float32))
        elif t.dim() > 1:
            found.append(sum_shared_heads(by_place[i], t.shape[1]).clone())
        else:
            found.append(by_place[i].clone())
    return found


def sum_shared_heads(t: Tensor, heads: int) -> Tensor:
    """Sum [B, H, ...] over the query heads that share one of `heads`."""
    return t if t.shape[1] == heads else t.unflatten(1, (heads, -1)).sum(2)
