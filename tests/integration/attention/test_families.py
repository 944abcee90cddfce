"""Cone attention by name, on tiny random models of the families that differ in how they call attention."""

import pytest
import torch
import transformers as hf

import hf_hyperattn  # noqa: F401  registers the names
from tests.zoo.inputs import words
from tests.zoo.probe import counted
from tests.zoo.tiny import tiny_config

NAMES = ("cone", "cone_penumbral")
CAUSAL = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss", "qwen3")
ENCODERS = ("bert", "roberta", "distilbert")
AUTO = {
    **dict.fromkeys(CAUSAL, hf.AutoModelForCausalLM),
    **dict.fromkeys(ENCODERS, hf.AutoModelForMaskedLM),
    **dict.fromkeys(("vit", "clip"), hf.AutoModel),
    **dict.fromkeys(("bart", "t5"), hf.AutoModelForSeq2SeqLM),
    "whisper": hf.AutoModelForSpeechSeq2Seq,
}
NEW_TOKENS = 8


def model_of(family, name="cone", auto=None, **changes):
    config = tiny_config(family)
    for key, value in changes.items():
        setattr(config, key, value)
    kinds, layers = (getattr(config, name, None) for name in ("layer_types", "num_hidden_layers"))
    if kinds and layers and len(kinds) > layers:  # a cache would make layers that are never used
        config.layer_types = kinds[:layers]
    torch.manual_seed(0)
    return (auto or AUTO[family]).from_config(config, attn_implementation=name).eval()


def inputs_of(family, model):
    ids = words(model.config)
    images = torch.randn(2, 3, 32, 32)
    features = torch.randn(2, 16, 2 * getattr(model.config, "max_source_positions", 8))
    return {
        "vit": {"pixel_values": images},
        "clip": {"input_ids": ids, "pixel_values": images},
        "bart": {"input_ids": ids, "decoder_input_ids": ids[:, :5]},
        "t5": {"input_ids": ids, "decoder_input_ids": ids[:, :5]},
        "whisper": {"input_features": features, "decoder_input_ids": ids[:, :5]},
    }.get(family, {"input_ids": ids})


def generate(model, inputs, **how):
    inputs = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 0
    return model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, **how
    )


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", AUTO)
def test_loads_by_name_and_runs_forward_and_backward(family, name):
    model = model_of(family, name)
    with counted(name) as modules:
        out = model(**inputs_of(family, model))
    assert modules
    values = [v for v in out.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    assert values and all(v.isfinite().all() for v in values)
    sum((v**2).mean() for v in values if v.requires_grad).backward()
    touched = [p.grad for p in model.parameters() if p.grad is not None]
    assert touched and all(g.isfinite().all() for g in touched)


@pytest.mark.parametrize("family", AUTO)
def test_the_name_changes_the_outputs(family):
    ours, stock = model_of(family, "cone"), model_of(family, "eager")
    inputs = inputs_of(family, ours)
    with torch.no_grad():
        assert not torch.equal(ours(**inputs)[0], stock(**inputs)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", (*CAUSAL, "bart", "t5", "whisper"))
def test_greedy_generation_with_a_cache_equals_without(family, name):
    model = model_of(family, name)
    inputs = inputs_of(family, model)
    plain = generate(model, inputs, use_cache=False)
    assert torch.equal(generate(model, inputs, use_cache=True), plain)
    assert torch.equal(
        generate(model, inputs, cache_implementation="static", disable_compile=True), plain
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", CAUSAL)
def test_left_padded_rows_equal_unpadded_ones(family, name):
    model = model_of(family, name)
    ids = words(model.config)
    padded = torch.cat([torch.full((2, 3), model.config.pad_token_id or 0), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 3).long().repeat(2, 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = logits(model, input_ids=padded, attention_mask=mask, position_ids=positions)[:, 3:]
    torch.testing.assert_close(got, logits(model, input_ids=ids), atol=1e-5, rtol=0)
    assert torch.equal(
        generate(model, {"input_ids": padded, "attention_mask": mask})[:, 3:],
        generate(model, {"input_ids": ids}),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ENCODERS)
def test_right_padded_rows_equal_unpadded_ones(family, name):
    model = model_of(family, name)
    ids = words(model.config)
    padded = torch.cat([ids, torch.full((2, 3), model.config.pad_token_id)], 1)
    mask = (torch.arange(padded.shape[1]) < ids.shape[1]).long().repeat(2, 1)
    got = logits(model, input_ids=padded, attention_mask=mask)[:, : ids.shape[1]]
    torch.testing.assert_close(got, logits(model, input_ids=ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", AUTO)
def test_attention_weights_are_a_distribution(family, name):
    model = model_of(family, name)
    with torch.no_grad():
        out = model(**inputs_of(family, model), output_attentions=True)
    if family == "clip":
        weights = [*out.text_model_output.attentions, *out.vision_model_output.attentions]
    else:
        weights = [w for key, value in out.items() if key.endswith("attentions") for w in value]
    assert weights
    for rows in (w.sum(-1) for w in weights):
        if family == "gpt_oss":  # the sinks take their share
            assert (rows < 1).all() and (rows > 0).all()
        else:
            torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "family", [f for f in CAUSAL if f != "gpt_oss"]
)  # it gives its masks no position_ids
def test_packed_sequences_do_not_see_each_other(family, name):
    model = model_of(family, name)
    ids = words(model.config)[:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = logits(model, input_ids=ids, position_ids=positions, use_cache=False)
    for part in (slice(0, 4), slice(4, 9)):
        alone = logits(model, input_ids=ids[:, part], use_cache=False)
        torch.testing.assert_close(packed[:, part], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ("llama", "gpt2", "mistral", "qwen3"))
def test_assisted_decoding_equals_greedy(family):
    model = model_of(family)
    torch.manual_seed(1)
    assistant = model_of(family, num_hidden_layers=1)
    inputs = {"input_ids": words(model.config)[:1]}
    assert torch.equal(generate(model, inputs, assistant_model=assistant), generate(model, inputs))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ("mistral", "gemma2", "gpt_oss"))
def test_a_sliding_window_cuts(family, name):
    """In one windowed layer, a token reaches the next three of a window of four, and no further."""
    model = model_of(family, name, sliding_window=4)
    layers, whole = model.model.layers, model.config.sliding_window
    windowed = next(
        i for i, layer in enumerate(layers) if getattr(layer.self_attn, "sliding_window", whole)
    )
    model.config.layer_types = (
        [model.config.layer_types[windowed]] if getattr(model.config, "layer_types", None) else None
    )
    model.config.num_hidden_layers = 1
    model.model.layers = layers[windowed : windowed + 1]
    ids = words(model.config)[:1]
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 90
    moved = (logits(model, input_ids=ids) - logits(model, input_ids=other)).abs().amax(-1)[0]
    assert (moved[:4] > 1e-3).all() and (
        moved[4:] < 1e-6
    ).all()  # experts sum in an order of their own


UNROUTED = ("bloom", "mpt", "deberta", "deberta-v2", "falcon", "gpt_neo", "gptj", "mamba", "resnet")


def one_line_refusal(family, call):
    """What `call` returns, or None where it refuses the family properly."""
    try:
        return call()
    except ValueError as error:
        assert repr(family) in str(error) and "\n" not in str(error)
        return None


@pytest.mark.parametrize("family", UNROUTED)
def test_no_family_is_silently_left_unchanged(family, tmp_path):
    """Served by `model_patches`, or refused by an error that names it; on every way in."""

    def set_later():
        model = model_of(family, None, hf.AutoModel)
        model.set_attn_implementation("cone")
        return model

    model_of(family, None, hf.AutoModel).save_pretrained(tmp_path)
    ways = (
        lambda: model_of(family, "cone", hf.AutoModel),
        lambda: hf.AutoModel.from_pretrained(tmp_path, attn_implementation="cone").eval(),
        set_later,
    )
    accepted = [model for way in ways if (model := one_line_refusal(family, way)) is not None]
    assert len(accepted) in (0, len(ways))
    stock = model_of(family, None, hf.AutoModel)
    for model in accepted:
        inputs = {"input_ids": words(model.config)}
        with counted("cone") as modules, torch.no_grad():
            out = model(**inputs)[0]
        assert modules and not torch.equal(out, stock(**inputs)[0])


PARTS = {"text_config": "cone", "vision_config": "eager"}


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize("ours, other", (("text", "vision"), ("vision", "text")))
def test_parts_of_a_composite_take_their_own_names(ours, other, late):
    name = {f"{ours}_config": "cone", f"{other}_config": "eager"}
    model = model_of("clip", "eager" if late else name)
    if late:
        model.set_attn_implementation(name)
    with counted("cone") as modules, torch.no_grad():
        out = model(**inputs_of("clip", model))
    assert out.logits_per_image.isfinite().all()
    part = set(map(id, getattr(model, f"{ours}_model").modules()))
    assert modules and all(id(m) in part for m in modules)


@pytest.mark.parametrize("way", ("late", "from_config", "from_pretrained"))
def test_a_part_that_cannot_be_served_is_refused_by_its_own_name(way, tmp_path):
    """A convnet inside a composite, asked for by name."""
    asked = {"backbone_config": "cone"}
    model = hf.AutoModel.from_config(tiny_config("detr"))
    model.save_pretrained(tmp_path)
    ways = {
        "late": lambda: model.set_attn_implementation(asked),
        "from_config": lambda: hf.AutoModel.from_config(
            tiny_config("detr"), attn_implementation=asked
        ),
        "from_pretrained": lambda: hf.AutoModel.from_pretrained(
            tmp_path, attn_implementation=asked
        ),
    }
    with pytest.raises(ValueError, match="'resnet'"):
        ways[way]()


def test_a_part_that_the_class_lacks_is_refused():
    asked = {"image_codebook_config": "cone"}
    with pytest.raises(
        ValueError,
        match=r"'(flava_image_codebook|FlavaImageCodebookConfig)' of FlavaModel, but no attention",
    ):
        hf.AutoModel.from_config(tiny_config("flava"), attn_implementation=asked)


def test_a_plain_name_passes_over_the_convnet_inside(tmp_path):
    model = hf.AutoModel.from_config(tiny_config("detr"), attn_implementation="cone")
    model.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path, attn_implementation={"": "cone"})
    assert again.config._attn_implementation == model.config._attn_implementation == "cone"
