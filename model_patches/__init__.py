"""Routes families of Transformers that never call the attention interface through it.

A model of a served family is changed one module at a time, in place and reversibly:

    import model_patches

    model_patches.serve(model)                      # now every attention module asks ALL_ATTENTION_FUNCTIONS
    model.set_attn_implementation("my_attention")   # any registered name, "eager" included
    model.set_attn_implementation("eager")
    model_patches.unserve(model)                    # the stock model again

Weights, state-dict keys, class names, caches and outputs stay the stock's. `refused.py` says why each
remaining family is not served. The package knows Transformers and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .eager import eager_attention
from .refused import REFUSED, STAYING
from .routing import (
    AttentionRoute,
    calls_interface,
    check_unroute,
    is_routed,
    route,
    routed_class,
    unroute,
)
from .table import BUILT_AS_EAGER, FAMILIES, FILES

__all__ = [
    "FAMILIES",
    "REFUSED",
    "STAYING",
    "construct_as",
    "eager_attention",
    "family",
    "hosts",
    "is_routed",
    "serve",
    "unserve",
]

# Transformers reads the module's source to decide whether `set_attn_implementation` may work; a served model says so
_SETTABLE = "_can_set_attn_implementation"


def family(model_type: str) -> ModuleType:
    """The file that serves `model_type`; its docstring says what the family does differently.

    Raises:
        KeyError: the type is not served; the message gives the reason where one is known.
    """
    if model_type not in FAMILIES:
        reason = REFUSED.get(
            model_type, "it either calls the attention interface itself or is unknown"
        )
        raise KeyError(f"model type {model_type!r} is not served: {reason}")
    return importlib.import_module(f"{__name__}.{FAMILIES[model_type][1]}")


def routes_of(file: str) -> dict[str, type]:
    """The mixins of one of our files by the name of the stock class they stand before."""
    return importlib.import_module(f"{__name__}.{file}").ROUTES


def construct_as(model_type: str) -> str | None:
    """The implementation a model has to be *built* with before another is set, or None where any will do.

    Some families pick the attention class from a dict of names in `__init__`, where a registered custom name is
    a KeyError: build them under the name given here, `serve` them, then set the wanted one. In a composite the
    type is that of the part.
    """
    return "eager" if model_type in BUILT_AS_EAGER else None


def serve(model: nn.Module) -> bool:
    """Route every attention module of a served family inside `model`, in place.

    Args:
        model: a Transformers model or anything that holds one (head model, composite, PEFT model).

    Returns:
        Whether the model holds served modules (routed now or before).

    Raises:
        ValueError: a module is of a variant that cannot be routed, or of a Transformers that changed it in a way that
            its route does not know; nothing has been changed then.
    """
    found = list(_served_modules(model))
    for module, mixin, _ in found:
        mixin.check(module)
        stock: Any = type(module)
        kind: Any = mixin
        routed_class(stock, kind)
    for module, mixin, config in found:
        route(module, mixin, config)
    for module in model.modules():
        if (
            isinstance(module, PreTrainedModel)
            and _stem(type(module)) in FILES
            and any(hosts(module))
        ):
            module.__dict__[_SETTABLE] = _yes
    return any(is_routed(module) for module in model.modules())


def unserve(model: nn.Module) -> bool:
    """Undo `serve`: same classes, same attributes. Returns whether there was anything to undo.

    Raises:
        ValueError: a config still names an implementation that the stock modules would ignore.
    """
    routed = [module for module in model.modules() if is_routed(module)]
    for module in routed:
        check_unroute(module)
    for module in routed:
        unroute(module)
    for module in model.modules():
        if module.__dict__.get(_SETTABLE) is _yes:
            del module.__dict__[_SETTABLE]
    return bool(routed)


def hosts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every routed attention module in `model`, in the order of `named_modules`."""
    return ((n, m) for n, m in model.named_modules() if isinstance(m, AttentionRoute))


def _served_modules(model: nn.Module) -> Iterator[tuple[nn.Module, type[Any], object]]:
    seen: set[int] = set()
    stack = [(model, getattr(model, "config", None))]
    while stack:
        module, config = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, PreTrainedModel):
            config = module.config
        mixin = None if is_routed(module) else _mixin_of(type(module))
        if mixin is not None:
            yield module, mixin, config
        stack.extend((child, config) for child in module.children())


def _mixin_of(cls: type) -> type[Any] | None:
    stem = _stem(cls)
    if stem not in FILES:
        return None
    routes = routes_of(FILES[stem])
    mixin = next((routes[base.__name__] for base in cls.__mro__ if base.__name__ in routes), None)
    if mixin is not None and issubclass(mixin, AttentionRoute) and calls_interface(cls):
        return None  # since a later Transformers, the family needs no route
    return mixin


def _stem(cls: type) -> str | None:
    package, _, stem = cls.__module__.partition(".modeling_")
    return stem if package.startswith("transformers.models.") else None


def _yes() -> bool:
    return True
