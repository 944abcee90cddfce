"""The config of head fusion."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import MechanismConfig, option
from ...config.fields import MOST_SEED

#: Largest default width of the query map. More than the number of heads adds no expressive power.
WIDEST = 16


@dataclass(frozen=True)
class HeadFusionConfig(MechanismConfig):
    """Attention over heads: every token weights the outputs of its heads.

    The output projection then joins the weighted outputs.
    """

    mechanism = "head_fusion"

    size: int | None = option(
        None,
        f"size of a token's query for heads; None: the number of heads, at most {WIDEST}",
        symbol="a",
        types=(int,),
        least=1,
        optional=True,
    )
    spread: float = option(
        0.02,
        "initial standard deviation of the query map; the heads' keys start at 0",
        above=0,
    )
    seed: int = option(0, "random seed of the query map", least=0, most=MOST_SEED)

    def size_for(self, heads: int) -> int:
        """Return the size of a token's query, for a layer with this number of heads."""
        return self.size or min(heads, WIDEST)
