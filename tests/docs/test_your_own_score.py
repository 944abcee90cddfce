"""docs/your_own_score.md does what it says: its module is imported, and its code run, as they stand there."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.integration.export.repositories import export_remote_code
from hf_hyperattn.registry import MECHANISMS
from hf_hyperattn.testing import CONTRACTS, check_mechanism
from tests.cli import tiny
from tests.registries import restored

PAGE = (Path(__file__).parents[2] / "docs" / "your_own_score.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = ("decay", "cosine", "elliptic")


@pytest.fixture(autouse=True)
def my_scores(tmp_path, monkeypatch):
    """The page's module; the working directory has a tiny model where the Hub has SmolLM2."""
    (source,) = (b for b in BLOCKS if b.startswith("# file: my_scores.py\n"))
    (tmp_path / "my_scores.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with restored():
        yield importlib.import_module("my_scores")
    del sys.modules["my_scores"]


def run(text: str) -> dict:
    """The names that the only block with this text leaves."""
    (block,) = (b for b in BLOCKS if text in b and not b.startswith("# file"))
    names: dict = {}
    exec(compile(block, "your_own_score.md", "exec"), names)
    return names


def test_called_by_itself():
    left = run("scored_attention")
    assert left["output"].shape == (1, 4, 64, 32) and left["heads"].grad.isfinite().all()


def test_in_a_model(tmp_path):
    tiny.save(tmp_path / "HuggingFaceTB/SmolLM2-135M", num_hidden_layers=3)
    left = run("ScoreConfig")
    assert left["replaced"].config._attn_implementation == "cosine"
    model, again, tokens = left["model"], left["again"], left["tokens"]
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, again.eval()(tokens).logits)
    assert any("decay.log_slope" in name for name, _ in again.named_parameters())
    assert "import my_scores" in (tmp_path / "smollm2-decay" / "README.md").read_text()


def test_every_block_is_run():
    run_here = ("scored_attention", "ScoreConfig", "check_mechanism", "# file: my_scores.py")
    assert all(any(text in block for text in run_here) for block in BLOCKS) and len(BLOCKS) == len(
        run_here
    )
    assert set(NAMES) == set(MECHANISMS) & set(re.findall(r'@ha.score\(\s*"(\w+)"', PAGE))


@pytest.mark.parametrize("name", NAMES)
def test_its_scores_keep_the_contracts(name):
    quick = ["identity", "learning", "reload", "copies", "heads", "cached", "by_name"]
    assert check_mechanism(name, contracts=quick, families=["llama"])["held"] >= 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_contract_as_the_page_asks_for_it(capsys):
    run("check_mechanism")
    assert "held" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "cosine"])
def test_every_contract_of_the_others(name):
    assert check_mechanism(name, contracts=CONTRACTS, families=["llama"])["held"] >= 30


def test_an_export_asks_for_the_module(tmp_path):
    model = ha.patch_model(
        AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path)), ha.ScoreConfig("elliptic")
    )
    model.save_pretrained(tmp_path / "patched")
    assert export_remote_code(tmp_path / "patched", tmp_path / "exported").packages == [
        "hf_hyperattn",
        "my_scores",
    ]
    assert "import my_scores" in next((tmp_path / "exported").glob("modeling*.py")).read_text()
