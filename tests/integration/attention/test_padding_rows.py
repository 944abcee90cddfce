"""Batches that are filled up with rows of padding alone: the other rows stay as they are, and all is finite."""

import pytest
import torch

import hf_hyperattn as ha
from tests.integration.models import bert, llama, perturb, text_inputs
from tests.integration.patching.test_meta import PATCHES

MODELS = PATCHES | {
    "sparse": (llama, ha.SparseConfig()),
    "hsa, both": (bert, ha.HsaConfig(windows=(2, 4), tying="both")),
    "hsa, both, default": (bert, ha.HsaConfig()),
}
GROUPS = torch.arange(11)[None, :, None] // 3


def filled_up(inputs: dict) -> dict:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return dict(input_ids=torch.cat([ids, ids[:1]]), attention_mask=torch.cat([mask, 0 * mask[:1]]))


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_padding_alone(name, mode):
    make, *configs = MODELS[name]
    model = ha.patch_model(make(), *configs, mode=mode)
    perturb(model)
    check(model, {}, {})


@pytest.mark.parametrize("tying", ["key", "both"])
def test_a_row_of_padding_alone_under_a_given_hierarchy(tying):
    model = ha.patch_model(bert(), ha.HsaConfig(tying=tying), mode="replace")
    perturb(model)
    check(model, dict(hierarchy=GROUPS.expand(2, -1, -1)), dict(hierarchy=GROUPS.expand(3, -1, -1)))


def check(model, keywords: dict, of_filled_up: dict) -> None:
    inputs = text_inputs()
    real = inputs["attention_mask"].bool()
    expected = model(**inputs, **keywords)[0][real]
    found = model(**filled_up(inputs), **of_filled_up)[0]
    assert found.isfinite().all()
    assert torch.allclose(found[:2][real], expected, atol=1e-6)
    expected.square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found[:2][real].square().sum().backward()
    for name, gradient in gradients.items():
        assert torch.allclose(model.get_parameter(name).grad, gradient, atol=1e-4, rtol=1e-4), name
