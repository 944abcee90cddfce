"""`hyperattn card` and `hyperattn push --dry-run`; tests/hub pushes to a Hub on this machine."""

import json
import shutil

import pytest
import torch
import transformers as hf
from peft import get_peft_model
from safetensors.torch import load_file, save_file

import hf_hyperattn as ha
from hf_hyperattn.integration.export.repositories import export_remote_code
from hyperattn_cli import main

from ..integration.models import llama
from . import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a patched model, an adapter, a config and an export, by name."""
    place = tmp_path_factory.mktemp("saved")
    llama().save_pretrained(place / "base")
    model = ha.patch_model(llama(), ha.ConeConfig(), layers=[1])
    model.save_pretrained(place / "model")
    tiny.tokenizer().save_pretrained(place / "model")
    base = hf.AutoModelForCausalLM.from_pretrained(place / "base")
    config = ha.HyperLoraConfig(mechanisms=[ha.ConeConfig()], task_type="CAUSAL_LM", r=2)
    get_peft_model(base, config).save_pretrained(place / "adapter")
    ha.HyperAttnConfig([ha.ConeConfig()], layers="last-third").save_pretrained(place / "config")
    export_remote_code(place / "model", place / "export")
    return place


def report(capsys, *arguments) -> dict:
    assert main(["push", *map(str, arguments), "--dry-run", "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "name, files",
    [
        ("model", {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}),
        ("adapter", {"adapter_config.json", "adapter_model.safetensors", "hyperattn_config.json"}),
        ("config", {"hyperattn_config.json"}),
        (
            "export",
            {
                "config.json",
                "model.safetensors",
                "modeling_hyperattn.py",
                "hyperattn_manifest.json",
            },
        ),
    ],
)
def test_what_reloads_exactly_would_be_pushed(name, files, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", None)  # nothing may be asked of the Hub
    shutil.copytree(saved / name, tmp_path / name)
    (tmp_path / name / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in (tmp_path / name).iterdir()}
    found = report(capsys, tmp_path / name, "me/mine")
    assert files | {"README.md"} <= set(found["files"]) and found["left_out"] == ["notes.txt"]
    assert (
        found["repo"] == "me/mine"
        and found["dry_run"]
        and not found["private"]
        and found["url"] is None
    )
    assert (found["tensors"] > 0) == (name != "config")
    assert {path: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


def changed(folder, change) -> None:
    """Change the tensors of a saved model or adapter."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def gate(tensors) -> str:
    return next(name for name in tensors if name.endswith("gate"))


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("model", lambda tensors: tensors.pop(gate(tensors)), "gate"),
        (
            "model",
            lambda tensors: tensors.pop("model.norm.weight"),
            "model.norm.weight is missing in the folder",
        ),
        (
            "model",
            lambda tensors: tensors.update(more=torch.zeros(2)),
            "more is not taken by the model",
        ),
        ("model", lambda tensors: tensors.update({gate(tensors): torch.zeros(7)}), "gate"),
        ("adapter", lambda tensors: tensors.pop(gate(tensors)), "gate"),
    ],
)
def test_what_does_not_reload_is_refused(name, change, said, saved, tmp_path, capsys):
    shutil.copytree(saved / name, tmp_path / name)
    changed(tmp_path / name, change)
    assert main(["push", str(tmp_path / name), "me/mine", "--dry-run"]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("hyperattn")
    ]
    assert "does not reload exactly, and is not pushed" in line and said in line


def test_an_export_that_was_changed_and_an_adapter_without_its_base_are_refused(
    saved, tmp_path, capsys
):
    shutil.copytree(saved / "export", tmp_path / "export")
    with open(tmp_path / "export" / "modeling_hyperattn.py", "a") as file:
        file.write("# more\n")
    shutil.copytree(saved / "adapter", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(saved / "base"), str(tmp_path / "gone")))
    for name, said in (("export", "modeling_hyperattn.py was changed"), ("adapter", "its base")):
        assert main(["push", str(tmp_path / name), "me/mine", "--dry-run"]) == 2
        assert said in capsys.readouterr().err


def test_the_card_is_printed_written_and_kept(saved, tmp_path, capsys):
    shutil.copytree(saved / "model", tmp_path / "model")
    card = tmp_path / "model" / "README.md"
    card.unlink()
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"license": "mit", "base_model": "org/base"}))
    line = ["card", str(tmp_path / "model"), "--facts", str(facts)]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "license: mit" in text and "org/base" in text and "`cone`" in text and not card.exists()
    assert main([*line, "--write"]) == 0
    assert capsys.readouterr().out == f"wrote {card}\n" and card.read_text().strip() == text.strip()
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"card": card.read_text(), "written": None}
    card.write_text("mine")
    assert main([*line, "--write"]) == 1
    assert "kept" in capsys.readouterr().out and card.read_text() == "mine"


def test_facts_for_a_card_that_stays_are_said_to_be_unused(saved, tmp_path, capsys):
    shutil.copytree(saved / "config", tmp_path / "config")
    (tmp_path / "facts.json").write_text('{"license": "mit"}')
    line = [
        "push",
        str(tmp_path / "config"),
        "me/mine",
        "--dry-run",
        "--facts",
        str(tmp_path / "facts.json"),
    ]
    said = "--facts says nothing: README.md was written by hand and stays\n"
    assert main(line) == 0 and said not in capsys.readouterr().out
    (tmp_path / "config" / "README.md").write_text("mine")
    assert main(line) == 0 and said in capsys.readouterr().out
    assert report(capsys, tmp_path / "config", "me/mine")["card_stays"]


@pytest.mark.parametrize("facts", ["[]", '{"licence": "mit"}', '{"license": "a b"}', "{"])
def test_wrong_facts_are_one_line(facts, saved, tmp_path, capsys):
    (tmp_path / "facts.json").write_text(facts)
    for command in (["card"], ["push", "me/mine", "--dry-run"]):
        line = [
            command[0],
            str(saved / "model"),
            *command[1:],
            "--facts",
            str(tmp_path / "facts.json"),
        ]
        assert main(line) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "allowed: " in err and "--traceback shows where" not in err


def test_a_stock_model_and_a_name_that_is_none_are_refused(saved, capsys):
    for line in (
        ["push", saved / "base", "me/x"],
        ["push", saved / "model", "a/b/c"],
        ["card", saved / "base"],
    ):
        assert main([*map(str, line)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
