"""Configuration of collaborative heads."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import MechanismConfig, option
from ...fields import MOST_SEED

#: Steps of the decomposition where nothing is said.
STEPS = 100


@dataclass(frozen=True)
class CollaborativeConfig(MechanismConfig):
    """Collaborative heads (arXiv 2006.16362): all heads share queries and keys, each mixes their dimensions.

    `rank=None` is for `patch_model`: full rank, which starts as the identity, with mixing vectors to learn. With a rank
    it is for `hf_hyperattn.convert`, which replaces the projections of queries and keys by shared ones of that many
    dimensions.
    """

    mechanism = "collaborative"

    rank: int | None = option(
        None,
        "dimensions that all heads share; None: heads times head dimension, all that there are, with nothing replaced",
        symbol="D_k",
        least=1,
        types=(int,),
        optional=True,
    )
    steps: int = option(STEPS, "most steps of the decomposition, with a rank only", least=0)
    seed: int = option(
        0, "of the decomposition's random start, with a rank only", least=0, most=MOST_SEED
    )

    def __post_init__(self):
        super().__post_init__()
        for name, default in (("steps", STEPS), ("seed", 0)):
            if self.rank is None and getattr(self, name) != default:
                raise ValueError(
                    f"CollaborativeConfig.{name}={getattr(self, name)} has no meaning for rank=None, which decomposes "
                    "nothing; allowed: leave it out, or give a rank"
                )

    @property
    def breaks(self) -> frozenset[str]:
        """Its score is a product of features."""
        return frozenset()
