"""The benchmark of scores from outside, on a tiny size."""

import json

import own_score
import pytest

from tests.engines.test_native import needs_compiler
from tests.registries import restored


@pytest.mark.slow
@needs_compiler
def test_it_measures_the_scores_of_the_page(tmp_path):
    with restored():
        sizes = ["--lengths", "24", "--heads", "1", "--dim", "8", "--rounds", "1"]
        assert own_score.main([*sizes, "--processor", "--json", str(tmp_path / "result.json")]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert {row["score"] for row in rows} == {*own_score.SCORES} and len(rows) == 2 * len(
        own_score.SCORES
    )
    assert all(row["apart"] <= 1e-4 for row in rows)
