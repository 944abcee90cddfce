"""Hierarchical Attention Transformers (HAT, arXiv 2210.05529).

HAT is a conversion to another architecture, see `hf_hyperattn.convert`.
"""

from ...config.registry import Mechanism, register
from .config import HatConfig


def refuse_layer(config, host, mode, heads):
    """Raise ValueError: HAT replaces the architecture and has no attention layer."""
    raise ValueError(
        "HatConfig changes the architecture; hf_hyperattn.convert(model, config) is for it"
    )


register(
    Mechanism(
        name="hat",
        stage="structure",
        paper="An Exploration of Hierarchical Attention Transformers for Efficient Long Document Classification, "
        "arXiv 2210.05529",
        config=HatConfig,
        layer=refuse_layer,
        cross_attention=False,
    )
)
