"""Which layers and heads are patched, and that the others compute what they did."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import hf_hyperattn as ha
from tests.integration.models import FAMILIES, difference, llama, perturb, run, text_inputs
from tests.oracles import cone

CONE = ha.ConeConfig()
LAYERS = {
    "None": (None, [0, 1, 2, 3]),
    "all": ("all", [0, 1, 2, 3]),
    "list": ([0, 2], [0, 2]),
    "range": (range(1, 3), [1, 2]),
    "int": (2, [2]),
    "negative int": (-1, [3]),
    "negatives": ([-1, -4], [0, 3]),
    "both": ([1, -1], [1, 3]),
    "set": ({3, 0}, [0, 3]),
    "last-third": ("last-third", [2, 3]),
    "last-half": ("last-half", [2, 3]),
    "last-quarter": ("last-quarter", [3]),
    "first-third": ("first-third", [0, 1]),
    "first-1": ("first-1", [0]),
    "first-4": ("first-4", [0, 1, 2, 3]),
    "last-9": ("last-9", [0, 1, 2, 3]),
    "every-2nd": ("every-2nd", [1, 3]),
    "every-3rd": ("every-3rd", [2]),
    "every-1st": ("every-1st", [0, 1, 2, 3]),
    "function": (lambda host: host.layer_index != 1, [0, 2, 3]),
    "numpy": (np.array([1, 2]), [1, 2]),
    "twice": ([1, 1], [1]),
}


def patched(model) -> list[str]:
    return [host["name"] for host in ha.describe(model)["hosts"] if host["mechanisms"]]


@pytest.mark.parametrize("case", LAYERS)
def test_layers(case):
    layers, expected = LAYERS[case]
    model = ha.patch_model(llama(), CONE, layers=layers)
    assert patched(model) == [f"model.layers.{i}.self_attn" for i in expected]
    assert model.config.hyperattn["hosts"] == patched(model)


def test_numbers_count_within_each_stack():
    model = FAMILIES["bart"][0]()
    assert patched(ha.patch_model(model, CONE, layers=-1)) == [
        "model.encoder.layers.1.self_attn",
        "model.decoder.layers.1.self_attn",
    ]


def test_a_number_that_only_one_stack_has():
    model = FAMILIES["clip"][0]()  # four text layers, two vision layers
    assert patched(ha.patch_model(model, CONE, layers=[3])) == [
        "text_model.encoder.layers.3.self_attn"
    ]


def test_a_function_sees_what_is_known_of_a_host():
    seen = []
    ha.patch_model(
        FAMILIES["bart"][0](),
        CONE,
        include_cross_attention=True,
        layers=lambda h: not seen.append(h),
    )
    facts = {
        (h.name.split(".", 1)[1], h.heads, h.is_causal, h.is_cross, h.layer_index) for h in seen
    }
    assert ("decoder.layers.1.self_attn", 4, True, False, 1) in facts
    assert ("decoder.layers.0.encoder_attn", 4, False, True, 0) in facts
    assert ("encoder.layers.0.self_attn", 4, False, False, 0) in facts


@pytest.mark.parametrize(
    "family, cross",
    [("bart", "encoder_attn"), ("t5", "EncDecAttention"), ("whisper", "encoder_attn")],
)
def test_cross_attention_is_patched_where_it_is_asked_for(family, cross):
    make, inputs = FAMILIES[family][0], FAMILIES[family][1]()
    model = make()
    ha.patch_model(model, CONE)
    assert not any(cross in name for name in patched(model))
    without = ha.unpatch_model(model)
    before = run(without, inputs)
    ha.patch_model(model, CONE, include_cross_attention=True, layers=lambda host: host.is_cross)
    assert patched(model) and all(cross in name for name in patched(model))
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    assert difference(before, run(model, inputs)) > 0


HEADS = {
    "list": ([0, 3], [0, 3]),
    "range": (range(1, 3), [1, 2]),
    "int": (2, [2]),
    "negative": (-1, [3]),
    "first-half": ("first-half", [0, 1]),
    "last-quarter": ("last-quarter", [3]),
    "every-2nd": ("every-2nd", [1, 3]),
    "function": (lambda head: head > 0, [1, 2, 3]),
}


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("case", HEADS)
def test_heads(case, mode, tmp_path):
    """Against attention computed head by head: float64 cone scores for the chosen ones, products for the others."""
    heads, expected = HEADS[case]
    model, inputs = llama(), text_inputs()
    ha.patch_model(model, CONE, heads=heads, mode=mode)
    perturb(model)
    found = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(found, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    assert difference(by_hand(model, inputs, expected, mode), found) <= 2e-5


def by_hand(model, inputs, heads, mode):
    added = {name: p for name, p in model.named_parameters() if ".hyper." in name}
    numbers = [
        {
            key: added[f"model.layers.{i}.self_attn.hyper.cone.{key}"]
            for key in ("gate", "log_gamma", "log_radius")
            if f"model.layers.{i}.self_attn.hyper.cone.{key}" in added
        }
        for i in range(4)
    ]

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        own = {
            k: p.double().exp().numpy() for k, p in numbers[module.layer_idx].items() if k != "gate"
        }
        gate = numbers[module.layer_idx].get("gate", torch.ones(4)).double()[:, None, None]
        scores = cone.scores(
            query,
            key,
            variant="umbral",
            mapping="xi",
            gamma=own["log_gamma"],
            radius=own["log_radius"],
        )
        logits = query.double() @ key.double().repeat_interleave(2, 1).mT * scaling
        mixed = (gate * torch.from_numpy(scores)) + (logits if mode == "blend" else 0)
        logits[:, heads] = mixed[:, heads]
        weights = logits.masked_fill(~attention_mask, -torch.inf).softmax(-1).nan_to_num()
        return (weights @ value.double().repeat_interleave(2, 1)).transpose(1, 2).to(
            query.dtype
        ), None

    AttentionInterface.register("by_hand", attend)
    AttentionMaskInterface.register("by_hand", sdpa_mask)
    twin = llama()
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if ".hyper." not in k})
    twin.set_attn_implementation("by_hand")
    return run(twin, inputs)


def test_heads_by_name_follow_the_number_of_heads_of_each_host():
    model = llama_and_small_vision()
    ha.patch_model(model, CONE, heads="first-half", mode="replace")
    hosts = {n.split(".")[1]: m for n, m in model.named_modules() if n.endswith("0.self_attn")}
    assert hosts["language_model"].hyper.cone.heads == (0, 1)
    assert hosts["vision_tower"].hyper.cone.heads == (0,)


def test_a_function_of_heads_that_means_different_things_is_refused():
    with pytest.raises(ValueError, match="chooses other heads in hosts with more of them"):
        ha.patch_model(llama_and_small_vision(), CONE, heads=lambda head: head >= 1)


def llama_and_small_vision():
    import transformers as hf

    from tests.integration.models import TEXT, VISION

    text, vision = (
        hf.LlamaConfig(**TEXT),
        hf.CLIPVisionConfig(**VISION | dict(num_attention_heads=2)),
    )
    config = hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=98)
    return hf.LlavaForConditionalGeneration(config)


def test_layers_that_are_not_chosen_run_what_they_ran():
    model, inputs = llama(), text_inputs()
    model.set_attn_implementation("eager")
    before = model(**inputs, output_hidden_states=True).hidden_states
    ha.patch_model(model, CONE, layers=[2], mode="replace")
    after = model(**inputs, output_hidden_states=True).hidden_states
    mask = inputs["attention_mask"].bool()
    assert all(torch.equal(a[mask], b[mask]) for a, b in zip(before[:3], after[:3], strict=True))
    assert not torch.equal(before[3][mask], after[3][mask])
