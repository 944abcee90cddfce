"""Every PEFT method on a patched model, from training to the merged model: equal, refused, or warned of."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import peft
import pytest
import torch
import transformers as hf
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import hf_hyperattn as ha
from tests.forking import run_code
from tests.integration.lessons import added, llama, logits, next_character, patched
from tests.oracles.marks import native_adapters, native_or_not

LINEAR = dict(target_modules=["q_proj", "v_proj"])


@dataclass
class Method:
    """A PEFT method, and what PEFT itself cannot do with it.

    Args:
        config: its class.
        options: its arguments.
        disable: whether PEFT gives back the base where the adapter is disabled; PiSSA has changed its weights.
        merge: whether the method can be merged.
        native: what Transformers' own `load_adapter` does; "warned" is the report that it prints of DoRA's vectors,
            which it loads for no model.
    """

    config: type
    options: dict = field(default_factory=dict)
    disable: bool = True
    merge: bool = True
    native: str = "equal"


METHODS = {
    "LoRA": Method(LoraConfig, LINEAR),
    "DoRA": Method(LoraConfig, LINEAR | dict(use_dora=True), native="warned"),
    "rsLoRA": Method(LoraConfig, LINEAR | dict(use_rslora=True)),
    "PiSSA": Method(LoraConfig, LINEAR | dict(init_lora_weights="pissa"), disable=False),
    "AdaLoRA": Method(peft.AdaLoraConfig, LINEAR | dict(total_step=10)),
    "IA3": Method(peft.IA3Config, LINEAR | dict(feedforward_modules=[])),
    "VeRA": Method(
        peft.VeraConfig,
        dict(target_modules=["q_proj", "o_proj"], r=4),
        native="refused",
    ),
    "LoHa": Method(peft.LoHaConfig, LINEAR),
    "LoKr": Method(peft.LoKrConfig, LINEAR),
    "OFT": Method(peft.OFTConfig, LINEAR | dict(oft_block_size=8)),
    "LN tuning": Method(peft.LNTuningConfig, dict(target_modules=["input_layernorm"])),
    "prompt tuning": Method(
        peft.PromptTuningConfig, dict(num_virtual_tokens=4), merge=False, native="refused"
    ),
}


def base() -> torch.nn.Module:
    """A patched base with open gates that every call gives alike, as one that was trained before would be."""
    model = patched()
    open_gates(model, 0.1)
    return model


def open_gates(model, value: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate") and "original_module" not in name:
                parameter.fill_(value)


def step(model) -> None:
    """One large step, so that what is lost shows."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()(**next_character()).loss.backward()
    torch.optim.Adam(parameters, lr=0.05).step()
    model.zero_grad()


def said(model) -> torch.Tensor:
    ids = next_character()["input_ids"]
    return logits(model, dict(input_ids=ids))[
        :, -ids.shape[1] :
    ]  # prompts of an adapter come before


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_from_training_to_the_merged_model(name, tmp_path):
    method, task = METHODS[name], "CAUSAL_LM"
    original = said(base())
    config = method.config(**method.options, task_type=task, modules_to_save=["hyper"])
    model = get_peft_model(base(), config)
    started = {n: p.clone() for n, p in added(model).items()}
    assert started and all(".modules_to_save.default." in n for n in started)
    step(model)
    assert all(not torch.equal(p, started[n]) for n, p in added(model).items())
    trained = said(model)
    assert gap(trained, original) > 1e-3
    model.save_pretrained(tmp_path / "adapter")

    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert gap(said(loaded), trained) <= 1e-6
    other = base()
    if method.native == "refused":
        with pytest.raises(ValueError, match="does not support"):
            other.load_adapter(tmp_path / "adapter")
    else:
        missing = {
            k for k in other.load_adapter(tmp_path / "adapter").missing_keys if "ranknum" not in k
        }
        warned = method.native == "warned" and Version(hf.__version__) >= Version(
            "5.18"
        )  # before, ours reads all
        assert bool(missing) == warned and not any("hyper" in key for key in missing)
        assert method.native == "warned" or gap(said(other), trained) <= 1e-6
    with pytest.raises(ValueError, match="is not patched; first call hf_hyperattn"):
        PeftModel.from_pretrained(llama(), tmp_path / "adapter")

    if method.disable:
        with model.disable_adapter():
            assert gap(said(model), original) <= 1e-6
        assert gap(said(model), trained) <= 1e-6

    if not method.merge:
        with pytest.raises(AttributeError, match="merge_and_unload"):
            model.merge_and_unload()
        return
    merged = model.merge_and_unload()
    assert type(merged) is hf.LlamaForCausalLM and not any(
        "modules_to_save" in n for n, _ in merged.named_modules()
    )
    assert gap(said(merged), trained) <= 1e-6
    merged.save_pretrained(tmp_path / "merged")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(said(again), said(merged))
    assert ha.describe(again)["patched"] == ha.describe(merged)["patched"] > 0


LOADERS = {
    "PeftModel": "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)",
    "AutoPeftModel": "AutoPeftModelForCausalLM.from_pretrained(folder)",
    "AutoModel": "AutoModelForCausalLM.from_pretrained(folder)",
    "pipeline": "pipeline('text-generation', model=folder, tokenizer=tokens).model",
}
PROGRAM = """
import sys, pathlib, torch
from transformers import AutoModelForCausalLM, pipeline
from peft import AutoPeftModelForCausalLM, PeftModel
import hf_hyperattn
load, place = sys.argv[1], pathlib.Path(sys.argv[2])
base, ids, found = str(place / "base"), torch.load(place / "ids"), {}
from tests.integration.adapters.test_hyper_lora import words
tokens = words()
for folder in map(str, sorted((place / "adapters").iterdir())):
    try:
        model = eval(load)
        with torch.no_grad():
            found[folder] = model.eval()(ids).logits[:, -ids.shape[1]:]
    except Exception as error:
        found[folder] = f"{type(error).__name__}: {error}"
torch.save(found, place / "found")
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with a patched base and an adapter of every method; and the logits of each adapter."""
    place = tmp_path_factory.mktemp("adapters")
    base().save_pretrained(place / "base")
    torch.save(next_character()["input_ids"], place / "ids")
    trained = {}
    for name, method in METHODS.items():
        model = hf.AutoModelForCausalLM.from_pretrained(place / "base")
        if method.config is LoraConfig:
            config = ha.lora_config(model, **method.options)
        else:
            config = method.config(
                **method.options, task_type="CAUSAL_LM", modules_to_save=["hyper"]
            )
        model = get_peft_model(model, config)
        step(model)
        model.save_pretrained(place / "adapters" / name)
        trained[name] = said(model)
    return place, trained


@pytest.mark.slow
@pytest.mark.parametrize("how", LOADERS)
def test_every_method_by_every_loader_in_a_fresh_process(how, published):
    """The base is published patched; LoRA and its kin are in adapters that carry the patch."""
    place, trained = published
    ran = run_code(PROGRAM, LOADERS[how], place, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = torch.load(place / "found")
    for name, expected in trained.items():
        answer = found[str(place / "adapters" / name)]
        refused = how in ("AutoModel", "pipeline") and METHODS[name].native == "refused"
        assert ("does not support" in answer) if refused else gap(answer, expected) <= 1e-6, (
            name,
            answer,
        )


def test_the_page_has_a_row_for_every_method_and_no_failure():
    """docs/adapters.md, which `make adapters` writes from a run."""
    page = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert [cells[0].removeprefix("| ") for cells in rows] == [*METHODS] and "**" not in page
    numbers = [float(cell) for cells in rows for cell in cells[2:-1] if cell[:1].isdigit()]
    assert len(numbers) > 80 and max(numbers) <= 1e-6


def lora(**options) -> LoraConfig:
    return LoraConfig(**LINEAR | dict(task_type="CAUSAL_LM", modules_to_save=["hyper"]) | options)


def adapted(model=None, **options) -> PeftModel:
    """A patched model with one trained adapter."""
    model = get_peft_model(model or base(), lora(**options))
    step(model)
    return model


@pytest.fixture
def warned(caplog):
    """The warnings so far, each one line."""
    caplog.set_level(logging.WARNING, "hf_hyperattn")

    def lines() -> list[str]:
        found = [
            record.getMessage()
            for record in caplog.records
            if record.name.startswith("hf_hyperattn")
        ]
        assert not any("\n" in line for line in found)
        return found

    return lines


# What an adapter that is not ours does to what a patch added


def test_a_patch_under_an_adapter_is_trained_and_saved_with_it(tmp_path):
    torch.manual_seed(0)
    model = ha.patch_model(get_peft_model(llama(), lora(modules_to_save=None)), ha.ConeConfig())
    original = said(model)
    step(model)
    assert any(p.any() for p in added(model).values())
    trained = said(model)
    with model.disable_adapter():
        assert gap(said(model), original) <= 1e-6
    model.save_pretrained(tmp_path)
    assert gap(said(PeftModel.from_pretrained(patched(), tmp_path)), trained) <= 1e-6


def test_unpatching_under_an_adapter_leaves_one_that_loads(tmp_path):
    model = ha.unpatch_model(adapted())
    assert model.peft_config["default"].modules_to_save is None
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "hyperattn_config.json").exists()
    torch.manual_seed(0)
    assert gap(said(PeftModel.from_pretrained(llama(), tmp_path)), said(model)) <= 1e-6


@native_or_not
def test_an_adapter_that_leaves_out_what_was_added_warns_once(native, warned, tmp_path):
    model = base()
    if native:
        model.add_adapter(lora(modules_to_save=None))
    else:
        model = get_peft_model(model, lora(modules_to_save=None))
    (line,) = warned()
    assert "lora_config(model)" in line and "modules_to_save=['hyper']" in line
    assert not any(".hyper." in n for n, p in model.named_parameters() if p.requires_grad)


def test_what_is_trained_and_not_written_is_warned_of_once(warned, tmp_path):
    model = get_peft_model(patched(), lora(modules_to_save=None))
    model.save_pretrained(tmp_path)
    assert len(warned()) == 1  # that it is frozen; nothing is lost
    open_gates(model, 0.5)
    for _ in range(2):
        model.save_pretrained(tmp_path)
    assert len(warned()) == 2 and "are not in adapter 'default'" in warned()[-1]


@native_adapters
def test_what_a_native_adapter_does_not_write_is_warned_of(warned, tmp_path):
    native = patched()
    native.add_adapter(lora(modules_to_save=None))
    ha.freeze_base(native).save_pretrained(tmp_path / "native")
    assert "are not in adapter 'default'" in warned()[-1]


def test_the_open_gates_of_the_base_s_own_checkpoint_are_no_loss(warned, tmp_path):
    base().save_pretrained(tmp_path / "base")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(model, lora(modules_to_save=None))
    model.save_pretrained(tmp_path / "adapter")
    assert len(warned()) == 1 and "leaves out" in warned()[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: get_peft_model(m, lora()).get_base_model(),
        pytest.param(
            lambda m: m.add_adapter(lora(), "x") or m.delete_adapter("x") or m,
            marks=native_adapters,
        ),
    ],
)
def test_a_whole_save_under_names_that_no_load_finds_is_refused(wrap, tmp_path):
    model = wrap(base())
    with pytest.raises(ValueError, match=r"hyper is inside PEFT's wrapper[^\n]*merge_and_unload"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# What an adapter says on disk


@pytest.mark.slow
def test_plain_peft_refuses_the_adapter_by_our_name_and_warns_of_a_plain_one(tmp_path):
    adapted().save_pretrained(tmp_path / "whole")
    adapted(modules_to_save=None).save_pretrained(tmp_path / "plain")
    code = """
import sys, warnings, peft, transformers
from peft import AutoPeftModelForCausalLM, PeftModel
sizes = dict(hidden_size=32, intermediate_size=40, vocab_size=99, num_hidden_layers=2, num_attention_heads=4)
stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
folder = sys.argv[1]
by_path = AutoPeftModelForCausalLM.from_pretrained
for load in (lambda d: PeftModel.from_pretrained(stock, d), stock.load_adapter, by_path):
    try:
        load(folder + "/whole")
    except KeyError as error:
        print(error)
with warnings.catch_warnings(record=True) as seen:
    PeftModel.from_pretrained(stock, folder + "/plain")
print(any("hf_hyperattn" in str(w.message) for w in seen), "hf_hyperattn" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert ran.stdout.splitlines() == ["'HF_HYPERATTN_LORA'"] * 3 + ["True False"], ran.stderr[
        -2000:
    ]
    config = peft.PeftConfig.from_pretrained(tmp_path / "whole")
    assert isinstance(config, LoraConfig) and config.peft_type == peft.PeftType.LORA


@native_or_not
def test_the_card_s_snippet_runs_as_it_is_written(native, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained("path/to/the/base/model")
    ha.patch_model(model, ha.ConeConfig(), layers="last-half")
    if native:
        model.add_adapter(ha.lora_config(model))
    else:
        model = get_peft_model(model, ha.lora_config(model))
    step(model)
    model.save_pretrained("path/to/this/directory")
    card = (tmp_path / "path/to/this/directory/README.md").read_text()
    assert "(`HF_HYPERATTN`)" in card and "patch_model" not in card
    names = {}
    exec(card.partition("```python\n")[2].partition("```")[0], names)
    assert gap(said(names["model"]), said(model)) <= 1e-6


def test_adapters_of_earlier_versions_load(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    data = json.loads(path.read_text())
    data.pop("hf_hyperattn", None)
    path.write_text(json.dumps(data | {"peft_type": "LORA"}))
    assert gap(said(PeftModel.from_pretrained(base(), tmp_path)), said(model)) <= 1e-6
    with pytest.raises(ValueError, match="^this adapter holds parameters of another patch"):
        PeftModel.from_pretrained(patched(config=ha.ConeConfig("penumbral")), tmp_path)
    (tmp_path / "hyperattn_config.json").unlink()  # as on the Hub, where it is not fetched
    for load in (PeftModel.from_pretrained, lambda m, d: m.load_adapter(d)):
        with pytest.raises(
            ValueError,
            match=r"^the added parameter [^\n]*layers.0.self_attn.hyper[^\n]*hyperattn_config",
        ):
            load(patched(layers=[1]), tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        dict(config=ha.HypeConfig()),
        dict(config=ha.ConeConfig("penumbral")),
        dict(layers=[1]),
        dict(heads=[0]),
        dict(mode="replace"),
    ],
    ids=["mechanism", "setting", "layers", "heads", "mode"],
)
def test_a_base_that_is_patched_otherwise_is_refused(other, tmp_path, warned):
    adapted().save_pretrained(tmp_path / "whole")
    adapted(modules_to_save=None).save_pretrained(tmp_path / "plain")
    for load in (PeftModel.from_pretrained, lambda m, d: m.load_adapter(d)):
        with pytest.raises(
            ValueError, match=r"^this adapter holds [^\n]*its base had cone in 2 [^\n]*otherwise"
        ):
            load(patched(**other), tmp_path / "whole")
    before = len(warned())
    PeftModel.from_pretrained(patched(**other), tmp_path / "plain")
    PeftModel.from_pretrained(llama(), tmp_path / "plain")
    assert len(warned()) == before + 2 and all(
        "its base had cone" in line for line in warned()[before:]
    )


def test_an_adapter_of_a_model_used_by_name_warns_on_another_name(tmp_path, warned):
    torch.manual_seed(0)
    model = get_peft_model(llama(), lora(modules_to_save=None))
    model.base_model.model.set_attn_implementation("cone")
    model.save_pretrained(tmp_path)
    for name, number in (("cone", 0), ("sdpa", 1)):
        stock = llama()
        stock.set_attn_implementation(name)
        PeftModel.from_pretrained(stock, tmp_path)
        assert len([line for line in warned() if "attn_implementation='cone'" in line]) == number


@pytest.mark.parametrize("native", [False, True])
def test_an_adapter_without_its_tensors_is_refused(native, tmp_path):
    adapted().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    kept = {
        k: v for k, v in weights.items() if not k.endswith("layers.1.self_attn.hyper.cone.gate")
    }
    assert len(kept) == len(weights) - 1
    save_file(kept, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"^the added parameter [^\n]*layers.1.self_attn.hyper[^\n]*gate"
    ):
        base().load_adapter(tmp_path) if native else PeftModel.from_pretrained(base(), tmp_path)


# Using adapters


@native_adapters
def test_native_adapters_are_disabled_and_enabled_whole():
    model = base()
    model.add_adapter(lora())
    open_gates(model, 0.5)
    trained = said(model)
    model.disable_adapters()
    assert gap(said(model), trained) > 1e-4
    model.enable_adapters()
    assert gap(said(model), trained) == 0
    model.disable_adapters()
    for _, wrapper in [(n, m) for n, m in model.named_modules() if n.endswith("self_attn.hyper")]:
        assert wrapper.disable_adapters


@native_or_not
def test_adapters_are_switched_and_deleted(native):
    one = base()
    model = one if native else get_peft_model(one, lora(), "one")
    if native:
        model.add_adapter(lora(), "one")
    step(model)
    first = said(model)
    for name, options in (("two", {}), ("plain", dict(modules_to_save=None))):
        model.add_adapter(lora(**options), name) if native else model.add_adapter(
            name, lora(**options)
        )
        model.set_adapter(name)
        step(model)
    second = {}
    for name in ("two", "plain", "one", "two"):
        model.set_adapter(name)
        second.setdefault(name, said(model))
        assert gap(said(model), second[name]) == 0
    assert gap(second["one"], first) <= 1e-6 and gap(second["two"], first) > 1e-3
    with pytest.raises(
        ValueError, match=r"^set_adapter got the adapters \['one', 'two'\][^\n]*one such adapter"
    ):
        model.set_adapter(["one", "two"]) if native else model.base_model.set_adapter(
            ["one", "two"]
        )
    model.set_adapter("two")
    model.delete_adapter("one")
    assert gap(said(model), second["two"]) == 0
    assert not any(".modules_to_save.one." in n for n, _ in model.named_parameters())
    model.set_adapter("plain")
    model.delete_adapter("two")
    assert gap(said(model), second["plain"]) == 0


def two_adapters() -> PeftModel:
    model = adapted()
    model.add_adapter("two", lora())
    model.set_adapter("two")
    step(model)
    model.set_adapter("default")
    return model


def test_mixed_batches_are_refused_in_our_words():
    model, ids = two_adapters().eval(), next_character()["input_ids"]
    for names in (["default", "two"], ["__base__", "two"]):
        with pytest.raises(ValueError, match=r"^adapter_names= mixes adapters[^\n]*set_adapter"):
            model(input_ids=ids[:2], adapter_names=names)
    with pytest.raises(ValueError, match="^adapter_names= mixes"):
        model.generate(input_ids=ids[:2], adapter_names=["default", "two"], max_new_tokens=2)


def test_weighted_adapters_and_hot_swapping_are_refused(tmp_path):
    model = two_adapters()
    model.add_adapter("plain", lora(modules_to_save=None))
    for names in (["default", "two"], ["plain", "two"], ["two"]):
        with pytest.raises(
            ValueError, match=r"^add_weighted_adapter does not reach the added parameters"
        ):
            model.add_weighted_adapter(names, [0.5] * len(names), "both", combination_type="linear")
    model.save_pretrained(tmp_path)
    for name in ("default", "plain"):
        with pytest.raises(ValueError, match=r"^hot-swapping does not reach the added parameters"):
            peft.utils.hotswap.hotswap_adapter(model, tmp_path, name)


def test_merging_takes_the_adapter_that_is_named():
    def merged(active: str, **options):
        model = two_adapters()
        model.set_adapter(active)
        return model, model.merge_and_unload(**options)

    model = two_adapters()
    first = said(model)
    model.set_adapter("two")
    second = said(model)
    assert gap(said(merged("default", safe_merge=True)[1]), first) <= 1e-6
    assert gap(said(merged("default", adapter_names=["two"])[1]), second) <= 1e-6
    for call in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match=r"(?m)^merge_[^\n]*added parameters[^\n]*$"):
            call(adapter_names=["default", "two"])
    with pytest.raises(ValueError, match="first call set_adapter"):
        model.merge_adapter(adapter_names=["default"])
    assert gap(said(model), second) <= 1e-6  # as it was
    model.merge_adapter()
    assert gap(said(model), second) <= 1e-6
    model.unmerge_adapter()
    open_gates(model, float("nan"))
    with pytest.raises(ValueError, match="numbers that are not finite"):
        model.merge_and_unload(safe_merge=True)
    assert model.base_model.model.model.layers[0].self_attn.hyper.active_adapters == ["two"]


@pytest.mark.parametrize("name", ["LoRA", "LN tuning"])
def test_unload_gives_back_the_base(name):
    original = said(base())
    method = METHODS[name]
    model = get_peft_model(base(), method.config(**method.options, modules_to_save=["hyper"]))
    step(model)
    assert gap(said(model.unload()), original) <= 1e-6


def test_the_trainer_s_own_decay_spares_what_was_added(tmp_path):
    model = adapted()
    rows = [{"input_ids": row, "labels": row} for row in next_character()["input_ids"]]
    arguments = hf.TrainingArguments(tmp_path, weight_decay=0.1, report_to="none", use_cpu=True)
    trainer = hf.Trainer(model, arguments, train_dataset=rows)
    trainer.create_optimizer()
    names = {id(p): n for n, p in model.named_parameters()}
    decay = {
        names[id(p)]: g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"]
    }
    assert {n for n in decay if "hyper" in n} == set(added(model))
    assert all((decay[n] == 0) == (".hyper." in n) for n in decay)
