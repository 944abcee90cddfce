"""The kernels as operators of torch, with their gradients, so that compilers and exporters see one node.

Kernels are imported with the first call: Triton may be missing, and nothing here costs at import.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import serialize


@torch.library.custom_op("hf_hyperattn::triton", mutates_args=(), schema=serialize.FORWARD)
def forward(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and sums of rows [2, B, H, N], float32; arguments as `serialize` has them."""
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
    """Gradients of all tensors; empty for the extras that have none, 0 for statistics and parameters that need none."""
    from . import launch

    needs = serialize.read_arguments(needs_grad, *settings)  # type: ignore[arg-type]  # the same places
    return launch.backward(
        launch.TritonCall(serialize.read_arguments(tensors, *settings)), grad, out, lse, needs
    )


forward.register_fake(serialize.fake_output)
gradients.register_fake(serialize.fake_gradients)
serialize.register_gradients(forward, gradients, "triton")
