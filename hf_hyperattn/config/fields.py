"""Fields of configs: their help, symbol and range, and the check of a value.

`option` makes a dataclass field with this metadata; `check_field` checks a value against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from ..utils.text import short

#: Larger numbers are infinite in float32, the least precise dtype in which configs are used.
LARGEST = 3e38
#: Smaller positive numbers are 0 or lose digits in float32.
SMALLEST = 1.2e-38
#: Default limit of integers in a config. No text has so long a length, and sums of a few such
#: numbers still fit into int64, with which kernels count.
MOST_INTEGER = 10**18
#: Limit of a weight's size along one dimension, as far as a config names it.
MOST_SIZE = 2**24
#: Largest seed that torch's generators use unchanged.
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
    per_head: bool = False,
) -> Any:
    """Make a dataclass field with help, the symbol of the paper, and allowed values.

    Args:
        default: Default value, or a function that makes it; `dataclasses.MISSING` for a required
            field.
        help: Description of the field.
        symbol: Symbol in the paper.
        choices: Allowed values; empty means any.
        above: Exclusive lower bound of a number.
        least: Inclusive lower bound of a number.
        most: Largest value of an integer.
        types: Allowed types; default: the type of `default`.
        optional: Whether None is allowed; always True if the default is None.
        per_head: Whether a tuple holds one number per query head. Each obeys the rule of a single
            number.
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
        per_head=per_head,
    )
    # Mutable defaults need a factory, as in every dataclass.
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the one-line ValueError for a value that is not allowed."""
    raise ValueError(f"{name}={short(value)} is not allowed; allowed: {allowed}")


def check_known(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise a one-line TypeError for an unknown name.

    Args:
        what: Beginning of the message.
        given: The given names.
        known: The allowed names.
    """
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        nearest = "".join(
            f"; did you mean {name!r}?" for name in get_close_matches(unknown, known, 1)
        )
        raise TypeError(f"{what} {short(unknown)}; allowed: {', '.join(known)}{nearest}")


class KnownFields:
    """Base of dataclasses whose error for an unknown keyword lists the known ones."""

    # A type checker must see the dataclass fields as arguments, not this signature.
    if not TYPE_CHECKING:

        def __new__(cls, *args, **kwargs):
            if not kwargs.keys() <= cls.__dataclass_fields__.keys():
                check_known(f"{cls.__name__} has no field", kwargs, cls.__dataclass_fields__)
            return super().__new__(cls)

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        refuse(f"{type(self).__name__}.{name}", getattr(self, name), allowed)


def check_field(owner: str, name: str, value: Any, rule: Mapping[str, Any]) -> None:
    """Raise a one-line ValueError if a value breaks the rule of its field.

    Args:
        owner: Name of the config class.
        name: Name of the field.
        value: The value.
        rule: Metadata that `option` made.
    """
    allowed = _describe_allowed(value, rule)
    if allowed:
        refuse(f"{owner}.{name}", value, allowed)


def _describe_allowed(value: Any, rule: Mapping[str, Any]) -> str:
    """Return the allowed values in words if `value` is not allowed, else ""."""
    if value is None:
        return "" if rule["optional"] else "a value, not None"
    if rule["choices"]:
        # `in` alone could call `__eq__` of any object, for example of a tensor.
        known = isinstance(value, str | int | float) and value in rule["choices"]
        return "" if known else ", ".join(map(repr, rule["choices"]))
    # An int is a valid float. A bool is an int in Python, but not a valid number.
    types = (*rule["types"], int) if float in rule["types"] else rule["types"]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return " or ".join(t.__name__ for t in rule["types"])
    if rule["per_head"] and isinstance(value, tuple):
        return _describe_entries(value, rule)
    # The checks below are for numbers only.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    above, least = rule["above"], rule["least"]
    if not -LARGEST < value < LARGEST:
        return f"a finite number, of at most {LARGEST:g}"
    if above is not None and value <= above:
        return f"numbers above {above:g}"
    # A positive number that float32 rounds to 0 would break the promise of "above 0".
    if above == 0 and value < SMALLEST:
        return f"numbers above 0, from {SMALLEST:g}, the least that float32 holds in full"
    if least is not None and value < least:
        return f"numbers from {least:g}"
    is_integer_field = int in rule["types"] and float not in rule["types"]
    if is_integer_field and value > rule["most"]:
        return f"numbers up to {rule['most']:,}"
    return ""


def _describe_entries(values: tuple, rule: Mapping[str, Any]) -> str:
    """Return the allowed numbers per head in words if one of them is not allowed, else ""."""
    if not values:
        return "at least one number"
    entry = {**rule, "types": (float,), "optional": False}
    if not any(_describe_allowed(x, entry) for x in values):
        return ""
    bound = ""
    if rule["above"] is not None:
        bound = f" above {rule['above']:g}"
    elif rule["least"] is not None:
        bound = f" from {rule['least']:g}"
    return f"finite numbers{bound}, one for each query head"
