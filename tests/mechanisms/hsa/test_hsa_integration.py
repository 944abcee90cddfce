"""HSA in models: the layer, families, identity, reload, padding and masks, the compiler."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn import HsaConfig, HyperAttnConfig, patch_model
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.base import HostCall, Plan
from hf_hyperattn.mechanisms.hsa.layer import HsaLayer
from tests.integration.attention.test_families import AUTO, inputs_of, logits, model_of
from tests.integration.models import (
    FAMILIES,
    State,
    bert,
    difference,
    llama,
    perturb,
    run,
    text_inputs,
)
from tests.mechanisms.hsa.hsa_models import ENCODERS, SIZES, SOME, host, ids_of, patched
from tests.oracles.cases import assert_close, qkv, tensor
from tests.zoo.inputs import words
from tests.zoo.probe import counted

# The layer.


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("heads", [None, (1, 3)])
@pytest.mark.parametrize("tying", ["key", "both"])
def test_the_layer_is_what_its_parameters_say(tying, heads, mode):
    """o + g·(o_hsa - o) on the chosen heads, with the learned block bias added to the configured one."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=20, d=4, dv=3, scale=2.0)
    causal = tying == "key"
    config = (
        HsaConfig((2, 8), near=2, refine_top_k=1, block_bias=0.5) if causal else HsaConfig((2, 8))
    )
    layer = HsaLayer(config, host(causal), mode, heads).double()
    assert all((p == 0).all() for p in layer.parameters())
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(tensor(4, seed=i + 9))
    call = HostCall(q, k, v, 0.7, causal, Options(is_causal=causal))
    got, weights = layer(Plan.from_call(call)).run(weights=True)
    rule = {"near": 2, "sinks": 4, "refine_top_k": 1} if causal else {}
    rule |= {"block_bias": 0.5 + layer.block_bias.detach()} if causal else {}
    ask = dict(is_causal=causal, scale=0.7, enable_gqa=True)
    tied = hierarchical_attention(q, k, v, **ask, hierarchy=(2, 8), tying=tying, **rule)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, **ask)
    share = torch.ones(4, dtype=q.dtype) if layer.gate is None else layer.gate.detach()
    if heads is not None:
        share = share * torch.tensor([h in heads for h in range(4)])
    assert_close(got, plain + share[:, None, None] * (tied - plain), 1e-10, "output")
    assert_close(weights @ v.repeat_interleave(2, 1), got, 1e-10, "weights")


@pytest.mark.parametrize("mode", ["blend", "replace"])
def test_gradients_reach_the_gate_and_the_block_bias(mode):
    model = patch_model(llama(), HsaConfig(SIZES, near=1, sinks=0, refine_top_k=0), mode=mode)
    if mode == "blend":
        perturb(model)
    model(**text_inputs())[0].square().mean().backward()
    found = {n: p.grad for n, p in model.named_parameters() if ".hyper." in n}
    assert len(found) == 4 * (2 if mode == "blend" else 1)
    assert all(g is not None and (g.abs() > 0).any() for g in found.values())


def test_numbers_for_other_heads_are_refused_when_patching():
    model = llama()
    state = State(model)
    with pytest.raises(
        ValueError, match=r"near has 3 numbers.*4 query heads of \S*layers.0.self_attn"
    ):
        patch_model(model, HsaConfig(near=(1, 2, 3)))
    with pytest.raises(ValueError, match="tying='both' ties queries too, and .* is causal"):
        patch_model(model, HsaConfig(tying="both"))
    assert state.differences(State(model)) == []


# Families, identity, reversal, reload.


@pytest.mark.parametrize("family", sorted(set(AUTO) - {"gemma2"}))
def test_loads_by_name_and_runs_forward_and_backward(family):
    """Windows of 16 do nothing to so few tokens; the block sizes of the record do."""
    model = model_of(family, "hsa")
    model.config.hyperattn = ha.HyperAttnConfig((HsaConfig((2, 4)),)).to_dict()
    with counted("hsa") as modules:
        out = model(**inputs_of(family, model))
    assert modules
    values = [v for v in out.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    assert values and all(v.isfinite().all() for v in values)
    sum((v**2).mean() for v in values if v.requires_grad).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_softcap_is_refused_in_one_line():
    model = model_of("gemma2", "hsa")
    with pytest.raises(ValueError, match="hsa was called with a softcap") as caught:
        model(input_ids=words(model.config))
    assert "\n" not in str(caught.value)
    model = model_of("gemma2", "eager")
    before = State(model)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn, whose logits have a softcap"
    ) as caught:
        patch_model(model, SOME, mode="blend")
    assert "\n" not in str(caught.value) and before.differences(State(model)) == []


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bert", "vit", "t5", "bart", "mistral", "qwen3"]
)
@pytest.mark.parametrize(
    "config", [HsaConfig(()), HsaConfig((2, 4), tying="key", near=64)], ids=["flat", "near"]
)
def test_identity_in_replace_mode(family, config):
    """A flat tree of either tying, and every block opened."""
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    outputs = lambda: {
        n: t for n, t in run(model, inputs).items() if "pooler" not in n
    }  # BERT pools a padded token
    stock = outputs()
    patch_model(model, config, mode="replace")
    assert difference(outputs(), stock) < 1e-5


def test_special_scores_compose_and_others_are_refused():
    model, inputs = llama(), text_inputs()
    patch_model(model, ha.HypeConfig(mu=0.1, tau=2.0), HsaConfig(()), mode="replace")
    alone = patch_model(llama(), ha.HypeConfig(mu=0.1, tau=2.0), mode="replace")
    alone.load_state_dict(model.state_dict(), strict=False)
    assert difference(run(model, inputs), run(alone, inputs)) < 1e-5
    squared = ha.HyperbolicConfig(distance="squared_lorentz", aggregation="mean")
    model = patch_model(bert(), squared, HsaConfig((2, 4)), mode="replace")
    assert all(t.isfinite().all() for t in run(model, inputs).values())
    for other in (ha.ConeConfig(), ha.HyperbolicConfig(aggregation="mean")):
        with pytest.raises(
            ValueError, match=f"{other.mechanism} and hsa have no meaning together"
        ) as caught:
            patch_model(llama(), other, HsaConfig((2, 4)), mode="replace")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_hierarchy_of_the_call_takes_the_place_of_windows(family):
    """As group ids, as a Hierarchy, and as windows of a config."""
    make, inputs = FAMILIES[family]
    inputs = inputs()
    torch.manual_seed(0)
    model = patch_model(
        make(),
        HsaConfig((8,), near=1, refine_top_k=1) if family == "llama" else HsaConfig((8,)),
        mode="replace",
    )
    own = Hierarchy.windows(11, (2, 4), inputs["attention_mask"])
    by_call = [run(model, inputs | {"hierarchy": h}) for h in (own, own.to_ids())]
    torch.manual_seed(0)
    small = HsaConfig((2, 4), near=1, refine_top_k=1) if family == "llama" else HsaConfig((2, 4))
    expected = run(patch_model(make(), small, mode="replace"), inputs)
    assert max(difference(got, expected) for got in by_call) < 1e-5
    assert difference(run(model, inputs), expected) > 1e-4


# Padding and masks.


@pytest.mark.parametrize("family", (*ENCODERS, "llama"))
@pytest.mark.parametrize("tying", [None, "key"])
def test_right_padded_rows_equal_unpadded_ones(family, tying):
    config = HsaConfig((2, 4), tying=tying, refine_top_k=1 if tying else None)
    model = patched(family, config, sharp=1.0)
    ids = ids_of(model, length=14)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    got = logits(model, input_ids=ids, attention_mask=mask)
    assert_close(got[:1], logits(model, input_ids=ids[:1]), 2e-5, "row without padding")
    assert_close(got[1:, :9], logits(model, input_ids=ids[1:, :9]), 2e-5, "padded row")


def test_a_mask_that_is_changed_in_place_is_read_again():
    """What is known of a mask must not outlive its content."""
    q, k, v = qkv(batch=1, heads=2, lq=8, d=4)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    layer = HsaLayer(HsaConfig((2,)), None)
    call = lambda: layer(Plan.from_call(HostCall(q, k, v, 1.0, False, Options(mask=mask)))).run()[0]
    whole = call()
    mask[..., 6:] = False
    part = hierarchical_attention(q[:, :, :6], k[:, :, :6], v[:, :, :6], scale=1.0, hierarchy=(2,))
    assert_close(call()[:, :, :6], part, 1e-12, "after the change")
    mask.fill_(True)
    assert_close(call(), whole, 0, "back again")


def test_a_user_mask_is_obeyed():
    """Every second token hidden, as a 4D mask: as if those were not there for anybody."""
    model = patched("llama", HsaConfig((2, 4), near=0, sinks=0, refine_top_k=1), sharp=1.0)
    ids = ids_of(model, length=12)
    hidden = torch.ones(12, 12, dtype=torch.bool).tril()
    hidden[:, 3] = False
    hidden[3, 3] = True  # it sees itself
    got = logits(model, input_ids=ids, attention_mask=hidden[None, None].expand(2, 1, -1, -1))
    other = ids.clone()
    other[:, 3] = (ids[:, 3] + 1) % 90
    moved = logits(model, input_ids=other, attention_mask=hidden[None, None].expand(2, 1, -1, -1))
    rest = torch.arange(12) != 3
    assert_close(got[:, rest], moved[:, rest], 0, "other tokens")


# The compiler.

KEY = HsaConfig((2, 4), near=2, refine_top_k=1)
COMPILED = {
    "llama": (llama, KEY, False),
    "bert padded": (bert, HsaConfig((2, 4)), True),
    "llama padded": (llama, KEY, True),
    "mistral padded": (lambda **kw: model_of("mistral", "sdpa", sliding_window=4, **kw), KEY, True),
    "bert key padded": (bert, HsaConfig((2, 4), tying="key"), True),
}
SLOW = ("llama padded", "mistral padded", "bert key padded")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in COMPILED]
)
def test_compiles_into_one_graph(name):
    make, config, padding = COMPILED[name]
    model, inputs = make(num_hidden_layers=1), text_inputs()
    inputs = inputs if padding else {"input_ids": inputs["input_ids"]}
    patch_model(model, config)
    perturb(model)
    model(**inputs)[0].square().mean().backward()
    expected = run(model, inputs)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert difference(run(compiled, inputs), expected) < 1e-5
    compiled(**inputs)[0].square().mean().backward()
    for n, grad in grads.items():
        assert_close(dict(model.named_parameters())[n].grad, grad, 1e-5, n)


def test_what_the_compiler_cannot_have_is_refused():
    model = patch_model(
        llama(num_hidden_layers=1, attention_dropout=0.1), KEY, mode="replace"
    ).train()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mask and attention dropout cannot be compiled"):
        torch.compile(model, fullgraph=True, backend="eager")(**text_inputs())


# The length that settings were chosen for.


def warnings_of(caplog, model, *lengths, **how):
    caplog.clear()
    with caplog.at_level("WARNING", "hf_hyperattn"):
        for length in lengths:
            model(torch.randint(5, 90, (1, length)), **how)
    return [r.getMessage() for r in caplog.records if r.name == "hf_hyperattn"]


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("saved", [False, True])
def test_one_warning_where_rows_are_longer_than_settings_were_chosen_for(
    family, saved, tmp_path, caplog
):
    model = patch_model(FAMILIES[family][0](), HsaConfig((2, 4), tuned_length=10), mode="replace")
    if saved:
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
    assert warnings_of(caplog, model, 4, 10, 11) == []
    (text,) = warnings_of(caplog, model, 12, 13)
    assert (
        "chosen for 10 tokens" in text
        and "runs on 12" in text
        and "inject" in text
        and "\n" not in text
    )
    other = patch_model(FAMILIES[family][0](), HsaConfig((2, 4), tuned_length=10), mode="replace")
    assert len(warnings_of(caplog, other, 12)) == 1  # a warning is a model's own


def test_a_growing_cache_and_a_compiled_model_warn(caplog):
    config = HsaConfig((2, 4), near=2, tuned_length=10)
    model = patch_model(llama(num_hidden_layers=1), config, mode="replace")
    with caplog.at_level("WARNING", "hf_hyperattn"):
        model.generate(torch.randint(5, 90, (1, 9)), max_new_tokens=2, do_sample=False)
        assert not caplog.records
        model.generate(
            torch.randint(5, 90, (1, 9)), max_new_tokens=9, min_new_tokens=9, do_sample=False
        )
    assert len([r for r in caplog.records if "runs on 12" in r.getMessage()]) == 1
    torch._dynamo.reset()
    model = patch_model(llama(num_hidden_layers=1), config, mode="replace")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert warnings_of(caplog, compiled, 8, use_cache=False) == []
    (text,) = warnings_of(caplog, compiled, 14, 15, use_cache=False)
    assert "chosen for 10 tokens, and it runs on more" in text


def test_configs_of_earlier_versions_have_no_length():
    data = HsaConfig((2, 4)).to_dict()
    assert "tuned_length" not in data and HsaConfig.from_dict(data).tuned_length is None
    assert HsaConfig.from_dict(HsaConfig((2, 4), tuned_length=64).to_dict()).tuned_length == 64
    with pytest.raises(ValueError, match="tuned_length=0 is not allowed"):
        HsaConfig(tuned_length=0)


@pytest.mark.parametrize(
    "model, given, name",
    [
        (bert, {"near": 4096}, "near"),
        (bert, {"block_bias": -3.0}, "block_bias"),
        (llama, {"keep_diagonal": False}, "keep_"),
    ],
)
def test_settings_that_the_direction_does_not_read_are_named(model, given, name, caplog):
    patch_model(model(), HsaConfig((4, 16), **given))
    (said,) = [r.getMessage() for r in caplog.records if "says nothing" in r.getMessage()]
    assert f"HsaConfig.{name}" in said and "\n" not in said
    caplog.clear()
    patch_model(model(), HsaConfig((4, 16)))
    assert not caplog.records
    name = patch_model(model(), HsaConfig((4, 16))).config.hyperattn["hosts"][0]
    own = HyperAttnConfig([HsaConfig((4, 16))], overrides={name: [HsaConfig((4, 16), **given)]})
    patch_model(model(), own)
    assert [r.getMessage() for r in caplog.records if "says nothing" in r.getMessage()] == [said]
