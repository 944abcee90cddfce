"""Tests of whether code may read the values of tensors now.

It may not while a call is compiled, exported or transformed, because the recorded result must hold
for other values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_private import (
    FakeTensor,
    assert_in_graph,
    find_transform,
    is_wrapped,
    read_forward_level,
    unwrap,
)


def is_recorded() -> bool:
    """Return whether this call is compiled, exported or traced, for later calls."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


# Without the decorator, the compiler of torch before 2.13 takes the answer for True.
@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Return whether `torch.export` or `torch.onnx.export` is running.

    The result is False under `torch.compile`.
    """
    return torch.compiler.is_exporting()


# The results below may be constants: the compiler guards transforms and forward mode itself.
@torch.compiler.assume_constant_result
def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active.

    Kernels would silently drop its derivatives.
    """
    return read_forward_level() >= 0


@torch.compiler.assume_constant_result
def is_transformed() -> bool:
    """Return whether a torch.func transform or forward mode is active.

    Only plain torch operators support these.
    """
    return find_transform() is not None or read_forward_level() >= 0


def can_read(*tensors: Tensor | None) -> bool:
    """Return whether the values of all these tensors can be read now.

    They cannot while a call is recorded, inside torch.func's transforms, and on the meta device.
    They also cannot under FakeTensorMode, in which FLOP counters and memory estimators run models
    without values.
    """
    if is_recorded():
        return False
    return not any(
        t is not None and (t.is_meta or isinstance(t, FakeTensor) or is_wrapped(t)) for t in tensors
    )


def raise_if(wrong: Tensor, message: str) -> None:
    """Raise if anything in `wrong` is True, if possible also in compiled calls.

    A compiled call raises `RuntimeError` each time that it runs, and not when it is compiled. On a
    GPU that is a failed assertion, as for an index out of range. Nothing is raised without values
    (meta device, FakeTensorMode), and for `torch.vmap` inside a compiled call, because its compiler
    has no such check.

    Args:
        wrong: Bool, any shape.
        message: Of the error.

    Raises:
        ValueError: Something is True.
    """
    if torch.compiler.is_compiling():
        # This must not run under no_grad: the graph would leave gradients turned off after the
        # error.
        if not is_transformed():
            assert_in_graph(~wrong.any(), message)
        return
    # A wrapper of torch.func's transforms holds the values of the whole batch.
    while is_wrapped(wrong):
        wrong = unwrap(wrong)
    if can_read(wrong) and bool(wrong.any()):
        raise ValueError(message)
