"""The config of multiple kernel learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option

Kind = Literal["global", "conditional"]
KINDS = get_args(Kind)


@dataclass(frozen=True)
class MklConfig(MechanismConfig):
    """Multiple kernel learning: a softmax over heads weights every head's logits."""

    mechanism = "mkl"

    kind: Kind = option(
        "global",
        "weights of heads: global, one learned set; conditional, from the values of query and key token",
        symbol="β",
        choices=KINDS,
    )
    combine: bool = option(
        False,
        "sum the weighted logits over heads into one attention that all heads share; mode='replace' only",
    )

    @property
    def breaks(self) -> frozenset[str]:
        """Properties that the weights remove for other mechanisms."""
        # Conditional weights scale each key, and with it terms that are constant in a row. Combined
        # logits depend on the keys of all heads.
        conditional = {"keys_as_they_are", "free_of_rows"} if self.kind == "conditional" else set()
        return frozenset(conditional | ({"keys_as_they_are"} if self.combine else set()))

    @property
    def needs(self) -> dict[str, str]:
        """Properties that the weights rely on."""
        return {
            "pairwise_logits": "the logits belong to three tokens, and mkl weights logits of two"
        }
