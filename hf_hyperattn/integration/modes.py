"""Building modules as outside of every mode of torch: a patch made in `torch.inference_mode()` must be trainable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Let new tensors be ordinary ones: those of `torch.inference_mode()` can never take part in training."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def building_on(meta: bool, what: str, may_be_empty: bool = False) -> Iterator[None]:
    """Let new tensors be ordinary ones on the CPU, whatever mode and default device the caller has set.

    Args:
        meta: whether they belong to something on the meta device. Then they are there too.
        what: what they are built for, for the message.
        may_be_empty: whether the caller may put parameters on the meta device. PEFT does so for adapters that it loads
            with low_cpu_mem_usage=True, and fills them afterwards.

    Raises:
        ValueError: every new parameter is put on the meta device, where `what` is not.
    """
    with outside_inference_mode(), torch.device("meta" if meta else "cpu"):
        probe = nn.ParameterList([torch.empty(1)])
        if not meta and probe[0].is_meta and not may_be_empty:
            raise ValueError(
                f"{what} has its weights in memory, and the context of this call puts every new parameter on the meta "
                "device, as accelerate.init_empty_weights() does; call hf_hyperattn outside of it"
            )
        yield


def make_ordinary(modules: Iterable[nn.Module]) -> None:
    """Replace parameters that were made in inference mode, as those that a checkpoint lacks, by ordinary ones."""
    for part in (part for module in modules for part in module.modules()):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_inference():
                with outside_inference_mode():
                    part._parameters[name] = nn.Parameter(
                        parameter.clone(), parameter.requires_grad
                    )
