"""The norms of rows, which statistics of queries and keys are made of, in one pass on the CPU and on a GPU."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..readable import is_exporting, is_transformed
from . import native, serialize, triton
from .cpu import library

#: `struct NormCall`.
NORMS = struct.Struct("P3q 8q 3P")
#: Up to this many numbers the norms of rows are as fast in plain torch.
SMALL = 4096


def norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of each row, [B, H, L] of [B, H, L, d]; no square overflows or underflows."""
    if norms_compiled(x, dtype):
        return row_norms(x, x.shape[-1], True)
    x = x.to(dtype)
    size = x.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    return torch.linalg.vector_norm(x / size, dim=-1) * size.squeeze(-1)


def squared_norms(vectors: Sequence[Tensor], dtype: torch.dtype, width: int) -> list[Tensor]:
    """The sums of the squares of the first `width` numbers of each row, [B, H, L] for each tensor [B, H, L, d]."""
    squares: list[Tensor] = []
    direct: Any = None
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not recorded and _get_current_dispatch_mode() is None and forward_ad._current_level < 0:
        direct = library.CORES.get(os.environ.get(native.SETTING))
    for x in vectors:
        # while tracing no question about lengths, which would be a guard
        raw = direct is not None and dtype == torch.float32 and x.dtype in serialize.RAW_DTYPES and type(x) is Tensor
        learns = x.requires_grad and torch.is_grad_enabled()
        if not raw or learns or x.numel() <= SMALL or x.device.type != "cpu" or is_functorch_wrapped_tensor(x):
            squares.append(_squared_norms(x, dtype, width))
            continue
        x = x if x.stride(-1) == 1 else x.contiguous()  # as the operator does it, without its overhead
        squares.append(x.new_empty(x.shape[:3], dtype=torch.float32))
        half, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
        numbers = half, *x.shape[:3], width, x.shape[3], False, threads
        call = NORMS.pack(x.data_ptr(), *x.stride()[:3], *numbers, squares[-1].data_ptr(), 0, 0)
        direct.hyper_norms(call)  # type: ignore[union-attr]  # `raw` says that it is there
    return squares


def _squared_norms(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    if norms_compiled(x, dtype):
        return row_norms(x, width, False)
    return x[..., :width].to(dtype).square().sum(-1)


def norms_compiled(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves; for a few rows it does not pay, and an exported program has none."""
    if is_exporting() or is_transformed():
        return False
    if not torch.compiler.is_compiling() and x.numel() <= SMALL:
        return False
    if dtype != torch.float32 or x.dtype not in (*serialize.RAW_DTYPES, torch.float16):
        return False
    if x.is_cuda:
        return triton.obstacle_of_device(x.device.type, x.device.index) is None
    return x.device.type == "cpu" and x.dtype != torch.float16 and library.core_is_ready()


def pack_norms(x: Tensor, width: int, root: bool, out: Tensor, grad: Tensor | None = None, to: Tensor | None = None):
    """`struct NormCall`."""
    threads, addresses = torch.get_num_threads(), (0 if t is None else t.data_ptr() for t in (out, grad, to))
    half = x.dtype == torch.bfloat16
    return NORMS.pack(x.data_ptr(), *x.stride()[:3], half, *x.shape[:3], width, x.shape[3], root, threads, *addresses)


@torch.library.custom_op("hf_hyperattn::norms", mutates_args=())
def row_norms(x: Tensor, width: int, root: bool) -> Tensor:
    """The norms of the rows' first `width` numbers, or their squares, float32 [B, H, L]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(x.shape[:3], dtype=torch.float32)
    if x.is_cuda:
        from .triton import norms  # Triton may be missing

        norms.forward(x, width, root, out)
    else:
        library.core().hyper_norms(pack_norms(x, width, root, out))
    return out


@row_norms.register_fake
def _(x, width, root):
    return x.new_empty(x.shape[:3], dtype=torch.float32)


@torch.library.custom_op("hf_hyperattn::norms_backward", mutates_args=())
def row_norms_backward(grad: Tensor, x: Tensor, out: Tensor, width: int, root: bool) -> Tensor:
    """The gradient of the rows."""
    x, grad = x if x.stride(-1) == 1 else x.contiguous(), grad.contiguous()
    to = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.is_cuda:
        from .triton import norms

        norms.backward(grad, x, out, width, root, to)
    else:
        library.core().hyper_norms_backward(pack_norms(x, width, root, out, grad, to))
    return to


@row_norms_backward.register_fake
def _(grad, x, out, width, root):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    x, ctx.width, ctx.root = inputs
    ctx.save_for_backward(x, output)


def _pullback(ctx, grad):
    return row_norms_backward(grad, *ctx.saved_tensors, ctx.width, ctx.root), None, None


row_norms.register_autograd(_pullback, setup_context=_save)
