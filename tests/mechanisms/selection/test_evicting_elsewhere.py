"""A cache that forgets, in other models than the one that it was made for: refused, since its keys are not there."""

import copy
import pickle

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn import HierarchicalCache, HsaConfig, SparseConfig
from hf_hyperattn.rules import Window
from tests.covering import cover_pairs
from tests.mechanisms.sparse.test_sparse_models import drawn, llama, logits

MADE_FOR = {
    "hsa": HsaConfig((2, 4), near=1, refine_top_k=0),
    "sparse": SparseConfig(Window(5, 1)),
}
made_for = pytest.mark.parametrize("kind", MADE_FOR)
OTHERS = {
    "cone": [ha.ConeConfig()],
    "hyperbolic": [ha.HyperbolicConfig()],
    "hype": [ha.HypeConfig(mu=0.1)],
    "mkl": [ha.MklConfig()],
    "trilinear": [ha.TrilinearConfig(windows=(4, 3))],
    "bidaf": [ha.TrilinearConfig(form="bidaf")],
    "talking heads": [ha.TalkingHeadsConfig()],
    "head fusion": [ha.HeadFusionConfig()],
    "hsa": [MADE_FOR["hsa"]],
    "sparse": [MADE_FOR["sparse"]],
    "hype and hsa": [ha.HypeConfig(mu=0.1), MADE_FOR["hsa"]],
    "hype and sparse": [ha.HypeConfig(mu=0.1), MADE_FOR["sparse"]],
}


def patched(*configs, mode="replace"):
    return ha.patch_model(llama(), *configs, mode=mode)


def assert_refused(model, kind):
    """One sentence names the cache and the fix, in the first call already, before anything is forgotten."""
    cache = HierarchicalCache(patched(MADE_FOR[kind]), evict=True)
    with pytest.raises(ValueError) as caught:
        logits(model, drawn(2, 20), past_key_values=cache)
    said = str(caught.value)
    assert "HierarchicalCache(evict=True)" in said and "allowed:" in said and "\n" not in said, said


@made_for
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_stock_models_refuse_it(implementation, kind):
    assert_refused(llama(attn_implementation=implementation), kind)


@made_for
def test_an_unpatched_model_refuses_its_cache(kind):
    assert_refused(ha.unpatch_model(patched(MADE_FOR[kind])), kind)


# With mode="replace" the same mechanism is the model that the cache was made for.
ELSEWHERE = cover_pairs(
    OTHERS,
    ["replace", "blend"],
    MADE_FOR,
    allowed=lambda name, mode, kind: mode == "blend" or name != kind,
)


@pytest.mark.parametrize("name, mode, kind", ELSEWHERE)
def test_other_mechanisms_refuse_it(name, mode, kind):
    assert_refused(patched(*OTHERS[name], mode=mode), kind)


@made_for
@pytest.mark.parametrize("name", ["hyper_dot", "cone", "hype"])
def test_mechanisms_by_name_refuse_it(name, kind):
    assert_refused(llama(attn_implementation=name), kind)


def test_a_model_that_copies_keys_after_the_cache_refuses_it():
    """The copy of a placeholder would be a tensor of NaN of which nobody knows where it came from."""
    model = patched(MADE_FOR["hsa"])
    layer = model.model.layers[1].self_attn
    interface = ha.integration.attention.call_path.patched_forward
    cache = HierarchicalCache(model, evict=True)
    cache.update(*torch.randn(2, 1, 2, 5, 8), 1)
    key, value = cache.layers[1].keys, cache.layers[1].values
    query = torch.randn(1, 4, 5, 8)
    with torch.no_grad():
        assert bool(interface(layer, query, key, value, None, scaling=0.4)[0].isfinite().all())
        for changed in ("key", "value"):
            with pytest.raises(ValueError, match=r"HierarchicalCache\(evict=True\)"):
                pair = (key.clone(), value) if changed == "key" else (key, value.double())
                interface(layer, query, *pair, None, scaling=0.4)
        other = torch.randn(1, 2, 5, 8)
        for pair in ((other, value), (key, other)):
            with pytest.raises(ValueError, match=r"HierarchicalCache\(evict=True\)"):
                interface(layer, query, *pair, None, scaling=0.4)


@made_for
def test_copies_and_files_of_the_cache_go_on(kind):
    model, ids = patched(MADE_FOR[kind]), drawn(2, 30)
    expected, cache = logits(model, ids), HierarchicalCache(model, evict=True)
    logits(model, ids[:, :20], past_key_values=cache)
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert "evict=True" in repr(again.layers[0].keys)
        found = logits(model, ids[:, 20:], past_key_values=again)
        torch.testing.assert_close(found, expected[:, 20:], atol=1e-5, rtol=0)


def test_a_cache_that_keeps_all_serves_every_model():
    model, ids = llama(), drawn(2, 20)
    found = logits(model, ids, past_key_values=HierarchicalCache(patched(MADE_FOR["hsa"])))
    torch.testing.assert_close(
        found, logits(model, ids, past_key_values=hf.DynamicCache()), atol=1e-10, rtol=0
    )
