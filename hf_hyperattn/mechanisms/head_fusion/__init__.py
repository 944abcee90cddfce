"""Head fusion: attention over heads, before the output projection."""

from ...config.registry import Mechanism, register
from .config import HeadFusionConfig
from .layer import HeadFusionLayer

register(
    Mechanism(
        name="head_fusion",
        stage="fusion",
        paper="Hierarchical fusion of heads: attention over heads; no paper of its own",
        config=HeadFusionConfig,
        layer=HeadFusionLayer,
    )
)
