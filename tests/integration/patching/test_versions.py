"""The tested versions stand in one place, and newer ones are warned of once, at the first patch or name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

import hf_hyperattn as ha
from hf_hyperattn.integration.patching import versions
from hf_hyperattn.integration.patching.versions import TESTED, warn_of_newer_versions
from tests.integration.models import FAMILIES, llama

ROOT = Path(__file__).parents[3]
FIRST_USES = {
    "patch": lambda: ha.patch_model(llama(), ha.ConeConfig()),
    "name": lambda: llama().set_attn_implementation("cone"),
    "config": lambda: type(llama())._from_config(llama().config, attn_implementation="hyperbolic"),
    "convert": lambda: ha.convert(FAMILIES["gpt2"][0](), ha.CollaborativeConfig(rank=8)),
}


def pinned(file: str) -> dict[str, Version]:
    """The versions that a file of constraints pins."""
    pins = re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {name: Version(number) for name, number in pins}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that other versions are installed."""
    found = {name: newest for name, (_, newest) in TESTED.items()}
    monkeypatch.setattr(versions, "version", found.__getitem__)
    warn_of_newer_versions.cache_clear()
    yield found
    warn_of_newer_versions.cache_clear()


@pytest.mark.parametrize("name", TESTED)
def test_what_is_stated_agrees_with_the_constraints(name):
    oldest, newest = map(Version, TESTED[name])
    assert pinned("constraints-lowest.txt")[name] == oldest
    assert oldest <= pinned("constraints.txt")[name] <= newest
    if (
        name != "torch"
    ):  # the newest torch has no CPU build, so that only `make test-newest` runs with it
        assert pinned("constraints.txt")[name] == newest
    floor = re.search(
        rf'^    "{name}>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert Version(floor[1]) == oldest


@pytest.mark.parametrize("name", TESTED)
def test_what_is_installed_is_stated_as_tested(name):
    """`make test-newest` fails here after a release: raise `TESTED` once nothing else fails."""
    oldest, newest = map(Version, TESTED[name])
    assert oldest <= Version(Version(version(name)).base_version) <= newest


@pytest.mark.parametrize("use", FIRST_USES.values(), ids=FIRST_USES)
def test_newer_versions_are_warned_of_once(use, installed, caplog):
    installed |= {"torch": "99.0.1+cu999", "peft": "98.0.dev0"}
    use()
    use()
    (record,) = [r for r in caplog.records if "has not been tested with" in r.getMessage()]
    text = record.getMessage()
    assert record.name == "hf_hyperattn" and record.levelname == "WARNING" and "\n" not in text
    assert "torch 99.0.1+cu999 and peft 98.0.dev0" in text and "transformers" not in text
    assert all(
        f"{name} {TESTED[name][0]} to {TESTED[name][1]}" in text for name in ("torch", "peft")
    )


@pytest.mark.parametrize("local", ["", "+cpu", ".post1"])
def test_tested_versions_are_silent(local, installed, caplog):
    installed["torch"] += local
    for use in FIRST_USES.values():
        use()
    assert "has not been tested" not in caplog.text


def test_the_import_and_a_stock_model_are_silent():
    program = """
import logging
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "99.0" if name == "torch" else real(name)
import hf_hyperattn as ha
from hf_hyperattn.integration.patching import versions
from transformers import LlamaConfig, LlamaForCausalLM
size = dict(vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**size))
assert versions.warn_of_newer_versions.cache_info().misses == 0
ha.patch_model(model, ha.ConeConfig())
assert versions.warn_of_newer_versions.cache_info().misses == 1
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr.count("has not been tested with torch 99.0;") == 1, (
        ran.stderr[-2000:]
    )
