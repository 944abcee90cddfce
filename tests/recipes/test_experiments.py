"""recipes/experiments: the store, the command; and that the page says what the results say."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from experiments import depth, draw, pausing, queue, store, tables
from experiments.command import NAMES, QUEUE, main
from experiments.fitting import fit

from .tiny import ROOT

# --- the store ------------------------------------------------------------------------------------------------------


def counting(done: list, stop_at: int | None = None) -> store.Experiment:
    def runs(settings, found):
        for i in range(4):

            def do(i=i):
                assert len(found) == i  # a later run may ask for what earlier ones gave
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
    assert results["runs"]["run 0"]["nothing"] is None and results["versions"]["torch"] == version(
        "torch"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["counting.json"]


def test_results_of_other_settings_are_not_mixed(tmp_path):
    store.perform(counting([]), tmp_path, minutes=None)
    other = store.Experiment("counting", {"factor": 3, "pair": (1, 2)}, counting([]).runs)
    message = r"counting.json holds runs with settings.factor=2, now it is 3; --fresh begins anew"
    with pytest.raises(ValueError, match=message):
        store.perform(other, tmp_path)
    assert store.perform(other, tmp_path, fresh=True)
    assert store.load("counting", tmp_path)["runs"]["run 3"]["value"] == 9


def test_rows_may_be_added_to_results_and_nothing_else_changed(tmp_path):
    def experiment(rows, seeds, steps=2):
        def runs(settings, found):
            for row in settings["rows"]:
                for seed in settings["seeds"]:
                    yield f"{row} {seed}", lambda row=row: {"value": settings["rows"][row]}

        settings = {"rows": rows, "seeds": seeds, "steps": steps}
        return store.Experiment("growing", settings, runs, rows=("rows", "seeds"))

    assert store.perform(experiment({"a": 1}, [0]), tmp_path)
    assert store.perform(experiment({"b": 2, "a": 1}, [0, 1]), tmp_path)
    results = store.load("growing", tmp_path)
    assert list(results["runs"]) == ["a 0", "b 0", "b 1", "a 1"]
    assert results["settings"] == {"rows": {"b": 2, "a": 1}, "seeds": [0, 1], "steps": 2}
    for other in (
        experiment({"a": 3, "b": 2}, [0, 1]),  # a row is another
        experiment({"a": 1}, [0, 1]),  # a row is gone
        experiment({"a": 1, "b": 2}, [1]),
        experiment({"a": 1, "b": 2}, [0, 1], steps=3),
    ):
        with pytest.raises(ValueError, match="growing.json holds runs with settings"):
            store.perform(other, tmp_path)


def test_a_table_that_older_results_lack_had_no_rows(tmp_path):
    def experiment(**more):
        run = lambda settings, found: (
            (key, lambda: {"value": 1}) for key in ("a", *settings.get("more", ()))
        )
        return store.Experiment("wider", {"steps": 1} | more, run, rows=tuple(more))

    assert store.perform(experiment(), tmp_path)
    with pytest.raises(ValueError, match="wider.json holds runs with settings.more=None"):
        store.perform(replace(experiment(more={"b": 2}), rows=()), tmp_path)
    assert store.perform(experiment(more={"b": 2}), tmp_path)
    assert list(store.load("wider", tmp_path)["runs"]) == ["a", "b"]


def test_results_of_other_versions_are_not_mixed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        store.perform(counting([], stop_at=2), tmp_path)
    path = tmp_path / "counting.json"
    old = json.loads(path.read_text())
    old["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(old))
    with pytest.raises(ValueError, match="versions.torch='1.0', now it is"):
        store.perform(counting([]), tmp_path)


# --- the queue ------------------------------------------------------------------------------------------------------


def test_a_pause_holds_training_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(pausing, "PAUSE", tmp_path / "outputs" / "pause")
    pausing.wait_while_paused()
    pausing.pause()
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            pausing.resume()

    monkeypatch.setattr(pausing.time, "sleep", sleep)
    model = torch.nn.Linear(2, 1)
    fit(model, lambda: model(torch.ones(3, 2)).mean(), 2, 0.1, 0.0)
    assert len(looks) == 3
    pausing.resume()  # once more does no harm


def test_what_is_left_is_told_by_the_runs_that_are_done(tmp_path):
    experiment = replace(counting([], stop_at=2), hours=2.0)
    assert queue.left(experiment, tmp_path) == (0, 4, 2.0)
    with pytest.raises(KeyboardInterrupt):
        store.perform(experiment, tmp_path)
    path = tmp_path / "counting.json"
    old = json.loads(path.read_text())
    for run, seconds in zip(old["runs"].values(), (30.0, 60.0)):
        run["seconds"]["cpu"] = seconds
    path.write_text(json.dumps(old))
    assert queue.left(experiment, tmp_path) == (2, 4, 2 * 45 / 3600)


@pytest.mark.parametrize("name", QUEUE)
def test_all_runs_of_a_queued_experiment_are_known_before_any_is_done(name):
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    keys = [key for key, _ in experiment.runs(experiment.settings, {})]
    assert len(keys) == len(set(keys)) > 0 and experiment.hours


def test_one_process_at_a_time_works_on_the_same_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pausing, "PAUSE", tmp_path / "outputs" / "pause")
    for name, words in (("queue", ["queue"]), ("alibi", ["alibi"])):
        held = pausing.only_one(name)
        assert main(words) == 2
        assert capsys.readouterr().err.endswith(
            f"another process of this checkout runs {name}; allowed: one\n"
        )
        held.close()
        pausing.only_one(name).close()


@pytest.mark.parametrize(
    "words",
    ["queue --minutes 3", "queue --fresh", "draw --left", "alibi --left --fresh", "draw --full"],
)
def test_an_option_that_nothing_reads_is_refused(words, capsys):
    assert main(words.split()) == 2
    assert " is not read here; leave it out with " in capsys.readouterr().err


def test_left_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(store, "perform", lambda *args, **kwargs: pytest.fail("it ran"))
    assert main(["translation", "--left"]) == 0
    assert "runs done" in capsys.readouterr().out


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
    [
        (0.0, "0.000"),
        (0.01234, "0.012"),
        (0.5, "0.500"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
    ]
    + [(12345.6, "12,346"), (0.0049, "4.9e-3"), (1.4e-7, "1.4e-7"), (2.5e6, "2.5e6"), (None, "-")],
)
def test_numbers_have_three_digits(value, said):
    assert tables.number(value) == said


def test_paired_differences_are_students(monkeypatch):
    mine, others = [70.1, 68.2, 73.3, 71.0], [69.0, 68.4, 70.2, 70.1]
    found = [a - b for a, b in zip(mine, others)]
    error = statistics.stdev(found) / 2
    low, high = (
        statistics.mean(found) + sign * 3.18245 * error for sign in (-1, 1)
    )  # t of 3 degrees, 97.5 %
    said = tables.paired(mine, others, 2)
    assert said.startswith(f"{statistics.mean(found):+.2f} ({low:+.2f} to {high:+.2f}), p = 0.1")
    assert tables.paired([1.0, 2.0, 3.001], [0.0, 1.0, 2.0]).endswith("p < 0.001")


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
        assert (
            draw.PLOTS / f"{name}.svg"
        ).exists() and f"plots/{name}.svg" in draw.PAGE.read_text()
