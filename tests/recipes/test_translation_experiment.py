"""recipes/experiments/translation: the texts, the model, two steps of every row, and the page."""

from __future__ import annotations

import json
import random

import pytest
import torch
from experiments import draw, help_texts, store, translation, translation_tables
from experiments.translation_model import BEGIN, END, PAD, Translator

SMALL = {"width": 8, "heads": 2, "layers": 1, "dropout": 0.0, "longest": 20}


def test_paragraphs_are_aligned_by_their_ids(tmp_path, monkeypatch):
    page = '<h1 id="hd_id1" dir="auto">{}</h1><p id="par_id2" class="x">{} <b>{}</b>\n {}</p><p id="bm_3">no</p>'
    words = {
        "de": ("Ein langer deutscher Titel", "Das ist", "nur", "ein Satz"),
        "en-US": ("A long English title", "This is", "only", "a sentence"),
    }
    inside = tmp_path / "usr/share/libreoffice/help"
    for language, said in words.items():
        (inside / language / "text").mkdir(parents=True)
        (inside / language / "text" / "a.html").write_text(page.format(*said))
    (inside / "de" / "text" / "alone.html").write_text(page.format(*"abcd"))
    monkeypatch.setattr(help_texts, "unpacked", lambda packages: tmp_path)
    monkeypatch.setattr(
        help_texts, "Path", lambda path: tmp_path / "none" if path == "/" else type(tmp_path)(path)
    )
    help_texts.pairs.cache_clear()
    found = help_texts.pairs(4, 16)
    help_texts.pairs.cache_clear()
    assert found == (
        ("Das ist nur ein Satz", "This is only a sentence"),
        ("Ein langer deutscher Titel", "A long English title"),
    )


def test_parts_have_no_side_in_common():
    draw = random.Random(0)
    rows = tuple({(f"d{draw.randrange(300)}", f"e{draw.randrange(300)}") for _ in range(600)})
    parts = help_texts.parts(rows, {"search": 30, "test": 50}, 1)
    assert [len(parts[name]) for name in ("search", "test")] == [30, 50] and parts["train"]
    sides = [{side for row in part for side in row} for part in parts.values()]
    assert not sides[0] & sides[1] and not (sides[0] | sides[1]) & sides[2]
    assert parts == help_texts.parts(rows, {"search": 30, "test": 50}, 1)


def test_files_are_read_line_by_line(tmp_path):
    (tmp_path / "train.de").write_text("eins\nzwei\n")
    (tmp_path / "train.en").write_text("one\ntwo\n")
    assert help_texts.pairs_in(tmp_path, "train") == [("eins", "one"), ("zwei", "two")]
    (tmp_path / "train.en").write_text("one\n")
    with pytest.raises(ValueError, match="train.de has 2 lines, .en 1; allowed: as many, aligned"):
        help_texts.pairs_in(tmp_path, "train")


@pytest.mark.parametrize("kind", dict(translation.SETTINGS["rows"]))
def test_padding_and_the_future_change_nothing(kind):
    torch.manual_seed(0)
    model = Translator(kind, 4, 40, SMALL).eval()
    source, target = torch.randint(3, 40, (2, 7)), torch.randint(3, 40, (2, 6))
    with torch.no_grad():
        logits = model(source, target)
        assert logits.shape == (2, 6, 40)
        padded = model(torch.nn.functional.pad(source, (0, 3), value=PAD), target)
        torch.testing.assert_close(padded, logits, rtol=1e-4, atol=1e-4)
        target[:, 4:] = 5
        torch.testing.assert_close(
            model(source, target)[:, :4], logits[:, :4], rtol=1e-4, atol=1e-4
        )
        said = model.greedy(source, 6)
        whole = torch.cat([torch.full((2, 1), BEGIN), said], 1)
        likeliest = model(source, whole[:, :-1]).argmax(-1)
    for mine, theirs in zip(said.tolist(), likeliest.tolist()):
        end = mine.index(END) + 1 if END in mine else len(mine)
        assert mine[:end] == theirs[:end] and set(mine[end:]) <= {PAD}


def test_the_full_size_has_a_fifth_fewer_parameters_at_width_16():
    full = translation.SETTINGS | translation.FULL
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in Translator("dot product", w, 10000, full).parameters())
            for w in (128, 16)
        ]
    assert sizes[0] - sizes[1] == pytest.approx(39.5e6 - 31.2e6, rel=0.01)  # the paper's


@pytest.mark.slow
def test_two_steps_of_every_row_of_the_plan(tmp_path, monkeypatch):
    pytest.importorskip("sacrebleu")
    names = ["Datei", "Ordner", "Seite", "Zeile", "Tabelle", "Ansicht", "Menü", "Symbol"]
    rows = tuple(
        (f"die {a} und {b} {i}", f"the {a} and {b} {i}")
        for i in range(4)
        for a in names
        for b in names
    )
    monkeypatch.setattr(translation, "pairs", lambda least, most: rows)
    translation.data_of.cache_clear()
    small = SMALL | {
        "steps": 2,
        "seeds": [0, 1],
        "sizes": {"search": 8, "test": 12},
        "vocabulary": 300,
    }
    small |= {
        "batch": 4,
        "longest": 40,
        "translated": 4,
        "search": {"seed": 9, "steps": 1, "rates": [1e-3, 2e-3]},
    }
    small |= {
        "rows": [["dot product", 2], *([kind, 4] for kind in dict(translation.SETTINGS["rows"]))]
    }
    small |= {"again": {"rows": [["umbral cone, xi", 4], ["dot product", 4]], "seeds": [2, 3]}}
    experiment = store.Experiment("translation", translation.SETTINGS | small, translation.runs)
    assert store.perform(experiment, tmp_path)
    translation.data_of.cache_clear()
    found = store.load("translation", tmp_path)
    run = found["runs"]["dot product, width 4, seed 1"]
    assert (
        run["held_out"] > 1
        and 0 <= run["bleu"] <= 100
        and run["bleu_signature"].startswith("nrefs:1")
    )
    page = tmp_path / "page.md"
    page.write_text(translation_tables.PAGE.read_text())
    translation_tables.draw(tmp_path, page, tmp_path)
    text = page.read_text()
    assert "not done yet" not in text and "| umbral cone, psi | 4 |" in text and "p = " in text
    mine, others = (
        [found["runs"][f"{kind}, width 4, seed {seed}"]["bleu"] for seed in (2, 3)]
        for kind in ("umbral cone, xi", "dot product")
    )
    assert (
        f"| {(sum(mine) - sum(others)) / 2:+.2f} (" in text.split("<!-- translation-again -->")[1]
    )
    assert (tmp_path / "translation.svg").read_bytes().startswith(b"<?xml")


def test_committed_results_are_of_these_settings_and_on_the_page():
    page, path = translation_tables.PAGE.read_text(), store.FOLDER / "translation.json"
    if not path.exists():
        assert page.count("The runs are not done yet.") == len(translation_tables.TABLES)
        return
    results = store.load("translation")
    assert results["settings"] == json.loads(json.dumps(translation.SETTINGS))
    assert set(results["runs"]) <= {key for key, _ in translation.runs(translation.SETTINGS, {})}
    for name, make in translation_tables.TABLES.items():
        assert draw.put(page, name, make(results)) == page, name
