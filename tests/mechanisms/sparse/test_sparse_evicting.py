"""Sparse rules with a cache that forgets, head by head: every road equals the cache that keeps all, or is refused."""

import copy
import logging
import re
from dataclasses import dataclass

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn import HierarchicalCache, HsaConfig, SparseConfig
from hf_hyperattn.engines import Options
from hf_hyperattn.mechanisms.base import HostCall, Plan
from hf_hyperattn.mechanisms.selection.cache import LayerCache
from hf_hyperattn.mechanisms.sparse import (
    RULES,
    Exact,
    Pages,
    SparseRule,
    VerticalSlash,
    Window,
    reference,
    sparse_rule,
)
from hf_hyperattn.mechanisms.sparse.evicted import find_reaches
from hf_hyperattn.mechanisms.sparse.head_rules import HeadRules
from hf_hyperattn.mechanisms.sparse.layer import SparseLayer
from tests.mechanisms.sparse.test_sparse_models import drawn, in_steps, llama, logits
from tests.zoo.tiny import tiny_config

#: Four query heads, two key heads: the first key head can be forgotten, the second cannot.
WINDOWS = [Window(5, 2), Window(7, 1)]
SPLIT = [*WINDOWS, Pages(6, 1, 4, 2, query="previous", chunk=4), Exact()]
HOW = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def few_taken_back(monkeypatch):
    monkeypatch.setattr("hf_hyperattn.mechanisms.selection.cache.TAKEN_BACK", 3)


def made(rules=SPLIT, **changes):
    return ha.patch_model(llama(), SparseConfig(rules, **changes), mode="replace")


def tied(windows, refine_top_k=0, mode="replace", beside=(), near=64, **how):
    """A model with HSA."""
    config = HsaConfig(windows, near=near, refine_top_k=refine_top_k)
    return ha.patch_model(llama().float(), config, *beside, mode=mode, **how)


def in_steps_with(model, ids, mask, cache):
    """Read a text of which a mask hides some, first much and then by single tokens."""
    where = (mask.cumsum(1) - 1).clamp_min(0)
    for a, b in [(0, 40), *((i, i + 1) for i in range(40, ids.shape[1]))]:
        past = {
            "past_key_values": cache,
            "attention_mask": mask[:, :b],
            "position_ids": where[:, a:b],
        }
        logits(model, ids[:, a:b], **past)


def held(cache):
    """How many tokens each part of the first layer has room for."""
    return [part.tokens[0].room.shape[2] for part in cache.layers[0].store.parts]


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "sizes", [[1] * 80, [40, *[1] * 40], [7, 1, 20, 2, 50]], ids=lambda x: f"{len(x)} calls"
)
@pytest.mark.parametrize(
    "rules",
    [SPLIT, WINDOWS * 2, [Window(5, 0)], [Window(9, 3), Window(2, 0), Window(4, 0), Window(1, 6)]],
    ids=["split", "windows", "one for all", "of two lengths"],
)
def test_decoding_equals_the_cache_that_keeps_all(rules, sizes):
    """Little is held, and the logits are those of the model that keeps everything, and of one pass."""
    model, ids = made(rules), drawn(2, 80)
    cache = HierarchicalCache(model, evict=True)
    got, _ = in_steps(model, ids, sizes, cache)
    assert_same(got, in_steps(model, ids, sizes)[0])
    assert_same(got, logits(model, ids))
    assert all(
        room <= 20 or part.reach is None
        for room, part in zip(held(cache), cache.layers[0].store.parts)
    )
    assert min(held(cache)) <= 20 and cache.get_seq_length() == 80


def test_what_is_kept_gives_what_the_definition_gives():
    """The last token's output from a cache that has forgotten, against reference.py on all tokens."""
    torch.manual_seed(0)
    (query, key, value), rule = torch.randn(3, 1, 1, 60, 8, dtype=torch.float64), Window(6, 3)
    cache = LayerCache(key, value, (rule.reach,))
    for i in range(60):
        cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        kept, values = (t.view()[0, 0] for t in cache.parts[0].tokens)
        shown = rule.mask(query[:, :, i : i + 1], kept[None, None], first=len(kept) - 1)[0, 0, 0]
        weights = torch.softmax((0.4 * kept @ query[0, 0, i]).masked_fill(~shown, -torch.inf), 0)
        expected = reference.attend_by_definition(
            rule, *(t[0, 0, : i + 1] for t in (query, key, value)), 0.4
        )[i]
        assert_same(weights @ values, expected)
        cache.evict_unreachable(None)
    assert held_of(cache) <= 20


def held_of(cache):
    return cache.tokens[0].room.shape[2]


def test_a_key_head_is_forgotten_where_all_of_its_query_heads_allow_it():
    rules = HeadRules(((None, (Window(5, 1), Window(3, 2), Window(4), Exact())),))
    assert find_reaches(rules, 4) == ((5, 1), (3, 2), (4, 4), None)
    assert find_reaches(rules, 2) == ((5, 2), None)
    assert find_reaches(rules, 1) == (None,)
    both = ((20, (Window(5),)), (40, (Window(9, 0),)))
    assert find_reaches(HeadRules(both), 1) == ((9, 4),)
    assert find_reaches(HeadRules((both[0], (None, (VerticalSlash(),)))), 1) == (None,)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_padding_and_beams(beams):
    model, ids = made(), drawn(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    how = {"attention_mask": mask, "num_beams": beams, **HOW}
    plain, cache = model.generate(ids, **how), HierarchicalCache(model, evict=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, **how), plain)
    assert min(held(cache)) < 40


def test_padding_in_the_middle_of_a_row():
    """A window counts real tokens: it reaches as far back as padding makes it."""
    model, ids = made([*WINDOWS, Pages(6, 1, 4, 2), Exact()]), drawn(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[0, 30:38] = mask[1, 50:52] = 0
    where = (mask.cumsum(1) - 1).clamp_min(0)
    part = lambda a, b: {"attention_mask": mask[:, :b], "position_ids": where[:, a:b]}
    caches = HierarchicalCache(model, evict=True), hf.DynamicCache(config=model.config)
    for a, b in [(0, 25), (25, 34), *((i, i + 1) for i in range(34, 70))]:
        got, expected = (
            logits(model, ids[:, a:b], past_key_values=c, **part(a, b)) for c in caches
        )
        real = mask[:, a:b].bool()
        assert_same(got[real], expected[real])
    assert min(held(caches[0])) < 40


def test_rows_may_change_and_tokens_be_taken_back():
    model, ids, caches = made(), drawn(2, 60), []
    for cache in (HierarchicalCache(model, evict=True), hf.DynamicCache(config=model.config)):
        in_steps(model, ids, [40, *[1] * 6], cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.crop(-3)
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 1]))
        caches.append(
            [logits(model, ids[[1, 1, 1], i : i + 1], past_key_values=cache) for i in range(43, 60)]
        )
    assert_same(*(torch.cat(parts, 1) for parts in caches))


def test_chunks_assisted_decoding_and_a_second_text():
    model, ids = made(), drawn(1, 30)
    plain, cache = model.generate(ids, **HOW), HierarchicalCache(model, evict=True)
    assert torch.equal(
        model.generate(ids, past_key_values=cache, prefill_chunk_size=7, **HOW), plain
    )
    more = torch.cat([plain, ids[:, :5]], 1)
    assert torch.equal(
        model.generate(more, past_key_values=cache, **HOW), model.generate(more, **HOW)
    )
    cache.reset()
    assert torch.equal(
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=2, **HOW), plain
    )


def test_rules_for_several_lengths():
    rules = [[Window(9, 2), Window(4), Exact(), Exact()], [Window(3, 1), Window(6), *SPLIT[2:]]]
    model, ids = made(rules, lengths=(30, 60)), drawn(2, 80)
    cache = HierarchicalCache(model, evict=True)
    assert_same(in_steps(model, ids, [25, *[1] * 55], cache)[0], logits(model, ids))
    assert min(held(cache)) <= 20


def test_biases_sinks_and_softcaps_are_those_of_the_heads():
    """Through the layer alone, with a cache beside it, one token after another."""
    layer = SparseLayer(SparseConfig([*WINDOWS, Exact(), Exact()]), None, "replace")
    torch.manual_seed(0)
    query, bias = (
        torch.randn(1, 4, 50, 8, dtype=torch.float64),
        torch.randn(1, 4, 50, 50, dtype=torch.float64),
    )
    key, value = torch.randn(2, 1, 2, 50, 8, dtype=torch.float64)
    cache = LayerCache(key, value, find_reaches(layer.find_rules(0, 4, 4, is_causal=True), 2))
    for i in range(50):
        row, so_far = slice(i, i + 1), slice(0, i + 1)
        cache.append(key[:, :, row], value[:, :, row])
        shown = cache.show_tokens()
        options = Options(bias=bias[:, :, row, so_far], sinks=bias[0, :, 0, 0], softcap=5.0)
        pairs = shown, (key[:, :, so_far], value[:, :, so_far])
        plans = (
            Plan.from_call(HostCall(query[:, :, row], *pair, 0.4, True, options)) for pair in pairs
        )
        assert_same(*(layer(plan).run()[0] for plan in plans))
    assert held_of(cache) <= 20


def test_weights_are_those_of_all_tokens():
    ids, outputs = drawn(2, 60), []
    model = ha.patch_model(llama(attn_implementation="eager"), SparseConfig(SPLIT), mode="replace")
    for cache in (HierarchicalCache(model, evict=True), hf.DynamicCache(config=model.config)):
        in_steps(model, ids, [50, *[1] * 9], cache)
        with torch.no_grad():
            outputs.append(
                model(ids[:, 59:], past_key_values=cache, output_attentions=True).attentions[1]
            )
    assert_same(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_precisions_and_a_reloaded_model(dtype, tmp_path):
    """Keys are held as they come; rounding may differ, for a kernel begins its sums elsewhere."""
    model, ids = made().to(dtype), drawn(2, 60)
    model.save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    cache = HierarchicalCache(model, evict=True)
    expected = in_steps(model, ids, [40, *[1] * 20])[0].float()
    got = in_steps(model, ids, [40, *[1] * 20], cache)[0].float()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(got, expected, atol=tolerance * float(expected.abs().max()), rtol=0)
    assert {t.room.dtype for t in cache.layers[0].store.tokens} == {dtype}


def test_layers_without_rules_keep_all_and_other_mechanisms_theirs():
    """Layer 0 stays as it was, or runs HSA, whose keys are forgotten in its own way."""
    ids = drawn(2, 60)
    for model in (
        ha.patch_model(llama(), SparseConfig(WINDOWS * 2), mode="replace", layers="last-half"),
        ha.patch_model(
            llama(), HsaConfig((2, 4), near=1, refine_top_k=0), mode="replace", layers="first-half"
        ),
    ):
        cache = HierarchicalCache(model, evict=True)
        assert_same(in_steps(model, ids, [30, *[1] * 30], cache)[0], logits(model, ids))
        assert sorted(layer.keep is None for layer in cache.layers) == [False, True]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (llama, "is not patched"),
        (lambda: made([Window(5), Exact()] * 2), "one whose rule may look at any key"),
        (lambda: made([Pages()]), "one whose rule may look at any key"),
        (lambda: ha.patch_model(llama(), SparseConfig(Window(5))), "runs sparse, mode='blend'"),
        (
            lambda: ha.patch_model(llama(), SparseConfig(Window(5)), mode="replace", heads=(0, 2)),
            "look at any key",
        ),
        (
            lambda: ha.patch_model(
                llama(), SparseConfig(Window(5)), ha.HypeConfig(mu=0.1), mode="replace"
            ),
            "hype",
        ),
        (lambda: tied((2, 4), refine_top_k=1), "HSA lets look at any"),
        (lambda: tied(()), "HSA lets look at any"),
        (lambda: tied((2, 4), heads=(0,)), "HSA lets look at any"),
        (lambda: tied((2, 4), mode="blend"), "runs hsa, mode='blend'"),
        (lambda: tied((2, 4), beside=(ha.HypeConfig(mu=0.1),)), "runs hype and hsa"),
    ],
)
def test_a_model_of_which_nothing_can_be_forgotten_is_warned_of(model, why, caplog):
    model, ids = model(), drawn(2, 30)
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        cache = HierarchicalCache(model, evict=True)
    (message,) = caplog.messages
    assert "can forget nothing" in message and why in message and "\n" not in message
    got, expected = (in_steps(model, ids, [20, *[1] * 10], c)[0] for c in (cache, None))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_what_would_read_forgotten_keys_is_refused():
    model, ids = made(), drawn(2, 60)
    cache = HierarchicalCache(model, evict=True)
    in_steps(model, ids, [50, 1, 1], cache)
    with pytest.raises(
        ValueError,
        match=r"has forgotten keys .* a crop to 40 tokens; allowed: crops to 4\d tokens or more",
    ):
        cache.crop(-12)
    with pytest.raises(ValueError, match="its padding is not where it was"):
        mask = torch.ones(2, 53, dtype=torch.long)
        mask[:, 40:50] = 0
        logits(model, ids[:, :1], past_key_values=cache, attention_mask=mask)
    several = made([[Window(4, 1)], [Window(5, 2)]], lengths=(20, 70))
    with pytest.raises(ValueError, match="several lengths meet padding inside a row"):
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[0, 20:22] = 0
        in_steps_with(several, ids, mask, HierarchicalCache(several, evict=True))
    for rules in ([Window(8, 2)], [Exact()], [Window(5, 3)]):
        with pytest.raises(ValueError, match="a cache that was made for this model"):
            other = HierarchicalCache(model, evict=True)
            logits(made(rules), ids, past_key_values=other)
    logits(
        made([Window(4, 1)]), ids, past_key_values=HierarchicalCache(model, evict=True)
    )  # it asks for less
    config = tiny_config("diffllama")
    changing = hf.AutoModelForCausalLM.from_config(config).eval()
    ha.patch_model(changing, SparseConfig(Window(5)), mode="replace")
    with pytest.raises(ValueError, match="changes keys or values|heads of keys"):
        logits(changing, ids, past_key_values=HierarchicalCache(changing, evict=True))
    with pytest.raises(ValueError, match="made for 2; allowed"):
        LayerCache(torch.ones(1, 4, 1, 2), torch.ones(1, 4, 1, 2), ((5, 1), None))


@pytest.mark.parametrize("kind", ["sparse", "hsa"])
def test_crops_of_a_cache_that_forgets_add_up(kind, monkeypatch):
    """Few tokens at once, but together too many: the sentence says how far one can go, and so far one can go."""
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.means_kept.TAKEN_BACK", 3)
    model = made(WINDOWS * 2) if kind == "sparse" else tied((2, 4), near=1)
    ids = drawn(2, 60)
    expected, cache = logits(model, ids), HierarchicalCache(model, evict=True)
    in_steps(model, ids, [50, *[1] * 8], cache)
    with pytest.raises(ValueError, match="has forgotten keys") as caught:
        for _ in range(20):
            cache.crop(-2)
            at = cache.get_seq_length()
            found = logits(model, ids[:, at : at + 1], past_key_values=cache)
            torch.testing.assert_close(found, expected[:, at : at + 1], atol=1e-5, rtol=0)
    least = int(re.search(r"; allowed: crops to (\d+) tokens or more", str(caught.value))[1])
    now = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"a crop to {least - 1} tokens"):
        cache.crop(least - 1 - now)
    cache.crop(least - now)
    found = logits(model, ids[:, least:], past_key_values=cache)
    torch.testing.assert_close(found, expected[:, least:], atol=1e-5, rtol=0)


def test_a_rule_of_ones_own_may_be_forgotten():
    """One that says how far it looks; a rule that says nothing keeps all."""

    @sparse_rule("odd_and_near")
    @dataclass(frozen=True)
    class OddAndNear(SparseRule):
        reach = (8, 1)

        def share(self, length):
            return 0.5

        def visible(self, call):
            far = call.places - call.tokens
            return (far < 8) & (far % 2 == 0) | (call.tokens < 1)

    try:
        model, ids = made([OddAndNear(), Window(4)] * 2), drawn(2, 60)
        cache = HierarchicalCache(model, evict=True)
        assert_same(in_steps(model, ids, [30, *[1] * 30], cache)[0], logits(model, ids))
        assert max(held(cache)) <= 20
    finally:
        del RULES["odd_and_near"]
