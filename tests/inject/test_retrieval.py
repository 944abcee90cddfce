"""What is to be retrieved: made for a length, by a seed, and scored as a plain evaluation of the model scores it."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hyperattn.inject import examples, retrieval, verify
from hf_hyperattn.inject.causal import CausalInjection
from hf_hyperattn.inject.gradients import head_of
from tests.cli import tiny

LENGTH = 1000


@pytest.fixture(scope="module")
def words():
    return torch.tensor(tiny.tokenizer()("a text of no meaning, " * 120).input_ids)


@pytest.fixture(scope="module")
def made(words):
    return examples(tiny.tokenizer(), [words, words.flip(0)], LENGTH)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=LENGTH)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_every_example_has_the_length_and_its_answers_where_it_says(made):
    read = tiny.tokenizer().decode
    tasks = {task: [e for e in made if e.task == task] for task in ("copying", *retrieval.COUNTS)}
    assert {task: len(each) for task, each in tasks.items()} == {"copying": 2, **retrieval.COUNTS}
    assert all(len(e.ids) == LENGTH for e in made)
    for e in tasks["needle"] + tasks["needle_keys"] + tasks["needle_values"]:
        text = read(e.ids)
        for start, stop in e.spans:
            number = read(e.ids[start:stop]).strip()
            assert number.isdigit() and len(number) == 5
            assert text.count(f" is {number}.\n") == 1  # hidden once
    for e in tasks["copying"]:
        ((start, stop),) = e.spans
        assert (start, stop) == (LENGTH // 2, LENGTH) and torch.equal(e.ids[:start], e.ids[start:])
    for e in tasks["variables"]:
        chain = [read(e.ids[start:stop]).strip() for start, stop in e.spans]
        assert (
            all(f"VAR {b} = VAR {a}\n" in read(e.ids) for a, b in zip(chain, chain[1:]))
            and len(chain) == 5
        )
    kinds = {word: kind for kind, words in retrieval.KINDS.items() for word in words}
    for e in tasks["few_shot"]:
        for start, stop in e.spans:
            before = read(e.ids[:start])
            assert (
                kinds[before.rpartition("Word: ")[2].partition(".")[0]]
                == read(e.ids[start:stop]).strip()
            )


def test_needles_lie_at_ten_depths(made):
    """The place in tokens, as a share of the haystack."""
    read, depths = tiny.tokenizer().decode, []
    for e in (e for e in made if e.task == "needle"):
        before, _, rest = read(e.ids).partition("\nThe secret number of")
        hay = LENGTH - len(read(e.ids)[len(before) : len(before) + rest.index("\n") + 21])
        assert len(before) == pytest.approx(e.depth * hay, rel=0.35)
        depths.append(e.depth)
    assert depths == [(i + 0.5) / 10 for i in range(10)]


def test_a_seed_gives_the_same_and_another_gives_others(words, made):
    again = examples(tiny.tokenizer(), [words, words.flip(0)], LENGTH)
    others = examples(tiny.tokenizer(), [words, words.flip(0)], LENGTH, seed=1)
    assert all(
        torch.equal(a.ids, b.ids) and a.spans == b.spans for a, b in zip(made, again, strict=True)
    )
    assert not any(torch.equal(a.ids, b.ids) for a, b in zip(made, others) if a.task != "copying")


def test_what_does_not_fit_is_left_out_and_what_is_wrong_is_refused(words):
    fitting = {e.task for e in examples(tiny.tokenizer(), [words], 256)}
    assert "needle" in fitting and "few_shot" not in fitting
    assert retrieval.mixture(tiny.tokenizer(), words, 64) is None
    with pytest.raises(ValueError, match="'needles' is unknown; allowed: copying, needle"):
        examples(tiny.tokenizer(), [words], 256, tasks=["needles"])
    with pytest.raises(ValueError, match="a haystack of 100 tokens; allowed: 256 or more"):
        examples(tiny.tokenizer(), [words[:100]], 256)
    for length in (-10, 1, 3, 64.0, True):
        with pytest.raises(
            ValueError, match=f"length={length} is not allowed; allowed: integers from 4"
        ):
            examples(tiny.tokenizer(), [words], length)
        with pytest.raises(
            ValueError, match=f"length={length} is not allowed; allowed: integers from 4"
        ):
            retrieval.copying(words, length)
    with pytest.raises(ValueError, match="first=-1 is not allowed; allowed: 0 to 62"):
        retrieval.copying(words, 64, -1)
    with pytest.raises(ValueError, match="copying: a text of 20 tokens; allowed: 32 or more"):
        retrieval.copying(words[:20], 64)


def test_a_copy_of_an_odd_length_has_one_token_less(words):
    assert len(retrieval.copying(words, 9).ids) == 8 and len(retrieval.copying(words, 4).ids) == 4


def test_a_bos_token_stays_in_front_and_comes_once(words):
    tokenizer = tiny.tokenizer(bos=True)
    text = torch.cat([torch.tensor([tiny.BOS]), words])
    made = examples(tokenizer, [text], LENGTH) + [retrieval.mixture(tokenizer, text, 1600)]
    assert all(e.ids[0] == tiny.BOS and (e.ids == tiny.BOS).sum() == 1 for e in made)
    assert all(len(e.ids) == LENGTH for e in made if e.task not in ("copying", "mixture"))
    ((start, stop),) = made[0].spans
    assert (start, stop) == (500, 999) and torch.equal(made[0].ids[1:start], made[0].ids[start:])
    hidden = retrieval.Hidden([(0.0, "deep")], [(" end", True)])
    first = retrieval.assemble_example(
        retrieval.make_encoder(tokenizer), text, 64, "needle", hidden, 1
    )
    assert tokenizer.decode(first.ids).startswith("<s>deep")


def test_a_mixture_asks_for_many_things_at_once(words):
    long = retrieval.mixture(tiny.tokenizer(), words, 1600)
    assert len(long.ids) == 1600 and len(long.spans) > 15
    assert len(retrieval.mixture(tiny.tokenizer(), words, 900).spans) < len(long.spans)


def test_scores_are_those_of_the_logits(model, made):
    head = head_of(model, made[0].ids)
    for e in random.Random(0).sample(made, 4):
        logits = model(e.ids[None]).logits[0].double()
        nats, right = 0.0, 0
        for start, stop in e.spans:
            chances = [logits[i - 1].softmax(0)[e.ids[i]].item() for i in range(start, stop)]
            nats -= sum(map(math.log, chances))
            right += all(logits[i - 1].argmax() == e.ids[i] for i in range(start, stop))
        score = retrieval.score(model, head, e)
        assert score.nats == pytest.approx(
            nats / e.tokens, rel=1e-4
        ) and score.exact == right / len(e.spans)


def test_exact_is_what_greedy_decoding_gives(model, words):
    """An answer that the model gives by itself is right, and is not once a token of it is changed."""
    start = words[:200]
    given = model.generate(
        start[None], max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0]
    right = retrieval.Example("needle", given, ((200, 204),))
    wrong = retrieval.Example(
        "needle", torch.cat([given[:-1], (given[-1:] + 1) % 256]), ((200, 204),)
    )
    head = head_of(model, given)
    assert [retrieval.score(model, head, e).exact for e in (right, wrong)] == [1.0, 0.0]


def test_verification_is_of_texts_and_tasks(model, made, words):
    texts = {"one": words[:300], "two": words[300:500]}
    found = verify(model, texts, made[:5])
    for name, ids in texts.items():
        assert found.texts[name] == pytest.approx(
            model(ids[None], labels=ids[None]).loss.item(), rel=1e-4
        )
    assert set(found.retrieval) == {"copying", "needle"} and found.seconds > 0
    assert set(found.losses(found).values()) == {0.0}
    with pytest.raises(ValueError, match="texts is empty; allowed: one or more by name"):
        verify(model, {})


def test_a_text_that_is_called_like_a_task_is_refused(model, made, words):
    message = "a text is called copying, as a task of retrieval is; allowed: another name"
    with pytest.raises(ValueError, match=message):
        verify(model, {"copying": words[:300]}, made[:2])
    assert set(verify(model, {"copying": words[:300]}).texts) == {
        "copying"
    }  # without examples it takes no place
    for name in ("copying", "mixture", "needle", "needle 3"):
        texts = [{name: words[:64]}] * 3
        with pytest.raises(ValueError, match=f"a text is called {name}, as a task"):
            CausalInjection(model, texts, [], 64, 0.02, tokenizer=tiny.tokenizer())
        assert CausalInjection(model, texts, [], 64, 0.02).texts == texts
