"""From a pretrained encoder to HAT: its layers become segment-wise blocks, copies of them cross-segment blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...fields import refuse, short
from ...mechanisms.hat.config import HatConfig
from ..conversions import keep_parts
from .configuration import SHARED, HatEncoderConfig
from .heads import HatForMaskedLM, HatForSequenceClassification, HatForTokenClassification
from .modeling import HatModel, HatPreTrainedModel

#: Our classes by the end of their names.
CLASSES: dict[str, Any] = {
    "Model": HatModel,
    "SequenceClassification": HatForSequenceClassification,
    "TokenClassification": HatForTokenClassification,
    "MaskedLM": HatForMaskedLM,
}
#: Fields that both configs may have, under the same name.
SAME = """
    vocab_size hidden_size embedding_size num_hidden_layers num_attention_heads intermediate_size hidden_act
    hidden_dropout_prob attention_probs_dropout_prob classifier_dropout type_vocab_size initializer_range
    layer_norm_eps pad_token_id bos_token_id eos_token_id tie_word_embeddings id2label label2id problem_type
    output_hidden_states return_dict
""".split()
#: The modules of one of our blocks.
BLOCK = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.out",
    "attention_norm",
    "up",
    "down",
    "norm",
)
BERT_LAYER = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
DISTILBERT_LAYER = (
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


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

    def map_head(self, end: str) -> dict[str, str]:
        """The modules of the head of a class whose name ends so, ours and theirs."""
        heads = {
            "SequenceClassification": {"hat.pooler": self.pooler, "classifier": self.classifier},
            "TokenClassification": {"classifier": "classifier"},
            "MaskedLM": dict(
                zip(("lm_head.dense", "lm_head.norm", "lm_head.decoder"), self.lm_head, strict=True)
            ),
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
        (
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
        ),
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


def to_hat(
    model: PreTrainedModel, config: HatConfig, keep_original: bool = False
) -> HatPreTrainedModel:
    """A HAT model that starts from a pretrained encoder, which is left as it is.

    Args:
        model: of a family in `FAMILIES`: bare, or with a head for sequence or token classification or masked language
            modelling. The result has the same head, dtype, device, mode and attention implementation.
        config: how its layers are arranged.
        keep_original: keep `model` in memory, for `unpatch_model`.

    Raises:
        ValueError: a model that cannot be converted, or a config that does not fit it.
    """
    family, kind = _find_family(model)
    ours = _make_config(model, family, kind, config)
    made = CLASSES[kind]._from_config(ours, attn_implementation=model.config._attn_implementation)
    made = made.to(device=model.device, dtype=model.dtype)
    with torch.no_grad():
        _copy_body(made, model, family, config.cross_blocks == "copy")
        for mine, theirs in family.map_head(kind).items():
            _copy_module(made, mine, model.get_submodule(theirs))
    made.tie_weights()
    made.train(model.training)
    if keep_original:
        keep_parts(made, lambda converted, original: original, model)
    return made


def _find_family(model: PreTrainedModel) -> tuple[EncoderFamily, str]:
    """The model's family, and which of our classes it becomes."""
    name, kind = type(model).__name__, model.config.model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"{name} has model type {kind!r}, which cannot be converted to HAT; allowed: {', '.join(sorted(FAMILIES))}"
        )
    ends = [end for end in CLASSES if name.endswith(end)]
    if not ends:
        raise ValueError(
            f"{name} has a head that HAT lacks; allowed: its body, model.{model.base_model_prefix}, or one for "
            "sequence classification, token classification or masked language modelling"
        )
    if getattr(model.config, "is_decoder", False) or getattr(
        model.config, "add_cross_attention", False
    ):
        raise ValueError(f"{name} is a decoder; allowed: encoders, with config.is_decoder=False")
    if getattr(model, "is_quantized", False) or any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"{name} is quantised, offloaded or on the meta device; allowed: a model that is in memory"
        )
    return FAMILIES[kind], ends[0]


def _make_config(
    model: PreTrainedModel, family: EncoderFamily, kind: str, config: HatConfig
) -> HatEncoderConfig:
    """The config of the result."""
    source: Any = model.config
    body: Any = model.base_model
    theirs = {name: family.fields.get(name, name) for name in SAME}
    fields = {
        name: getattr(source, other) for name, other in theirs.items() if hasattr(source, other)
    }
    rows = _read_positions(body, family).shape[0]
    if config.segment_length > rows:
        allowed = f"numbers from 2 to {rows}, the positions of {type(model).__name__}"
        refuse("HatConfig.segment_length", config.segment_length, allowed)
    if config.cls_token_id is not None and config.cls_token_id >= source.vocab_size:
        allowed = f"None, or numbers below vocab_size={source.vocab_size}"
        refuse("HatConfig.cls_token_id", config.cls_token_id, allowed)
    if not hasattr(body.embeddings, "token_type_embeddings"):
        fields["type_vocab_size"] = 0
    fields["layer_norm_eps"] = body.embeddings.LayerNorm.eps
    if kind == "Model" and _find_pooler(body) is None:
        fields["pooler_act"] = None
    if kind == "SequenceClassification" and source.model_type == "distilbert":
        fields["classifier_dropout"] = source.seq_classif_dropout
    for end in ("", kind):
        for name, act in family.acts.get(end, {}).items():
            fields[name] = getattr(source, act[1:]) if act.startswith("@") else act
    fields |= {name: getattr(config, name) for name in SHARED}
    return HatEncoderConfig(max_position_embeddings=config.max_length, **fields)


def _copy_body(
    made: HatPreTrainedModel, model: PreTrainedModel, family: EncoderFamily, crossed: bool
) -> None:
    body: Any = made.base_model
    theirs: Any = model.base_model
    tables, positions = theirs.embeddings, _read_positions(theirs, family)
    for name, source in (
        ("embeddings.words", tables.word_embeddings),
        ("embeddings.norm", tables.LayerNorm),
        ("embeddings.kinds", getattr(tables, "token_type_embeddings", None)),
        ("embeddings.project", getattr(theirs, "embeddings_project", None)),
        ("pooler", _find_pooler(theirs)),
    ):
        if source is not None and name in dict(body.named_modules()):
            _copy_module(body, name, source)
    body.embeddings.positions.weight.copy_(positions[: made.config.segment_length])
    if body.segment_positions is not None:
        body.segment_positions.weight.copy_(
            _start_segment_positions(positions, body.segment_positions.weight)
        )
    cross = iter(body.cross_blocks)
    layers = theirs.get_submodule(family.layers)
    for mine, layer, number in zip(
        body.segment_blocks, layers, made.config.cross_blocks, strict=True
    ):
        for block in [mine, *(next(cross) for _ in range(number) if crossed)]:
            for name, source in zip(BLOCK, family.layer, strict=True):
                _copy_module(block, name, layer.get_submodule(source))


def _copy_module(ours: nn.Module, name: str, theirs: nn.Module) -> None:
    """Copy a module's parameters into our module of that name."""
    if type(theirs) not in (nn.Linear, nn.Embedding, nn.LayerNorm):
        raise ValueError(
            f"{name} would be copied from {short(type(theirs).__name__)}; allowed: plain linear maps, tables and "
            "norms: merge adapters and load unquantised weights first"
        )
    ours.get_submodule(name).load_state_dict(theirs.state_dict())


def _read_positions(body: Any, family: EncoderFamily) -> Tensor:
    """Their rows of positions, that of a text's first token first."""
    first = body.config.pad_token_id + 1 if family.offset is None else family.offset
    return body.embeddings.position_embeddings.weight[first:]


def _find_pooler(body: nn.Module) -> nn.Linear | None:
    """The linear map of the body's pooler, where it has one."""
    pooler = getattr(body, "pooler", None)
    return None if pooler is None else pooler.dense


def _start_segment_positions(positions: Tensor, like: Tensor) -> Tensor:
    """What the segments' positions start as: those of tokens, segment s as token s.

    Where there are more segments than positions, these are stretched; where their width is another, zeros.
    """
    segments, width = like.shape
    if positions.shape[1] != width:
        return torch.zeros_like(like)
    if segments <= positions.shape[0]:
        return positions[:segments]
    rows = F.interpolate(
        positions.float().T[None], size=segments, mode="linear", align_corners=True
    )
    return rows[0].T
