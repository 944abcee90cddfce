"""Models that take `hierarchy=`: in a call, in `generate`, and as a column that the Trainer keeps.

`generate` and the Trainer look at the signature of `forward`, so a model that is patched with a mechanism that reads
hierarchies becomes an instance of a subclass of its class, under the same module path and name, whose `forward` has
one argument more. The same is done to its parts that can be called by themselves.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from ..hierarchy import Hierarchy
from ..registry import MECHANISMS
from .checkpoint_config import inner, patched_hosts, tree
from .class_swap import swap_class
from .hierarchy_context import (
    CONTEXT,
    PART,
    USED,
    HierarchyContext,
    inherited_hierarchy,
    unwrap_checkpoints,
    use_hierarchy,
    wrap_checkpoints,
)
from .hosts import find_hosts, is_cross_attention

NAME = "hierarchy"

#: The methods with which `generate` runs an encoder, by version of Transformers.
ENCODING = (
    "_prepare_encoder_decoder_kwargs_for_generation",
    "_maybe_prepare_encoder_kwargs_for_generation",
)


class Accepting:
    """Marks the subclasses made here."""

    stock_class: type

    def __reduce_ex__(self, protocol):
        # The class is known under the stock name, so pickle has to be told how to make it again.
        return _make_empty, (type(self).stock_class,), self.__dict__


def _make_empty(stock: Any) -> nn.Module:
    cls: Any = accepting_class(stock)
    return cls.__new__(cls)


@functools.cache
def accepting_class(stock: Any) -> type:
    """The subclass of a model class whose `forward` takes `hierarchy`."""
    original = stock.forward
    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    new = inspect.Parameter(NAME, inspect.Parameter.KEYWORD_ONLY, default=None)
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
            return original(self, *args, **kwargs)  # a graph without writes to the context
        hierarchy = inherited_hierarchy(self) if hierarchy is None else hierarchy
        return use_hierarchy(context, name, hierarchy, original, self, *args, **kwargs)

    parameters.insert(end, new)
    setattr(forward, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    body = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"stock_class": stock, "forward": forward}
    if hasattr(stock, "generate"):
        body |= generation_methods(stock)
    return type(stock.__name__, (Accepting, stock), body)


def generation_methods(stock: Any) -> dict:
    """What `generate` needs beyond the signature of `forward`.

    It hands the hierarchy to every call of `forward` and of the encoder that is about its rows; what else is called
    while it runs (logits processors, the pass without prompt of `guidance_scale`) gets none. The hierarchy stays at the
    length of the prompt: attention extends it to the keys there are.
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
        # A family's own `generate` calls parts without the keyword, and where it prepares no inputs the whole as well.
        inside = name if prepare else name[:-1]
        for_parts = hierarchy if family_generates else None
        return use_hierarchy(context, inside, for_parts, generation, self, *args, **kwargs)

    @functools.wraps(prepare)
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        if kwargs.get(NAME) is not None:
            inputs[NAME] = kwargs[NAME]  # some families list what they pass on
        return inputs

    @functools.wraps(candidates)
    def _get_candidate_generator(self, *args, **kwargs):
        helper = kwargs.get("assistant_model")
        other_tokens = kwargs.get("assistant_tokenizer") is not None
        if helper is not None and (other_tokens or not isinstance(helper, Accepting)):
            kwargs["model_kwargs"] = {k: v for k, v in kwargs["model_kwargs"].items() if k != NAME}
        return candidates(self, *args, **kwargs)

    changed = (generate, prepare_inputs_for_generation, _get_candidate_generator)
    methods = {method.__name__: method for method in changed if hasattr(stock, method.__name__)}
    return methods | {
        name: wrap_encoding(getattr(stock, name)) for name in ENCODING if hasattr(stock, name)
    }


def wrap_encoding(original):
    """A method that runs an encoder, with the hierarchy of `generate`: some encoders know no such keyword."""

    @functools.wraps(original)
    def method(self, inputs_tensor, model_kwargs, *args, **kwargs):
        call = (original, self, inputs_tensor, model_kwargs, *args)
        return use_hierarchy(*getattr(self, PART), model_kwargs.get(NAME), *call, **kwargs)

    return method


def check_hierarchy(model: PreTrainedModel, hierarchy) -> None:
    """Raise for a hierarchy that is none, or that is about no host of the model."""
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
    """Let a model, and its parts that hold hosts, take `hierarchy=`.

    Args:
        model: the outermost model.
        hosts: its hosts that can use one. Where the model has several sequences, the encoder's use it rather than the
            decoder's, and the text's rather than those of images and sounds; the others keep their windows.
    """
    using = set(map(id, hosts_of_hierarchy(model, hosts)))
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
    """Let a model take `hierarchy=` where one of its parts reads one by name, and only there."""
    reading = [mechanism for mechanism in MECHANISMS.values() if mechanism.takes_hierarchy]
    names = {name for mechanism in reading for name in mechanism.names}
    if not any(
        getattr(config, "_attn_implementation", None) in names for config in tree(model.config)
    ):
        if isinstance(model, Accepting) and not (
            any(patched_hosts(model)) and PART in model.__dict__
        ):
            ignore_hierarchy(model)
        return
    hosts = [m for n, m in find_hosts(model) if not is_cross_attention(n, m)]
    hosts = [m for m in hosts if getattr(m.config, "_attn_implementation", None) in names]
    patched = {mechanism.name for mechanism in reading}
    hosts += [
        host for _, host in patched_hosts(model) if patched & inner(host.hyper)._modules.keys()
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
    """The hosts whose tokens a hierarchy given to the whole model is about."""
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        inside = (
            set(map(id, encoder.modules()))
            if isinstance(encoder, nn.Module) and encoder is not model
            else ()
        )
        return [host for host in hosts if id(host) in inside] or hosts
    try:
        text = model.config.get_text_config()
    except (ValueError, AttributeError):  # several text models
        return hosts
    return [host for host in hosts if getattr(host, "config", None) is text] or hosts
