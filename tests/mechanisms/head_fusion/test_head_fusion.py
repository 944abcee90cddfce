"""Fusion of heads against loops over tokens and heads; how it starts, what it refuses; record, report and pruning."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_hyperattn as ha
from hf_hyperattn.analysis import dropped_heads, head_usage, record_heads
from hf_hyperattn.engines import Options
from hf_hyperattn.integration.attention.hyper import Hyper
from hf_hyperattn.mechanisms.base import Host, HostCall
from hf_hyperattn.mechanisms.head_fusion.reference import entropy, head_weights
from tests.integration.models import FAMILIES, difference, llama, perturb, run, text_inputs
from tests.oracles import head_fusion as by_hand
from tests.oracles.cases import assert_close, tensor

CONFIG = ha.HeadFusionConfig()
FACTS = dict(heads=4, kv_heads=2, is_causal=True, is_cross=False, layer_index=0, width=12)


def layer_of(config=CONFIG, heads=None, **facts):
    hyper = Hyper(ha.HyperAttnConfig([config], heads=heads), Host("host", **FACTS | facts))
    perturb(torch.nn.ModuleDict({"x": torch.nn.ModuleDict({"hyper": hyper})}), 0.5)
    return hyper, hyper.layers()[0]


def call_of(batch=2, queries=5, keys=5, dtype=torch.float64):
    q, k, v = (
        tensor(batch, h, n, 6, seed=n + h, dtype=dtype)
        for h, n in ((4, queries), (2, keys), (2, keys))
    )
    hidden = tensor(batch, queries, 12, seed=9, dtype=dtype)
    return HostCall(q, k, v, 0.4, True, Options(is_causal=True), hidden=hidden)


def plain(call):
    return torch.nn.functional.scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=True, scale=call.scale, enable_gqa=True
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_what_the_formula_says(dtype):
    hyper, layer = layer_of()
    hyper, call = hyper.to(dtype), call_of(dtype=dtype)
    numbers = [t.detach().double().tolist() for t in (layer.query_map, layer.kappa, layer.bias)]
    x = call.hidden.double().tolist()
    beta = head_weights(call.hidden, layer.query_map, layer.kappa, layer.bias)
    expected = torch.tensor(by_hand.weights(x, *numbers), dtype=torch.float64)
    assert_close(beta, expected, 1e-12 if dtype == torch.float64 else 1e-6)
    expected = by_hand.fused(plain(call).double().tolist(), x, *numbers)
    assert_close(
        hyper(call)[0],
        torch.tensor(expected, dtype=torch.float64),
        1e-12 if dtype == torch.float64 else 1e-5,
    )


def test_gradients_reach_everything():
    hyper, layer = layer_of()
    hyper, call = hyper.double(), call_of()
    leaves = [
        call.hidden.requires_grad_(),
        call.query.requires_grad_(),
        call.value.requires_grad_(),
    ]

    def run(*_):
        return hyper(call)[0]

    assert torch.autograd.gradcheck(run, (*leaves, *layer.parameters()), fast_mode=True)


def test_outputs_without_gradients_are_the_same_numbers():
    """They are multiplied in place."""
    hyper, _ = layer_of()
    hyper, call = hyper.double(), call_of()
    kept = [t.clone() for t in (call.query, call.key, call.value, call.hidden)]
    expected = hyper(call)[0]
    with torch.no_grad():
        assert torch.equal(hyper(call)[0], expected)
    assert all(map(torch.equal, kept, (call.query, call.key, call.value, call.hidden)))


def test_extreme_states_stay_finite():
    """A softmax that gives everything to one head; the entropy of that has a gradient too."""
    hyper, layer = layer_of()
    call = call_of(dtype=torch.float32)
    with torch.no_grad():
        layer.kappa.mul_(1e4)
    out = hyper(call)[0]
    beta = head_weights(call.hidden, layer.query_map, layer.kappa, layer.bias)
    (out.sum() + entropy(beta).sum()).backward()
    assert out.isfinite().all() and beta.amax(-1).min() > 0.999
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert entropy(torch.full((3, 5), 0.2)).sub(math.log(5)).abs().max() < 1e-6


def test_chosen_heads_share_the_weights_among_themselves():
    hyper, layer = layer_of(heads=(0, 3))
    hyper, call = hyper.double(), call_of()
    out, before = hyper(call)[0], plain(call)
    assert_close(out[:, 1:3], before[:, 1:3], 1e-12)
    numbers = [t.detach().double().tolist() for t in (layer.query_map, layer.kappa, layer.bias)]
    expected = by_hand.fused(before[:, [0, 3]].tolist(), call.hidden.tolist(), *numbers)
    assert_close(out[:, [0, 3]], torch.tensor(expected, dtype=torch.float64), 1e-12)


def test_how_it_starts():
    """A seeded query map that differs between layers, everything else zero; the identity, with a gradient for kappa."""
    models = [ha.patch_model(llama(), CONFIG) for _ in range(2)]
    maps = [[h.self_attn.hyper.head_fusion.query_map for h in m.model.layers] for m in models]
    assert all(map(torch.equal, *maps)) and not torch.equal(maps[0][0], maps[0][1])
    assert maps[0][0].shape == (4, 32) and 0.01 < maps[0][0].std() < 0.03
    models[0](**text_inputs()).logits.square().mean().backward()
    layer = models[0].model.layers[0].self_attn.hyper.head_fusion
    assert layer.kappa.grad.any() and layer.bias.grad.any() and not layer.query_map.grad.any()
    with torch.no_grad():
        layer.kappa.add_(0.1)
        layer.reset_parameters()
    assert torch.equal(layer.query_map, maps[1][0]) and not layer.kappa.any()
    other = ha.patch_model(llama(), ha.HeadFusionConfig(size=3, seed=5, spread=0.5))
    moved = other.model.layers[0].self_attn.hyper.head_fusion.query_map
    assert moved.shape == (3, 32) and moved.std() > 0.3


def test_a_checkpoint_without_it_is_patched_on_load_where_it_starts(tmp_path):
    """Built on the meta device; what the file lacks gets its seeded start."""
    model = llama()
    ha.patch_model(model, CONFIG)
    expected = model.model.layers[1].self_attn.hyper.head_fusion.query_map.clone()
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(
        {n: t for n, t in load_file(weights).items() if ".hyper." not in n},
        weights,
        {"format": "pt"},
    )
    with ha.fresh_patch():
        again = type(model).from_pretrained(tmp_path)
    layer = again.model.layers[1].self_attn.hyper.head_fusion
    assert torch.equal(layer.query_map, expected) and not layer.kappa.any() and not layer.bias.any()
    assert difference(run(model, text_inputs()), run(again, text_inputs())) == 0


def test_refusals():
    with pytest.raises(
        ValueError, match="HeadFusionConfig.size=0 is not allowed; allowed: numbers from 1"
    ):
        ha.HeadFusionConfig(size=0)
    with pytest.raises(
        ValueError, match="HeadFusionConfig.spread=0 is not allowed; allowed: numbers above 0"
    ):
        ha.HeadFusionConfig(spread=0)
    with pytest.raises(
        ValueError, match="head_fusion reads the hidden states that enter host, .* how wide"
    ):
        layer_of(width=None)
    hyper, _ = layer_of()
    call = call_of(dtype=torch.float32)
    with pytest.raises(
        ValueError, match="this call brought none; patch the model with patch_model"
    ):
        hyper(HostCall(call.query, call.key, call.value, 0.4, True, Options()))


# The record, the regulariser, the report.


def fused_llama():
    model = ha.patch_model(llama(), CONFIG)
    perturb(model)
    return model


def test_the_record_holds_the_weights_that_were_used():
    model, inputs = fused_llama(), text_inputs()
    with record_heads(model) as record:
        model(**inputs)
    assert list(record.calls) == [f"model.layers.{i}.self_attn" for i in range(4)]
    beta = record.calls["model.layers.0.self_attn"][0]
    assert beta.shape == (2, 11, 4) and (beta.sum(-1) - 1).abs().max() < 1e-6
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(inputs["input_ids"]))
    numbers = [t.detach().double().tolist() for t in layer.self_attn.hyper.head_fusion.parameters()]
    assert_close(beta, by_hand.weights(x.detach().double().tolist(), *numbers), 1e-5)
    model(**inputs)
    assert len(record.calls["model.layers.0.self_attn"]) == 1  # nothing is kept outside
    assert all(
        layer.on_weights is None for layer in model.modules() if hasattr(layer, "on_weights")
    )


def test_the_entropy_is_over_real_tokens_and_has_gradients():
    model, inputs = fused_llama(), text_inputs()
    with record_heads(model) as record:
        model(**inputs)
    every = [c[0][inputs["attention_mask"].bool()].double() for c in record.calls.values()]
    expected = sum(-(b * b.log()).sum(-1).mean() for b in every) / 4
    found = record.entropy(inputs["attention_mask"])
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    assert abs(record.entropy() - found) > 1e-6
    found.backward()
    added = [p for n, p in model.named_parameters() if ".hyper." in n]
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in added)
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \(2, 3\), the tokens of this call \(2, 11\)"
    ):
        record.entropy(torch.ones(2, 3))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_regulariser_moves_the_entropy(sign):
    """Added to a loss it makes weights uneven, subtracted it keeps them even; in the words of a Trainer's subclass."""
    model, inputs = ha.freeze_base(fused_llama()), text_inputs()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    found = []
    for _ in range(15):
        with record_heads(model) as heads:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        value = heads.entropy(inputs["attention_mask"])
        optimizer.zero_grad()
        (0.0 * loss + sign * value).backward()
        optimizer.step()
        found.append(value.item())
    assert (found[0] - found[-1]) * sign > 0.05


def test_the_regulariser_under_gradient_checkpointing():
    gradients = []
    for how in (None, False, True):
        torch.manual_seed(0)
        model = fused_llama().train()
        if how is not None:
            model.gradient_checkpointing_enable({"use_reentrant": how})
            model.enable_input_require_grads()
        with record_heads(model) as heads:
            loss = model(**text_inputs(), labels=text_inputs()["input_ids"]).loss
        if how:  # its first pass is without gradients
            with pytest.raises(
                ValueError, match="recorded without gradients, .* use_reentrant=False"
            ):
                heads.entropy()
            break
        (loss + heads.entropy()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if ".hyper." in n})
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def test_the_report():
    model, inputs = fused_llama(), text_inputs()
    usage = head_usage(model, **inputs)
    assert usage.mask.equal(inputs["attention_mask"].bool())
    mean = usage.mean()["model.layers.2.self_attn"]
    assert abs(mean.sum() - 4) < 1e-5
    assert all(0 < e < 1 for e in usage.entropy().values())
    by_host = usage.by_host().splitlines()
    assert len(by_host) == 6 and by_host[2].startswith("| model.layers.0.self_attn | 0.")
    rows = usage.by_token([str(i) for i in range(11)], top=2).splitlines()
    assert len(rows) == 2 + 8 and rows[2].startswith("| `3` |")  # padding has no row
    best = max(
        (x, f"{n}.{h}")
        for n, w in enumerate(usage.weights.values())
        for h, x in enumerate(w[0, 3].tolist())
    )
    assert f"{best[1]} ({best[0]:.2f})" in rows[2].split("|")[2]
    even = head_usage(ha.patch_model(llama(), CONFIG), **inputs)
    assert all(abs(e - 1) < 1e-5 for e in even.entropy().values())


def test_what_is_not_patched_with_it_is_refused():
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has no weights of heads; first call patch_model"
    ):
        head_usage(ha.patch_model(llama(), ha.ConeConfig()), **text_inputs())
    model = fused_llama()
    with record_heads(model) as record:
        with pytest.raises(ValueError, match="being recorded already"), record_heads(model):
            pass
        with pytest.raises(ValueError, match="no host weighed its heads while recording"):
            record.entropy()


# Pruning.


def test_dropped_heads_give_nothing():
    """Zeroing their rows of the output projection is the same."""
    model, inputs = fused_llama(), text_inputs()
    name = "model.layers.1.self_attn"
    before = run(model, inputs)
    with dropped_heads(model, {name: torch.tensor([0, 2])}):
        found = run(model, inputs)
    assert difference(run(model, inputs), before) == 0
    with torch.no_grad():
        columns = model.get_submodule(name).o_proj.weight.unflatten(1, (4, 8))
        columns[:, [0, 2]] = 0
    assert difference(found, run(model, inputs)) <= 1e-5


def test_a_share_drops_each_tokens_least_heads():
    hyper, layer = layer_of()
    hyper, call = hyper.double(), call_of()
    whole = hyper(call)[0]
    model = ha.patch_model(llama(), CONFIG)  # something to hang the drop on
    model.model.layers[0].self_attn.hyper = hyper
    with dropped_heads(model, 0.5):
        out = hyper(call)[0]
    beta = head_weights(call.hidden, layer.query_map, layer.kappa, layer.bias)
    kept = (out != 0).any(-1).transpose(1, 2)
    assert (kept.sum(-1) == 2).all()
    assert (beta[kept].view(2, 5, 2).amin(-1) >= beta[~kept].view(2, 5, 2).amax(-1)).all()
    assert torch.equal(out.transpose(1, 2)[kept], whole.transpose(1, 2)[kept])


def test_drops_out_of_range_are_refused():
    model = fused_llama()
    for drop, message in (
        (1.5, "drop=1.5 is not allowed; allowed: shares from 0 to 1"),
        ({"nowhere": [0]}, "drop names the host 'nowhere'; allowed: model.layers.0.self_attn"),
        ({"model.layers.0.self_attn": [4]}, r"drop names heads \[4\] .*; allowed: from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message), dropped_heads(model, drop):
            pass
    assert all(layer.keep is None for layer in model.modules() if hasattr(layer, "keep"))


@pytest.mark.parametrize("family", ("bert", "bart", "clip"))
def test_other_families_are_recorded_too(family):
    make, inputs = FAMILIES[family]
    model = ha.patch_model(make(), CONFIG)
    perturb(model)
    with record_heads(model) as record:
        model(**inputs())
    assert record.calls and all(len(c) == 1 for c in record.calls.values())
    assert record.entropy().isfinite()
