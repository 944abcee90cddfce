"""Trilinear attention: logits from three vectors.

Three-way attention is from arXiv 1909.00668 and 2507.02754, BiDAF's score from arXiv 1611.01603.
"""

from ...config.registry import Mechanism, register
from .config import TrilinearConfig
from .functional import bidaf_scores, trilinear_attention
from .layer import trilinear_layer

register(
    Mechanism(
        name="trilinear",
        stage="score",
        paper="Fast and Simplex: 2-Simplicial Attention in Triton, arXiv 2507.02754",
        config=TrilinearConfig,
        layer=trilinear_layer,
        functions={"trilinear_attention": trilinear_attention, "bidaf_scores": bidaf_scores},
    )
)
