"""Roads on which a mechanism was once lost without a word: each is equal now, refused, or warned of in one line."""

import copy
import logging

import accelerate
import peft
import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from tests.integration.models import difference, llama, run, text_inputs
from tests.integration.patches import make, patched

PLACELESS = (
    "holds 12 added tensors, such as 'model.layers.0.self_attn.hyper.cone.gate', that have no place"
)
NAMELESS = "ran attn_implementation='cone' and LlamaForCausalLM does not"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of checkpoints, in one file and in shards: patched, and by name."""
    top = tmp_path_factory.mktemp("saved")
    model = llama()
    model.set_attn_implementation("cone")
    for kind, one in (("patched", patched("llama")[0]), ("named", model)):
        one.save_pretrained(top / kind)
        one.save_pretrained(top / f"{kind} shards", max_shard_size="80KB")
    return top


@pytest.fixture
def warned(caplog):
    """Our warnings so far, each one line."""
    caplog.set_level(logging.WARNING, "hf_hyperattn")

    def messages():
        found = [r.getMessage() for r in caplog.records if r.name.startswith("hf_hyperattn")]
        assert not any("\n" in message for message in found)
        return found

    return messages


def resume(model, folder) -> None:
    """As `Trainer.train(resume_from_checkpoint=folder)` loads the weights."""
    arguments = hf.TrainingArguments(output_dir=str(folder / "out"), report_to=[], use_cpu=True)
    hf.Trainer(model=model, args=arguments)._load_from_checkpoint(str(folder))


LOADS = {
    "load_checkpoint_in_model": lambda m, f: accelerate.load_checkpoint_in_model(m, str(f)),
    "and a device map": lambda m, f: accelerate.utils.load_checkpoint_in_model(
        m, str(f), {"": "cpu"}
    ),
    "load_checkpoint_and_dispatch": lambda m, f: accelerate.load_checkpoint_and_dispatch(
        m, str(f), "auto"
    ),
    "Trainer": resume,
}


@pytest.mark.parametrize("form", ["", pytest.param(" shards", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "load", [pytest.param(n, marks=[pytest.mark.slow] * (" " in n)) for n in LOADS]
)
def test_weights_that_are_put_into_a_model_that_is_there(load, form, saved, warned):
    LOADS[load](llama(), saved / f"patched{form}")
    assert (
        len(warned()) == 1
        and PLACELESS in warned()[0]
        and str(saved / f"patched{form}") in warned()[0]
    )
    LOADS[load](llama(), saved / f"named{form}")
    assert len(warned()) == 2 and NAMELESS in warned()[1]
    same = {"patched": patched("llama")[0], "named": llama()}
    same["named"].set_attn_implementation("cone")
    for kind, model in same.items():
        LOADS[load](model, saved / f"{kind}{form}")
        expected = run(hf.AutoModelForCausalLM.from_pretrained(saved / kind), text_inputs())
        assert difference(expected, run(model, text_inputs())) == 0
    assert len(warned()) == 2


def test_a_stock_checkpoint_in_a_patched_model_and_another_patch(saved, warned, tmp_path):
    llama().save_pretrained(tmp_path / "stock", max_shard_size="80KB")
    LOADS["and a device map"](patched("llama")[0], tmp_path / "stock")
    assert (
        len(warned()) == 1
        and "lacks 12 added tensors of the patched LlamaForCausalLM" in warned()[0]
    )
    other = ha.patch_model(
        llama(), ha.ConeConfig(variant="penumbral", gamma=0.5, radius=2.0)
    )  # the same tensors
    LOADS["and a device map"](other, saved / "patched")
    assert (
        len(warned()) == 2
        and "had cone in 4 attention modules, and LlamaForCausalLM is patched o" in warned()[1]
    )
    with ha.fresh_patch():
        LOADS["load_checkpoint_in_model"](other, saved / "patched")
    assert len(warned()) == 2


def test_a_config_that_is_not_the_checkpoint_s(saved, warned):
    load = hf.AutoModelForCausalLM.from_pretrained
    load(saved / "named", config=hf.AutoConfig.from_pretrained(saved / "named"))
    load(saved / "named", config=copy.deepcopy(load(saved / "named").config))
    assert not warned()
    load(saved / "named", config=llama().config)
    assert len(warned()) == 1 and NAMELESS in warned()[0]
    with pytest.raises(ValueError, match="no record in its config"):
        load(saved / "patched", config=llama().config)


def test_an_adapter_s_state_dict(warned):
    model = patched("llama")[0]
    trained = peft.get_peft_model(model, ha.lora_config(model))
    state = peft.get_peft_model_state_dict(trained)
    peft.set_peft_model_state_dict(trained, state)
    lora = peft.LoraConfig(target_modules=["q_proj"])
    frozen = peft.get_peft_model(patched("llama")[0], copy.deepcopy(lora))
    before = len(warned())  # that an adapter leaves out what the patch added
    peft.set_peft_model_state_dict(frozen, peft.get_peft_model_state_dict(frozen))
    assert len(warned()) == before
    plain = peft.get_peft_model(llama(), lora)
    peft.set_peft_model_state_dict(plain, state)
    assert len(warned()) == before + 1 and "holds 12 added tensors" in warned()[-1]
    plain.load_state_dict(trained.state_dict(), strict=False)
    assert len(warned()) == before + 2 and "hyper" in warned()[-1]


def test_a_state_dict_that_no_load_would_take_is_not_saved(tmp_path):
    model, inputs, expected = patched("llama")
    state = model.state_dict()
    gate = "model.layers.0.self_attn.hyper.cone.gate"
    for wrong in (
        {n: t for n, t in state.items() if "hyper" not in n},
        {k: state[k] for k in state if k != gate},
    ):
        with pytest.raises(
            ValueError, match=r"lacks 'model.layers.0.*hyper.cone.gate', unlike LlamaForCausalLM"
        ):
            model.save_pretrained(tmp_path / "1", state_dict=wrong)
    with pytest.raises(
        ValueError, match=r"holds 'model.layers.0.*hyper.cone.gate', unlike LlamaForCausalLM"
    ):
        llama().save_pretrained(tmp_path / "1", state_dict=state)
    assert not (tmp_path / "1").exists()
    model.save_pretrained(
        tmp_path / "1", state_dict={}
    )  # as the Trainer does under ZeRO: weights come otherwise
    model.save_pretrained(tmp_path / "1", state_dict=state)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "1")
    assert difference(expected, run(again, inputs)) == 0


@pytest.mark.parametrize("family", ["bloom", "falcon", "gptj", "t5", "bart", "llama"])
def test_a_name_on_the_config_of_a_live_model_takes_effect(family, warned):
    """Served families swap a class, which only loading and `set_attn_implementation` did; T5 runs on copies."""
    model, inputs = make(family)
    stock = run(model, inputs)
    model, other = copy.deepcopy(model), copy.deepcopy(model)
    other.set_attn_implementation("cone")
    expected = run(other, inputs)
    assert difference(stock, expected) > 1e-5
    model.config._attn_implementation = "cone"
    assert difference(expected, run(model, inputs)) == 0 and not warned()
    model.config._attn_implementation = "sdpa"
    assert difference(stock, run(model, inputs)) <= 1e-6 and len(warned()) == 1


@pytest.mark.parametrize("family", ["falcon", "llama"])
def test_a_model_made_from_the_config_of_another_leaves_that_as_it_is(family):
    model, inputs = make(family)
    expected = run(model, inputs)
    other = type(model)._from_config(model.config, attn_implementation="cone")
    assert (
        difference(expected, run(model, inputs)) == 0
        and other.config._attn_implementation == "cone"
    )
    sharing = type(model)(model.config).eval()
    sharing.load_state_dict(model.state_dict())
    sharing.set_attn_implementation(
        "cone"
    )  # of both, as Transformers has it: they share one config
    assert difference(run(sharing, inputs), run(model, inputs)) == 0


def test_a_name_on_a_config_is_refused_where_the_model_cannot_run_it():
    model = hf.AutoModel.from_config(
        hf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)
    )
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="'cone' cannot be used with model type 'mamba'"):
        model.config._attn_implementation = "cone"
    assert model.config._attn_implementation == before


def test_numbers_of_a_name_that_change_from_model_to_model_in_one_compiled_process():
    """The compiler makes variables of numbers that differ from the last call's, and asks for constants here."""
    inputs, found = text_inputs(), []
    torch._dynamo.reset()
    model = llama(num_hidden_layers=1)
    for gamma in (0.5, 0.7):
        one = copy.deepcopy(model)
        one.config.hyperattn = ha.HyperAttnConfig([ha.ConeConfig(gamma=gamma)]).to_dict()
        one.set_attn_implementation("cone")
        found.append(run(torch.compile(one, backend="eager", fullgraph=True), inputs))
        assert difference(found[-1], run(one, inputs)) <= 1e-6
    assert difference(*found) > 1e-5


def test_a_state_dict_of_another_attention_with_the_same_tensors(warned, tmp_path):
    named, penumbral = llama(), ha.patch_model(llama(), ha.ConeConfig(variant="penumbral"))
    named.set_attn_implementation("cone")
    torch.save(named.state_dict(), tmp_path / "named.pt")
    state = torch.load(tmp_path / "named.pt")
    copy.deepcopy(named).load_state_dict(state)
    copy.deepcopy(penumbral).load_state_dict(penumbral.state_dict())
    llama().load_state_dict(llama().state_dict())
    assert not warned()
    llama().load_state_dict(state)
    assert len(warned()) == 1 and NAMELESS in warned()[0]
    hf.LlamaForCausalLM.from_pretrained(None, config=llama().config, state_dict=state)
    assert len(warned()) == 2 and NAMELESS in warned()[1]
    patched("llama")[0].load_state_dict(penumbral.state_dict())
    assert len(warned()) == 3 and "had cone in 4 attention modules" in warned()[2]


def test_parameters_by_name_that_nothing_reads(warned, tmp_path):
    model = llama()
    model.set_attn_implementation("cone")
    model.config.hyperattn = ha.HyperAttnConfig([ha.HypeConfig()]).to_dict()
    model.save_pretrained(tmp_path)
    assert (
        len(warned()) == 1
        and "holds parameters of 'hype', and the model runs 'cone'" in warned()[0]
    )
    model.config.hyperattn = ha.HyperAttnConfig([ha.ConeConfig()])
    with pytest.raises(ValueError, match="config.hyperattn is a HyperAttnConfig; allowed: a dict"):
        run(model, text_inputs())


def test_shards_of_every_rank_do_not_outlive_a_plain_save(tmp_path):
    """Loads prefer them."""
    shard = tmp_path / "shard-00001-model-00001-of-00002.safetensors"
    shard.write_bytes(b"of an older checkpoint")
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path)
    assert not shard.exists()
    assert difference(expected, run(hf.AutoModelForCausalLM.from_pretrained(tmp_path), inputs)) == 0


@pytest.mark.parametrize("kind", ["patched", "named"])
def test_a_quantised_load_is_checked_like_any_other(kind, saved, tmp_path):
    """The quantiser is a stand-in, so that only the way through it counts."""
    from safetensors.torch import load_file, save_file
    from transformers.quantizers import (
        HfQuantizer,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if "stand-in" not in AUTO_QUANTIZATION_CONFIG_MAPPING:

        @register_quantization_config("stand-in")
        class Config(QuantizationConfigMixin):
            def __init__(self, **_):
                self.quant_method = "stand-in"

        @register_quantizer("stand-in")
        class Quantizer(HfQuantizer):
            requires_calibration = False
            is_trainable = True

            def is_serializable(self, *args, **kwargs):
                return True

    options = dict(quantization_config=AUTO_QUANTIZATION_CONFIG_MAPPING["stand-in"]())
    load, inputs = hf.AutoModelForCausalLM.from_pretrained, text_inputs()
    expected, model = run(load(saved / kind), inputs), load(saved / kind, **options)
    assert difference(expected, run(model, inputs)) == 0
    model.save_pretrained(tmp_path / "1")
    assert difference(expected, run(load(tmp_path / "1"), inputs)) == 0
    if kind == "patched":
        file = tmp_path / "1" / "model.safetensors"
        save_file(
            {n: t for n, t in load_file(file).items() if "hyper" not in n}, file, {"format": "pt"}
        )
        with pytest.raises(ValueError, match="lacks 12 of the 12 added tensors"):
            load(tmp_path / "1")
