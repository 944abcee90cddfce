"""Every mechanism on a GPU: what a model computes there is what it computes on the CPU, in every way it is used.

The cases are those of the road table. `HF_HYPERATTN_TEST_DEVICE=cpu` runs the tests without a GPU, to see that they
themselves hold.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from transformers.cache_utils import StaticCache

import hf_hyperattn as ha
from hf_hyperattn import functional
from tests.integration.models import State
from tests.oracles.cases import tensor
from tests.roads.cases import BY_LABEL, CASES, LAYERS, Case, inputs_of, logits
from tests.roads.outcome import gap

DEVICE = os.environ.get("HF_HYPERATTN_TEST_DEVICE", "cuda")
pytestmark = [pytest.mark.timeout(300)] + [pytest.mark.gpu] * (DEVICE == "cuda")
#: Of logits on another device, as a share of the largest: another order of sums, over three layers.
TOLERANCE = 1e-4
HALF = 0.1
LONG = 100  # tokens, more than the engine without tiles takes

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
every_causal = pytest.mark.parametrize(
    "case", [c for c in CASES if c.causal], ids=lambda case: case.label
)
every_patch = pytest.mark.parametrize(
    "case", [c for c in CASES if c.how == "patch"], ids=lambda case: case.label
)
COMPILED = (
    "cone (patch)",
    "hyperbolic (patch)",
    "hype (patch)",
    "talking_heads (patch)",
    "hsa (patch)",
    "cone (name)",
)
compilable = pytest.mark.parametrize("label", COMPILED)


def there(inputs: dict) -> dict:
    """The inputs on the device."""
    return {name: t.to(DEVICE) for name, t in inputs.items()}


def tolerance(case: Case) -> float:
    return max(TOLERANCE, case.tolerance)


def same(found, expected, case: Case, of: str = "logits") -> None:
    assert gap(found.cpu(), expected.cpu()) <= tolerance(case), (
        of,
        gap(found.cpu(), expected.cpu()),
    )


@every_case
@pytest.mark.parametrize("length", [20, LONG])
def test_logits(case, length):
    inputs = inputs_of(length)
    same(logits(case.model().to(DEVICE), there(inputs)), logits(case.model(), inputs), case)


@every_case
def test_gradients(case):
    def gradients(model, inputs):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    inputs = inputs_of(LONG)
    expected = gradients(case.model(), inputs)
    found = gradients(case.model().to(DEVICE), there(inputs))
    assert found.keys() == expected.keys()
    scale = max(t.abs().max().item() for t in expected.values())
    for name, wanted in expected.items():
        assert found[name].device.type == DEVICE
        error = (found[name].cpu() - wanted).abs().max().item()
        assert error <= 10 * tolerance(case) * max(wanted.abs().max().item(), 1e-2 * scale), name


@every_case
def test_half_precision(case):
    """bfloat16 there is as far from float32 as bfloat16 here; where blocks are chosen, some rows choose others."""
    inputs = inputs_of(LONG)
    exact = logits(case.model(), inputs)
    found = logits(case.model().to(DEVICE, torch.bfloat16), there(inputs))
    rounded = logits(case.model().to(torch.bfloat16), inputs)
    error = lambda t: ((t - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert torch.isfinite(found).all()
    assert error(found) <= max(HALF, 2 * error(rounded)), (error(found), error(rounded))


@every_case
def test_autocast(case):
    model, inputs = case.model().to(DEVICE), there(inputs_of(LONG))
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    with torch.no_grad():
        plain = model(**inputs, labels=inputs["input_ids"]).loss
    assert abs(loss.item() - plain.item()) <= 0.1 * abs(plain.item())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@every_patch
def test_patched_there(case):
    """What a patch adds lies where the layers lie, starts as on the CPU, and goes again bit for bit."""
    model, inputs = case.stock().to(DEVICE), inputs_of(LONG)
    before, plain = State(model), logits(model, there(inputs))
    ha.patch_model(model, case.config, layers=LAYERS)
    assert {p.device.type for p in model.parameters()} == {DEVICE}
    same(logits(model, there(inputs)), logits(case.fresh(), inputs), case)
    ha.unpatch_model(model)
    assert torch.equal(logits(model, there(inputs)), plain)
    assert not before.differences(State(model))


@every_case
def test_saved_and_loaded_there(case, tmp_path):
    model = case.model().to(DEVICE)
    expected = logits(model, there(inputs_of()))
    model.save_pretrained(tmp_path)
    loaded = case.auto.from_pretrained(tmp_path, device_map=DEVICE)
    assert {p.device.type for p in loaded.parameters()} == {DEVICE}
    same(logits(loaded, there(inputs_of())), expected, case)
    same(logits(case.auto.from_pretrained(tmp_path)), expected, case)


@every_case
def test_there_and_back(case):
    model = case.model().to(DEVICE)
    twin = copy.deepcopy(model)
    logits(model, there(inputs_of()))
    assert torch.equal(logits(model.to("cpu")), case.logits)
    same(logits(twin, there(inputs_of())), case.logits, case)


@every_case
def test_layers_on_two_devices(case, tmp_path):
    """Some layers on the GPU, others on the CPU, as `device_map` splits a model that is too large."""
    modules = dict(case.model().named_modules())
    stack = next(
        n for n, m in modules.items() if isinstance(m, torch.nn.ModuleList) and len(m) == 3
    )
    leaves = [n for n, m in modules.items() if not any(m.children())]
    leaves += [n for n, _ in case.model().named_parameters() if n.rpartition(".")[0] not in leaves]
    places = {n: DEVICE for n in leaves if not n.startswith(f"{stack}.")}
    places |= {f"{stack}.{i}": ("cpu", DEVICE, "cpu")[i] for i in range(3)}
    model = case.auto.from_pretrained(case.folder(), device_map=places)
    same(logits(model, there(inputs_of(LONG))), logits(case.model(), inputs_of(LONG)), case)


def generated(model, **options) -> torch.Tensor:
    """Logits of the tokens that a model writes after a text."""
    found = model.generate(
        **{name: t.to(model.device) for name, t in inputs_of(LONG - 20).items()},
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return torch.stack(found.logits, 1)


@every_causal
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(case, cache):
    """Step by step with a cache as in one pass."""
    options = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
    found = generated(case.model().to(DEVICE), **options[cache])
    same(found, generated(case.model(), use_cache=False), case)


@compilable
def test_generation_with_a_cache_that_is_compiled(label):
    """As `generate` does by itself with a static cache on a GPU."""
    torch._dynamo.reset()
    case = BY_LABEL[label]
    found = generated(case.model().to(DEVICE), cache_implementation="static")
    same(found, generated(case.model(), use_cache=False), case)


@compilable
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(label, mode):
    torch._dynamo.reset()
    case, inputs = BY_LABEL[label], inputs_of(LONG)
    compiled = torch.compile(case.model().to(DEVICE), fullgraph=True, mode=mode)
    for _ in range(3):  # CUDA graphs are recorded in the second call
        same(logits(compiled, there(inputs)), logits(case.model(), inputs), case)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.family == "llama"], ids=lambda case: case.label
)
def test_prefill_in_a_static_cache(case):
    """A cache of a fixed length, of which most keys are not there yet."""
    model, inputs = case.model().to(DEVICE), inputs_of(40)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        found = model(**there(inputs), past_key_values=cache).logits
    real = inputs["attention_mask"].bool()
    same(found[real.to(found.device)], logits(case.model(), inputs), case)


Q, K, V = (tensor(2, 4, LONG, 16, seed=seed, dtype=torch.float32) for seed in range(3))
CALLS = {
    "cone": lambda q, k, v: functional.cone_attention(q, k, v, is_causal=True),
    "penumbral": lambda q, k, v: functional.cone_attention(q, k, v, variant="penumbral"),
    "hyperbolic": lambda q, k, v: functional.hyperbolic_attention(q, k, v, is_causal=True),
    "squared_lorentz": lambda q, k, v: functional.hyperbolic_attention(
        q, k, v, distance="squared_lorentz"
    ),
    "hype": lambda q, k, v: functional.hype_attention(
        q, k, v, is_causal=True, mu=q.new_full((4,), 0.05), tau=q.new_full((4,), 2.0)
    ),
    "hierarchical": lambda q, k, v: functional.hierarchical_attention(q, k, v, hierarchy=(4, 16)),
    "hierarchical, causal": lambda q, k, v: functional.hierarchical_attention(
        q, k, v, hierarchy=(4, 16), tying="key", near=4, sinks=1, refine_top_k=1, is_causal=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions(name, dtype):
    here = [t.clone().to(dtype).requires_grad_() for t in (Q, K, V)]
    gone = [t.detach().to(DEVICE).requires_grad_() for t in here]
    expected, found = CALLS[name](*here), CALLS[name](*gone)
    assert found.device.type == DEVICE and gap(found.cpu(), expected) <= 1e-5
    wanted = torch.autograd.grad(expected.square().sum(), here)
    for ours, theirs in zip(torch.autograd.grad(found.square().sum(), gone), wanted, strict=True):
        assert gap(ours.cpu(), theirs) <= 1e-4
