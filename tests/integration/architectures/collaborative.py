"""Tiny models for collaborative heads: with biases that matter, and quiet conversions."""

from __future__ import annotations

import contextlib

import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.integration import convert
from tests.integration.models import FAMILIES, of_type, pair_inputs, text_inputs

OPT = dict(
    vocab_size=99,
    hidden_size=32,
    ffn_dim=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=32,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SMALL = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)
MORE = {
    "opt": (of_type("opt", hf.AutoModelForCausalLM, **OPT), text_inputs),
    "roberta": (of_type("roberta", **SMALL, pad_token_id=1), text_inputs),
    "albert": (of_type("albert", **SMALL, embedding_size=16), text_inputs),
}
SERVED = (
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "gpt2",
    "opt",
    "bart",
    "t5",
    "vit",
    "clip",
    "whisper",
)
WIDTH = 32  # of all heads together


def make(family: str):
    """A model whose queries and keys have biases, and inputs."""
    factory, inputs = {**FAMILIES, **MORE}[family]
    torch.manual_seed(0)
    model = factory()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and parameter.dim() == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif (
                family != "t5" and parameter.dim() == 2 and "emb" not in name and "wte" not in name
            ):
                parameter.mul_(3)  # so that attention is not flat, as T5's is not
    return model, inputs()


@contextlib.contextmanager
def quiet():
    """Without the report."""
    before = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    try:
        yield
    finally:
        hf.logging.set_verbosity(before)


def shared(family: str = "bert", rank: int = 12, keep_original: bool = False, **options):
    """A converted model and its inputs."""
    model, inputs = make(family)
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=rank, steps=20), keep_original, **options)
    return model, inputs


__all__ = ["MORE", "SERVED", "WIDTH", "make", "pair_inputs", "quiet", "shared"]
