"""A patched model is the model it was, until something is learned; whatever it is wrapped in."""

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from tests.integration.models import (
    FAMILIES,
    State,
    bert,
    clip,
    difference,
    llama,
    llava,
    perturb,
    real,
    run,
    tensors,
    text_inputs,
    train,
)

CONE = ha.ConeConfig()
VARIANTS = {
    "umbral": CONE,
    "penumbral": ha.ConeConfig(variant="penumbral", gamma=0.5, radius=2.0),
    "expmap": ha.ConeConfig(mapping="expmap"),
}


def make(family: str):
    model, inputs = FAMILIES[family]
    return model(), inputs()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_starts_as_the_identity(family):
    model, inputs = make(family)
    before = run(model, inputs)
    assert ha.patch_model(model, CONE, include_cross_attention=True) is model
    assert difference(before, run(model, inputs)) <= 1e-5
    patched = run(model, inputs)
    with torch.enable_grad():  # gradients wanted: the mechanism is computed, with gates of zero
        computed = real(tensors(model(**inputs)), inputs)
    assert difference(patched, computed) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_added_parameter_learns(family):
    model, inputs = make(family)
    before = run(model, inputs)
    ha.patch_model(model, CONE, include_cross_attention=True)
    perturb(model)
    assert difference(before, run(model, inputs)) > 0
    output = real({n: t for n, t in tensors_with_grad(model(**inputs)).items()}, inputs)
    sum(t.double().square().sum() for t in output.values()).backward()
    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert added
    for name, parameter in added.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("family", ["llama", "t5", "falcon"])
def test_gradients_at_the_start_are_those_of_the_mechanism(family):
    """There the output is the stock's, bit for bit; the gradients must not be."""

    def gradients(moved: bool):
        model, inputs = make(family)
        ha.patch_model(model, CONE)
        for module in model.modules():
            if "moved" in module.__dict__:
                module.moved = moved  # as after the first step: the mechanism's own output is taken
        torch.manual_seed(0)
        output = model(**inputs)[0][:, -1]
        (output * torch.randn_like(output)).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    torch.manual_seed(3)
    start = gradients(False)
    torch.manual_seed(3)
    assert difference(start, gradients(True)) <= 2e-5
    assert all(grad.any() for name, grad in start.items() if name.endswith("gate"))


def tensors_with_grad(output) -> dict:
    return {
        str(i): t for i, t in enumerate(output.to_tuple()) if isinstance(t, torch.Tensor) and t.requires_grad
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "t5", "clip", "falcon"])
def test_every_variant_starts_as_the_identity(family, variant):
    model, inputs = make(family)
    before = run(model, inputs)
    ha.patch_model(model, VARIANTS[variant])
    assert difference(before, run(model, inputs)) <= 1e-5
    with torch.enable_grad():
        assert difference(before, real(tensors(model(**inputs)), inputs)) <= 1e-5


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gpt_oss", "bert", "t5", "bart", "clip", "bloom"]
)
def test_the_identity_holds_with_eager_attention_and_its_weights(family):
    model, inputs = make(family)
    model.set_attn_implementation("eager")
    before = run(model, inputs | dict(output_attentions=True))
    assert any("attention" in name for name in before)
    ha.patch_model(model, CONE, include_cross_attention=True)
    assert difference(before, run(model, inputs | dict(output_attentions=True))) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_added_parameters_have_the_model_s_dtype(dtype):
    model, inputs = llama().to(dtype), text_inputs()
    before = run(model, inputs)
    ha.patch_model(model, CONE)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert difference(before, run(model, inputs)) == 0
    with torch.enable_grad():
        computed = real(tensors(model(**inputs)), inputs)
    tolerance = {torch.float64: 1e-12}.get(dtype, 20 * torch.finfo(dtype).eps)
    assert difference(before, computed) <= tolerance


@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "t5", "falcon"])
def test_generation_with_a_cache_equals_that_without(family):
    model, inputs = make(family)
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    ha.patch_model(model, CONE, include_cross_attention=True)
    perturb(model)
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        cached = model.generate(**inputs, **settings)
        assert torch.equal(cached, model.generate(**inputs, **settings, use_cache=False))


# what models are wrapped in


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def test_patching_a_model_that_peft_has_wrapped(peft):
    inputs, config = text_inputs(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config)
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, CONE)
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    assert difference(before, run(model, inputs)) > 0
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0


def test_peft_wraps_a_patched_model(peft):
    inputs, model = text_inputs(), llama()
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, CONE)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["hyper"])
    wrapped = peft.get_peft_model(model, config)
    assert difference(before, run(wrapped, inputs)) <= 1e-5
    trainable = {n.rsplit(".", 1)[-1] for n, p in wrapped.named_parameters() if p.requires_grad}
    assert trainable == {"weight", "gate", "log_gamma", "log_radius"}
    train(wrapped, inputs | dict(labels=inputs["input_ids"]))
    trained = run(wrapped, inputs)
    assert difference(before, trained) > 0
    with wrapped.disable_adapter():
        assert difference(before, run(wrapped, inputs)) <= 1e-5
    merged = wrapped.merge_and_unload()
    assert difference(trained, run(merged, inputs)) <= 1e-5
    ha.unpatch_model(merged)
    assert [n for n, _ in merged.named_modules() if "hyper" in n] == []
    assert state.order == list(merged.state_dict())


def test_peft_s_wrapper_is_seen_through_when_unpatching(peft):
    inputs, model = text_inputs(), llama()
    before = run(model, inputs)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["hyper"])
    wrapped = peft.get_peft_model(ha.patch_model(model, CONE), config)
    assert ha.describe(wrapped)["patched"] == 4
    assert ha.unpatch_model(wrapped) is wrapped
    assert ha.describe(wrapped)["patched"] == 0
    assert difference(before, run(wrapped, inputs)) == 0


def test_a_compiled_model():
    inputs, model = text_inputs(), llama()
    before = run(model, inputs)
    compiled = torch.compile(model, backend="eager")
    run(compiled, inputs)
    ha.patch_model(compiled, CONE)
    assert difference(before, run(compiled, inputs)) <= 1e-5
    perturb(model)
    moved = run(compiled, inputs)
    assert difference(before, moved) > 1e-4
    assert difference(moved, run(model, inputs)) <= 1e-6
    ha.unpatch_model(compiled)
    assert difference(before, run(compiled, inputs)) <= 1e-6


def test_a_patched_model_compiles_without_a_break():
    inputs, model = text_inputs(), ha.patch_model(llama(), CONE)
    perturb(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert difference(run(model, inputs), run(compiled, inputs)) <= 1e-5


def test_a_data_parallel_wrapper():
    inputs, model = text_inputs(), llama()
    before, wrapped = run(model, inputs), torch.nn.DataParallel(model)
    assert ha.patch_model(wrapped, CONE) is wrapped
    assert difference(before, run(wrapped, inputs)) <= 1e-5
    ha.unpatch_model(wrapped)
    assert ha.describe(wrapped)["patched"] == 0


@pytest.mark.parametrize("kind", ["cpu", "disk", "mixed"])
def test_a_model_under_accelerate_s_offload(kind, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    inputs, model = text_inputs(), llama()
    before = run(model, inputs)
    if kind == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif kind == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    else:
        places = {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "disk",
        }
        places |= {f"model.layers.{i}": ("cpu", "disk")[i % 2] for i in range(4)}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    state = State(model)  # the hooks make new tensors in every call, so there is none before the comparison
    ha.unpatch_model(ha.patch_model(model, CONE))
    assert state.differences(State(model)) == []
    ha.patch_model(model, CONE)
    assert not any(p.is_meta for n, p in model.named_parameters() if ".hyper." in n)
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    assert difference(before, run(model, inputs)) > 0
    ha.unpatch_model(model)
    assert difference(before, run(model, inputs)) <= 1e-6


def test_offload_of_a_patched_model():
    accelerate = pytest.importorskip("accelerate")
    inputs, model = text_inputs(), ha.patch_model(llama(), CONE)
    perturb(model)
    before = run(model, inputs)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.model.layers[0].self_attn.hyper.cone.gate.is_meta
    assert difference(before, run(model, inputs)) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    inputs, model = text_inputs(), ha.patch_model(llama(), CONE).train()
    perturb(model)
    model.enable_input_require_grads()

    def gradients():
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if ".hyper." in n}

    plain = gradients()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    assert difference(plain, gradients()) == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model(bits, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    inputs = text_inputs()
    llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "plain")
    config = hf.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    load = hf.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "plain", quantization_config=config, dtype=torch.float32)
    before = run(model, inputs)
    ha.patch_model(model, CONE)
    assert {p.dtype for n, p in model.named_parameters() if ".hyper." in n} == {torch.float32}
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    moved = run(model, inputs)
    assert difference(before, moved) > 0
    model.save_pretrained(tmp_path / "patched")
    assert difference(moved, run(load(tmp_path / "patched"), inputs)) <= 1e-5
    ha.unpatch_model(model)
    assert difference(before, run(model, inputs)) == 0


def test_a_frozen_model_in_training_mode_stays_what_it_is():
    model = bert(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0).train().requires_grad_(False)
    state = State(model)
    ha.patch_model(model, CONE)
    assert all(m.training for m in model.modules())
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, _ in model.named_parameters() if ".hyper." in n
    ]
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []


# parts of composite models


@pytest.mark.parametrize(
    "family, part", [("llava", "model.language_model"), ("clip", "text_model"), ("t5", "encoder")]
)
def test_a_part_is_patched_by_itself(family, part):
    model, inputs = make(family)
    before, state = run(model, inputs), State(model)
    inner = model.get_submodule(part)
    ha.patch_model(inner, CONE)
    patched = {h["name"] for h in ha.describe(model)["hosts"] if h["mechanisms"]}
    assert patched and all(name.startswith(part + ".") for name in patched)
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    assert difference(before, run(model, inputs)) > 0
    ha.unpatch_model(inner)
    assert state.differences(State(model)) == []


def test_parts_are_patched_in_different_ways_and_unpatched_together():
    model, inputs = make("llava")
    before, state = run(model, inputs), State(model)
    ha.patch_model(model.model.language_model, CONE)
    ha.patch_model(model.model.vision_tower, VARIANTS["penumbral"], mode="replace")
    assert difference(before, run(model, inputs)) > 0
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []


def test_a_part_of_a_model_patched_as_a_whole_cannot_be_unpatched_alone():
    model, _ = make("bart")
    ha.patch_model(model, CONE)
    state = State(model)
    with pytest.raises(ValueError, match="BartEncoder was patched as a part of a larger model"):
        ha.unpatch_model(model.model.encoder)
    assert state.differences(State(model)) == []


# what is refused, with the model left as it was


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = llama()


REFUSED = {
    "nothing": (llama, (), {}, "got no mechanism"),
    "not a config": (llama, ("cone",), {}, "holds 'cone'"),
    "a class": (llama, (ha.ConeConfig,), {}, "holds"),
    "twice the same stage": (llama, (CONE, VARIANTS["penumbral"]), {}, "both change the score"),
    "an unknown layer": (llama, (CONE,), dict(layers=[0, 9]), "layers names layer 9.* 0 to 3"),
    "no layer": (llama, (CONE,), dict(layers=[]), "chooses no attention module"),
    "a function without a layer": (
        llama,
        (CONE,),
        dict(layers=lambda host: False),
        "chooses no attention module",
    ),
    "an unknown name": (llama, (CONE,), dict(layers="last-fifth"), "layers='last-fifth' is not allowed"),
    "an unknown head": (llama, (CONE,), dict(heads=[1, 4]), "names head 4"),
    "a head beyond the start": (llama, (CONE,), dict(heads=[-5]), "names head -5"),
    "no head": (llama, (CONE,), dict(heads=[]), "at least one head"),
    "an unknown mode": (
        llama,
        (CONE,),
        dict(mode="mix"),
        "mode='mix' is not allowed; allowed: 'blend', 'replace'",
    ),
    "a config and more": (llama, (ha.HyperAttnConfig([CONE]),), dict(heads=[1]), "one or the other"),
    "layers that are a number with a point": (llama, (CONE,), dict(layers=1.5), "layers=1.5 is not allowed"),
    "heads that differ": (clip, (CONE,), dict(heads="every-9th"), "names no head"),
    "something that is no model": (Plain, (CONE,), {}, "Plain is no Transformers model"),
    "a model that has no attention": (
        lambda: hf.AutoModel.from_config(hf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)),
        (CONE,),
        {},
        "'mamba' has no attention",
    ),
    "a function in a config that is saved": (
        llama,
        (ha.HyperAttnConfig([CONE], heads=lambda head: head > 3),),
        {},
        "names no head",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_no_trace(case):
    make_model, mechanisms, options, message = REFUSED[case]
    model = make_model()
    state = State(model)
    with pytest.raises(ValueError, match=message) as caught:
        ha.patch_model(model, *mechanisms, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert state.differences(State(model)) == []


def test_a_refused_patch_of_a_served_family_leaves_no_trace():
    model, _ = make("falcon")
    state = State(model)
    with pytest.raises(ValueError, match="names head 99"):
        ha.patch_model(model, CONE, heads=[99])
    assert state.differences(State(model)) == []


@pytest.mark.parametrize("family", ["llama", "clip", "falcon"])
def test_patching_twice_is_refused(family):
    model, inputs = make(family)
    ha.patch_model(model, CONE)
    perturb(model)
    before, state = run(model, inputs), State(model)
    with pytest.raises(ValueError, match="patched already; call unpatch_model"):
        ha.patch_model(model, VARIANTS["penumbral"], mode="replace")
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0


def test_patching_what_holds_a_patched_part_is_refused():
    model = llava()
    ha.patch_model(model.model.language_model, CONE)
    state = State(model)
    with pytest.raises(ValueError, match="patched already"):
        ha.patch_model(model, CONE)
    assert state.differences(State(model)) == []


def test_unpatching_what_is_not_patched_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched; nothing to undo"):
        ha.unpatch_model(llama())


@pytest.mark.parametrize("name", ["cone", "hf_hyperattn"])
def test_a_model_that_runs_a_name_of_ours_is_refused(name):
    model = llama()
    model.set_attn_implementation(name)
    state = State(model)
    with pytest.raises(ValueError, match=f"runs attn_implementation='{name}'"):
        ha.patch_model(model, CONE)
    assert state.differences(State(model)) == []


def test_parameters_of_mechanisms_used_by_name_are_not_overwritten():
    model = llama()
    model.config.hyperattn = ha.HyperAttnConfig([ha.ConeConfig(gamma=0.5)]).to_dict()
    state = State(model)
    with pytest.raises(ValueError, match="del model.config.hyperattn"):
        ha.patch_model(model, CONE)
    assert state.differences(State(model)) == []
