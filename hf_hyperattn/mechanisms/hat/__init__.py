"""Hierarchical Attention Transformers (arXiv 2210.05529): a conversion, see `hf_hyperattn.convert`."""

from ...registry import Mechanism, register
from .config import HatConfig


def no_layer(config, host, mode, heads):
    """HAT has no layer for a host."""
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
        layer=no_layer,
        cross_attention=False,
    )
)
