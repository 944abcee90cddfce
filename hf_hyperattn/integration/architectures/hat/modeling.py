"""`HatModel`: an encoder of long texts that attends within segments, and across their CLS rows.

The architecture is the hierarchical attention transformer (arXiv 2210.05529). BERT's blocks run
over the tokens of each segment, and, between them, over the CLS rows of each text.
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

from ....mechanisms.hat.segments import Segments, split_batch
from ....utils.readable import can_read
from .configuration import HatEncoderConfig


class HatEmbeddings(nn.Module):
    """Sum of word, type and position embeddings for a batch of segments.

    T is the number of segments in the batch, W the number of places in a segment.
    """

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        kinds = config.type_vocab_size
        self.words = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.positions = nn.Embedding(config.segment_length, width)
        self.kinds = nn.Embedding(kinds, width) if kinds else None
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.project = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None

    def forward(self, words: Tensor, kinds: Tensor | None) -> Tensor:
        """Return the embeddings of the segments, [T, W, hidden_size].

        Args:
            words: Word embeddings [T, W, embedding_size].
            kinds: Token types, int64 [T, W]. None: all are 0.
        """
        x = words + self.positions(torch.arange(words.shape[1], device=words.device))
        if self.kinds is not None:
            if kinds is None:
                # One type for all tokens, broadcast over the batch.
                kinds = torch.zeros_like(x[:1, :1, 0], dtype=torch.long)
            x = x + self.kinds(kinds)
        x = self.dropout(self.norm(x))
        return x if self.project is None else self.project(x)


class HatAttention(nn.Module):
    """Bidirectional self-attention, [B, N, width] to [B, N, width].

    The attention function is the one that the config names.
    """

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        width = config.hidden_size
        # Transformers' attention functions, and this package's patches, read these attributes.
        self.config = config
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = width // config.num_attention_heads
        self.scaling = self.attention_head_size**-0.5
        self.is_causal = False
        self.dropout = config.attention_probs_dropout_prob
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None, **keywords) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, N, width] and the attention weights [B, H, N, N].

        The weights are None if the attention function does not return them.
        """
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
    """Post-norm transformer block: norm(x + attention(x)), then the same with an MLP."""

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.attention = HatAttention(config)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)
        self.attention_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.act = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None, **keywords) -> tuple[Tensor, Tensor | None]:
        """Return the output, [B, N, width] like `x`, and the attention weights."""
        attended, weights = self.attention(x, mask, **keywords)
        x = self.attention_norm(x + self.dropout(attended))
        return self.norm(x + self.dropout(self.down(self.act(self.up(x))))), weights


class HatCrossBlock(HatBlock):
    """A block over the CLS rows of a text, with an optional gate.

    With a gate g the output is rows + g · (block(rows) - rows). The gate starts at 0, where the
    block is the identity.
    """

    def __init__(self, config: HatEncoderConfig):
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(1)) if config.gated else None

    def forward(  # type: ignore[override]
        self, rows: Tensor, positions: Tensor, mask: Tensor | None, **keywords
    ) -> tuple[Tensor, Tensor | None]:
        """Return the new CLS rows, [B, S, width] like `rows`, and the attention weights.

        Args:
            positions: Segment positions [S, width], added to the input of the block, including its
                residual path.
        """
        out, weights = super().forward(rows + positions, mask, **keywords)
        return out if self.gate is None else rows + self.gate * (out - rows), weights


@dataclass
class HatModelOutput(ModelOutput):
    """Output of `HatModel`, for N tokens in S segments of W places.

    Args:
        last_hidden_state: [B, N, width], at the places of the input tokens. 0 at padding.
        pooler_output: [B, width].
        segment_states: Final CLS rows of the segments, [B, S, width].
        segment_mask: Which segments exist in each text, bool [B, S].
        hidden_states: With output_hidden_states=True, the embeddings, and the states after each
            segment-wise block and its cross-segment blocks, each [B, N, width].
        attentions: With output_attentions=True, the weights of each segment-wise block, [B, S, H,
            W, W].
        cross_segment_attentions: With output_attentions=True, the weights of each cross-segment
            block, [B, H, S, S].
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    segment_states: Tensor | None = None
    segment_mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_segment_attentions: tuple[Tensor, ...] | None = None


class HatPreTrainedModel(PreTrainedModel):
    """Base class that tells Transformers how to initialise and load HAT models."""

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
        # Transformers initialises only the modules that it knows. Its gate is a bare parameter.
        if isinstance(module, HatCrossBlock) and module.gate is not None:
            init.zeros_(module.gate)


class HatModel(HatPreTrainedModel):
    """Encoder of texts of up to `config.max_position_embeddings` tokens.

    Its output is a `HatModelOutput`.

    Args:
        add_pooling_layer: Whether `pooler_output` passes through a linear map and
            `config.pooler_act`.
    """

    def __init__(self, config: HatEncoderConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        width = config.hidden_size
        crossed = sum(config.cross_blocks)
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
        """Encode a batch of texts as their tokenizer made them, with [CLS] or <s> first.

        Args:
            input_ids: int64 [B, N].
            attention_mask: [B, N], 0 at padding, which may be anywhere. A row with padding only is
                treated as one segment of its first token. Its results are finite, but have no
                meaning.
            token_type_ids: int64 [B, N]. None: all 0, or no types if type_vocab_size=0.
            inputs_embeds: [B, N, embedding_size], instead of `input_ids`. The first token of a text
                leads each of its segments.
            segment_ids: int64 [B, N], for example the number of each token's sentence or paragraph.
                A segment begins where it changes, and where the previous segment is full. None:
                only where a segment is full. Not allowed in a compiled graph.
            output_attentions: Whether to return attention weights. Needs
                attn_implementation='eager'.
            output_hidden_states: Whether to return the states between the blocks.
            kwargs: return_dict=False returns a tuple. Other keywords go to the attention function.

        Raises:
            ValueError: A text is too long, or an argument would be ignored.
        """
        # 1. Cut the texts into segments, and embed these.
        real = self._find_real_tokens(input_ids, inputs_embeds, attention_mask)
        self._check_inputs(real, kwargs)
        segments = self._cut_segments(input_ids, real, segment_ids)
        x = self._embed_segments(segments, input_ids, inputs_embeds, token_type_ids)
        # 2. Find out which further outputs to record. Only these have a list.
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        recorded: dict[str, list[Tensor]] = {}
        if output_hidden_states:
            recorded["hidden_states"] = []
        if output_attentions:
            recorded |= {"attentions": [], "cross_segment_attentions": []}
            kwargs = kwargs | {"output_attentions": True}
        # 3. Run the blocks, and put the results back at the places of the tokens.
        x = self._run_blocks(x, segments, recorded, kwargs)
        last = segments.to_tokens(x)
        rows = segments.cls_rows(x)
        return HatModelOutput(
            last_hidden_state=last,
            pooler_output=self._pool_texts(last, rows, segments),
            segment_states=rows * segments.present[..., None],
            segment_mask=segments.present,
            **{name: tuple(tensors) for name, tensors in recorded.items()},
        )

    def _find_real_tokens(self, input_ids, inputs_embeds, attention_mask) -> Tensor:
        """Return which tokens are not padding, bool [B, N]."""
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

    def _check_inputs(self, real: Tensor, keywords: dict) -> None:
        """Raise for arguments that would be ignored, and for texts that are too long."""
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
        longest = self.config.max_position_embeddings
        tokens = real.shape[1]
        padded = " with its padding"
        if can_read(real):
            # Padding does not count. In a compiled graph it cannot be told apart.
            tokens = int(real.sum(1).max())
            padded = ""
        if tokens > longest:
            raise ValueError(
                f"a text has {tokens} tokens{padded}; allowed: at most max_position_embeddings={longest}, which "
                "HatConfig(max_length=...) sets"
            )

    def _cut_segments(
        self, input_ids: Tensor | None, real: Tensor, groups: Tensor | None
    ) -> Segments:
        """Cut the texts of a batch into segments.

        Args:
            real: Which tokens are not padding, bool [B, N].
            groups: `segment_ids`, or None.
        """
        # Whether the first real token of a text is a CLS token: bool [B].
        led = None
        if self.config.cls_token_id is not None and input_ids is not None:
            first = real.long().argmax(1, keepdim=True)
            led = input_ids.gather(1, first)[:, 0] == self.config.cls_token_id
        readable = can_read(real)
        if groups is not None and (not readable or groups.shape != real.shape):
            raise ValueError(
                f"segment_ids has shape {tuple(groups.shape)}; allowed: {tuple(real.shape)}, and None in a compiled "
                "graph, whose shapes cannot depend on it"
            )
        segments = split_batch(
            real, self.config.segment_length, led, packed=readable, groups=groups
        )
        # Short groups make more segments than the table of segment positions has rows.
        number = segments.present.shape[1]
        most = self.config.max_segments
        if groups is not None and number > most:
            raise ValueError(
                f"segment_ids makes {number} segments; allowed: at most {most}, for max_position_embeddings="
                f"{self.config.max_position_embeddings} and segment_length={self.config.segment_length}"
            )
        return segments

    def _embed_segments(
        self, segments: Segments, input_ids, inputs_embeds, token_type_ids
    ) -> Tensor:
        """Return the embeddings of all segments, [T, W, hidden_size]."""
        if token_type_ids is not None and self.embeddings.kinds is None:
            raise ValueError(
                "token_type_ids was given to a model made with type_vocab_size=0; allowed: None, as "
                "tokenizer(..., return_token_type_ids=False) leaves it out"
            )
        if inputs_embeds is None:
            ids = segments.to_segments(input_ids)
            if self.config.cls_token_id is not None:
                # Every segment begins with a CLS token, also where the text has none.
                cls = torch.full_like(ids[:, :1], self.config.cls_token_id)
                ids = torch.cat([cls, ids[:, 1:]], 1)
            words = self.embeddings.words(ids)
        else:
            words = segments.to_segments(inputs_embeds)
        kinds = None if token_type_ids is None else segments.to_segments(token_type_ids)
        return self.embeddings(words, kinds)

    def _run_blocks(
        self, x: Tensor, segments: Segments, recorded: dict[str, list], keywords: dict
    ) -> Tensor:
        """Run all blocks in the order of the layout, and return the states [T, W, width].

        Args:
            x: Embeddings [T, W, width].
            recorded: Lists for further outputs, by name. This method appends to them.
            keywords: For the attention function.
        """
        # The masks are the same for all blocks. `rows` only gives the shape here.
        rows = segments.cls_rows(x)
        # Transformers reads the values of these masks. On the meta device there are none.
        filled, present = (None if m.is_meta else m for m in (segments.filled, segments.present))
        mask = create_bidirectional_mask(self.config, x, filled)
        cross_mask = create_bidirectional_mask(self.config, rows, present)
        exists = segments.present[..., None, None, None]
        cross = iter(self.cross_blocks)
        states = recorded.get("hidden_states")
        within = recorded.get("attentions")
        across = recorded.get("cross_segment_attentions")
        if states is not None:
            states.append(segments.to_tokens(x))
        for block, number in zip(self.segment_blocks, self.config.cross_blocks, strict=True):
            x, weights = block(x, mask, **keywords)
            if within is not None:
                # From packed segments [T, ...] to texts [B, S, ...]. Missing segments get 0.
                within.append(_require_weights(weights)[segments.members] * exists)
            # The cross-segment blocks after this one let the CLS rows of a text exchange
            # information.
            for _ in range(number):
                rows = segments.cls_rows(x)
                positions = self.segment_positions(torch.arange(rows.shape[1], device=rows.device))
                rows, weights = next(cross)(rows, positions, cross_mask, **keywords)
                if across is not None:
                    across.append(_require_weights(weights))
                x = segments.with_cls_rows(x, rows)
            if states is not None:
                states.append(segments.to_tokens(x))
        return x

    def _pool_texts(self, last: Tensor, rows: Tensor, segments: Segments) -> Tensor:
        """Return one vector for each text, [B, width]."""
        present = segments.present[..., None]
        if self.config.pooling == "max":
            pooled = rows.masked_fill(~present, torch.finfo(rows.dtype).min).amax(1)
        elif self.config.pooling == "mean":
            pooled = (rows * present).sum(1) / segments.present.sum(1, keepdim=True)
        else:
            # The mean over all tokens. A row with padding only has a sum of 0, hence the 1.
            pooled = last.sum(1) / segments.real.sum(1, keepdim=True).clamp_min(1)
        if self.pooler is None:
            return pooled
        return ACT2FN[self.config.pooler_act](self.pooler(pooled))


def _require_weights(weights: Tensor | None) -> Tensor:
    """Return attention weights, or raise if the attention function returned none."""
    if weights is None:
        raise ValueError(
            "output_attentions=True needs an attention function that returns its weights; allowed: "
            "model.set_attn_implementation('eager')"
        )
    return weights
