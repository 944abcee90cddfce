"""Collaborative heads at full rank in patched models: identity, learning, reload, what goes with them."""

import pytest
from peft import LoraConfig, get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.config import HyperAttnConfig
from tests.integration.collaborative import SERVED, make
from tests.integration.lessons import learn, masked_characters
from tests.integration.lessons import patched as lesson
from tests.integration.models import State, difference, perturb, run

CONFIG = ha.CollaborativeConfig()


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("family", SERVED)
def test_starts_as_the_identity_and_goes_without_a_trace(family, mode):
    model, inputs = make(family)
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, CONFIG, mode=mode)
    assert difference(before, run(model, inputs)) == 0.0
    perturb(model, 1e-9)  # no longer left to the host, and still the same to rounding
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model, 0.5)
    assert difference(before, run(model, inputs)) > 1e-4
    ha.unpatch_model(model)
    assert difference(before, run(model, inputs)) == 0.0 and not state.differences(State(model))


def test_every_mixing_vector_learns():
    model = lesson("bert", CONFIG)
    mixing = [p for n, p in model.named_parameters() if n.endswith("collaborative.mixing")]
    losses = learn(model, masked_characters())
    assert losses[-1] < losses[0] and all(p.abs().min() > 0 and p.grad.isfinite().all() for p in mixing)


def test_goes_with_a_bias_a_fusion_and_adapters():
    model, inputs = make("bert")
    before = run(model, inputs)
    ha.patch_model(model, HyperAttnConfig((CONFIG, ha.HypeConfig(), ha.HeadFusionConfig())))
    assert difference(before, run(model, inputs)) <= 1e-5
    adapted = get_peft_model(model, LoraConfig(target_modules=["query"], modules_to_save=["hyper"]))
    assert difference(before, run(adapted, inputs)) <= 1e-5
    trained = {n.split(".")[-1] for n, p in adapted.named_parameters() if p.requires_grad}
    assert "mixing" in trained


def test_another_score_beside_it_is_refused():
    with pytest.raises(ValueError, match="collaborative and cone both change the score"):
        ha.patch_model(make("bert")[0], CONFIG, ha.ConeConfig())
