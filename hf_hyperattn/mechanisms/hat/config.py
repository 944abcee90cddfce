"""Configuration of the hierarchical attention transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option
from ...fields import short
from .layouts import LAYOUTS, is_layout

Pooling = Literal["max", "mean", "tokens"]
POOLING = get_args(Pooling)
CrossBlocks = Literal["copy", "new"]
CROSS_BLOCKS = get_args(CrossBlocks)


@dataclass(frozen=True)
class HatConfig(MechanismConfig):
    """Hierarchical Attention Transformer (arXiv 2210.05529): blocks within segments, and blocks across them.

    A change of architecture: `hf_hyperattn.convert(model, HatConfig())`.
    """

    mechanism = "hat"

    segment_length: int = option(
        128,
        "tokens of a segment, its CLS token included; at most the pretrained positions",
        symbol="K",
        least=2,
    )
    layout: str = option(
        "I1",
        f"which cross-segment blocks follow which segment-wise blocks: {', '.join(LAYOUTS)}, or a pattern such as "
        "'S S SC S S SC', one group for each pretrained layer",
    )
    max_length: int = option(8192, "the most tokens of a text", least=1)
    cross_blocks: CrossBlocks = option(
        "copy",
        "copy: cross-segment blocks start as the pretrained layer of their segment-wise block; new: at random",
        choices=CROSS_BLOCKS,
    )
    gated: bool = option(
        False,
        "whether the output of each cross-segment block is blended in with a learned gate, 0 at first; the published "
        "model has none",
    )
    pooling: Pooling = option(
        "max",
        "what a text's vector is made of: max or mean over its segments' CLS rows, or tokens, the mean over all tokens",
        choices=POOLING,
    )
    cls_token_id: int | None = option(
        None,
        "the token that leads every segment, put before texts that do not begin with it; None: the first token of "
        "each text, which tokenizers of these models make [CLS] or <s>",
        types=(int,),
        least=0,
        optional=True,
    )

    def __post_init__(self):
        super().__post_init__()
        if not is_layout(self.layout):
            raise ValueError(
                f"HatConfig.layout={short(self.layout)} is not allowed; allowed: {', '.join(LAYOUTS)}, or a pattern "
                "such as 'S S SC S S SC', one group for each pretrained layer"
            )
