"""Build modules outside of torch's modes: a patch made in `torch.inference_mode()` must be trainable.

The context managers here make new parameters ordinary tensors on the right device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make new tensors ordinary ones: inference tensors can never be trained."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    # `inference_mode(False)` also enables gradients, which were off around the block.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def building_on(meta: bool, what: str, may_be_empty: bool = False) -> Iterator[None]:
    """Make new tensors ordinary ones on the CPU, in any mode and default device.

    Args:
        meta: Whether they belong to a module on the meta device. Then they are created there.
        what: The thing they are built for, for the error.
        may_be_empty: Whether the caller may put parameters on the meta device. PEFT does so for
            adapters that it loads with low_cpu_mem_usage=True, and fills them afterwards.

    Raises:
        ValueError: A context puts every new parameter on the meta device, and `what` is in memory.
    """
    with outside_inference_mode(), torch.device("meta" if meta else "cpu"):
        # `init_empty_weights` replaces `register_parameter` and ignores `torch.device`. Only a
        # registered parameter shows whether it is active.
        probe = nn.ParameterList([torch.empty(1)])
        if not meta and probe[0].is_meta and not may_be_empty:
            raise ValueError(
                f"{what} has its weights in memory, and the context of this call puts every new parameter on the meta "
                "device, as accelerate.init_empty_weights() does; call hf_hyperattn outside of it"
            )
        yield


def make_ordinary(modules: Iterable[nn.Module]) -> None:
    """Replace parameters that were created in inference mode by ordinary ones.

    A load in inference mode creates the parameters that the checkpoint lacks in this way.
    """
    for part in (part for module in modules for part in module.modules()):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_inference():
                with outside_inference_mode():
                    part._parameters[name] = nn.Parameter(
                        parameter.clone(), parameter.requires_grad
                    )
