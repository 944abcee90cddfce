"""docs/evidence.md: a row for every claim, with numbers from committed results and commands that exist."""

from __future__ import annotations

import re

import pytest
from experiments import evidence_tables, findings
from experiments.claims import CLAIMS, SOURCES
from experiments.command import EVIDENCE, GEOMETRY, HEADS, HSA, MIXTURES, NAMES
from experiments.findings import HOLDS, NOT, PARTLY, UNDECIDED

from .tiny import ROOT


def test_the_page_says_what_the_results_say():
    text = evidence_tables.PAGE.read_text()
    assert evidence_tables.page(text) == text


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_every_claim_has_a_verdict_and_a_command_that_exists(claim):
    assert claim.key[0] in SOURCES and [c.key for c in CLAIMS].count(claim.key) == 1
    text, verdict = evidence_tables.found(claim)
    assert text and verdict in evidence_tables.VERDICTS and (claim.command or verdict == findings.NOT_RUN)
    for path in re.findall(r"(?:tests|benchmarks|recipes|docs)/[\w/]+\.(?:py|md)", f"{claim.command} {text}"):
        assert (ROOT / path).exists(), path
    name = re.fullmatch(r"python recipes/experiments (\w+)", claim.command)
    assert name is None or name[1] in NAMES | HSA | HEADS | MIXTURES | GEOMETRY | EVIDENCE
    assert callable(claim.found) or not re.search(r"\d\.\d", claim.found), "numbers of results are read from them"


@pytest.mark.parametrize(
    "low, high, claimed, verdict",
    [(0.1, 2, 0, HOLDS), (0.1, 2, 1, HOLDS), (0.1, 2, 5, PARTLY), (-1, 2, 5, NOT), (-1, 2, 0, UNDECIDED)]
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


def test_runs_that_are_missing_make_a_claim_not_run(monkeypatch):
    claim = next(claim for claim in CLAIMS if claim.key == "D11")
    monkeypatch.setattr(findings, "load", lambda name: {"runs": {}, "settings": {"seeds": [0], "lengths": [128]}})
    assert evidence_tables.found(claim) == ("the runs are not done", findings.NOT_RUN)
