"""A tiny model with a tokenizer of bytes, and a recipe for it that takes a second a step or less."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "finetune.py"


def save_model(folder: Path) -> Path:
    """A random Llama and a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<end>", *letters])}
    bytes_ = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def recipe(model: Path, output: Path, **changes: dict) -> dict:
    """A recipe as the YAML file would hold it; `changes` are whole groups, merged into it."""
    whole = {
        "model": {"name": str(model)},
        "mechanisms": {"use": [{"mechanism": "cone"}], "layers": "last-2"},
        "peft": {"r": 4, "dropout": 0.1},
        "data": {
            "source": "file",
            "name": str(ROOT / "LICENSE"),
            "length": 64,
            "held_out_tokens": 512,
        },
        "trainer": {
            "output": str(output),
            "steps": 8,
            "batch_size": 2,
            "learning_rate": 1e-2,
            "added_learning_rate": 2e-2,
            "save_every": 2,
            "log_every": 1,
        },
    }
    for group, values in changes.items():
        whole[group] = {**whole.get(group, {}), **values}
    return whole


def write(path: Path, data: dict) -> Path:
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def start(
    *arguments, launcher=(sys.executable,), script: bool = True, **environment
) -> subprocess.Popen:
    """The script in a process of its own."""
    return subprocess.Popen(
        [*launcher, *([str(SCRIPT)] if script else []), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> tuple[int, str, str]:
    """Its exit code and what it said."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err
