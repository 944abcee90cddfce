"""Tiny encoders to convert, tiny HAT models, and batches for them."""

import torch
import transformers as hf

from hf_hyperattn.integration.architectures.hat import HatEncoderConfig, HatModel

SIZES = dict(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=40,
)
DISTIL = dict(
    vocab_size=61, dim=16, n_layers=3, n_heads=2, hidden_dim=24, max_position_embeddings=40
)
CONFIGS = {
    "Bert": lambda: hf.BertConfig(**SIZES),
    "Roberta": lambda: hf.RobertaConfig(**SIZES, pad_token_id=1),
    "XLMRoberta": lambda: hf.XLMRobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1),
    "Camembert": lambda: hf.CamembertConfig(**SIZES, pad_token_id=1),
    "Electra": lambda: hf.ElectraConfig(**SIZES, embedding_size=12),
    "DistilBert": lambda: hf.DistilBertConfig(**DISTIL),
}
HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")


def moved(model):
    """The model with every parameter away from where it starts."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def encoder(family="Bert", head="Model", **changes):
    """A pretrained encoder of a family; its parameters are random."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in ({"num_labels": 3} | changes).items():
        setattr(config, name, value)
    return moved(getattr(hf, family + head)(config))


def hat(cls=HatModel, **changes):
    """A HAT model of 3 segment-wise blocks, in float64."""
    torch.manual_seed(0)
    small = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    config = HatEncoderConfig(
        **small | dict(segment_length=5, max_position_embeddings=64, num_labels=3) | changes
    )
    return moved(cls(config)).double()


def batch(lengths=(13, 1, 6), width=None, side="right", seed=0, **more):
    """Texts of so many tokens: ids [B, N] from 5 on, whose first is 2, and the mask."""
    draw = torch.Generator().manual_seed(seed)
    width = max(lengths) if width is None else width
    ids, mask = (
        torch.full((len(lengths), width), 3),
        torch.zeros(len(lengths), width, dtype=torch.long),
    )
    for row, n in enumerate(lengths):
        where = {
            "right": slice(0, n),
            "left": slice(width - n, width),
            "scattered": torch.randperm(width, generator=draw)[:n].sort().values,
        }[side]
        text = torch.randint(5, 61, (n,), generator=draw)
        text[0] = 2
        ids[row, where], mask[row, where] = text, 1
    return {"input_ids": ids, "attention_mask": mask, **more}


def texts(given):
    """The texts of a batch, as lists of ids."""
    return [row[m != 0].tolist() for row, m in zip(given["input_ids"], given["attention_mask"])]
