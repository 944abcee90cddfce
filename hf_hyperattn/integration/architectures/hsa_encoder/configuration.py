"""Configuration of `HsaEncoder`, with checks of every field.

Bad values raise a ValueError that names the field and the allowed values.
"""

from __future__ import annotations

import logging

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ....config.choice import MOST
from ....config.fields import MOST_SIZE, refuse
from ....hierarchy.text import kinds_of

logger = logging.getLogger("hf_hyperattn")
#: Largest number of children of a family, by its kind: the root over several signals, an image and
#: the cells of its quad-tree, and the kinds of `Hierarchy.from_text`.
SIBLINGS = {
    "signals": 2,
    "image": 4,
    "cell": 4,
    "text": 32,
    "pair": 2,
    "paragraph": 32,
    "sentence": 64,
    "word": 32,
}
ATTENTION = ("tree", "flat")
#: Fields that are dimensions of weights.
SIZES = (
    "vocab_size",
    "image_size",
    "patch_size",
    "num_channels",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "sibling_size",
)


@strict
class HsaEncoderConfig(PreTrainedConfig):
    """Configuration of `HsaEncoder`: pre-norm blocks over the tokens of a text and the patches of
    an image.

    Args:
        vocab_size: Number of tokens in the vocabulary. 0: a model without text.
        image_size, patch_size, num_channels: Side of the square images, side of the square patches,
            and channels. image_size=0: a model without images.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: As in BERT.
        max_position_embeddings: Number of learned text positions, and largest number of tokens. 0:
        no position embeddings, neither for text nor for images. attention: "tree": attention tied
        on both sides over the hierarchy. "flat": softmax attention over all tokens, without sibling
        embeddings and hierarchy. keep_diagonal: Whether a token attends to itself. The paper uses
        False. Ignored by "flat". sibling_positions: Largest number of children for each kind of
        family, by name. {}: no sibling embeddings. sibling_size: Width of a sibling embedding.
        text_kinds: Kinds of families in a text's hierarchy that is given as group ids. "" comes
        first. hidden_act, hidden_dropout_prob, layer_norm_eps, initializer_range, pad_token_id: As
        in BERT.

    Raises:
        ValueError: Numbers that contradict each other, or are out of range.
    """

    model_type = "hsa_encoder"

    vocab_size: int = 30522
    image_size: int = 28
    patch_size: int = 4
    num_channels: int = 1
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 256
    max_position_embeddings: int = 512
    attention: str = "tree"
    keep_diagonal: bool = True
    sibling_positions: dict | None = None
    sibling_size: int = 8
    text_kinds: list | tuple | None = None
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.sibling_positions is None:
            self.sibling_positions = dict(SIBLINGS)
        if self.text_kinds is None:
            self.text_kinds = list(kinds_of(("paragraph", "sentence", "word")))
        # 1. The type of every size. `type(...) is int` also refuses bools.
        for name in SIZES:
            value = getattr(self, name)
            fits = type(value) is int and 0 <= value <= MOST_SIZE
            self._check_field(name, fits, f"integers from 0 to {MOST_SIZE:,}")
        children = (self.sibling_positions or {}).values()
        fits = all(type(count) is int and 0 < count <= MOST_SIZE for count in children)
        allowed = f"kinds of families, each with an integer from 1 to {MOST_SIZE:,}"
        self._check_field("sibling_positions", fits, allowed)
        # 2. Values that must fit each other.
        self._check_field(
            "attention", self.attention in ATTENTION, " or ".join(map(repr, ATTENTION))
        )
        heads = self.num_attention_heads
        fits = heads > 0 and self.hidden_size % heads == 0
        self._check_field("hidden_size", fits, f"multiples of num_attention_heads={heads}")
        # `image_size` is not negative, which the first step has checked.
        fits = self.patch_size > 0 and self.image_size % self.patch_size == 0
        self._check_field("image_size", fits, f"0, or multiples of patch_size={self.patch_size}")
        fits = self.vocab_size > 0 or self.image_size > 0
        self._check_field("vocab_size", fits, "more than 0 where there are no images")
        # Each layer is built in Python, so their number needs a limit too.
        fits = 0 <= self.num_hidden_layers <= MOST
        self._check_field("num_hidden_layers", fits, f"numbers from 0 to {MOST:,}")
        fits = 0 <= self.hidden_dropout_prob <= 1
        self._check_field("hidden_dropout_prob", fits, "numbers from 0 to 1")
        if self.attention == "flat" and not self.keep_diagonal:
            # A warning and no error, since earlier versions saved such configs.
            logger.warning(
                "hf_hyperattn: HsaEncoderConfig.keep_diagonal=False says nothing with attention='flat'"
            )
        super().__post_init__(**kwargs)

    def _check_field(self, name: str, fits: bool, allowed: str) -> None:
        """Raise if a field does not fit, with the allowed values."""
        if not fits:
            refuse(f"HsaEncoderConfig.{name}", getattr(self, name), allowed)
