"""Configuration of HAT models.

`HatEncoderConfig` describes a finished model. `HatConfig` describes how `convert` makes one.
"""

from __future__ import annotations

import logging

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ....config.choice import MOST
from ....config.fields import refuse
from ....mechanisms.hat.config import HatConfig, count_cross_blocks, has_cross_blocks
from ....mechanisms.hat.segments import count_segments

logger = logging.getLogger("hf_hyperattn")
#: Fields that both configs have. `HatConfig` checks them.
SHARED = ("segment_length", "layout", "gated", "pooling", "cls_token_id")


@strict
class HatEncoderConfig(PreTrainedConfig):
    """Configuration of `HatModel`: post-norm blocks within segments, and across segments' CLS rows.

    Args:
        vocab_size, hidden_size, num_attention_heads, intermediate_size, hidden_act: As in BERT.
        hidden_dropout_prob, attention_probs_dropout_prob, classifier_dropout, initializer_range: As
        in BERT. layer_norm_eps, pad_token_id, tie_word_embeddings: As in BERT. num_hidden_layers:
        Number of segment-wise blocks. segment_length, layout, gated, pooling, cls_token_id: As in
        `HatConfig`. max_position_embeddings: Largest number of tokens in a text. type_vocab_size:
        Number of token types. 0: no token types. embedding_size: Width of the embedding tables.
        None: hidden_size. Another width is projected to hidden_size. pooler_act: Activation after
        the linear map of the pooled vector. None: no such map. lm_act: Activation in the head for
        masked language modelling.

    Raises:
        ValueError: Numbers that contradict each other, or that `HatConfig` refuses.
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
            # A warning and no error, since earlier versions saved such configs.
            logger.warning(
                f"hf_hyperattn: HatEncoderConfig.gated says nothing: layout={self.layout!r} has no gate"
            )
            shared["gated"] = False
        # Its checks raise for bad values of the shared fields.
        HatConfig(max_length=self.max_position_embeddings, **shared)
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            allowed = f"multiples of num_attention_heads={self.num_attention_heads}"
            refuse("HatEncoderConfig.hidden_size", self.hidden_size, allowed)
        # Before `counts` makes a list of this length.
        if not 1 <= self.num_hidden_layers <= MOST:
            refuse(
                "HatEncoderConfig.num_hidden_layers",
                self.num_hidden_layers,
                f"numbers from 1 to {MOST:,}",
            )
        count_cross_blocks(self.layout, self.num_hidden_layers)
        super().__post_init__(**kwargs)

    @property
    def cross_blocks(self) -> tuple[int, ...]:
        """Return the number of cross-segment blocks after each segment-wise block."""
        return count_cross_blocks(self.layout, self.num_hidden_layers)

    @property
    def max_segments(self) -> int:
        """Return the largest number of segments of a text.

        It has room for a CLS token in front of the text, if there is a CLS token id.
        """
        return count_segments(
            self.max_position_embeddings + (self.cls_token_id is not None), self.segment_length
        )
