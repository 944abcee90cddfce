"""Requests that share steps, prefixes and memory get what each gets alone, for every mechanism."""

from __future__ import annotations

import re

import pytest
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

import hf_hyperattn as ha

from ..oracles.marks import first_always
from .serving import (
    FEATURES,
    PROMPTS,
    ROWS,
    check_equal,
    generate_alone,
    make_table,
    move,
    read_table,
    serve_batch,
    try_feature,
)
from .test_continuous_batching import SERVED, steep


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
    assert any(evicted)


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
    assert all(re.fullmatch(r"equal|refused \[\d+\]", cell) for cell in cells)


@pytest.mark.parametrize("feature", [name for name in FEATURES if "compiled" not in name])
def test_a_row_of_the_table(feature):
    """One row in every run; the slow test has all."""
    assert try_feature("hype", feature) == "equal"
