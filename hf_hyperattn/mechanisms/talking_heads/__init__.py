"""Talking heads (arXiv 2003.02436): heads mix their logits and their weights."""

from ...config.registry import Mechanism, register
from .config import TalkingHeadsConfig
from .functional import talking_heads_attention
from .layer import TalkingHeadsLayer

register(
    Mechanism(
        name="talking_heads",
        stage="mixing",
        paper="Talking-Heads Attention, arXiv 2003.02436",
        config=TalkingHeadsConfig,
        layer=TalkingHeadsLayer,
        functions={"talking_heads_attention": talking_heads_attention},
    )
)
