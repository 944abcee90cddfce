"""Every published recipe for two steps, on tiny models and data; and what the tasks beside text generation measure."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from experiments import help_texts, hsa_fashion
from finetuning import models, tasks
from finetuning.run import run
from finetuning.settings import read_settings
from packaging.version import Version
from torch.nn import functional as F

from .tiny import ROOT, save_model

RECIPES = [
    p for p in sorted((ROOT / "recipes").glob("*/*.yaml")) if p.with_name("base.yaml").exists()
]
NAMES = [f"{p.parent.name}/{p.stem}" for p in RECIPES if p.stem != "base"]
#: One of each model is always run, the others with `-m slow`.
FIRST = {"smollm2/control", "minilm/cone", "deit/mkl", "bart/hyperbolic"}
TINY = [
    "trainer.steps=2",
    "trainer.batch_size=2",
    "trainer.warmup_steps=0",
    "trainer.held_out_every=2",
]
TINY += ["trainer.save_every=2"]
ROWS = ["data.train_rows=12", "data.held_out_rows=6"]  # of all but text


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model with its tokenizer for each pretrained one, and reviews in a folder as `datasets` reads them."""
    root = tmp_path_factory.mktemp("tiny")
    save_model(root / "smollm2")
    config = hf.BertConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    hf.BertModel(config).save_pretrained(root / "minilm")
    hf.AutoTokenizer.from_pretrained(root / "smollm2", pad_token="<end>").save_pretrained(
        root / "minilm"
    )
    (root / "reviews").mkdir()
    rows = [
        {"text": ("a good film" if i // 2 % 2 else "bad") + f" {i}", "label": i // 2 % 2}
        for i in range(40)
    ]
    (root / "reviews" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


@pytest.fixture(autouse=True)
def data_of_packages(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(40, 1, 28, 28, generator=draw), torch.arange(40) % 10
    monkeypatch.setattr(hsa_fashion, "fashion", lambda part: images)
    words = ["Datei", "Ordner", "Seite", "Zeile", "Tabelle", "Ansicht", "Menü"]
    rows = tuple(
        (f"die {a} und" * len(b) + b, f"the {b} and" * len(a) + a) for a in words for b in words
    )
    monkeypatch.setattr(help_texts, "pairs", lambda least, most: rows)


def tiny(name: str, folders, *more: str):
    """The settings of a recipe, made small."""
    model, changes = name.split("/")[0], [*TINY, "data.length=64"]
    changes += [] if model == "smollm2" else ROWS
    if model in ("smollm2", "minilm"):
        changes += [f"model.name={folders / model}", "hub.base_model=null"]
    if model == "smollm2":
        changes += ["data.source=file", f"data.name={ROOT / 'LICENSE'}", "data.held_out_tokens=256"]
    if model == "minilm":
        changes += ["data.source=hub", f"data.name={folders / 'reviews'}"]
    return read_settings(ROOT / f"recipes/{name}.yaml", [*changes, *more])


@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_two_steps_of_every_published_recipe(name, folders, tmp_path):
    results = run(tiny(name, folders, f"trainer.output={tmp_path / 'out'}"), "a command")
    settings = read_settings(ROOT / f"recipes/{name}.yaml")
    assert results["difference_at_start"] <= 1e-5
    # what was saved and loaded again is what the Trainer had, which takes the mean over rows
    rows = 1e-4 if settings.model.task != "translation" else 0.1
    assert results["held_out_curve"][-1][1] == pytest.approx(results["after"]["loss"], abs=rows)
    assert results["after"]["loss"] != results["before"]["loss"]
    saved = "adapter" if settings.peft.method == "lora" else "model"
    card = (tmp_path / "out" / saved / "README.md").read_text()
    assert ("perplexity" if settings.model.task == "text-generation" else "accuracy") in card
    added, trained = results["parameters"]["added"], results["parameters"]["trained"]
    if settings.peft.method == "full":
        assert added > 0 and trained == results["parameters"]["all"] - (
            0 if settings.peft.added else added
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_differs_from_its_control_in_the_mechanism_alone(name):
    path = ROOT / f"recipes/{name}.yaml"
    mine, control = (read_settings(p).to_dict() for p in (path, path.with_name("control.yaml")))
    assert (
        mine["trainer"].pop("output") == f"outputs/{name}" != control["trainer"].pop("output")
        or "control" in name
    )
    for settings in (mine, control):
        settings["mechanisms"].pop("use")
        settings["mechanisms"].pop("include_cross_attention")
    assert mine["peft"].pop("added") is not control["peft"].pop("added") or path.stem == "control"
    assert mine == control


@pytest.mark.parametrize("name", ["minilm/cone", "deit/cone", "bart/cone"])
def test_what_is_measured_is_the_mean_over_rows_one_by_one(name, folders, monkeypatch):
    monkeypatch.setattr(tasks, "BATCH", 4)
    settings = tiny(name, folders)
    data = tasks.prepare(settings, 0)
    model = models.load_base(settings, data.classes)
    losses, right = [], []
    for row in data.held_out:
        one = {k: torch.as_tensor(v)[None] for k, v in row.items()}
        with torch.no_grad():
            logits = model(**one).logits
        losses.append(
            F.cross_entropy(logits.flatten(0, -2), one["labels"].flatten(), reduction="none")
        )
        right.append((logits.argmax(-1) == one["labels"]).flatten())
    found, losses = data.measure(model.train()), torch.cat(losses)
    assert found["loss"] == pytest.approx(losses.mean().item(), abs=1e-5) and model.training
    assert found["accuracy"] == torch.cat(right).double().mean().item() and found[
        "predicted"
    ] == len(losses)
    lengths = {len(row.get("input_ids", "")) for row in data.held_out}
    assert len(lengths) > 1 or name == "deit/cone"  # padding was there


@pytest.mark.slow
def test_a_classifier_learns_and_tells_what_it_learned(folders, tmp_path):
    more = [
        f"trainer.output={tmp_path / 'out'}",
        "trainer.steps=40",
        "trainer.batch_size=8",
        "trainer.learning_rate=1e-2",
    ]
    results = run(tiny("minilm/cone", folders, *more, "data.train_rows=30"), "a command")
    assert (
        results["after"]["accuracy"] == 1
        and results["after"]["loss"] < 0.5 < results["before"]["loss"]
    )
    assert results["data"]["train"] == {"rows": 30} and results["data"]["held_out"] == {"rows": 4}


@pytest.mark.parametrize("label", ["good", -1, 0.5])
def test_labels_that_are_no_classes_are_named(label, folders):
    settings = tiny("minilm/cone", folders)
    with pytest.raises(
        ValueError,
        match=f"^data.label='label' holds {label!r}; allowed: numbers of classes, from 0$",
    ):
        tasks.classified(settings, [("a", 0), ("b", label)], [("c", 1)])


def test_the_first_rows_of_a_sorted_data_set_are_refused(folders, tmp_path):
    """Such as reviews on the Hub, of which the first half is bad: every model would be right on them."""
    rows = [{"text": f"a film {i}", "label": int(i >= 30)} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ValueError, match="^data.train_rows=12 gives 12 rows, all of class 0; allowed: so many that"
    ):
        tasks.prepare(tiny("minilm/cone", folders, f"data.name={tmp_path}"), 0)
    wide = tiny(
        "minilm/cone",
        folders,
        f"data.name={tmp_path}",
        "data.train_rows=50",
        "data.held_out_rows=10",
    )
    assert tasks.prepare(wide, 0).classes == 2
    both = [("a", 0), ("b", 1)]
    with pytest.raises(ValueError, match="^data.held_out_rows=10 gives 1 rows, all of class 1"):
        tasks.classified(wide, both, both[1:])


def test_a_translation_model_has_a_tokenizer_that_gives_sentences_back(folders, tmp_path):
    run(tiny("bart/cone", folders, f"trainer.output={tmp_path / 'out'}"), "a command")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out/model")
    ids = tokenizer("die Datei und Menü")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "die Datei und Menü"
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out/model")
    assert model.generate(torch.tensor([ids]), max_new_tokens=3).shape[0] == 1


def test_a_pretrained_vision_model_and_images_in_a_folder(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    if Version(hf.__version__) < Version("5.18"):
        pytest.importorskip("torchvision", reason="which AutoImageProcessor asks for before 5.18")
    config = hf.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.intermediate_size = 16
    hf.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    hf.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    for i in range(20):
        file = tmp_path / "images" / "train" / ("cat", "dog", "owl")[i % 3] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (i * 10, 0, 0)).save(file)
    base = ROOT / "recipes/deit/cone.yaml"
    changes = [
        *TINY,
        *ROWS,
        "model.config=null",
        f"model.name={tmp_path / 'vit'}",
        "peft.method=lora",
    ]
    changes += [
        "data.source=hub",
        f"data.name={tmp_path / 'images'}",
        "data.column=image",
        f"trainer.output={tmp_path / 'out'}",
    ]
    results = run(read_settings(base, changes), "a command")
    assert (
        results["after"]["predicted"] >= 2
        and (tmp_path / "out/adapter/preprocessor_config.json").exists()
    )
    settings = read_settings(base, [*changes, "data.label=kind"])
    with pytest.raises(
        ValueError, match=r"^data.label='kind' is not in .*; allowed: image, label$"
    ):
        tasks.prepare(settings, 0)
