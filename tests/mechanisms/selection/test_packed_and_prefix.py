"""Mechanisms in models whose masks hide more than padding: packed texts, prefix language models, chunked attention."""

import copy

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.rules import Window
from tests.integration.models import TEXT, VISION, bert, llama, perturb
from tests.oracles.cases import assert_close

OPEN = dict(near=0, sinks=1, refine_top_k=0)
MECHANISMS = {
    "cone": ha.ConeConfig(),
    "hype": ha.HypeConfig(max_length=64),
    "hsa": ha.HsaConfig(windows=(2, 4), tying="key", **OPEN),
    "hsa refined": ha.HsaConfig(windows=(2, 4), tying="key", near=1, sinks=0, refine_top_k=1),
    "trilinear": ha.TrilinearConfig(windows=(4, 3)),
    "mkl": ha.MklConfig(kind="conditional"),
    "window": ha.SparseConfig(Window(near=3, sinks=0)),
    "sinks": ha.SparseConfig(Window(near=3, sinks=1)),
}
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)
LENGTHS = (7, 1, 6)


def patched(model, mechanism, layers=None):
    """The model with large weights, so that ties show, and added parameters away from where they start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "vision" not in name:
                weight.mul_(8)
    ha.patch_model(model, MECHANISMS[mechanism], mode="replace", layers=layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def tokens(rows, length):
    return torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(1))


def block_diagonal(lengths, causal=True):
    """Bool [1, 1, N, N] of one row that holds texts of these lengths."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = number[:, None] == number
    return (same.tril() if causal else same)[None, None]


def additive(mask, number, dtype=torch.float64):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, number)


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


FORMS = {
    "position_ids": lambda: {"position_ids": positions(LENGTHS), "use_cache": False},
    "bool": lambda: {"attention_mask": block_diagonal(LENGTHS), "position_ids": positions(LENGTHS)},
    "-1e4": lambda: {
        "attention_mask": additive(block_diagonal(LENGTHS), -1e4),
        "position_ids": positions(LENGTHS),
    },
}


@pytest.mark.parametrize("name", ["cone", "hype", "hsa"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_packed_texts_by_name(name, form):
    torch.manual_seed(0)
    model, ids = llama(num_hidden_layers=2).double(), tokens(1, sum(LENGTHS))
    model.config.hyperattn = ha.HyperAttnConfig([MECHANISMS[name]], mode="replace").to_dict()
    model.set_attn_implementation(name)
    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    assert_close(model(ids, **FORMS[form]()).logits, alone, 1e-6, "packed against alone")


@torch.no_grad()
def test_packed_texts_of_an_encoder():
    torch.manual_seed(0)
    model, ids = patched(bert(num_hidden_layers=2), "hsa"), tokens(1, sum(LENGTHS))
    alone = torch.cat([model(part).last_hidden_state for part in ids.split(LENGTHS, 1)], 1)
    mask = block_diagonal(LENGTHS, causal=False)
    packed = model(ids, attention_mask=mask, position_ids=positions(LENGTHS)).last_hidden_state
    assert_close(packed, alone, 1e-6, "packed against alone")


@torch.no_grad()
def test_packed_texts_with_a_cache_are_refused_by_hsa():
    """The second call begins a text, and nobody says where those in the cache begin."""
    model, ids = patched(llama(num_hidden_layers=2), "hsa"), tokens(1, sum(LENGTHS))
    mask, cache = block_diagonal(LENGTHS), hf.DynamicCache()
    model(ids[:, :6], attention_mask=mask[:, :, :6, :6], past_key_values=cache)
    with pytest.raises(
        ValueError, match="packs several texts into one row, whose earlier keys come from a cache"
    ):
        model(ids[:, 6:], attention_mask=mask[:, :, 6:], past_key_values=cache)


@torch.no_grad()
def test_chunked_attention_is_no_packing():
    """Windows begin with the row, as they do in decoding, where nobody sees where a chunk begins."""
    torch.manual_seed(0)
    config = hf.Llama4TextConfig(
        **TEXT | dict(num_hidden_layers=2),
        num_key_value_heads=2,
        head_dim=8,
        attention_chunk_size=6,
        num_local_experts=1,
        intermediate_size_mlp=48,
        layer_types=["chunked_attention", "full_attention"],
    )
    model = patched(hf.Llama4ForCausalLM(config).eval(), "hsa")
    ids, cache, steps = tokens(1, 16), hf.DynamicCache(), []
    for part in ids.split(1, 1):
        steps.append(model(part, past_key_values=cache).logits)
    assert_close(
        torch.cat(steps, 1), model(ids, use_cache=False).logits, 1e-6, "cached against whole"
    )


# Prefix language models.


def paligemma():
    text = dict(TEXT, model_type="gemma", num_key_value_heads=2, head_dim=8, num_hidden_layers=2)
    vision = dict(VISION, model_type="siglip_vision_model", vision_use_head=False)
    sizes = dict(image_token_index=98, vocab_size=99, projection_dim=32, hidden_size=32)
    config = hf.PaliGemmaConfig(vision_config=vision, text_config=text, **sizes)
    return hf.PaliGemmaForConditionalGeneration(config).eval()


def prompt(left):
    """A prompt of an image and a text, with so much padding at the left of row 0."""
    ids = tokens(2, 15)
    ids[:, left : left + 4] = 98
    mask = torch.ones_like(ids)
    mask[0, :left], ids[0, :left] = 0, 0
    if left:
        ids[1, :left] = 7
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2)).double()
    return dict(
        input_ids=ids, attention_mask=mask, pixel_values=image, token_type_ids=torch.zeros_like(ids)
    )


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m not in ("window", "sinks")])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("left", [0, 3])
@torch.no_grad()
def test_a_prefix_model_generates_what_its_full_pass_gives(mechanism, left, cache):
    torch.manual_seed(0)
    model = patched(paligemma(), mechanism, layers=lambda host: "language" in host.name)
    inputs = prompt(left)
    out = model.generate(
        **inputs,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        suppress_tokens=[98],
        cache_implementation=cache,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = out.sequences.shape[1] - 15
    whole = dict(
        inputs,
        input_ids=out.sequences,
        attention_mask=torch.nn.functional.pad(inputs["attention_mask"], (0, new), value=1),
        token_type_ids=torch.nn.functional.pad(inputs["token_type_ids"], (0, new), value=1),
    )
    position_ids = (whole["attention_mask"].cumsum(1)).clamp_min(1)
    full = model(**whole, position_ids=position_ids, use_cache=False).logits[:, 14:-1]
    assert_close(torch.stack(out.logits, 1), full, 1e-6, "generated against the full pass")


@pytest.mark.parametrize("mode", ["replace", "blend"])
@pytest.mark.parametrize("tying", [None, "key"])
@torch.no_grad()
def test_a_prefix_model_is_saved_and_loaded(tying, mode, tmp_path):
    """With tying=None, too, which means "key" where a prefix LM generates and "both" in an encoder."""
    torch.manual_seed(0)
    model = ha.patch_model(paligemma(), ha.HsaConfig((2, 4), tying=tying), mode=mode)
    perturb(model)
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    inputs = prompt(3)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    assert torch.equal(model(**inputs).logits, again.eval()(**inputs).logits)


@pytest.mark.parametrize("whole", [True, False], ids=["loaded as a part", "loaded as a whole"])
def test_a_prefix_model_of_another_class_is_refused(whole, tmp_path):
    """What generates with key tying has a parameter that the encoder without a head lacks."""
    model = ha.patch_model(
        paligemma() if whole else paligemma().model, ha.HsaConfig((2, 4)), mode="replace"
    )
    model.save_pretrained(tmp_path)
    other = hf.PaliGemmaModel if whole else hf.PaliGemmaForConditionalGeneration
    with pytest.raises(
        ValueError, match=f"load it as {type(model).__name__}, the class that was saved"
    ) as caught:
        other.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_sparse_refuses_a_prefix_model_when_it_is_patched():
    with pytest.raises(ValueError, match="of a prefix LM, where a prompt sees the tokens after it"):
        ha.patch_model(
            paligemma(), MECHANISMS["window"], layers=lambda host: "language" in host.name
        )


@pytest.mark.parametrize("mechanism", ["hype", "hsa", "trilinear", "mkl"])
@torch.no_grad()
def test_a_prefix_model_of_which_a_part_is_patched_refuses_a_cache(mechanism):
    """The part does not generate by itself, so that nothing tells its layers from those of an encoder."""
    model = paligemma()
    patched(model.model.language_model, mechanism)
    with pytest.raises(
        ValueError, match="cannot tell which of .* not causal; allowed: .* without a cache"
    ) as caught:
        model.double().generate(**prompt(0), max_new_tokens=3)
    assert "\n" not in str(caught.value)


@every_mechanism
@torch.no_grad()
def test_images_that_see_themselves_whole(mechanism):
    """Gemma 3: causal, but for the tokens of an image, which see each other."""
    if mechanism == "sinks":
        pytest.skip("the same rule as window here")
    torch.manual_seed(0)
    text = dict(
        TEXT, num_key_value_heads=2, head_dim=8, num_hidden_layers=2, query_pre_attn_scalar=8
    )
    vision = dict(VISION, vision_use_head=False)
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(
            **text, sliding_window=32, layer_types=["full_attention"] * 2
        ),
        vision_config=hf.SiglipVisionConfig(**vision),
        image_token_id=98,
        mm_tokens_per_image=4,
    )
    model = patched(
        hf.Gemma3ForConditionalGeneration(config).eval(),
        mechanism,
        lambda host: "language" in host.name,
    )
    inputs = prompt(3)
    inputs["token_type_ids"] = (inputs["input_ids"] == 98).long()
    out = model.generate(
        **inputs,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        suppress_tokens=[98],
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = out.sequences.shape[1] - 15
    whole = dict(inputs, input_ids=out.sequences)
    for name, value in (("attention_mask", 1), ("token_type_ids", 0)):
        whole[name] = torch.nn.functional.pad(inputs[name], (0, new), value=value)
    position_ids = (whole["attention_mask"].cumsum(1) - 1).clamp_min(0)
    full = model(**whole, position_ids=position_ids, use_cache=False).logits[:, 14:-1]
    assert_close(torch.stack(out.logits, 1), full, 1e-6, "generated against the full pass")


@pytest.mark.parametrize(
    "config",
    [ha.HsaConfig(windows=(4,)), ha.HsaConfig(windows=(4,), tying="both")],
    ids=["default", "both"],
)
def test_a_causal_model_that_was_made_bidirectional_is_an_encoder(config):
    """With a head that could generate and without one, as LLM2Vec and masked diffusion have them."""
    whole = llama()
    whole.config.is_causal = False
    for layer in whole.model.layers:
        layer.self_attn.is_causal = False
    bare = copy.deepcopy(whole.model)
    for model in (whole, bare):
        ha.patch_model(model, config, mode="replace")
    ids = tokens(1, 24)
    with torch.no_grad():
        expected = bare(ids, use_cache=False).last_hidden_state
        found = whole(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("start", [8, 9])
def test_packed_texts_in_the_full_layers_of_a_model_with_chunks(start):
    """A text may begin at a multiple of the chunk size, which only chunked layers know."""
    sizes = {k: v for k, v in TEXT.items() if k != "num_hidden_layers"}
    model = hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **sizes,
            num_hidden_layers=2,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size_mlp=48,
            attention_chunk_size=8,
            layer_types=["full_attention"] * 2,
            no_rope_layers=[0, 0],
            attn_temperature_tuning=False,
            num_local_experts=2,
        )
    ).eval()
    ha.patch_model(
        model, ha.HsaConfig(windows=(3,), near=1, sinks=0, refine_top_k=0), mode="replace"
    )
    ids = tokens(1, 20)
    number = torch.arange(20) >= start
    seen = torch.ones(20, 20, dtype=torch.bool).tril() & (number[:, None] == number)
    with torch.no_grad():
        packed = model(ids, attention_mask=seen[None, None], use_cache=False).logits[:, start:]
        alone = model(ids[:, start:], use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
