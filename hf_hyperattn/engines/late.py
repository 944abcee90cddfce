"""Fields of a dataclass whose tensors are made when they are first read.

The features of a score are copies of queries and keys that the compiled engine does not need: it reads the tensors they
are made of (`Source`). Late fields leave them unmade there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch


class Late:
    """A value, and how it is made."""

    def __init__(self, make: Callable):
        self.make, self.made = make, None

    def value(self):
        """The value, made once."""
        if self.made is None:
            self.made = self.make()
        return self.made


def late(make: Callable):
    """The value of `make()`, later; at once while a call is traced, where what is not used costs nothing."""
    return make() if torch.compiler.is_compiling() else Late(make)


def value_of(given):
    """The value of what `late` gave."""
    return given.value() if isinstance(given, Late) else given


class LateFields:
    """Base of frozen dataclasses whose fields may be given as `Late`; reading one gives its value."""

    def __post_init__(self):
        if torch.compiler.is_compiling():  # nothing is late then, and older compilers do not read __dict__
            return
        waiting = {name: value for name, value in self.__dict__.items() if isinstance(value, Late)}
        for name in waiting:
            object.__delattr__(self, name)
        if waiting:
            object.__setattr__(self, "_late", waiting)

    def __getattr__(self, name: str):  # called for what is not there
        waiting = self.__dict__.get("_late", {})
        if name not in waiting:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = waiting[name].value()
        object.__setattr__(self, name, value)
        return value

    def given(self, name: str):
        """The field as it was given, without making it."""
        return self.__dict__.get("_late", {}).get(name, self.__dict__.get(name))

    def changed(self, **changes):
        """A copy with these fields instead; unlike `dataclasses.replace` it makes nothing."""
        return type(self)(**{f.name: changes.get(f.name, self.given(f.name)) for f in fields(self)})
