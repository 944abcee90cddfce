"""HF_HYPERATTN_AUTOLOAD, in processes of their own: the entry point is only called when torch is first imported.

The entry point is declared by a metadata folder of the test's own, so that the tests do not depend on how, or
whether, the package is installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_hyperattn_autoload

ROOT = Path(__file__).parents[1]
USE = """
from transformers import LlamaConfig, LlamaForCausalLM
size = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(LlamaConfig(**size), attn_implementation="cone")
import torch
print("ran", model(torch.arange(4)[None]).logits.isfinite().all().item())
"""


@pytest.fixture
def declared(tmp_path):
    """A folder for PYTHONPATH whose metadata declares the entry point."""
    metadata = tmp_path / "declared" / "autoload_under_test-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: autoload-under-test\nVersion: 0\n")
    declared = "[torch.backends]\nunder_test = hf_hyperattn_autoload:register\n"
    (metadata / "entry_points.txt").write_text(declared)
    return metadata.parent


def python(code: str, *path: Path, autoload: str | None) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "HF_HYPERATTN_AUTOLOAD"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if autoload is not None:
        environment["HF_HYPERATTN_AUTOLOAD"] = autoload
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=path[0])


@pytest.mark.parametrize("value", [None, "0"])
def test_does_nothing_unless_asked(declared, value):
    code = (
        "import sys, torch, hf_hyperattn_autoload as a\n"
        "assert not any(isinstance(f, a._Finder) for f in sys.meta_path)\n"
        "assert 'hf_hyperattn' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = python(code, declared, ROOT, autoload=value)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_alone_loads_nothing_more(declared):
    code = "import sys, torch; print('hf_hyperattn' in sys.modules, 'transformers' in sys.modules)"
    done = python(code, declared, ROOT, autoload="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "",
        "from transformers.modeling_utils import PreTrainedModel",  # imports torch while it is itself half run
        "from transformers import Trainer",
        "import peft",
        "import hf_hyperattn",
    ],
)
def test_names_are_there_whatever_is_imported_first(declared, first):
    done = python(f"{first}\n{USE}", declared, ROOT, autoload="1")
    assert (done.returncode, done.stdout) == (0, "ran True\n"), done.stderr
    assert "HF_HYPERATTN_AUTOLOAD" not in done.stderr


def test_finder_leaves_when_its_work_is_done(declared):
    code = "import sys, torch, transformers.modeling_utils, hf_hyperattn_autoload as a\n"
    code += "print(any(isinstance(f, a._Finder) for f in sys.meta_path), 'hf_hyperattn' in sys.modules)\n"
    code += "print(type(transformers.modeling_utils.__spec__.loader).__name__)"
    done = python(code, declared, ROOT, autoload="1")
    assert done.stdout == "False True\nSourceFileLoader\n", done.stderr


def test_a_broken_package_breaks_neither_torch_nor_transformers(declared, tmp_path):
    broken = tmp_path / "broken"
    (broken / "hf_hyperattn").mkdir(parents=True)
    (broken / "hf_hyperattn" / "__init__.py").write_text("raise RuntimeError('torn')")
    shutil.copy(ROOT / "hf_hyperattn_autoload.py", broken)
    code = "import torch; from transformers import LlamaForCausalLM; import wave; print(torch.ones(1).item())"
    done = python(code, broken, declared, autoload="1")
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("HF_HYPERATTN_AUTOLOAD=1")]
    assert said == ["HF_HYPERATTN_AUTOLOAD=1, but hf_hyperattn is not available: RuntimeError: torn"]


def test_transformers_may_be_missing(declared, tmp_path):
    alone = tmp_path / "alone"
    (alone / "transformers").mkdir(parents=True)
    (alone / "transformers" / "__init__.py").write_text("raise ImportError('no transformers here')")
    done = python("import torch, wave; print('fine')", alone, declared, ROOT, autoload="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_register_never_raises(monkeypatch):
    monkeypatch.setenv("HF_HYPERATTN_AUTOLOAD", "1")
    monkeypatch.setattr(sys, "meta_path", None)
    monkeypatch.setattr(sys, "stderr", None)
    hf_hyperattn_autoload.register()
