"""Caches: step by step, in chunks, static, and through generate; against the stock model and against no cache."""

import pytest
import torch
from transformers import StaticCache

import model_patches
from tests.model_patches.families import DECODERS, MODELS, ids, padded
from tests.model_patches.support import NAME, TOLERANCE, reference, switch

# CPM-Ant's model prepends a prompt to every call and counts it in the cache: only its own generate drives it
CHUNKED = [name for name in DECODERS if name != "cpmant"]
STATIC = ["codegen", "gpt_neox_japanese", "gptj", "xglm"]


@pytest.fixture
def calls():
    with reference() as calls:
        yield calls


@torch.no_grad()
def logits(model, **inputs):
    return model(**inputs).logits


def sees_future(model) -> bool:
    """Whether later tokens change earlier logits, as in some decoders of Transformers 5.17; a cache then does too."""
    whole, first = ids()["input_ids"], ids()["input_ids"][:, :6]
    return not torch.allclose(
        logits(model, input_ids=whole)[:, :6], logits(model, input_ids=first), atol=TOLERANCE
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa", NAME])
@pytest.mark.parametrize(
    "pieces", [[1] * 11, [6, 5], [4, 1, 4, 2]], ids=["steps", "halves", "mixed"]
)
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_equal_one_call(name, pieces, implementation, calls):
    model = DECODERS[name]()
    if sees_future(model):
        pytest.skip(f"this Transformers lets {name} attend to the future")
    switch(model, "eager" if implementation == "eager" else model.config._attn_implementation)
    expected = logits(model, **ids())
    model_patches.serve(model)
    switch(model, implementation)
    cache, found = None, []
    for piece in ids()["input_ids"].split(pieces, dim=1):
        with torch.no_grad():
            out = model(input_ids=piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits)
    assert (torch.cat(found, dim=1) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, side, calls):
    model = DECODERS[name]()
    inputs = {"attention_mask": torch.ones(2, 11, dtype=torch.long)} | (
        ids() if side is None else padded(side)
    )
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    model_patches.serve(model)
    switch(model, NAME)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert calls
    if name != "cpmant" and not sees_future(model):
        assert torch.equal(model.generate(**inputs, **options, use_cache=False), expected)


@pytest.mark.parametrize("name", ["blip-caption", "fsmt", "git", "mvp"])
def test_generate_from_two_inputs(name, calls):
    """Cross-attention fills its part of the cache once; self-attention adds one token a step."""
    model, inputs = MODELS[name]()
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    cached, uncached = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
    model_patches.serve(model)
    for part in (model, *(m for m in model.modules() if hasattr(m, "config"))):
        switch(part, NAME)
    assert torch.equal(model.generate(**inputs, **options), cached) and calls
    assert torch.equal(model.generate(**inputs, **options, use_cache=False), uncached)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", STATIC)
def test_static_cache(name, side, calls):
    model = DECODERS[name]()
    inputs = ids() if side is None else padded(side)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    model_patches.serve(model)
    switch(model, NAME)
    assert torch.equal(model.generate(**inputs, **options, cache_implementation="static"), expected)


@pytest.mark.parametrize("name", ["bloom", "falcon-grouped", "gptj", "mpt"])
def test_beams(name, calls):
    model = DECODERS[name]()
    options = {
        "max_new_tokens": 5,
        "num_beams": 3,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    expected = model.generate(**padded("left"), **options)
    model_patches.serve(model)
    switch(model, NAME)
    assert torch.equal(model.generate(**padded("left"), **options), expected)


def test_static_prefill_without_mask(calls):
    """The mask is None and there are more keys than queries: causal from the top left, also under alibi."""
    model = DECODERS["bloom"]()
    static = lambda: {
        "past_key_values": StaticCache(config=model.config, max_cache_len=24),
        "use_cache": True,
    }
    try:
        expected = logits(model, **ids())
        logits(model, **ids(), **static())
    except RuntimeError:
        pytest.skip(
            "this BLOOM makes alibi for the tokens it is given, not for all keys of a static cache"
        )
    model_patches.serve(model)
    switch(model, NAME)
    with torch.no_grad():
        out = model(**ids(), **static())
    keys = [call[3].shape[-1] for call in calls]
    assert keys == [24, 24] and all(call[1] is None for call in calls)
    assert (out.logits - expected).abs().max() <= TOLERANCE


def test_falcon_caches_unrepeated_heads():
    model = DECODERS["falcon-grouped"]()
    model_patches.serve(model)
    with torch.no_grad():
        out = model(**ids(), use_cache=True)
    assert out.past_key_values.layers[0].keys.shape == (2, 2, 11, 8)
