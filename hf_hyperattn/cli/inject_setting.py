"""The model and the texts that `hyperattn inject` works on, found and checked before anything slow is done."""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from ..integration.loading import errors_as, load_config
from .text import encode, read_text

CHARACTERS = 16  # of a text are read for a token wanted; texts have about 4
PASSAGES = 8  # of `length` tokens in each part of a text for an encoder
PARTS = 3  # to measure on, to choose on, to verify on


@dataclass
class Setting:
    """What `hyperattn inject` was asked for.

    Args:
        path: of the model. texts: by name, `PARTS` pieces of token ids each.
        encoder: whether the model reads both ways.
        dtype: of the checkpoint.
    """

    args: argparse.Namespace
    path: str
    tokenizer: object
    texts: dict[str, list[torch.Tensor]]
    length: int
    encoder: bool
    dtype: torch.dtype

    def title(self) -> str:
        """What is about to be done, in two lines."""
        goal = "1 - cosine" if self.encoder else "perplexity"
        return (
            f"{Path(self.path).name}: {self.args.mechanism}, {goal} within {self.args.budget:.1%}, "
            f"{self.length:,} tokens a text, seed {self.args.seed}, {torch.get_num_threads()} threads\n"
            f"Texts: {', '.join(self.texts)}"
        )

    def part(self, number: int) -> dict[str, torch.Tensor]:
        """Part 0, 1 or 2 of every text."""
        return {name: pieces[number] for name, pieces in self.texts.items()}

    def load(self) -> torch.nn.Module:
        """The model in float32, in evaluation mode."""
        kind = AutoModel if self.encoder else AutoModelForCausalLM
        with errors_as(f"{self.path}: cannot load it"):
            return kind.from_pretrained(self.path, dtype=torch.float32).eval()


def prepare(args: argparse.Namespace) -> Setting:
    """Find model and texts and check them."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for path in args.text:
        read_text(path, 1)
    config, tokenizer = read_model(args.model)
    encoder = not is_causal(args.model, config)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or args.length or 2048
    if args.length and args.length > limit:
        raise ValueError(f"--length {args.length} exceeds what the model reads; allowed: up to {limit}")
    length = args.length or min(128 if encoder else 2048, limit)
    piece = length * (PASSAGES if encoder else 1)  # tokens of a part
    texts = {}
    for path in args.text:
        text, name = read_text(path, CHARACTERS * PARTS * piece)
        if name in texts:
            raise ValueError(f"--text {path}: a second text called {name}; allowed: texts of different names")
        ids = torch.tensor(encode(tokenizer, text, PARTS * piece, name))
        if len(ids) < PARTS * piece:
            raise ValueError(
                f"--text {path}: {len(ids)} tokens; allowed: {PARTS * piece} or more ({PARTS} parts of {piece}); use "
                "a longer text or a smaller --length"
            )
        texts[name] = list(ids.split(piece))
    dtype = getattr(config, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    return Setting(args, str(args.model), tokenizer, texts, length, encoder, dtype)


def read_config(path: str):
    """The config of a model with its own attention.

    Raises:
        ValueError: no model, or one that is patched already.
    """
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"{path}: no such folder; allowed: the folder of a saved model or a Hub id")
    with errors_as(f"{path}: not a model that Transformers can load"):
        config = load_config(path)
    if getattr(config, "hyperattn", None) is not None:
        raise ValueError(f"{path}: patched already; allowed: a model with its own attention")
    return config


def read_model(path: str):
    """Config and tokenizer.

    Raises:
        ValueError: no model, or one that is patched already.
    """
    config = read_config(path)
    with errors_as(f"{path}: not a model that Transformers can load"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return config, tokenizer


def is_causal(path: str, config) -> bool:
    """Whether the checkpoint is of a causal LM, else it is taken for an encoder of text.

    Raises:
        ValueError: it is neither.
    """
    named = "".join(config.architectures or ())
    if config.is_encoder_decoder:
        raise ValueError(f"{path}: an encoder with a decoder; allowed: causal LMs and text encoders")
    causal = "CausalLM" in named or "LMHead" in named
    with errors_as(f"{path}: not a causal LM or text encoder"):
        with torch.device("meta"):
            (AutoModelForCausalLM if causal else AutoModel).from_config(copy.deepcopy(config))
    return causal
