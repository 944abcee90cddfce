"""Configuration of the fusion of heads."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import MechanismConfig, option
from ...fields import MOST_SEED

#: Largest width of the query map where none is given; more than there are heads adds nothing to what it can say.
WIDEST = 16


@dataclass(frozen=True)
class HeadFusionConfig(MechanismConfig):
    """Attention over heads: every token weighs the heads' outputs before the output projection joins them."""

    mechanism = "head_fusion"

    size: int | None = option(
        None,
        f"numbers in a token's query for heads; None: one per head, at most {WIDEST}",
        symbol="a",
        types=(int,),
        least=1,
        optional=True,
    )
    spread: float = option(
        0.02,
        "standard deviation of the query map where it starts; the heads' keys start at 0",
        above=0,
    )
    seed: int = option(0, "of the query map where it starts", least=0, most=MOST_SEED)

    def size_for(self, heads: int) -> int:
        """Numbers in a token's query, for a host with so many heads."""
        return self.size or min(heads, WIDEST)
