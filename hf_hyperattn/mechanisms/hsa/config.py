"""Configure Hierarchical Self-Attention.

This module shows which options HSA has, and what None means for each kind of tying.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ...config import MechanismConfig, option
from ...config.fields import MOST_INTEGER, check_field
from ...hierarchy.windows import checked_sizes

Tying = Literal["both", "key"]
TYINGS = get_args(Tying)

#: Meaning of None: for tying="key", and for tying="both".
DEFAULTS = {"near": (64, 0), "sinks": (4, 0), "refine_top_k": (16, 0), "block_bias": (0.0, 0.0)}

#: An integer for all heads, or one for each query head; None: the default of the tying.
Counts = int | tuple[int, ...] | None


def _count_option(help: str) -> Any:
    """Return a config field of type `Counts`."""
    return option(None, help, types=(int, tuple), least=0, optional=True)


@dataclass(frozen=True)
class Rule:
    """Hold the settings of a call's tying, without None.

    Args:
        tying: "both" or "key".
        keep_diagonal: Whether a token attends to itself.
        near, sinks, refine_top_k: One integer, or one per query head.
        block_bias: A number, one per query head, or a tensor of numbers.
    """

    tying: str
    keep_diagonal: bool = True
    near: Any = 0
    sinks: Any = 0
    refine_top_k: Any = 0
    block_bias: Any = 0.0


def list_numbers(value: Any) -> tuple:
    """Return numbers as a tuple: one for all heads, or one for each."""
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class HsaConfig(MechanismConfig):
    """Hierarchical Self-Attention (arXiv 2509.15448).

    Attention is tied over blocks of a tree over the tokens. Numbers are for all heads, or one for
    each query head.
    """

    mechanism = "hsa"

    windows: tuple[int, ...] = option(
        (16, 64, 256),
        "window sizes in tokens, bottom first, each dividing the next; used if the model is called without hierarchy=; "
        "() is the flat tree",
    )
    tying: Tying | None = option(
        None,
        "both: one weight for every pair of sibling blocks, bidirectional only; key: only keys are tied; None: key in "
        "causal attention, else both",
        choices=TYINGS,
        optional=True,
    )
    keep_diagonal: bool = option(
        True, "both: whether a token attends to itself; the paper's own setting is False"
    )
    near: Counts = _count_option(
        "key: blocks at a distance of less than this number of tokens are opened; None: 64"
    )
    sinks: Counts = _count_option(
        "key: blocks that hold one of this number of first tokens are opened; None: 4"
    )
    refine_top_k: Counts = _count_option(
        "key: number of blocks that each query opens on every level, by their scores; None: 16"
    )
    block_bias: float | tuple[float, ...] | None = option(
        None,
        "key: added to the logit of closed blocks; -inf (in JSON '-inf') drops them; None: 0; if learned, the starting "
        "value",
        types=(float, tuple),
        optional=True,
    )
    tuned_length: int | None = option(
        None,
        "number of tokens in a row that the other numbers were chosen for, written by `hyperattn inject`; a model that "
        "runs on 1.1 times as many warns once; None: not known",
        types=(int,),
        least=1,
    )

    @property
    def needs(self) -> dict[str, str]:
        """Return the properties that other mechanisms must keep, each with the reason."""
        return {
            "linear_in_key": "ties between keys need a score that is linear in the key",
            "logits_by_head": "tied logits stand for blocks of keys, which differ between heads, and cannot be mixed",
            "keys_as_they_are": "means of the unchanged keys of every head are kept",
        }

    def __post_init__(self):
        object.__setattr__(self, "block_bias", _read_block_bias(self.block_bias))
        if self.block_bias == math.inf:
            self._refuse("block_bias", "a finite number, or -inf")
        for f in fields(self):
            # -inf drops closed blocks. It is the only infinite number allowed, and `check_field`
            # knows none.
            if f.name != "block_bias" or self.block_bias != -math.inf:
                check_field("HsaConfig", f.name, getattr(self, f.name), f.metadata)
        # Lists, for example from JSON, become tuples, so that configs can be hashed.
        object.__setattr__(self, "windows", checked_sizes(self.windows))
        for name in DEFAULTS:
            self._check_numbers(name)
        if not self.keep_diagonal and self.tying == "key":
            self._refuse("keep_diagonal", "True with tying='key', where a token always sees itself")

    def _check_numbers(self, name: str) -> None:
        """Raise if a number is out of range or has no meaning for the tying."""
        values = getattr(self, name)
        if name == "block_bias":
            is_allowed, kind = _is_bias, "finite numbers or -inf"
        else:
            is_allowed, kind = _is_count, f"integers from 0 to {MOST_INTEGER:,}"
        several = list_numbers(values or 0)
        if not all(map(is_allowed, several)):
            self._refuse(name, f"{kind}, one for each query head")
        if values == ():
            self._refuse(name, "at least one number")
        if self.tying == "both" and any(several):
            self._refuse(name, "0 or None with tying='both', which opens no blocks; or tying='key'")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values.

        -inf, which JSON lacks, is the text "-inf". An unknown `tuned_length` is left out.
        """
        data, bias = super().to_dict(), self.block_bias
        if self.tuned_length is None:
            del data["tuned_length"]  # Earlier versions do not know this field.
        if isinstance(bias, tuple):
            data["block_bias"] = [_write_infinity(x) for x in bias]
        else:
            data["block_bias"] = _write_infinity(bias)
        return data

    def unread(self, causal: Collection[bool]) -> str | None:
        """See `MechanismConfig.unread`."""
        # A model may have causal and bidirectional layers. Warn only if no layer reads a number.
        tyings = {self.tying or ("key" if is_causal else "both") for is_causal in causal}
        values = {name: getattr(self, name) for name in DEFAULTS}
        given = [name for name, numbers in values.items() if any(list_numbers(numbers))]
        if tyings == {"both"} and given:
            name = given[0]
            why = "both sides are tied, as in bidirectional attention; leave it out, or set tying='key'"
        elif tyings == {"key"} and not self.keep_diagonal:
            name = "keep_diagonal"
            why = "keys alone are tied, as in causal attention; leave it out"
        else:
            return None
        return f"HsaConfig.{name} says nothing where {why}"

    def rule(self, is_causal: bool, heads: int, where: str) -> Rule:
        """Return the settings for attention of this direction.

        Args:
            is_causal: Whether attention is causal.
            heads: Number of query heads.
            where: Name of the layer or call, for messages.

        Raises:
            ValueError: tying="both" in causal attention, or numbers for another count of heads.
        """
        tying = self.tying or ("key" if is_causal else "both")
        if tying == "both" and is_causal:
            raise ValueError(
                f"HsaConfig.tying='both' ties queries too, and {where} is causal: a block's mean query would carry "
                "the future; allowed: tying='key' or None"
            )
        numbers = {}
        for name, (key, both) in DEFAULTS.items():
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != heads:
                raise ValueError(
                    f"HsaConfig.{name} has {len(value)} numbers; allowed: one, or one for each of the {heads} query "
                    f"heads of {where}"
                )
            if tying == "both":
                # `unread` has warned: these numbers have no meaning here.
                value = both
            elif value is None:
                value = key
            numbers[name] = value
        return Rule(tying, self.keep_diagonal or tying == "key", **numbers)


def _is_count(value) -> bool:
    """Return whether `near`, `sinks` and `refine_top_k` allow a value."""
    # bool is a subclass of int.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_INTEGER


def _is_bias(value) -> bool:
    """Return whether a value is a finite number or -inf."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return not math.isnan(value) and value < math.inf


def _read_block_bias(value):
    """Return a block bias in which the text "-inf" of JSON is the number."""
    if isinstance(value, tuple | list):
        return tuple(map(_read_infinity, value))
    return _read_infinity(value)


def _read_infinity(value):
    """Return a number from JSON, in which -inf is text."""
    return -math.inf if value == "-inf" else value


def _write_infinity(value):
    """Return a number for JSON, in which -inf is text."""
    return "-inf" if value == -math.inf else value
