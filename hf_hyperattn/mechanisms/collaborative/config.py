"""The config of collaborative heads."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import MechanismConfig, option
from ...config.fields import MOST_SEED

#: Default number of steps of the decomposition.
STEPS = 100


@dataclass(frozen=True)
class CollaborativeConfig(MechanismConfig):
    """Collaborative heads (arXiv 2006.16362): heads mix shared queries and keys.

    - `rank=None` is for `patch_model`: full rank, which starts as the identity, with learned mixing
      vectors.
    - With a rank it is for `hf_hyperattn.convert`, which replaces the query and key projections by
      shared ones of that many dimensions.
    """

    mechanism = "collaborative"

    rank: int | None = option(
        None,
        "dimensions that all heads share; None: heads times head dimension, with no projection replaced",
        symbol="D_k",
        least=1,
        types=(int,),
        optional=True,
    )
    steps: int = option(
        STEPS, "largest number of steps of the decomposition, with a rank only", least=0
    )
    seed: int = option(
        0, "random seed of the decomposition, with a rank only", least=0, most=MOST_SEED
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
        """Properties that it removes for other mechanisms: none."""
        # Unlike other scores, this one stays a product of query features and key features.
        return frozenset()
