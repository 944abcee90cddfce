"""Define the configuration of hyperbolic-distance attention.

Here you learn which settings exist, and which properties of attention they change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option

Distance = Literal["geodesic", "squared_lorentz"]
DISTANCES = get_args(Distance)
Aggregation = Literal["einstein", "mean"]
AGGREGATIONS = get_args(Aggregation)


@dataclass(frozen=True)
class HyperbolicConfig(MechanismConfig):
    """Configuration of hyperbolic-distance attention (arXiv 1805.09786).

    Logits come from distances in the Poincaré ball. Values are averaged by their Einstein midpoint.
    """

    mechanism = "hyperbolic"

    curvature: float = option(
        1.0,
        "the ball's curvature is minus this; where it is learned, the starting value",
        symbol="c",
        above=0,
    )
    temperature: float = option(
        1.0,
        "what distances are divided by; where it is learned, the starting value",
        symbol="τ",
        above=0,
    )
    distance: Distance = option(
        "geodesic", "geodesic distance, or squared Lorentz distance", choices=DISTANCES
    )
    aggregation: Aggregation = option(
        "einstein",
        "einstein: the Einstein midpoint of the values; mean: as usual",
        choices=AGGREGATIONS,
    )

    @property
    def stages(self) -> tuple[str, ...]:
        """The score stage. The midpoint also changes how values are averaged."""
        stages = super().stages
        return (*stages, "aggregation") if self.aggregation == "einstein" else stages

    @property
    def breaks(self) -> frozenset[str]:
        """Properties that the settings remove for other mechanisms."""
        broken = set()
        # The squared Lorentz distance is a product of features, the geodesic distance is not.
        if self.distance == "geodesic":
            broken.add("linear_in_key")
        # A midpoint has no meaning for negative weights.
        if self.aggregation == "einstein":
            broken.add("any_weights")
        return frozenset(broken)
