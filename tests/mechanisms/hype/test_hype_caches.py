"""HyPE in padded, packed, cached, chunked, windowed and assisted runs."""

import pytest
import torch
from transformers import DynamicCache

from tests.integration.attention.test_families import CAUSAL, generate, logits, model_of
from tests.mechanisms.hype.hype_models import ids_of, steep

# Padding, packing.


@pytest.mark.parametrize("family", ("llama", "qwen3", "gpt2"))
def test_padding_in_the_middle_does_not_count(family):
    """What generation from a right-padded prompt looks like: tokens, padding, tokens."""
    model = steep(family)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids)
    hole = torch.cat(
        [ids[:, :5], torch.full((2, 3), model.config.pad_token_id or 0), ids[:, 5:]], 1
    )
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
        last = model(
            hole[:, 8:9],
            attention_mask=mask[:, :9],
            position_ids=where["position_ids"][:, 8:9],
            past_key_values=cache,
        ).logits[:, 0]
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


@pytest.mark.parametrize("family", ("llama", "gpt2", "mistral"))
def test_assisted_and_chunked_generation_equal_greedy(family):
    model = steep(family)
    torch.manual_seed(1)
    assistant = model_of(family, "eager", num_hidden_layers=1)
    inputs = {"input_ids": ids_of(model, rows=1)}
    plain = generate(model, inputs)
    assert torch.equal(generate(model, inputs, assistant_model=assistant), plain)
    assert torch.equal(generate(model, inputs, prefill_chunk_size=4), plain)
