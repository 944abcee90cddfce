"""Patched models train: every added parameter learns, alone and beside LoRA, checkpointed, under autocast, resumed."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import hf_hyperattn as ha
from tests.integration.lessons import (
    LESSONS,
    added,
    characters,
    learn,
    llama,
    logits,
    next_character,
    optimizer_of,
    patched,
)
from tests.oracles.marks import native_adapters

GATE_AND_GEOMETRY = {"gate", "log_gamma", "log_radius"}


@pytest.mark.parametrize("name", LESSONS)
def test_twenty_steps_reduce_the_loss_and_move_every_added_parameter(name):
    model, batch = patched(name), LESSONS[name][1]()
    model(**batch).loss.backward()
    parameters = added(model)
    assert {n.rpartition(".")[2] for n in parameters} == GATE_AND_GEOMETRY
    for parameter_name, parameter in parameters.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        moves_at_once = parameter_name.endswith("gate")
        assert parameter.grad.any() == moves_at_once, (
            parameter_name
        )  # behind a gate of 0 there is no slope
    losses = learn(model, batch)
    assert losses[-1] < 0.9 * losses[0]
    for parameter_name, parameter in parameters.items():
        assert parameter.grad.isfinite().all() and parameter.detach().abs().min() > 0, (
            parameter_name
        )


def test_penumbral_cones_and_the_published_operator_train_too():
    batch = next_character()
    for config, mode in ((ha.ConeConfig("penumbral"), "blend"), (ha.ConeConfig(), "replace")):
        model = patched(config=config, mode=mode)
        losses = learn(model, batch)
        assert losses[-1] < 0.9 * losses[0]
        assert all(
            p.grad.isfinite().all() and p.detach().abs().min() > 0 for p in added(model).values()
        )


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_in_bfloat16_trains(cached):
    model = patched()
    optimizer, losses = optimizer_of(model), []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**next_character(), use_cache=cached).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    for name, parameter in added(model).items():
        assert parameter.dtype == torch.float32 and parameter.grad.isfinite().all(), name
        assert parameter.detach().abs().min() > 0, name


def test_a_model_in_bfloat16_trains():
    model = patched().to(torch.bfloat16)
    losses = learn(model, next_character())
    assert losses[-1] < 0.9 * losses[0]
    assert all(
        p.dtype == torch.bfloat16 and p.detach().abs().min() > 0 for p in added(model).values()
    )


@pytest.mark.parametrize("name", LESSONS)
def test_an_adapter_of_lora_and_hyper_comes_back_exactly(name, tmp_path):
    batch = LESSONS[name][1]()
    original = logits(patched(name), batch)
    base = patched(name)
    model = get_peft_model(base, ha.lora_config(base, r=4, lora_alpha=8))
    losses = learn(model, batch)
    assert losses[-1] < losses[0]
    trained = logits(model, batch)
    assert (trained - original).abs().max() > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(model, batch), original)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(patched(name), tmp_path)
    assert torch.equal(logits(again, batch), trained)
    merged = model.merge_and_unload()
    assert (logits(merged, batch) - trained).abs().max() <= 1e-6 * trained.abs().max()
    assert ha.describe(merged)["patched"] == ha.describe(base)["patched"] > 0


def test_merged_gates_are_saved_with_the_model(tmp_path):
    batch, base = next_character(), patched()
    model = get_peft_model(base, ha.lora_config(base))
    learn(model, batch, 5)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, batch), logits(merged, batch))
    assert any(p.any() for p in added(merged).values())


@native_adapters
def test_native_adapters_of_transformers(tmp_path):
    batch, model = next_character(), patched()
    original = logits(model, batch)
    model.add_adapter(ha.lora_config(model, r=4), "first")
    losses = learn(model.train(), batch)
    assert losses[-1] < losses[0]
    trained = logits(model, batch)
    model.disable_adapters()
    assert torch.equal(logits(model, batch), original)
    model.save_pretrained(tmp_path)
    again = patched()
    again.load_adapter(tmp_path, "first")
    assert torch.equal(logits(again, batch), trained)


def test_two_adapters_keep_gates_of_their_own():
    batch, base = next_character(), patched()
    model = get_peft_model(base, ha.lora_config(base), "one")
    learn(model, batch, 5)
    first = logits(model, batch)
    model.add_adapter("two", ha.lora_config(base))
    model.set_adapter("two")
    learn(model.train(), batch, 5)
    second = logits(model, batch)
    assert not torch.equal(first, second)
    model.set_adapter("one")
    assert torch.equal(logits(model, batch), first)


def test_lora_goes_where_the_attention_changed():
    everywhere = ha.lora_config(patched())
    assert everywhere.target_modules == {f"self_attn.{p}_proj" for p in "qkvo"}
    assert everywhere.modules_to_save is None and everywhere.task_type == "CAUSAL_LM"
    last = ha.lora_config(patched(layers=[1]))
    assert last.target_modules == {f"layers.1.self_attn.{p}_proj" for p in "qkvo"}
    not_the_feed_forward_one = {"attn.c_attn", "attn.c_proj"}
    assert ha.lora_config(patched("gpt2")).target_modules == not_the_feed_forward_one
    assert ha.lora_config(patched("t5")).task_type == "SEQ_2_SEQ_LM"
    assert ha.lora_config(patched("vit")).task_type is None


def test_what_peft_takes_is_handed_on():
    config = ha.lora_config(
        patched(),
        3,
        lora_alpha=7,
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
        use_dora=True,
    )
    assert isinstance(config, ha.HyperLoraConfig) and isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.use_dora) == (3, 7, True)
    assert config.modules_to_save == ["lm_head"] and config.target_modules == {"q_proj"}
    with pytest.raises(TypeError, match="rang"):
        ha.lora_config(patched(), rang=3)


def test_groups_keep_decay_off_what_was_added():
    model = patched("bert")
    groups = {g["name"]: g for g in ha.parameter_groups(model, 1e-4, 1e-2, weight_decay=0.1)}
    assert {n: (g["lr"], g["weight_decay"]) for n, g in groups.items()} == {
        "weights": (1e-4, 0.1),
        "undecayed": (1e-4, 0.0),
        "hyper": (1e-2, 0.0),
    }
    names = {id(p): n for n, p in model.named_parameters()}
    of = {group: {names[id(p)] for p in groups[group]["params"]} for group in groups}
    assert of["hyper"] == set(added(model))
    assert of["weights"] | of["undecayed"] | of["hyper"] == set(names.values())
    assert all(n.endswith("bias") or "LayerNorm" in n for n in of["undecayed"])
    assert not any(n.endswith("bias") or "LayerNorm" in n for n in of["weights"])


def test_groups_of_an_adapter_hold_what_is_trained_and_no_more():
    base = patched()
    model = get_peft_model(base, ha.lora_config(base))
    groups = {g["name"]: g["params"] for g in ha.parameter_groups(model, 1e-4, 1e-2)}
    assert set(groups) == {"weights", "hyper"}
    assert sum(map(len, groups.values())) == sum(p.requires_grad for p in model.parameters())
    assert {id(p) for p in groups["hyper"]} == {id(p) for p in added(model).values()}


def test_only_what_was_added_can_be_trained():
    model = ha.freeze_base(patched())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(added(model))
    losses = learn(model, next_character())
    assert losses[-1] < losses[0]


def test_errors_are_one_line_and_say_what_to_do():
    for function in (ha.lora_config, ha.freeze_base, lambda m: ha.parameter_groups(m, 1e-4, 1e-2)):
        with pytest.raises(
            ValueError, match=r"^LlamaForCausalLM is not patched; call patch_model[^\n]*$"
        ):
            function(llama())
    with pytest.raises(ValueError, match=r"^hyper_lr=-1 is not allowed; allowed: [^\n]*$"):
        ha.parameter_groups(patched(), 1e-4, -1)
    with pytest.raises(ValueError, match=r"no trainable parameter"):
        ha.parameter_groups(patched().requires_grad_(False), 1e-4, 1e-2)


def trainer(model, folder, **options) -> hf.Trainer:
    """Transformers' Trainer as it is, on rows of the text; it saves every third of six steps."""
    rows = [{"input_ids": row, "labels": row} for row in characters(rows=12)]
    arguments = hf.TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_strategy="steps",
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    return hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2])


def with_adapter(model):
    return get_peft_model(model, ha.lora_config(model, r=4, lora_dropout=0.1))


@pytest.mark.parametrize("wrap", [lambda model: model, with_adapter], ids=["full", "lora"])
def test_the_trainer_resumes_where_it_stood(wrap, tmp_path):
    straight, resumed = wrap(patched()), wrap(patched())
    trainer(straight, tmp_path).train()
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected, found = dict(straight.named_parameters()), dict(resumed.named_parameters())
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert all(p.any() for p in added(resumed).values())


def test_the_best_checkpoint_brings_its_gates_back(tmp_path):
    model = patched()
    kept = trainer(
        model, tmp_path, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True
    )
    kept.train()
    best = load_file(f"{kept.state.best_model_checkpoint}/model.safetensors")
    assert all(torch.equal(p, best[n]) and p.any() for n, p in added(model).items())
