"""Configuration of multiple kernel learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option

Kind = Literal["global", "conditional"]
KINDS = get_args(Kind)


@dataclass(frozen=True)
class MklConfig(MechanismConfig):
    """Multiple kernel learning: every head's logits weighted, by a softmax over heads."""

    mechanism = "mkl"

    kind: Kind = option(
        "global",
        "weights of heads: global, one learned set; conditional, from the values of both tokens of a pair",
        symbol="β",
        choices=KINDS,
    )
    combine: bool = option(
        False,
        "sum the weighted logits over heads into one attention that all heads share; mode='replace' only",
    )

    @property
    def positional(self) -> bool:
        """Conditional weights ask for a query's own value."""
        return self.kind == "conditional"

    @property
    def breaks(self) -> frozenset[str]:
        """Conditional weights act on keys, and combined logits are of the keys of all heads."""
        conditional = {"keys_as_they_are", "free_of_rows"} if self.kind == "conditional" else set()
        return frozenset(conditional | ({"keys_as_they_are"} if self.combine else set()))

    @property
    def needs(self) -> dict[str, str]:
        """What is weighted are logits of pairs."""
        return {
            "pairwise_logits": "the logits are of three tokens, and those that would be weighted are of two"
        }
