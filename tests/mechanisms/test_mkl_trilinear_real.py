"""Multi-kernel gates and trilinear attention on real checkpoints: unchanged at first, and what is learned is exact."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.base import MechanismLayer
from hf_hyperattn.mechanisms.mkl import MklConfig
from hf_hyperattn.mechanisms.trilinear import TrilinearConfig
from tests.integration.models import State, difference, perturb, run
from tests.integration.test_real import minilm, smol, tokens  # noqa: F401  fixtures

pytestmark = pytest.mark.slow

CONFIGS = {
    "mkl, global": MklConfig(),
    "mkl, conditional": MklConfig(kind="conditional"),
    "trilinear, short windows": TrilinearConfig(windows=(8, 4)),
    "trilinear, all j": TrilinearConfig(windows=(None, 32)),
    "trilinear, cp": TrilinearConfig(windows=(None, 8), tensor="cp"),
    "bidaf": TrilinearConfig(form="bidaf"),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture
def computed(monkeypatch):
    """Calls under which nothing is skipped."""

    def compute(model, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(MechanismLayer, "idle", lambda self: False)
            return run(model, inputs)

    return compute


@every_config
def test_smollm2(smol, config, computed):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    inputs = tokens(smol)
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, config)
    assert difference(before, run(model, inputs)) == 0
    relative = difference(before, computed(model, inputs)) / max(t.abs().max() for t in before.values())
    assert relative <= 1e-5
    perturb(model, 0.02)
    assert difference(before, run(model, inputs)) > 1e-3
    alone = {k: v[1:, v.shape[1] - int(inputs["attention_mask"][1].sum()) :] for k, v in inputs.items()}
    how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = model.generate(**alone, use_cache=False, **how)
    assert torch.equal(model.generate(**alone, **how), expected)
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []


@every_config
def test_minilm(minilm, config, computed, tmp_path):  # noqa: F811
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    inputs = tokens(minilm)
    before = run(model, inputs)
    ha.patch_model(model, config)
    assert difference(before, run(model, inputs)) == 0
    assert difference(before, computed(model, inputs)) <= 1e-5
    perturb(model, 0.05)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(AutoModel.from_pretrained(tmp_path), inputs)) == 0
    length = int(inputs["attention_mask"][0].sum())
    alone = model(**{k: v[:1, :length] for k, v in inputs.items()}).last_hidden_state[0]
    both = model(**inputs).last_hidden_state[0, :length]
    torch.testing.assert_close(both, alone, atol=1e-4, rtol=0)
