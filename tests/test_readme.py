"""README.md and docs/quickstart.md: the Python runs as it stands, commands and files exist, the table is true.

The code loads two models of the Hub. It runs in a folder in which their paths are a tiny random Llama and a tiny random
BERT, which `from_pretrained` prefers to the Hub's models of the same names; nothing in the code is changed.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch

import hf_hyperattn as ha
from hyperattn_cli import build_parser
from tests.cli import tiny
from tests.integration.models import bert, text_inputs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
#: The part of the page that shows other uses than the README's.
OTHER_WAYS = QUICKSTART.split("## Other ways to use it")[1]
MODEL = "HuggingFaceTB/SmolLM2-135M"
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    tiny.save(folder / MODEL, num_hidden_layers=3)
    bert(max_position_embeddings=128).save_pretrained(folder / ENCODER)
    return folder


def run(block: str) -> dict:
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.fixture
def ran(folder, monkeypatch):
    """Runs the only block that contains a text, by itself, and gives the names it left."""
    monkeypatch.chdir(folder)

    def only(text: str) -> dict:
        (block,) = (b for b in blocks("python", README + OTHER_WAYS) if text in b)
        return run(block)

    return only


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(torch.arange(40)[None]).logits


def stock(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / MODEL)


def test_by_name(ran, folder):
    model = ran('attn_implementation="cone"')["model"]
    assert model.config._attn_implementation == "cone"
    assert (logits(model) - logits(stock(folder))).abs().max() > 1e-3


def test_the_quickstart(ran, folder, capsys):
    left = ran("ha.unpatch_model(model)")
    assert "cone" in capsys.readouterr().out
    model, again, original = left["model"], left["again"], logits(stock(folder))
    assert torch.equal(logits(model), original)
    assert not any("hyper" in name for name, _ in model.named_modules())
    assert any("hyper" in name for name, _ in again.named_modules())
    assert torch.equal(logits(again), original)


def test_by_training(ran, folder):
    left = ran("HyperLoraConfig")
    added = [p for n, p in left["model"].named_parameters() if ".hyper." in n and p.requires_grad]
    assert added and all(p.grad is not None and p.grad.isfinite().all() for p in added)
    assert (folder / "cone-adapter" / "adapter_model.safetensors").is_file()


def test_by_conversion(ran, folder):
    from transformers import AutoModel

    model = ran("ha.convert")["model"].eval()
    again = AutoModel.from_pretrained("minilm-hat")
    assert type(again) is type(model) is ha.HatModel
    with torch.inference_mode():
        found = [m(**text_inputs()).last_hidden_state for m in (model, again)]
    assert torch.equal(*found)


def test_functional(ran):
    output = ran("functional.cone_attention")["output"]
    assert output.shape == (1, 8, 128, 64) and output.isfinite().all()


def test_every_block_of_python_is_among_these(ran):
    assert len(blocks("python")) == 1 and len(blocks("python", OTHER_WAYS)) == 4


def test_the_readme_is_short():
    assert README.count("\n") <= 130


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    commands = build_parser()._subparsers._group_actions[0].choices
    pages = [
        README,
        *(p.read_text() for p in [ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]),
    ]
    scripts = [script.replace("\\\n", " ") for page in pages for script in blocks("bash", page)]
    whole = [line.split("#")[0] for script in scripts for line in script.splitlines()]
    named = [line for page in pages for line in re.findall(r"`(make [^`]+|hyperattn [^`]+)`", page)]
    words = [(shlex.split(line), line in whole) for line in whole + named if line.strip()]
    assert (["make", "demo"], False) in words and (["make", "test"], False) in words
    for command, in_a_script in words:
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
        elif command[0] == "hyperattn" and "--import" in command:
            assert command[1] in commands, command  # Its options may name what the module brings.
        elif command[0] == "hyperattn" and in_a_script:
            build_parser().parse_args(command[1:])
        elif command[0] == "hyperattn":
            options = commands[command[1]]._option_string_actions
            assert not [
                word for word in command[2:] if word.startswith("-") and word not in options
            ], command


def test_files_exist():
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        named = re.findall(r"\]\((?!http|#)([^)#]+)", text)
        assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_demo_proposes_commands_that_a_wheel_has():
    from hyperattn_cli.commands.demo import ABOUT_CONES, ABOUT_SPARSE

    lines = [line for text in (ABOUT_CONES, ABOUT_SPARSE) for line in text.splitlines()]
    proposed = [line.format(model="model") for line in lines if line.startswith("    ")]
    assert len(proposed) == 2
    for line in proposed:
        program, *words = shlex.split(line)
        assert program == "hyperattn" and build_parser().parse_args(words)


def test_the_table_of_mechanisms_is_true():
    section = README.split("## Mechanisms")[1].split("\n## ")[0]
    rows = dict(
        re.findall(
            r"^\| \[(\w+)\]\(docs/\1\.md\) \|.*\| ([^|]*) \| [^|]* \|$", section, re.MULTILINE
        )
    )
    known = {mechanism["name"]: mechanism for mechanism in ha.list_mechanisms()}
    assert rows.keys() == known.keys()
    found = re.findall(r"^- \*(\w+)\*:", section, re.MULTILINE)
    assert sorted(found) == sorted(known)
    sentence = section[section.index("*By name*") :].split(".")[0]
    named = {name for mechanism in known.values() for name in mechanism["attn_implementation"]}
    assert set(re.findall(r'"(\w+)"', sentence)) == named
    for name, mechanism in known.items():
        assert ("by name" in rows[name]) == bool(mechanism["attn_implementation"])
        assert ("`convert`" in rows[name]) == (name in ("hat", "collaborative"))


def test_versions_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    assert '"transformers>=5.17,<6"' in text and "Transformers 5.17 up to 6" in README
    assert '"torch>=2.11"' in text and "torch 2.11 and newer" in README
    assert f"version: {ha.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {ha.__version__}" in (ROOT / "CHANGELOG.md").read_text()
