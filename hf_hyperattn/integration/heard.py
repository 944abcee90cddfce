"""The hierarchy that a model was called with, on its way to the attention hosts.

Most families would pass a keyword of the call down to the attention function; others (BLOOM, MPT, GPT-J, DeBERTa, ...)
drop it on the way, or refuse it. So the outermost model notes it for the time of the call, and the hosts look it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import nn

#: Set on hosts that the hierarchy of a call is not about: the decoder beside an encoder, the images beside a text.
DEAF = "_hyperattn_deaf"

#: Set on hosts whose latest call had a hierarchy.
HEARD = "_hyperattn_heard"

#: Where modules keep the function that checkpoints a layer: Transformers' models, and the wrapper that FSDP brings.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class _Noted:
    """The hierarchy of the call that is running in this thread; the compiler, which cannot ask that, takes `latest`."""

    here: ContextVar = ContextVar("hyperattn_hierarchy", default=None)
    latest = None


NOTED = _Noted()


def heard_now():
    """The hierarchy of the call that is running, or None."""
    return NOTED.latest if torch.compiler.is_compiling() else NOTED.here.get()


def with_heard(hierarchy, function, /, *args, **keywords):
    """`function(*args, **keywords)` with a hierarchy noted."""
    before, NOTED.latest = NOTED.latest, hierarchy
    if torch.compiler.is_compiling():
        result = function(*args, **keywords)
        NOTED.latest = before
        return result
    token = NOTED.here.set(hierarchy)
    try:
        return function(*args, **keywords)
    finally:
        NOTED.here.reset(token)
        NOTED.latest = before


def hierarchy_of(module: nn.Module, keywords: dict):
    """The hierarchy that a host's call is about: a `Hierarchy`, group ids, or None.

    Raises:
        RuntimeError: the host is computed again in the backward pass, out of reach of the call that it belongs to.
    """
    if getattr(module, DEAF, False):
        return None
    found = keywords.get("hierarchy")
    found = heard_now() if found is None else found
    if torch.compiler.is_compiling():
        return found
    if found is None and module.__dict__.get(HEARD):
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{type(module).__name__} is computed again in the backward pass without the hierarchy of its call; "
                "allowed: model.gradient_checkpointing_enable() or FSDP's activation checkpointing"
            )
        del module.__dict__[HEARD]
    elif found is not None:
        module.__dict__[HEARD] = True
    return found


@contextmanager
def carried(model: nn.Module, hierarchy) -> Iterator[None]:
    """Layers that are computed again in the backward pass then hear what they heard the first time.

    For the time of a call, the functions that checkpoint layers note the hierarchy again.
    """
    changed = []
    if model.training and torch.is_grad_enabled():
        changed = [(m, n, m.__dict__[n]) for m in model.modules() for n in CHECKPOINTS if n in m.__dict__]
    for module, name, function in changed:
        module.__dict__[name] = partial(_again, function, hierarchy)
    try:
        yield
    finally:
        for module, name, function in changed:
            module.__dict__[name] = function


def _again(checkpoint, hierarchy, function, /, *args, **keywords):
    return checkpoint(partial(with_heard, hierarchy, function), *args, **keywords)
