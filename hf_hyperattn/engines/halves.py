"""Half precision where gradients are small differences of large sums."""

from __future__ import annotations

import torch
from torch import Tensor


def unrounded(x: Tensor) -> Tensor:
    """`x` in float32 where it is a half-precision leaf of a score on a CPU and will get a gradient; else `x` itself.

    The gradient of a distance has two parts, by the product and by the norms, which nearly cancel where two points
    nearly coincide. Autograd rounds each part that reaches a half-precision tensor before it adds them up, and what is
    left is rounding; from one float32 tensor only the sum is rounded. Kernels in float32 take some 10 % longer here.
    """
    half = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
    return x.float() if half and x.requires_grad and torch.is_grad_enabled() else x
