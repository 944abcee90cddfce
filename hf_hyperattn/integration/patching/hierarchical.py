"""Let models take `hierarchy=`: in a call, in `generate`, and as a dataset column that the Trainer
keeps.

`generate` and the Trainer read the signature of `forward`. A model that is patched with a
hierarchical mechanism therefore becomes an instance of a subclass, with the same module path and
name, whose `forward` has one more argument. The same happens to its parts that can be called by
themselves.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from ...config.registry import MECHANISMS
from ...hierarchy import Hierarchy
from ..attention.class_swap import swap_class
from ..attention.hierarchy_context import (
    CONTEXT,
    PART,
    USED,
    HierarchyContext,
    inherited_hierarchy,
    unwrap_checkpoints,
    use_hierarchy,
    wrap_checkpoints,
)
from ..attention.hosts import find_hosts, is_cross_attention
from ..attention.hyper import patched_hosts, unwrap_hyper
from .checkpoint_config import list_configs

NAME = "hierarchy"

#: Methods with which `generate` runs an encoder. Their names depend on the version of Transformers.
ENCODING = (
    "_prepare_encoder_decoder_kwargs_for_generation",
    "_maybe_prepare_encoder_kwargs_for_generation",
)


class Accepting:
    """Base of the subclasses that `accepting_class` makes.

    Attributes:
        stock_class: The original class.
    """

    stock_class: type

    def __reduce_ex__(self, protocol):
        # The subclass has the name of the original class, so pickle would restore the wrong one
        # without this.
        return _make_empty, (type(self).stock_class,), self.__dict__


def _make_empty(stock: Any) -> nn.Module:
    """Return an instance without attributes, which unpickling fills."""
    cls: Any = accepting_class(stock)
    return cls.__new__(cls)


@functools.cache
def accepting_class(stock: Any) -> type:
    """Return the subclass of a model class whose `forward` takes `hierarchy`."""
    original = stock.forward
    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    new = inspect.Parameter(NAME, inspect.Parameter.KEYWORD_ONLY, default=None)
    # The new parameter stands before **kwargs, if there are any.
    end = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)

    @functools.wraps(original)
    def forward(self, *args, hierarchy=None, **kwargs):
        context, name = getattr(self, PART)
        if not torch.compiler.is_compiling():
            if hierarchy is not None:
                check_hierarchy(self, hierarchy)
            if context.part is None and torch.is_grad_enabled():
                wrap_checkpoints(self, context)
        elif hierarchy is None and context.hierarchy is None:
            # A call without hierarchies is compiled to a graph that does not write to the context.
            return original(self, *args, **kwargs)
        hierarchy = inherited_hierarchy(self) if hierarchy is None else hierarchy
        return use_hierarchy(context, name, hierarchy, original, self, *args, **kwargs)

    parameters.insert(end, new)
    # By `setattr`, since type checkers know no such attribute of a function.
    setattr(forward, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    body = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"stock_class": stock, "forward": forward}
    if hasattr(stock, "generate"):
        body |= generation_methods(stock)
    return type(stock.__name__, (Accepting, stock), body)


def generation_methods(stock: Any) -> dict:
    """Return the methods that make `generate` pass the hierarchy on.

    The hierarchy goes to every call of `forward` and of the encoder that processes its rows. Other
    calls during generation (logits processors, the pass without prompt of `guidance_scale`) get
    none. The hierarchy keeps the length of the prompt: attention extends it to the number of keys.
    """
    generation = stock.generate
    prepare: Any = getattr(stock, "prepare_inputs_for_generation", None)
    candidates: Any = getattr(stock, "_get_candidate_generator", None)
    family_generates = generation is not vars(GenerationMixin)["generate"]

    @functools.wraps(generation)
    def generate(self, *args, hierarchy=None, **kwargs):
        hierarchy = inherited_hierarchy(self) if hierarchy is None else hierarchy
        context, name = getattr(self, PART)
        if hierarchy is not None:
            check_hierarchy(self, hierarchy)
            if prepare:
                kwargs[NAME] = hierarchy
        # `generate` of the mixin passes the keyword on. A family's own `generate` calls its parts
        # without it, so they inherit from the context. If it prepares no inputs, the whole model
        # must inherit, too: a shorter name makes the model a part of the running call.
        inside = name if prepare else name[:-1]
        for_parts = hierarchy if family_generates else None
        return use_hierarchy(context, inside, for_parts, generation, self, *args, **kwargs)

    @functools.wraps(prepare)
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        if kwargs.get(NAME) is not None:
            # Some families build the inputs from a fixed list of names.
            inputs[NAME] = kwargs[NAME]
        return inputs

    @functools.wraps(candidates)
    def _get_candidate_generator(self, *args, **kwargs):
        helper = kwargs.get("assistant_model")
        other_tokens = kwargs.get("assistant_tokenizer") is not None
        # An assistant with other tokens, or without `hierarchy=`, cannot use the hierarchy.
        if helper is not None and (other_tokens or not isinstance(helper, Accepting)):
            kwargs["model_kwargs"] = {k: v for k, v in kwargs["model_kwargs"].items() if k != NAME}
        return candidates(self, *args, **kwargs)

    # Some generating classes lack one of the methods. Only existing ones are replaced.
    changed = (generate, prepare_inputs_for_generation, _get_candidate_generator)
    methods = {method.__name__: method for method in changed if hasattr(stock, method.__name__)}
    encoders = {
        name: wrap_encoding(getattr(stock, name)) for name in ENCODING if hasattr(stock, name)
    }
    return methods | encoders


def wrap_encoding(original):
    """Return a method that runs an encoder with the hierarchy given to `generate`.

    Some encoders have no such keyword, so the context carries the hierarchy.
    """

    @functools.wraps(original)
    def method(self, inputs_tensor, model_kwargs, *args, **kwargs):
        call = (original, self, inputs_tensor, model_kwargs, *args)
        return use_hierarchy(*getattr(self, PART), model_kwargs.get(NAME), *call, **kwargs)

    return method


def check_hierarchy(model: PreTrainedModel, hierarchy) -> None:
    """Raise if a value is no hierarchy, or applies to no attention layer of the model."""
    if not isinstance(hierarchy, Hierarchy) and not isinstance(hierarchy, Tensor):
        raise ValueError(
            f"hierarchy is a {type(hierarchy).__name__}; allowed: a Hierarchy, or group ids as an integer tensor "
            "[batch, length, levels]"
        )
    if all(getattr(host, CONTEXT, None) is None for _, host in find_hosts(model)):
        raise ValueError(
            f"{type(model).__name__} is a part that hierarchy= is not about: in an encoder-decoder it is about the "
            "encoder's tokens, beside a text model about the text; give it to the whole model, or patch this part alone"
        )


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
