"""The plain dot product by name and beneath patches: the same but for last digits; patches that ask for nothing stay
bitwise what the model was.
"""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.engines import dispatch
from hf_hyperattn.engines.cpu import kernels
from tests.engines.test_native import needs_compiler
from tests.integration.models import (
    FAMILIES,
    difference,
    llama,
    run,
    set_implementation,
    text_inputs,
)
from tests.integration.patches import make

PATCHES = {"cone": ha.ConeConfig(), "head_fusion": ha.HeadFusionConfig(), "hsa": ha.HsaConfig()}


def made():
    """The same model each time."""
    torch.manual_seed(0)
    return llama()


@pytest.fixture
def counted(monkeypatch):
    """How many calls the compiled operator got, in a list; small calls go there too."""
    calls, forward = [], kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *call: calls.append(1) or forward(*call))
    monkeypatch.setattr(dispatch.dense, "PLAIN", 0)
    monkeypatch.setattr(dispatch.dense, "DECODED", 2**62)
    dispatch.RESOLVED.clear()
    yield calls
    dispatch.RESOLVED.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_by_name_it_is_the_model(family):
    model, inputs = make(family)
    before = run(model, inputs)
    set_implementation(model, "hyper_dot")
    assert difference(before, run(model, inputs)) <= 1e-5


@needs_compiler
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_beneath_a_patch(patch, counted):
    inputs = text_inputs()
    stock = run(made(), inputs)
    named = made()
    set_implementation(named, "hyper_dot")
    exact = run(named, inputs)
    assert len(counted) == len(named.model.layers) and difference(stock, exact) <= 1e-5
    model = ha.patch_model(made(), patch)
    assert difference(run(model, inputs), stock) == 0 and len(counted) == len(named.model.layers)
    set_implementation(model, "hyper_dot")
    assert difference(run(model, inputs), exact) == 0
    set_implementation(model, "sdpa")
    assert difference(run(model, inputs), stock) == 0
    ha.unpatch_model(ha.patch_model(named, patch))
    assert (
        named.config._attn_implementation == "hyper_dot"
        and difference(run(named, inputs), exact) == 0
    )


@needs_compiler
def test_patches_with_a_dot_product_of_their_own_take_it(counted):
    inputs, outputs = text_inputs(), []
    for name in ("sdpa", "hyper_dot"):
        model = ha.patch_model(made(), ha.MklConfig())
        set_implementation(model, name)
        for parameter in (p for n, p in model.named_parameters() if ".hyper." in n):
            parameter.data.fill_(0.3)
        taken = len(counted)
        outputs.append(run(model, inputs))
        assert (len(counted) > taken) == (name == "hyper_dot")
    assert difference(*outputs) <= 1e-5
