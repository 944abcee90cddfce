"""The Triton kernels as custom operators of torch, with gradients.

Here you learn where torch ends and the kernels begin. Compilers and exporters see one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import serialize

# `launch` is imported by the first call: Triton may be missing, and its import takes half a second.


@torch.library.custom_op("hf_hyperattn::triton", mutates_args=(), schema=serialize.FORWARD)
def forward(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """Compute attention; arguments as in `serialize`.

    Returns:
        The output, float32 [B, H, N, dv], and the sums of rows, float32 [2, B, H, N].
    """
    from . import launch

    return launch.forward(launch.TritonCall(serialize.read_arguments(tensors, *settings)))


@torch.library.custom_op(
    "hf_hyperattn::triton_backward", mutates_args=(), schema=serialize.BACKWARD
)
def gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs_grad: Sequence[bool],
    *settings,
) -> list[Tensor]:
    """Compute the gradients of all tensors.

    Extras that cannot learn get an empty tensor. Statistics and parameters that need no gradient
    get zeros.
    """
    from . import launch

    # The flags have the order of the tensors, so `read` names them as well.
    needs = serialize.read_arguments(needs_grad, *settings)  # type: ignore[arg-type]
    call = launch.TritonCall(serialize.read_arguments(tensors, *settings))
    return launch.backward(call, grad, out, lse, needs)


forward.register_fake(serialize.fake_output)
gradients.register_fake(serialize.fake_gradients)
serialize.register_gradients(forward, gradients, "triton")
