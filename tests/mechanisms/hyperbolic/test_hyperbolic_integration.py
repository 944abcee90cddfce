"""Hyperbolic-distance attention in a host: what the layer computes, by patch and by name, saved, and in generation."""

from dataclasses import dataclass

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.config import HyperAttnConfig, MechanismConfig
from hf_hyperattn.engines import Options
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.mechanisms.hyperbolic.score import HyperbolicLayer
from hf_hyperattn.registry import MECHANISMS, Mechanism
from tests.integration.attention import test_families as families
from tests.integration.models import llama, perturb
from tests.oracles import hyperbolic as oracle
from tests.oracles import softmax
from tests.oracles.cases import DTYPES, assert_close, qkv, tensor
from tests.zoo.inputs import words

CONFIGS = {
    "default": ha.HyperbolicConfig(),
    "lorentz": ha.HyperbolicConfig(distance="squared_lorentz", curvature=0.5, temperature=2.0),
    "mean": ha.HyperbolicConfig(aggregation="mean", curvature=2.0),
}
every_config = pytest.mark.parametrize("name", CONFIGS)
SCALE = 0.7  # the host's; the mechanism's own is 1/sqrt(d) all the same


def host(heads=4, kv_heads=2):
    return Host("layer", heads, kv_heads, True, False, 0)


def layer_of(name, mode, heads=None, at=None):
    """A layer with random parameters, and its numbers as the paper has them."""
    layer = HyperbolicLayer(CONFIGS[name], host() if at is None else at, mode, heads).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            )
    config = CONFIGS[name]
    c = config.curvature * layer.log_curvature.detach().exp()
    return layer, c, config.temperature * layer.log_temperature.detach().exp()


def call_of(options, dtype=torch.float64, scale=2.0):
    q, k, v = qkv(
        batch=2, heads=4, kv_heads=2, lq=6, lk=6, d=3, dv=5, seed=1, scale=scale, dtype=dtype
    )
    return HostCall(q, k, v, SCALE, True, options)


def manual(call, name, c, tau, gate, share, mode):
    """The operator put together by hand: gate of the score, share of the midpoint, both [H] or numbers."""
    q, k, v = call.query.double(), call.key.double(), call.value.double()
    config, options = CONFIGS[name], call.options
    dot = SCALE * q @ k.repeat_interleave(2, dim=1).mT
    other = torch.tensor(
        oracle.scores(q, k, curvature=c, temperature=tau, distance_name=config.distance)
    )
    if (
        options.softcap
    ):  # in a blend the host's own logits are capped, in a replacement those that take their place
        dot, other = (
            (options.softcap * torch.tanh(x / options.softcap)) if capped else x
            for x, capped in ((dot, True), (other, mode == "replace"))
        )
    gate = torch.as_tensor(gate, dtype=torch.float64).reshape(-1, 1, 1)
    logits = dot + gate * other if mode == "blend" else (1 - gate) * dot + gate * other
    mean, weights = softmax.attention(logits, v, causal=options.is_causal, sinks=options.sinks)
    if config.aggregation == "mean":
        return mean
    middle = oracle.midpoints(weights, v, curvature=c, d=q.shape[-1])
    share = torch.as_tensor(share, dtype=torch.float64).reshape(-1, 1, 1).numpy()
    return (1 - share) * mean + share * middle


# The layer.


@every_config
@pytest.mark.parametrize("asked", [{}, {"softcap": 2.0}, {"sinks": [0.5, -1.0, 0.0, 2.0]}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_a_blend_is_what_its_gates_say(name, asked, backend):
    layer, c, tau = layer_of(name, "blend")
    asked = {k: torch.tensor(v).double() if isinstance(v, list) else v for k, v in asked.items()}
    call = call_of(Options(is_causal=True, **asked))
    out, _ = layer(Plan.from_call(call)).run(backend)
    share = 0.0 if layer.midpoint_gate is None else layer.midpoint_gate.detach()
    assert_close(
        out, manual(call, name, c, tau, layer.gate.detach(), share, "blend"), 1e-9, "output"
    )


@every_config
@pytest.mark.parametrize("asked", [{}, {"softcap": 2.0}, {"sinks": [0.5, -1.0, 0.0, 2.0]}], ids=str)
def test_a_replacement_is_the_published_operator(name, asked):
    layer, c, tau = layer_of(name, "replace")
    asked = {k: torch.tensor(v).double() if isinstance(v, list) else v for k, v in asked.items()}
    call = call_of(Options(is_causal=True, **asked))
    out, weights = layer(Plan.from_call(call)).run(weights=True)
    assert_close(out, manual(call, name, c, tau, 1.0, 1.0, "replace"), 1e-9, "output")
    assert weights.shape == (2, 4, 6, 6)


@every_config
@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_heads_that_are_left_alone_stay_the_hosts(name, mode, softcap, backend):
    """A cap acts on what takes the place of the host's logits, also where that is so in some heads only."""
    layer, c, tau = layer_of(name, mode, heads=(1, 2))
    call = call_of(Options(is_causal=True, softcap=softcap))
    chosen = torch.tensor([0.0, 1.0, 1.0, 0.0]).double()
    gate = chosen * layer.gate.detach() if mode == "blend" else chosen
    share = chosen
    if mode == "blend":
        share = chosen * layer.midpoint_gate.detach() if layer.midpoint_gate is not None else 0.0
    out, _ = layer(Plan.from_call(call)).run(backend)
    assert_close(out, manual(call, name, c, tau, gate, share, mode), 1e-9, "output")


@every_config
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_half_precision_hosts_stay_finite(name, dtype, size):
    layer, _, _ = layer_of(name, "blend")
    layer = layer.to(DTYPES[dtype])
    for parameter in layer.parameters():
        parameter.requires_grad_()
    call = call_of(Options(is_causal=True), DTYPES[dtype], size)
    out, _ = layer(Plan.from_call(call)).run("blockwise")
    assert out.dtype == DTYPES[dtype] and torch.isfinite(out).all()
    if (
        dtype == "float16" and size > 1
    ):  # far out, a gate's true gradient is a number that float16 does not have
        return
    grads = torch.autograd.grad(out.float().mean(), list(layer.parameters()))
    assert all(torch.isfinite(g).all() for g in grads)


@every_config
def test_parameters_start_at_zero_which_changes_nothing(name):
    layer = HyperbolicLayer(CONFIGS[name], host(), "blend")
    expected = {"gate", "log_curvature", "log_temperature"}
    expected |= {"midpoint_gate"} if CONFIGS[name].aggregation == "einstein" else set()
    assert {n: (tuple(p.shape), bool(p.any())) for n, p in layer.named_parameters()} == {
        n: ((4,), False) for n in expected
    }
    call = call_of(Options(is_causal=True))
    plain, _ = Plan.from_call(call).run()
    for gate in (g for g in (layer.gate, layer.midpoint_gate) if g is not None):
        with torch.no_grad():
            gate[2] = 0.1
        assert not layer.identical()
        assert (layer(Plan.from_call(call)).run()[0] - plain).abs().amax((0, 2, 3))[2] > 1e-3
        layer.reset_parameters()


def test_both_gates_learn_from_the_start_and_geometry_after():
    layer = HyperbolicLayer(CONFIGS["default"], host(), "blend").double()
    pull = tensor(2, 4, 6, 5, seed=3)

    def gradients():
        out, _ = layer(Plan.from_call(call_of(Options(is_causal=True)))).run()
        names, leaves = zip(*layer.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad((out * pull).sum(), leaves), strict=True))

    start = gradients()
    assert start["gate"].all() and start["midpoint_gate"].all()
    with torch.no_grad():
        layer.gate.fill_(0.3)
    assert gradients()["log_curvature"].all() and gradients()["log_temperature"].all()


# Patched models.


def test_other_aggregations_are_refused_beside_it():
    @dataclass(frozen=True)
    class OtherMean(MechanismConfig):
        mechanism = "toy_mean"

    MECHANISMS["toy_mean"] = Mechanism(
        "toy_mean", "aggregation", "none", OtherMean, HyperbolicLayer
    )
    try:
        with pytest.raises(ValueError) as caught:
            HyperAttnConfig([ha.HyperbolicConfig(), OtherMean()])
        assert all(word in str(caught.value) for word in ("hyperbolic", "toy_mean", "aggregation"))
        HyperAttnConfig([ha.HyperbolicConfig(aggregation="mean"), OtherMean()])
    finally:
        del MECHANISMS["toy_mean"]


@pytest.mark.parametrize(
    "bad, allowed",
    [
        ({"curvature": 0.0}, "above 0"),
        ({"curvature": -1.0}, "above 0"),
        ({"curvature": float("nan")}, "finite"),
        ({"curvature": float("inf")}, "finite"),
        ({"temperature": 0}, "above 0"),
        ({"temperature": -2.5}, "above 0"),
        ({"temperature": "hot"}, "float"),
        ({"distance": "chord"}, "squared_lorentz"),
        ({"aggregation": None}, "None"),
        ({"aggregation": "klein"}, "einstein"),
    ],
)
def test_configs_refuse_by_name_value_and_range(bad, allowed):
    with pytest.raises(ValueError) as caught:
        ha.HyperbolicConfig(**bad)
    ((name, value),) = bad.items()
    message = str(caught.value)
    assert f"HyperbolicConfig.{name}" in message and repr(value) in message and allowed in message


def test_a_call_with_other_heads_is_refused():
    model = llama()
    ha.patch_model(model, ha.HyperbolicConfig())
    perturb(model)
    hyper = model.model.layers[0].self_attn.hyper
    q, k, v = qkv(batch=1, heads=8, kv_heads=2)
    with pytest.raises(ValueError, match="4 heads.*8"):
        hyper(HostCall(q, k, v, 1.0, True, Options()))


# By name.


def test_the_name_takes_its_parameters_from_the_config():
    config = HyperAttnConfig([CONFIGS["lorentz"]])
    model = families.model_of("llama", "hyperbolic")
    ids = words(model.config)
    default = families.logits(model, input_ids=ids)
    model.config.hyperattn = config.to_dict()
    assert (families.logits(model, input_ids=ids) - default).abs().max() > 1e-4
