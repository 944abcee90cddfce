"""Adapters that carry their patch: `HyperLoraConfig`, by every loader, and what can be done with it afterwards."""

from __future__ import annotations

import subprocess
import sys
from operator import attrgetter

import peft.helpers
import pytest
import torch
import transformers as hf
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import hf_hyperattn as ha
from tests.forking import run_code
from tests.integration.lessons import LESSONS, logits
from tests.oracles.marks import native_adapters, native_or_not

MECHANISMS = {
    "cone": ha.ConeConfig(),
    "hype": ha.HypeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "head_fusion": ha.HeadFusionConfig(),
    "hsa": ha.HsaConfig(windows=(4, 8)),
}
AUTO = {
    "llama": hf.AutoModelForCausalLM,
    "gpt2": hf.AutoModelForCausalLM,
    "bert": hf.AutoModelForMaskedLM,
}
TASKS = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "bert": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of stock models, by family."""
    found = {}
    for name in AUTO:
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        LESSONS[name][0]().save_pretrained(found[name])
    return found


@pytest.fixture
def stock(folders):
    return lambda family="llama": AUTO[family].from_pretrained(folders[family])


def said(model, family: str = "llama") -> torch.Tensor:
    return logits(model, {k: v for k, v in LESSONS[family][1]().items() if k != "labels"})


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def config(*names: str, **options) -> ha.HyperLoraConfig:
    mechanisms = [MECHANISMS[name] for name in names]
    return ha.HyperLoraConfig(**dict(mechanisms=mechanisms, r=4, task_type="CAUSAL_LM") | options)


def train(model, family: str = "llama", seed: int = 0):
    """Two large steps, so that what is lost shows, and parameters behind gates move too."""
    torch.manual_seed(seed)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in n for n in trained)
    optimizer = torch.optim.Adam(trained.values(), lr=0.05)
    for _ in range(2):
        model.eval()(**LESSONS[family][1]()).loss.backward()
        assert not [n for n, p in trained.items() if p.grad is None]
        optimizer.step()
        optimizer.zero_grad()
    return model


def adapted(model, *names: str, family: str = "llama", **options) -> PeftModel:
    return train(
        get_peft_model(model, config(*names, **{"task_type": TASKS[family]} | options)), family
    )


def hypers(model) -> list[str]:
    return [name for name, _ in model.named_modules() if "hyper" in name.split(".")]


# One adapter


@pytest.mark.parametrize("family", AUTO)
@pytest.mark.parametrize("name", MECHANISMS)
def test_from_a_stock_model_to_the_merged_one(name, family, stock, tmp_path):
    original = said(stock(family), family)
    model = get_peft_model(stock(family), config(name, layers="last-half", task_type=TASKS[family]))
    assert torch.equal(said(model, family), original)
    trained = said(train(model, family), family)
    assert gap(trained, original) > 1e-3
    with model.disable_adapter():
        assert torch.equal(said(model, family), original)
    assert torch.equal(said(model, family), trained)
    model.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(f".hyper.lora_hyper.{name}." in n for n in names) and not any(
        "default" in n for n in names
    )

    loaded = PeftModel.from_pretrained(stock(family), tmp_path / "adapter")
    assert gap(said(loaded, family), trained) <= 1e-6 and not any(
        p.requires_grad for p in loaded.parameters()
    )
    native = stock(family)
    info = native.load_adapter(tmp_path / "adapter")
    assert (
        not info.missing_keys
        and not info.unexpected_keys
        and gap(said(native, family), trained) <= 1e-6
    )

    assert torch.equal(said(loaded.unload(), family), original)
    merged = model.merge_and_unload(safe_merge=True)
    assert gap(said(merged, family), trained) <= 1e-6
    assert (
        not any("lora" in n for n, _ in merged.named_modules())
        and ha.describe(merged)["patched"] == 1
    )
    merged.save_pretrained(tmp_path / "merged")
    again = AUTO[family].from_pretrained(tmp_path / "merged")
    assert torch.equal(said(again, family), said(merged, family))
    ha.unpatch_model(merged)
    assert type(merged) is type(stock(family)) and merged.config._attn_implementation == "sdpa"


@native_adapters
@pytest.mark.parametrize("family", AUTO)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_native_adapter_gives_the_stock_model_back(name, family, stock, tmp_path):
    model = adapted(stock(family), name, family=family, layers="last-half")
    model.save_pretrained(tmp_path)
    native, original = stock(family), said(stock(family), family)
    native.load_adapter(tmp_path)
    native.disable_adapters()
    assert torch.equal(said(native, family), original)
    native.enable_adapters()
    assert gap(said(native, family), said(model, family)) <= 1e-6
    native.delete_adapter("default")
    assert torch.equal(said(native, family), original) and not hypers(native)
    assert native.config.to_dict() == stock(family).config.to_dict() and type(native) is type(
        stock(family)
    )


LOADERS = {
    "PeftModel": "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)",
    "PeftModel, low memory": "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, "
    "low_cpu_mem_usage=True, adapter_name='other')",
    "AutoPeftModel": "AutoPeftModelForCausalLM.from_pretrained(adapter)",
    "AutoModel": "AutoModelForCausalLM.from_pretrained(adapter)",
    "pipeline": "pipeline('text-generation', model=adapter, tokenizer=base).model",
}
PROGRAM = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, pipeline
from peft import AutoPeftModelForCausalLM, PeftModel
base, adapter, out, *loads = sys.argv[1:]
for load in loads:
    try:
        model = eval(load)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        with torch.no_grad():
            torch.save(model.eval()(torch.load(out + ".ids")).logits, out)
        print("loaded")
"""


def words() -> hf.PreTrainedTokenizerFast:
    """A tokenizer of 93 words."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(90))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture
def tokenizer():
    return words()


def write_for_a_process(model, folders, tmp_path) -> list[str]:
    """Write the adapter, and what a process reads beside it; return the arguments of PROGRAM."""
    model.save_pretrained(tmp_path / "adapter")
    words().save_pretrained(folders["llama"])
    torch.save(LESSONS["llama"][1]()["input_ids"], tmp_path / "out.ids")
    return [str(folders["llama"]), str(tmp_path / "adapter"), str(tmp_path / "out")]


@pytest.mark.slow
@pytest.mark.parametrize("how", LOADERS)
def test_every_loader_patches_the_base_in_a_fresh_process(how, stock, folders, tmp_path):
    model = adapted(stock(), "cone", "head_fusion")
    arguments = write_for_a_process(model, folders, tmp_path)
    ran = run_code("import hf_hyperattn" + PROGRAM, *arguments, LOADERS[how], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "loaded"
    assert gap(torch.load(tmp_path / "out"), said(model)) <= 1e-6


@pytest.mark.slow
def test_without_the_plugin_every_loader_refuses_by_our_name(stock, folders, tmp_path):
    """One new process, which does not import the plugin, tries all loaders."""
    arguments = write_for_a_process(adapted(stock(), "cone"), folders, tmp_path)
    loads = [LOADERS[how] for how in ("PeftModel", "AutoPeftModel", "AutoModel")]
    line = [sys.executable, "-c", PROGRAM, *arguments, *loads]
    ran = subprocess.run(line, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-3:] == ["KeyError 'HF_HYPERATTN'"] * 3


@pytest.mark.parametrize("options", [dict(r=0), dict(target_modules=[])], ids=["r=0", "no targets"])
def test_an_adapter_of_mechanisms_alone(options, stock, tmp_path):
    model = adapted(stock(), "cone", **options)
    trained = said(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 4096
    loaded = PeftModel.from_pretrained(stock(), tmp_path)
    assert torch.equal(said(loaded), trained)
    with loaded.disable_adapter():
        assert torch.equal(said(loaded), said(stock()))
    assert torch.equal(said(loaded.merge_and_unload()), trained)


KIN = {
    "dora": dict(use_dora=True),
    "rslora": dict(use_rslora=True),
    "pissa": dict(init_lora_weights="pissa"),
    "modules_to_save": dict(modules_to_save=["lm_head", "hyper"]),
    "all-linear": dict(target_modules="all-linear"),
    "bias": dict(bias="lora_only"),
}


@pytest.mark.parametrize("options", KIN.values(), ids=KIN)
def test_kin_of_lora(options, stock, tmp_path):
    model = get_peft_model(stock(), config("cone", **options))
    assert gap(said(model), said(stock())) <= 1e-5
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model(**LESSONS["llama"][1]()).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    trained, native = said(model), stock()
    assert gap(said(PeftModel.from_pretrained(stock(), tmp_path)), trained) <= 1e-6
    info = native.load_adapter(tmp_path)
    if "bias" not in options:  # which no adapter has a place for, and Transformers reports
        assert not info.missing_keys and not info.unexpected_keys
    assert gap(said(native), trained) <= 1e-6
    if (
        options.get("init_lora_weights") != "pissa" and "bias" not in options
    ):  # these change the base
        with model.disable_adapter():
            assert torch.equal(said(model), said(stock()))
    assert gap(said(model.merge_and_unload()), trained) <= 1e-5


def test_a_config_is_checked_and_can_be_put_on_several_models(stock):
    shared = config("cone", layers="last-half")
    for layers in (2, 4):
        torch.manual_seed(0)
        model = get_peft_model(LESSONS["llama"][0](num_hidden_layers=layers), shared)
        assert ha.describe(model)["patched"] == layers // 2
        assert (
            model.peft_config["default"].hyperattn.hosts[-1]
            == f"model.layers.{layers - 1}.self_attn"
        )
    for wrong, words in (
        (
            lambda: get_peft_model(stock(), ha.HyperLoraConfig()),
            r"names no mechanism, and LlamaForCausalLM is not",
        ),
        (lambda: config("cone", layers="middle"), "layers='middle' is not allowed"),
        (
            lambda: config("cone", layer_replication=[(0, 2), (1, 2)]),
            "which makes layers anew that the patch would",
        ),
        (lambda: config("cone", hyperattn=ha.HyperAttnConfig()), "give one of both"),
        (lambda: get_peft_model(stock(), config("cone", layers=[7])), "layers names layer 7"),
        (
            lambda: get_peft_model(ha.patch_model(stock(), ha.ConeConfig()), config("hype")),
            "is patched otherwise",
        ),
    ):
        with pytest.raises(ValueError, match=f"(?m)^[^\n]*{words}[^\n]*$"):
            wrong()


def test_a_refused_adapter_leaves_the_model_as_it_was(stock):
    model = stock()
    with pytest.raises(ValueError, match="Target modules"):
        get_peft_model(model, config("cone", target_modules=["nothing"]))
    assert not hypers(model) and torch.equal(said(model), said(stock()))
    assert model.config.to_dict() == stock().config.to_dict()


def test_an_adapter_without_its_tensors_is_refused(stock, tmp_path):
    adapted(stock(), "cone").save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop("base_model.model.model.layers.1.self_attn.hyper.lora_hyper.cone.gate")
    save_file(tensors, file)
    for load in (PeftModel.from_pretrained, lambda model, folder: model.load_adapter(folder)):
        with pytest.raises(
            ValueError, match=r"^the added parameter [^\n]*layers.1.self_attn.hyper[^\n]*gate"
        ):
            load(stock(), tmp_path)


def test_on_a_patched_base_the_adapter_starts_from_what_is_there(stock, tmp_path):
    base = ha.patch_model(stock(), ha.ConeConfig())
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("gate"):
                parameter.fill_(0.2)
    patched = said(base)
    model = get_peft_model(base, ha.lora_config(base, r=4))
    assert type(model.peft_config["default"]) is ha.HyperLoraConfig
    assert torch.equal(said(model), patched)
    trained = said(train(model))
    with model.disable_adapter():
        assert torch.equal(said(model), patched)
    with torch.no_grad():
        rows = model(
            LESSONS["llama"][1]()["input_ids"], adapter_names=["__base__", "default"] * 2
        ).logits
    for row, alone in enumerate((patched, trained) * 2):
        assert gap(rows[row], alone[row]) <= 1e-5
    model.save_pretrained(tmp_path)
    assert gap(said(PeftModel.from_pretrained(stock(), tmp_path)), trained) <= 1e-6
    assert (
        gap(
            said(PeftModel.from_pretrained(ha.patch_model(stock(), ha.ConeConfig()), tmp_path)),
            trained,
        )
        <= 1e-6
    )
    unloaded = model.unload()
    assert torch.equal(said(unloaded), patched) and ha.describe(unloaded)["patched"] == 2
    with pytest.raises(ValueError, match="is patched otherwise than this adapter asks for"):
        PeftModel.from_pretrained(ha.patch_model(stock(), ha.ConeConfig(), layers=[0]), tmp_path)


@pytest.mark.parametrize("change", [lambda m: ha.patch_model(m, ha.HypeConfig()), ha.unpatch_model])
def test_the_patch_under_an_adapter_is_not_changed(change, stock):
    with pytest.raises(ValueError, match=r"under its adapters \['default'\]"):
        change(get_peft_model(stock(), config("cone")))


def test_a_whole_save_under_an_adapter_is_refused(stock, tmp_path):
    with pytest.raises(ValueError, match="is inside PEFT's wrapper"):
        get_peft_model(stock(), config("cone")).get_base_model().save_pretrained(tmp_path)


# Several adapters


@pytest.fixture
def several(stock):
    """A model with adapters of several mechanisms, one named like the mechanism of another, and what each says."""
    model = adapted(stock(), "cone", layers=[0, 1])
    answers = {"default": said(model), "__base__": said(stock())}
    for name, mechanism, layer, r in (
        ("cone", "hype", 0, 4),
        ("alone", "cone", 1, 0),
        ("tree", "hsa", 1, 2),
    ):
        model.add_adapter(name, config(mechanism, layers=[layer], r=r))
        model.set_adapter(name)
        answers[name] = said(train(model, seed=len(answers)))
    return model, answers


def test_adapters_with_different_mechanisms_are_switched_saved_and_deleted(
    several, stock, tmp_path
):
    model, answers = several
    assert len({round(a.abs().sum().item(), 3) for a in answers.values()}) == len(answers)
    for name in ("default", "tree", "cone", "alone", "default"):
        model.set_adapter(name)
        assert torch.equal(said(model), answers[name])
        patched = ha.describe(model)["patched"]
        assert patched == len(model.peft_config[name].hyperattn.hosts)
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert trained and all(f".{name}" in n for n in trained)
    with pytest.raises(ValueError, match=r"^set_adapter got the adapters \['default', 'cone'\]"):
        model.base_model.set_adapter(["default", "cone"])
    assert torch.equal(said(model), answers["default"])
    model.save_pretrained(tmp_path)
    for name in ("default", "cone", "alone", "tree"):
        folder = tmp_path if name == "default" else tmp_path / name
        assert gap(said(PeftModel.from_pretrained(stock(), folder)), answers[name]) <= 1e-6
        written = ha.HyperAttnConfig.from_pretrained(folder)
        assert written.to_dict() == model.peft_config[name].hyperattn.to_dict()
    model.set_adapter("tree")
    model.delete_adapter("default")
    assert torch.equal(said(model), answers["tree"])
    model.delete_adapter("tree")
    assert model.active_adapters == ["alone"] and torch.equal(said(model), answers["alone"])
    with model.disable_adapter():
        assert torch.equal(said(model), answers["__base__"])
    assert gap(said(model.merge_and_unload(adapter_names=["cone"])), answers["cone"]) <= 1e-6


@native_or_not
@pytest.mark.parametrize("names", [("first", "b"), ("v10", "v1")], ids=" ".join)
def test_an_adapter_is_loaded_beside_one_whose_parameters_names_hold_its_own(
    names, native, several, stock, tmp_path
):
    """PEFT takes what is missing for an adapter's own where its name is a part of that: "b" of "base_model"."""
    model, answers = several
    model.save_pretrained(tmp_path)
    loaded = stock()
    if native:
        loaded.load_adapter(tmp_path, names[0])
    else:
        loaded = PeftModel.from_pretrained(loaded, tmp_path, adapter_name=names[0])
    loaded.load_adapter(tmp_path / "tree", names[1])
    for name, answer in zip(names, ("default", "tree"), strict=True):
        loaded.set_adapter(name)
        assert gap(said(loaded), answers[answer]) <= 1e-6


def test_an_adapter_read_into_one_of_other_mechanisms_is_warned_of(stock, tmp_path, caplog):
    """As Trainer resumes: PEFT takes the parameters, and the config of the adapter that is there."""
    adapted(stock(), "cone").save_pretrained(tmp_path)
    model = get_peft_model(stock(), config("cone"))
    model.load_adapter(tmp_path, "default")
    assert not caplog.records
    other = get_peft_model(stock(), config(mechanisms=[ha.ConeConfig(gamma=3.0)]))
    other.load_adapter(tmp_path, "default")
    (record,) = caplog.records
    assert record.getMessage().startswith("adapter 'default' has other mechanisms than ")
    some = get_peft_model(stock(), config("cone", heads=[0, 1]))
    some.load_adapter(tmp_path, "default")
    assert caplog.records[-1].getMessage().startswith("adapter 'default' has other heads than ")


def test_a_config_that_was_changed_later_is_saved_as_what_runs(stock, tmp_path, caplog):
    model = adapted(stock(), "cone")
    model.save_pretrained(tmp_path / "before")
    assert not caplog.records
    for wrong in (ha.HyperAttnConfig([ha.ConeConfig(gamma=3.0)]), None):
        model.peft_config["default"].hyperattn = wrong
        caplog.clear()
        model.save_pretrained(tmp_path / "after")
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "peft_config['default'].hyperattn is not what the model"
        )
        for name in ("adapter_config.json", "hyperattn_config.json"):
            assert (tmp_path / "after" / name).read_text() == (
                tmp_path / "before" / name
            ).read_text()


@native_adapters
def test_the_config_of_a_native_adapter_that_was_changed_later_is_saved_as_what_runs(
    stock, tmp_path, caplog
):
    model, native = adapted(stock(), "cone"), stock()
    model.save_pretrained(tmp_path / "before")
    native.load_adapter(tmp_path / "before")
    native.peft_config["default"].hyperattn = ha.HyperAttnConfig([ha.HypeConfig()])
    caplog.clear()
    native.save_pretrained(tmp_path / "native")
    assert "was changed after" in caplog.text
    assert gap(said(PeftModel.from_pretrained(stock(), tmp_path / "native")), said(model)) <= 1e-6


def test_a_state_dict_of_another_patch_is_warned_of(stock, caplog):
    tensors = adapted(stock(), "cone").state_dict()
    same, other = (
        get_peft_model(stock(), config(mechanisms=[ha.ConeConfig(gamma=g)])) for g in (1.0, 3.0)
    )
    same.load_state_dict(tensors)
    assert not caplog.records
    other.load_state_dict(tensors)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "adapter 'default' of LlamaForCausalLM took the parameters of one with"
    )


@pytest.mark.parametrize(
    "make", [ha.lora_config, lambda model: LoraConfig(modules_to_save=["hyper"], r=2)]
)
def test_a_state_dict_of_another_patched_base_is_warned_of(make, stock, caplog):
    models = [ha.patch_model(stock(), ha.ConeConfig(gamma=gamma)) for gamma in (1.0, 3.0)]
    one, other = (get_peft_model(model, make(model)) for model in models)
    other.load_state_dict(one.state_dict())
    assert "the model of this state dict had cone in 2 attention modules" in caplog.text


@native_or_not
def test_tensors_for_an_adapter_that_lack_what_it_added_are_warned_of(native, stock, caplog):
    model = stock()
    if native:
        model.add_adapter(config("cone"))
    else:
        model = adapted(model, "cone")
    tensors = get_peft_model_state_dict(model)
    set_peft_model_state_dict(model, tensors)
    assert not caplog.records
    set_peft_model_state_dict(
        model, {name: t for name, t in tensors.items() if "hyper" not in name}
    )
    (record,) = caplog.records
    assert record.getMessage().startswith("the tensors for adapter 'default' lack ")


@native_adapters
def test_native_adapters_are_switched_and_deleted(several, stock, tmp_path):
    answers = several[1]
    several[0].save_pretrained(tmp_path)
    model = stock()
    for name in ("tree", "cone", "alone"):
        model.load_adapter(tmp_path / name, adapter_name=name)
        model.set_adapter(name)
        assert gap(said(model), answers[name]) <= 1e-6
    model.add_adapter(LoraConfig(target_modules=["up_proj"]), "plain")
    for name in ("plain", "alone", "tree", "cone"):
        model.set_adapter(name)
        assert gap(said(model), answers.get(name, answers["__base__"])) <= 1e-6
    model.delete_adapter("cone")
    assert model.active_adapters() == ["alone"] and gap(said(model), answers["alone"]) <= 1e-6
    model.delete_adapter(["alone", "tree", "plain"])
    assert torch.equal(said(model), answers["__base__"]) and not hypers(model)


def test_rows_of_a_batch_have_adapters_of_their_own(several):
    model, answers = several
    ids = LESSONS["llama"][1]()["input_ids"]
    names = ["default", "__base__", "alone", "cone"]
    with torch.no_grad():
        found = model.eval()(input_ids=ids, adapter_names=names).logits
    for row, name in enumerate(names):
        assert gap(found[row], answers[name][row]) <= 1e-5, name
    assert torch.equal(said(model), answers["tree"])  # no hook stays
    beams = dict(
        input_ids=ids[:2, :8], max_new_tokens=4, num_beams=2, do_sample=False, pad_token_id=0
    )
    alone = {}
    for name in ("default", "cone"):
        model.set_adapter(name)
        alone[name] = model.generate(**beams)
    mixed = model.generate(**beams, adapter_names=["default", "cone"])
    assert torch.equal(mixed[0], alone["default"][0]) and torch.equal(mixed[1], alone["cone"][1])
    for wrong, words in (
        (dict(adapter_names=["nobody"] * 4), "non-existing adapter"),
        (
            dict(adapter_names=["alone"] * 4, output_attentions=True),
            "got 4 names, and attention weights",
        ),
        (dict(adapter_names=["alone"] * 3), "adapter_names"),
    ):
        with pytest.raises(ValueError, match=words):
            model(input_ids=ids, **wrong)


def test_rows_whose_adapters_need_more_than_the_active_one_and_a_call_that_fails():
    """Hidden states, and hierarchy=."""
    torch.manual_seed(0)
    model, answers = adapted(LESSONS["llama"][0](initializer_range=0.3), "cone", layers=[0]), {}
    for name, mechanism in (
        ("head_fusion", ha.HeadFusionConfig()),
        ("hsa", ha.HsaConfig(windows=(2, 4), near=0, sinks=0, refine_top_k=0)),
    ):
        model.add_adapter(name, config(mechanisms=[mechanism], layers=[1]))
        model.set_adapter(name)
        answers[name] = said(train(model, seed=len(answers)))
    ids = LESSONS["llama"][1]()["input_ids"]
    groups = torch.arange(ids.shape[1]).expand(ids.shape)[..., None] // 3
    with torch.no_grad():
        tree = model.eval()(input_ids=ids, hierarchy=groups).logits
    model.set_adapter("default")
    answers["default"] = said(model)
    kind, names = type(model.get_base_model()), ["default", "head_fusion", "hsa", "default"]
    with torch.no_grad():
        mixed = model(input_ids=ids, adapter_names=names).logits
        over_groups = model(input_ids=ids, adapter_names=names, hierarchy=groups).logits
    for row, name in enumerate(names):
        assert gap(mixed[row], answers[name][row]) <= 1e-5, name
        assert gap(over_groups[row], (tree if name == "hsa" else answers[name])[row]) <= 1e-5, name
    assert gap(tree, answers["hsa"]) > 1e-3
    with pytest.raises(ValueError, match="attention weights are asked for"):
        model(input_ids=ids, adapter_names=names, output_attentions=True)
    assert torch.equal(said(model), answers["default"]) and type(model.get_base_model()) is kind


def test_scaling_an_adapter_for_a_while_is_refused(stock):
    with pytest.raises(
        ValueError, match=r"^rescale_adapter_scale does not reach [^\n]*layers.0.self_attn.hyper"
    ):
        with peft.helpers.rescale_adapter_scale(get_peft_model(stock(), config("cone")), 0.5):
            pass


@pytest.mark.parametrize("kind", ["HyperLoraConfig", "LoraConfig"])
def test_pissa_is_converted_to_lora_with_what_the_patch_added(kind, stock, tmp_path):
    def base():
        return stock() if kind == "HyperLoraConfig" else ha.patch_model(stock(), ha.ConeConfig())

    pissa = dict(init_lora_weights="pissa", r=4, target_modules=["q_proj"])
    plain = LoraConfig(**pissa, modules_to_save=["hyper"])
    model = get_peft_model(base(), config("cone", **pissa) if kind == "HyperLoraConfig" else plain)
    model.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        for parameter in filter(attrgetter("requires_grad"), model.parameters()):
            parameter += 0.1
    trained = said(model)
    model.save_pretrained(
        tmp_path / "lora", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    assert torch.equal(said(model), trained)
    assert gap(said(PeftModel.from_pretrained(base(), tmp_path / "lora")), trained) <= 1e-5


@pytest.mark.parametrize("r", [0, 4])
def test_a_weighted_sum_of_adapters(r, stock, tmp_path):
    model = adapted(stock(), "cone", r=r)
    model.add_adapter("other", config("cone", r=r))
    model.add_adapter("hype", config("hype", r=r))
    model.set_adapter("other")
    train(model, seed=1)
    model.add_weighted_adapter(["default", "other"], [0.5, -2.0], "sum", combination_type="cat")
    found = dict(model.named_parameters())
    for name, parameter in found.items():
        if ".lora_hyper.sum." in name:  # cone's parameters start at zero
            one, two = (
                found[name.replace(".sum.", f".{other}.")] for other in ("default", "other")
            )
            assert gap(parameter, 0.5 * one - 2.0 * two) <= 1e-6 and parameter.abs().sum() > 0
    model.add_weighted_adapter(["default"], [1.0], "same", combination_type="linear")
    model.set_adapter("default")
    expected = said(model)
    model.set_adapter("same")
    assert gap(said(model), expected) <= 1e-5
    model.save_pretrained(tmp_path)
    assert gap(said(PeftModel.from_pretrained(stock(), tmp_path / "same")), said(model)) <= 1e-6
    for names, how in ((["default", "hype"], "cat"), (["default", "other"], "ties")):
        with pytest.raises(
            ValueError, match=r"^add_weighted_adapter got the adapters [^\n]*allowed: adapters"
        ):
            model.add_weighted_adapter(names, [1.0, 1.0], "wrong", combination_type=how)
    assert "wrong" not in model.peft_config


def test_hotswap(stock, tmp_path):
    first, second = adapted(stock(), "cone"), adapted(stock(), "cone", r=2)
    other = said(train(second, seed=5))
    second.save_pretrained(tmp_path / "second")
    adapted(stock(), "hype").save_pretrained(tmp_path / "hype")
    first.add_adapter("cone", config("cone"))
    first.set_adapter("cone")
    kept = said(train(first))
    hotswap_adapter(first, tmp_path / "second", "default")
    assert torch.equal(said(first), kept)
    first.set_adapter("default")
    assert gap(said(first), other) <= 1e-6
    hotswap_adapter(first, tmp_path / "second", "cone")  # PEFT looks for the name anywhere in a key
    assert gap(said(first), other) <= 1e-6
    with pytest.raises(ValueError, match="Configs are incompatible: for hyperattn"):
        hotswap_adapter(first, tmp_path / "hype", "default")
    native = stock()
    native.load_adapter(tmp_path / "second")
    with pytest.raises(ValueError, match="only supported for LoRA"):
        native.load_adapter(tmp_path / "second", adapter_name="default", hotswap=True)


def test_merging_and_unmerging(several, stock):
    model, answers = several
    with pytest.raises(
        ValueError, match=r"^merge_adapter\(\['default'\]\) would leave the patch of \['tree'\]"
    ):
        model.merge_adapter(adapter_names=["default"])
    model.set_adapter("default")
    model.merge_adapter()
    assert gap(said(model), answers["default"]) <= 1e-6
    with model.disable_adapter():
        assert gap(said(model), answers["__base__"]) <= 1e-6
    assert gap(said(model), answers["default"]) <= 1e-6  # PEFT unmerges what is disabled
    for call in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"^merge_[^\n]*\['default', 'tree'\]"):
            call(adapter_names=["default", "tree"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_hyper.tree.hsa.gate" in name:
                parameter.fill_(float("nan"))
    model.set_adapter("tree")
    with pytest.raises(ValueError, match="numbers that are not finite"):
        model.merge_and_unload(safe_merge=True)


# Training


def test_the_trainer_logs_gates_and_decays_none(stock, tmp_path):
    model = get_peft_model(stock(), config("cone", "head_fusion", layers=[1]))
    rows = [{"input_ids": row, "labels": row} for row in LESSONS["llama"][1]()["input_ids"]]
    arguments = hf.TrainingArguments(
        tmp_path,
        max_steps=2,
        logging_steps=1,
        learning_rate=0.1,
        weight_decay=0.1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    trainer = hf.Trainer(model, arguments, train_dataset=rows)
    assert not any("hyper" in name for name in trainer.get_decay_parameter_names(model))
    trainer.add_callback(ha.LogGates(trainer))
    trainer.train()
    logged = [
        entry
        for entry in trainer.state.log_history
        if any(key.startswith("gates/") for key in entry)
    ]
    assert len(logged) == 2
    gate = model.get_parameter(
        "base_model.model.model.layers.1.self_attn.hyper.lora_hyper.default.cone.gate"
    )
    last = {key: value for key, value in logged[-1].items() if key.startswith("gates/")}
    assert last == {
        f"gates/model.layers.1.self_attn/cone/head_{h}": gate[h].item() for h in range(4)
    }
    assert logged[0] != logged[1] and gate.abs().min() > 0


def test_half_precision_trains_in_float32_and_merges_in_its_own(stock, tmp_path):
    model = get_peft_model(stock().bfloat16(), config("cone"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert torch.equal(said(model), said(stock().bfloat16()))
    merged = train(model).merge_and_unload()
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


# Trainers of others: `make test-more` installs them


TRAINING = dict(
    max_steps=3,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    report_to="none",
    use_cpu=True,
    save_strategy="no",
    logging_strategy="no",
    bf16=False,
    gradient_checkpointing=True,
)


@pytest.mark.extras
@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward"])
def test_trl_trains_saves_and_loads_it(kind, folders, tokenizer, tmp_path):
    trl = pytest.importorskip("trl")
    import datasets

    rows = {
        "SFT": {"text": "w7 w8 w9 w10 w11"},
        "DPO": {"prompt": "w7 w8", "chosen": " w9 w10", "rejected": " w11 w12"},
        "Reward": {"chosen": "w7 w8 w9", "rejected": "w7 w8 w12"},
    }[kind]
    load = hf.AutoModelForSequenceClassification if kind == "Reward" else hf.AutoModelForCausalLM
    options = dict(num_labels=1) if kind == "Reward" else {}
    torch.manual_seed(0)
    model = load.from_pretrained(folders["llama"], pad_token_id=0, **options)
    adapter = config(
        "cone", "head_fusion", task_type="SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model,
        args=getattr(trl, f"{kind}Config")(str(tmp_path), **TRAINING),
        train_dataset=datasets.Dataset.from_list([rows] * 4),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    assert isinstance(trainer.model.peft_config["default"], ha.HyperLoraConfig)
    trainer.train()
    gates = [
        p
        for n, p in trainer.model.named_parameters()
        if n.endswith("hyper.lora_hyper.default.cone.gate")
    ]
    assert len(gates) == 2 and all(gate.any() for gate in gates)
    trainer.save_model(str(tmp_path / "adapter"))
    trained = said(trainer.model)
    torch.manual_seed(0)
    base = load.from_pretrained(folders["llama"], pad_token_id=0, **options)
    assert gap(said(PeftModel.from_pretrained(base, tmp_path / "adapter")), trained) <= 1e-6


@pytest.mark.extras
@native_adapters
def test_sentence_transformers_trains_saves_and_loads_it(folders, tokenizer, tmp_path):
    st = pytest.importorskip("sentence_transformers")
    import datasets
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    hf.AutoModel.from_pretrained(folders["bert"]).save_pretrained(tmp_path / "base")
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(tmp_path / "base")
    model = st.SentenceTransformer(str(tmp_path / "base"), device="cpu")  # with mean pooling
    sentences = ["w7 w8 w9 w10", "w11 w12 w13"]
    before = model.encode(sentences)
    model.add_adapter(config("cone", "head_fusion", task_type="FEATURE_EXTRACTION"))
    assert abs(model.encode(sentences) - before).max() <= 1e-6
    rows = [
        {"anchor": "w7 w8", "positive": "w9 w10"},
        {"anchor": "w11 w12", "positive": "w13 w14"},
    ] * 2
    options = {name: value for name, value in TRAINING.items() if name != "gradient_checkpointing"}
    trainer = st.SentenceTransformerTrainer(
        model,
        args=st.SentenceTransformerTrainingArguments(str(tmp_path / "run"), **options),
        train_dataset=datasets.Dataset.from_list(rows),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    after = model.encode(sentences)
    assert abs(after - before).max() > 1e-4
    model.save_pretrained(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert hypers(again) and abs(again.encode(sentences) - after).max() <= 1e-6


def test_targets_without_a_rank_are_refused():
    with pytest.raises(
        ValueError, match="target_modules says nothing with r=0; leave it out, or give r"
    ):
        ha.HyperLoraConfig(r=0, target_modules=["q_proj"])
