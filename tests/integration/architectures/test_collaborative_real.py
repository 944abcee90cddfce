"""MiniLM with shared queries and keys: exact at full rank, smaller below it, near where it is fitted."""

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModel

import hf_hyperattn as ha
from hf_hyperattn.integration import convert
from tests.integration.architectures.collaborative import quiet
from tests.integration.models import State, difference, perturb, run
from tests.integration.test_real import minilm, tokens  # noqa: F401  a fixture

pytestmark = pytest.mark.slow


def embeddings(model, inputs):
    mask = inputs["attention_mask"][..., None]
    with torch.no_grad():
        return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def test_full_rank_patched_and_converted(minilm):  # noqa: F811
    model, inputs = AutoModel.from_pretrained(minilm).eval(), tokens(minilm)
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, ha.CollaborativeConfig())
    perturb(model, 1e-9)
    assert difference(before, run(model, inputs)) <= 1e-5
    ha.unpatch_model(model)
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=384), keep_original=True)
    assert difference(before, run(model, inputs)) <= 1e-5
    ha.unpatch_model(model)
    assert not state.differences(State(model)) and difference(before, run(model, inputs)) == 0.0


def test_half_rank_fitted_saved_and_loaded(minilm, tmp_path):  # noqa: F811
    model, inputs = AutoModel.from_pretrained(minilm).eval(), tokens(minilm)
    before, count = embeddings(model, inputs), sum(p.numel() for p in model.parameters())
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=192, steps=15), examples=[inputs])
    assert count - sum(p.numel() for p in model.parameters()) == 6 * (295_680 - 154_368)
    after = embeddings(model, inputs)
    assert cosine_similarity(before, after).min() > 0.9
    model.save_pretrained(tmp_path)
    assert torch.equal(after, embeddings(AutoModel.from_pretrained(tmp_path).eval(), inputs))
