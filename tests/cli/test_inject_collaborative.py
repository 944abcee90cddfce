"""`hyperattn inject --mechanism collaborative` on tiny models of GPT-2 and BERT."""

import json
import re

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from hyperattn_cli import main
from tests.integration.models import difference, run

from . import tiny
from .test_inject import prose

SIZES = dict(vocab_size=260, bos_token_id=tiny.BOS, eos_token_id=tiny.EOS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collaborative")
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SIZES))
    layers = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    bert = BertConfig(vocab_size=288, max_position_embeddings=160, num_labels=3, **layers)
    for name, model in (("gpt2", gpt2), ("bert", BertForSequenceClassification(bert))):
        with torch.no_grad():
            for part in (n for n in model.parameters() if n.dim() == 2):
                part.mul_(4)  # so that attention is not flat
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    tiny.save(folder / "llama")
    for name, seed in (("one", 1), ("two", 2)):
        (folder / f"{name}.txt").write_text(prose(seed, 1500))
    return folder


def inject(capsys, model, *more):
    code = main(["inject", str(model), "--mechanism", "collaborative", *map(str, more)])
    return code, *capsys.readouterr()


def test_full_rank_is_written_and_exact(capsys, folder, tmp_path):
    code, out, _ = inject(capsys, folder / "gpt2", "--rank", 32, "--output", tmp_path / "new")
    assert code == 0 and out.count("32 of 32  error of weights 0.0000") == 2 and "written:" in out
    before, after = (
        AutoModelForCausalLM.from_pretrained(f).eval() for f in (folder / "gpt2", tmp_path / "new")
    )
    inputs = {
        "input_ids": torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    }
    assert difference(run(before, inputs), run(after, inputs)) <= 1e-5
    assert sorted(p.name for p in (tmp_path / "new").iterdir() if p.suffix == ".json") == [
        "config.json",
        "generation_config.json",
        "hyperattn_inject.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "new" / "README.md").is_file()


def test_the_report_is_what_was_replaced(capsys, folder, tmp_path):
    code, out, _ = inject(capsys, folder / "gpt2", "--rank", 12, "--output", tmp_path / "new")
    report = json.loads((tmp_path / "new" / "hyperattn_inject.json").read_text())
    assert code == 0 and len(report["layers"]) == 2 and report["texts"] == {}
    totals = [
        int(n.replace(",", "")) for n in re.search(r"model: ([\d,]+) -> ([\d,]+)", out).groups()
    ]
    saved = sum(a - b for a, b in (layer["parameters"] for layer in report["layers"].values()))
    assert totals[0] - totals[1] == saved > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert sum(p.numel() for p in model.parameters()) == totals[1]
    assert all(0 < layer["error"] < 1 for layer in report["layers"].values())


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_texts_are_fitted_and_measured(capsys, folder, tmp_path, kind):
    texts = [folder / "one.txt", folder / "two.txt"]
    arguments = ("--rank", 12, "--length", 64, "--text", *texts, "--output", tmp_path / "new")
    code, out, _ = inject(capsys, folder / kind, *arguments)
    report = json.loads((tmp_path / "new" / "hyperattn_inject.json").read_text())
    assert code == 0 and "of logits" in out and list(report["texts"]) == ["one.txt", "two.txt"]
    assert (
        str(folder) not in json.dumps(report)
        and str(folder) not in (tmp_path / "new/README.md").read_text()
    )
    assert all(layer["logit_error"] < layer["error"] for layer in report["layers"].values())
    before, after = report["texts"]["one.txt"]
    if kind == "bert":
        assert before == 0 and 0 < after < 1
        loaded = BertForSequenceClassification.from_pretrained(tmp_path / "new")
        assert loaded.classifier.out_features == 3  # the head came along
    else:
        assert abs(after / before - 1) < 0.1


def test_without_output_nothing_is_written(capsys, folder):
    there = sorted(folder.rglob("*"))
    code, out, _ = inject(capsys, folder / "gpt2", "--rank", 8)
    assert code == 0 and "Nothing written" in out and sorted(folder.rglob("*")) == there


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "needs --rank R"),
        (("--rank", 0), "allowed: 1 or more"),
        (("--rank", 33), "allowed: 1 to 32"),
        (("--rank", 30), "allowed: 1 to 28, or 32"),
        (("--rank", 8, "--budget", 0.1), "--budget says nothing"),
        (("--rank", 8, "--pairs", 0.1), "--pairs says nothing"),
        (("--rank", 8, "--rows", 20), "--rows says nothing"),
        (("--rank", 8, "--length", 100), "--length says nothing"),
        (("--rank", 8, "--text", "missing.txt"), "missing.txt"),
    ],
)
def test_bad_arguments_are_one_line(capsys, folder, arguments, message):
    code, _, error = inject(capsys, folder / "gpt2", *arguments)
    assert code == 2 and message in error and error.count("\n") == 1


def test_models_that_cannot_are_refused(capsys, folder, tmp_path):
    code, _, error = inject(capsys, folder / "llama", "--rank", 8)
    assert code == 2 and "rotary positions" in error and error.count("\n") == 1
    inject(capsys, folder / "gpt2", "--rank", 8, "--output", tmp_path / "new")
    code, _, error = inject(capsys, tmp_path / "new", "--rank", 8)
    assert code == 2 and "patched already" in error
    code, _, error = inject(capsys, folder / "absent", "--rank", 8)
    assert code == 2 and "no such folder" in error


def test_hsa_wants_texts_and_no_rank(capsys, folder):
    for more, message in (
        ((), "needs --text"),
        (("--text", "x", "--rank", "3"), "--rank says nothing"),
    ):
        assert main(["inject", str(folder / "llama"), "--mechanism", "hsa", *more]) == 2
        assert message in capsys.readouterr().err
