"""Trilinear attention in models: how it starts, learns, is saved and taken back; caches, padding, refusals."""

from dataclasses import replace

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import bidaf_scores, hype_bias
from hf_hyperattn.integration.attention.hyper import Hyper
from hf_hyperattn.mechanisms.base import FirstKey, Host, HostCall
from hf_hyperattn.mechanisms.trilinear import TrilinearConfig
from tests.integration.attention.test_families import model_of
from tests.integration.models import FAMILIES, State, difference, llama, perturb, run
from tests.mechanisms.hype.hype_models import ids_of
from tests.oracles import trilinear as by_hand
from tests.oracles.cases import assert_close, tensor
from tests.oracles.softmax import attention

CONFIGS = {
    "defaults": TrilinearConfig(),
    "whole": TrilinearConfig(windows=None),
    "short windows": TrilinearConfig(windows=(3, 2)),
    "distmult": TrilinearConfig(windows=(None, 3), tensor="distmult"),
    "cp": TrilinearConfig(windows=None, tensor="cp"),
    "low rank": TrilinearConfig(windows=(5, None), tensor="cp", rank=3),
    "bidaf": TrilinearConfig(form="bidaf"),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
SOME = {name: CONFIGS[name] for name in ("short windows", "low rank", "bidaf")}
some_configs = pytest.mark.parametrize("config", SOME.values(), ids=SOME)
FACTS = dict(
    heads=4, kv_heads=2, is_causal=True, is_cross=False, layer_index=0, head_dim=6, value_dim=5
)


def learned(family, config, mode="blend", **changes):
    """A tiny model in which the mechanism decides."""
    model = ha.patch_model(model_of(family, "eager", **changes), config, mode=mode)
    perturb(model, 0.5)
    return model


# How it starts.


# What it computes in a host.


def hyper_of(config, mode="blend", others=(), **facts):
    hyper = Hyper(ha.HyperAttnConfig([config, *others], mode=mode), Host("host", **FACTS | facts))
    perturb(torch.nn.ModuleDict({"x": torch.nn.ModuleDict({"hyper": hyper})}), 0.5)
    return hyper.double(), hyper.layers()[0]


def call_of(n=7, causal=True, **options):
    q, k, v = tensor(2, 4, n, 6, seed=1), tensor(2, 2, n, 6, seed=2), tensor(2, 2, n, 5, seed=3)
    return HostCall(q, k, v, 0.4, causal, Options(is_causal=causal, **options))


@pytest.mark.parametrize("name", ["whole", "short windows", "distmult", "cp", "low rank"])
@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_what_the_formula_says(name, mode, causal):
    hyper, layer = hyper_of(CONFIGS[name], mode, is_causal=causal)
    call = call_of(causal=causal)
    out, _ = hyper(call)
    p = {n: t.detach() for n, t in layer.named_parameters()}
    q, k, v = call.query, call.key, call.value
    k2, v2 = (
        1 + torch.einsum("gef,bgmf->bgme", p["key_map"], k),
        1 + torch.einsum("gef,bgmf->bgme", p["value_map"], v),
    )
    if "diagonal" in p:
        q = q * (1 + p["diagonal"])[:, None]
    if "query_factor" in p:
        unit = torch.eye(6, dtype=torch.float64)[: layer.rank]
        q, k, k2 = (
            torch.einsum("grf,bgmf->bgmr", unit + p[f"{n}_factor"], x)
            for n, x in (("query", q), ("key", k), ("key2", k2))
        )
    windows = CONFIGS[name].windows or (None, None)
    three, _ = by_hand.attention(q, k, v, k2, v2, scale=0.4, causal=causal, windows=windows)
    pairs = 0.4 * torch.einsum("bhnd,bhmd->bhnm", call.query, call.key.repeat_interleave(2, 1))
    own, _ = attention(pairs, v, causal=causal)
    gate = torch.ones(4, 7, dtype=torch.float64)
    if "gate" in p:
        w1 = windows[0]
        cut = [name == "low rank" or i >= w1 or (not causal and 6 - i >= w1) for i in range(7)]
        gate[:, cut] = p["gate"][:, None]
    expected = own + gate[..., None].numpy() * (three - own)
    assert_close(out, torch.from_numpy(expected), 1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 0.8}, {"sinks": tensor(4, seed=6)}], ids=["", "cap", "sinks"]
)
def test_bidaf_is_what_the_formula_says(options):
    hyper, layer = hyper_of(CONFIGS["bidaf"])
    call = call_of(**options)
    out, _ = hyper(call)
    w1, w2, w3 = (p.detach() for p in (layer.w1, layer.w2, layer.w3))
    scores = by_hand.bidaf(call.query, call.key, w1, w2, 0.4 * (1 + w3))
    assert_close(
        bidaf_scores(call.query, call.key, w1=w1, w2=w2, w3=0.4 * (1 + w3)),
        torch.from_numpy(scores),
        1e-12,
    )
    expected, _ = attention(scores, call.value, causal=True, **options)
    assert_close(out, torch.from_numpy(expected), 1e-12)
    (grad,) = torch.autograd.grad(out.square().sum(), layer.w1)
    # what a row has in common, softmax does not see
    assert grad.abs().max() > 1e-6 if options else not grad.any()


def test_hype_beside_it_is_a_bias_on_j():
    config = ha.HypeConfig(mu=0.2, tau=3.0)
    hyper, layer = hyper_of(CONFIGS["whole"], "replace", [config])
    with torch.no_grad():
        for p in hyper.layers()[1].parameters():
            p.zero_()
    call = call_of()
    bias = hype_bias(torch.arange(7), torch.arange(7), mu=0.2, tau=3.0, form="sinh")
    k2 = 1 + torch.einsum("gef,bgmf->bgme", layer.key_map, call.key)
    v2 = 1 + torch.einsum("gef,bgmf->bgme", layer.value_map, call.value)
    expected, _ = by_hand.attention(
        call.query,
        call.key,
        call.value,
        k2.detach(),
        v2.detach(),
        scale=0.4,
        causal=True,
        bias=bias,
    )
    assert_close(hyper(call)[0], torch.from_numpy(expected), 1e-6)


def test_attention_weights_are_those_of_j():
    model = learned("llama", TrilinearConfig(windows=(4, 2)))
    ids = ids_of(model)
    out = model(ids, output_attentions=True)
    weights = torch.stack(out.attentions)
    assert_close(weights.sum(-1), torch.ones(()).expand(weights.shape[:-1]), 1e-5)
    assert_close(out.logits, model(ids).logits, 1e-5)


# Caches, padding, generation.


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("windows", [(3, 2), (2, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_last_queries_alone_see_what_they_see_among_all(few, windows, masked):
    """Keys that both windows have passed are left out; masks and biases go with the keys."""
    hyper, _ = hyper_of(TrilinearConfig(windows=windows), mode="replace", is_causal=True)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    mask[1, :, :, 4] = False
    bias = tensor(1, 4, 7, 7, seed=4)
    more = {"mask": mask, "bias": bias} if masked else {"bias": bias[..., :1]}
    expected = hyper(call_of(**more))[0][:, :, -few:]
    call = call_of(**more)
    options = replace(call.options, offset=7 - few, **{n: t[:, :, -few:] for n, t in more.items()})
    last = replace(
        call,
        query=call.query[:, :, -few:],
        options=options,
        first=FirstKey(0, mask.any(2)[:, 0] if masked else None, 7),
    )
    assert_close(hyper(last)[0], expected, 1e-12)


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize(
    "config", [CONFIGS["short windows"], CONFIGS["low rank"], CONFIGS["distmult"]]
)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_windows_count_no_padding(family, config, mode):
    """Padding inside a row changes no logit, no weight and no gradient, also where queries have a gate for it."""
    model = learned(family, config, mode).double()
    ids, real = ids_of(model)[:1, :9], torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0])
    at = real.nonzero()[:, 0]
    spread = torch.zeros(1, 14, dtype=torch.long).scatter(1, at[None], ids)
    place = {"position_ids": (real.cumsum(0) - 1).clamp_min(0)[None]}
    expected = model(ids, output_attentions=True)
    found = model(spread, attention_mask=real[None], output_attentions=True, **place)
    weights = torch.stack(found.attentions)[..., at, :]
    assert_close(weights[..., at], torch.stack(expected.attentions), 1e-9)
    assert_close(found[0][:, at], expected[0], 1e-9)
    parameters = [p for name, p in model.named_parameters() if ".hyper." in name]
    outputs = found[0][:, at], expected[0]
    gradients = (torch.autograd.grad(out.square().sum(), parameters) for out in outputs)
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-9 * (1 + other.abs().max()))


@pytest.mark.slow
def test_compiled_windows_count_no_padding():
    model = learned("llama", CONFIGS["short windows"])
    real = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    call = dict(
        attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp_min(0), use_cache=False
    )
    ids = ids_of(model, length=11)
    ids = torch.cat([ids, ids.flip(1)], 1)[:, :11]
    with torch.no_grad():
        expected, found = model(ids, **call).logits, torch.compile(model)(ids, **call).logits
    assert_close(found[real.bool()], expected[real.bool()], 1e-4)


# Precision, compilation, adapters.


# Refusals.

BAD = [
    (
        dict(windows=(0, 32)),
        r"TrilinearConfig.windows=\(0, 32\) is not allowed; allowed: \(w1, w2\), each an integer",
    ),
    (dict(windows=(512,)), "TrilinearConfig.windows"),
    (dict(rank=0, tensor="cp"), "TrilinearConfig.rank=0 is not allowed; allowed: numbers from 1"),
    (
        dict(rank=3),
        "TrilinearConfig.rank=3 is not allowed; allowed: None with tensor other than 'cp'",
    ),
    (
        dict(form="bidaf", tensor="cp"),
        "TrilinearConfig.tensor='cp' is not allowed; allowed: 'identity' with form=",
    ),
    (dict(form="bidaf", windows=(4, 4)), "TrilinearConfig.windows"),
    (dict(form="triple"), "allowed: 'simplicial', 'bidaf'"),
]


@pytest.mark.parametrize("fields, said", BAD, ids=[str(f) for f, _ in BAD])
def test_bad_configurations(fields, said):
    with pytest.raises(ValueError, match=said):
        TrilinearConfig(**fields)


def test_refused_hosts_and_companions():
    model = llama()
    state = State(model)
    with pytest.raises(
        ValueError,
        match="TrilinearConfig.rank=9 is not allowed; allowed: 1 to 8, the head dimension",
    ):
        ha.patch_model(model, TrilinearConfig(tensor="cp", rank=9))
    for other in (ha.ConeConfig(), ha.HsaConfig()):
        with pytest.raises(ValueError, match="trilinear|hsa"):
            ha.patch_model(model, TrilinearConfig(), other)
    with pytest.raises(ValueError, match="trilinear and mkl have no meaning together"):
        ha.patch_model(model, TrilinearConfig(), ha.MechanismConfig.from_dict({"mechanism": "mkl"}))
    assert state.differences(State(model)) == []
    bart = FAMILIES["bart"][0]()
    with pytest.raises(
        ValueError,
        match="windows=.* no meaning for cross-attention .*include_cross_attention=False",
    ):
        ha.patch_model(bart, TrilinearConfig(), include_cross_attention=True)
    inputs = FAMILIES["bart"][1]()
    before = run(bart, inputs)
    ha.patch_model(bart, TrilinearConfig(windows=None), include_cross_attention=True)
    assert difference(before, run(bart, inputs)) == 0
