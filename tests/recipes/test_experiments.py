"""recipes/experiments: the data, the tasks, the measures, the store; and that the page says what the results say."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import mpmath
import numpy as np
import pytest
import torch
from experiments import alibi, debian, depth, draw, flash, lca_task, length, store, tables, wordnet
from experiments.command import NAMES
from experiments.fitting import share_of_rate, size_of
from experiments.lca_model import KINDS, Encoder

from .tiny import ROOT

# --- data -----------------------------------------------------------------------------------------------------------

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by\n"


def noun(offset: int, word: str, *parents: int, more: str = "") -> str:
    pointers = "".join(f" @ {p:08d} n 0000" for p in parents) + more
    count = len(parents) + (1 if more else 0)
    return f"{offset:08d} 03 n 01 {word} 0 {count:03d}{pointers} | a gloss with @ 00000000 in it  \n"


def write_nouns(path, fan: int = 3, levels: int = 4) -> dict[str, str | None]:
    """A whole tree with `fan` children a node, in WordNet's format; the parents it means."""
    lines, parents, level, number = [LICENCE, noun(1, "entity")], {"entity.00000001": None}, [1], 1
    for _ in range(levels):
        below = []
        for parent in level:
            for _ in range(fan):
                number += 1
                # a second hypernym and a part, which are not followed
                lines.append(noun(number, "thing", parent, 1, more=" %p 00000001 n 0000"))
                up = "entity" if parent == 1 else "thing"
                parents[f"thing.{number:08d}"] = f"{up}.{parent:08d}"
                below.append(number)
        level = below
    path.write_text("".join(lines), encoding="latin-1")
    return parents


def test_the_first_hypernym_of_every_noun_makes_the_tree(tmp_path):
    expected = write_nouns(tmp_path / "data.noun")
    assert wordnet.read_parents(tmp_path / "data.noun") == expected
    (tmp_path / "other").write_text("no wordnet\n")
    with pytest.raises(ValueError, match="is no data.noun of WordNet: it has the line 'no wordnet"):
        wordnet.read_parents(tmp_path / "other")


def test_several_words_and_an_instance_are_read(tmp_path):
    line = "00000007 15 n 02 Rome 0 capital_of_Italy 0 002 #m 00000001 n 0000 @i 00000001 n 0000 | a city\n"
    (tmp_path / "data.noun").write_text(noun(1, "entity") + line)
    assert wordnet.read_parents(tmp_path / "data.noun")["Rome.00000007"] == "entity.00000001"


def test_paths_go_down_the_tree_and_differ(tmp_path):
    parents = write_nouns(tmp_path / "data.noun")
    for seed in range(3):
        paths = wordnet.sample_paths(parents, 3, 20, seed)
        assert len(set(paths)) == 20 and paths == wordnet.sample_paths(parents, 3, 20, seed)
        for path in paths:
            chain = ["entity.00000001", *path]
            assert [parents[child] for child in path] == chain[:-1] and len(path) == 3
    assert wordnet.sample_paths(parents, 3, 20, 0) != wordnet.sample_paths(parents, 3, 20, 1)


def fake(folder, name: str, script: str):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No program but those put into bin/, and an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_without_apt_the_error_says_what_to_install(bare):
    with pytest.raises(ValueError) as caught:
        debian.unpacked(debian.BIBLE)
    said = str(caught.value)
    assert "\n" not in said and said.endswith("apt-get install bible-kjv bible-kjv-text")


def test_the_installed_program_is_asked_first(bare):
    fake(bare / "bin", "bible", 'i=0; while [ $i -lt 5 ]; do echo "Ge1:1 In the beginning"; i=$((i+1)); done')
    with pytest.raises(
        ValueError, match=r"bin/bible gave 115 characters of the Bible, 4.4 million are expected"
    ):
        debian.bible_text()
    assert not (bare / "cache").exists()


def test_packages_are_fetched_once_and_a_failure_leaves_nothing(bare):
    fake(bare / "bin", "dpkg", 'echo data > "$3/unpacked"')
    fake(bare / "bin", "apt-get", "echo 'E: Unable to locate package' >&2; exit 100")
    with pytest.raises(
        ValueError, match=r"apt-get download wordnet-base failed \(E: Unable to locate package\)"
    ):
        debian.unpacked(debian.WORDNET)
    assert list((bare / "cache").iterdir()) == []
    fake(bare / "bin", "apt-get", 'shift; for name in "$@"; do : > "$name.deb"; done')
    folder = debian.unpacked(debian.WORDNET)
    assert (folder / "unpacked").read_text() == "data\n" and not list(folder.glob("*.deb"))
    (bare / "bin/apt-get").unlink()
    assert debian.unpacked(debian.WORDNET) == folder


# --- the depth experiment -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    parents = write_nouns(tmp_path_factory.mktemp("nouns") / "data.noun", fan=3, levels=5)
    return lca_task.LcaTask(wordnet.sample_paths(parents, 5, 60, 0), named=2, held_out=4)


def paths_of(task, row) -> list[tuple]:
    """The two whole paths that a row of tokens names, found by their leaves."""
    whole = {path[-1]: tuple(path) for path in task.paths.tolist()}
    first, second = row[: len(row) // 2].tolist(), row[len(row) // 2 :].tolist()
    assert (first[0], second[0]) == (lca_task.CLS, lca_task.SEP)
    for side in (first, second):
        path = whole[side[-1]]
        at = [path.index(token) for token in side[1:]]
        assert at == sorted(set(at))  # named from the root down, none twice
    return [whole[first[-1]], whole[second[-1]]]


@pytest.mark.parametrize("test", [False, True])
def test_labels_are_depths_of_common_ancestors(task, test):
    ids, labels = task.batch(400, np.random.default_rng(3), test=test)
    assert ids.shape == (400, task.length) == (400, 8) and ids.max() < task.vocabulary
    for row, label in zip(ids, labels):
        a, b = paths_of(task, row)
        assert label == len(set(a) & set(b)) < 5  # nodes of a tree lie on one path from the root each
    assert min(Counter(labels.tolist()).values()) > 50  # of 80 expected


def test_training_never_shows_a_test_pair(task):
    seen = {}
    for test in (False, True):
        ids, _ = task.batch(4000, np.random.default_rng(0), test=test)
        half = task.length // 2
        seen[test] = {frozenset((row[half - 1], row[-1])) for row in ids.tolist()}
    assert not seen[False] & seen[True]
    pairs = [set(map(tuple, np.concatenate(kind).tolist())) for kind in (task.train, task.test)]
    assert not pairs[0] & pairs[1] and len(pairs[0] | pairs[1]) == 60 * 59 // 2
    assert 0.2 < len(pairs[1]) / len(pairs[0] | pairs[1]) < 0.3


def test_the_rule_of_names_alone_is_the_deepest_common_name(task):
    ids, labels = task.batch(300, np.random.default_rng(4))
    said = task.by_names_alone(ids)
    for row, answer, label in zip(ids.tolist(), said.tolist(), labels.tolist()):
        common = set(row[1:4]) & set(row[5:])
        path = next(p for p in task.paths.tolist() if p[-1] == row[3])
        assert answer == max((path.index(token) + 1 for token in common), default=0) <= label


def test_too_small_a_tree_is_refused(task):
    with pytest.raises(ValueError, match="3 leaves leave a depth without pairs; allowed: more leaves"):
        lca_task.LcaTask([("a", "b"), ("a", "c"), ("d", "e")], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_and_has_as_many_parameters(task, kind):
    torch.manual_seed(0)
    sizes = {k: size_of(Encoder(k, task.vocabulary, 8, 5, 8, 2, 2)) for k in KINDS}
    assert max(sizes.values()) - min(sizes.values()) == 2 * 2 * 2  # layers, heads, numbers learned per head
    model = Encoder(kind, task.vocabulary, 8, 5, 8, 2, 2)
    ids, labels = task.batch(16, np.random.default_rng(0))
    torch.nn.functional.cross_entropy(model(ids), labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert "logs" not in name or parameter.grad.abs().min() > 0


def test_a_tenth_is_a_tenth(task):
    small = depth.width_of(depth.SETTINGS, task, 0.1)
    counts = [
        size_of(depth.model_of(depth.SETTINGS, task, "dot product", width))
        for width in (depth.SETTINGS["width"], small - 2, small, small + 2)
    ]
    off = [abs(count - counts[0] / 10) for count in counts[1:]]
    assert off[1] == min(off)
    assert depth.width_of(depth.SETTINGS, task, 1.0) == depth.SETTINGS["width"]


def test_the_best_rate_is_chosen_for_each_kind():
    settings = {"search": {"learning_rates": [0.1, 0.2]}}
    accuracy = {
        ("a", 0.1): (0.5, 0.6),
        ("a", 0.2): (0.4, 0.8),
        ("b", 0.1): (0.6, 0.2),
        ("b", 0.2): (0.4, 0.3),
    }
    found = {
        depth.key_of_search(kind, level, "full", rate): {"accuracy": value}
        for (kind, rate), values in accuracy.items()
        for level, value in zip((5, 10), values)
    }
    chosen = [depth.best_rate(settings, found, kind, level, "full") for kind in "ab" for level in (5, 10)]
    assert chosen == [0.1, 0.2, 0.1, 0.2]


# --- the length experiment ------------------------------------------------------------------------------------------

SMALL = length.SETTINGS | {"width": 16, "layers": 2, "lengths": [8, 40], "train_length": 8}


def model(name: str, **changes):
    torch.manual_seed(0)
    return length.model_of(SMALL | changes, name).eval()


def test_the_alibi_mask_is_the_papers():
    mask = length.alibi_mask(4, 9)
    for h, i, j in itertools.product(range(4), range(9), range(9)):
        expected = -torch.inf if j > i else (i - j) * -(2.0 ** (-2 * (h + 1)))
        assert mask[0, h, i, j] == expected


def test_hype_with_a_small_mu_is_alibi_in_the_whole_model():
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    flat = {"positions": {"hype": {"hype": 100_000, "learned": False}}}
    with torch.no_grad():
        by_mask, by_hype, none = (
            m(ids).logits for m in (model("ALiBi"), model("hype", **flat), model("none"))
        )
    assert (by_mask - by_hype).abs().max() < 1e-4 < 1e-2 < (by_mask - none).abs().max()


def test_only_rotary_has_rotary_positions_and_only_learned_learns():
    for name in SMALL["positions"]:
        one = model(name)
        assert {layer.self_attn.use_rope for layer in one.model.layers} == {int(name == "rotary")}
        added = length.added(one)
        assert bool(added) == name.startswith("HyPE")
        assert {p.requires_grad for p in added.values()} <= {"learned" in name}
        counted = size_of(one) - sum(p.numel() for p in added.values())
        assert counted == size_of(model("none"))


def test_rows_are_cut_from_the_text_before_the_held_out_part(monkeypatch):
    ids = torch.arange(3000) % 256
    monkeypatch.setattr(length, "bytes_of_the_bible", lambda: ids)
    small = SMALL | {"steps": 2, "batch": 4, "held_out": 0.1, "held_out_bytes": 200}
    found = length.train(small, "HyPE learned, from max_length 128", 0)
    assert set(found["perplexity"]) == {"8", "40"} and all(1 < p < 1000 for p in found["perplexity"].values())
    assert any(value for values in found["added"].values() for value in values)  # log mu or log tau moved
    assert found == length.train(small, "HyPE learned, from max_length 128", 0)


def test_the_learning_rate_rises_and_falls():
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert shares[0] == 0.1 and shares[9] == shares[10] == 1.0 and shares[-1] < 1e-3
    assert shares[:10] == sorted(shares[:10]) and shares[10:] == sorted(shares[10:], reverse=True)


# --- HyPE against ALiBi ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, mu", [(10, 0.1), (50, 0.002), (33, 0.2)])
def test_bias_errors_against_a_loop(size, mu):
    errors, cubes = [], []
    for i in range(size):
        for j in range(i + 1):
            exact = mpmath.sinh(mpmath.mpf(mu) * (j - i)) / mpmath.mpf(mu)
            errors.append(abs(exact - (j - i)))
            cubes.append(mpmath.mpf(mu) ** 2 * (i - j) ** 3 / 6)
    found = alibi.error_of(size, mu)
    expected = {"max": max(errors), "mean": mpmath.fsum(errors) / len(errors)}
    expected |= {"cubic_max": max(cubes), "cubic_mean": mpmath.fsum(cubes) / len(cubes)}
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


def test_where_the_cubic_term_matters():
    for share in (0.01, 0.1):
        root = mpmath.findroot(lambda x, share=share: mpmath.sinh(x) / x - 1 - share, 0.5)
        assert alibi.root_of_relative_error(share) == pytest.approx(float(root), rel=1e-9)
    integrand = lambda u: abs(u**3 - 6) / 12 * mpmath.exp(-u)
    exact = mpmath.quad(integrand, [0, mpmath.cbrt(6), 60])
    assert alibi.steep_constant() == pytest.approx(float(exact), rel=1e-6)
    # steep enough, and with many tokens inside the reach of the slope, the limit is met
    slope, mu = 0.02, 1 / 4000
    expected = alibi.steep_constant() * (mu / slope) ** 2
    assert alibi.total_variation(4000, slope, mu) == pytest.approx(expected, rel=0.05)


def test_total_variation_against_a_loop():
    size, slope, mu = 30, 0.1, 0.05
    p = [mpmath.exp(-slope * d) for d in range(size)]
    q = [mpmath.exp(-slope / mu * mpmath.sinh(mu * d)) for d in range(size)]
    expected = sum(abs(a / sum(p) - b / sum(q)) for a, b in zip(p, q)) / 2
    assert alibi.total_variation(size, slope, mu) == pytest.approx(float(expected), rel=1e-9)


# --- flash kernels --------------------------------------------------------------------------------------------------


def test_plain_columns_are_the_sinh():
    at = torch.arange(50, dtype=torch.float64)
    mu, tau = torch.tensor([0.02, 0.01]).double(), torch.tensor([3.0, -2.0]).double()
    left, right = flash.plain_columns(at, at, mu, tau, torch.float64)
    expected = tau[:, None, None] * torch.sinh(mu[:, None, None] * (at[None, :] - at[:, None]))
    assert (left @ right.mT - expected).abs().max() < 1e-12


def test_every_way_computes_the_same_attention():
    torch.manual_seed(0)
    qkv = [torch.randn(1, 4, 70, 16) for _ in range(3)]
    found = flash.ways(*qkv)
    assert {"SDPA, no bias", "mask", "two plain columns", "columns", "tiles (blockwise)"} <= set(found)
    for name, call in found.items():
        plain = name == "SDPA, no bias"
        assert flash.output_error(call(), *qkv, biased=not plain) < 2e-5, name
        assert not plain or flash.output_error(call(), *qkv, biased=True) > 0.1


def test_bias_errors_of_the_ways_are_told_apart():
    found = flash.bias_errors(2048, ["float32", "bfloat16"])
    assert max(found["float32"].values()) < 1e-3
    half = found["bfloat16"]
    assert half["columns"] < 5e-3 < 1 < min(half["two plain columns"], half["mask"])


def test_a_way_that_refuses_the_call_says_why(monkeypatch):
    def refuse():
        raise ValueError("no such kernel\nmore")

    ways = flash.ways
    monkeypatch.setattr(flash, "ways", lambda *qkv: ways(*qkv) | {"other": refuse})
    settings = flash.SETTINGS | {"heads": {"24": 2}, "dim": 8, "rounds": 1}
    found = flash.measure(settings, "cpu", "float32", 24)
    assert found["refused"] == {"other": "no such kernel"} and "other" not in found["ways"]
    assert found["ways"]["SDPA, no bias"]["ratio"] == 1 and found["ways"]["columns"]["error"] < 1e-5


# --- the store ------------------------------------------------------------------------------------------------------


def counting(done: list, stop_at: int | None = None) -> store.Experiment:
    def runs(settings, found):
        for i in range(4):
            # a later run may ask for what earlier ones gave
            assert len(found) >= i

            def do(i=i):
                if i == stop_at:
                    raise KeyboardInterrupt
                done.append(i)
                return {"value": i * settings["factor"], "nothing": float("nan")}

            yield f"run {i}", do

    return store.Experiment("counting", {"factor": 2, "pair": (1, 2)}, runs)


def test_an_interrupted_sweep_goes_on(tmp_path):
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        store.perform(counting(done, stop_at=2), tmp_path)
    assert done == [0, 1] and set(store.load("counting", tmp_path)["runs"]) == {"run 0", "run 1"}
    assert not store.perform(counting(done), tmp_path, minutes=0)
    assert store.perform(counting(done), tmp_path) and done == [0, 1, 2, 3]
    assert store.perform(counting(done), tmp_path) and done == [0, 1, 2, 3]
    results = store.load("counting", tmp_path)
    assert [run["value"] for run in results["runs"].values()] == [0, 2, 4, 6]
    assert results["runs"]["run 0"]["nothing"] is None and results["versions"]["torch"] == torch.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["counting.json"]


def test_results_of_other_settings_are_not_mixed(tmp_path):
    store.perform(counting([]), tmp_path, minutes=None)
    other = store.Experiment("counting", {"factor": 3, "pair": (1, 2)}, counting([]).runs)
    message = r"counting.json holds runs with settings.factor=2, now it is 3; --fresh begins anew"
    with pytest.raises(ValueError, match=message):
        store.perform(other, tmp_path)
    assert store.perform(other, tmp_path, fresh=True)
    assert store.load("counting", tmp_path)["runs"]["run 3"]["value"] == 9


def test_results_of_other_versions_are_not_mixed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        store.perform(counting([], stop_at=2), tmp_path)
    path = tmp_path / "counting.json"
    old = json.loads(path.read_text())
    old["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(old))
    with pytest.raises(ValueError, match="versions.torch='1.0', now it is"):
        store.perform(counting([]), tmp_path)


# --- the command and the page ---------------------------------------------------------------------------------------


def command(*args: str, **environment) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "recipes/experiments", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
    )


def test_the_command_lists_the_experiments():
    done = command("--help")
    assert done.returncode == 0 and all(name in done.stdout for name in (*NAMES, "all", "draw"))
    assert command("deep").returncode == 2


def test_tables_are_put_between_their_marks():
    text = "a\n<!-- x -->\nold\nold\n<!-- /x -->\nb\n<!-- y -->\nz\n<!-- /y -->\n"
    assert draw.put(text, "x", "| \\1 |") == text.replace("old\nold", "| \\1 |")
    with pytest.raises(ValueError, match="the page has 0 places marked <!-- w -->"):
        draw.put(text, "w", "")


def test_a_missing_run_is_named(tmp_path):
    results = store.load("alibi") | {"runs": {}}
    (tmp_path / "alibi.json").write_text(json.dumps(results))
    with pytest.raises(
        ValueError, match=r"alibi.json lacks the run 'heads'; run: python recipes/experiments alibi"
    ):
        draw.made(tables.alibi_heads, "alibi", tmp_path)


@pytest.mark.parametrize(
    "value, said",
    [(0.0, "0.000"), (0.01234, "0.012"), (0.5, "0.500"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123")]
    + [(12345.6, "12,346"), (0.0049, "4.9e-3"), (1.4e-7, "1.4e-7"), (2.5e6, "2.5e6"), (None, "-")],
)
def test_numbers_have_three_digits(value, said):
    assert tables.number(value) == said


def test_the_page_says_what_the_results_say():
    text = draw.PAGE.read_text()
    for name, table in tables.TABLES.items():
        assert draw.put(text, name, table(store.load(name.split("-")[0]))) == text, name


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_results_are_whole_and_of_these_settings(name):
    experiment = __import__(f"experiments.{name}", fromlist=["EXPERIMENT"]).EXPERIMENT
    results = store.load(name)
    assert results["settings"] == json.loads(json.dumps(experiment.settings))
    wanted = [key for key, _ in experiment.runs(experiment.settings, results["runs"])]
    assert set(wanted) - {key for key in wanted if key.startswith("cuda")} <= set(results["runs"])


def test_the_committed_runs_took_the_best_rates():
    results = store.load("depth")
    settings, found = results["settings"], results["runs"]
    cases = itertools.product(settings["kinds"], settings["depths"], settings["sizes"])
    for kind, level, size in cases:
        best = depth.best_rate(settings, found, kind, level, size)
        for seed in settings["seeds"]:
            assert found[depth.key_of(kind, level, size, seed)]["learning_rate"] == best


def test_plots_are_drawn_from_the_committed_results(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "page.md").write_text(draw.PAGE.read_text())
    draw.draw(page=tmp_path / "page.md", plots=tmp_path / "plots")
    for name in NAMES:
        made = (tmp_path / f"plots/{name}.svg").read_bytes()
        assert made.startswith(b"<?xml") and len(made) < 200_000
        assert (draw.PLOTS / f"{name}.svg").exists() and f"plots/{name}.svg" in draw.PAGE.read_text()
