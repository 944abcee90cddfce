"""Decide which models take `hierarchy=`, and which of their attention layers read it.

The models become instances of subclasses, see `accepting_class`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...config.registry import MECHANISMS
from ..attention.class_swap import swap_class
from ..attention.hosts import find_hosts, is_cross_attention
from ..attention.hyper import patched_hosts, unwrap_hyper
from ..attention.running_call import (
    CONTEXT,
    PART,
    USED,
    Accepting,
    HierarchyContext,
    accepting_class,
    unwrap_checkpoints,
)
from .checkpoint_config import list_configs


def accept_hierarchy(model: PreTrainedModel, hosts: list[nn.Module]) -> None:
    """Let a model, and its parts that hold attention layers, take `hierarchy=`.

    If the model has several sequences, the hierarchy describes one of them: the encoder's rather
    than the decoder's, and the text's rather than images' or sounds'. Attention layers of the other
    sequences ignore it and use windows.

    Args:
        model: The outermost model.
        hosts: Its attention layers that can use a hierarchy.
    """
    using = set(map(id, hosts_of_hierarchy(model, hosts)))
    # A part of a larger accepting model stays in the context of the whole.
    context, prefix = getattr(model, PART, None) or (HierarchyContext(), ".")
    for _, host in find_hosts(model):
        setattr(host, CONTEXT, context if id(host) in using else None)
    for name, part in model.named_modules():
        if not isinstance(part, PreTrainedModel) or next(find_hosts(part), None) is None:
            continue
        setattr(part, PART, (context, f"{prefix}{name}." if name else prefix))
        if not isinstance(part, Accepting):
            stock: Any = type(part)
            swap_class(part, accepting_class(stock))


def resolve_names(model: PreTrainedModel) -> None:
    """Let a model take `hierarchy=` if one of its attention layers reads it, else undo that.

    Mechanisms that run by name count as well as patched ones.
    """
    reading = [mechanism for mechanism in MECHANISMS.values() if mechanism.takes_hierarchy]
    names = {name for mechanism in reading for name in mechanism.names}
    # 1. No mechanism runs by name. A patched model keeps what `accept_hierarchy` set up for it.
    if not any(
        getattr(config, "_attn_implementation", None) in names
        for config in list_configs(model.config)
    ):
        accepts_by_patch = any(patched_hosts(model)) and PART in model.__dict__
        if isinstance(model, Accepting) and not accepts_by_patch:
            ignore_hierarchy(model)
        return
    # 2. Attention layers that read hierarchies by name. A hierarchy cannot describe two sequences,
    # so no cross-attention.
    hosts = [
        module
        for name, module in find_hosts(model)
        if not is_cross_attention(name, module)
        and getattr(module.config, "_attn_implementation", None) in names
    ]
    # 3. Patched attention layers.
    patched = {mechanism.name for mechanism in reading}
    hosts += [
        host
        for _, host in patched_hosts(model)
        if patched & unwrap_hyper(host.hyper)._modules.keys()
    ]
    if hosts:
        accept_hierarchy(model, hosts)
    else:
        ignore_hierarchy(model)


def ignore_hierarchy(model: nn.Module) -> None:
    """Undo `accept_hierarchy`."""
    for module in model.modules():
        if isinstance(module, Accepting):
            swap_class(module, type(module).stock_class)
        for name in (CONTEXT, PART, USED):
            module.__dict__.pop(name, None)
    unwrap_checkpoints(model)


def hosts_of_hierarchy(model: PreTrainedModel, hosts: list[nn.Module]) -> list[nn.Module]:
    """Return the attention layers whose tokens a hierarchy of the whole model describes."""
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        inside: set[int] = set()
        if isinstance(encoder, nn.Module) and encoder is not model:
            inside = set(map(id, encoder.modules()))
        return [host for host in hosts if id(host) in inside] or hosts
    try:
        text = model.config.get_text_config()
    except (ValueError, AttributeError):
        # The model has several text models, or its config is no config of Transformers.
        return hosts
    # Without attention layers of the text (only a part was patched), the hierarchy is about that
    # part.
    return [host for host in hosts if getattr(host, "config", None) is text] or hosts
