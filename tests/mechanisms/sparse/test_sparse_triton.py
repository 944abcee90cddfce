"""Sparse rules in decoding on the Triton kernel, in a model.

Without a GPU it runs in Triton's interpreter; test_triton_modes.py starts a process for it.
"""

import pytest
import torch
import transformers as hf

pytest.importorskip("triton", reason="needs Triton")

import hf_hyperattn as ha  # noqa: E402
from hf_hyperattn.engines.selected import KEPT  # noqa: E402
from hf_hyperattn.mechanisms.sparse.compiled import KernelCall  # noqa: E402
from tests.engines.test_triton import devices  # noqa: E402
from tests.mechanisms.sparse.test_sparse_models import PAGED, drawn, logits, sparse  # noqa: E402

pytestmark = pytest.mark.extras


@devices
def test_a_cache_keeps_the_choice_of_a_chunk(device, monkeypatch):
    """Until the next chunk, also after tokens were taken back; a cache without choices gives the same."""
    asked, list_pages = [], KernelCall.list_pages

    def listing(self, place, rules, queries):
        asked.append([rule.by == KEPT for rule in rules])
        return list_pages(self, place, rules, queries)

    monkeypatch.setattr(KernelCall, "list_pages", listing)
    model, ids = sparse(PAGED, num_hidden_layers=1).float().to(device), drawn().to(device)
    ha.set_backend(model, "triton")
    kept, plain = ha.HierarchicalCache(), hf.DynamicCache(config=model.config)

    def step(tokens):
        del asked[:]
        here, there = (logits(model, tokens, past_key_values=cache) for cache in (kept, plain))
        torch.testing.assert_close(here, there, atol=1e-5, rtol=0)
        return asked[0]

    # By head: those that choose by each query itself, or without pages, keep nothing.
    fresh, known = [False] * 4, [False, True, True, False]
    step(ids[:, :23])
    steps = [step(ids[:, i : i + 1]) for i in range(23, 26)]
    assert steps == [fresh, fresh, known]
    for cache in (kept, plain):
        cache.crop(-2)
    assert step(ids[:, 24:25]) == fresh
