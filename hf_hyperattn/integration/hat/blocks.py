"""What HAT is made of: embeddings, and BERT's blocks, over a segment's tokens and over the CLS rows of a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration import HatEncoderConfig


class HatEmbeddings(nn.Module):
    """Words, their kinds, and their places in the segment, [T, W] to [T, W, hidden_size]."""

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        width, kinds = config.embedding_size or config.hidden_size, config.type_vocab_size
        self.words = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.positions = nn.Embedding(config.segment_length, width)
        self.kinds = nn.Embedding(kinds, width) if kinds else None
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.project = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None

    def forward(self, words: Tensor, kinds: Tensor | None) -> Tensor:
        """Embed a batch of segments.

        Args:
            words: [T, W, embedding_size].
            kinds: int64 [T, W]; None: all are of kind 0.
        """
        x = words + self.positions(torch.arange(words.shape[1], device=words.device))
        if self.kinds is not None:
            x = x + self.kinds(torch.zeros_like(x[:1, :1, 0], dtype=torch.long) if kinds is None else kinds)
        x = self.dropout(self.norm(x))
        return x if self.project is None else self.project(x)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **keywords,
) -> tuple[Tensor, Tensor]:
    """softmax(scaling · QKᵀ + mask) V, with its weights."""
    weights = scaling * query @ key.transpose(-1, -2)
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


class HatAttention(nn.Module):
    """Bidirectional self-attention [B, N, width] to the same, by the attention function that the config names."""

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = width // config.num_attention_heads
        self.scaling, self.is_causal = self.attention_head_size**-0.5, False
        self.dropout = config.attention_probs_dropout_prob
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None, **keywords) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights [B, H, N, N] where the attention function returns them."""
        shape = (*x.shape[:-1], self.num_attention_heads, self.attention_head_size)
        query, key, value = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        name: Any = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **keywords)
        return self.out(out.flatten(2)), weights


class HatBlock(GradientCheckpointingLayer):
    """norm(x + attention(x)), then the same with two linear layers."""

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = HatAttention(config)
        self.up, self.down = (
            nn.Linear(width, config.intermediate_size),
            nn.Linear(config.intermediate_size, width),
        )
        self.attention_norm, self.norm = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.act, self.dropout = ACT2FN[config.hidden_act], nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None, **keywords) -> tuple[Tensor, Tensor | None]:
        """[B, N, width] to the same, and the attention's weights."""
        attended, weights = self.attention(x, mask, **keywords)
        x = self.attention_norm(x + self.dropout(attended))
        return self.norm(x + self.dropout(self.down(self.act(self.up(x))))), weights


class HatCrossBlock(HatBlock):
    """A block over the CLS rows of a text; with a gate g, rows + g·(block(rows) - rows), and g is 0 at first."""

    def __init__(self, config: HatEncoderConfig):
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(1)) if config.gated else None

    def forward(  # type: ignore[override]
        self, rows: Tensor, positions: Tensor, mask: Tensor | None, **keywords
    ) -> tuple[Tensor, Tensor | None]:
        """CLS rows [B, S, width] to the same, and the attention's weights.

        Args:
            positions: [S, width], added to what the block reads, its residual path included.
        """
        out, weights = super().forward(rows + positions, mask, **keywords)
        return out if self.gate is None else rows + self.gate * (out - rows), weights
