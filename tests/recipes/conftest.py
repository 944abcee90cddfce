"""The recipes are scripts, not an installed package: they are found beside `recipes/finetune.py`, as it finds them."""

import sys

import pytest

from .tiny import ROOT

sys.path.insert(0, str(ROOT / "recipes"))


@pytest.fixture(autouse=True)
def no_pause(tmp_path, monkeypatch):
    """Tests go on while the experiments of this checkout are paused."""
    monkeypatch.setattr("experiments.pausing.PAUSE", tmp_path / "outputs" / "pause")
