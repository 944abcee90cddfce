"""Saved in one process, loaded in another; and saves that do not reach their end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.integration.models import difference, perturb, run
from tests.integration.patches import patched

ROOT = Path(__file__).parents[3]


def run_python(script: str, *arguments) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, cwd=ROOT
    )


OTHERS = ("llama", "llava", "clip", "t5", "whisper", "falcon", "deberta-v2")


@pytest.mark.slow
def test_another_process_with_one_import_and_without(tmp_path):
    expected, directories = {}, [tmp_path / family for family in OTHERS]
    for family, directory in zip(OTHERS, directories, strict=True):
        model, inputs, _ = patched(family)
        model.save_pretrained(directory)
        torch.save(inputs, directory / "inputs.pt")
        with torch.no_grad():
            expected[family] = [
                t for t in model(**inputs).to_tuple() if isinstance(t, torch.Tensor)
            ]
    answers = {}
    for how in ("without", "with"):
        done = run_python("loads.py", how, *directories)
        assert done.returncode == 0, done.stderr
        answers[how] = json.loads(done.stdout.splitlines()[-1])
    for family, directory in zip(OTHERS, directories, strict=True):
        assert answers["with"][str(directory)] == {"error": None, "ours": True}
        found = torch.load(directory / "outputs.pt")
        assert all(torch.equal(a, b) for a, b in zip(found, expected[family], strict=True)), family
        assert "hf_hyperattn" in (
            answers["without"][str(directory)]["error"] or "loaded, silently"
        ), family


def test_a_save_that_fails_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf.modeling_utils, "safe_save_file", full)
    perturb(model, 2.0)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0


def test_weights_of_another_kind_stay(tmp_path):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path, variant="fp16")
    others = [
        "adapter_model.safetensors",
        "model-old.safetensors",
        "models.safetensors",
        "model.fp16.safetensors",
    ]
    for name in set(others) - {"model.fp16.safetensors"}:
        (tmp_path / name).write_bytes(b"mine")
    for size in ("1GB", "10KB", "1GB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert all((tmp_path / name).is_file() for name in others)
    assert {p.name for p in tmp_path.glob("*.safetensors*")} == {"model.safetensors", *others}
    assert (
        difference(expected, run(type(model).from_pretrained(tmp_path, variant="fp16"), inputs))
        == 0
    )
