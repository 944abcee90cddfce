"""RULER's tasks: every answer follows from its prompt, samples fit, and scores are those of a pass without a cache."""

import re
from collections import Counter
from functools import cache

import pytest
import ruler
import torch
from frontiers import ruler_tasks
from frontiers.ruler_tasks import TASKS, Sample, score_text

import hf_hyperattn as ha
from hf_hyperattn.rules import Pages, Window
from tests.cli import tiny
from tests.mechanisms.sparse.test_sparse_models import llama

LETTERS = "abcdefghijklmnopqrst"
#: 8,000 different words in sentences of eight.
WORDS = [a + b + c + "e" for a in LETTERS for b in LETTERS for c in LETTERS]
TEXT = " ".join(" ".join(WORDS[i : i + 8]).capitalize() + "." for i in range(0, 8000, 8))


def count_words(text: str) -> int:
    """Count words and signs, in place of a tokenizer."""
    return len(re.findall(r"\w+|[^\w\s]", text))


#: Samples are made once for all tests.
make_sample = cache(ruler_tasks.make_sample)


def needles_of(context: str) -> dict[str, list[str]]:
    """Read every needle of a context."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"The special magic \w+ for (\S+) is: (\S+)\.", context):
        found.setdefault(key, []).append(value)
    return found


def solve(sample: Sample) -> list[str]:
    """Answer a prompt by reading it."""
    context, question = sample.prompt.rsplit("\nQuestion:", 1)
    context = context.rsplit("below", 1)[-1]
    if sample.task.startswith("niah"):
        asked = re.split(", | and ", question.split(" for ")[1].split(" in the text")[0])
        found = needles_of(context)
        return [value for key in asked for value in found[key]]
    if sample.task == "vt":
        values = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context))
        wanted = re.search(r"value (\d+)", question).group(1)

        def follow(name: str) -> str:
            return follow(values[name]) if name in values else name

        return [name for name in values if follow(name) == wanted]
    if sample.task == "cwe":
        counted = Counter(re.findall(r"\d+\. (\w+)", context))
        assert set(counted.values()) == {30, 3}
        return [word for word, _ in counted.most_common(10)]
    return [word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", context)).most_common(3)]


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_prompt_and_samples_fit(task):
    sample = make_sample(task, 4096, count_words, TEXT, "3")
    tokens = count_words(sample.prompt) + sample.tokens
    assert 0.95 * 4096 < tokens <= 4096
    assert sorted(solve(sample)) == sorted(sample.answers)


def test_the_tasks_hide_as_much_as_ruler_says():
    made = {task: make_sample(task, 4096, count_words, TEXT, "3") for task in TASKS}
    hidden = {task: needles_of(made[task].prompt) for task in TASKS if task.startswith("niah")}
    assert [len(hidden[f"niah_{t}"]) for t in ("single_1", "multikey_1", "multiquery")] == [1, 4, 4]
    assert [len(values) for values in hidden["niah_multivalue"].values()] == [4]
    assert len(hidden["niah_multikey_2"]) > 100 and len(hidden["niah_multikey_3"]) > 50
    assert [len(made[t].answers) for t in ("vt", "cwe", "fwe", "niah_multiquery")] == [5, 10, 3, 4]
    assert {len(made["niah_single_1"].answers[0]), len(made["niah_single_3"].answers[0])} == {7, 36}


def test_a_seed_gives_the_same_sample_again():
    of = lambda seed: ruler_tasks.make_sample("niah_single_1", 1024, count_words, TEXT, seed)
    assert of("3") == of("3") != of("4")


def test_a_length_without_room_is_refused():
    with pytest.raises(ValueError, match="cwe: 500 tokens hold no sample; allowed: more tokens"):
        make_sample("cwe", 500, count_words, TEXT, "0")


def test_the_score_is_the_share_of_answers_in_the_text():
    assert score_text("it is AbC, then 12", ["abc", "12", "13", "it is"]) == 0.75


@pytest.mark.parametrize(
    "rules", [None, [Window(16, 2), Pages(4, 1, 1, 6, "mean", "previous")] * 2]
)
def test_a_sample_is_scored_as_without_a_cache(rules):
    torch.manual_seed(0)
    model, tokenizer = llama(vocab_size=260), tiny.tokenizer()
    if rules is not None:
        ha.patch_model(model, ha.SparseConfig(rules), mode="replace")
    prompt = "the words of a text that is read, and the others; " * 3
    found = ruler.run_sample(model, tokenizer, Sample("vt", prompt, ("the", "xyzq"), 6))
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    answer = tokenizer(" the, xyzq", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(torch.cat([ids, answer], 1), use_cache=False).logits[
            0, ids.shape[1] - 1 : -1
        ]
        made = ids
        for _ in range(6):
            best = model(made, use_cache=False).logits[0, -1].argmax()
            made = torch.cat([made, best[None, None]], 1)
    text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    nats = -logits.log_softmax(-1).gather(1, answer[0, :, None]).mean().item()
    assert found["generated"] == text and found["tokens"] == ids.shape[1]
    assert found["nats"] == pytest.approx(nats, abs=1e-5)
    assert found["score"] == sum(a in text.lower() for a in ("the", "xyzq")) / 2


def test_generation_stops_once_every_answer_stands_there():
    tokenizer = tiny.tokenizer()
    stop = ruler.FoundAll(tokenizer, Sample("vt", "", ("cab",), 9), 2)
    ids = tokenizer("cabca", return_tensors="pt")["input_ids"]  # the first two are the prompt's
    assert not stop(ids, None).item()
    assert stop(torch.cat([ids, tokenizer("b", return_tensors="pt")["input_ids"]], 1), None).item()


def test_the_table_says_what_was_not_run_and_compares_by_pairs():
    cells = {
        "4096/original/vt": [{"score": 0.5, "nats": 1.0}, {"score": 1.0, "nats": 2.0}],
        "4096/original/fwe": [{"score": 0.0, "nats": 3.0}],
        "4096/20 % of the pairs/vt": [{"score": 0.25, "nats": 1.1}],
        "4096/20 % of the pairs/fwe": [{"score": 1.0, "nats": 3.0}],
    }
    table = ruler.table_of({"cells": cells}, 4096).splitlines()
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in table}
    assert rows["vt"][:4] == ["2", "75; 1.50 nats", "25; +10.5%", "not run"]  # exp(0.1) - 1
    assert rows["fwe"][1:3] == ["0; 3.00 nats", "100; +0.0%"] and rows["cwe"][1] == "not run"
    # exp(0.05) - 1, and exp(0.05) times half of 0.1
    assert rows["**mean**"][1:4] == ["37.5; 2.25 nats", "62.5; +5.1% ± 5.3%", "not run"]
    assert ruler.table_of({"cells": cells}, 8192) == "Not run."
