"""Names of attention implementations: what runs beneath a patch, what a checkpoint remembers, what a loader may ask."""

import copy
import json
import logging

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.hosts import find_hosts
from hf_hyperattn.integration.patching.checkpoint_config import list_configs
from tests.integration.models import TEXT, State, clip, difference, llama, perturb, run, text_inputs
from tests.integration.patches import CONE, make, patched

# Beneath a patch


@pytest.mark.parametrize("family", ["llama", "clip", "t5", "gpt_oss"])
def test_another_implementation_runs_beneath_and_the_mechanism_stays(family, tmp_path):
    model, inputs, expected = patched(family)
    model.set_attn_implementation("eager")
    assert difference(expected, run(model, inputs)) <= 1e-5
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert difference(run(model, inputs), run(again, inputs)) == 0
    again.set_attn_implementation("hf_hyperattn")  # it runs already
    assert difference(run(model, inputs), run(again, inputs)) == 0
    assert {m.config._attn_implementation for _, m in find_hosts(ha.unpatch_model(again))} == {
        "eager"
    }


@pytest.mark.parametrize("name", ["cone", "flex_attention", "flash_attention_2", "nonsense"])
def test_a_name_that_cannot_run_beneath_is_refused(name, tmp_path):
    model, _, _ = patched("llama")
    model.save_pretrained(tmp_path)
    state = State(model)
    for ask in (
        lambda: model.set_attn_implementation(name),
        lambda: type(model).from_pretrained(tmp_path, attn_implementation=name),
    ):
        with pytest.raises((ValueError, ImportError)) as refused:
            ask()
    if name in ("cone", "flex_attention"):
        assert f"attn_implementation={name!r} cannot run beneath" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert state.differences(State(model)) == []


def test_one_part_of_a_composite():
    model = ha.patch_model(clip(), CONE)
    model.set_attn_implementation({"text_config": "eager"})
    text, vision = model.config.text_config, model.config.vision_config
    assert (text.hyperattn_stock, vision.hyperattn_stock) == ("eager", "sdpa")
    assert text._attn_implementation == vision._attn_implementation == "hf_hyperattn"


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_loader_chooses_what_runs_beneath(name, tmp_path):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert again.config.hyperattn_stock == name
    assert difference(expected, run(again, inputs)) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "llava", "t5"])
def test_a_name_written_into_the_config_runs_beneath_too(family, tmp_path):
    """As Transformers itself writes it: Whisper for timestamps per token, the attention visualizer."""
    model, inputs, expected = patched(family)
    model.config._attn_implementation = "eager"
    assert {
        c.hyperattn_stock for c in list_configs(model.config) if hasattr(c, "hyperattn_stock")
    } == {"eager"}
    assert 0 < difference(run(ha.unpatch_model(copy.deepcopy(model)), inputs), expected)
    assert difference(run(model, inputs), expected) <= 1e-5
    names = [c._attn_implementation for c in list_configs(model.config)]
    with pytest.raises(ValueError, match="'cone' cannot run beneath"):
        model.config._attn_implementation = "cone"
    assert [c._attn_implementation for c in list_configs(model.config)] == names
    model.save_pretrained(tmp_path)
    assert (
        difference(run(model, inputs), run(type(model).from_pretrained(tmp_path), inputs)) <= 1e-5
    )


def test_timestamps_of_a_patched_whisper_hear_the_mechanism(monkeypatch):
    model, inputs, _ = patched("whisper")
    model.generation_config.alignment_heads = [[0, 0]]
    model.generation_config.no_timestamps_token_id = 90
    calls = []
    hyper = model.model.decoder.layers[0].self_attn.hyper
    hyper.register_forward_hook(lambda *_: calls.append(1))
    ask = dict(return_token_timestamps=True, return_timestamps=True, max_new_tokens=3)
    model.generate(inputs["input_features"], **ask)
    assert calls and model.config.hyperattn_stock == "eager"


# Attentions


def attentions(model, inputs) -> dict:
    output = model(**inputs, output_attentions=True)
    return {k: v for k, v in output.items() if k.endswith("attentions") and v is not None}


@pytest.mark.parametrize(
    "family", ["llama", "gpt_oss", "bart", "t5", "whisper", "falcon", "bloom", "mpt", "mpnet"]
)
def test_there_is_one_entry_for_every_layer(family):
    """Equal to those of the stock model under "eager" where the gates are 0, with and without gradients."""
    model, inputs = make(family)
    inputs.pop("attention_mask", None)  # rows of padding have no weights of a meaning
    twin = copy.deepcopy(model)
    eager = type(twin)._from_config(copy.deepcopy(twin.config), attn_implementation="eager").eval()
    eager.load_state_dict(twin.state_dict())
    expected = attentions(eager, inputs)
    ha.patch_model(model, CONE, layers=[1])
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = attentions(model, inputs)
        assert {k: len(v) for k, v in found.items()} == {k: len(v) for k, v in expected.items()}
        assert all(
            (a - b).abs().max() <= 1e-6
            for k in found
            for a, b in zip(found[k], expected[k], strict=True)
        )
    perturb(model)
    found = attentions(model, inputs)
    moved = [
        [(a - b).abs().max() > 1e-5 for a, b in zip(found[k], expected[k], strict=True)]
        for k in found
    ]
    assert any(layers[1] for layers in moved)
    first = next(k for k in found if k in ("attentions", "encoder_attentions"))
    assert torch.allclose(found[first][0], expected[first][0], atol=1e-6)


def test_generating_returns_them_for_every_layer_and_step():
    model, inputs, _ = patched("bart", layers=[1])
    given = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    asked = dict(
        max_new_tokens=2, do_sample=False, output_attentions=True, return_dict_in_generate=True
    )
    found = model.generate(**given, **asked)
    assert len(found.encoder_attentions) == 2
    assert [len(step) for step in (*found.decoder_attentions, *found.cross_attentions)] == [2] * 4


@pytest.mark.parametrize("name", ["hf_hyperattn", "cone"])
def test_a_config_may_ask_for_them_for_good(name, tmp_path):
    model, inputs = make("llama")
    if name == "hf_hyperattn":
        ha.patch_model(model, CONE, layers=[1])
    else:
        model.set_attn_implementation(name)
    model.config.output_attentions = True
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert len(again(**inputs).attentions) == 4
    again.config.output_attentions = False
    with pytest.raises(
        Exception, match="Please set it to 'eager'"
    ):  # what Transformers asks of its own names stays
        hf.LlamaConfig(attn_implementation="sdpa", output_attentions=True)


# What a checkpoint remembers


@pytest.mark.parametrize("family", ["llama", "t5", "bloom"])
def test_a_name_is_part_of_the_checkpoint(family, tmp_path):
    model, inputs = make(family)
    model.save_pretrained(tmp_path / "1")
    model = type(model).from_pretrained(tmp_path / "1", attn_implementation="cone")
    expected = run(model, inputs)
    model.save_pretrained(tmp_path / "2")
    again = type(model).from_pretrained(tmp_path / "2")
    assert difference(expected, run(again, inputs)) == 0
    again.save_pretrained(tmp_path / "3")
    config = hf.AutoConfig.from_pretrained(tmp_path / "3")
    config.save_pretrained(tmp_path / "4")
    for other in (
        config,
        hf.AutoConfig.from_pretrained(tmp_path / "4"),
        type(config)(**config.to_dict()),
    ):
        assert hf.AutoModel.from_config(copy.deepcopy(other)).config._attn_implementation == "cone"


def test_parts_of_a_composite_are_remembered(tmp_path):
    model = clip()
    model.set_attn_implementation({"text_config": "cone"})
    model.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path)
    names = [c._attn_implementation for c in (again.config.text_config, again.config.vision_config)]
    assert names == ["cone", "sdpa"]
    assert hf.CLIPTextModel.from_pretrained(tmp_path).config._attn_implementation == "cone"
    assert hf.CLIPVisionModel.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("way", ["auto", "class", "config", "from_config", "set", "written"])
def test_a_name_over_a_name_replaces_it_with_one_warning(way, tmp_path, caplog):
    model = llama()
    model.set_attn_implementation("cone")
    model.save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    load, sdpa = hf.AutoModelForCausalLM.from_pretrained, dict(attn_implementation="sdpa")
    ways = {
        "auto": lambda: load(tmp_path, **sdpa),
        "class": lambda: hf.LlamaForCausalLM.from_pretrained(tmp_path, **sdpa),
        "config": lambda: load(tmp_path, config=config, **sdpa),
        "from_config": lambda: hf.AutoModelForCausalLM.from_config(config, **sdpa),
        "written": lambda: setattr(model.config, "_attn_implementation", "sdpa") or model,
        "set": lambda: model.set_attn_implementation("sdpa") or model,
    }
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        found = ways[way]()
    said = [r.getMessage() for r in caplog.records if r.name == "hf_hyperattn"]
    assert len(said) == 1 and "attn_implementation='cone' runs 'sdpa' as asked" in said[0]
    assert found.config._attn_implementation == "sdpa"
    found.save_pretrained(tmp_path)
    caplog.clear()
    assert load(tmp_path).config._attn_implementation == "sdpa" and not caplog.records


def test_parameters_by_name_are_kept(tmp_path):
    model, inputs = llama(), text_inputs()
    model.config.hyperattn = ha.HyperAttnConfig([ha.ConeConfig(gamma=0.3)]).to_dict()
    model.set_attn_implementation("cone")
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert difference(run(model, inputs), run(again, inputs)) == 0
    assert again.config.hyperattn["mechanisms"][0]["gamma"] == 0.3


def test_parameters_by_name_without_their_name_are_told_of(tmp_path, caplog):
    """What versions before 0.2 saved: they lost the name."""
    model = llama()
    model.config.hyperattn = ha.HyperAttnConfig([ha.ConeConfig(gamma=0.3)]).to_dict()
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        model.save_pretrained(tmp_path)
        assert (
            "LlamaForCausalLM holds parameters of 'cone', and the model runs 'sdpa'" in caplog.text
        )
        caplog.clear()
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="cone")
        assert not caplog.text
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "holds parameters of 'cone', and the model runs 'sdpa'" in caplog.text


def test_a_part_whose_name_the_config_cannot_say_is_warned_of(tmp_path, caplog):
    """T5's encoder runs on a copy of the config, which no config.json has."""
    model, _ = make("t5")
    model.encoder.set_attn_implementation("cone")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        model.save_pretrained(tmp_path)
    assert "a part of T5ForConditionalGeneration runs attn_implementation='cone'" in caplog.text


@pytest.mark.slow
def test_parameters_by_name_in_a_compiled_model():
    model, inputs = llama(), text_inputs()
    compiled, found = torch.compile(model, backend="eager", fullgraph=True), []
    for windows in ((2, 4), (3, 6)):  # what changes later is noticed
        hsa = ha.HsaConfig(windows=windows, near=1, sinks=0, refine_top_k=1)
        model.config.hyperattn = ha.HyperAttnConfig([hsa]).to_dict()
        model.set_attn_implementation("hsa")
        found.append(run(compiled, inputs))
        assert difference(found[-1], run(model, inputs)) <= 1e-6
    assert difference(*found) > 1e-5


@pytest.mark.parametrize("options", [{}, {"output_attentions": True}])
def test_a_float64_model_with_padding_over_eager(options):
    """Families take the softmax in float32, where the smallest float64 of a mask would be -inf, and padding NaN."""
    model, inputs = ha.patch_model(llama(), CONE, layers=[1]), text_inputs()
    perturb(model)
    logits = lambda found: {"logits": found[".logits"]}
    expected = run(model, inputs)
    model.double().set_attn_implementation("eager")
    assert difference(logits(expected), logits(run(model, inputs | options))) <= 1e-4


def test_what_a_routed_class_does_not_know_cannot_run_beneath():
    """Falcon picks its class from the name: built for "eager", it could not be given back as "sdpa"."""
    config, inputs = hf.FalconConfig(**TEXT), text_inputs()
    model = hf.FalconForCausalLM._from_config(config, attn_implementation="eager").eval()
    ha.patch_model(model, CONE)
    perturb(model)
    expected = run(model, inputs)
    with pytest.raises(ValueError, match="'sdpa' cannot run beneath what FalconForCausalLM"):
        model.set_attn_implementation("sdpa")
    assert difference(expected, run(model, inputs)) == 0
    assert ha.unpatch_model(model).config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "names, other",
    [("cone", None), ("cone", "hype"), ({"text_config": "cone"}, {"vision_config": "cone"})],
    ids=str,
)
def test_an_adapter_records_the_names_of_its_base(names, other, tmp_path, caplog):
    def base(implementation):
        model = clip() if isinstance(names, dict) else llama()
        if implementation is not None:
            model.set_attn_implementation(implementation)
        return model

    get_peft_model(base(names), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        PeftModel.from_pretrained(base(names), tmp_path)
        assert not caplog.text
        PeftModel.from_pretrained(base(other), tmp_path)
    assert f"its base ran attn_implementation={names!r} and" in caplog.text


def test_an_adapter_records_the_parameters_of_its_base(tmp_path, caplog):
    model = llama()
    model.config.hyperattn = ha.HyperAttnConfig([ha.ConeConfig(gamma=0.3)]).to_dict()
    model.set_attn_implementation("cone")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    other = llama()
    other.set_attn_implementation("cone")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        PeftModel.from_pretrained(other, tmp_path)
    assert "its base ran 'cone' with config.hyperattn={" in caplog.text


def test_an_adapter_of_a_stock_model_beside_a_patched_one(tmp_path):
    """Both share a config object, which says that it is patched."""
    stock = llama()
    ha.patch_model(hf.LlamaForCausalLM(stock.config), CONE)
    get_peft_model(stock, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert "hf_hyperattn" not in json.loads((tmp_path / "adapter_config.json").read_text())
    assert not (tmp_path / "hyperattn_config.json").exists()


@pytest.mark.parametrize("config", ["cone", "hsa", "hsa both", "head_fusion", "mkl"])
def test_a_loss_has_a_gradient_by_every_layer_s_attentions(config):
    """As maps of attention times gradient want it; and asking for them changes nothing that comes out."""
    configs = {
        "cone": ha.ConeConfig(),
        "hsa": ha.HsaConfig(windows=(4,)),
        "hsa both": ha.HsaConfig(windows=(4,)),
        "head_fusion": ha.HeadFusionConfig(),
        "mkl": ha.MklConfig(),
    }
    model, inputs = make("bert" if config == "hsa both" else "llama")
    ha.patch_model(model, configs[config])
    perturb(model)
    output = model(**inputs, output_attentions=True)
    assert (output[0] - model(**inputs)[0]).abs().max() <= 1e-5
    gradients = torch.autograd.grad(output[0].square().sum(), output.attentions)
    assert len(gradients) == len(model.config.hyperattn["hosts"]) and all(
        g.abs().max() > 0 for g in gradients
    )
