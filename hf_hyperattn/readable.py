"""Whether a decision may depend on the values of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, peek_interpreter_stack
from torch._C._functorch import is_functorch_wrapped_tensor as wrapped
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
    return not any(
        t is not None and (t.is_meta or isinstance(t, FakeTensor) or wrapped(t)) for t in tensors
    )


def raise_if(wrong: Tensor, message: str) -> None:
    """Raise if anything in `wrong` is True, also where its values cannot be read now.

    A compiled call raises `RuntimeError` each time that it is run, and not when it is recorded; on a GPU that is a
    failed assertion, as for an index out of range. Nothing is raised on the meta device and under FakeTensorMode, where
    there are no values, and for `torch.vmap` inside a compiled call, whose compiler has no such check.

    Args:
        wrong: Bool, of any shape.
        message: Of the error.

    Raises:
        ValueError: Something is True.
    """
    if torch.compiler.is_compiling():
        # Not under no_grad: the graph would leave gradients turned off after the error.
        if not is_transformed():
            torch._assert_async(~wrong.any(), message)
        return
    while wrapped(wrong):  # torch.func's transforms: the values of the whole batch are inside
        wrong = get_unwrapped(wrong)
    if can_read(wrong) and bool(wrong.any()):
        raise ValueError(message)
