"""Triton kernels for the norms of rows, which read each number once.

Here you learn how `norms` and `squared_norms` of engines/cpu/kernels.py are computed on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import pad_width
from .launch import use_device

# Tiles of both kernels: x [BR, BD] in float32, BR rows and the components of a row, padded to BD;
# norm and row [BR].

#: Numbers that a program reads.
NUMBERS = 8192


@triton.jit
def locate_rows(row, heads, length, strides):
    """Return the offset of each row of a tensor [batch, heads, length, ..]."""
    b, h, i = row // (heads * length), row // length % heads, row % length
    return b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + i.to(tl.int64) * strides[2]


@triton.jit(do_not_specialize=["rows", "length"])
def norms_forward(
    X,
    OUT,
    strides,
    rows,
    heads,
    length,
    WIDTH: tl.constexpr,
    ROOT: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """Write the norm of the first WIDTH numbers of each row, or its square, to OUT.

    Squares are written if ROOT is False.
    """
    # Load.
    row, width = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    valid = row < rows
    pointers = X + locate_rows(row, heads, length, strides)[:, None] + width
    x = tl.load(pointers, mask=valid[:, None] & (width < WIDTH), other=0.0).to(tl.float32)

    # Accumulate and store.
    if ROOT:
        # Divided by the largest number, no square overflows or underflows.
        size = tl.max(tl.abs(x), 1)
        size = tl.where(size > 0, size, 1.0)
        x = x / size[:, None]
        norm = tl.sqrt(tl.sum(x * x, 1)) * size
    else:
        norm = tl.sum(x * x, 1)
    tl.store(OUT + row, norm, mask=valid)


@triton.jit(do_not_specialize=["rows", "length"])
def norms_backward(
    GRAD,
    X,
    OUT,
    TO,
    strides,
    rows,
    heads,
    length,
    WIDTH: tl.constexpr,
    ALL: tl.constexpr,
    ROOT: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """Write the gradient of the rows to TO [rows, ALL]; 0 beyond WIDTH."""
    # Load.
    row, width = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    valid = row < rows
    pointers = X + locate_rows(row, heads, length, strides)[:, None] + width
    x = tl.load(pointers, mask=valid[:, None] & (width < WIDTH), other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row, mask=valid, other=0.0)[:, None]

    # Differentiate and store.
    if ROOT:
        norm = tl.load(OUT + row, mask=valid, other=0.0)[:, None]
        # The gradient of a row of zeros is 0, as in torch.
        d_x = tl.where(norm == 0, 0.0, x / norm * grad)
    else:
        d_x = 2 * x * grad
    tl.store(TO + row.to(tl.int64)[:, None] * ALL + width, d_x, mask=valid[:, None] & (width < ALL))


def plan_launch(x: Tensor, width: int, root: bool) -> tuple[int, tuple, dict]:
    """Return the number of programs, and the arguments that both kernels share.

    Returns:
        The number of programs, the strides and the shape of `x`, and the constants with the number
        of warps.
    """
    batch, heads, length, everything = x.shape
    wide = pad_width(everything)
    lines = max(1, NUMBERS // wide)
    rows = batch * heads * length
    shape = x.stride()[:3], rows, heads, length
    constants = {"WIDTH": width, "ROOT": root, "BD": wide, "BR": lines, "num_warps": 8}
    return int(triton.cdiv(rows, lines)), shape, constants


def write_norms(x: Tensor, width: int, root: bool, out: Tensor) -> None:
    """Write the norms of the rows of `x` [B, H, L, d] to `out` [B, H, L].

    Args:
        x: The rows, each contiguous.
        width: Numbers of a row that count.
        root: Whether to write norms; otherwise their squares.
        out: Written, float32.
    """
    programs, shape, constants = plan_launch(x, width, root)
    # A GPU cannot launch 0 programs.
    if programs:
        with use_device(x.device):
            norms_forward[(programs,)](x, out, *shape, **constants)


def write_gradient(
    grad: Tensor, x: Tensor, out: Tensor, width: int, root: bool, to: Tensor
) -> None:
    """Write the gradient of `x` to the contiguous tensor `to`.

    Args:
        grad: Gradient of the norms.
        x, width, root: As in `write_norms`.
        out: The norms.
        to: Written, in the shape of `x`.
    """
    programs, shape, constants = plan_launch(x, width, root)
    if programs:
        with use_device(x.device):
            norms_backward[(programs,)](
                grad, x, out, to, *shape, **constants, **{"ALL": x.shape[-1]}
            )
