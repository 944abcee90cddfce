"""All mechanisms as functions, with arguments like `scaled_dot_product_attention`.

The functions are defined in the mechanisms' packages. Functions of registered mechanisms from other
packages are found here too. `edge_attention` applies any of their scores to the edges of a graph.
"""

from typing import TYPE_CHECKING

from .config.registry import lookup
from .mechanisms.cone.functional import cone_attention, cone_scores
from .mechanisms.edges import edge_attention
from .mechanisms.hsa.functional import hierarchical_attention
from .mechanisms.hype.functional import hype_attention, hype_bias
from .mechanisms.hyperbolic.functional import hyperbolic_attention, hyperbolic_scores
from .mechanisms.mkl.functional import mkl_attention
from .mechanisms.scores import scored_attention
from .mechanisms.sparse.functional import sparse_attention
from .mechanisms.talking_heads.functional import talking_heads_attention
from .mechanisms.trilinear.functional import bidaf_scores, trilinear_attention

__all__ = [
    "bidaf_scores",
    "cone_attention",
    "cone_scores",
    "edge_attention",
    "hierarchical_attention",
    "hype_attention",
    "hype_bias",
    "hyperbolic_attention",
    "hyperbolic_scores",
    "mkl_attention",
    "scored_attention",
    "sparse_attention",
    "talking_heads_attention",
    "trilinear_attention",
]

# A type checker sees only the names above, so that it reports misspelt ones.
if not TYPE_CHECKING:
    __getattr__ = lookup(__name__, lambda mechanism: mechanism.functions)
