"""Hand the hierarchy and the cache of a model's running call to its attention layers.

Most families would pass a keyword of the call down to the attention function. Others (BLOOM, MPT,
GPT-J, DeBERTa, ...) drop it on the way, or reject it. So the model keeps the hierarchy, for the
duration of the call, in a context object that it shares with its parts and attention layers only.
Each thread sees its own calls. The compiler reads and writes the context like any object's
attributes: a hierarchy enters a graph as an input.

`generate` and the Trainer read the signature of `forward`. A model that is patched with a
hierarchical mechanism therefore becomes an instance of a subclass, with the same module path and
name, whose `forward` has one more argument. The same happens to its parts that can be called by
themselves.

Attention functions get the keys and values that a cache returned, but not the cache. Each patched
attention layer with a mechanism that keeps state on it therefore gets two forward hooks: one notes
the cache, the other forgets it, also after an error.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ...hierarchy import Hierarchy
from ...utils.torch_private import find_backward_pass
from .hosts import find_hosts

#: Attribute of an attention layer: the context of its model. None on layers that read other tokens
#: than the hierarchy describes, such as the decoder of an encoder-decoder, or the images of a
#: vision-language model.
CONTEXT = "_hyperattn_hierarchy"

#: Attribute of a model and its parts: the context, and the part's name (".encoder.", or "." for the
#: whole model).
PART = "_hyperattn_hierarchy_part"

#: Attribute that is set on attention layers once they were called with a hierarchy in training.
USED = "_hyperattn_used_hierarchy"

#: Attributes with the function that checkpoints a layer: of Transformers' models, and of FSDP's
#: wrapper.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")

#: The keyword of `forward` and `generate`.
NAME = "hierarchy"

#: Methods with which `generate` runs an encoder. Their names depend on the version of Transformers.
ENCODING = (
    "_prepare_encoder_decoder_kwargs_for_generation",
    "_maybe_prepare_encoder_kwargs_for_generation",
)

#: The attribute of an attention layer that holds its `CacheOfCall`.
CACHE = "_hyperattn_cache"


# The hierarchy


class HierarchyContext(threading.local):
    """The running call of one model, in this thread.

    Copies of the model get a context of their own, without a running call.

    Attributes:
        part: Name of the innermost part that is being called. None outside of calls.
        hierarchy: The hierarchy of that call: a `Hierarchy`, group ids, or None.
    """

    # `threading.local` calls this again in every thread. The compiler cannot guard defaults that
    # are only on the class, so they are set here.
    def __init__(self):
        self.part: str | None = None
        self.hierarchy = None

    def __reduce__(self):
        return HierarchyContext, ()


def inherited_hierarchy(model: nn.Module):
    """Return the hierarchy for a call that got none.

    It is the hierarchy of the running call if the model is a part of the calling model, else None.
    A model that is called again while it runs (by a hook, for example) is not a part of itself:
    that is another call.
    """
    context, name = getattr(model, PART)
    inside = context.part is not None and name != context.part and name.startswith(context.part)
    return context.hierarchy if inside else None


def use_hierarchy(
    context: HierarchyContext, part: str | None, hierarchy, function, /, *args, **keywords
):
    """Run `function(*args, **keywords)` as a call of a part with this hierarchy, or with None."""
    before = context.part, context.hierarchy
    context.part, context.hierarchy = part, hierarchy
    try:
        return function(*args, **keywords)
    finally:
        context.part, context.hierarchy = before


def hierarchy_of_call(host: nn.Module, keywords: dict):
    """Return the hierarchy of an attention call: a `Hierarchy`, group ids, or None.

    Args:
        host: The attention layer.
        keywords: Keywords of the call. A `hierarchy` there wins over the context.

    Raises:
        RuntimeError: The layer is recomputed in the backward pass, where the hierarchy of its call
            is out of reach.
    """
    if ignores_hierarchy(host):
        return None
    context = getattr(host, CONTEXT, None)
    hierarchy = keywords.get("hierarchy")
    if context is None:
        return hierarchy
    hierarchy = context.hierarchy if hierarchy is None else hierarchy
    if torch.compiler.is_compiling():
        return hierarchy
    if hierarchy is not None and (host.training or torch.is_grad_enabled()):
        host.__dict__[USED] = True
    # Within a backward pass torch has a graph task. A checkpoint that we could not wrap then runs
    # the layer without the context, and would silently compute something else.
    recomputed = context.part is None and find_backward_pass() != -1
    if hierarchy is None and recomputed and USED in host.__dict__:
        raise RuntimeError(
            f"{type(host).__name__} is computed again in the backward pass without the hierarchy of its call; "
            "allowed: model.gradient_checkpointing_enable() or FSDP's activation checkpointing"
        )
    return hierarchy


def ignores_hierarchy(host: nn.Module) -> bool:
    """Return whether hierarchies of the model do not apply to this attention layer."""
    return getattr(host, CONTEXT, host) is None


class CheckpointWithHierarchy:
    """Checkpoint function that recomputes layers with the hierarchy of their own call.

    Args:
        checkpoint: The original function.
        context: Context of the model that has the layers.
    """

    def __init__(self, checkpoint, context: HierarchyContext):
        self.checkpoint = checkpoint
        self.context = context

    def __call__(self, function, /, *args, **keywords):
        if not torch.compiler.is_compiling():
            # Bind the current call now: in the backward pass the context is empty.
            call = self.context.part, self.context.hierarchy
            function = partial(use_hierarchy, self.context, *call, function)
        return self.checkpoint(function, *args, **keywords)


def wrap_checkpoints(model: nn.Module, context: HierarchyContext) -> None:
    """Let the checkpoint functions of a model's layers carry hierarchies.

    `unwrap_checkpoints` undoes it.
    """
    for module in model.modules():
        for name in CHECKPOINTS:
            function = module.__dict__.get(name)
            if function is not None and not isinstance(function, CheckpointWithHierarchy):
                module.__dict__[name] = CheckpointWithHierarchy(function, context)


def unwrap_checkpoints(model: nn.Module) -> None:
    """Undo `wrap_checkpoints`."""
    for module in model.modules():
        for name in CHECKPOINTS:
            if isinstance(function := module.__dict__.get(name), CheckpointWithHierarchy):
                module.__dict__[name] = function.checkpoint


# Models that take `hierarchy=`


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


# The cache


class CacheOfCall(threading.local):
    """The caches of the running calls of one attention layer, in this thread.

    Copies and pickles of the layer start without any.
    """

    def __init__(self):
        #: One entry per running call, the innermost last: a layer may run again inside its own
        #: call.
        self.running: list[Any] = []

    def __reduce__(self):
        return CacheOfCall, ()


def add_cache_hooks(hosts: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Add the hooks to every attention layer whose mechanisms keep state on caches.

    Args:
        hosts: Pairs of an attention layer and its `Hyper`.
    """
    # `refuse_pruned` needs the cache only once per stack of layers, and hooks cost time in every
    # call. So only the first attention layer of a stack gets hooks for `counts_keys`.
    stacks = set()
    for host, hyper in hosts:
        is_first = False
        if any(map(attrgetter("counts_keys"), hyper.children())):
            config: Any = getattr(host, "config", None)
            # Encoder and decoder may share class and config. `is_causal` tells them apart.
            stack = type(host), id(config), getattr(host, "is_causal", None)
            is_first = stack not in stacks
            stacks.add(stack)
        if is_first or any(map(attrgetter("reads_cache"), hyper.children())):
            setattr(host, CACHE, CacheOfCall())
            host.register_forward_pre_hook(note_cache, with_kwargs=True)
            host.register_forward_hook(forget_cache, always_call=True)


def remove_cache_hooks(host: nn.Module) -> None:
    """Undo `add_cache_hooks` for one attention layer."""
    if host.__dict__.pop(CACHE, None) is None:
        return
    # torch keeps the options of a hook in separate tables under the same key.
    tables = (
        host._forward_pre_hooks,
        host._forward_pre_hooks_with_kwargs,
        host._forward_hooks,
        host._forward_hooks_always_called,
    )
    hooks = {**host._forward_pre_hooks, **host._forward_hooks}
    for key in [key for key, hook in hooks.items() if hook in (note_cache, forget_cache)]:
        for table in tables:
            table.pop(key, None)


def note_cache(host: nn.Module, args: tuple, keywords: dict) -> None:
    """Note the cache before a call of the attention layer.

    Families name the argument differently, and some pass it by position, so every argument is
    looked at.
    """
    if not torch.compiler.is_compiling():
        # Some caches are no subclass of Transformers' `Cache`, but all have this method.
        caches = (given for given in (*keywords.values(), *args) if is_cache(given))
        host.__dict__[CACHE].running.append(next(caches, None))


def is_cache(given: Any) -> bool:
    """Return whether an argument is a cache, of one conversation or of many requests."""
    return hasattr(given, "get_seq_length") or isinstance(given, PagedAttentionCache)


def forget_cache(host: nn.Module, args: tuple, output: Any) -> None:
    """Forget the cache after a call of the attention layer."""
    running = host.__dict__[CACHE].running
    # The list is empty if another hook failed before ours could note the cache.
    if running and not torch.compiler.is_compiling():
        running.pop()


def cache_of_call(host: nn.Module) -> Any:
    """Return the cache of the running call; None without a cache, or if no mechanism reads it."""
    noted = host.__dict__.get(CACHE)
    return noted.running[-1] if noted is not None and noted.running else None
