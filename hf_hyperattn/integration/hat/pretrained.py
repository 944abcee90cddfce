"""Where pretrained encoders keep what a HAT model starts from, as data: names of modules, ours and theirs."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The modules of one of our blocks.
BLOCK = (
    "attention.query", "attention.key", "attention.value", "attention.out", "attention_norm", "up", "down", "norm",
)  # fmt: skip
BERT_LAYER = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
DISTILBERT_LAYER = (
    "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm", "ffn.lin1",
    "ffn.lin2", "output_layer_norm",
)  # fmt: skip


@dataclass(frozen=True)
class EncoderFamily:
    """A family of pretrained encoders.

    Args:
        pooler, classifier: modules of the head for sequence classification.
        lm_head: of the head for masked language modelling, the linear map, the norm and the map to words.
        layers: their stack of layers.
        layer: the modules of a layer, in the order of `BLOCK`.
        offset: the row of their table of positions that a text's first token has; None: behind the padding's.
        fields: fields of our config, and of theirs where the name is another; a field that theirs lacks is left out.
        acts: activations, by the end of the class name ("" for all): fields of our config, and either the name of an
            activation, or, with an @, of their field.
    """

    pooler: str
    classifier: str
    lm_head: tuple[str, str, str]
    layers: str = "encoder.layer"
    layer: tuple[str, ...] = BERT_LAYER
    offset: int | None = 0
    fields: dict[str, str] = field(default_factory=dict)
    acts: dict[str, dict[str, str]] = field(default_factory=dict)

    def head(self, end: str) -> dict[str, str]:
        """The modules of the head of a class whose name ends so, ours and theirs."""
        heads = {
            "SequenceClassification": {"hat.pooler": self.pooler, "classifier": self.classifier},
            "TokenClassification": {"classifier": "classifier"},
            "MaskedLM": dict(zip(("lm_head.dense", "lm_head.norm", "lm_head.decoder"), self.lm_head, strict=True)),
        }
        return heads.get(end, {})


ROBERTA = EncoderFamily(
    "classifier.dense",
    "classifier.out_proj",
    ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    offset=None,
    acts={"": {"lm_act": "gelu"}},
)
FAMILIES = {
    "bert": EncoderFamily(
        "bert.pooler.dense",
        "classifier",
        ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
        acts={"": {"lm_act": "@hidden_act"}},
    ),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "electra": EncoderFamily(
        "classifier.dense",
        "classifier.out_proj",
        ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
        acts={"SequenceClassification": {"pooler_act": "gelu"}},
    ),
    "distilbert": EncoderFamily(
        "pre_classifier",
        "classifier",
        ("vocab_transform", "vocab_layer_norm", "vocab_projector"),
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
