"""Whether a decision may depend on the values of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def can_read(*tensors: Tensor | None) -> bool:
    """Whether the values of all these tensors can be read now.

    They cannot while a call is compiled, exported or traced, inside torch.func's transforms, on the meta device, and
    under FakeTensorMode, where FLOP counters and memory estimators run models without their values.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    hidden = torch._C._functorch.is_functorch_wrapped_tensor
    return not any(t is not None and (t.is_meta or isinstance(t, FakeTensor) or hidden(t)) for t in tensors)
