"""`--import MODULE`: commands read models with a score, or a sparse rule, of one's own."""

import shutil
import subprocess
import sys
import textwrap

import pytest

from hyperattn_cli import COMMANDS, WITHOUT_MODELS, main
from tests.forking import run_module

from . import tiny

MODULE = '''
from dataclasses import dataclass

import hf_hyperattn as ha
from hf_hyperattn.config import option
from hf_hyperattn.mechanisms.sparse import SparseRule, sparse_rule


@ha.score("score_of_mine")
def score_of_mine(dot, query_norm, key_norm, weight=0.5):
    """scale · q·k + c · cos(q, k)."""
    return dot + weight * dot / (query_norm * key_norm)


@sparse_rule("rule_of_mine")
@dataclass(frozen=True)
class RuleOfMine(SparseRule):
    """Near tokens, and every other one."""

    near: int = option(16, "tokens before a query that it sees", least=1)

    def share(self, length):
        return 0.5

    def visible(self, call):
        return (call.tokens > call.places - self.near) | (call.tokens % 2 == 0)
'''
#: Makes the two models in a process of its own, so that this one knows neither the score nor the rule.
MAKE = """
import sys
from transformers import AutoModelForCausalLM
import hf_hyperattn as ha
from hf_hyperattn.registry import get_mechanism
import mine_for_tests
stock, *folders = sys.argv[1:]
configs = get_mechanism("score_of_mine").config(), ha.SparseConfig(rules=[mine_for_tests.RuleOfMine(near=4)])
for folder, config in zip(folders, configs):
    ha.patch_model(AutoModelForCausalLM.from_pretrained(stock), config).save_pretrained(folder)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the module, a stock model, and two that need the module."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "mine_for_tests.py").write_text(MODULE)
    (folder / "text.txt").write_text("the cat sat on the mat, and then it went away again. " * 20)
    tiny.save(folder / "stock")
    folders = [str(folder / name) for name in ("stock", "score", "rule")]
    subprocess.run(
        [sys.executable, "-c", MAKE, *folders], cwd=folder, check=True, capture_output=True
    )
    for name in ("score", "rule"):
        tiny.tokenizer().save_pretrained(folder / name)
    return folder


def run(place, *arguments) -> subprocess.CompletedProcess:
    """The command in a process of its own, in that folder."""
    return run_module("hf_hyperattn.cli", *arguments, cwd=place)


def lines_of(model: str) -> dict[str, list[str]]:
    """A line of every command that reads this model."""
    look = ["look", model, "--text", "text.txt", "--out", f"seen-{model}", "--length", "40"]
    return {
        "describe": ["describe", model, "--json"],
        "look": look,
        "card": ["card", model],
        "push": ["push", model, "your-name/model", "--dry-run"],
        "eval": ["eval", model, "--text", "text.txt", "--length", "48", "--tokens", "96"],
        "bench": ["bench", model, "--length", "32", "--generate", "2", "--repeats", "1"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", ["score", "rule"])
@pytest.mark.parametrize("command", ["describe", "look", "card", "push", "eval", "bench"])
def test_a_command_that_reads_the_model(command, model, place):
    line = lines_of(model)[command]
    without = run(place, *line)
    assert command == "card" or without.returncode == 2, without.stdout
    given = run(place, *line, "--import", "mine_for_tests")
    assert given.returncode == 0, given.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine_for_tests.py", "./mine_for_tests.py", "mine_for_tests"])
def test_a_file_and_a_name(name, place):
    assert run(place, "describe", "score", "--import", name).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [["list"], ["doctor"], ["demo", "--help"], ["compare", "--help"], ["inject", "--help"]]
)
def test_commands_that_read_no_model_of_ours(line, place):
    assert run(place, *line, "--import", "mine_for_tests").returncode == 0


@pytest.mark.slow
def test_a_mechanism_of_ones_own_is_listed_and_measured(place):
    shown = run(place, "list", "--import", "mine_for_tests")
    assert "score_of_mine" in shown.stdout and "cone" in shown.stdout
    one = run(place, "list", "score_of_mine", "--import", "mine_for_tests")
    assert "weight=0.5" in one.stdout
    line = [
        "eval",
        "stock",
        "--text",
        "text.txt",
        "--length",
        "48",
        "--tokens",
        "96",
        "--mechanism",
        "score_of_mine",
    ]
    assert run(place, *line).returncode == 2
    given = run(place, *line, "--import=mine_for_tests")
    assert given.returncode == 0, given.stderr


def test_every_command_that_reads_models_takes_it(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert ("--import MODULE" in capsys.readouterr().out) == (command not in WITHOUT_MODELS)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "nowhere_to_be_found",
            None,
            "no module of this name; allowed: a .py file, or a module that Python finds",
        ),
        ("absent.py", None, "no such file; allowed: a .py file, or a module's name"),
        ("a b", None, "no module's name; allowed: such as my_scores, or my_scores.py"),
        ("broken_for_tests.py", "def", "failed: SyntaxError"),
        ("raising_for_tests.py", "raise RuntimeError('mine')", "failed: RuntimeError: mine"),
        (
            "lacking_for_tests.py",
            "import not_there_either",
            "failed: ModuleNotFoundError: No module named 'not_there",
        ),
        ("json.py", "x = 1", "Python knows another module 'json'"),
        ("2.py", "x = 1", "no module's name"),
    ],
)
def test_what_cannot_be_imported(name, content, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if content is not None:
        (tmp_path / name).write_text(textwrap.dedent(content))
    assert main(["list", "--import", name]) == 2
    out, err = capsys.readouterr()
    assert (
        not out
        and err.count("\n") == 1
        and err.startswith(f"hyperattn list: error: --import {name}")
    )
    assert said in err


def test_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one_of_two_for_tests", "two_of_two_for_tests"):
        (tmp_path / f"{name}.py").write_text("")
    lines = ["list", "--import", "one_of_two_for_tests", "--import", "two_of_two_for_tests.py"]
    assert (
        main(lines) == 0 and {"one_of_two_for_tests", "two_of_two_for_tests"} <= sys.modules.keys()
    )
    shutil.rmtree(tmp_path, ignore_errors=True)
