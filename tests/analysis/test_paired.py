"""Paired t tests and Holm's correction, beside SciPy's and a definition."""

import itertools

import pytest
from scipy import stats

from hf_hyperattn.analysis.paired import holm, paired, t_quantile, t_share


@pytest.mark.parametrize("free", [1, 2, 3, 4, 5, 9, 10, 99])
def test_students_distribution(free):
    for t in (0.0, 0.3, 1.0, 2.5, 12.0, 100.0):
        assert abs(t_share(t, free) - stats.t.cdf(t, free)) < 1e-12
    for share in (0.5, 0.8, 0.975):
        assert t_quantile(share, free) == pytest.approx(
            stats.t.ppf(share, free), rel=1e-9, abs=1e-12
        )


def test_paired_values():
    mine, others = [1.0, 2.0, 3.5, 4.0], [1.1, 1.7, 3.0, 5.0]
    test, expected = paired(mine, others), stats.ttest_rel(mine, others)
    assert test.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (test.low, test.high) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-9)
    error = test.deviation / 2
    assert test.detectable == pytest.approx((stats.t.ppf(0.975, 3) + stats.t.ppf(0.8, 3)) * error)


def test_no_deviation():
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1 and paired([2.0, 3.0], [1.0, 2.0]).p == 0


@pytest.mark.parametrize(
    "mine, others", [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, float("nan")], [1.0, 2.0])]
)
def test_what_is_no_test(mine, others):
    with pytest.raises(ValueError, match="allowed: "):
        paired(mine, others)


def test_holm_rejects_what_the_closed_test_of_bonferroni_does():
    values = [0.01, 0.04, 0.03, 0.2]
    for i, corrected in enumerate(holm(values)):
        groups = (g for n in range(1, 5) for g in itertools.combinations(range(4), n) if i in g)
        closed = max(min(1, len(g) * min(values[j] for j in g)) for g in groups)
        assert corrected == pytest.approx(closed)
    assert holm([]) == []
