"""Define the configuration of cone attention.

Here you learn which settings exist and which of them exclude each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option
from .reference import MAPPINGS, Mapping

Variant = Literal["umbral", "penumbral"]
VARIANTS = get_args(Variant)


@dataclass(frozen=True)
class ConeConfig(MechanismConfig):
    """Configuration of cone attention (Coneheads, arXiv 2306.00392).

    Logits come from lowest common ancestors of cones in the half-space.
    """

    mechanism = "cone"

    variant: Variant = option("umbral", "which cones: umbral or penumbral", choices=VARIANTS)
    mapping: Mapping | None = option(
        None,
        "head vector to half space; None: xi for umbral, psi for penumbral",
        choices=MAPPINGS,
        optional=True,
    )
    gamma: float = option(
        1.0,
        "what heights are multiplied with; where it is learned, the starting value",
        symbol="γ",
        above=0,
    )
    radius: float = option(
        1.0,
        "size of the light source's shadow; where it is learned, the starting value",
        symbol="r",
        above=0,
    )
    squared: bool = option(True, "penumbral: squared heights, as released, or heights")
    clamp_heights: bool = option(
        False, "penumbral: cut heights at r·(1 - 1e-3), which xi and expmap need"
    )

    def __post_init__(self):
        super().__post_init__()
        check_pairing(
            "ConeConfig.", self.variant, self.resolved_mapping, self.squared, self.clamp_heights
        )

    @property
    def resolved_mapping(self) -> str:
        """Return the mapping; None becomes the mapping that was released with the variant."""
        return resolve_mapping(self.variant, self.mapping)


def resolve_mapping(variant: str, mapping: str | None) -> str:
    """Return the mapping; None becomes the released pairing.

    The released code pairs umbral with xi, and penumbral with psi.
    """
    return mapping or {"umbral": "xi", "penumbral": "psi"}[variant]


def check_pairing(
    owner: str, variant: str, mapping: str, squared: bool, clamp_heights: bool
) -> None:
    """Check that variant, mapping and flags fit together.

    Args:
        owner: Prefix of the setting's name in messages: "ConeConfig." or "".
        variant: "umbral" or "penumbral".
        mapping: Resolved mapping.
        squared, clamp_heights: Flags of penumbral cones.

    Raises:
        ValueError: An umbral cone has a penumbral flag, or heights may exceed the radius.
    """
    settings = {"squared=False": not squared, "clamp_heights=True": clamp_heights}
    for setting, is_set in settings.items():
        if is_set and variant == "umbral":
            raise ValueError(
                f"{owner}{setting} has no meaning for variant='umbral'; allowed: leave it out, or variant='penumbral'"
            )
    # Penumbral cones need heights below the radius. Only the sigmoid of psi guarantees that.
    if variant == "penumbral" and mapping != "psi" and not clamp_heights:
        raise ValueError(
            f"{owner}mapping={mapping!r} gives heights above the radius, which variant='penumbral' does not "
            "allow; allowed: mapping='psi', or clamp_heights=True"
        )
