"""Multi-kernel gates in models: how they start, learn, are saved and taken back; caches, padding, refusals."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.base import MechanismLayer
from hf_hyperattn.mechanisms.mkl import MklConfig
from tests.integration.models import FAMILIES, State, difference, llama, perturb, run, train
from tests.integration.test_families import CAUSAL, generate, inputs_of, logits, model_of
from tests.oracles.marks import first_always

from .hype_models import ids_of
from .test_hype_caches import CHUNKS, fed

FORMS = {
    "global": (MklConfig(), "blend"),
    "conditional": (MklConfig(kind="conditional"), "blend"),
    "combined": (MklConfig(kind="conditional", combine=True), "replace"),
}
every_form = pytest.mark.parametrize("form", FORMS)


def learned(family, form, others=(), **changes):
    """A tiny model in which the mechanism decides."""
    config, mode = FORMS[form]
    model = ha.patch_model(model_of(family, "eager", **changes), config, *others, mode=mode)
    perturb(model, 0.5)
    return model


@pytest.mark.parametrize("form", ["global", "conditional"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_the_identity(family, form, monkeypatch):
    """To the bit where nothing is computed, to 1e-5 where everything is; in either mode."""
    for mode in ("blend", "replace"):
        model, inputs = FAMILIES[family][0](), FAMILIES[family][1]()
        before = run(model, inputs)
        ha.patch_model(model, FORMS[form][0], mode=mode)
        assert difference(before, run(model, inputs)) <= 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(MechanismLayer, "idle", lambda self: False)
            assert difference(before, run(model, inputs)) <= 1e-5


@every_form
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bart", "vit", "mistral", "qwen3"])
def test_it_learns_is_saved_and_comes_back(family, form, tmp_path):
    model, inputs = FAMILIES[family][0](), FAMILIES[family][1]()
    model.save_pretrained(tmp_path)  # Transformers notes dtype and class in the config of what it saves
    before, state = run(model, inputs), State(model)
    config, mode = FORMS[form]
    ha.patch_model(model, config, mode=mode)
    body = {n: p.detach().clone() for n, p in model.named_parameters() if ".hyper." not in n}
    train(model, inputs)
    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert added and all(p.grad is not None and p.grad.isfinite().all() and p.any() for p in added.values())
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    with torch.no_grad():
        model.load_state_dict(body, strict=False)
    ha.unpatch_model(model)
    assert [f for f in state.differences(State(model)) if not f.startswith("model.config")] == []
    assert difference(before, run(model, inputs)) == 0


# Caches, padding, generation.


@every_form
@pytest.mark.parametrize("family", CAUSAL)
@first_always("static", [True, False], ["static", "dynamic"])
def test_a_cache_gives_the_logits_of_the_full_pass(family, form, static):
    if (family, form) == ("gpt_oss", "combined"):
        pytest.skip("sinks are refused")
    model = learned(family, form)
    ids = ids_of(model)
    for pads in (0, 3):
        mask = torch.ones_like(ids)
        mask[0, :pads] = 0
        where = (mask.cumsum(1) - 1).clamp(min=0)
        exact = logits(model, input_ids=ids, attention_mask=mask, position_ids=where, use_cache=False)
        if pads:
            alone = logits(model, input_ids=ids[:1, pads:], use_cache=False)
            torch.testing.assert_close(exact[:1, pads:], alone, atol=3e-5, rtol=0)
        for how in CHUNKS.values():
            cache = (
                StaticCache(model.config, max_cache_len=14) if static else DynamicCache(config=model.config)
            )
            got = fed(model, ids, mask, cache, how)
            torch.testing.assert_close(got[mask.bool()], exact[mask.bool()], atol=3e-5, rtol=0)


@pytest.mark.parametrize("form", ["global", "conditional"])
@pytest.mark.parametrize("family", ("mistral", "gemma2", "gpt_oss"))
def test_sliding_caches_that_have_dropped_keys(family, form):
    model = learned(family, form, sliding_window=4)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids, use_cache=False)
    for how in CHUNKS.values():
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=12)):
            got = fed(model, ids, torch.ones_like(ids), cache, how)
            torch.testing.assert_close(got, exact, atol=3e-5, rtol=0)


@every_form
@pytest.mark.parametrize("family", ("llama", "bart", "t5"))
def test_generation(family, form):
    """Beams reorder the values, and the weights with them."""
    model = learned(family, form)
    inputs = inputs_of(family, model)
    for how in ({}, {"num_beams": 3}):
        plain = generate(model, inputs, use_cache=False, **how)
        assert torch.equal(generate(model, inputs, **how), plain)


def test_it_composes_with_cone_and_hype(tmp_path):
    """One config, one checkpoint; a cache makes no difference."""
    others = (ha.ConeConfig(), ha.HypeConfig(max_length=64))
    for form in FORMS:
        model = learned("llama", form, others)
        ids = ids_of(model)
        exact = logits(model, input_ids=ids, use_cache=False)
        got = fed(model, ids, torch.ones_like(ids), DynamicCache(config=model.config), [5, 1, 1, 2])
        torch.testing.assert_close(got, exact, atol=3e-5, rtol=0)
        model.save_pretrained(tmp_path / form)
        assert torch.equal(
            logits(type(model).from_pretrained(tmp_path / form), input_ids=ids, use_cache=False), exact
        )


def test_global_weights_and_key_tying():
    """Weights are one factor of all logits of a head; with everything near nothing is tied."""
    near = learned("llama", "global", [ha.HsaConfig(windows=(2,), near=100)])
    alone = learned("llama", "global")
    perturb(near, 0.5)
    for one, other in zip(near.model.layers, alone.model.layers):
        other.self_attn.hyper.mkl.load_state_dict(one.self_attn.hyper.mkl.state_dict())
    inputs = {"input_ids": ids_of(near)}
    torch.testing.assert_close(logits(near, **inputs), logits(alone, **inputs), atol=1e-5, rtol=0)
    tied = ha.patch_model(model_of("llama", "eager"), MklConfig(), ha.HsaConfig(windows=(2,), near=2, sinks=1,
                          refine_top_k=1), mode="replace")  # fmt: skip
    perturb(tied, 0.5)
    plain = generate(tied, inputs, use_cache=False)
    assert torch.equal(generate(tied, inputs), plain)
    assert torch.equal(generate(tied, inputs, past_key_values=ha.HierarchicalCache(tied)), plain)


# Precision, compilation, adapters.


@every_form
def test_half_precision_autocast_and_checkpointing(form):
    model = learned("llama", form)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits(model, input_ids=ids).float(), exact, atol=5e-2, rtol=0)
    grads = []
    for way in ("plain", "checkpointed"):
        if way == "checkpointed":
            model.gradient_checkpointing_enable()
        model.train()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad.clone() for n, p in model.named_parameters() if ".hyper." in n])
    assert all(map(torch.equal, *grads))
    half = model.eval().to(torch.bfloat16)
    got = logits(half, input_ids=ids)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, atol=5e-2, rtol=0)


@first_always(
    "form, others",
    [
        ("conditional", (ha.ConeConfig(),)),
        ("global", ()),
        ("conditional", ()),
        ("combined", (ha.ConeConfig(),)),
    ],
)
def test_patched_models_compile_into_one_graph(form, others):
    torch._dynamo.reset()
    config, mode = FORMS[form]
    model = ha.patch_model(llama(num_hidden_layers=1), config, *others, mode=mode)
    perturb(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for inputs in (FAMILIES["llama"][1](), {"input_ids": ids_of(model, length=17)}):
        inputs["use_cache"] = False
        assert difference(run(model, inputs), run(compiled, inputs)) <= 1e-5


# Refusals.


def test_refused_settings():
    model = llama()
    state = State(model)
    for config, how, said in (
        (
            MklConfig(combine=True),
            {},
            "mode='blend' is not allowed; allowed: mode='replace', or combine=False",
        ),
        (
            MklConfig(combine=True),
            dict(mode="replace", heads=[0, 1]),
            "heads=... chooses some; allowed: heads=None",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            ha.patch_model(model, config, **how)
    for config in (MklConfig(kind="conditional"), MklConfig(combine=True)):
        with pytest.raises(ValueError, match="mkl and hsa have no meaning together"):
            ha.patch_model(model, config, ha.HsaConfig(), mode="replace")
    assert state.differences(State(model)) == []
    with pytest.raises(ValueError, match="allowed: 'global', 'conditional'"):
        MklConfig(kind="local")
    with pytest.raises(ValueError, match="MklConfig.combine"):
        MklConfig(combine=1)
    bart = FAMILIES["bart"][0]()
    with pytest.raises(ValueError, match="cross-attention has none of .*include_cross_attention=False"):
        ha.patch_model(bart, MklConfig(kind="conditional"), include_cross_attention=True)
    ha.patch_model(bart, MklConfig(), include_cross_attention=True)
    sinks = ha.patch_model(FAMILIES["gpt_oss"][0](), MklConfig(combine=True), mode="replace")
    with pytest.raises(
        ValueError, match="attention sinks, which differ between heads; allowed: combine=False"
    ):
        run(sinks, FAMILIES["gpt_oss"][1]())
