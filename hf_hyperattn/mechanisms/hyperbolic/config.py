"""Configuration of hyperbolic-distance attention."""

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
    """Hyperbolic-distance attention (Hyperbolic Attention Networks, arXiv 1805.09786): logits from distances in the
    Poincaré ball, values averaged by their Einstein midpoint.
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
        """The midpoint changes how values are averaged, beside the score."""
        return (
            (*super().stages, "aggregation") if self.aggregation == "einstein" else super().stages
        )

    @property
    def breaks(self) -> frozenset[str]:
        """The squared Lorentz distance is a product of features; a midpoint is one of weights that are not negative."""
        geodesic = {"linear_in_key"} if self.distance == "geodesic" else set()
        return frozenset(geodesic | ({"any_weights"} if self.aggregation == "einstein" else set()))
