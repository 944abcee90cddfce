"""HAT with the usual heads: sequence classification, token classification, masked language modelling."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, can_return_tuple

from .configuration import HatEncoderConfig
from .modeling import HatModel, HatModelOutput, HatPreTrainedModel


class _HatWithHead(HatPreTrainedModel):
    """What the heads share: a body, a call, and here what classifies tokens."""

    pooled = False
    output: type[ModelOutput] = TokenClassifierOutput

    def __init__(self, config: HatEncoderConfig):
        super().__init__(config)
        self.num_labels: Any = config.num_labels
        self.hat = HatModel(config, add_pooling_layer=self.pooled)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: HatEncoderConfig) -> None:
        """Make the head's modules."""
        dropout = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)

    def compute_logits(self, body: HatModelOutput) -> Tensor:
        """What the head makes of the body's output."""
        return self.classifier(self.dropout(body.last_hidden_state))

    def compute_loss(self, logits: Tensor, labels: Tensor, **keywords) -> Tensor:
        """The loss, a scalar; `keywords` as the Trainer gives them."""
        return self.loss_function(logits, labels, self.config, **keywords)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        segment_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ):
        """The head's output on a batch: `loss` where there are labels, and `logits`.

        Args:
            labels: for sequence classification int64 [B], or numbers [B, num_labels]; for the others int64 [B, N],
                -100 where none counts.
            kwargs: num_items_in_batch for the loss, and return_dict; the rest, and all other arguments, are those of
                `HatModel.forward`.
        """
        counted = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        body = self.hat(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            segment_ids,
            output_attentions,
            output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        logits = self.compute_logits(body)
        loss = None if labels is None else self.compute_loss(logits, labels, **counted)
        return self.output(
            loss=loss, logits=logits, hidden_states=body.hidden_states, attentions=body.attentions
        )


class HatForSequenceClassification(_HatWithHead):
    """`HatModel` with a linear head on `pooler_output`: `logits` [B, num_labels], the loss by `config.problem_type`."""

    pooled = True
    output = SequenceClassifierOutput

    def compute_logits(self, body: HatModelOutput) -> Tensor:
        return self.classifier(self.dropout(body.pooler_output))

    def compute_loss(self, logits: Tensor, labels: Tensor, **keywords) -> Tensor:
        return self.loss_function(
            labels=labels, pooled_logits=logits, config=self.config, **keywords
        )


class HatForTokenClassification(_HatWithHead):
    """`HatModel` with a linear head on every token: `logits` [B, N, num_labels]."""


class HatForMaskedLM(_HatWithHead):
    """`HatModel` with a head that tells words: `logits` [B, N, vocab_size], by the table of words where tied."""

    _tied_weights_keys = {"lm_head.decoder.weight": "hat.embeddings.words.weight"}
    output = MaskedLMOutput

    def add_head(self, config: HatEncoderConfig) -> None:
        self.lm_head = HatLMHead(config)

    def get_output_embeddings(self):
        """The linear map to words."""
        return self.lm_head.decoder

    def set_output_embeddings(self, value):
        """Put another map to words in its place."""
        self.lm_head.decoder = value

    def compute_logits(self, body: HatModelOutput) -> Tensor:
        return self.lm_head(body.last_hidden_state)

    def compute_loss(self, logits: Tensor, labels: Tensor, **keywords) -> Tensor:
        return self.loss_function(logits, labels, self.config.vocab_size, **keywords)


class HatLMHead(nn.Module):
    """Logits of all words, [..., hidden_size] to [..., vocab_size]."""

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.dense, self.act = nn.Linear(config.hidden_size, width), ACT2FN[config.lm_act]
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.act(self.dense(x))))
