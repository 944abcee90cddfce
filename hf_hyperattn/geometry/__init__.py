"""Hyperbolic space as the Poincaré ball: points, maps, distances, midpoints.

This package is independent of attention.
"""

from typing import TYPE_CHECKING

from . import poincare
from .poincare import angular_similarity, depth

__all__ = ["angular_similarity", "depth", "poincare"]

if not TYPE_CHECKING:
    #: Names of earlier versions, and their replacements.
    _MOVED = {"lorentz": "geoopt.Lorentz(k=1/c)"} | dict.fromkeys(
        ("klein", "halfspace")
        + ("klein_to_poincare", "lorentz_to_poincare", "halfspace_to_poincare", "klein_to_lorentz")
        + ("poincare_to_klein", "poincare_to_lorentz", "poincare_to_halfspace", "lorentz_to_klein"),
        "hf_hyperattn.geometry.poincare or geoopt.PoincareBall(c=c), with the formulas of docs/geometry.md from and "
        "to other models",
    )

    def __getattr__(name: str):
        if name in _MOVED:
            raise AttributeError(
                f"hf_hyperattn.geometry.{name} left the package; use {_MOVED[name]}"
            )
        raise AttributeError(f"hf_hyperattn.geometry has no {name!r}; it has: {', '.join(__all__)}")
