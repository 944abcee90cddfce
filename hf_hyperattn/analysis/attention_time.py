"""The time of attention itself: the host's own against what is patched in, on the same calls, one after the other."""

from __future__ import annotations

import time

from torch import Tensor, nn

from ..integration.checkpoint_config import inner, patched_hosts
from ..integration.patching import base_model
from .hsa_certificate import evaluating


def attention_times(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Seconds of one pass over `ids`, [N] or [B, N], in all patched layers: by their own attention, and as patched."""
    base, own, patched = base_model(model), [], []

    def hook(module, arguments):
        call, _, stock = arguments
        start = time.perf_counter()
        stock()
        middle = time.perf_counter()
        module.forward(call)
        own.append(middle - start)
        patched.append(time.perf_counter() - middle)

    handles = [inner(host.hyper).register_forward_pre_hook(hook) for _, host in patched_hosts(base)]
    try:
        with evaluating(base):
            base.base_model(ids if ids.dim() == 2 else ids[None])
    finally:
        for handle in handles:
            handle.remove()
    return sum(own), sum(patched)
