"""Fusion of heads in models: identity, training, reload, caches, adapters, the compiler; beside other mechanisms."""

import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.analysis import head_usage, record_heads
from tests.integration.lessons import next_character
from tests.integration.models import FAMILIES, State, difference, llama, perturb, run, text_inputs

CONFIG = ha.HeadFusionConfig()


def test_the_record_inside_peft_and_the_compiler():
    torch._dynamo.reset()
    model = ha.patch_model(llama(num_hidden_layers=2), CONFIG)
    perturb(model)
    expected = head_usage(model, input_ids=text_inputs()["input_ids"], use_cache=False).weights
    for wrapped in (
        get_peft_model(model, ha.lora_config(model)),
        torch.compile(model, backend="eager"),
    ):
        found = head_usage(
            wrapped.eval(), input_ids=text_inputs()["input_ids"], use_cache=False
        ).weights
        assert len(found) == 2
        for one, other in zip(found.values(), expected.values(), strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", ["blend", "replace"])
def test_beside_cone_hype_and_lora(mode):
    """Score, bias and fusion in one config; the weights of heads act on whatever the attention gave."""
    model, inputs = llama(), text_inputs()
    state, mechanisms = State(model), (CONFIG, ha.ConeConfig(), ha.HypeConfig(max_length=64))
    ha.patch_model(model, *mechanisms, mode=mode)
    perturb(model)
    with record_heads(model) as record:
        model(**inputs)
    without = ha.patch_model(llama(), *mechanisms[1:], mode=mode)
    without.load_state_dict(model.state_dict(), strict=False)
    host, other = (m.model.layers[0].self_attn for m in (model, without))
    given = {}
    for module, name in ((host, "with"), (other, "without")):
        module.o_proj.register_forward_pre_hook(
            lambda _, args, name=name: given.update({name: args[0]})
        )
    run(model, inputs), run(without, inputs)
    factors = 4 * record.calls["model.layers.0.self_attn"][0]
    weighed = given["without"].unflatten(-1, (4, 8)) * factors[..., None]
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(given["with"][real], weighed.flatten(-2)[real], atol=1e-5, rtol=0)
    peft = get_peft_model(
        ha.unpatch_model(model) and ha.patch_model(model, *mechanisms), ha.lora_config(model)
    )
    peft(**next_character()).loss.backward()
    assert all(p.grad is not None for n, p in peft.named_parameters() if p.requires_grad)
    ha.unpatch_model(peft.unload())
    assert not [f for f in state.differences(State(model)) if "self_attn._forward_pre_hooks" in f]


def test_cross_attention_weighs_by_what_the_decoder_reads():
    make, inputs = FAMILIES["bart"]
    model, inputs = make(), inputs()
    before = run(model, inputs)
    ha.patch_model(model, CONFIG, include_cross_attention=True)
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    usage = head_usage(model, **inputs)
    cross = usage.weights["model.decoder.layers.0.encoder_attn"]
    assert cross.shape == (2, 7, 4)


def test_a_trainer_that_keeps_heads_even(tmp_path):
    """The subclass of docs/head_fusion.md, taken from the page."""
    page = (Path(__file__).parents[3] / "docs" / "head_fusion.md").read_text()
    source = next(
        b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class EvenHeads" in b
    )
    names = {"Trainer": hf.Trainer}
    exec(source, names)
    rows = [{"input_ids": ids, "labels": ids} for ids in next_character()["input_ids"]]
    found = {}
    for cls in (hf.Trainer, names["EvenHeads"]):
        torch.manual_seed(0)
        model = ha.freeze_base(ha.patch_model(llama(num_hidden_layers=1), CONFIG))
        perturb(model)
        arguments = hf.TrainingArguments(
            tmp_path,
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=0.1,
            use_cpu=True,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        cls(model, arguments, train_dataset=rows).train()
        found[cls] = [p.detach().clone() for n, p in model.named_parameters() if ".hyper." in n]
    assert not all(map(torch.equal, *found.values()))
