"""serve changes nothing but the route, and unserve leaves no trace."""

import copy
import io
import json

import pytest
import torch
import transformers

import model_patches
from model_patches.layouts import causal_decoder
from tests.model_patches.families import MODELS, TEXT, ids, padded
from tests.model_patches.support import NAME, distance, outputs, reference, switch


def anatomy(model):
    """Class and attributes of every module; values as identities, but for the dicts of sub-modules and hooks."""
    return {
        name: (type(module), {key: id(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("name", MODELS)
def test_unserve_leaves_no_trace(name):
    model, inputs = MODELS[name]()
    expected, before = outputs(model, inputs), anatomy(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert model_patches.serve(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights.pop(key))
    assert not weights
    assert repr(model) == repr(MODELS[name]()[0])
    assert model_patches.serve(model), "serving twice changes nothing"
    assert model_patches.unserve(model)
    assert anatomy(model) == before
    found = outputs(model, inputs)
    assert all(torch.equal(found[path], expected[path]) for path in expected)
    assert not model_patches.unserve(model)


@pytest.mark.parametrize("name", MODELS)
def test_mixins_hide_nothing(name):
    """No name of a mixin covers a weight or a sub-module of the stock class, which live behind __getattr__."""
    model, _ = MODELS[name]()
    model_patches.serve(model)
    for _, host in model_patches.hosts(model):
        own = set().union(*(vars(base) for base in type(host).route.__mro__ if base is not object))
        assert not own & {*host._modules, *host._parameters, *host._buffers}


def test_transformers_itself_is_untouched():
    modeling = transformers.models.bloom.modeling_bloom
    before = dict(vars(modeling.BloomAttention))
    model, other = TEXT["bloom"](), TEXT["bloom"]()
    model_patches.serve(model)
    assert dict(vars(modeling.BloomAttention)) == before
    assert type(other.transformer.h[0].self_attention) is modeling.BloomAttention
    routed = type(model.transformer.h[0].self_attention)
    assert issubclass(routed, modeling.BloomAttention)
    assert (routed.__module__, routed.__qualname__) == (modeling.__name__, "BloomAttention")


@pytest.mark.parametrize("name", ["bloom", "deberta-v3", "falcon-alibi", "mpt"])
def test_copies_are_served_and_independent(name):
    model = TEXT[name]()
    expected = outputs(model, ids())
    before = model.config._attn_implementation
    model_patches.serve(model)
    twin = copy.deepcopy(model)
    assert all(host.config is twin.config for _, host in model_patches.hosts(twin))
    with reference() as calls:
        switch(twin, NAME)
        assert model.config._attn_implementation == before
        assert distance(outputs(twin, ids()), expected) <= 1e-5 and calls
    switch(twin, before)
    model_patches.unserve(twin)
    assert all(torch.equal(outputs(twin, ids())[path], expected[path]) for path in expected)
    assert next(model_patches.hosts(model), None) is not None


@pytest.mark.parametrize("name", ["codegen", "mpt"])
def test_pickle(name):
    model = TEXT[name]()
    expected = outputs(model, ids())
    model_patches.serve(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert next(model_patches.hosts(loaded), None) is not None
    model_patches.unserve(loaded)
    assert all(torch.equal(outputs(loaded, ids())[path], expected[path]) for path in expected)


@pytest.mark.parametrize("name", ["bloom", "deberta-v2", "falcon-grouped", "gpt_neo", "mpt"])
def test_save_and_load(name, tmp_path):
    model = TEXT[name]()
    expected = outputs(model, ids())
    model.save_pretrained(tmp_path / "stock")
    model_patches.serve(model)
    model.save_pretrained(tmp_path / "served")
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("stock", "served")]
    assert configs[0] == configs[1] and configs[0]["architectures"] == [type(model).__name__]
    loaded = type(model).from_pretrained(tmp_path / "served")
    assert all(torch.equal(outputs(loaded, ids())[path], expected[path]) for path in expected)


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "gptj", "mpt", "deberta-v3"])
def test_set_attn_implementation(name):
    """Transformers only warns where the stock code has no route; a served model takes the name."""
    model = TEXT[name]()
    before = model.config._attn_implementation
    expected = outputs(model, padded("right"))
    model_patches.serve(model)
    with reference() as calls:
        model.set_attn_implementation(NAME)
        found = outputs(model, padded("right"))
        assert calls and distance(found, expected, padded("right")["attention_mask"]) <= 1e-5
        with pytest.raises(ValueError, match="set 'eager'"):
            model_patches.unserve(model)
    model.set_attn_implementation(before)
    model_patches.unserve(model)
    assert "_can_set_attn_implementation" not in vars(model)


def out_of_reach():
    small = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    pegasus = {"vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    talking = transformers.DebertaConfig(**small, intermediate_size=37)
    talking.talking_head = True
    yield (
        "original_full",
        transformers.BigBirdModel(transformers.BigBirdConfig(**small, intermediate_size=37)),
    )
    yield (
        "original_full",
        transformers.BigBirdPegasusModel(transformers.BigBirdPegasusConfig(**pegasus)),
    )
    yield "talking_head=False", transformers.DebertaModel(talking)
    yield (
        "attention_type='full'",
        transformers.InformerModel(
            transformers.InformerConfig(
                prediction_length=4, d_model=32, encoder_layers=1, decoder_layers=1
            )
        ),
    )


def test_variants_out_of_reach_are_refused_before_anything_changes():
    for message, model in out_of_reach():
        before = anatomy(model)
        with pytest.raises(ValueError, match=message):
            model_patches.serve(model)
        assert anatomy(model) == before


def test_models_without_served_parts():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=1, n_head=4)
    )
    before = anatomy(model)
    assert not model_patches.serve(model) and not model_patches.unserve(model)
    assert anatomy(model) == before and list(model_patches.hosts(model)) == []


def test_served_part_of_a_composite():
    """An encoder-decoder of a routed and a served family: only the served part changes, under its own config."""
    encoder = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=37,
        )
    )
    decoder = transformers.RemBertForCausalLM(
        transformers.RemBertConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=37,
            is_decoder=True,
            add_cross_attention=True,
            input_embedding_size=16,
            output_embedding_size=16,
        )
    )
    model = transformers.EncoderDecoderModel(encoder=encoder.eval(), decoder=decoder.eval()).eval()
    inputs = padded("right") | {"decoder_input_ids": ids(length=7)["input_ids"]}
    expected = outputs(model, inputs)
    model_patches.serve(model)
    assert [name for name, _ in model_patches.hosts(model)] == [
        "decoder.rembert.encoder.layer.0.attention.self",
        "decoder.rembert.encoder.layer.0.crossattention.self",
    ]
    with reference() as calls:
        switch(model.decoder.rembert, NAME)  # its config is not the one of model.decoder
        found = outputs(model, inputs)
    own, cross = calls
    assert own[2] == causal_decoder(own[0]) and cross[2] is False
    assert distance({".logits": found[".logits"]}, {".logits": expected[".logits"]}) <= 1e-5


def test_families_name_their_reason():
    assert model_patches.family("bloom").__doc__.startswith("BLOOM")
    with pytest.raises(KeyError, match="calls the attention interface itself"):
        model_patches.family("llama")
    for model_type in model_patches.FAMILIES:
        assert model_patches.family(model_type).ROUTES
