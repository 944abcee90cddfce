"""Where tokens stand is worked out once for all layers of a model, and reads what the definition reads."""

import gc
import weakref

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.engines.selection import Places
from hf_hyperattn.mechanisms.hsa.windowed import native
from hf_hyperattn.mechanisms.hsa.windowed.native import pool_levels
from hf_hyperattn.mechanisms.selection import places
from hf_hyperattn.mechanisms.selection.cache import LayerCache
from hf_hyperattn.rules import Pages
from tests.mechanisms.hsa.hsa_calls import key_tied
from tests.mechanisms.selection.test_packed_and_prefix import TEXT, tokens

MECHANISMS = {
    "hsa": ha.HsaConfig((2, 4), refine_top_k=1),
    "sparse": ha.SparseConfig(Pages(near=4, sinks=1, page=4, top=1, query="previous", chunk=4)),
    "hype": ha.HypeConfig(),
    "mkl": ha.MklConfig(kind="conditional"),
    "trilinear": ha.TrilinearConfig(windows=(5, 3)),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no grad", "inference mode"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_places_are_found_once_a_model_call(monkeypatch, mechanism, padding, inference):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, "num_hidden_layers": 5})).eval()
    ha.patch_model(
        model, MECHANISMS[mechanism], mode="replace" if mechanism in ("hsa", "sparse") else "blend"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.fill_(0.1)
    found, find = [], places.Reading._find_places
    monkeypatch.setattr(
        places.Reading, "_find_places", lambda reading: found.append(reading) or find(reading)
    )
    places.facts_without_mask.cache_clear()
    ids, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[1, :padding] = 0
    cache = hf.DynamicCache(config=model.config)
    with torch.inference_mode() if inference else torch.no_grad():
        for stop in (20, 21):
            del found[:]
            given = ids[:, cache.get_seq_length() : stop]
            model(given, attention_mask=mask[:, :stop] if padding else None, past_key_values=cache)
            assert len(found) == 1, stop


def test_numbers_count_real_tokens():
    real = torch.tensor([[0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    here = Places(1, 2, 5, torch.device("cpu"), start=2, dropped=1, real=real)
    assert here.numbers.tolist() == [[-1, 0, 1, -1, 2, -1]]
    assert here.key_numbers.tolist() == [[0, 1, -1, 2, -1]] and here.query_numbers.tolist() == [
        [-1, 2]
    ]
    assert here.stop == 4 and here.spans is None
    assert (
        here.count_slots(5, 1) == 1 and here.count_slots(5, 2) == 3 and here.count_slots(5, 9) == 4
    )
    assert Places(2, 1, 4, torch.device("cpu"), start=3).spans == ([0, 0], [4, 4])


def test_a_mask_that_is_changed_in_place_is_read_again():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    read = lambda: places.read_mask(query, key, ha.engines.Options(mask=mask), True).places.real
    assert read() is None
    mask[..., 0] = False
    assert read().tolist() == [[False, True, True, True]]


def test_a_mask_that_is_changed_without_a_trace_is_read_again():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    buffer = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril().numpy()
    mask = torch.from_numpy(buffer)
    read = lambda: places.read_mask(query, key, ha.engines.Options(mask=mask), True).places.real
    assert read() is None
    buffer[..., 0] = False
    assert read().tolist() == [[False, True, True, True]]


def llama(config, **sizes):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, **sizes})).eval()
    return ha.patch_model(model, config, mode="replace")


def test_a_table_keeps_no_hierarchies_alive():
    model, ids = llama(ha.HsaConfig()), tokens(1, 8)
    mask, alive = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(), []
    for _ in range(3):
        tree = ha.Hierarchy.from_ids(torch.arange(8)[None, :, None] // 2)
        alive.append(weakref.ref(tree))
        with torch.no_grad():
            model(ids, attention_mask=mask, hierarchy=tree, use_cache=False)
        del tree
    gc.collect()
    assert not any(ref() is not None for ref in alive[:-1])


@pytest.mark.parametrize("mechanism", ["hsa", "sparse"])
def test_a_cache_is_freed_at_once(mechanism):
    model, cache = llama(MECHANISMS[mechanism]), ha.HierarchicalCache()
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
    store = weakref.ref(cache.layers[0].store)
    gc.collect()
    gc.disable()
    try:
        del cache
        assert store() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("query", ["first", "previous", "chunk"])
def test_a_cache_goes_back_to_its_prompt(query):
    model, ids = (
        llama(ha.SparseConfig(Pages(near=4, sinks=1, page=4, top=1, query=query, chunk=4))),
        tokens(1, 130),
    )
    found = []
    for removed in (0, 80):
        cache = ha.HierarchicalCache(model)
        with torch.no_grad():
            model(ids[:, :42], past_key_values=cache)
            for place in range(42, 42 + removed):
                model(ids[:, place : place + 1], past_key_values=cache)
            cache.crop(-removed)
            found.append(model(ids[:, 125:126], past_key_values=cache).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("other", [{"near": 200}, {"sinks": 16}, {"refine_top_k": 2}], ids=str)
def test_a_cache_that_forgets_is_refused_under_another_patch(other):
    small = {"near": 1, "sinks": 1, "refine_top_k": 0}
    model, ids = llama(ha.HsaConfig((2, 4), **small)), tokens(1, 130)
    cache = ha.HierarchicalCache(model, evict=True)
    with torch.no_grad():
        model(ids[:, :120], past_key_values=cache)
        model(ids[:, 120:121], past_key_values=cache)
        ha.patch_model(
            ha.unpatch_model(model), ha.HsaConfig((2, 4), **{**small, **other}), mode="replace"
        )
        with pytest.raises(
            ValueError, match="keeps 1 near keys and 1 first ones, and hsa asks for"
        ):
            model(ids[:, 121:122], past_key_values=cache)


def test_chunks_begin_at_slots_where_padding_stands_inside():
    """Llama 4: what one call gives, tokens one by one give."""
    sizes = {k: v for k, v in TEXT.items() if k != "num_hidden_layers"}
    more = dict(
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
    )
    types = ["chunked_attention", "full_attention"]
    config = hf.Llama4TextConfig(
        **sizes, **more, attention_chunk_size=6, layer_types=types, moe_layers=[]
    )
    model = hf.Llama4ForCausalLM(config).eval()
    ha.patch_model(
        model, ha.HsaConfig((2, 4), near=1, sinks=1, refine_top_k=0, block_bias=0.3), mode="replace"
    )
    ids, mask = tokens(1, 13), torch.ones(1, 13, dtype=torch.long)
    mask[0, 4:6] = 0
    place, cache, steps = (
        (mask.cumsum(1) - 1).clamp_min(0),
        hf.DynamicCache(config=model.config),
        [],
    )
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits
        for i in range(13):
            given = dict(
                attention_mask=mask[:, : i + 1],
                position_ids=place[:, i : i + 1],
                past_key_values=cache,
            )
            steps.append(model(ids[:, i : i + 1], **given).logits)
    real = mask[0].bool()
    torch.testing.assert_close(torch.cat(steps, 1)[:, real], whole[:, real], rtol=1e-4, atol=1e-4)


def test_values_may_have_more_heads_than_keys():
    key, value = torch.randn(2, 2, 5, 4), torch.randn(2, 4, 5, 3)
    cache = LayerCache(key, value)
    cache.append(key, value)
    assert all(torch.equal(*pair) for pair in zip(cache.show_tokens(), (key, value), strict=True))


@pytest.mark.parametrize(
    "real", [torch.ones(0, 5), torch.ones(1, 5), None], ids=["no rows", "one for all", "no mask"]
)
def test_a_batch_of_no_rows(real):
    real = None if real is None else real.bool()
    places = Places(0, 5, 5, torch.device("cpu"), real=real)
    assert places.spans == ([], [])
    assert places.count_slots(5, 2) == 2


def test_rows_without_keys():
    places = Places(2, 3, 0, torch.device("cpu"), real=torch.ones(2, 0).bool())
    assert places.spans == ([0, 0], [0, 0])


@pytest.mark.parametrize("spans", [None, torch.zeros(0).long()], ids=["whole", "spans"])
def test_windows_of_a_batch_of_no_rows(spans):
    key = torch.zeros(0, 2, 5, 4)
    levels = pool_levels(key, key[..., :3], (2, 4), spans, spans)
    assert [level.shape[1:] for level in levels.values] == [(2, 5, 3), (2, 3, 3), (2, 2, 3)][
        : len(levels.values)
    ]


@pytest.mark.parametrize("backend", ["auto", "torch", "native", "rows"])
def test_key_tying_of_a_batch_of_no_rows(backend):
    if backend == "native" and not native.can_serve(torch.zeros(1)):
        pytest.skip("no compiler")
    query, key = torch.zeros(0, 4, 5, 4, requires_grad=True), torch.zeros(0, 2, 5, 4)
    out, _ = key_tied(query, key, key[..., :3], (2, 4), near=1, is_causal=True, backend=backend)
    assert out.shape == (0, 4, 5, 3)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert gradient.shape == query.shape
