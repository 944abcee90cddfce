"""recipes/experiments vision: the images, the model, two steps of every row and of the full size, and the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import draw, findings, store, tables, vision, vision_images, vision_tables
from torch.nn import functional as F

SMALL = {
    "width": 8,
    "heads": 2,
    "layers": 1,
    "mlp": 8,
    "steps": 2,
    "batch": 4,
    "seeds": [0, 1],
    "test": 10,
}
SMALL |= {"search": {"seed": 9, "steps": 1, "images": 6, "rates": [1e-3, 2e-3]}}


@pytest.fixture(autouse=True)
def random_images(monkeypatch):
    """Forty images that nobody has to fetch."""
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.rand(40, 1, 28, 28, generator=draw), torch.arange(40) % 10
    monkeypatch.setattr(vision_images, "fashion", lambda part: (images, labels))
    vision.data_of.cache_clear()
    yield images, labels
    vision.data_of.cache_clear()


def test_images_for_the_search_are_not_trained_on_and_all_are_seen(random_images):
    images, labels = random_images
    data = vision_images.Fashion(6, 10)
    batches = data.batches(2, seed=3)
    seen, named = map(torch.cat, zip(*(next(batches) for _ in range(17))))
    flat = lambda x: {tuple(row) for row in x.flatten(1).mul(1e4).round().int().tolist()}
    scaled = (images - vision_images.MEAN) / vision_images.DEVIATION
    assert flat(seen) < flat(scaled[:-6]) | flat(scaled[:-6].flip(-1)) and not flat(seen) <= flat(
        scaled[:-6]
    )
    assert named.bincount().tolist() == labels[:-6].bincount().tolist()
    kept, theirs = map(torch.cat, zip(*data.in_order("search", 4)))
    assert flat(kept) == flat(scaled[-6:]) and theirs.tolist() == labels[-6:].tolist()


@pytest.mark.parametrize("kind", dict(vision.SETTINGS["rows"]))
def test_the_score_is_in_every_layer_and_starts_as_it_should(kind):
    torch.manual_seed(0)
    model = vision.model_of(vision.SETTINGS | SMALL | {"layers": 2}, kind, 0.5)
    called = []
    for layer in model.deit.layers:
        layer.attention.scored.register_forward_hook(lambda *a: called.append(a[0]))
    assert model(torch.randn(2, 1, 28, 28)).logits.shape == (2, 10) and len(called) == 2
    if kind in vision.CONES:
        torch.testing.assert_close(called[0].logs["gamma"].exp(), torch.full((2,), 0.5))
    if kind == "dot product":  # as Transformers computes it
        images = torch.randn(3, 1, 28, 28)
        mine = model(images).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(mine, model(images).logits, rtol=1e-4, atol=1e-5)


def test_two_steps_of_every_row_of_the_plan(tmp_path, monkeypatch):
    experiment = store.Experiment("vision", vision.SETTINGS | SMALL, vision.runs)
    assert store.perform(experiment, tmp_path)
    found = store.load("vision", tmp_path)
    run = found["runs"]["umbral cone, psi, gamma 0.1, seed 1"]
    assert 0 <= run["accuracy"] <= 1 and run["learned"]["gamma"] == pytest.approx(0.1, rel=0.05)
    page = tmp_path / "page.md"
    page.write_text(vision_tables.PAGE.read_text())
    vision_tables.draw(tmp_path, page, tmp_path)
    text = page.read_text()
    assert (
        "not done yet" not in text and "| umbral cone, xi, gamma 0.5 |" in text and "p = " in text
    )
    assert (tmp_path / "vision.svg").read_bytes().startswith(b"<?xml")
    monkeypatch.setattr(findings, "load", lambda name: found)
    said, verdict = findings.vision_gain("umbral cone, psi", 1.0)
    assert "against Euclidean distance" in said and verdict
    mine, plain = (
        vision_tables.accuracies(found, kind, 1.0) for kind in ("umbral cone, psi", "dot product")
    )
    assert tables.paired(mine, plain, 2) in said
    assert "gamma 0.1" in findings.vision_gammas()[0]


@pytest.mark.parametrize("kind, gamma", vision.FULL["rows"][::3])
def test_the_full_size_starts_on_a_folder_of_images(kind, gamma, tmp_path):
    """DeiT-S but for its depth, two classes of random images."""
    Image = pytest.importorskip("PIL.Image")
    draw = torch.Generator().manual_seed(0)
    for part, count in {"train": 4, "val": 2}.items():
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (40, 60, 3), dtype=torch.uint8, generator=draw)
                Image.frombytes("RGB", (60, 40), bytes(pixels.flatten().tolist())).save(
                    tmp_path / part / name / f"{i}.JPEG"
                )
    settings = (
        vision.SETTINGS
        | vision.FULL
        | {"data": str(tmp_path), "classes": 2, "layers": 1, "test": 4}
    )
    settings |= {"steps": 2, "batch": 2, "search": vision.FULL["search"] | {"images": 2}}
    found = vision.train(settings, kind, gamma, 0, 1e-3, 2, "test")
    assert found["accuracy"] in (0, 0.25, 0.5, 0.75, 1) and found["loss"] > 0
    (tmp_path / "val" / "cow").mkdir()
    (tmp_path / "val" / "cow" / "0.JPEG").touch()
    with pytest.raises(
        ValueError, match="has 2 classes in train, 3 in val; allowed: the same in both"
    ):
        vision_images.Folder(tmp_path, 2, 4, 224)


def test_the_full_size_is_deit_s():
    with torch.device("meta"):
        model = vision.model_of(vision.SETTINGS | vision.FULL, "dot product", 1.0)
    assert vision.size_of(model) == pytest.approx(22e6, rel=0.02)  # the paper's


def test_mixed_images_have_the_shares_of_their_labels():
    torch.manual_seed(0)
    wanted = F.one_hot(torch.arange(6), 6).double()
    images = wanted[:, :, None, None].expand(
        -1, -1, 12, 20
    )  # of each class the share of its pixels
    both = set()
    for _ in range(40):
        mixture, shares = vision_images.mixed(images, wanted)
        torch.testing.assert_close(mixture.mean((-1, -2)), shares)
        torch.testing.assert_close(shares.sum(1), torch.ones(6).double())
        both.add(bool((mixture[:, :, :1, :1] == mixture).all()))
    assert both == {True, False}


def test_committed_results_are_of_these_settings_and_on_the_page():
    page, path = vision_tables.PAGE.read_text(), store.FOLDER / "vision.json"
    if not path.exists():
        assert page.count("The runs are not done yet.") == len(vision_tables.TABLES)
        return
    results = store.load("vision")
    assert results["settings"] == json.loads(json.dumps(vision.SETTINGS))
    assert set(results["runs"]) <= {key for key, _ in vision.runs(vision.SETTINGS, {})}
    for name, make in vision_tables.TABLES.items():
        assert draw.put(page, name, make(results)) == page, name
