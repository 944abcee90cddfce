"""Cone attention (Coneheads, arXiv 2306.00392)."""

from ...config.registry import Mechanism, register
from . import terms  # noqa: F401  registers the terms with the engines
from .config import ConeConfig
from .functional import cone_attention, cone_scores
from .score import ConeLayer

register(
    Mechanism(
        name="cone",
        stage="score",
        paper="Coneheads: Hierarchy Aware Attention, arXiv 2306.00392",
        config=ConeConfig,
        layer=ConeLayer,
        functions={"cone_attention": cone_attention, "cone_scores": cone_scores},
        names={"cone": ConeConfig(), "cone_penumbral": ConeConfig(variant="penumbral")},
    )
)
