"""HAT with task heads: sequence classification, token classification, masked language modelling.

`_HatWithHead` holds everything that the heads share. Each class only defines its modules, logits
and loss.
"""

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
    """Shared base of the heads: body, call, and a head that classifies every token.

    Attributes:
        pooled: Whether the head reads `pooler_output`, so that the body needs a pooler.
        output: Class of the output.
    """

    pooled = False
    output: type[ModelOutput] = TokenClassifierOutput

    def __init__(self, config: HatEncoderConfig):
        super().__init__(config)
        self.num_labels: Any = config.num_labels
        self.hat = HatModel(config, add_pooling_layer=self.pooled)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: HatEncoderConfig) -> None:
        """Make the modules of the head."""
        dropout = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)

    def compute_logits(self, body: HatModelOutput) -> Tensor:
        """Return the logits of every token, [B, N, num_labels]."""
        return self.classifier(self.dropout(body.last_hidden_state))

    def compute_loss(self, logits: Tensor, labels: Tensor, **keywords) -> Tensor:
        """Return the loss, a scalar.

        Args:
            keywords: `num_items_in_batch`, if the Trainer gives it.
        """
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
        """Run the model on a batch, and return `logits`, and `loss` if labels are given.

        All other arguments are as in `HatModel.forward`.

        Args:
            labels: For sequence classification int64 [B] or floats [B, num_labels]; else int64 [B,
                N], -100 where no label counts.
            kwargs: num_items_in_batch for the loss, return_dict, and keywords of
                `HatModel.forward`.
        """
        # The number belongs to the loss. `HatModel` would pass it on to attention.
        counted = {}
        if "num_items_in_batch" in kwargs:
            counted["num_items_in_batch"] = kwargs.pop("num_items_in_batch")
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
    """`HatModel` with a linear head on `pooler_output`: `logits` [B, num_labels].

    `config.problem_type` chooses the loss.
    """

    pooled = True
    output = SequenceClassifierOutput

    def compute_logits(self, body: HatModelOutput) -> Tensor:
        """Return the logits of every text, [B, num_labels]."""
        return self.classifier(self.dropout(body.pooler_output))

    def compute_loss(self, logits: Tensor, labels: Tensor, **keywords) -> Tensor:
        # Transformers' losses have different signatures for each task.
        return self.loss_function(
            labels=labels, pooled_logits=logits, config=self.config, **keywords
        )


class HatForTokenClassification(_HatWithHead):
    """`HatModel` with a linear head on every token: `logits` [B, N, num_labels]."""


class HatForMaskedLM(_HatWithHead):
    """`HatModel` with a head that predicts masked tokens: `logits` [B, N, vocab_size].

    If the embeddings are tied, the output layer uses the table of word embeddings.
    """

    # Our name of the output layer -> the name of the table that it shares.
    _tied_weights_keys = {"lm_head.decoder.weight": "hat.embeddings.words.weight"}
    output = MaskedLMOutput

    def add_head(self, config: HatEncoderConfig) -> None:
        """Make the language modelling head, without dropout and classifier."""
        self.lm_head = HatLMHead(config)

    def get_output_embeddings(self):
        """Return the linear map to the vocabulary."""
        return self.lm_head.decoder

    def set_output_embeddings(self, value):
        """Replace the linear map to the vocabulary."""
        self.lm_head.decoder = value

    def compute_logits(self, body: HatModelOutput) -> Tensor:
        """Return the logits of every token, [B, N, vocab_size]."""
        return self.lm_head(body.last_hidden_state)

    def compute_loss(self, logits: Tensor, labels: Tensor, **keywords) -> Tensor:
        return self.loss_function(logits, labels, self.config.vocab_size, **keywords)


class HatLMHead(nn.Module):
    """Head for masked language modelling: [..., hidden_size] to [..., vocab_size]."""

    def __init__(self, config: HatEncoderConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.dense = nn.Linear(config.hidden_size, width)
        self.act = ACT2FN[config.lm_act]
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.act(self.dense(x))))
