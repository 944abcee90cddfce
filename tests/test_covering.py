"""Covering arrays miss no combination, stay small, and are the same in every run."""

from itertools import combinations, product

import pytest

from tests.covering import choose_covering, combine, cover_pairs

AXES = [range(5), "abcd", (True, False), ("x", "y", "z")]


def list_pairs(cases):
    return {pair for case in cases for pair in combine(case, 2)}


def test_every_pair_meets_in_few_cases():
    cases = cover_pairs(*AXES)
    assert list_pairs(cases) == list_pairs(product(*AXES))
    assert len(cases) <= 24  # at least 20, of the 120 of the grid
    assert cases == cover_pairs(*AXES) and cases == [c for c in product(*AXES) if c in cases]


def test_values_need_not_be_hashable():
    assert len(cover_pairs([[1], [2]], [{}, []], [None])) == 4


def test_pairs_without_a_meaning_are_left_out():
    cases = cover_pairs(*AXES, allowed=lambda number, letter, *_: (number, letter) != (0, "a"))
    assert not any(case[:2] == (0, "a") for case in cases)
    assert list_pairs(cases) == {
        pair for pair in list_pairs(product(*AXES)) if pair != ((0, 0), (1, "a"))
    }


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_other_strengths_and_what_is_covered_elsewhere(strength):
    grid = list(product(*AXES))
    before = grid[::7]
    cases = choose_covering(grid, tuple, strength, before)
    found = {some for case in cases + before for some in combine(case, strength)}
    assert found == {
        some for case in grid for some in combinations(list(enumerate(case)), strength)
    }
    assert not set(cases) & set(before)


def test_one_axis_is_all_of_its_values():
    assert cover_pairs("abc") == [("a",), ("b",), ("c",)]
