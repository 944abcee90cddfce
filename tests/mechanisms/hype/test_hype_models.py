"""HyPE in models: by name and by patch, in half precision, compiled."""

import pytest
import torch
import transformers as hf

from hf_hyperattn import HypeConfig, patch_model
from tests.integration.attention.test_families import inputs_of, logits, model_of
from tests.integration.models import State, llama
from tests.mechanisms.hype.hype_models import ids_of
from tests.zoo.inputs import words

# By name.


@pytest.mark.parametrize("family", ("t5", "vit", "whisper"))
def test_a_model_that_says_no_length_must_be_given_one(family):
    model = model_of(family, "hype")
    with pytest.raises(
        ValueError, match=r"max_length=None .*max_position_embeddings.*max_length=\.\.\."
    ) as caught:
        model(**inputs_of(family, model))
    assert "\n" not in str(caught.value) and type(model.config).__name__ in str(caught.value)
    state = State(other := model_of(family, "eager"))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        patch_model(other, HypeConfig())
    assert state.differences(State(other)) == []
    patch_model(other, HypeConfig(max_length=64), mode="replace")(**inputs_of(family, other))


def test_cross_attention_keeps_its_dot_product_and_is_refused_by_patch():
    """By name the decoder's cross-attention is stock: cut off from it, nothing of the encoder's order is left."""
    model, stock = model_of("bart", "hype"), model_of("bart", "sdpa")
    cross = model.model.decoder.layers[0].encoder_attn, stock.model.decoder.layers[0].encoder_attn
    states = torch.randn(2, 5, model.config.d_model), torch.randn(2, 9, model.config.d_model)
    with torch.no_grad():
        ours, theirs = (c(states[0], key_value_states=states[1])[0] for c in cross)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="hype has no meaning for cross-attention"):
        patch_model(stock, HypeConfig(), include_cross_attention=True)


# Patched: identity, training, reload, reversal.


def test_it_supplies_positions_where_there_are_none():
    """Without positions a decoder cannot tell the order of what it has read; with HyPE it can."""
    config = hf.SmolLM3Config(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        no_rope_layers=[0],
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = hf.SmolLM3ForCausalLM(config).eval()
    ids = ids_of(model)
    turned = torch.cat([ids[:, :8].flip(1), ids[:, 8:]], 1)

    def seen():
        return (logits(model, input_ids=ids) - logits(model, input_ids=turned))[:, -1].abs().max()

    assert seen() < 1e-5
    patch_model(model, HypeConfig(max_length=16), mode="replace")
    assert seen() > 1e-3


def test_under_autocast_the_columns_stay_float32():
    model = patch_model(llama(), HypeConfig(max_length=512), mode="replace")
    ids = words(model.config, length=400)
    exact = logits(model, input_ids=ids, use_cache=False)
    with torch.autocast("cpu", torch.bfloat16):
        got = logits(model, input_ids=ids, use_cache=False)
    torch.testing.assert_close(got.float(), exact, atol=3e-2, rtol=0)
