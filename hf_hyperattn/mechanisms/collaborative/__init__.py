"""Collaborative heads: all heads share queries and keys.

From "Multi-Head Attention: Collaborate Instead of Concatenate", arXiv 2006.16362.
"""

from ...config.registry import Mechanism, register
from .config import CollaborativeConfig
from .layer import collaborative_layer

register(
    Mechanism(
        name="collaborative",
        stage="score",
        paper="Multi-Head Attention: Collaborate Instead of Concatenate, arXiv 2006.16362",
        config=CollaborativeConfig,
        layer=collaborative_layer,
    )
)
