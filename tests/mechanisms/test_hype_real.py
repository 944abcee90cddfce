"""HyPE on real checkpoints: a rotary model starts unchanged; caches and padding make no difference later."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_hyperattn import HypeConfig, patch_model
from tests.integration.models import difference, perturb, real, run, tensors
from tests.integration.test_real import minilm, smol, tokens  # noqa: F401  fixtures

pytestmark = pytest.mark.slow


def test_smollm2(smol):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    inputs = tokens(smol)
    before = run(model, inputs)
    patch_model(model, HypeConfig())
    assert difference(before, run(model, inputs)) == 0
    assert difference(before, real(tensors(model(**inputs)), inputs)) == 0
    perturb(model, 0.05)
    assert difference(before, run(model, inputs)) > 1e-3
    alone = {k: v[1:, v.shape[1] - int(inputs["attention_mask"][1].sum()) :] for k, v in inputs.items()}
    how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = model.generate(**alone, use_cache=False, **how)
    assert torch.equal(model.generate(**alone, **how), expected)
    padded = {k: torch.cat([torch.zeros_like(v[:, :5]), v], 1) for k, v in alone.items()}
    assert torch.equal(model.generate(**padded, **how)[:, 5:], expected)


def test_minilm(minilm):  # noqa: F811
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    inputs = tokens(minilm)
    before = run(model, inputs)
    patch_model(model, HypeConfig())
    assert difference(before, run(model, inputs)) == 0
    perturb(model, 0.05)
    both = model(**inputs).last_hidden_state[0]
    length = int(inputs["attention_mask"][0].sum())
    alone = model(**{k: v[:1, :length] for k, v in inputs.items()}).last_hidden_state[0]
    torch.testing.assert_close(both[:length], alone, atol=1e-4, rtol=0)
