"""Kills at random moments, a full disk, damage, and many processes: `make faults` in short."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_hyperattn as ha
from hf_hyperattn.utils import folders
from hf_hyperattn.utils.files import PREFIX
from tests.faults.run import full_disk, kill_many, scenarios
from tests.integration.models import llama, perturb

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.run", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def model(**options):
    made = ha.patch_model(llama(), ha.ConeConfig(), **options)
    perturb(made)
    return made


def test_two_kills_and_a_full_disk(tmp_path):
    """Two drawn kills of a save; the other scenarios are slow."""
    save = scenarios(tmp_path / "made")["save"]
    assert "2 killed" in kill_many("save", save, 2, tmp_path / "save", random.Random(0))
    full_disk(tmp_path / "disk")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_of_all_that_writes():
    assert len(run("--kills", "20").splitlines()) >= 9


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_kill_before_every_change():
    run("--every", "--only", "save,sharded,renames,adapter,inject")


@pytest.mark.slow
def test_processes_that_hold_a_model_together_save_it_together(tmp_path):
    """By name: under tensor parallelism patched models are refused when they are loaded."""
    made = llama()
    made.set_attn_implementation("cone")
    made.save_pretrained(tmp_path / "before")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.parallel", str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0, 0], "\n".join(text[-3000:] for text in said)
    after = load_file(tmp_path / "after" / "model.safetensors")
    assert all(
        torch.equal(value, after[name])
        for name, value in made.state_dict().items()
        if name in after
    )
    assert after.keys() == load_file(tmp_path / "before" / "model.safetensors").keys()


def test_the_error_of_a_load_names_the_command(tmp_path, monkeypatch):
    """Killed after the old weights went and before the new ones came."""
    target, made = tmp_path / "model", model()
    made.save_pretrained(target)

    def fail(*_):
        raise OSError("no exchange here")

    def stop(stage, place, record):
        (target / "model.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "_exchange_folders", fail)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "_rename_files", stop)
        with pytest.raises(KeyboardInterrupt):
            made.save_pretrained(target)
    with pytest.raises(OSError, match=f"interrupted.*hyperattn recover {target}") as caught:
        type(made).from_pretrained(target)
    assert "\n" not in str(caught.value)
    folders.recover(target)
    type(made).from_pretrained(target)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


DAMAGES = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "garbled": lambda path: path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "shard", "model.safetensors.index.json", "config.json"]
)
def test_what_is_damaged_does_not_load_and_the_next_save_mends_it(name, damage, tmp_path):
    made = model()
    made.save_pretrained(tmp_path, max_shard_size="1GB" if name == "model.safetensors" else "60KB")
    place = sorted(tmp_path.glob("model-0*"))[1] if name == "shard" else tmp_path / name
    DAMAGES[damage](place)
    with pytest.raises(Exception) as caught:  # noqa: B017  each reader has its own
        type(made).from_pretrained(tmp_path)
    assert not isinstance(caught.value, AssertionError)
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in made.state_dict().items())
    assert len(list(tmp_path.glob("model*"))) == 1


@pytest.mark.parametrize("where", ["positional", "keyword"])
def test_a_push_is_recognised_however_it_is_asked_for(where, tmp_path, monkeypatch):
    made, pushed = model(), []
    monkeypatch.setattr(
        type(made),
        "_upload_modified_files",
        lambda self, folder, repo, *a, **k: pushed.append(repo),
    )
    monkeypatch.setattr(
        "transformers.modeling_utils.create_and_tag_model_card", lambda *a, **k: _Card()
    )
    monkeypatch.setattr("transformers.modeling_utils.hf_api", lambda: _Api())
    if where == "positional":
        made.save_pretrained(tmp_path / "mine", True, None, True)
    else:
        made.save_pretrained(tmp_path / "mine", push_to_hub=True)
    assert pushed == ["mine"] and (tmp_path / "mine" / "model.safetensors").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


class _Card:
    def save(self, path):
        Path(path).write_text("stub")


class _Api:
    def create_repo(self, repo_id, **_):
        self.repo_id = repo_id
        return self


def test_a_persons_readme_with_nested_aliases_is_kept_and_takes_no_time(tmp_path):
    made = model()
    made.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    bomb = "\n".join(
        [
            "a0: &a0 [x, x]",
            *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
        ]
    )
    text = card.replace("---\n", f"---\n{bomb}\n", 1)
    (tmp_path / "README.md").write_text(text)
    made.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == text


def test_a_card_that_cannot_be_made_does_not_lose_the_weights(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        "hub_cards.beside.write_card", lambda *a, **k: (_ for _ in ()).throw(ValueError("no\ncard"))
    )
    made = model()
    made.save_pretrained(tmp_path / "a")
    assert (
        tmp_path / "a" / "model.safetensors"
    ).is_file() and "no card is written into" in caplog.text
    assert json.loads((tmp_path / "a" / "config.json").read_text())["hyperattn"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(PREFIX)]
