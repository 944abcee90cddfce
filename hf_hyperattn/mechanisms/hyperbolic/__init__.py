"""Hyperbolic-distance attention (Hyperbolic Attention Networks, arXiv 1805.09786)."""

from ...config.registry import Mechanism, register
from . import terms  # noqa: F401  registers the terms with the engines
from .config import HyperbolicConfig
from .functional import hyperbolic_attention, hyperbolic_scores
from .score import HyperbolicLayer

register(
    Mechanism(
        name="hyperbolic",
        stage="score",
        paper="Hyperbolic Attention Networks, arXiv 1805.09786",
        config=HyperbolicConfig,
        layer=HyperbolicLayer,
        functions={
            "hyperbolic_attention": hyperbolic_attention,
            "hyperbolic_scores": hyperbolic_scores,
        },
        names={"hyperbolic": HyperbolicConfig()},
    )
)
