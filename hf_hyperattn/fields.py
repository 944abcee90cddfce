"""Fields of configurations: their help, symbol and range as metadata, and the check of a value against them."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

#: Numbers beyond this are infinite in float32, the least precise dtype that they are computed in.
LARGEST = 3e38
#: Positive numbers below this are 0, or lose digits, there.
SMALLEST = 1.2e-38
#: No integer in a config is larger, unless its field says so. No text has as many tokens, and a few such numbers add up
#: to less than int64 holds, in which kernels count.
MOST_INTEGER = 10**18
#: No extent of a weight that a config names is larger: so many numbers in a row are 8 GB.
MOST_SIZE = 2**24
#: The largest seed that torch's generators take as it is.
MOST_SEED = 2**63 - 1


def option(
    default: Any,
    help: str,
    *,
    symbol: str = "",
    choices: tuple = (),
    above: float | None = None,
    least: float | None = None,
    most: int = MOST_INTEGER,
    types: tuple = (),
    optional: bool = False,
) -> Any:
    """A dataclass field with its help, its symbol in the paper, and what it may hold.

    Args:
        default: what the field holds where nothing is said, or a function that makes it; `dataclasses.MISSING` for a
            field that must be given.
        choices: allowed values.
        above, least: exclusive and inclusive lower bound of a number; numbers must be finite in float32.
        most: the largest value of a field of integers.
        types: allowed types; taken from the default where not given.
        optional: whether None is allowed.
    """
    types = types or (type(default),)
    metadata = dict(
        help=help,
        symbol=symbol,
        choices=choices,
        above=above,
        least=least,
        most=most,
        types=types,
        optional=optional or default is None,
    )
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return (
        field(default=default, metadata=metadata)
        if default is not MISSING
        else field(metadata=metadata)
    )


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the one-line ValueError for a value that is not allowed."""
    raise ValueError(f"{name}={short(value)} is not allowed; allowed: {allowed}")


def check_known(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise a one-line TypeError for a name that is not known; `what` is how it begins."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        nearest = "".join(
            f"; did you mean {name!r}?" for name in get_close_matches(unknown, known, 1)
        )
        raise TypeError(f"{what} {short(unknown)}; allowed: {', '.join(known)}{nearest}")


class KnownFields:
    """Base of dataclasses whose TypeError for an unknown keyword says what is allowed."""

    if not TYPE_CHECKING:  # to a type checker the fields are the arguments

        def __new__(cls, *args, **kwargs):
            if not kwargs.keys() <= cls.__dataclass_fields__.keys():
                check_known(f"{cls.__name__} has no field", kwargs, cls.__dataclass_fields__)
            return super().__new__(cls)

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        refuse(f"{type(self).__name__}.{name}", getattr(self, name), allowed)


def check_field(owner: str, name: str, value: Any, rule: Mapping[str, Any]) -> None:
    """Raise a one-line ValueError if `value` breaks the rule of its field, the metadata that `option` made."""
    allowed = _allowed_instead(value, rule)
    if allowed:
        refuse(f"{owner}.{name}", value, allowed)


def _allowed_instead(value: Any, rule: Mapping[str, Any]) -> str:
    """What is allowed, for a value that is not; "" for one that is."""
    if value is None:
        return "" if rule["optional"] else "a value, not None"
    if rule["choices"]:
        known = isinstance(value, str | int | float) and value in rule["choices"]
        return "" if known else ", ".join(map(repr, rule["choices"]))
    types = (*rule["types"], int) if float in rule["types"] else rule["types"]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return " or ".join(t.__name__ for t in rule["types"])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    above, least = rule["above"], rule["least"]
    if not -LARGEST < value < LARGEST:
        return f"a finite number, of at most {LARGEST:g}"
    if above is not None and value <= above:
        return f"numbers above {above:g}"
    if above == 0 and value < SMALLEST:
        return f"numbers above 0, from {SMALLEST:g}, the least that float32 holds in full"
    if least is not None and value < least:
        return f"numbers from {least:g}"
    counts = int in rule["types"] and float not in rule["types"]
    return f"numbers up to {rule['most']:,}" if counts and value > rule["most"] else ""


def short(value: Any) -> str:
    """A value as errors show it: of one short line, however large or deeply nested the value is."""
    text = _BRIEF.repr(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."


class _Brief(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 60, 60

    def repr_int(self, x: int, level: int) -> str:
        return str(x) if x.bit_length() < 128 else f"an integer of {x.bit_length()} bits"


_BRIEF = _Brief()
