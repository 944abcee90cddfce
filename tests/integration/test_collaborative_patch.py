"""Collaborative heads at full rank in patched models: identity, learning, reload, what goes with them."""

import pytest
import torch
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


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_comes_back_from_a_checkpoint(family, tmp_path):
    model, inputs = make(family)
    ha.patch_model(model, CONFIG, layers=[0])
    perturb(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert difference(run(model, inputs), run(again, inputs)) == 0.0


@pytest.mark.parametrize("family", ["gpt2", "opt", "bart"])
def test_generation_with_a_cache_equals_without(family):
    model, inputs = make(family)
    ha.patch_model(model, CONFIG)
    perturb(model)
    given = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    how = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    plain = model.generate(**given, use_cache=False, **how)
    assert torch.equal(model.generate(**given, **how), plain)
    static = dict(cache_implementation="static", disable_compile=True)
    assert torch.equal(model.generate(**given, **static, **how), plain)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype):
    model, inputs = make("bert")
    exact = run(model, inputs)
    model.to(dtype)
    stock = run(model, inputs)
    ha.patch_model(model, CONFIG)
    perturb(model, 1e-4)
    assert difference(exact, run(model, inputs)) <= 2 * difference(exact, stock) + 1e-3


@pytest.mark.slow
def test_compiles_whole():
    model, inputs = make("bert")
    ha.patch_model(model, CONFIG)
    perturb(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert difference(run(model, inputs), run(compiled, inputs)) <= 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    gradients = []
    for checkpointed in (False, True):
        model, inputs = make("bert")
        ha.patch_model(model, CONFIG)
        perturb(model)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(1)
        model(**inputs)[0].square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if n.endswith("mixing")})
    assert gradients[0] and all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])
