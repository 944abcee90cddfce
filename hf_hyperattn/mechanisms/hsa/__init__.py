"""Register Hierarchical Self-Attention (arXiv 2509.15448) as the mechanism "hsa".

This module shows which config, layer and function belong to the name.
"""

from ...config.registry import Mechanism, register
from .config import HsaConfig
from .functional import hierarchical_attention
from .layer import HsaLayer

register(
    Mechanism(
        name="hsa",
        stage="structure",
        paper="Hierarchical Self-Attention: Generalizing Neural Attention Mechanics to Multi-Scale Problems, "
        "arXiv 2509.15448",
        config=HsaConfig,
        layer=HsaLayer,
        functions={"hierarchical_attention": hierarchical_attention},
        names={"hsa": HsaConfig()},
        # Blocks of keys and queries come from one tree over the same tokens.
        cross_attention=False,
    )
)
