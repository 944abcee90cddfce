"""Configuration of multi-kernel gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option

Kind = Literal["global", "conditional"]
KINDS = get_args(Kind)


@dataclass(frozen=True)
class MklConfig(MechanismConfig):
    """Multi-kernel gates: every head's logits weighted, by a softmax over heads."""

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
    def refuses(self) -> dict[str, str]:
        """What weights of keys would break: means of keys that a cache keeps, and sums that a softmax does not see."""
        if self.kind == "global" and not self.combine:
            return {}
        what = "conditional weights differ" if self.kind == "conditional" else "the combined logits differ"
        found = {"hsa": f"{what} from what it keeps of the keys of every head"}
        if self.kind == "conditional":
            found["trilinear"] = (
                "weights of keys would change what a softmax does not see of w_1·q (kind='global' does not)"
            )
        return found
