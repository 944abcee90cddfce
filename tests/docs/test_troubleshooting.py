"""docs/troubleshooting.md quotes messages as they are: each is raised here, or logged, and compared."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.engines import cpu
from tests.integration.models import llama

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [m.strip() for m in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)]
LOGGED_MESSAGES = [m for m in MESSAGES if "it stays frozen" in m or "blockwise is used" in m]


def saved(folder) -> Path:
    ha.patch_model(llama(), ha.ConeConfig()).save_pretrained(folder)
    return folder


def tensors_lost(folder):
    weights = saved(folder) / "model.safetensors"
    save_file(
        {k: v for k, v in load_file(weights).items() if ".hyper." not in k},
        weights,
        {"format": "pt"},
    )
    AutoModelForCausalLM.from_pretrained(folder)


def record_lost(folder):
    path = saved(folder) / "config.json"
    config = json.loads(path.read_text())
    for key in ("hyperattn", "attn_implementation", "_attn_implementation"):
        config.pop(key, None)
    path.write_text(json.dumps(config))
    AutoModelForCausalLM.from_pretrained(folder)


def by_name_then_patched(folder):
    model = llama()
    model.set_attn_implementation("cone")
    ha.patch_model(model, ha.ConeConfig())


def with_a_forward_of_its_own(folder):
    model = ha.patch_model(llama(), ha.ConeConfig())
    model.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    model(torch.arange(4)[None])


def without_attention(folder):
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)
    ha.patch_model(MambaModel(config), ha.ConeConfig())


def on_engine(backend: str, dtype: torch.dtype):
    query = torch.randn(1, 2, 8, 16, dtype=dtype)
    ha.functional.cone_attention(query, query, query, backend=backend)


def plain_lora():
    from peft import LoraConfig, get_peft_model

    get_peft_model(
        ha.patch_model(llama(), ha.ConeConfig()), LoraConfig(r=2, target_modules=["q_proj"])
    )


def in_float64():
    cpu.log_once.cache_clear()  # once for each reason
    on_engine("cpu", torch.float64)


def triton_missing(folder):
    try:
        import triton  # noqa: F401
    except ImportError:
        on_engine("triton", torch.float32)
    else:
        pytest.skip("Triton is here")


#: Both in the order of the page.
LOGGED = [plain_lora, in_float64]
RAISED = [
    tensors_lost,
    record_lost,
    lambda folder: ha.patch_model(ha.patch_model(llama(), ha.ConeConfig()), ha.ConeConfig()),
    lambda folder: ha.unpatch_model(llama()),
    by_name_then_patched,
    lambda folder: ha.patch_model(llama(), ha.ConeConfig(), ha.HyperbolicConfig()),
    lambda folder: ha.patch_model(llama(), ha.HsaConfig(tying="both")),
    without_attention,
    lambda folder: ha.patch_model(llama(), ha.CollaborativeConfig(rank=4)),
    lambda folder: ha.patch_model(llama(), ha.ConeConfig(), layers=[99]),
    with_a_forward_of_its_own,
    lambda folder: ha.ConeConfig(variant="umbrall"),
    lambda folder: ha.ConeConfig(gama=1),
    triton_missing,
]


def pattern(message: str) -> str:
    return "^" + re.escape(message).replace("…", ".+") + "$"


@pytest.mark.parametrize(
    "number", range(len(RAISED)), ids=[raise_it.__name__ for raise_it in RAISED]
)
def test_raised(number, tmp_path):
    messages = [m for m in MESSAGES if m not in LOGGED_MESSAGES]
    with pytest.raises((ValueError, TypeError), match=pattern(messages[number])):
        RAISED[number](tmp_path)


@pytest.mark.parametrize("number", range(len(LOGGED)))
def test_logged(number, caplog):
    LOGGED[number]()
    (line,) = {m for m in caplog.messages if m.startswith(("LlamaForCausalLM", "hf_hyperattn"))}
    assert re.match(pattern(LOGGED_MESSAGES[number]), line)


def test_all_are_tested():
    assert len(MESSAGES) == len(RAISED) + len(LOGGED)
