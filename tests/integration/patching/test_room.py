"""A mechanism is one room: toys registered from outside do all that a mechanism of ours does."""

import pytest
import torch
from torch import nn

import hf_hyperattn as ha
from hf_hyperattn.config.registry import LISTENERS
from hf_hyperattn.engines import Options, attention
from hf_hyperattn.integration.attention.stock import OURS
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.registry import MECHANISMS
from tests.integration.models import (
    FAMILIES,
    State,
    difference,
    llama,
    perturb,
    real,
    run,
    tensors,
    text_inputs,
    train,
)
from tests.integration.patching import toy_rooms
from tests.integration.patching.toy_rooms import ToyCosineConfig, ToySlopeConfig, cosine
from tests.oracles.cases import BACKENDS

TOYS = {
    "score": (ToyCosineConfig(),),
    "bias": (ToySlopeConfig(),),
    "both": (ToySlopeConfig(), ToyCosineConfig(temperature=3.0)),
    "with ours": (ha.ConeConfig(), ToySlopeConfig()),
}


@pytest.fixture(autouse=True)
def toys():
    known = set(MECHANISMS)
    toy_rooms.register_toys()
    yield
    for name in set(MECHANISMS) - known:
        del MECHANISMS[name]
        OURS.discard(name)


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("family", ["llama", "bert", "t5", "clip", "falcon"])
def test_patch_train_save_reload_unpatch(family, toy, tmp_path):
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    model.save_pretrained(
        tmp_path
    )  # Transformers notes dtype and class in the config of what it saves
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, *TOYS[toy])
    assert difference(before, run(model, inputs)) <= 1e-5
    assert difference(before, real(tensors(model(**inputs)), inputs)) <= 1e-5
    body = {n: p.detach().clone() for n, p in model.named_parameters() if ".hyper." not in n}
    train(model, inputs)
    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in added.values())
    assert all(p.any() for n, p in added.items() if n.endswith("gate"))
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    with torch.no_grad():
        model.load_state_dict(body, strict=False)
    ha.unpatch_model(model)
    fresh = [
        f
        for f in state.differences(State(model))
        if not f.startswith(("model.config.", "model.config"))
    ]
    assert fresh == []
    assert difference(before, run(model, inputs)) == 0


@pytest.mark.parametrize("engine", BACKENDS)
def test_the_base_derivative_of_a_term_agrees_with_the_definition(engine):
    host = Host("host", heads=4, kv_heads=2, is_causal=True, is_cross=False, layer_index=0)
    layer = toy_rooms.ToyCosineLayer(ToyCosineConfig(), host, "blend").double()
    perturb(torch.nn.ModuleDict({"x": torch.nn.ModuleDict({"hyper": layer})}))
    q, k, v = (torch.randn(2, h, 7, 6, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))

    def call(q, k, v, *_):
        plan = layer(Plan.from_call(HostCall(q, k, v, 0.3, True, Options(is_causal=True))))
        return attention(plan.score, plan.value, plan.options, backend=engine)[0]

    temperature = 2.0 * layer.log_temperature.exp()[:, None, None]
    mixed = q @ k.repeat_interleave(2, 1).mT * 0.3 + layer.gate[
        :, None, None
    ] * temperature * cosine(q, k)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    by_hand = mixed.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(call(q, k, v), by_hand, atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(call, (q, k, v, layer.gate, layer.log_temperature))


@pytest.mark.parametrize("mode", ["blend", "replace"])
def test_a_composition_is_what_its_parts_say(mode):
    host = Host("host", heads=4, kv_heads=4, is_causal=False, is_cross=False, layer_index=0)
    layers = [
        toy_rooms.ToyCosineLayer(ToyCosineConfig(), host, mode),
        toy_rooms.ToySlopeLayer(ToySlopeConfig(), host, mode),
    ]
    perturb(torch.nn.ModuleDict({"x": torch.nn.ModuleDict({"hyper": torch.nn.ModuleList(layers)})}))
    q, k, v = (torch.randn(2, 4, 5, 6) for _ in range(3))
    plan = Plan.from_call(HostCall(q, k, v, 0.3, False, Options()))
    for layer in layers:
        plan = layer(plan)
    gates = [layer.gate[:, None, None] if mode == "blend" else 1.0 for layer in layers]
    score = cosine(q, k) * 2.0 * layers[0].log_temperature.exp()[:, None, None] * gates[0]
    score = score + (q @ k.mT * 0.3 if mode == "blend" else 0)
    score = score + 0.1 * (torch.arange(5) - 4) * gates[1]
    torch.testing.assert_close(plan.run()[0], score.softmax(-1) @ v, atol=1e-5, rtol=0)


def test_by_name():
    model, inputs = llama(), text_inputs()
    before = run(model, inputs)
    model.set_attn_implementation("toy_cosine")
    found = run(model, inputs)
    assert difference(before, found) > 0
    replaced = ha.patch_model(llama(), ToyCosineConfig(), mode="replace")
    replaced.load_state_dict(model.state_dict(), strict=False)
    assert difference(found, run(replaced, inputs)) <= 1e-6


def test_the_public_face_knows_it():
    assert ha.ToyCosineConfig is ToyCosineConfig
    assert ha.functional.toy_cosine_of is cosine
    toy = next(m for m in ha.list_mechanisms() if m["name"] == "toy_cosine")
    assert toy["stage"] == "score" and toy["options"] == {
        "temperature": "what the cosine is multiplied with"
    }
    model = ha.patch_model(llama(), ToyCosineConfig())
    assert {m for host in ha.describe(model)["hosts"] for m in host["mechanisms"]} == {"toy_cosine"}
    with pytest.raises(
        ValueError, match="ToyCosineConfig.temperature=0 is not allowed; allowed: numbers above 0"
    ):
        ToyCosineConfig(temperature=0)


def test_two_of_one_stage_are_refused_and_both_are_named():
    model = llama()
    state = State(model)
    with pytest.raises(ValueError, match="cone and toy_cosine both change the score of attention"):
        ha.patch_model(model, ha.ConeConfig(), ToyCosineConfig())
    assert state.differences(State(model)) == []


def test_what_has_no_meaning_for_cross_attention_is_refused_there():
    make, _ = FAMILIES["bart"]
    model = make()
    state = State(model)
    with pytest.raises(
        ValueError, match="toy_slope has no meaning for cross-attention .*encoder_attn"
    ):
        ha.patch_model(model, ToySlopeConfig(), include_cross_attention=True)
    assert state.differences(State(model)) == []


def test_loading_without_the_package_that_registers_it(tmp_path):
    model = ha.patch_model(llama(), ToyCosineConfig())
    model.save_pretrained(tmp_path)
    del MECHANISMS["toy_cosine"]
    with pytest.raises(
        ValueError, match="'toy_cosine' is unknown; .* import the package that registers them"
    ):
        type(model).from_pretrained(tmp_path)


def test_a_second_mechanism_of_one_name_and_an_unknown_stage_are_refused():
    with pytest.raises(ValueError, match="'toy_cosine' is registered already"):
        toy_rooms.register_toys()
    with pytest.raises(ValueError, match="stage='flavour'; allowed: score, bias, mixing"):
        toy_rooms.register(
            toy_rooms.Mechanism("other", "flavour", "none", ToySlopeConfig, toy_rooms.ToySlopeLayer)
        )
    assert len(LISTENERS) == 1 and "other" not in MECHANISMS


def head_outputs(model: nn.Module, projection: nn.Module) -> torch.Tensor:
    """What every head hands to the output projection, [B, N, H, d]."""
    seen = []
    handle = projection.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach())
    )
    with torch.no_grad():
        model(**text_inputs())
    handle.remove()
    return seen[0].unflatten(-1, (4, -1))[1]  # the row without padding


def test_a_layer_that_does_not_say_that_it_honours_heads_is_refused(monkeypatch):
    model = llama(num_hidden_layers=1, num_key_value_heads=4, initializer_range=0.3)
    projection = model.model.layers[0].self_attn.o_proj
    before, state = head_outputs(model, projection), State(model)
    with pytest.raises(
        ValueError, match=r"toy_cosine changes all heads .* chooses 1 of 4; allowed: heads=None"
    ) as error:
        ha.patch_model(model, toy_rooms.ToyCosineConfig(), heads=[2])
    assert "\n" not in str(error.value) and state.differences(State(model)) == []
    ha.patch_model(model, toy_rooms.ToyCosineConfig(), heads=range(4))
    ha.unpatch_model(model)
    ha.patch_model(model, toy_rooms.ToySlopeConfig(slope=1.0), heads=[2])
    perturb(model)
    after = head_outputs(model, projection)
    changed = (after - before).abs().amax((0, 2))
    assert changed[[0, 1, 3]].max() <= 1e-5 and changed[2] > 1e-2
    ha.unpatch_model(model)
    original = toy_rooms.ToySlopeLayer.__init__
    monkeypatch.setattr(  # a layer that says so and forgets to pass them on
        toy_rooms.ToySlopeLayer,
        "__init__",
        lambda self, config, host, mode, heads: original(self, config, host, mode),
    )
    with pytest.raises(ValueError, match="toy_slope changes all heads"):
        ha.patch_model(model, toy_rooms.ToySlopeConfig(), heads=[2])
