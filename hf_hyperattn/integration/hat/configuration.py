"""Configuration of HAT models."""

from __future__ import annotations

import logging

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ...fields import refuse
from ...mechanisms.hat.config import HatConfig, count_cross_blocks, has_cross_blocks
from ...mechanisms.hat.segments import count_segments
from ...selection import MOST

logger = logging.getLogger("hf_hyperattn")
#: Fields that mean here what they mean in `HatConfig`, which checks them.
SHARED = ("segment_length", "layout", "gated", "pooling", "cls_token_id")


@strict
class HatEncoderConfig(PreTrainedConfig):
    """Configuration of `HatModel`: post-norm blocks within segments, and across the segments' CLS rows.

    Args:
        vocab_size, hidden_size, num_attention_heads, intermediate_size, hidden_act: as in BERT.
        hidden_dropout_prob, attention_probs_dropout_prob, classifier_dropout, initializer_range: as in BERT.
        layer_norm_eps, pad_token_id, tie_word_embeddings: as in BERT.
        num_hidden_layers: number of segment-wise blocks.
        segment_length, layout, gated, pooling, cls_token_id: as in `HatConfig`.
        max_position_embeddings: the most tokens of a text.
        type_vocab_size: kinds of tokens; 0 for none.
        embedding_size: width of the tables of embeddings; None: hidden_size. Another width is projected to that.
        pooler_act: between the pooled vector's linear map and what follows; None: no such map.
        lm_act: the same in the head for masked language modelling.

    Raises:
        ValueError: numbers that do not fit each other, or that `HatConfig` refuses.
    """

    model_type = "hat"

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    classifier_dropout: float | int | None = None
    max_position_embeddings: int = 8192
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    segment_length: int = 128
    layout: str = "I1"
    gated: bool = False
    pooling: str = "max"
    cls_token_id: int | None = None
    embedding_size: int | None = None
    pooler_act: str | None = "tanh"
    lm_act: str = "gelu"

    def __post_init__(self, **kwargs):
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        shared = {name: getattr(self, name) for name in SHARED}
        if self.gated and isinstance(self.layout, str) and not has_cross_blocks(self.layout):
            # no error, since earlier versions saved such configs
            logger.warning(
                f"hf_hyperattn: HatEncoderConfig.gated says nothing: layout={self.layout!r} has no gate"
            )
            shared["gated"] = False
        HatConfig(max_length=self.max_position_embeddings, **shared)
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            allowed = f"multiples of num_attention_heads={self.num_attention_heads}"
            refuse("HatEncoderConfig.hidden_size", self.hidden_size, allowed)
        if not 1 <= self.num_hidden_layers <= MOST:  # before a layout is made for them
            refuse(
                "HatEncoderConfig.num_hidden_layers",
                self.num_hidden_layers,
                f"numbers from 1 to {MOST:,}",
            )
        count_cross_blocks(self.layout, self.num_hidden_layers)
        super().__post_init__(**kwargs)

    @property
    def cross_blocks(self) -> tuple[int, ...]:
        """How many cross-segment blocks follow each segment-wise block."""
        return count_cross_blocks(self.layout, self.num_hidden_layers)

    @property
    def max_segments(self) -> int:
        """The most segments of a text; one more where a CLS token may have to be put before it."""
        return count_segments(
            self.max_position_embeddings + (self.cls_token_id is not None), self.segment_length
        )
