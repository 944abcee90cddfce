"""HyPE in models: by name and by patch, in half precision, compiled."""

import pytest
import torch
import transformers as hf

from hf_hyperattn import HypeConfig, patch_model, unpatch_model
from hf_hyperattn.engines import Options
from hf_hyperattn.mechanisms.base import HostCall
from tests.integration.models import FAMILIES, State, bert, difference, llama, perturb, run, train
from tests.integration.test_families import CAUSAL, ENCODERS, inputs_of, logits, model_of
from tests.zoo.inputs import words
from tests.zoo.probe import counted

from .hype_models import STEEP, ids_of, steep

# By name.


@pytest.mark.parametrize("family", (*CAUSAL, *ENCODERS, "bart"))
def test_loads_by_name_and_runs_forward_and_backward(family):
    model = model_of(family, "hype")
    inputs = inputs_of(family, model)
    with counted("hype") as modules:
        out = model(**inputs).logits
    assert modules and out.isfinite().all()
    out.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    stock = model_of(family, "eager")
    assert (logits(model, **inputs) - logits(stock, **inputs)).abs().max() > 1e-5


@pytest.mark.parametrize("family", ("llama", "gpt2", "bert", "bart"))
def test_by_name_is_replace_with_the_defaults(family):
    named, patched = (
        model_of(family, "hype"),
        patch_model(model_of(family, "eager"), HypeConfig(), mode="replace"),
    )
    inputs = inputs_of(family, named)
    torch.testing.assert_close(logits(named, **inputs), logits(patched, **inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ("t5", "vit", "whisper"))
def test_a_model_that_says_no_length_must_be_given_one(family):
    model = model_of(family, "hype")
    with pytest.raises(
        ValueError, match=r"max_length=None .*max_position_embeddings.*max_length=\.\.\."
    ) as caught:
        model(**inputs_of(family, model))
    assert "\n" not in str(caught.value) and type(model.config).__name__ in str(caught.value)
    state = State(other := model_of(family, "eager"))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        patch_model(other, HypeConfig())
    assert state.differences(State(other)) == []
    patch_model(other, HypeConfig(max_length=64), mode="replace")(**inputs_of(family, other))


def test_cross_attention_keeps_its_dot_product_and_is_refused_by_patch():
    """By name the decoder's cross-attention is stock: cut off from it, nothing of the encoder's order is left."""
    model, stock = model_of("bart", "hype"), model_of("bart", "sdpa")
    cross = model.model.decoder.layers[0].encoder_attn, stock.model.decoder.layers[0].encoder_attn
    states = torch.randn(2, 5, model.config.d_model), torch.randn(2, 9, model.config.d_model)
    with torch.no_grad():
        ours, theirs = (c(states[0], key_value_states=states[1])[0] for c in cross)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="hype has no meaning for cross-attention"):
        patch_model(stock, HypeConfig(), include_cross_attention=True)


# Patched: identity, training, reload, reversal.


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mistral", "gemma2", "qwen3", "bert", "bart", "t5", "vit", "falcon"]
)
def test_patch_is_the_identity_learns_and_comes_back(family, tmp_path):
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    if family == "gemma2":  # SDPA leaves its softcap out, which Transformers 5.17 does not mind
        model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)  # Transformers notes dtype and class in the config of what it saves
    before, state = run(model, inputs), State(model)
    config = HypeConfig() if family not in ("t5", "vit") else HypeConfig(max_length=32)
    patch_model(model, config)
    assert difference(before, run(model, inputs)) <= (1e-5 if family == "falcon" else 0)
    body = {n: p.detach().clone() for n, p in model.named_parameters() if ".hyper." not in n}
    train(model, inputs)
    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert added and all(p.grad is not None and p.grad.isfinite().all() for p in added.values())
    assert all(p.any() for n, p in added.items() if n.endswith("gate"))
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    with torch.no_grad():
        model.load_state_dict(body, strict=False)
    unpatch_model(model)
    fresh = [
        f for f in state.differences(State(model)) if not f.startswith(("model.config.", "model.config"))
    ]
    assert fresh == [] and difference(before, run(model, inputs)) == 0


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("make", [FAMILIES["gpt2"][0], bert], ids=["gpt2", "bert"])
def test_every_parameter_reaches_the_loss_with_its_true_gradient(make, mode):
    """Against finite differences of the loss in float64."""
    model = patch_model(make(), HypeConfig(mu=0.05, tau=4.0), mode=mode).double()
    perturb(model, 0.2)
    inputs = {"input_ids": words(model.config)}

    def loss():
        return model(**inputs)[0].square().mean()

    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert {n.rsplit(".")[-1] for n in added} == {"log_mu", "log_tau"} | (
        {"gate"} if mode == "blend" else set()
    )
    grads = torch.autograd.grad(loss(), list(added.values()))
    for parameter, grad in zip(added.values(), grads, strict=True):
        for index in range(4):
            with torch.no_grad():
                parameter[index] += 1e-6
                high = loss()
                parameter[index] -= 2e-6
                low = loss()
                parameter[index] += 1e-6
            assert grad[index].item() == pytest.approx(((high - low) / 2e-6).item(), rel=1e-4, abs=1e-9)


def test_chosen_heads_alone_are_changed():
    model = patch_model(llama(num_hidden_layers=1), HypeConfig(**STEEP), heads=[1, 3], mode="replace")
    layer = model.model.layers[0].self_attn.hyper
    q, k, v = (torch.randn(1, h, 9, 8) for h in (4, 2, 2))
    out, _ = layer(HostCall(q, k, v, 0.3, True, Options(is_causal=True)))
    plain = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    moved = (out - plain).abs().amax((0, 2, 3)) > 1e-3
    assert moved.tolist() == [False, True, False, True]


def test_it_supplies_positions_where_there_are_none():
    """Without positions a decoder cannot tell the order of what it has read; with HyPE it can."""
    config = hf.SmolLM3Config(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, no_rope_layers=[0], use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.SmolLM3ForCausalLM(config).eval()
    ids = ids_of(model)
    turned = torch.cat([ids[:, :8].flip(1), ids[:, 8:]], 1)

    def seen():
        return (logits(model, input_ids=ids) - logits(model, input_ids=turned))[:, -1].abs().max()

    assert seen() < 1e-5
    patch_model(model, HypeConfig(max_length=16), mode="replace")
    assert seen() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model = steep("llama")
    ids = words(model.config, length=300)
    exact = logits(model, input_ids=ids)
    model = model.to(dtype)
    got = logits(model, input_ids=ids)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, atol=2e-2, rtol=0)
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for n, p in model.named_parameters() if ".hyper." in n)


def test_under_autocast_the_columns_stay_float32():
    model = patch_model(llama(), HypeConfig(max_length=512), mode="replace")
    ids = words(model.config, length=400)
    exact = logits(model, input_ids=ids, use_cache=False)
    with torch.autocast("cpu", torch.bfloat16):
        got = logits(model, input_ids=ids, use_cache=False)
    torch.testing.assert_close(got.float(), exact, atol=3e-2, rtol=0)


@pytest.mark.slow
def test_patched_models_compile_into_one_graph_and_export():
    """Positions come out of the mask without a look at its values."""
    torch._dynamo.reset()
    model = patch_model(llama(num_hidden_layers=1), HypeConfig(max_length=64))
    perturb(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for inputs in (FAMILIES["llama"][1](), {"input_ids": ids_of(model, length=17)}):
        inputs["use_cache"] = False
        assert difference(run(model, inputs), run(compiled, inputs)) <= 1e-5
    length = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}, "use_cache": None}
    given = {"input_ids": ids_of(model), "use_cache": False}
    exported = torch.export.export(model, (), given, dynamic_shapes=length).module()
    assert difference(run(model, inputs), run(exported, inputs)) <= 1e-5
