"""Configuration of HsaEncoder."""

from __future__ import annotations

import logging

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ...fields import MOST_SIZE, refuse
from ...hierarchy.text import kinds_of
from ...selection import MOST

logger = logging.getLogger("hf_hyperattn")
#: The most children of a family, by its kind: the root over several signals, an image and the cells of its quad-tree,
#: and what `Hierarchy.from_text` names.
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
#: Fields that are extents of weights.
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
    """Configuration of `HsaEncoder`: pre-norm blocks over the tokens of a text and the patches of an image.

    Args:
        vocab_size: tokens of the text; 0 for a model without text.
        image_size, patch_size, num_channels: of square images, cut into square patches; image_size 0 for a model
            without images.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: as in BERT.
        max_position_embeddings: learned places of tokens in their text, and so many at most; 0: none. Patches have
            learned places in their image unless this is 0.
        attention: "tree": tied on both sides over the hierarchy; "flat": softmax attention over all tokens, which has
            no sibling embeddings and looks at no hierarchy.
        keep_diagonal: whether a token attends to itself; the paper's own setting is False. "flat" does not read it.
        sibling_positions: for each kind of family, by name, the most children it may have; {}: no sibling embeddings.
        sibling_size: width of a sibling embedding.
        text_kinds: kinds of families of a text's hierarchy that is given as group ids, "" first.
        hidden_act, hidden_dropout_prob, layer_norm_eps, initializer_range, pad_token_id: as in BERT.

    Raises:
        ValueError: numbers that do not fit each other.
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
        for name in SIZES:
            value = getattr(self, name)
            self._check_field(
                name,
                type(value) is int and 0 <= value <= MOST_SIZE,
                f"integers from 0 to {MOST_SIZE:,}",
            )
        children = (self.sibling_positions or {}).values()
        fits = all(type(count) is int and 0 < count <= MOST_SIZE for count in children)
        self._check_field(
            "sibling_positions",
            fits,
            f"kinds of families, each with an integer from 1 to {MOST_SIZE:,}",
        )
        self._check_field(
            "attention", self.attention in ATTENTION, " or ".join(map(repr, ATTENTION))
        )
        fits = self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0
        self._check_field(
            "hidden_size", fits, f"multiples of num_attention_heads={self.num_attention_heads}"
        )
        fits = (
            self.patch_size > 0 and self.image_size >= 0 and self.image_size % self.patch_size == 0
        )
        self._check_field("image_size", fits, f"0, or multiples of patch_size={self.patch_size}")
        self._check_field(
            "vocab_size",
            self.vocab_size > 0 or self.image_size > 0,
            "more than 0 where there are no images",
        )
        self._check_field(
            "num_hidden_layers", 0 <= self.num_hidden_layers <= MOST, f"numbers from 0 to {MOST:,}"
        )
        self._check_field(
            "hidden_dropout_prob", 0 <= self.hidden_dropout_prob <= 1, "numbers from 0 to 1"
        )
        if (
            self.attention == "flat" and not self.keep_diagonal
        ):  # no error, since earlier versions saved such configs
            logger.warning(
                "hf_hyperattn: HsaEncoderConfig.keep_diagonal=False says nothing with attention='flat'"
            )
        super().__post_init__(**kwargs)

    def _check_field(self, name: str, fine: bool, allowed: str) -> None:
        if not fine:
            refuse(f"HsaEncoderConfig.{name}", getattr(self, name), allowed)
