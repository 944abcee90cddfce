"""Where pretrained encoders keep what a HAT model starts from, as data: names of modules, ours and theirs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedConfig

BERT_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
DISTILBERT_LAYER = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm": "output_layer_norm",
}
ROBERTA_HEADS = {
    "SequenceClassification": {"hat.pooler": "classifier.dense", "classifier": "classifier.out_proj"},
    "TokenClassification": {"classifier": "classifier"},
    "MaskedLM": {
        "lm_head.dense": "lm_head.dense",
        "lm_head.norm": "lm_head.layer_norm",
        "lm_head.decoder": "lm_head.decoder",
    },
}


@dataclass(frozen=True)
class Family:
    """A family of pretrained encoders.

    Args:
        heads: by the end of the class name, the modules of the head, ours and theirs.
        layers: their stack of layers.
        layer: the modules of a layer, ours and theirs.
        offset: the row of their table of positions that a text's first token has; None: behind the padding's.
        fields: fields of our config, and of theirs where the name is another; a field that theirs lacks is left out.
        acts: activations, by the end of the class name ("" for all): fields of our config, and either the name of an
            activation, or, with an @, of their field.
    """

    heads: dict[str, dict[str, str]]
    layers: str = "encoder.layer"
    layer: dict[str, str] = field(default_factory=lambda: BERT_LAYER)
    offset: int | None = 0
    fields: dict[str, str] = field(default_factory=dict)
    acts: dict[str, dict[str, str]] = field(default_factory=dict)

    def first_position(self, config: PreTrainedConfig) -> int:
        """The row of their table of positions that a text's first token has."""
        return config.pad_token_id + 1 if self.offset is None else self.offset


ROBERTA = Family(ROBERTA_HEADS, offset=None, acts={"": {"lm_act": "gelu"}})
FAMILIES = {
    "bert": Family(
        {
            "SequenceClassification": {"hat.pooler": "bert.pooler.dense", "classifier": "classifier"},
            "TokenClassification": {"classifier": "classifier"},
            "MaskedLM": {
                "lm_head.dense": "cls.predictions.transform.dense",
                "lm_head.norm": "cls.predictions.transform.LayerNorm",
                "lm_head.decoder": "cls.predictions.decoder",
            },
        },
        acts={"": {"lm_act": "@hidden_act"}},
    ),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "electra": Family(
        {
            "SequenceClassification": {"hat.pooler": "classifier.dense", "classifier": "classifier.out_proj"},
            "TokenClassification": {"classifier": "classifier"},
            "MaskedLM": {
                "lm_head.dense": "generator_predictions.dense",
                "lm_head.norm": "generator_predictions.LayerNorm",
                "lm_head.decoder": "generator_lm_head",
            },
        },
        acts={"SequenceClassification": {"pooler_act": "gelu"}},
    ),
    "distilbert": Family(
        {
            "SequenceClassification": {"hat.pooler": "pre_classifier", "classifier": "classifier"},
            "TokenClassification": {"classifier": "classifier"},
            "MaskedLM": {
                "lm_head.dense": "vocab_transform",
                "lm_head.norm": "vocab_layer_norm",
                "lm_head.decoder": "vocab_projector",
            },
        },
        layers="transformer.layer",
        layer=DISTILBERT_LAYER,
        fields={
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        acts={"": {"lm_act": "@activation"}, "SequenceClassification": {"pooler_act": "relu"}},
    ),
}


def pooler_of(body: nn.Module) -> nn.Linear | None:
    """The linear map of the body's pooler, where it has one."""
    pooler = getattr(body, "pooler", None)
    return None if pooler is None else pooler.dense
