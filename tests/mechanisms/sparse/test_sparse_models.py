"""Sparse rules in models: prompts and single steps agree, whatever becomes of the cache; what is refused."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.engines import Options
from hf_hyperattn.engines.cpu import selected
from hf_hyperattn.engines.selected import KEPT
from hf_hyperattn.mechanisms.base import HostCall, RankHeads
from hf_hyperattn.mechanisms.sparse import (
    Clusters,
    Exact,
    NestedWindows,
    Pages,
    VerticalSlash,
    Window,
)
from tests.engines.test_native import needs_compiler

RULES = [
    Pages(6, 1, 4, 2, query="previous", chunk=4),
    Clusters(3, 1, 8, 2, 3, query="first", chunk=4),
    VerticalSlash(4, 1, 3, 2, 8, 4),
    NestedWindows((2, 4), 3, 1, 2),
]
LENGTH = 45


def llama(**changes):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    sizes |= dict(
        intermediate_size=48,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.4,
    )
    return hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**sizes | changes)).eval().double()


def sparse(rules=RULES, **changes):
    return ha.patch_model(llama(**changes), ha.SparseConfig(rules), mode="replace")


def drawn(rows=2, length=LENGTH):
    return torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids, **call):
    return model(ids, **call).logits


def in_steps(model, ids, sizes, past=None):
    """Logits of tokens read a few at a time, and the cache."""
    past, parts, place = past or hf.DynamicCache(config=model.config), [], 0
    for size in sizes:
        parts.append(logits(model, ids[:, place : place + size], past_key_values=past))
        place += size
    return torch.cat(parts, 1), past


def test_rules_change_the_model_and_exact_ones_do_not():
    ids, stock = drawn(), llama()
    plain = logits(stock, ids)
    assert (logits(sparse(), ids) - plain).abs().max() > 0.1
    torch.testing.assert_close(logits(sparse([Exact()]), ids), plain, atol=1e-12, rtol=0)
    torch.testing.assert_close(logits(sparse([Window(LENGTH, 0)]), ids), plain, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [20, *[1] * 25], [7, 1, 13, 2, 22]], ids=str)
def test_steps_give_what_a_prompt_gives(sizes):
    model, ids = sparse(), drawn()
    torch.testing.assert_close(
        in_steps(model, ids, sizes)[0], logits(model, ids), atol=1e-10, rtol=0
    )


def test_rows_of_a_cache_may_change():
    """Beams, copies and cuts of a cache: the queries of a step's chunk are found by the keys before it."""
    model, ids = sparse(), drawn(3)
    plain = logits(model, ids)
    _, past = in_steps(model, ids, [30])
    other = copy.deepcopy(past)
    order = torch.tensor([2, 0, 0, 1])
    past.reorder_cache(order)
    rest, _ = in_steps(model, ids[order, 30:], [1] * 15, past)
    torch.testing.assert_close(rest, plain[order, 30:], atol=1e-10, rtol=0)
    rest, other = in_steps(model, ids[:, 30:], [1, 3, 2], other)
    other.crop(-4)  # as speculative decoding does
    rest, _ = in_steps(model, ids[:, 32:], [2, 1, 5], other)
    torch.testing.assert_close(rest, plain[:, 32:40], atol=1e-10, rtol=0)


def test_a_cache_of_another_model_is_refused():
    model, ids = sparse(), drawn()
    _, past = in_steps(llama(initializer_range=0.1), ids, [30])
    with pytest.raises(
        ValueError, match="which are not known: the cache was filled by another model"
    ):
        logits(model, ids[:, 30:31], past_key_values=past)
    own = sparse([Pages(5, 1, 4, 2), Clusters(3, 1, 8, 2, 3), Window(4), Exact()])
    _, past = in_steps(llama(initializer_range=0.1), ids, [30])
    logits(own, ids[:, 30:31], past_key_values=past)


def test_generate_with_padding_and_beams():
    model, ids = sparse(), drawn(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    how = dict(
        attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
    )
    for beams in (1, 3):
        plain = model.generate(ids, use_cache=False, num_beams=beams, **how)
        assert torch.equal(model.generate(ids, num_beams=beams, **how), plain)
    alone = model.generate(ids[:1, 6:], **how | {"attention_mask": mask[:1, 6:]})
    assert torch.equal(model.generate(ids, **how)[0, 20:], alone[0, 14:])
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **how)
    assert torch.equal(static, model.generate(ids, **how))


def test_sliding_windows_and_their_caches():
    config = dict(
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
    )
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    stock = (
        hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(intermediate_size=48, **sizes | config))
        .eval()
        .double()
    )
    rules = [
        Pages(3, 1, 2, 2, query="previous", chunk=2),
        Window(5, 2),
        Clusters(2, 1, 4, 2, 1),
        Pages(2, 0, 2, 1),
    ]
    model, ids = ha.patch_model(stock, ha.SparseConfig(rules), mode="replace"), drawn()
    torch.testing.assert_close(
        in_steps(model, ids, [5, *[1] * 40])[0], logits(model, ids), atol=1e-10, rtol=0
    )


def test_longer_than_tuned_is_said_once(caplog):
    model = ha.patch_model(llama(), ha.SparseConfig(RULES, tuned_length=20), mode="replace")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        logits(model, drawn(1, 22))
        assert not caplog.messages
        logits(model, drawn())
        logits(model, drawn())
    assert (
        len(caplog.messages) == 1
        and "chosen for 20 tokens, and it runs on 45" in caplog.messages[0]
    )


def test_rules_for_another_count_of_heads_are_refused():
    with pytest.raises(
        ValueError, match="rules has 3 rules; allowed: one, or one for each of the 4 query heads"
    ):
        ha.patch_model(llama(), ha.SparseConfig([Exact()] * 3))


def test_packed_texts_are_refused_where_rules_count_from_a_beginning():
    """Transformers takes places that begin again for several texts in a row, which see nothing of each other."""
    ids, places = drawn(1, 40), torch.cat([torch.arange(25), torch.arange(15)])[None]
    call = dict(position_ids=places, use_cache=False)
    for rule in (Pages(5, 1, 4, 2), Window(6, 1), RULES[1]):
        with pytest.raises(ValueError, match="its rules know rows of one whole text"):
            logits(sparse([rule]), ids, **call)
    model = sparse([Window(6, 0)])
    alone = logits(model, ids[:, 25:])
    torch.testing.assert_close(logits(model, ids, **call)[:, 25:], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", [12, 20])
def test_chunked_attention_is_refused_beyond_a_chunk(length):
    sizes = dict(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    sizes |= dict(intermediate_size=48, intermediate_size_mlp=48, head_dim=8, num_local_experts=2)
    config = hf.Llama4TextConfig(**sizes, attention_chunk_size=16)
    stock = hf.AutoModelForCausalLM.from_config(config).eval()
    model, how = (
        ha.patch_model(stock, ha.SparseConfig([Pages(5, 1, 4, 2)]), mode="replace"),
        dict(do_sample=False),
    )
    model.generate(drawn(1, 12), max_new_tokens=3, **how)
    with pytest.raises(ValueError, match="chunked attention"):
        model.generate(drawn(1, length), max_new_tokens=8, min_new_tokens=8, **how)


@pytest.mark.slow
def test_a_compiled_step_is_refused_where_it_shares_a_selection():
    torch._dynamo.reset()
    model, ids = sparse(num_hidden_layers=1), drawn(1, 12)
    _, past = in_steps(model, ids, [11])
    step = torch.compile(
        lambda ids: model(ids, past_key_values=past).logits, backend="eager", fullgraph=True
    )
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="cannot decode in a compiled or exported call"),
    ):
        step(ids[:, 11:])


@pytest.mark.slow
def test_exports_are_refused():
    model, ids = sparse([Pages(5, 1, 4, 2)], num_hidden_layers=1, use_cache=False), drawn(1, 12)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="sparse rules cannot be exported or traced"),
    ):
        torch.export.export(model, (ids,))
    attend = lambda x: ha.functional.sparse_attention(
        x, x, x, is_causal=True, rules=Pages(5, 1, 4, 2)
    )
    with pytest.raises(ValueError, match="sparse rules cannot be exported or traced"):
        torch.jit.trace(attend, (torch.randn(1, 2, 12, 8),), check_trace=False)
    exact = lambda x: ha.functional.sparse_attention(x, x, x, is_causal=True, rules=Exact())
    traced, x = (
        torch.jit.trace(exact, (torch.randn(1, 2, 12, 8),), check_trace=False),
        torch.randn(1, 2, 12, 8),
    )
    torch.testing.assert_close(
        traced(x), torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    )


class Mesh:
    """Two ranks, of which this is one."""

    def __init__(self, rank: int):
        self.rank = rank

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return self.rank


def test_a_rank_computes_its_heads():
    hyper = sparse(num_hidden_layers=1).model.layers[0].self_attn.hyper
    query, (key, value) = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 2, 30, 8)
    call = HostCall(query, key, value, 0.4, True, Options(is_causal=True))
    whole = hyper(call)[0]
    for rank in (0, 1):
        heads = RankHeads(4, 2 * rank, Mesh(rank))
        parts = {n: heads.slice_rank(getattr(call, n), 1) for n in ("query", "key", "value")}
        part = hyper(replace(call, **parts, heads=heads))[0]
        torch.testing.assert_close(part, whole[:, 2 * rank : 2 * rank + 2], atol=1e-5, rtol=0)


#: Pages of two sizes and both summaries, chosen by every kind of query, beside heads without pages.
PAGED = [
    Pages(6, 1, 4, 2),
    Pages(5, 0, 8, 1, summary="mean", query="previous", chunk=4),
    Pages(6, 1, 4, 2, summary="mean", query="first", chunk=4),
    Window(7, 2),
]


def counted(monkeypatch):
    """Pages that a `PageCache` has summarised, row by row, as they come."""
    pages, write = [], selected.page_summaries

    def counting(key, out, page, bounds, starts, begin, end):
        pages.append([b - a for a, b in zip(begin, end, strict=True)])
        write(key, out, page, bounds, starts, begin, end)

    monkeypatch.setattr(selected, "page_summaries", counting)
    return pages


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_keeps_the_summaries_of_pages(monkeypatch, dtype):
    """The same bits as without it, rows taken, repeated and cropped in between; and each page is summarised once."""
    pages, model, ids = counted(monkeypatch), sparse(PAGED).to(dtype), drawn()
    kept, plain = ha.HierarchicalCache(), hf.DynamicCache(config=model.config)

    def step(tokens):
        here, there = (logits(model, tokens, past_key_values=cache) for cache in (kept, plain))
        assert torch.equal(here, there)

    for first, last in ((0, 20), (20, 21), (21, 22), (22, 29)):
        step(ids[:, first:last])
    assert all(max(new) < 6 for new in pages[4:])  # after the prompt, only new ones
    total = [sum(new[row] for new in pages) for row in range(2)]
    assert total == [2 * (29 // 4 + 29 // 8 + 29 // 4)] * 2  # two layers, three kinds
    for cache in (kept, plain):
        cache.reorder_cache(torch.tensor([1, 1]))
    step(ids[[1, 1], 29:30])
    for cache in (kept, plain):
        cache.crop(-9)
    other = drawn(4)[2:]
    for place in range(21, 40):
        step(other[:, place : place + 1])


@needs_compiler
def test_a_cache_keeps_the_choice_of_a_chunk(monkeypatch):
    """Until the next chunk, however tokens come and go in this one; and never that of other tokens before it."""
    asked, choose = [], selected.chosen_pages

    def choosing(query, key, rules, **options):
        asked.append([rule.by == KEPT for rule in rules])
        return choose(query, key, rules, **options)

    monkeypatch.setattr(selected, "chosen_pages", choosing)
    model, ids = sparse(PAGED, num_hidden_layers=1).float(), drawn()
    kept, plain = ha.HierarchicalCache(), hf.DynamicCache(config=model.config)

    def step(tokens):
        del asked[:]
        here, there = (logits(model, tokens, past_key_values=cache) for cache in (kept, plain))
        assert torch.equal(here, there)
        return asked[0]

    fresh, known = (
        [False] * 4,
        [False, True, True, False],
    )  # heads by a query of its own, and without pages
    step(ids[:, :24])
    assert [step(ids[:, i : i + 1]) for i in range(24, 31)] == [
        fresh,
        known,
        known,
        known,
        fresh,
        known,
        known,
    ]
    for removed, expected in (
        (1, known),
        (2, known),
        (3, fresh),
        (4, fresh),
    ):  # 30, 29, 28 and 27 of 31 are left
        for cache in (kept, plain):
            cache.crop(-removed)
        other = (ids[:, 31 - removed : 32 - removed] + 7) % 80 + 5
        assert step(other) == expected
        for i in range(32 - removed, 31):
            step(ids[:, i : i + 1])
    for cache in (kept, plain):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert step(ids[:, 31:32]) == fresh


def gemma_whose_layers_share_keys():
    sizes = dict(
        vocab_size=99,
        vocab_size_per_layer_input=99,
        hidden_size=32,
        intermediate_size=48,
        laurel_rank=4,
    )
    sizes |= dict(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    sizes |= dict(
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(
        hf.Gemma3nTextConfig(**sizes, hidden_size_per_layer_input=8)
    ).eval()
    return ha.patch_model(
        model, ha.SparseConfig([Pages(1, 0, 2, 2, query="first", chunk=8)]), mode="replace"
    )


@needs_compiler
def test_layers_that_share_keys_choose_each_for_itself():
    model, ids = gemma_whose_layers_share_keys(), drawn()
    caches = ha.HierarchicalCache(), hf.DynamicCache(config=model.config)
    for i in range(LENGTH):
        kept, plain = (logits(model, ids[:, i : i + 1], past_key_values=cache) for cache in caches)
        torch.testing.assert_close(kept, plain, atol=1e-5, rtol=0)


@needs_compiler
@pytest.mark.parametrize("query", ["first", "previous"])
def test_a_choice_made_while_tokens_were_hidden_is_not_kept(query):
    """A row hides its newest tokens for three steps, then shows them all."""
    model, ids = (
        sparse([Pages(1, 0, 2, 2, query=query, chunk=4)], num_hidden_layers=1).float(),
        drawn(),
    )
    caches = ha.HierarchicalCache(), hf.DynamicCache(config=model.config)
    for first, last in ((0, 22), *((i, i + 1) for i in range(22, 34))):
        mask = torch.ones(2, last, dtype=torch.long)
        if 22 < last <= 25:
            mask[1, 21:] = 0
        call = {"attention_mask": mask}
        kept, plain = (
            logits(model, ids[:, first:last], past_key_values=cache, **call) for cache in caches
        )
        assert torch.equal(kept, plain)


@pytest.mark.parametrize(
    "modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)]
)
def test_a_cache_goes_on_in_another_mode(modes):
    """What inference mode has made can be read later, but not written to."""
    ids = drawn()

    def logits_with(cache):
        model, parts = sparse(PAGED).float(), []
        for mode, first, last in zip(
            modes * 3, (0, 20, 21, 22, 29, 30), (20, 21, 22, 29, 30, 40), strict=True
        ):
            with mode():
                parts.append(model(ids[:, first:last], past_key_values=cache).logits)
        return torch.cat(parts, 1)

    torch.testing.assert_close(
        logits_with(ha.HierarchicalCache()), logits_with(hf.DynamicCache()), atol=1e-4, rtol=0
    )


@needs_compiler
def test_kept_summaries_know_padding(monkeypatch):
    """Rows of other lengths: pages count from the first token of each."""
    pages, model, ids = counted(monkeypatch), sparse(PAGED).float(), drawn(3)
    ids[0, :13] = ids[1, :4] = 0
    options = {
        "attention_mask": ids.ne(0).long(),
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    plain = model.generate(ids, **options)
    assert not pages
    assert torch.equal(
        model.generate(ids, past_key_values=ha.HierarchicalCache(), **options), plain
    )
    assert any(len(set(new)) > 1 for new in pages)
    beams = options | {"num_beams": 3}
    assert torch.equal(
        model.generate(ids, past_key_values=ha.HierarchicalCache(), **beams),
        model.generate(ids, **beams),
    )


@pytest.mark.parametrize(
    "config",
    [
        ha.SparseConfig(Pages(2, 1, 2, 1)),
        ha.HsaConfig(windows=(2, 4), near=1, sinks=0, refine_top_k=0),
    ],
    ids=["sparse", "hsa"],
)
@pytest.mark.parametrize("padding", ["none", "left", "of another make"])
def test_what_an_indexer_hides_is_no_padding(config, padding):
    """DeepSeek's indexer leaves each query four keys; where tokens stand is as without it."""
    if not hasattr(hf, "DeepseekV32Config"):
        pytest.skip("this Transformers has no such family")
    sizes = dict(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    ranks = dict(
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8
    )
    # many heads, so that no scores of the indexer tie, which steps and prompts break differently
    indexer = dict(index_topk=4, index_n_heads=16, index_head_dim=16)
    experts = dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1
    )
    torch.manual_seed(0)
    others = dict(num_key_value_heads=4, first_k_dense_replace=1, initializer_range=0.1)
    made = hf.DeepseekV32Config(**sizes, **ranks, **indexer, **experts, **others)
    model = hf.DeepseekV32ForCausalLM(made).eval()
    ids = torch.randint(1, 99, (2, 12))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, : 0 if padding == "none" else 3] = False

    def mask(rows: slice, columns: int):
        if padding == "none":
            return {}
        if padding == "left":
            return dict(attention_mask=real[:, :columns].long())
        causal = torch.ones(12, 12, dtype=torch.bool).tril()
        return dict(
            attention_mask=(causal & real[:, None, None] & real[:, None, :, None])[
                :, :, rows, :columns
            ]
        )

    place = (real.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        stock = model(ids, position_ids=place, use_cache=False, **mask(slice(12), 12)).logits
        ha.patch_model(model, config, mode="replace")
        whole = model(ids, position_ids=place, use_cache=False, **mask(slice(12), 12)).logits
        assert (whole - stock)[real].abs().max() > 1e-3
        out = model(ids[:, :7], position_ids=place[:, :7], **mask(slice(7), 7))
        steps = [out.logits]
        for i in range(7, 12):
            more = mask(slice(i, i + 1), i + 1)
            out = model(
                ids[:, i : i + 1],
                position_ids=place[:, i : i + 1],
                past_key_values=out.past_key_values,
                **more,
            )
            steps.append(out.logits)
    assert (torch.cat(steps, 1) - whole)[real].abs().max() <= 1e-5
