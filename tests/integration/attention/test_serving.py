"""Requests that share steps, prefixes and memory get what each gets alone, for every mechanism."""

from __future__ import annotations

import contextlib
import re
from threading import Thread

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

import hf_hyperattn as ha
from tests.integration.attention.serving import (
    FEATURES,
    PROMPTS,
    ROWS,
    TOKENS,
    check_equal,
    generate_alone,
    make_table,
    move,
    open_manager,
    read_table,
    serve_batch,
    try_feature,
)
from tests.integration.attention.test_continuous_batching import SERVED, steep
from tests.oracles.marks import first_always


def patched(name: str, family: str = "llama"):
    """A model with moved parameters, and the mechanism at full strength."""
    return move(ha.patch_model(steep(family), SERVED[name], mode="replace"))


def watch(monkeypatch, owner: type, name: str) -> list:
    """The results of a method of Transformers, as it is called."""
    original, found = getattr(owner, name), []

    def watched(self, *args):
        found.append(original(self, *args))
        return found[-1]

    monkeypatch.setattr(owner, name, watched)
    return found


@first_always("name", ["pages", *(name for name in SERVED if name != "pages")])
def test_chunks_and_shared_prefixes(name, monkeypatch):
    """Prompts come in chunks of 16 tokens, and later requests find the pages of earlier prompts."""
    model = patched(name)
    expected = generate_alone(model, PROMPTS)
    stock = generate_alone(steep(), PROMPTS)
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in stock]
    matched = watch(monkeypatch, PagedAttentionCache, "search_prefix_match")
    check_equal(serve_batch(model, PROMPTS), expected)
    # Tokens that were not computed again. Queries of earlier steps belong to one request.
    assert sum(matched) >= 40 or name == "pages, previous"


@first_always("name", ["hype", *(name for name in SERVED if name != "hype")])
def test_evicted_requests(name, monkeypatch):
    """The memory holds two of the eight requests: others are taken out and computed again."""
    model = patched(name)
    evicted = watch(monkeypatch, OffloadingManager, "offload_requests")
    check_equal(serve_batch(model, PROMPTS, num_blocks=8), generate_alone(model, PROMPTS))
    # Earlier versions let requests wait for room.
    assert any(evicted) or Version(transformers.__version__) < Version("5.24")


WINDOWED = [
    (name, family)
    for name in ("windows", "hsa", "hype", "pages", "pages, previous", "trilinear, windows", "cone")
    for family in ("mistral", "gemma2", "gpt_oss")
    # HSA and trilinear attention refuse softcaps.
    if (name, family) not in (("hsa", "gemma2"), ("trilinear, windows", "gemma2"))
]


@first_always("name, family", WINDOWED)
def test_layers_with_windows(name, family):
    """Sliding windows drop tokens of each request at another place."""
    model = patched(name, family)
    check_equal(serve_batch(model, PROMPTS), generate_alone(model, PROMPTS))


TALKING = ["pages, previous", "pages", "hsa", "hype", "cone"]
HOLD = 60  # seconds that an answer may take


@pytest.mark.slow
@pytest.mark.parametrize("name", TALKING)
def test_24_interleaved_conversations(name):
    """Three turns each; a turn's prompt is all that was said before, and its beginning is in the cache."""
    model = patched(name)
    texts = [TOKENS[start : start + 3 + start % 11] for start in range(24)]
    with open_manager(model) as manager:
        for turn in range(3):
            asked = [manager.add_request(text) for text in texts]
            answers: dict = {}
            while len(answers) < len(asked):
                result = manager.get_result(timeout=HOLD)
                assert result is not None and result.error is None
                answers[result.request_id] = result
            found = [
                (answers[i].generated_tokens, torch.tensor(answers[i].logprobs)) for i in asked
            ]
            check_equal(found, generate_alone(model, texts))
            texts = [
                text + tokens + TOKENS[turn : turn + 1 + number % 5]
                for number, (text, (tokens, _)) in enumerate(zip(texts, found, strict=True))
            ]


@pytest.mark.slow
@pytest.mark.parametrize("name", TALKING)
@pytest.mark.parametrize("batched", [False, True], ids=["generate", "continuous batching"])
def test_six_threads(name, batched):
    """Each thread asks four times, of one model, or of one manager."""
    model = patched(name)
    prompts = [TOKENS[start : start + 4 + start] for start in range(24)]
    expected = generate_alone(model, prompts)
    found: dict = {}
    errors: list = []

    def ask_alone(numbers):
        for number in numbers:
            found[number] = generate_alone(model, [prompts[number]])[0]

    def ask_manager(numbers):
        for number in numbers:
            request = manager.add_request(prompts[number])
            while (result := manager.get_result(request, timeout=HOLD)) is None:
                pass
            found[number] = result.generated_tokens, torch.tensor(result.logprobs)

    def run(numbers):
        try:
            (ask_manager if batched else ask_alone)(numbers)
        except Exception as error:
            errors.append(error)

    with open_manager(model) if batched else contextlib.nullcontext() as manager:
        threads = [Thread(target=run, args=(range(i, 24, 6),)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HOLD * 4)
    assert not errors
    check_equal([found[number] for number in range(24)], expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_table_of_the_docs():
    assert read_table() == make_table()


def test_the_table_has_all_rows_and_columns():
    head, _, *lines = read_table().split("\n\n")[0].splitlines()
    assert head == f"| mechanism | {' | '.join(FEATURES)} |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(ROWS)
    served = {config.mechanism for _, configs in ROWS.values() for config in configs}
    assert {m["name"] for m in ha.list_mechanisms()} - served == {"hat"}  # it writes no tokens
    cells = {cell for line in lines for cell in line.strip("| ").split(" | ")[1:]}
    assert all(re.fullmatch(r"equal|(refused|warned) \[\d+\]", cell) for cell in cells)


QUICK = [name for name in FEATURES if name not in ("static cache, compiled", "continuous batching")]


@pytest.mark.parametrize("feature", QUICK)
def test_a_row_of_the_table(feature):
    """One row in every run; the slow test has all, and the tests above continuous batching."""
    assert try_feature("hype", feature)[0] == "equal"
