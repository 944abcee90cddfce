"""Hyperbolic space in its models: points, maps, distances, midpoints. Knows no attention."""

from . import halfspace, klein, lorentz, poincare
from .convert import (
    halfspace_to_poincare,
    klein_to_lorentz,
    klein_to_poincare,
    lorentz_to_klein,
    lorentz_to_poincare,
    poincare_to_halfspace,
    poincare_to_klein,
    poincare_to_lorentz,
)
from .poincare import angular_similarity, depth

__all__ = [
    "angular_similarity",
    "depth",
    "halfspace",
    "halfspace_to_poincare",
    "klein",
    "klein_to_lorentz",
    "klein_to_poincare",
    "lorentz",
    "lorentz_to_klein",
    "lorentz_to_poincare",
    "poincare",
    "poincare_to_halfspace",
    "poincare_to_klein",
    "poincare_to_lorentz",
]
