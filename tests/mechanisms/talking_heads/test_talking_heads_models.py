"""Talking heads in models: identity, training, reload, caches, adapters, the compiler; beside other mechanisms."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import cone_scores, hype_bias
from hf_hyperattn.integration.attention.hyper import Hyper
from hf_hyperattn.mechanisms.base import Host, HostCall
from tests.integration.models import FAMILIES, difference, llama, perturb, run
from tests.oracles.cases import assert_close
from tests.oracles.talking_heads import talking_heads as by_hand

CONFIG = ha.TalkingHeadsConfig()


def hyper_of(mechanisms, mode="blend", heads=None, **facts):
    host = Host(
        "host", **dict(heads=4, kv_heads=2, is_causal=True, is_cross=False, layer_index=0) | facts
    )
    return Hyper(ha.HyperAttnConfig(mechanisms, mode=mode, heads=heads), host)


def qkv(queries=7, keys=7):
    generator = torch.Generator().manual_seed(4)
    sizes = ((4, queries), (2, keys), (2, keys))
    return (torch.randn(2, heads, length, 6, generator=generator) for heads, length in sizes)


def matrices(layer):
    return [torch.eye(4) + delta.detach() for delta in (layer.before, layer.after)]


@pytest.mark.parametrize("mode", ["blend", "replace"])
def test_beside_a_cone_score_and_a_positional_bias(mode):
    """Score and bias stand in the logits that are mixed."""
    numbers = {"mu": 0.5, "tau": 1.0}
    hyper = hyper_of([CONFIG, ha.HypeConfig(**numbers), ha.ConeConfig()], mode)
    cone, hype, layer = hyper.layers()
    perturb(torch.nn.ModuleDict({"x": torch.nn.ModuleDict({"hyper": layer})}))
    gates = (0.7, 0.4) if mode == "blend" else (1.0, 1.0)
    with torch.no_grad():
        for other, gate in zip((cone, hype), gates, strict=True):
            if mode == "blend":
                other.gate.fill_(gate)
    q, k, v = qkv()
    out, _ = hyper(HostCall(q, k, v, 0.3, True, Options(is_causal=True)))
    logits = gates[0] * cone_scores(q, k) + gates[1] * hype_bias(
        torch.arange(7), torch.arange(7), **numbers, form="sinh"
    )
    if mode == "blend":
        logits = logits + 0.3 * q @ k.repeat_interleave(2, 1).mT
    assert_close(out, by_hand(logits, v, *matrices(layer), causal=True)[0], 1e-5)


def test_chosen_heads_mix_among_themselves():
    hyper = hyper_of([CONFIG], heads=(1, 3))
    (layer,) = hyper.layers()
    perturb(torch.nn.ModuleDict({"x": torch.nn.ModuleDict({"hyper": layer})}))
    q, k, v = qkv(5, 8)
    out, _ = hyper(HostCall(q, k, v, 0.3, False, Options()))
    wide = []
    for delta in (layer.before, layer.after):
        matrix = torch.eye(4)
        for i, h in enumerate((1, 3)):
            for j, g in enumerate((1, 3)):
                matrix[h, g] += delta[i, j].item()
        wide.append(matrix)
    logits = 0.3 * q @ k.repeat_interleave(2, 1).mT
    assert_close(out, by_hand(logits, v, *wide)[0], 1e-5)
    plain = logits.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, [0, 2]], plain[:, [0, 2]], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "config", [ha.TalkingHeadsConfig(after=False), ha.TalkingHeadsConfig(before=False)], ids=str
)
def test_one_mixing_alone(config, tmp_path):
    model, inputs = llama(), FAMILIES["llama"][1]()
    before = run(model, inputs)
    ha.patch_model(model, config)
    assert difference(before, run(model, inputs)) == 0
    names = {n.rsplit(".", 1)[1] for n, _ in model.named_parameters() if ".hyper." in n}
    assert names == {"before" if config.before else "after"}
    perturb(model)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0


def test_the_weights_that_come_back_are_those_that_multiply_values():
    model = ha.patch_model(llama(num_hidden_layers=1), CONFIG)
    perturb(model)
    with torch.no_grad():
        found = model(**FAMILIES["llama"][1](), output_attentions=True).attentions[0]
    assert found.shape[1] == 4 and (found.sum(-1) - 1).abs().max() > 0.1  # rows need not sum to 1
    assert not found.triu(1).any()


def test_dropout_in_training():
    """BERT drops attention weights: an expectation over many draws is what is computed without."""
    torch.manual_seed(0)
    model = ha.patch_model(
        FAMILIES["bert"][0](attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0), CONFIG
    )
    perturb(model, 0.1)
    host = model.encoder.layer[0].attention.self
    states = torch.randn(1, 9, 32)
    with torch.no_grad():
        exact = host.eval()(states)[0]
        host.train()
        mean = sum(host(states)[0] for _ in range(400)) / 400
    assert (mean - exact).abs().max() < 0.15 * exact.abs().max()
    assert not torch.equal(host(states)[0], host(states)[0])
