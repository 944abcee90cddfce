"""Whatever hides keys, and in whatever calls a text comes: results are those of the definition on the text alone.

`HYPERATTN_EXAMPLES=10` draws ten times as many cases, new ones in every run.
"""

from itertools import zip_longest

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import hf_hyperattn as ha
from hf_hyperattn.engines.options import hide_with_infinity, read_visible

from .masks_and_calls.functions import (
    FUNCTIONS,
    REFUSALS,
    TOLERANCE,
    call_function,
    draw_cases,
    evaluate_definition,
    is_clear,
)
from .masks_and_calls.models import (
    ENGINES,
    HOSTS,
    MECHANISMS,
    check_against_alone,
    draw_talks,
    hold_talk,
    make_model,
)
from .masks_and_calls.texts import DTYPES, assert_near, examples


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    """A cache that can forget nothing says so, in every example."""
    caplog.set_level("ERROR", "hf_hyperattn")


def assert_one_sentence(error: ValueError, part: str, case: object) -> None:
    """A refusal is one line that says what is allowed."""
    said = str(error)
    assert "\n" not in said and "allowed:" in said and part in said, f"{said!r}: {case}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_ten_thousand_hides_in_every_dtype(dtype):
    """bfloat16 makes it -9984, and a mask may be widened after that, or have a bias added."""
    mask = torch.tensor([-10_000.0, 0.0, -9_800.0], dtype=dtype)
    assert read_visible(mask.float() + 5.0).tolist() == [False, True, True]
    assert hide_with_infinity(mask).isneginf().tolist() == [True, False, False]


@pytest.mark.parametrize("name", FUNCTIONS)
@examples(60)
@given(data=st.data())
def test_functions_give_what_their_definition_gives(name, data):
    case = data.draw(draw_cases(FUNCTIONS[name]), "case")
    backend = data.draw(st.sampled_from(("auto", *FUNCTIONS[name].backends)), "backend")
    fact, said = REFUSALS.get(name, ("", ""))
    if fact in case.facts:
        try:
            call_function(name, case, backend)
        except ValueError as error:
            event("refused")
            return assert_one_sentence(error, said, case)
    expected = evaluate_definition(name, case)
    if not is_clear(name, case, expected):
        event("rounding decides")
        return
    found = call_function(name, case, backend)
    assert found.dtype == case.dtype
    assert_near(found, expected, TOLERANCE[case.dtype], (name, backend))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@examples(40)
@given(data=st.data())
def test_calls_give_what_the_text_alone_gives(mechanism, data):
    """Padding, masks, chunks, caches, beams and a second conversation in turn change nothing."""
    host = data.draw(st.sampled_from(HOSTS), "host")
    talks = data.draw(st.lists(draw_talks(host, mechanism), min_size=1, max_size=2), "talks")
    engine = data.draw(st.sampled_from(ENGINES), "engine")
    model = ha.set_backend(make_model(host, mechanism), engine)
    case = (mechanism, host, engine)
    check = check_against_alone(host, mechanism, torch.float32, 1e-3, case)
    for step in zip_longest(*(hold_talk(model, talk, check) for talk in talks)):
        pass
