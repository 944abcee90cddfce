"""Norms of rows in one pass and without copies: what most scores need of queries and keys beside their product."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import library
from .calls import LONG, POINTER, Matrix, address, matrix

DTYPES = (torch.float32, torch.bfloat16)
#: Up to this many numbers plain torch is as fast.
SMALL = 4096


def squared_norms(x: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """The sums of the squares of the first `width` numbers of each row of x, [B, H, L] of [B, H, L, d]."""
    if compiled(x, dtype):
        return _norms(x, x.shape[-1] if width is None else width, False)
    return x[..., :width].to(dtype).square().sum(-1)


def norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of each row, [B, H, L] of [B, H, L, d]; no square overflows or underflows."""
    if compiled(x, dtype):
        return _norms(x, x.shape[-1], True)
    x = x.to(dtype)
    size = x.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    return torch.linalg.vector_norm(x / size, dim=-1) * size.squeeze(-1)


def compiled(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves; for a few rows it does not pay."""
    if not torch.compiler.is_compiling() and x.numel() <= SMALL:
        return False
    return x.device.type == "cpu" and x.dtype in DTYPES and dtype == torch.float32 and _ready()


@torch.compiler.assume_constant_result
def _ready() -> bool:
    return library.core() is not None


class NormCall(ctypes.Structure):
    """`struct NormCall` of norms.h."""

    _fields_ = [
        ("rows", Matrix),
        *((name, LONG) for name in ("half", "batch", "heads", "length", "width", "all", "root", "threads")),
        *((name, POINTER) for name in ("norms", "grad", "to")),
    ]


def call_of(
    x: Tensor, width: int, root: bool, out: Tensor, grad: Tensor | None = None, to: Tensor | None = None
):
    """The structure, by reference."""
    half, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
    call = NormCall(
        matrix(x), half, *x.shape[:3], width, x.shape[3], root, threads, *map(address, (out, grad, to))
    )
    return ctypes.byref(call)


def consecutive(x: Tensor) -> Tensor:
    """The tensor with consecutive numbers in its last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("hf_hyperattn::cpu_norms", mutates_args=())
def _norms(x: Tensor, width: int, root: bool) -> Tensor:
    x = consecutive(x)
    out = x.new_empty(x.shape[:3], dtype=torch.float32)
    library.core().hyper_norms(call_of(x, width, root, out))
    return out


@_norms.register_fake
def _(x, width, root):
    return x.new_empty(x.shape[:3], dtype=torch.float32)


@torch.library.custom_op("hf_hyperattn::cpu_norms_backward", mutates_args=())
def _norms_backward(grad: Tensor, x: Tensor, out: Tensor, width: int, root: bool) -> Tensor:
    x, grad = consecutive(x), grad.contiguous()
    to = torch.empty_like(x, memory_format=torch.contiguous_format)
    library.core().hyper_norms_backward(call_of(x, width, root, out, grad, to))
    return to


@_norms_backward.register_fake
def _(grad, x, out, width, root):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    x, ctx.width, ctx.root = inputs
    ctx.save_for_backward(x, output)


def _pullback(ctx, grad):
    return _norms_backward(grad, *ctx.saved_tensors, ctx.width, ctx.root), None, None


_norms.register_autograd(_pullback, setup_context=_save)
