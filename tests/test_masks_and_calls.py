"""Whatever hides keys, and in whatever calls a text comes: results are those of the definition on the text alone.

`HYPERATTN_EXAMPLES=10` draws ten times as many cases, new ones in every run.
"""

from dataclasses import replace
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
    call_function,
    draw_cases,
    evaluate_definition,
    is_clear,
    tolerance,
)
from .masks_and_calls.models import (
    CHOOSING,
    COUNTING,
    ENGINES,
    HOSTS,
    INTERPRETED,
    MECHANISMS,
    assert_refusal,
    check_against_alone,
    draw_packed_talks,
    draw_talks,
    hold_talk,
    kinds_of,
    make_exact,
    make_model,
    prune,
)
from .masks_and_calls.texts import DTYPES, assert_near, examples

#: How far logits in half precision may be off, as a share of the largest one.
HALF = {torch.bfloat16: 0.3, torch.float16: 0.15}
#: Its logits grow with the square of a distance, and the rounding of queries and keys with them. In bfloat16
#: all engines, `reference` too, are off by the same 0.46 of the largest logit in one case (float32: 5e-6).
MAGNIFYING = {"hyperbolic, squared"}


@pytest.fixture(autouse=True)
def small_and_quiet(caplog, monkeypatch):
    """Caches forget in short texts, too; that others can forget nothing is not said in every example."""
    caplog.set_level("ERROR", "hf_hyperattn")
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.means_kept.TAKEN_BACK", 1)
    monkeypatch.setattr("hf_hyperattn.mechanisms.selection.cache.TAKEN_BACK", 1)


@given(draw_cases(FUNCTIONS["hsa"]))
@examples(20)
def test_tying_of_both_sides_refuses_masks_that_hide_more_than_padding(case):
    case = replace(case, flag=False)
    real = torch.stack([row.real for row in case.rows])
    if not torch.equal(case.seen[:, 0], real[:, None] & real[:, :, None]):
        with pytest.raises(ValueError) as caught:
            call_function("hsa, both", case, "auto")
        assert_one_sentence(caught.value, "a mask that hides more than padding", case)


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
@examples(24)
@given(data=st.data())
def test_functions_give_what_their_definition_gives(name, data):
    case = data.draw(draw_cases(FUNCTIONS[name]), "case")
    backends = ("triton",) if INTERPRETED else ("auto", *FUNCTIONS[name].backends)
    backend = data.draw(st.sampled_from(backends), "backend")
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
    assert_near(found, expected, tolerance(name, case), (name, backend))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@examples(12)
@given(data=st.data())
def test_calls_give_what_the_text_alone_gives(mechanism, data):
    """Padding, masks, chunks, caches, beams and a second conversation in turn change nothing."""
    host = data.draw(st.sampled_from(HOSTS), "host")
    talks = data.draw(st.lists(draw_talks(host, mechanism), min_size=1, max_size=2), "talks")
    engine = data.draw(st.sampled_from(ENGINES), "engine")
    hold_in_turn(host, mechanism, engine, talks, torch.float32, 1e-3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@examples(8)
@given(data=st.data())
def test_packed_texts_give_what_each_alone_gives(mechanism, data):
    talk = data.draw(draw_packed_talks(), "talk")
    engine = data.draw(st.sampled_from(ENGINES), "engine")
    hold_in_turn("llama", mechanism, engine, [talk], torch.float32, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@examples(20)
@given(data=st.data())
def test_calls_in_half_precision(dtype, data):
    """Mechanisms that choose keys by their scores are left out: rounding may choose others."""
    steady = [name for name in MECHANISMS if name not in {*CHOOSING, *MAGNIFYING}]
    mechanism = data.draw(st.sampled_from(steady), "mechanism")
    talks = data.draw(st.lists(draw_talks("llama", mechanism), min_size=1, max_size=2), "talks")
    engine = data.draw(st.sampled_from(ENGINES), "engine")
    hold_in_turn("llama", mechanism, engine, talks, dtype, HALF[dtype])


def hold_in_turn(host, mechanism, engine, talks, dtype, share):
    """Hold talks on one model, a call of each in turn, and compare with each text alone."""
    model = ha.set_backend(make_model(host, mechanism, dtype), engine)
    check = check_against_alone(
        host, mechanism, dtype, share, (mechanism, host, engine, str(dtype))
    )
    kinds = set().union(*(kinds_of(host, engine, talk) for talk in talks))
    try:
        for _ in zip_longest(*(hold_talk(model, talk, check) for talk in talks)):
            pass
    except ValueError as error:
        event("refused")
        assert_refusal(error, mechanism, kinds)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@examples(6)
@given(data=st.data())
def test_pruned_caches_are_refused_or_keys_that_are_hidden(mechanism, data):
    """Mechanisms that count keys cannot know which ones a pruned cache still has."""
    prompt, steps = data.draw(st.integers(2, 10), "prompt"), data.draw(st.integers(1, 3), "steps")
    gone = data.draw(st.sets(st.integers(0, prompt - 1), min_size=1, max_size=prompt - 1), "gone")
    engine = data.draw(st.sampled_from(("auto", "reference")), "engine")
    model, exact = make_model("llama", mechanism), make_exact("llama", mechanism, torch.float32)
    ids = torch.randint(1, 99, (2, prompt + steps), generator=torch.Generator().manual_seed(prompt))
    ha.set_backend(model, engine)
    places = torch.arange(prompt, prompt + steps).expand(2, -1)
    with torch.no_grad():
        past = prune(model, ids[:, :prompt], gone)
        try:
            found = model(ids[:, prompt:], past_key_values=past, position_ids=places).logits
        except ValueError as error:
            return assert_refusal(error, mechanism, {"pruned"})
        assert mechanism not in COUNTING, f"not refused: {sorted(gone)} of {prompt}"
        seen = torch.ones(prompt + steps, prompt + steps, dtype=torch.bool).tril()
        seen[prompt:, sorted(gone)] = False
        expected = exact(ids, attention_mask=seen[None, None], use_cache=False).logits[:, prompt:]
    assert_near(found, expected, 1e-3, (mechanism, engine))
