"""The private functions of torch that this package calls. No other module names one.

torch has no public way to ask these questions, or to do these things. If the installed torch lacks
one of the functions, importing the package raises one ImportError with its name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

#: The versions that have been tested are in integration/patching/versions.py; this is the range in short.
TESTED = "torch 2.11 to 2.14"


def find_private(module: str, name: str) -> Any:
    """Return a private attribute of a module of torch.

    Raises:
        ImportError: The installed torch does not have it.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise ImportError(
            f"torch {torch.__version__} has no {module}.{name}, which hf_hyperattn calls; allowed: {TESTED}"
        ) from None


# Dispatch modes watch every operator: FLOP counters, FakeTensorMode, memory estimators. A compiled
# kernel that is called directly is invisible to them, so it must know whether one is active.
count_dispatch_modes: Callable[[], int] = find_private("torch._C", "_len_torch_dispatch_stack")

# Transforms of torch.func (vmap, grad) wrap tensors whose memory must not be read.
find_transform: Callable = find_private("torch._C._functorch", "peek_interpreter_stack")
is_wrapped: Callable = find_private("torch._C._functorch", "is_functorch_wrapped_tensor")
unwrap: Callable = find_private("torch._C._functorch", "get_unwrapped")

# A tensor without values, of FakeTensorMode and of the compiler.
FakeTensor: type = find_private("torch._subclasses.fake_tensor", "FakeTensor")

# An assertion that a compiled graph keeps, and that does not wait for the device.
assert_in_graph: Callable = find_private("torch", "_assert_async")

# The number of the running backward pass; -1 outside of one.
find_backward_pass: Callable[[], int] = find_private("torch._C", "_current_graph_task_id")

# For tensor subclasses: keep `__torch_function__` from running, and make a tensor without memory.
no_torch_function: Any = find_private("torch._C", "_disabled_torch_function_impl")
make_wrapper: Callable = find_private("torch", "Tensor")._make_wrapper_subclass

# Inside a custom operator torch excludes autograd from dispatch. To turn it on again, read both sets
# of keys and enter `force_keys` with changed ones.
DispatchKey: Any = find_private("torch._C", "DispatchKey")
read_included_keys: Callable = find_private("torch._C", "_dispatch_tls_local_include_set")
read_excluded_keys: Callable = find_private("torch._C", "_dispatch_tls_local_exclude_set")
force_keys: Callable = find_private("torch._C", "_ForceDispatchKeyGuard")

# The level of forward-mode differentiation: 0 or more if active, else negative. The first line only
# checks that the attribute exists; its value changes, so it is read again at each call.
find_private("torch.autograd.forward_ad", "_current_level")
read_forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")


def find_packet(operator: Any) -> Any:
    """Return what `register_flop_formula` takes, from the result of `torch.library.custom_op`."""
    # `torch.ops` finds operators by name only: a second copy of this package, as in a kernel
    # repository, would find those of the first.
    return operator._opoverload._overloadpacket


#: torch's own attention. Inside torch's `context_parallel` another function stands in its place.
PLAIN_ATTENTION = nn.functional.scaled_dot_product_attention


def find_context_mesh() -> Any:
    """Return the ranks of torch's active `context_parallel`, a `DeviceMesh`; None outside of it."""
    # Only the function that torch puts in place of its attention knows the ranks.
    replaced: Any = nn.functional.scaled_dot_product_attention
    if not str(getattr(replaced, "__module__", "")).startswith("torch.distributed."):
        return None
    return take_known(inspect.getclosurevars(replaced).nonlocals.get("device_mesh"))


def find_token_order(length: int, ranks: int, device: torch.device) -> torch.Tensor | None:
    """Return the tokens of a row in the order in which `context_parallel` shares them out.

    Rank r has the r-th of `ranks` equal parts.

    Args:
        length: Number of tokens of a row, on all ranks together.
        ranks: Number of ranks.
        device: Device of the result.

    Returns:
        int64 [length]; None if the tokens are in their own order.
    """
    # The active context has asked the same function.
    module = sys.modules[nn.functional.scaled_dot_product_attention.__module__]
    make_balancer = take_known(getattr(module, "_create_default_load_balancer", None))
    balancer = make_balancer(length, ranks, device)
    return None if balancer is None else balancer._generate_indices()[0].long()


def take_known(found: Any) -> Any:
    """Return a private fact about `context_parallel`.

    Raises:
        ValueError: The fact is None, because torch has changed.
    """
    if found is None:
        raise ValueError(
            f"torch {torch.__version__} does not tell how context_parallel shares tokens; allowed: {TESTED}, or FSDP2 "
            "or tensor parallelism"
        )
    return found
