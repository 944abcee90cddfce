"""Patched models inside what a model is wrapped in: PEFT, the compiler, offload, checkpointing, quantisation."""

import re

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from tests.integration.models import (
    TEXT,
    State,
    difference,
    llama,
    perturb,
    run,
    text_inputs,
    train,
)

CONE = ha.ConeConfig()


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def test_patching_a_model_that_peft_has_wrapped(peft):
    inputs, config = (
        text_inputs(),
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
    )
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


@pytest.mark.slow  # every run has the contract `compiled` of cones
def test_a_patched_model_compiles_without_a_break():
    inputs, model = text_inputs(), ha.patch_model(llama(), CONE)
    perturb(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert difference(run(model, inputs), run(compiled, inputs)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bloom", "Gemma2"])
def test_hosts_that_keep_their_own_eager_attention_compile_beside_patched_ones(family):
    """Bloom has no other implementation, Gemma2's softcap is for no other."""
    config = getattr(hf, f"{family}Config")(**TEXT, num_key_value_heads=2, head_dim=8)
    model = getattr(hf, f"{family}ForCausalLM")(config).eval()
    inputs = {"input_ids": text_inputs()["input_ids"]}
    perturb(ha.patch_model(model, CONE, layers=[1]))
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
        accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
        )
    state = State(
        model
    )  # the hooks make new tensors in every call, so there is none before the comparison
    ha.unpatch_model(ha.patch_model(model, CONE))
    assert state.differences(State(model)) == []
    ha.patch_model(model, CONE)
    assert not any(p.is_meta for n, p in model.named_parameters() if ".hyper." in n)
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    assert difference(before, run(model, inputs)) > 0
    ha.unpatch_model(model)
    assert difference(before, run(model, inputs)) <= 1e-6


@pytest.mark.parametrize(
    "config", [CONE, ha.HsaConfig(windows=(2, 4))], ids=lambda config: config.mechanism
)
def test_offload_of_a_patched_model(config):
    accelerate = pytest.importorskip("accelerate")
    inputs, model = text_inputs(), ha.patch_model(llama(), config)
    perturb(model)
    before = run(model, inputs)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert all(p.is_meta for p in model.model.layers[0].self_attn.hyper.parameters())
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


@pytest.mark.extras
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


class Embedder(torch.nn.Module):
    """As PEFT's example of feature extraction wraps a model: what it lacks itself is that of the model inside."""

    def __init__(self):
        super().__init__()
        self.model = llama().model
        self.head = torch.nn.Linear(32, 3)

    def forward(self, **inputs):
        return self.head(self.model(**inputs).last_hidden_state.mean(1))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)


CALLS = {
    "patch": lambda model, peft: ha.patch_model(model, CONE),
    "unpatch": lambda model, peft: ha.unpatch_model(model),
    "describe": lambda model, peft: ha.describe(model),
    "convert": lambda model, peft: ha.convert(model, ha.CollaborativeConfig(rank=16)),
    "adapter": lambda model, peft: peft.get_peft_model(
        model, ha.HyperLoraConfig(mechanisms=[CONE])
    ),
    "inside PEFT's": lambda model, peft: ha.patch_model(
        peft.get_peft_model(model, peft.LoraConfig(r=2)), CONE
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_module_around_a_model_is_refused_with_the_way_out(call, peft):
    place = "base_model.model.model" if call == "inside PEFT's" else "model"
    hint = f"it holds LlamaModel as '{place}', so pass that instead: model.get_submodule('{place}')"
    with pytest.raises(ValueError, match=re.escape(hint)):
        CALLS[call](Embedder(), peft)


def test_a_module_around_a_patched_model_is_trained(peft):
    model = Embedder()
    ha.patch_model(model.get_submodule("model"), CONE)
    groups = {group["name"]: group for group in ha.parameter_groups(model, 1e-3, 1e-2, 0.1)}
    assert {n for n in groups} == {"weights", "undecayed", "hyper"}
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))
    assert any(p is model.head.weight for p in groups["weights"]["params"])
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["hyper"])
    )
    names = {
        n.split("model.layers.0.")[-1]
        for n, p in wrapped.named_parameters()
        if p.requires_grad and "hyper" in n
    }
    assert "self_attn.hyper.modules_to_save.default.cone.gate" in names
    ha.freeze_base(model)
    assert not model.head.weight.requires_grad
