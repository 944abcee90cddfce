"""Patched models that lose layers, or gain some: what stock does with its weights is done with the patch."""

import copy
import logging

import peft
import pytest
import torch
import transformers as hf
from torch import nn

import hf_hyperattn as ha
from tests.integration.models import (
    bert,
    difference,
    llama,
    perturb,
    run,
    skip_without_native_adapters,
    text_inputs,
)

MECHANISMS = {
    "score": [ha.ConeConfig()],
    "reader": [ha.HypeConfig(), ha.HeadFusionConfig()],
    "hierarchy": [ha.HsaConfig(windows=(2, 4)), ha.MklConfig()],
    "sparse": [ha.SparseConfig()],
}


def delete_last(layers):
    del layers[3]
    return layers


def delete_middle(layers):
    del layers[1]
    return layers


CUTS = {
    "del": delete_last,
    "middle": delete_middle,
    "slice": lambda layers: layers[:2],
    "list": lambda layers: nn.ModuleList(layers[i] for i in (0, 3)),
    "twice": lambda layers: nn.ModuleList([*layers, copy.deepcopy(layers[3])]),
}


def cut(model, how: str):
    """Change a Llama's layers as a script does, with what Transformers needs to be told."""
    model.model.layers = CUTS[how](model.model.layers)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = None
    return model


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("mechanisms", MECHANISMS)
def test_layers_deleted_from_a_patched_model(mechanisms, how, tmp_path):
    """It is unpatched to what the stock model is after the same, and saved as it computes."""
    torch.manual_seed(0)
    model = llama()
    stock = cut(copy.deepcopy(model), how)
    ha.patch_model(model, *MECHANISMS[mechanisms])
    perturb(model)
    cut(model, how)
    expected, count = run(model, text_inputs()), len(model.model.layers)
    assert ha.describe(model)["patched"] == count
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert difference(run(loaded, text_inputs()), expected) == 0
    assert ha.describe(loaded)["patched"] == count
    for each in (model, loaded):
        ha.unpatch_model(each)
        assert difference(run(each, text_inputs()), run(stock, text_inputs())) == 0
        assert [type(module) for module in each.modules()] == [
            type(module) for module in stock.modules()
        ]
        assert each.state_dict().keys() == stock.state_dict().keys() and not hasattr(
            each.config, "hyperattn"
        )


def test_every_patched_layer_deleted(tmp_path):
    model = ha.patch_model(llama(), ha.ConeConfig(), layers=[2, 3])
    cut(model, "slice")
    assert ha.describe(model)["patched"] == 0
    model.save_pretrained(tmp_path)
    assert ha.describe(hf.AutoModelForCausalLM.from_pretrained(tmp_path))["patched"] == 0
    ha.unpatch_model(model)
    ha.patch_model(model, ha.ConeConfig())
    assert ha.describe(model)["patched"] == 2


@pytest.mark.parametrize("auto", [hf.AutoModelForCausalLM, hf.AutoModel], ids=["head", "bare"])
@pytest.mark.parametrize("layers", [None, [0, 3], [2, 3]], ids=str)
@pytest.mark.parametrize("mechanisms", MECHANISMS)
def test_a_checkpoint_loaded_with_fewer_layers(mechanisms, layers, auto, tmp_path, caplog):
    """As the patched model after its last layers were deleted."""
    model = ha.patch_model(llama(), *MECHANISMS[mechanisms], layers=layers)
    perturb(model)
    model.save_pretrained(tmp_path / "whole")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        short = auto.from_pretrained(tmp_path / "whole", num_hidden_layers=2)
    said = [r.getMessage() for r in caplog.records if r.name == "hf_hyperattn"]
    assert len(said) == 1 and "has fewer layers than the model that was patched" in said[0]
    assert said[0].endswith("model.layers.2.self_attn, model.layers.3.self_attn") or layers == [
        0,
        3,
    ]
    cut(model, "slice")
    expected = run(model if auto is hf.AutoModelForCausalLM else model.model, text_inputs())
    patched = len([i for i in (range(4) if layers is None else layers) if i < 2])
    short.save_pretrained(tmp_path / "short")
    caplog.clear()
    again = auto.from_pretrained(tmp_path / "short")
    assert not [r for r in caplog.records if r.name == "hf_hyperattn"]
    for each in (short, again):
        assert difference(run(each, text_inputs()), expected) == 0
        assert ha.describe(each)["patched"] == patched
    if not patched:
        assert (
            not hasattr(short.config, "hyperattn") and short.config._attn_implementation == "sdpa"
        )


def test_stacks_are_shortened_each_by_itself(tmp_path):
    sizes = dict(vocab_size=99, d_model=32, num_heads=4, d_ff=40, d_kv=8, decoder_start_token_id=0)
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(**sizes, num_layers=3, num_decoder_layers=3)
    ).eval()
    ha.patch_model(model, ha.ConeConfig())
    perturb(model)
    model.save_pretrained(tmp_path)
    short = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, num_decoder_layers=1)
    assert ha.describe(short)["patched"] == 4
    inputs = text_inputs() | dict(decoder_input_ids=text_inputs()["input_ids"][:, :7])
    del model.decoder.block[1:]
    assert difference(run(model, inputs), run(short, inputs)) == 0


def test_overrides_of_layers_that_are_left_out(tmp_path):
    names = [f"model.layers.{i}.self_attn" for i in range(4)]
    overrides = {names[1]: [ha.ConeConfig(gamma=0.5)], names[3]: [ha.ConeConfig(gamma=2.0)]}
    model = ha.patch_model(llama(), ha.HyperAttnConfig([ha.ConeConfig()], overrides=overrides))
    perturb(model)
    model.save_pretrained(tmp_path)
    for auto in (hf.AutoModelForCausalLM, hf.AutoModel):
        short = auto.from_pretrained(tmp_path, num_hidden_layers=2)
        assert list(short.config.hyperattn["overrides"]) == [
            names[1] if auto is hf.AutoModelForCausalLM else names[1].removeprefix("model.")
        ]
    cut(model, "middle")
    assert list(ha.describe(model)["hosts"][i]["name"] for i in range(3)) == names[:3]
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(loaded.config.hyperattn["overrides"]) == [names[2]]
    assert difference(run(loaded, text_inputs()), run(model, text_inputs())) == 0


def test_hosts_that_no_depth_explains_are_still_refused():
    config = ha.patch_model(llama(), ha.ConeConfig()).config
    config.hyperattn["hosts"][1] = "model.layers.1.attention"
    with pytest.raises(ValueError, match="names the host 'model.layers.1.attention'"):
        hf.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="names the host 'model.layers.9.self_attn'"):
        ha.patch_model(
            llama(), ha.HyperAttnConfig([ha.ConeConfig()], hosts=["model.layers.9.self_attn"])
        )


def test_a_conversion_loaded_with_fewer_layers(tmp_path):
    model = ha.convert(bert(), ha.CollaborativeConfig(rank=16))
    model.save_pretrained(tmp_path)
    short = hf.AutoModel.from_pretrained(tmp_path, num_hidden_layers=2)
    del model.encoder.layer[2:]
    assert difference(run(model, text_inputs()), run(short, text_inputs())) == 0


@pytest.mark.parametrize("r", [0, 4])
def test_an_adapter_on_a_base_with_fewer_layers(r, tmp_path, caplog):
    """As the adapter on the whole base, of which the last layers are deleted; and so it is saved again."""
    skip_without_native_adapters()
    torch.manual_seed(0)
    base = llama()
    short = cut(copy.deepcopy(base), "slice")
    lora = dict(target_modules=["q_proj"], init_lora_weights=False) if r else {}
    config = ha.HyperLoraConfig(mechanisms=[ha.ConeConfig(), ha.HeadFusionConfig()], r=r, **lora)
    model = peft.get_peft_model(base, config).eval()
    perturb(model)
    model.save_pretrained(tmp_path / "whole")
    cut(model.base_model.model, "slice")
    expected = run(model, text_inputs())
    model.save_pretrained(tmp_path / "short")
    said = [r.getMessage() for r in caplog.records if r.name == "hf_hyperattn"]
    assert (
        len(said) == 1 and "left out: model.layers.2.self_attn, model.layers.3.self_attn" in said[0]
    )
    for folder in ("whole", "short"):
        caplog.clear()
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(short), tmp_path / folder)
        native = copy.deepcopy(short)
        native.load_adapter(tmp_path / folder)
        for each in (loaded, native):
            assert difference(run(each, text_inputs()), expected) == 0
        said = [r.getMessage() for r in caplog.records if r.name == "hf_hyperattn"]
        assert len(said) == (2 if folder == "whole" else 0)
        loaded.save_pretrained(tmp_path / "again")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(short), tmp_path / "again")
        assert difference(run(again, text_inputs()), expected) == 0
    merged = loaded.merge_and_unload()
    assert difference(run(merged, text_inputs()), expected) < 1e-5
    ha.unpatch_model(merged)


@pytest.mark.parametrize("folder", ["whole", "short"])
def test_added_parameters_kept_whole_by_an_adapter(folder, tmp_path):
    """`modules_to_save` of a patched base, saved before and after its last layers were deleted."""
    model = ha.patch_model(llama(), ha.ConeConfig())
    short = ha.patch_model(cut(ha.unpatch_model(copy.deepcopy(model)), "slice"), ha.ConeConfig())
    tuned = peft.get_peft_model(model, ha.lora_config(model, r=2, target_modules=["q_proj"])).eval()
    perturb(tuned)
    tuned.save_pretrained(tmp_path / "whole")
    cut(model, "slice")
    tuned.save_pretrained(tmp_path / "short")
    loaded = peft.PeftModel.from_pretrained(short, tmp_path / folder)
    assert difference(run(loaded, text_inputs()), run(tuned, text_inputs())) == 0
