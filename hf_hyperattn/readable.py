"""Whether a decision may depend on the values of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as wrapped
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad


def is_recorded() -> bool:
    """Whether this call is recorded for later ones, of other lengths: compiled, exported, or under torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


@torch.compiler.assume_constant_result  # needless from torch 2.13 on; before, its compiler takes the answer for yes
def is_exporting() -> bool:
    """Whether `torch.export` or `torch.onnx.export` is running, and not `torch.compile`."""
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result  # its compiler guards both
def is_forward_mode() -> bool:
    """Whether forward-mode derivatives are taken, which kernels do not see on a tensor, and would lose in silence."""
    return forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def is_transformed() -> bool:
    """Whether the call is inside one of torch.func's transforms, or forward-mode derivatives are taken: plain operators
    alone know these.
    """
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def can_read(*tensors: Tensor | None) -> bool:
    """Whether the values of all these tensors can be read now.

    They cannot while a call is recorded, inside torch.func's transforms, on the meta device, and under FakeTensorMode,
    where FLOP counters and memory estimators run models without their values.
    """
    if is_recorded():
        return False
    return not any(t is not None and (t.is_meta or isinstance(t, FakeTensor) or wrapped(t)) for t in tensors)
