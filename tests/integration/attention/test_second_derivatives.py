"""Gradient penalties through a patched model that has learned nothing yet: those of the stock model."""

import pytest
import torch

import hf_hyperattn as ha
from tests.integration.models import llama

MECHANISMS = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(),
    "hsa": ha.HsaConfig((4, 16), tying="key"),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(),
    "trilinear": ha.TrilinearConfig(),
}


def make_model():
    torch.manual_seed(0)
    model = llama().double()
    model.set_attn_implementation("eager")
    return model


def penalize(model):
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=inputs).logits
    (first,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(first.square().sum(), inputs)[0]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_penalty_at_the_start_is_that_of_the_stock_model(name, backend):
    expected = penalize(make_model())
    model = ha.patch_model(make_model(), MECHANISMS[name])
    ha.set_backend(model, backend)
    found = penalize(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
