"""docs/results/evidence.md: a row for every claim, with numbers from committed results and commands that exist."""

from __future__ import annotations

import re

import pytest
from experiments import evidence_tables, findings
from experiments.claims import CLAIMS, SOURCES
from experiments.command import ALL
from experiments.findings import HOLDS, NOT, PARTLY, UNDECIDED

from .tiny import ROOT


def test_the_page_says_what_the_results_say():
    text = evidence_tables.PAGE.read_text()
    assert evidence_tables.page(text) == text


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_every_claim_has_a_verdict_and_a_command_that_exists(claim):
    assert claim.key[0] in SOURCES and [c.key for c in CLAIMS].count(claim.key) == 1
    text, verdict = evidence_tables.found(claim)
    assert (
        text
        and verdict in evidence_tables.VERDICTS
        and (claim.command or verdict == findings.NOT_RUN)
    )
    for path in re.findall(
        r"(?:tests|benchmarks|recipes|docs)/[\w/]+\.(?:py|md)", f"{claim.command} {text}"
    ):
        assert (ROOT / path).exists(), path
    name = re.fullmatch(r"python recipes/experiments (\w+)", claim.command)
    assert name is None or name[1] in ALL
    assert callable(claim.found) or not re.search(r"\d\.\d", claim.found), (
        "numbers of results are read from them"
    )


@pytest.mark.parametrize(
    "low, high, claimed, verdict",
    [
        (0.1, 2, 0, HOLDS),
        (0.1, 2, 1, HOLDS),
        (0.1, 2, 5, PARTLY),
        (-1, 2, 5, NOT),
        (-1, 2, 0, UNDECIDED),
    ]
    + [(-1, 2, 1.5, UNDECIDED), (-2, -1, 0, NOT)],
)
def test_verdicts_follow_from_intervals(low, high, claimed, verdict):
    assert findings.judge(low, high, claimed) == verdict


def test_a_gain_that_a_control_has_too_holds_in_part():
    mine, plain, control = [10.0, 11.0, 12.5], [5.0, 6.2, 7.0], [10.1, 10.9, 12.6]
    assert findings.gain(mine, {"plain": plain}, "points")[1] == HOLDS
    text, verdict = findings.gain(mine, {"plain": plain, "control": control}, "points")
    assert verdict == PARTLY and "against plain" in text and "against control" in text
    worst = findings.both(lambda: ("a", HOLDS), lambda: ("b", NOT), lambda: ("c", PARTLY))
    assert worst == ("a; b; c", NOT)


def test_paired_differences_get_rows_and_other_results_stay_text():
    text, _ = findings.gain(
        [10.0, 11.0, 12.5], {"a": [5.0, 6.2, 7.0], "b": [9.0, 9.0, 9.0]}, "BLEU"
    )
    rows, statements = evidence_tables.parse_parts(f"two runs; {text}; its rate is the lowest")
    assert statements == ["two runs", "its rate is the lowest"]
    assert [row[:2] for row in rows] == [["BLEU, 3 pairs", "a"], ["BLEU, 3 pairs", "b"]]
    assert all(f"{row[2]} against {row[1]} (found from {row[3]} on)" in text for row in rows)


def test_runs_that_are_missing_make_a_claim_not_run(monkeypatch):
    claim = next(claim for claim in CLAIMS if claim.key == "D11")
    monkeypatch.setattr(
        findings, "load", lambda name: {"runs": {}, "settings": {"seeds": [0], "lengths": [128]}}
    )
    assert evidence_tables.found(claim) == ("the runs are not done", findings.NOT_RUN)


@pytest.mark.parametrize(
    "without, kept, verdict",
    [
        (0.98, 0.99, UNDECIDED),
        (0.4, 0.9, HOLDS),
        (0.4, 0.4, NOT),
    ],  # least entropy of a layer, without and with
)
def test_a_penalty_is_judged_where_something_collapses(monkeypatch, without, kept, verdict):
    def runs(name, entropy):
        found = {"perplexity": {"Bible": 20.0, "Python": 10.0}, "entropy": {"a": 1.0, "b": entropy}}
        return {
            f"{name}, seed {s}; trained": found | {"entropy": {"a": 1.0, "b": entropy + s / 1000}}
            for s in range(3)
        }

    results = {"settings": {"seeds": [0, 1, 2]}, "runs": runs("input-dependent", without)}
    monkeypatch.setattr(findings, "load", lambda name: results)
    with pytest.raises(KeyError):
        findings.entropy_effect(("x 1",))
    results["runs"] |= {key: run for key, run in runs("x 1", kept).items()}
    # seeds that are not alike, or t has nothing to divide by
    results["runs"]["x 1, seed 2; trained"]["perplexity"] = {"Bible": 20.5, "Python": 10.0}
    results["runs"]["x 1, seed 2; trained"]["entropy"]["b"] += 0.003
    text, found = findings.entropy_effect(("x 1",))
    assert (
        found == verdict
        and f"{without + 0.001:.3f}" in text
        and ("no collapse" in text) == (verdict == UNDECIDED)
    )


def test_queued_experiments_are_read_when_they_are_done(monkeypatch):
    """Three-way attention and trees, better than each rival by three and two points."""
    kinds = {
        "three-way": 0.60,
        "pairwise": 0.57,
        "pairwise, chained": 0.57,
        "without question": 0.4,
    }
    kinds["without context"] = 0.4
    runs = {
        f"{k}, seed {s}": {"accuracy": a + s / 100 + (k != "three-way") * s / 1000}
        for k, a in kinds.items()
        for s in range(3)
    }
    monkeypatch.setattr(
        findings,
        "load",
        lambda name: {"settings": {"kinds": list(kinds), "seeds": [0, 1, 2]}, "runs": runs},
    )
    text, verdict = findings.coattention()
    assert verdict == HOLDS and text.startswith("points, 3 pairs: +2.9")
    runs = {
        f"joined, {k}, 2 layers, seed {s}": {"accuracy": a + s / 100 + (k == "flat") * s / 1000}
        for k, a in {"tree": 0.80, "flat": 0.78}.items()
        for s in range(3)
    }
    monkeypatch.setattr(
        findings, "load", lambda name: {"settings": {"seeds": [0, 1, 2]}, "runs": runs}
    )
    assert findings.joined_deep(2)[1] == HOLDS and "+1.9" in findings.joined_deep(2)[0]
    with pytest.raises(KeyError):
        findings.joined_deep(4)


@pytest.mark.parametrize(
    "cosine, verdict", [(0.40, HOLDS), (0.20, PARTLY)]
)  # of the loss, a cone having 0.3
def test_what_comes_back_is_judged_beside_what_has_no_cones(monkeypatch, cosine, verdict):
    losses = {
        "umbral cone, xi": 0.30,
        "no score": 0.6,
        "dot product, redrawn": 0.5,
        "Euclidean distance": 0.4,
    }
    losses["normalised dot product"] = cosine
    runs = {f"{row}, before": {"10": {"loss": 4.0}} for row in losses} | {"stock": {"loss": 3.0}}
    for row, loss in losses.items():
        for seed in range(3):
            noise = seed / 1000 * (row != "umbral cone, xi")
            runs[f"{row}, seed {seed}"] = {"10": {"loss": 3 + loss + seed / 100 + noise}}
    results = {"settings": {"seeds": [0, 1, 2], "rows": dict.fromkeys(losses)}, "runs": runs}
    monkeypatch.setattr(findings, "load", lambda name: results)
    text, found = findings.recovered("umbral cone, xi", "10")
    assert (
        found == verdict
        and text.startswith("umbral cone, xi, k = 10: 69 ± 1 % of")
        and "+30.1" in text
    )
    del runs["no score, seed 1"]
    with pytest.raises(KeyError):
        findings.recovered("umbral cone, xi", "10")


def test_injection_before_training_is_compared_with_injection_after_it(monkeypatch):
    runs = {"injected": {"copying": 1.0}}
    for seed in range(3):
        runs[f"injected, then LoRA, seed {seed}"] = {"copying": 0.5 + seed / 100}
        own = {"copying": 0.2 + seed / 90}
        runs[f"LoRA, then injected, seed {seed}"] = {
            "copying": 0.9 + seed / 80,
            "own_attention": own,
        }
    monkeypatch.setattr(
        findings, "load", lambda name: {"settings": {"seeds": [0, 1, 2]}, "runs": runs}
    )
    text, verdict = findings.injected_first("copying")
    assert verdict == HOLDS and "+40.2" in text and "+49.0" in text and "-29.9" in text
    del runs["LoRA, then injected, seed 2"]
    with pytest.raises(KeyError):
        findings.injected_first("copying")
