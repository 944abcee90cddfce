"""HyPE in padded, packed, cached, chunked, windowed and assisted runs."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.integration.test_families import CAUSAL, ENCODERS, generate, inputs_of, logits, model_of

from .hype_models import every_causal, ids_of, steep

# Padding, packing.


@every_causal
def test_left_and_right_padded_rows_equal_unpadded_ones(family):
    model = steep(family)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids)
    pads = torch.full((2, 3), model.config.pad_token_id or 0)
    for padded, real in (
        (torch.cat([pads, ids], 1), slice(3, None)),
        (torch.cat([ids, pads], 1), slice(0, 9)),
    ):
        mask = torch.zeros_like(padded)
        mask[:, real] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        got = logits(model, input_ids=padded, attention_mask=mask, position_ids=positions)[:, real]
        torch.testing.assert_close(got, exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ENCODERS)
def test_padded_encoder_rows_equal_unpadded_ones(family):
    model = steep(family)
    ids = ids_of(model)
    padded = torch.cat([ids, torch.full((2, 3), model.config.pad_token_id)], 1)
    mask = (torch.arange(12) < 9).long().repeat(2, 1)
    got = logits(model, input_ids=padded, attention_mask=mask)[:, :9]
    torch.testing.assert_close(got, logits(model, input_ids=ids), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ("llama", "qwen3", "gpt2"))
def test_padding_in_the_middle_does_not_count(family):
    """What generation from a right-padded prompt looks like: tokens, padding, tokens."""
    model = steep(family)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids)
    hole = torch.cat([ids[:, :5], torch.full((2, 3), model.config.pad_token_id or 0), ids[:, 5:]], 1)
    mask = torch.ones_like(hole)
    mask[:, 5:8] = 0
    where = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    got = logits(model, input_ids=hole, **where)
    torch.testing.assert_close(got[:, mask[0].bool()], exact, atol=2e-5, rtol=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            hole[:, :8],
            attention_mask=mask[:, :8],
            position_ids=where["position_ids"][:, :8],
            past_key_values=cache,
        )
        last = model(hole[:, 8:9], attention_mask=mask[:, :9], position_ids=where["position_ids"][:, 8:9],
                     past_key_values=cache).logits[:, 0]  # fmt: skip
    torch.testing.assert_close(last, exact[:, 5], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", [f for f in CAUSAL if f != "gpt_oss"])
def test_packed_sequences_count_for_themselves(family):
    model = steep(family)
    ids = ids_of(model, rows=1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = logits(model, input_ids=ids, position_ids=positions, use_cache=False)
    for part in (slice(0, 4), slice(4, 9)):
        alone = logits(model, input_ids=ids[:, part], use_cache=False)
        torch.testing.assert_close(packed[:, part], alone, atol=2e-5, rtol=0)


# Caches: every way of feeding the tokens gives the logits of the full forward pass.

CHUNKS = {
    "one by one": [1] * 9,
    "prompt, then one by one": [5, 1, 1, 1, 1],
    "chunks": [4, 3, 2],
    "tail": [1, 8],
}


def fed(model, ids, mask, cache, sizes):
    """Logits [B, L, V] of the tokens fed in pieces of these sizes."""
    out, start = [], 0
    for size in sizes:
        end = start + size
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        given = {} if mask.all() else {"attention_mask": mask[:, :end]}
        with torch.no_grad():
            out.append(
                model(ids[:, start:end], position_ids=positions, past_key_values=cache, use_cache=True, **given).logits
            )
        start = end
    return torch.cat(out, 1)


@every_causal
@pytest.mark.parametrize("how", CHUNKS)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_a_cache_gives_the_logits_of_the_full_pass(family, how, static, padded):
    model = steep(family)
    ids = ids_of(model)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    exact = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    cache = StaticCache(model.config, max_cache_len=14) if static else DynamicCache(config=model.config)
    got = fed(model, ids, mask, cache, CHUNKS[how])
    real = mask.bool()
    torch.testing.assert_close(got[real], exact[real], atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", ("mistral", "gemma2", "gpt_oss"))
@pytest.mark.parametrize("how", CHUNKS)
def test_sliding_caches_that_have_dropped_keys(family, how):
    model = steep(family, sliding_window=4)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids, use_cache=False)
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=12)):
        got = fed(model, ids, torch.ones_like(ids), cache, CHUNKS[how])
        torch.testing.assert_close(got, exact, atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", (*CAUSAL, "bart"))
def test_greedy_generation_with_any_cache_equals_without(family):
    model = steep(family)
    inputs = inputs_of(family, model)
    plain = generate(model, inputs, use_cache=False)
    assert torch.equal(generate(model, inputs, use_cache=True), plain)
    assert torch.equal(generate(model, inputs, cache_implementation="static", disable_compile=True), plain)


@pytest.mark.parametrize("family", ("llama", "gpt2", "mistral"))
def test_assisted_and_chunked_generation_equal_greedy(family):
    model = steep(family)
    torch.manual_seed(1)
    assistant = model_of(family, "eager", num_hidden_layers=1)
    inputs = {"input_ids": ids_of(model, rows=1)}
    plain = generate(model, inputs)
    assert torch.equal(generate(model, inputs, assistant_model=assistant), plain)
    assert torch.equal(generate(model, inputs, prefill_chunk_size=4), plain)


def test_beams_and_padded_generation():
    model = steep("llama")
    ids = ids_of(model)
    padded = torch.cat([torch.full((2, 3), 0), ids], 1)
    mask = (torch.arange(12) >= 3).long().repeat(2, 1)
    for how in ({}, {"num_beams": 3}):
        expected = generate(model, {"input_ids": ids}, **how)
        got = generate(model, {"input_ids": padded, "attention_mask": mask}, **how)
        assert torch.equal(got[:, 3:], expected)
