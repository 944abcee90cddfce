"""HatModel: an encoder of long texts, with attention within segments and across their CLS rows (arXiv 2210.05529).

It is made of embeddings, and of BERT's blocks, over a segment's tokens and over the CLS rows of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward
from transformers.utils import ModelOutput, can_return_tuple

from ...mechanisms.hat.segments import Segments, split_batch
from ...readable import can_read
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
            x = x + self.kinds(
                torch.zeros_like(x[:1, :1, 0], dtype=torch.long) if kinds is None else kinds
            )
        x = self.dropout(self.norm(x))
        return x if self.project is None else self.project(x)


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
        query, key, value = (
            f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        name: Any = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        out, weights = attend(
            self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **keywords
        )
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


@dataclass
class HatModelOutput(ModelOutput):
    """What `HatModel` returns, with N tokens in S segments of W places.

    Args:
        last_hidden_state: [B, N, width], in the places of the tokens that came in; 0 at padding.
        pooler_output: [B, width].
        segment_states: [B, S, width], the segments' CLS rows at the end.
        segment_mask: bool [B, S], whether the text has so many segments.
        hidden_states: the embeddings, and the states after each segment-wise block and the cross-segment blocks behind
            it, each [B, N, width]; with output_hidden_states=True.
        attentions: of each segment-wise block, [B, S, H, W, W]; with output_attentions=True.
        cross_segment_attentions: of each cross-segment block, [B, H, S, S]; with output_attentions=True.
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    segment_states: Tensor | None = None
    segment_mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_segment_attentions: tuple[Tensor, ...] | None = None


class HatPreTrainedModel(PreTrainedModel):
    """How models of this type are made and loaded."""

    config_class = HatEncoderConfig
    config: HatEncoderConfig
    base_model_prefix = "hat"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _input_embed_layer = "words"
    _no_split_modules = ["HatEmbeddings", "HatBlock", "HatCrossBlock"]
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, HatCrossBlock) and module.gate is not None:
            init.zeros_(module.gate)


class HatModel(HatPreTrainedModel):
    """Texts of up to `config.max_position_embeddings` tokens to vectors; see `HatModelOutput`.

    Args:
        add_pooling_layer: whether `pooler_output` passes a linear map and `config.pooler_act`.
    """

    def __init__(self, config: HatEncoderConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        width, crossed = config.hidden_size, sum(config.cross_blocks)
        self.embeddings = HatEmbeddings(config)
        self.segment_blocks = nn.ModuleList(
            [HatBlock(config) for _ in range(config.num_hidden_layers)]
        )
        self.cross_blocks = nn.ModuleList([HatCrossBlock(config) for _ in range(crossed)])
        self.segment_positions: Any = nn.Embedding(config.max_segments, width) if crossed else None
        pooled = add_pooling_layer and config.pooler_act is not None
        self.pooler = nn.Linear(width, width) if pooled else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        segment_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> HatModelOutput:
        """Encode a batch of texts as their tokenizer made them, [CLS] or <s> first.

        Args:
            input_ids: int64 [B, N].
            attention_mask: [B, N], 0 at padding, which may lie anywhere. A row of padding alone is one segment of its
                first token: its results are finite and mean nothing.
            token_type_ids: int64 [B, N]; None: all 0, or none in a model made with type_vocab_size=0.
            inputs_embeds: [B, N, embedding_size] in place of `input_ids`; the first of a text leads its segments.
            segment_ids: int64 [B, N], such as the number of each token's sentence or paragraph: where it changes a
                segment begins, and also where one is full. None: only the latter. Not in a compiled graph.
            output_attentions: whether to return attention weights, which attn_implementation='eager' has.
            output_hidden_states: whether to return the states between the blocks.
            kwargs: return_dict=False for a tuple; the rest is for the attention function.

        Raises:
            ValueError: texts that are too long, and arguments that nothing would look at.
        """
        real = self._real(input_ids, inputs_embeds, attention_mask)
        self._check(real, kwargs)
        segments = self._segment(input_ids, real, segment_ids)
        x = self._embed(segments, input_ids, inputs_embeds, token_type_ids)
        attentions = (
            self.config.output_attentions if output_attentions is None else output_attentions
        )
        states = (
            self.config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states
        )
        names = ("hidden_states",) * bool(states) + (
            "attentions",
            "cross_segment_attentions",
        ) * bool(attentions)
        recorded: dict[str, list[Tensor]] = {name: [] for name in names}
        x = self._encode(
            x, segments, recorded, kwargs | ({"output_attentions": True} if attentions else {})
        )
        last, rows = segments.to_tokens(x), segments.cls_rows(x)
        return HatModelOutput(
            last_hidden_state=last,
            pooler_output=self._pool(last, rows, segments),
            segment_states=rows * segments.present[..., None],
            segment_mask=segments.present,
            **{name: tuple(tensors) for name, tensors in recorded.items()},
        )

    def _real(self, input_ids, inputs_embeds, attention_mask) -> Tensor:
        """Which tokens are no padding, bool [B, N]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("HatModel needs input_ids or inputs_embeds; allowed: one of the two")
        tokens = input_ids if input_ids is not None else inputs_embeds
        if attention_mask is None:
            return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if attention_mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: {tuple(tokens.shape[:2])}, since "
                "segments are cut by it"
            )
        return attention_mask != 0

    def _check(self, real: Tensor, keywords: dict) -> None:
        """Raise for what would be lost, and for texts that cannot be encoded."""
        for name in (
            "position_ids",
            "hierarchy",
            "encoder_hidden_states",
            "past_key_values",
            "cache",
        ):
            if keywords.get(name) is not None:
                raise ValueError(
                    f"{name} was given to HatModel, which makes its own segments; allowed: None"
                )
        tokens, padded, longest = (
            real.shape[1],
            " with its padding",
            self.config.max_position_embeddings,
        )
        if can_read(real):
            tokens, padded = int(real.sum(1).max()), ""
        if tokens > longest:
            raise ValueError(
                f"a text has {tokens} tokens{padded}; allowed: at most max_position_embeddings={longest}, which "
                "HatConfig(max_length=...) sets"
            )

    def _segment(self, input_ids: Tensor | None, real: Tensor, groups: Tensor | None) -> Segments:
        led, readable = None, can_read(real)
        if self.config.cls_token_id is not None and input_ids is not None:
            led = (
                input_ids.gather(1, real.long().argmax(1, keepdim=True))[:, 0]
                == self.config.cls_token_id
            )
        if groups is not None and (not readable or groups.shape != real.shape):
            raise ValueError(
                f"segment_ids has shape {tuple(groups.shape)}; allowed: {tuple(real.shape)}, and None in a compiled "
                "graph, whose shapes cannot depend on it"
            )
        segments = split_batch(
            real, self.config.segment_length, led, packed=readable, groups=groups
        )
        number, most = segments.present.shape[1], self.config.max_segments
        if groups is not None and number > most:
            raise ValueError(
                f"segment_ids makes {number} segments; allowed: at most {most}, for max_position_embeddings="
                f"{self.config.max_position_embeddings} and segment_length={self.config.segment_length}"
            )
        return segments

    def _embed(self, segments: Segments, input_ids, inputs_embeds, token_type_ids) -> Tensor:
        if token_type_ids is not None and self.embeddings.kinds is None:
            raise ValueError(
                "token_type_ids was given to a model made with type_vocab_size=0; allowed: None, as "
                "tokenizer(..., return_token_type_ids=False) leaves it out"
            )
        if inputs_embeds is None:
            ids = segments.to_segments(input_ids)
            if self.config.cls_token_id is not None:
                ids = torch.cat(
                    [torch.full_like(ids[:, :1], self.config.cls_token_id), ids[:, 1:]], 1
                )
            words = self.embeddings.words(ids)
        else:
            words = segments.to_segments(inputs_embeds)
        kinds = None if token_type_ids is None else segments.to_segments(token_type_ids)
        return self.embeddings(words, kinds)

    def _encode(
        self, x: Tensor, segments: Segments, recorded: dict[str, list], keywords: dict
    ) -> Tensor:
        """The blocks, in the order of the layout; what is to be returned beside the result is added to `recorded`."""
        rows = segments.cls_rows(x)
        # the masks' values are read, which the meta device has none of
        filled, present = (None if m.is_meta else m for m in (segments.filled, segments.present))
        mask = create_bidirectional_mask(self.config, x, filled)
        cross_mask = create_bidirectional_mask(self.config, rows, present)
        there, cross = segments.present[..., None, None, None], iter(self.cross_blocks)
        states, within, across = map(
            recorded.get, ("hidden_states", "attentions", "cross_segment_attentions")
        )
        if states is not None:
            states.append(segments.to_tokens(x))
        for block, number in zip(self.segment_blocks, self.config.cross_blocks, strict=True):
            x, weights = block(x, mask, **keywords)
            if within is not None:
                within.append(_returned(weights)[segments.members] * there)
            for _ in range(number):
                rows = segments.cls_rows(x)
                positions = self.segment_positions(torch.arange(rows.shape[1], device=rows.device))
                rows, weights = next(cross)(rows, positions, cross_mask, **keywords)
                if across is not None:
                    across.append(_returned(weights))
                x = segments.with_cls_rows(x, rows)
            if states is not None:
                states.append(segments.to_tokens(x))
        return x

    def _pool(self, last: Tensor, rows: Tensor, segments: Segments) -> Tensor:
        """One vector [B, width] for each text."""
        if self.config.pooling == "max":
            pooled = rows.masked_fill(
                ~segments.present[..., None], torch.finfo(rows.dtype).min
            ).amax(1)
        elif self.config.pooling == "mean":
            pooled = (rows * segments.present[..., None]).sum(1) / segments.present.sum(
                1, keepdim=True
            )
        else:
            pooled = last.sum(1) / segments.real.sum(1, keepdim=True).clamp_min(1)
        return (
            pooled if self.pooler is None else ACT2FN[self.config.pooler_act](self.pooler(pooled))
        )


def _returned(weights: Tensor | None) -> Tensor:
    """The weights of an attention function, which output_attentions=True needs."""
    if weights is None:
        raise ValueError(
            "output_attentions=True needs an attention function that returns its weights; allowed: "
            "model.set_attn_implementation('eager')"
        )
    return weights
