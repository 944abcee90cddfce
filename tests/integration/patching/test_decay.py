"""One warning where a script's own optimizer decays what a patch added."""

import copy
import logging

import peft
import pytest
import torch
import transformers as hf
from torch.optim import optimizer as torch_optimizer

import hf_hyperattn as ha
from hf_hyperattn.integration.patching.decay import WATCH
from tests.integration.lessons import next_character
from tests.integration.models import llama, text_inputs


@pytest.fixture(autouse=True)
def new_process():
    """As if nothing had been patched or warned of."""
    forget()
    yield
    forget()


def forget():
    if WATCH.handle is not None:
        WATCH.handle.remove()
    WATCH.__init__()


def patched(**options):
    return ha.patch_model(llama(), ha.ConeConfig(), ha.HeadFusionConfig(), **options).train()


def step(optimizer, model, caplog) -> list[str]:
    """What is said of one step."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        model(**text_inputs())[0].square().mean().backward()
        optimizer.step()
    return [r.getMessage() for r in caplog.records if r.name == "hf_hyperattn"]


OPTIMIZERS = {
    "AdamW, as it is": lambda ps: torch.optim.AdamW(ps),
    "AdamW, a group": lambda ps: torch.optim.AdamW(
        [{"params": ps, "weight_decay": 0.1}], weight_decay=0.0
    ),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, weight_decay=1e-4),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_is_said_once(name, caplog):
    model = patched()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    (said,) = step(optimizer, model, caplog)
    decay = next(g["weight_decay"] for g in optimizer.param_groups)
    assert said.startswith(
        f"hf_hyperattn: {type(optimizer).__name__} decays 24 tensors that a patch added, such as "
    )
    assert f"model.layers.0.self_attn.hyper.cone.gate, by weight_decay={decay:g}" in said
    call = said.rpartition(": ")[2]
    groups = eval(call.removeprefix(type(optimizer).__name__), {"hf_hyperattn": ha, "model": model})
    assert {g["name"]: g["weight_decay"] for g in groups} == {
        "weights": decay,
        "undecayed": 0.0,
        "hyper": 0.0,
    }
    assert not step(optimizer, model, caplog) and not step(
        torch.optim.AdamW(patched().parameters()), model, caplog
    )
    assert WATCH.done


QUIET = {
    "our groups": lambda model: torch.optim.AdamW(ha.parameter_groups(model, 1e-3, 1e-2, 0.1)),
    "no decay": lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.0),
    "none of ours": lambda model: torch.optim.AdamW(
        p for n, p in model.named_parameters() if ".hyper." not in n
    ),
    "frozen": lambda model: torch.optim.AdamW(
        p.requires_grad_(".hyper." not in n) for n, p in model.named_parameters()
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_said_without_decay(name, caplog):
    model = patched()
    assert not step(QUIET[name](model), model, caplog)
    waits = name in ("none of ours", "frozen")
    assert WATCH.done != waits
    if not waits:  # the next patch looks again
        other = patched()
        assert len(step(torch.optim.AdamW(other.parameters()), other, caplog)) == 1


def test_other_models_are_passed_over(caplog):
    model, other = patched(), llama().train()
    assert not step(torch.optim.AdamW(other.parameters()), other, caplog)
    assert len(step(torch.optim.AdamW(model.parameters()), model, caplog)) == 1


def loaded(folder):
    patched().save_pretrained(folder)
    return hf.AutoModelForCausalLM.from_pretrained(folder)


ROADS = {
    "adapter": lambda folder: peft.get_peft_model(
        llama(), ha.HyperLoraConfig(mechanisms=[ha.ConeConfig()], r=0)
    ),
    "modules_to_save": lambda folder: peft.get_peft_model(m := patched(), ha.lora_config(m, r=2)),
    "loaded": loaded,
    "copied": lambda folder: copy.deepcopy(patched()),
    "inside a module": lambda folder: torch.nn.Sequential(patched())[0],
    "compiled": lambda folder: torch.compile(patched(), backend="eager"),
}


@pytest.mark.parametrize("road", ROADS)
def test_every_road_is_watched(road, tmp_path, caplog):
    model = ROADS[road](tmp_path).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    (said,) = step(optimizer, model, caplog)
    assert "tensors that a patch added" in said


def test_the_trainer_is_not_warned_of(tmp_path, caplog):
    rows = [{"input_ids": row, "labels": row} for row in next_character()["input_ids"]]
    arguments = dict(
        max_steps=1, weight_decay=0.1, report_to="none", disable_tqdm=True, use_cpu=True
    )
    model = patched()
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        hf.Trainer(
            model,
            hf.TrainingArguments(tmp_path, save_strategy="no", **arguments),
            train_dataset=rows,
        ).train()
    assert not [r for r in caplog.records if r.name == "hf_hyperattn"]


def test_nothing_waits_before_a_patch():
    # A copy of the package that another test has loaded may have hooks of its own.
    hooks = torch_optimizer._global_optimizer_pre_hooks.values()
    assert WATCH.handle is None and WATCH.check_optimizer not in hooks


def test_other_hooks_of_optimizers_go_on():
    """Torch reads its hooks while it calls ours, which therefore takes none away."""
    seen, model = [], patched()
    handle = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        optimizer.register_step_pre_hook(lambda *_: seen.append(2))
        for _ in range(2):
            optimizer.step()
    finally:
        handle.remove()
    assert seen == [1, 2, 1, 2]
    ha.patch_model(llama(), ha.ConeConfig())
    assert WATCH.handle is None


def test_an_optimizer_without_a_learning_rate_of_its_own_steps(caplog):
    model = patched()
    optimizer = hf.optimization.Adafactor(model.parameters(), weight_decay=0.01)
    ids = text_inputs()["input_ids"]
    model(ids, labels=ids).loss.backward()
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        optimizer.step()
    assert any(
        "Adafactor(hf_hyperattn.parameter_groups(model, lr=LR" in r.getMessage()
        for r in caplog.records
    )
