"""`hyperattn autoload` and HF_HYPERATTN_AUTOLOAD, in an environment and processes of their own.

The environment has no packages but, by its path, those of the tests' own; what is under test comes by PYTHONPATH.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

import hf_hyperattn_autoload
from hyperattn_cli import main
from tests.oracles.marks import first_always

ROOT = Path(__file__).parents[1]
USE = """
from transformers import LlamaConfig, LlamaForCausalLM
size = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(LlamaConfig(**size), attn_implementation="cone")
import torch
print("ran", model(torch.arange(4)[None]).logits.isfinite().all().item())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The folder of an environment in which autoload is on."""
    folder = tmp_path_factory.mktemp("autoload") / "venv"
    venv.create(folder, symlinks=os.name != "nt")
    (site,) = folder.rglob("site-packages")
    (site / "packages.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    done = command(folder, "on")
    assert done.returncode == 0, done.stderr
    return folder


def interpreter(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def command(environment: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`hyperattn autoload` there."""
    code = (
        f"import sys; from hf_hyperattn.cli import main; sys.exit(main(['autoload', *{arguments}]))"
    )
    return python(environment, code, ROOT, autoload=None)


def python(environment: Path, code: str, *path: Path, autoload: str | None, options=()):
    variables = {k: v for k, v in os.environ.items() if k != "HF_HYPERATTN_AUTOLOAD"}
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
        "0"  # an earlier version that is installed here has an entry point
    )
    variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if autoload is not None:
        variables["HF_HYPERATTN_AUTOLOAD"] = autoload
    run = [interpreter(environment), *options, "-c", code]
    return subprocess.run(run, env=variables, capture_output=True, text=True, cwd=environment)


def test_on_off_and_status(tmp_path, monkeypatch, capsys):
    file = tmp_path / "hf_hyperattn_autoload.pth"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"purelib": str(tmp_path)}[name])
    for action, state in (
        ("on", "on"),
        ("status", "on"),
        ("on", "on"),
        ("off", "off"),
        ("off", "off"),
    ):
        assert main(["autoload", action]) == 0
        out, err = capsys.readouterr()
        assert f"autoload is {state}: {file}\nHF_HYPERATTN_AUTOLOAD is not set" in out and not err
        assert [p.name for p in tmp_path.iterdir()] == [file.name] * (state == "on")
        assert state == "off" or len(file.read_text().splitlines()) == 1
    file.mkdir()
    assert main(["autoload", "on"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and str(tmp_path) in err


@first_always("value", [None, "0"])
def test_does_nothing_unless_asked(environment, value):
    code = (
        "import sys, torch, hf_hyperattn_autoload as a\n"
        "assert not any(isinstance(f, a._Finder) for f in sys.meta_path)\n"
        "assert 'hf_hyperattn' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = python(environment, code, ROOT, autoload=value)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_alone_loads_nothing_more(environment):
    code = "import sys, torch; print('hf_hyperattn' in sys.modules, 'transformers' in sys.modules)"
    done = python(environment, code, ROOT, autoload="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")


@first_always(
    "first",
    [
        "from transformers.modeling_utils import PreTrainedModel",  # imports torch while it is itself half run
        "import torch",
        "",
        "from transformers import Trainer",
        "import peft",
        "import hf_hyperattn",
    ],
)
def test_names_are_there_whatever_is_imported_first(environment, first):
    done = python(environment, f"{first}\n{USE}", ROOT, autoload="1")
    assert (done.returncode, done.stdout) == (0, "ran True\n"), done.stderr
    assert "HF_HYPERATTN_AUTOLOAD" not in done.stderr


@pytest.mark.slow
def test_finder_leaves_when_its_work_is_done(environment):
    code = "import sys, torch, transformers.modeling_utils, hf_hyperattn_autoload as a\n"
    code += "print(any(isinstance(f, a._Finder) for f in sys.meta_path), 'hf_hyperattn' in sys.modules)\n"
    code += "print(type(transformers.modeling_utils.__spec__.loader).__name__)"
    done = python(environment, code, ROOT, autoload="1")
    assert done.stdout == "False True\nSourceFileLoader\n", done.stderr


@pytest.mark.slow
def test_a_broken_package_breaks_neither_torch_nor_transformers(environment, tmp_path):
    broken = tmp_path / "broken"
    (broken / "hf_hyperattn").mkdir(parents=True)
    (broken / "hf_hyperattn" / "__init__.py").write_text("raise RuntimeError('torn')")
    shutil.copy(ROOT / "hf_hyperattn_autoload.py", broken)
    code = "import torch; from transformers import LlamaForCausalLM; import wave; print(torch.ones(1).item())"
    done = python(environment, code, broken, autoload="1")
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("HF_HYPERATTN_AUTOLOAD=1")]
    assert said == [
        "HF_HYPERATTN_AUTOLOAD=1, but hf_hyperattn is not available: RuntimeError: torn"
    ]


def test_transformers_may_be_missing(environment, tmp_path):
    alone = tmp_path / "alone"
    (alone / "transformers").mkdir(parents=True)
    (alone / "transformers" / "__init__.py").write_text("raise ImportError('no transformers here')")
    done = python(environment, "import torch, wave; print('fine')", alone, ROOT, autoload="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@first_always("value", ["1", None])
@pytest.mark.parametrize("options", [[], ["-I"]], ids=["", "isolated"])
def test_a_package_that_is_gone_breaks_nothing(environment, tmp_path, value, options):
    """As after the checkout of an editable install was moved."""
    (tmp_path / "hf_hyperattn_autoload.py").write_text("raise ModuleNotFoundError('it was moved')")
    done = python(
        environment, "import torch; print('fine')", tmp_path, autoload=value, options=options
    )
    assert (done.returncode, done.stdout) == (0, "fine\n")
    lines = done.stderr.splitlines()
    assert len(lines) == (value == "1")
    assert all(
        "HF_HYPERATTN_AUTOLOAD=1, but hf_hyperattn is not available: " in line for line in lines
    )


def test_nothing_of_ours_is_called_by_torch():
    """What fails in an entry point of torch makes `import torch` fail, even where the package is gone."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert "torch.backends" not in pyproject and "entry-points" not in pyproject


def test_register_never_raises(monkeypatch):
    monkeypatch.setenv("HF_HYPERATTN_AUTOLOAD", "1")
    monkeypatch.setattr(sys, "meta_path", None)
    monkeypatch.setattr(sys, "stderr", None)
    hf_hyperattn_autoload.register()
