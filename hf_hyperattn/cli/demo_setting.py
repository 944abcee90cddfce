"""The model and the text that `hyperattn demo` measures, found and checked before anything slow is done."""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn  # noqa: F401  (registers the names)

from ..integration.loading import errors_as, load_config
from . import smollm2
from .text import default_text, encode, prefix_of, read_text

CHARACTERS = 64  # of the text are read for a token wanted; texts have about 4


@dataclass
class Setting:
    """A model, a text and how much of it: the same for every row."""

    path: str
    name: str
    device: torch.device
    tokenizer: object
    ids: list[int]
    prefix: list[int]
    text: str
    window: int
    prompt: list[int]
    new_tokens: int

    def title(self) -> str:
        """What is measured, in two lines."""
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return (
            f"{self.name}, float32 on {self.device}{threads}\n"
            f"Text: {self.text}, {len(self.ids):,} tokens, context {min(self.window, len(self.ids)):,}"
        )

    def load(self, attention: str) -> torch.nn.Module:
        """The model with one attention implementation, float32, ready to be measured."""
        with errors_as(f"--model {self.path}: cannot load it with {attention!r}"):
            model = AutoModelForCausalLM.from_pretrained(
                self.path, attn_implementation=attention, dtype=torch.float32
            )
        return model.to(self.device).eval()


def prepare(args: argparse.Namespace) -> Setting:
    """Find model and text and check them; nothing slow is done before all of the input is known to be good."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = _device(args.device)
    wanted = args.tokens or windows_of(args.length or 1024)
    text, text_name = default_text() if args.text is None else read_text(args.text, CHARACTERS * wanted)
    path, name = _model(args.model)
    with errors_as(f"--model {path}: not a model that Transformers can load"):
        config = load_config(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    _check_family(path, config)
    prefix = prefix_of(tokenizer)
    limit = _limit(config, len(prefix), args.length)
    ids = encode(tokenizer, text, args.tokens or windows_of(limit), text_name)
    prompt = prefix + tokenizer(args.prompt, add_special_tokens=False)["input_ids"]
    return Setting(path, name, device, tokenizer, ids, prefix, text_name, limit, prompt, args.generate)


def windows_of(length: int) -> int:
    """Tokens to measure on where none are asked for: two windows, but one where a window takes long."""
    return 2 * length if length <= 2048 else length


def _model(name: str | None) -> tuple[str, str]:
    """Where the model is, and what to call it."""
    if name is None:
        if smollm2.cached_smollm2() is None:
            smollm2.find_gguf()
            print(f"Converting {smollm2.NAME} into {smollm2.cache_directory()} (once)", file=sys.stderr)
        return str(smollm2.smollm2()), smollm2.NAME
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"--model {name}: a folder without config.json; allowed: a saved model or a Hub id"
            )
        return str(path), path.resolve().name
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        kind = "a file" if path.exists() else "no such folder"
        raise ValueError(f"--model {name}: {kind}; allowed: the folder of a saved model or a Hub id")
    return name, name


def _check_family(path: str, config) -> None:
    """Build the model without its weights: is it a causal LM, and one that can be served?"""
    with errors_as(f"--model {path}: not a causal LM that cone attention can serve"):
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="cone")


def _limit(config, prefix: int, wanted: int | None) -> int:
    """Tokens a window: what was asked for, else 1024, as far as the model has positions for them."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return wanted or 1024
    if wanted and wanted + prefix > positions:
        raise ValueError(
            f"--length {wanted} exceeds what the model reads; allowed: up to {positions - prefix}"
        )
    return wanted or min(1024, positions - prefix)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: not usable here ({error}); allowed: cpu, cuda, ...") from error
    return device
