"""Fields of a dataclass whose tensors are made when they are first read.

The features of a score are copies of queries and keys that the compiled engine does not need: it reads the tensors they
are made of (`Source`). Late fields leave them unmade there.
"""

from __future__ import annotations

from collections.abc import Callable

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


class once:
    """A property that is computed once; anew at every reading while a call is traced, which follows no locks."""

    def __init__(self, make: Callable):
        self.make, self.__doc__ = make, make.__doc__

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        value = self.make(instance)
        if not torch.compiler.is_compiling():
            instance.__dict__[self.make.__name__] = value
        return value


class LateFields:
    """Base of frozen dataclasses whose fields may be given as `Late`; reading one gives its value."""

    def __post_init__(self):
        if torch.compiler.is_compiling():  # nothing is late then, and older compilers do not read __dict__
            return
        own, waiting = self.__dict__, {}
        for name, value in own.items():
            if type(value) is Late:
                waiting[name] = value
        for name in waiting:
            del own[name]
        own["_late"] = waiting

    def __getattr__(self, name: str):  # called for what is not there
        waiting = self.__dict__.get("_late", {})
        if name not in waiting:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = waiting[name].value()
        object.__setattr__(self, name, value)
        return value

    def given(self, name: str):
        """The field as it was given, without making it."""
        own = self.__dict__
        return own[name] if name in own else own.get("_late", {}).get(name)

    def changed(self, **changes):
        """A copy with these fields instead; unlike `dataclasses.replace` it makes nothing."""
        return type(self)(
            **{n: changes[n] if n in changes else self.given(n) for n in self.__dataclass_fields__}
        )
