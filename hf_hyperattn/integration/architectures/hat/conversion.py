"""Convert a pretrained encoder to HAT.

Its layers become segment-wise blocks, and copies of them become cross-segment blocks (arXiv
2210.05529).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ....config.fields import refuse
from ....mechanisms.hat.config import HatConfig
from ....utils.text import short
from ...patching.conversions import keep_parts
from .configuration import SHARED, HatEncoderConfig
from .heads import HatForMaskedLM, HatForSequenceClassification, HatForTokenClassification
from .modeling import HatModel, HatPreTrainedModel

#: HAT classes by the end of the class name of the source model.
CLASSES: dict[str, Any] = {
    "Model": HatModel,
    "SequenceClassification": HatForSequenceClassification,
    "TokenClassification": HatForTokenClassification,
    "MaskedLM": HatForMaskedLM,
}
#: Config fields that HAT and the source have in common, by HAT's name.
SAME = """
    vocab_size hidden_size embedding_size num_hidden_layers num_attention_heads intermediate_size hidden_act
    hidden_dropout_prob attention_probs_dropout_prob classifier_dropout type_vocab_size initializer_range
    layer_norm_eps pad_token_id bos_token_id eos_token_id tie_word_embeddings id2label label2id problem_type
    output_hidden_states return_dict
""".split()
#: Modules of a HAT block. The tuples below name the same modules in BERT and DistilBERT, in this
#: order.
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
    """A family of pretrained encoders: where its modules and settings are.

    Args:
        pooler, classifier: Modules of the head for sequence classification.
        lm_head: Linear map, norm and output layer of the head for masked language modelling.
        layers: List of layers.
        layer: Modules of a layer, in the order of `BLOCK`.
        offset: Row of the position table for the first token. None: the row after padding.
        fields: Family's names of config fields, by HAT's name, if they differ.
        acts: Activations, by the end of the class name ("" for all classes). Each maps a field of
            HAT's config to the name of an activation, or to "@" and a field of the family's config.
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
        """Return the modules of a head: the family's names, by HAT's names.

        Args:
            end: End of the class name, a key of `CLASSES`.
        """
        # A bare model ("Model") has no head, and gives {}.
        heads = {
            "SequenceClassification": {"hat.pooler": self.pooler, "classifier": self.classifier},
            "TokenClassification": {"classifier": "classifier"},
            "MaskedLM": dict(
                zip(("lm_head.dense", "lm_head.norm", "lm_head.decoder"), self.lm_head, strict=True)
            ),
        }
        return heads.get(end, {})


ROBERTA = EncoderFamily(
    pooler="classifier.dense",
    classifier="classifier.out_proj",
    lm_head=("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    # RoBERTa counts positions from pad_token_id + 1.
    offset=None,
    acts={"": {"lm_act": "gelu"}},
)
FAMILIES = {
    "bert": EncoderFamily(
        pooler="bert.pooler.dense",
        classifier="classifier",
        lm_head=(
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
        pooler="classifier.dense",
        classifier="classifier.out_proj",
        lm_head=(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head",
        ),
        # ELECTRA's classification head uses GELU where BERT's pooler uses tanh.
        acts={"SequenceClassification": {"pooler_act": "gelu"}},
    ),
    "distilbert": EncoderFamily(
        pooler="pre_classifier",
        classifier="classifier",
        lm_head=("vocab_transform", "vocab_layer_norm", "vocab_projector"),
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
    """Return a HAT model that starts from a pretrained encoder, which is not changed.

    Args:
        model: Model of a family in `FAMILIES`: bare, or with a head for sequence or token
            classification or masked language modelling. The result has the same head, dtype,
            device, mode and attention implementation.
        config: Layout of the blocks, lengths, and pooling.
        keep_original: Keep `model` in memory for `unpatch_model`.

    Raises:
        ValueError: The model cannot be converted, or the config does not fit it.
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
    """Return the model's family, and the key of its HAT class in `CLASSES`.

    Raises:
        ValueError: The model cannot be converted.
    """
    name = type(model).__name__
    kind = model.config.model_type
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
    """Return the config of the converted model."""
    source: Any = model.config
    body: Any = model.base_model
    theirs = {name: family.fields.get(name, name) for name in SAME}
    fields = {
        name: getattr(source, other) for name, other in theirs.items() if hasattr(source, other)
    }
    # Each segment reuses the first positions of the source, so it cannot be longer.
    rows = _read_positions(body, family).shape[0]
    if config.segment_length > rows:
        allowed = f"numbers from 2 to {rows}, the positions of {type(model).__name__}"
        refuse("HatConfig.segment_length", config.segment_length, allowed)
    if config.cls_token_id is not None and config.cls_token_id >= source.vocab_size:
        allowed = f"None, or numbers below vocab_size={source.vocab_size}"
        refuse("HatConfig.cls_token_id", config.cls_token_id, allowed)
    # The modules say more than the configs: some families leave fields out, or ignore them.
    if not hasattr(body.embeddings, "token_type_embeddings"):
        fields["type_vocab_size"] = 0
    fields["layer_norm_eps"] = body.embeddings.LayerNorm.eps
    if kind == "Model" and _find_pooler(body) is None:
        fields["pooler_act"] = None
    if kind == "SequenceClassification" and source.model_type == "distilbert":
        fields["classifier_dropout"] = source.seq_classif_dropout
    # "" holds for all classes of the family. The class itself may override it.
    for end in ("", kind):
        for name, act in family.acts.get(end, {}).items():
            fields[name] = getattr(source, act[1:]) if act.startswith("@") else act
    fields |= {name: getattr(config, name) for name in SHARED}
    return HatEncoderConfig(max_position_embeddings=config.max_length, **fields)


def _copy_body(
    made: HatPreTrainedModel, model: PreTrainedModel, family: EncoderFamily, crossed: bool
) -> None:
    """Copy embeddings, pooler and layers.

    Args:
        crossed: Whether cross-segment blocks start as copies of the layer before them.
    """
    body: Any = made.base_model
    theirs: Any = model.base_model
    tables = theirs.embeddings
    positions = _read_positions(theirs, family)
    # 1. Modules of the same form. Not all models have all of them.
    for name, source in (
        ("embeddings.words", tables.word_embeddings),
        ("embeddings.norm", tables.LayerNorm),
        ("embeddings.kinds", getattr(tables, "token_type_embeddings", None)),
        ("embeddings.project", getattr(theirs, "embeddings_project", None)),
        ("pooler", _find_pooler(theirs)),
    ):
        if source is not None and name in dict(body.named_modules()):
            _copy_module(body, name, source)
    # 2. Positions: of tokens within a segment, and of segments within a text.
    body.embeddings.positions.weight.copy_(positions[: made.config.segment_length])
    if body.segment_positions is not None:
        body.segment_positions.weight.copy_(
            _start_segment_positions(positions, body.segment_positions.weight)
        )
    # 3. Layers. A layer also initialises the cross-segment blocks after it.
    cross = iter(body.cross_blocks)
    layers = theirs.get_submodule(family.layers)
    for mine, layer, number in zip(
        body.segment_blocks, layers, made.config.cross_blocks, strict=True
    ):
        blocks = [mine]
        if crossed:
            blocks += [next(cross) for _ in range(number)]
        for block in blocks:
            for name, source in zip(BLOCK, family.layer, strict=True):
                _copy_module(block, name, layer.get_submodule(source))


def _copy_module(ours: nn.Module, name: str, theirs: nn.Module) -> None:
    """Copy the parameters of a source module to the HAT module of this name.

    Raises:
        ValueError: The source is quantised, or wrapped by an adapter.
    """
    # The exact type: an adapter's layer is a subclass, and has more parameters.
    if type(theirs) not in (nn.Linear, nn.Embedding, nn.LayerNorm):
        raise ValueError(
            f"{name} would be copied from {short(type(theirs).__name__)}; allowed: plain linear maps, tables and "
            "norms: merge adapters and load unquantised weights first"
        )
    ours.get_submodule(name).load_state_dict(theirs.state_dict())


def _read_positions(body: Any, family: EncoderFamily) -> Tensor:
    """Return the source's rows of positions, beginning with a text's first token."""
    first = body.config.pad_token_id + 1 if family.offset is None else family.offset
    return body.embeddings.position_embeddings.weight[first:]


def _find_pooler(body: nn.Module) -> nn.Linear | None:
    """Return the linear map of the source's pooler, or None."""
    pooler = getattr(body, "pooler", None)
    return None if pooler is None else pooler.dense


def _start_segment_positions(positions: Tensor, like: Tensor) -> Tensor:
    """Return the start values of the segment positions: segment s starts as token s.

    If there are more segments than positions, the positions are stretched. If the widths differ,
    all are zero.

    Args:
        positions: Positions of the source, [tokens, width].
        like: The table to fill, [segments, width].
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
