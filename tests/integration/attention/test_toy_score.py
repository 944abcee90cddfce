"""The score contract from outside: a function of a pair does all that a mechanism of ours does (toy_score.py)."""

import copy

import pytest
import torch
from peft import get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.engines import Options
from hf_hyperattn.engines.cpu import kernels
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.registry import get_mechanism
from tests.engines.test_native import needs_compiler
from tests.integration.attention.toy_score import define
from tests.integration.models import difference, llama, perturb, run, text_inputs, train
from tests.registries import restored

OTHERS = {
    "hype": ha.HypeConfig(),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(),
}
ENGINES = [
    *((engine, torch.float64, 1e-9) for engine in ("blockwise", "cpu", "reference")),
    pytest.param("cpu", torch.float32, 2e-6, marks=needs_compiler),
]


@pytest.fixture(autouse=True)
def toy():
    with restored():
        define()
        yield


def patched(*configs, **more):
    model = ha.patch_model(llama(), *(configs or (ha.ScoreConfig("toy_score"),)), **more)
    perturb(model)
    return model


def expected_output(q, k, v, mode, heads):
    """By the formula, with gate and logarithm of c at -1 .. 1 over the heads."""
    number, k, v = (
        torch.linspace(-1, 1, 4).double()[:, None, None],
        *(t.repeat_interleave(2, 1) for t in (k, v)),
    )
    q_unit, k_unit = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    dot = 0.4 * q @ k.mT
    toy = dot + 0.5 * number.exp() * q_unit @ k_unit.mT
    chosen = torch.tensor([heads is None or h in heads for h in range(4)])[:, None, None]
    logits = torch.where(chosen, dot + number * toy if mode == "blend" else toy, dot)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("engine, dtype, tolerance", ENGINES)
@pytest.mark.parametrize("heads", [None, (0, 2)])
@pytest.mark.parametrize("mode", ["blend", "replace"])
def test_every_engine_computes_the_formula_and_its_gradients(
    engine, dtype, tolerance, heads, mode, monkeypatch
):
    compiled, pack_call = [], kernels.pack_call
    monkeypatch.setattr(kernels, "pack_call", lambda *args: compiled.append(1) or pack_call(*args))
    host = Host("host", heads=4, kv_heads=2, is_causal=True, is_cross=False, layer_index=0)
    layer = (
        get_mechanism("toy_score").layer(ha.ScoreConfig("toy_score"), host, mode, heads).to(dtype)
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(-1, 1, 4))
    exact = [torch.randn(1, h, 9, 6).double().requires_grad_() for h in (4, 2, 2)]
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in exact)
    out, _ = layer(Plan.from_call(HostCall(q, k, v, 0.4, True, Options(is_causal=True)))).run(
        engine
    )
    expected = expected_output(*exact, mode, heads)
    assert (out - expected).abs().max() < tolerance
    gradients = (
        torch.autograd.grad(o.cos().sum(), t) for o, t in ((out, (q, k, v)), (expected, exact))
    )
    for got, wanted in zip(*gradients, strict=True):
        assert (got - wanted).abs().max() < 10 * tolerance
    # forward and backward of a term that has no C++ of its own
    assert len(compiled) == 2 * (engine == "cpu" and dtype == torch.float32)


def test_patch_train_reload_unpatch(tmp_path):
    model, inputs = llama(), text_inputs()
    stock = run(model, inputs)
    ha.patch_model(model, ha.ScoreConfig("toy_score"), heads=(0, 3))
    assert difference(stock, run(model, inputs)) <= 1e-5
    fresh = copy.deepcopy(model)
    ha.unpatch_model(fresh)
    assert difference(stock, run(fresh, inputs)) == 0
    train(model, inputs)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0


def test_by_name():
    model, inputs = llama(), text_inputs()
    before = run(model, inputs)
    model.set_attn_implementation("toy_score")
    assert difference(before, run(model, inputs)) > 1e-4


def test_an_adapter_trains_it():
    model = get_peft_model(patched(), ha.lora_config(patched(), r=2, target_modules=["q_proj"]))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert any("toy_score.log_weight" in n for n in names) and any("lora_" in n for n in names)
    model(**text_inputs()).logits.sum().backward()


@pytest.mark.parametrize("other", OTHERS)
def test_composed(other):
    model, inputs = patched(ha.ScoreConfig("toy_score"), OTHERS[other]), text_inputs()
    expected = run(ha.set_backend(model, "reference"), inputs)
    assert difference(expected, run(ha.set_backend(model, "blockwise"), inputs)) <= 1e-5
    train(model, inputs)


def test_beside_ties_between_keys_it_is_refused_when_patched():
    with pytest.raises(
        ValueError, match="toy_score and hsa have no meaning together: .* linear in the key"
    ):
        ha.patch_model(llama(), ha.ScoreConfig("toy_score"), ha.HsaConfig())


def test_its_line_in_the_list_of_mechanisms():
    facts = {f["name"]: f for f in ha.list_mechanisms()}
    assert facts["toy_score"]["stage"] == "score" and facts["toy_score"]["attn_implementation"] == [
        "toy_score"
    ]
