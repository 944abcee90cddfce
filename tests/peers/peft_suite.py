"""PEFT's common tests, method by method, on a tiny Llama on disk that is patched or stock."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

import peft
import pytest
import torch
import transformers as hf

import hf_hyperattn as ha

from .patched import CONFIGS, MECHANISM, move
from .source import suite

sys.path.insert(0, str(suite("peft")))
if "diffusers" not in sys.modules:  # asked for by name alone
    sys.modules["diffusers"] = types.SimpleNamespace(StableDiffusionPipeline=object)  # type: ignore[assignment]
from peft_tests.testing_common import PeftCommonTester  # noqa: E402
from peft_tests.testing_utils import set_init_weights_false  # noqa: E402

QV = dict(target_modules=["q_proj", "v_proj"])
METHODS = {
    "LoRA": (peft.LoraConfig, dict(r=4, **QV)),
    "DoRA": (peft.LoraConfig, dict(r=4, use_dora=True, **QV)),
    "rsLoRA": (peft.LoraConfig, dict(r=4, use_rslora=True, **QV)),
    "PiSSA": (peft.LoraConfig, dict(r=4, init_lora_weights="pissa", **QV)),
    "AdaLoRA": (peft.AdaLoraConfig, dict(init_r=6, target_r=4, total_step=1, **QV)),
    "IA3": (
        peft.IA3Config,
        dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "VeRA": (peft.VeraConfig, dict(r=4, target_modules=["q_proj"])),
    "LoHa": (peft.LoHaConfig, dict(r=4, **QV)),
    "LoKr": (peft.LoKrConfig, dict(r=4, **QV)),
    "OFT": (peft.OFTConfig, dict(r=0, oft_block_size=4, target_modules=["q_proj"])),
    "LN tuning": (peft.LNTuningConfig, dict(target_modules=["input_layernorm"])),
    "prompt": (peft.PromptTuningConfig, dict(num_virtual_tokens=4)),
}
#: Tests that want an adapter which changes something.
MOVED = re.compile("merge|mixed|unload|disable|weighted|delete")
#: The common tests that take a model, a config class and its arguments, and nothing of the Hub.
TESTS = sorted(
    name.removeprefix("_test_")
    for name, function in inspect.getmembers(PeftCommonTester, inspect.isfunction)
    if name.startswith("_test_")
    and [*inspect.signature(function).parameters][1:4]
    == ["model_id", "config_cls", "config_kwargs"]
    and all(
        p.default is not p.empty for p in [*inspect.signature(function).parameters.values()][4:]
    )
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer's worth of tokens, patched where a mechanism is asked for."""
    place = tmp_path_factory.mktemp("peers") / "llama"
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=1000,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = hf.LlamaForCausalLM(config)
    if MECHANISM != "stock":
        ha.patch_model(model, CONFIGS[MECHANISM])
        move(model)
    model.save_pretrained(place)
    return place


class Common(PeftCommonTester):
    """PEFT's tests of decoders."""

    transformers_class = hf.AutoModelForCausalLM
    torch_device = "cpu"

    def prepare_inputs_for_testing(self) -> dict:
        ids = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 10, 11, 12, 13, 14]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def case(method: str) -> type:
    """The tests of one method."""
    cls, options = METHODS[method]

    @pytest.mark.parametrize("name", TESTS)
    def test(self, name, folder):
        torch.manual_seed(0)
        arguments = {"task_type": "CAUSAL_LM", **options}
        if (
            MOVED.search(name) and "init_lora_weights" not in arguments
        ):  # as PEFT's own test files do it
            arguments = set_init_weights_false(cls, arguments)
        getattr(self, f"_test_{name}")(str(folder), cls, arguments)

    return type(f"Test_{re.sub(r'[^a-zA-Z0-9]', '_', method)}", (Common,), {"test": test})


globals().update({f"Test_{method}": case(method) for method in METHODS})
