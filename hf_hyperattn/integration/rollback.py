"""A change of a model that happens as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig

from .records import tree


@contextmanager
def rollback_on_error(model: nn.Module) -> Iterator[None]:
    """Where the block raises, the model's modules and configs are as they were before it.

    Classes, attributes, children, parameters, hooks and config entries are put back; values of tensors, which no patch
    changes, are not copied.
    """
    modules = list(model.modules())
    configs = [
        config
        for module in modules
        for value in module.__dict__.values()
        if isinstance(value, PreTrainedConfig)
        for config in tree(value)
    ]
    before = [
        (thing, type(thing), _contents(thing)) for thing in {id(t): t for t in (*modules, *configs)}.values()
    ]
    try:
        yield
    except BaseException:
        for thing, cls, contents in before:
            object.__setattr__(thing, "__class__", cls)
            thing.__dict__.clear()
            for name, (value, entries) in contents.items():
                thing.__dict__[name] = value
                if entries is not None:
                    value.clear()  # in place: handles of hooks refer to the dict itself
                    value.update(entries)
        raise


def _contents(thing: object) -> dict[str, tuple[object, dict | None]]:
    """Attributes by name, dicts among them with a copy of what they hold now."""
    return {n: (v, dict(v) if isinstance(v, dict) else None) for n, v in thing.__dict__.items()}
