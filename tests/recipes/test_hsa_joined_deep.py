"""recipes/experiments hsa_joined_deep: what the search reads, two steps of every row, and the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import draw, hsa_joined, hsa_joined_deep, hsa_joined_deep_tables, store


@pytest.fixture
def images(monkeypatch):
    """Fashion-MNIST's shapes, few of them; the parts that are read."""
    known, read = (torch.rand(80, 1, 28, 28), torch.arange(80) % 10), []
    monkeypatch.setattr(hsa_joined, "fashion", lambda part: known)
    inputs_of = hsa_joined.inputs_of

    def seen(settings, name, images, labels, draw):
        read.append(images)
        return inputs_of(settings, name, images, labels, draw)

    monkeypatch.setattr(hsa_joined, "inputs_of", seen)
    return known[0], read


SMALL = {
    "seeds": [0, 1],
    "layers": [1, 2],
    "search": {"seed": 9, "first": 40, "rates": [0.01, 0.02]},
}
TASK = hsa_joined_deep.SETTINGS["task"] | {"steps": 2, "batch": 4, "width": 16, "test": 40}
SMALL = hsa_joined_deep.SETTINGS | SMALL | {"task": TASK}


def test_the_search_reads_other_images_than_the_end(images):
    every, read = images
    for first in (40, 0):
        found = hsa_joined_deep.train(SMALL, "joined, flat", 1, 0, 0.01, first)
        assert torch.equal(read[-1], every[first : first + 40]) and found["learning_rate"] == 0.01
    settings = hsa_joined_deep.SETTINGS
    assert settings["search"]["first"] >= settings["task"]["test"]


def test_two_steps_of_every_row(images, tmp_path):
    experiment = store.Experiment("hsa_joined_deep", SMALL, hsa_joined_deep.runs)
    assert store.perform(experiment, tmp_path)
    runs = store.load("hsa_joined_deep", tmp_path)["runs"]
    one, two = (runs[f"joined, tree, {n}, seed 0"]["parameters"] for n in ("1 layer", "2 layers"))
    assert one < two and len(runs) == 4 * 2 + 4 * 2
    page = tmp_path / "page.md"
    page.write_text(hsa_joined_deep_tables.PAGE.read_text())
    hsa_joined_deep_tables.draw(tmp_path, page)
    assert "tree less flat" in page.read_text()


def test_committed_results_are_of_these_settings_and_on_the_page():
    page = hsa_joined_deep_tables.PAGE.read_text()
    if not (store.FOLDER / "hsa_joined_deep.json").exists():
        assert page.count("The runs are not done yet.") == len(hsa_joined_deep_tables.TABLES)
        return
    results = store.load("hsa_joined_deep")
    assert results["settings"] == json.loads(json.dumps(hsa_joined_deep.SETTINGS))
    for mark, make in hsa_joined_deep_tables.TABLES.items():
        assert draw.put(page, mark, make(results)) == page, mark
