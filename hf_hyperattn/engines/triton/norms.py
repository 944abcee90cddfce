"""The norms of rows in one pass: see `norms` and `squared_norms` of engines/cpu/kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import padded
from .launch import on

#: Numbers of a program.
NUMBERS = 8192


@triton.jit
def place_of(row, heads, length, strides):
    """Where rows begin, of [batch, heads, length] of them."""
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
    """OUT [rows]: norms of the rows' first WIDTH numbers, without ROOT their squares."""
    row, width = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    there = row < rows
    pointers = X + place_of(row, heads, length, strides)[:, None] + width
    x = tl.load(pointers, mask=there[:, None] & (width < WIDTH), other=0.0).to(tl.float32)
    if ROOT:  # no square overflows or underflows
        size = tl.max(tl.abs(x), 1)
        size = tl.where(size > 0, size, 1.0)
        x = x / size[:, None]
        norm = tl.sqrt(tl.sum(x * x, 1)) * size
    else:
        norm = tl.sum(x * x, 1)
    tl.store(OUT + row, norm, mask=there)


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
    """TO [rows, ALL]: the gradient of rows; 0 of a row of zeros, as torch has it, and beyond WIDTH."""
    row, width = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    there = row < rows
    pointers = X + place_of(row, heads, length, strides)[:, None] + width
    x = tl.load(pointers, mask=there[:, None] & (width < WIDTH), other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row, mask=there, other=0.0)[:, None]
    if ROOT:
        norm = tl.load(OUT + row, mask=there, other=0.0)[:, None]
        d_x = tl.where(norm == 0, 0.0, x / norm * grad)
    else:
        d_x = 2 * x * grad
    tl.store(TO + row.to(tl.int64)[:, None] * ALL + width, d_x, mask=there[:, None] & (width < ALL))


def sizes(x: Tensor, width: int, root: bool) -> tuple[int, tuple, dict]:
    """How many programs, and what both kernels are given: strides and shape, and constants with the number of warps."""
    batch, heads, length, everything = x.shape
    wide = padded(everything)
    lines = max(1, NUMBERS // wide)
    shape = x.stride()[:3], batch * heads * length, heads, length
    constants = {"WIDTH": width, "ROOT": root, "BD": wide, "BR": lines, "num_warps": 8}
    return int(triton.cdiv(shape[1], lines)), shape, constants


def forward(x: Tensor, width: int, root: bool, out: Tensor) -> None:
    """Write the norms of `x` [B, H, L, d], rows contiguous, to `out` [B, H, L]."""
    programs, shape, constants = sizes(x, width, root)
    if programs:
        with on(x.device):
            norms_forward[(programs,)](x, out, *shape, **constants)


def backward(grad: Tensor, x: Tensor, out: Tensor, width: int, root: bool, to: Tensor) -> None:
    """Write the gradient of `x` to `to`, contiguous, from that of the norms `out`."""
    programs, shape, constants = sizes(x, width, root)
    if programs:
        with on(x.device):
            norms_backward[(programs,)](
                grad, x, out, to, *shape, **constants, **{"ALL": x.shape[-1]}
            )
