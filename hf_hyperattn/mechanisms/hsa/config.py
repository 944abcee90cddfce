"""Configuration of Hierarchical Self-Attention, and what it means for a host."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ...config import MechanismConfig, option
from ...fields import MOST_INTEGER, check_field
from ...hierarchy.windows import checked_sizes

Tying = Literal["both", "key"]
TYINGS = get_args(Tying)

#: What None means: for key tying, and for tying on both sides.
DEFAULTS = {"near": (64, 0), "sinks": (4, 0), "refine_top_k": (16, 0), "block_bias": (0.0, 0.0)}


#: An integer for all heads, or one for each query head; None: the default of the tying.
Counts = int | tuple[int, ...] | None


def _count_option(help: str) -> Any:
    return option(None, help, types=(int, tuple), least=0, optional=True)


@dataclass(frozen=True)
class Rule:
    """How a call is tied, with every default settled.

    Args:
        tying: "both" or "key".
        keep_diagonal: whether a token attends to itself.
        near, sinks, refine_top_k: one integer, or one per query head.
        block_bias: a number, one per query head, or a tensor of those.
    """

    tying: str
    keep_diagonal: bool = True
    near: Any = 0
    sinks: Any = 0
    refine_top_k: Any = 0
    block_bias: Any = 0.0


@dataclass(frozen=True)
class HsaConfig(MechanismConfig):
    """Hierarchical Self-Attention (arXiv 2509.15448): attention tied over blocks of a tree over the tokens.

    Numbers are for all heads, or one for each query head.
    """

    mechanism = "hsa"

    windows: tuple[int, ...] = option(
        (16, 64, 256),
        "tokens of the windows, bottom first, each dividing the next, where the model is called without hierarchy=; "
        "() is the flat tree",
    )
    tying: Tying | None = option(
        None,
        "both: one number for every pair of sibling blocks, bidirectional only; key: only keys are tied; None: key "
        "where attention is causal, else both",
        choices=TYINGS,
        optional=True,
    )
    keep_diagonal: bool = option(
        True, "both: whether a token attends to itself; the paper's own setting is False"
    )
    near: Counts = _count_option("key: blocks less than so many tokens away are opened; None: 64")
    sinks: Counts = _count_option("key: blocks of the first so many tokens are opened; None: 4")
    refine_top_k: Counts = _count_option(
        "key: so many blocks of every level are opened, chosen by query; None: 16"
    )
    block_bias: float | tuple[float, ...] | None = option(
        None,
        "key: added to the logit of closed blocks; -inf (in JSON '-inf') drops them; None: 0; where it is learned, the "
        "starting value",
        types=(float, tuple),
        optional=True,
    )
    tuned_length: int | None = option(
        None,
        "tokens a row that the other numbers were chosen for, as `hyperattn inject` writes it; a model that runs on "
        "1.1 times as many warns once; None: not known",
        types=(int,),
        least=1,
    )

    @property
    def needs(self) -> dict[str, str]:
        """Blocks of keys are tied through their means."""
        return {
            "linear_in_key": "ties between keys need a score that is linear in the key",
            "logits_by_head": "tied logits stand for blocks of keys, which are others in every head, and cannot be "
            "mixed",
            "keys_as_they_are": "what is kept of the keys of every head are their means as they are",
        }

    def __post_init__(self):
        object.__setattr__(self, "block_bias", _read_block_bias(self.block_bias))
        if self.block_bias == math.inf:
            self._refuse("block_bias", "a finite number, or -inf")
        for f in fields(self):
            if (
                f.name != "block_bias" or self.block_bias != -math.inf
            ):  # the one infinite number allowed
                check_field("HsaConfig", f.name, getattr(self, f.name), f.metadata)
        object.__setattr__(self, "windows", checked_sizes(self.windows))
        for name in DEFAULTS:
            self._check_numbers(name)
        if not self.keep_diagonal and self.tying == "key":
            self._refuse("keep_diagonal", "True with tying='key', where a token always sees itself")

    def _check_numbers(self, name: str) -> None:
        values, whole = getattr(self, name), name != "block_bias"
        several = values if isinstance(values, tuple) else (values or 0,)
        for x in several:
            fine = isinstance(x, int | float) and not isinstance(x, bool)
            fine = fine and (
                isinstance(x, int) and 0 <= x <= MOST_INTEGER
                if whole
                else not math.isnan(x) and x < math.inf
            )
            if not fine:
                kind = f"integers from 0 to {MOST_INTEGER:,}" if whole else "finite numbers or -inf"
                self._refuse(name, f"{kind}, one for each query head")
        if values == ():
            self._refuse(name, "at least one number")
        if self.tying == "both" and any(several):
            self._refuse(name, "0 or None with tying='both', which opens no blocks; or tying='key'")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; -inf, which JSON lacks, as text; without a `tuned_length` that is not known."""
        data, bias = super().to_dict(), self.block_bias
        if self.tuned_length is None:
            del data["tuned_length"]  # earlier versions do not know it
        text = lambda x: "-inf" if x == -math.inf else x
        data["block_bias"] = [text(x) for x in bias] if isinstance(bias, tuple) else text(bias)
        return data

    def unread(self, causal: Collection[bool]) -> str | None:
        tyings = {self.tying or ("key" if is_causal else "both") for is_causal in causal}
        values = {name: getattr(self, name) for name in DEFAULTS}
        given = [name for name, x in values.items() if (any(x) if isinstance(x, tuple) else x)]
        if tyings == {"both"} and given:
            name, why = (
                given[0],
                "both sides are tied, as in bidirectional attention; leave it out, or set tying='key'",
            )
        elif tyings == {"key"} and not self.keep_diagonal:
            name, why = "keep_diagonal", "keys alone are tied, as in causal attention; leave it out"
        else:
            return None
        return f"HsaConfig.{name} says nothing where {why}"

    def rule(self, is_causal: bool, heads: int, where: str) -> Rule:
        """What the config means for attention of this direction.

        Raises:
            ValueError: tying="both" where attention is causal, or numbers for another count of heads.
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
            numbers[name] = both if tying == "both" else key if value is None else value
        return Rule(tying, self.keep_diagonal or tying == "key", **numbers)


def _read_block_bias(value):
    """A block bias with the text that stands for -inf in JSON read."""
    read = lambda x: -math.inf if x == "-inf" else x
    return tuple(map(read, value)) if isinstance(value, tuple | list) else read(value)
