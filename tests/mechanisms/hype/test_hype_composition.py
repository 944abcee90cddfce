"""HyPE beside other scores, key tying, softcaps and sinks."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn import HypeConfig, patch_model
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import cone_scores, hype_bias, hyperbolic_scores
from hf_hyperattn.integration.attention.hyper import Hyper
from hf_hyperattn.mechanisms.base import Host, HostCall
from tests.integration.attention.test_families import generate, logits, model_of
from tests.mechanisms.hype.hype_models import STEEP, ids_of, steep

SCORES = {
    "cone": (ha.ConeConfig(), cone_scores),
    "hyperbolic": (ha.HyperbolicConfig(aggregation="mean"), hyperbolic_scores),
}


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("other", SCORES)
@pytest.mark.parametrize("causal", [False, True], ids=["cosh", "sinh"])
def test_it_is_added_to_any_score(other, mode, causal):
    config, scores = SCORES[other]
    host = Host("host", heads=4, kv_heads=2, is_causal=causal, is_cross=False, layer_index=0)
    hyper = Hyper(ha.HyperAttnConfig([config, HypeConfig(**STEEP)], mode=mode), host)
    gates = [0.7, 0.4]
    with torch.no_grad():
        for layer, gate in zip(hyper.layers(), gates, strict=True):
            if mode == "blend":
                layer.gate.fill_(gate)
    q, k, v = (torch.randn(2, h, 7, 6) for h in (4, 2, 2))
    out, _ = hyper(HostCall(q, k, v, 0.3, causal, Options(is_causal=causal)))
    bias = hype_bias(
        torch.arange(7),
        torch.arange(7),
        mu=STEEP["mu"],
        tau=torch.tensor(STEEP["tau"]),
        form="sinh" if causal else "cosh",
    )
    total = scores(q, k) + bias
    if mode == "blend":
        total = q @ k.repeat_interleave(2, 1).mT * 0.3 + gates[0] * scores(q, k) + gates[1] * bias
    if causal:
        total = total.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    expected = total.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_key_tied_attention_takes_its_columns(family):
    """With everything near it is HyPE alone; with windows, caches and padding make no difference."""
    near, tied = (
        patch_model(
            model_of(family, "eager"),
            HypeConfig(**STEEP),
            ha.HsaConfig(windows=(2,), **how),
            mode="replace",
        )
        for how in (dict(near=100), dict(near=2, sinks=1, refine_top_k=1))
    )
    inputs = {"input_ids": ids_of(near)}
    torch.testing.assert_close(
        logits(near, **inputs), logits(steep(family), **inputs), atol=1e-5, rtol=0
    )
    assert (logits(tied, **inputs) - logits(near, **inputs)).abs().max() > 1e-4
    plain = generate(tied, inputs, use_cache=False)
    assert torch.equal(generate(tied, inputs), plain)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), inputs["input_ids"]], 1)
    mask = (torch.arange(12) >= 3).long().repeat(2, 1)
    assert torch.equal(generate(tied, {"input_ids": padded, "attention_mask": mask})[:, 3:], plain)


def test_softcap_and_sinks_come_before_the_bias_and_stay():
    """gemma2's cap is on the dot product alone; gpt_oss's sinks take part in the softmax."""
    host = Host("host", heads=4, kv_heads=4, is_causal=True, is_cross=False, layer_index=0)
    hyper = Hyper(ha.HyperAttnConfig([HypeConfig(**STEEP)], mode="replace"), host)
    q, k, v = (torch.randn(2, 4, 40, 6) for _ in range(3))
    sinks = torch.randn(4)
    out, _ = hyper(HostCall(q, k, v, 2.0, True, Options(is_causal=True, softcap=1.5, sinks=sinks)))
    bias = hype_bias(
        torch.arange(40),
        torch.arange(40),
        mu=STEEP["mu"],
        tau=torch.tensor(STEEP["tau"]),
        form="sinh",
    )
    total = 1.5 * torch.tanh(2.0 * q @ k.mT / 1.5) + bias
    total = total.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    total = torch.cat([total, sinks[:, None, None].expand(2, 4, 40, 1)], -1)
    torch.testing.assert_close(out, total.softmax(-1)[..., :-1] @ v, atol=1e-5, rtol=0)
