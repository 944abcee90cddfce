"""HyPE, a positional bias made of hyperbolic functions (arXiv 2310.19676)."""

from ...config.registry import Mechanism, register
from . import terms  # noqa: F401  registers the terms with the engines
from .config import HypeConfig
from .functional import hype_attention, hype_bias
from .score import HypeLayer

register(
    Mechanism(
        name="hype",
        stage="bias",
        paper="HyPE: Attention with Hyperbolic Biases for Relative Positional Encoding, arXiv 2310.19676",
        config=HypeConfig,
        layer=HypeLayer,
        functions={"hype_attention": hype_attention, "hype_bias": hype_bias},
        names={"hype": HypeConfig()},
        cross_attention=False,
    )
)
