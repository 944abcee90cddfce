"""docs/reload.md and docs/checkpoint.md: the code runs, the commands exist, the keys are those of a checkpoint."""

import json
import re
import shlex
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hyperattn_cli import main
from tests.integration.models import llama

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reload.md").read_text(encoding="utf-8")
FORMAT = (DOCS / "checkpoint.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained("HuggingFaceTB/SmolLM2-135M")
    (saving, starting_anew, by_name, loading), commands = blocks("python"), blocks("bash")
    names: dict = {}
    exec(saving, names)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = names["model"](ids).logits
        assert torch.equal(names["again"](ids).logits, expected)
    exec(starting_anew, names)
    assert ha.describe(names["fresh"])["patched"] == 2
    exec(by_name, names)
    assert names["again"].config._attn_implementation == "cone"
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "hyperattn" and main(arguments) == 0
    exec(loading, names)
    with torch.no_grad():
        assert torch.equal(names["model"](ids).logits, expected)
    config = json.loads(Path("smollm2-cone/config.json").read_text())
    keys = re.findall(r"^\| `(\w+)` \|", FORMAT, re.MULTILINE)
    assert len(keys) == 3 and set(keys) <= config.keys()
    copies = list(Path("smollm2-cone-export").glob("hyperattn_*.py"))
    assert (
        20 <= len(copies) <= 90 and Path("smollm2-cone-export/hyperattn_engines_score.py") in copies
    )


def test_the_stock_implementation_is_what_the_page_says():
    model = ha.patch_model(llama(), ha.ConeConfig())
    assert (
        model.config.hyperattn_stock == "sdpa"
        and model.config.to_dict()["attn_implementation"] == "hf_hyperattn"
    )
    assert isinstance(model, AutoModelForCausalLM._model_mapping[type(model.config)])
