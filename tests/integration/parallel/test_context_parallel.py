"""Ranks that share the tokens of a row give the numbers of one process, or refuse the call in one sentence."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hf_hyperattn as ha
from tests.covering import choose_covering
from tests.forking import CAN_FORK, run_module
from tests.integration.parallel.context_parallel import (
    ALL_CELLS,
    LENGTH,
    OTHERS,
    accelerated_model,
    alone,
    batch,
    llama_with,
    model_of,
    more_of,
)

CELLS = choose_covering(ALL_CELLS, tuple)
#: One cell of each kind of work: a rank's own queries only, and the queries of all ranks.
SMOKE = [
    ("balanced", "llama", "cone and hype, some heads", "left"),
    ("plain", "bert", "hype", "right"),
]


def run_ranks(folder: Path, world: int, **task) -> list[dict]:
    """Run all ranks at once, and return what each of them found."""
    (folder / "cells.json").write_text(json.dumps(task))
    module = "tests.integration.parallel.context_parallel"
    root = Path(__file__).resolve().parents[3]
    with ThreadPoolExecutor(world) as pool:
        done = list(
            pool.map(lambda rank: run_module(module, rank, folder, world, cwd=root), range(world))
        )
    assert not any(process.returncode for process in done), "\n".join(
        process.stderr[-3000:] for process in done
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def tokens_of(rank: int, world: int, order: str) -> Tensor:
    """The tokens of a rank: its part, or its half part from the front and from the end."""
    if order == "plain":
        return torch.arange(LENGTH).view(world, -1)[rank]
    halves = torch.arange(LENGTH).view(2 * world, -1)
    return torch.cat([halves[rank], halves[2 * world - 1 - rank]])


def joined(parts: list[Tensor], order: str) -> Tensor:
    """The logits of all ranks in the order of the text."""
    tokens = torch.cat([tokens_of(rank, len(parts), order) for rank in range(len(parts))])
    return torch.cat(parts, 1)[:, tokens.argsort()]


def check_equal(found: list[dict], expected: dict, order: str, padding: str) -> tuple[float, float]:
    """Compare the logits of real tokens and all gradients, and return the largest differences."""
    real = batch(padding).get("attention_mask", torch.ones(2, LENGTH)).bool()
    logits = joined([part["logits"] for part in found], order)
    apart = (logits - expected["logits"])[real].abs().max().item()
    gradients, summed = expected["gradients"], found[0]["gradients"]
    assert summed.keys() == gradients.keys()
    most = max((summed[name] - g).abs().max().item() for name, g in gradients.items())
    assert max(apart, most) <= 1e-5
    return apart, most


def test_two_ranks_share_the_tokens_of_a_row(tmp_path):
    """A short look at what the slow tests compare in full."""
    if not CAN_FORK:
        pytest.skip("starting two processes takes too long")
    ranks = run_ranks(tmp_path, 2, cells=SMOKE)
    for order, *case, padding in SMOKE:
        found = [results[(order, *case, padding)] for results in ranks]
        check_equal(found, alone(model_of(*case), padding), order, padding)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks, or of four, found."""
    folder = tmp_path_factory.mktemp("context")
    if request.param == 4:
        llama_with(ha.ConeConfig()).save_pretrained(folder / "cone")
    return run_ranks(
        folder,
        request.param,
        cells=CELLS,
        others=list(OTHERS),
        refusals=request.param == 2,
        accelerate=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("order, family, name, padding", CELLS)
def test_ranks_give_the_numbers_of_one_process(order, family, name, padding, ranks):
    found = [results[order, family, name, padding] for results in ranks]
    expected = alone(model_of(family, name), padding)
    assert any(".hyper." in n and g.abs().max() > 1e-4 for n, g in expected["gradients"].items())
    check_equal(found, expected, order, padding)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", OTHERS)
def test_other_models_give_the_numbers_of_one_process(what, ranks):
    found = [results["other", what] for results in ranks]
    gradients = found[0]["gradients"]
    prefix = "_orig_mod." if what == "compiled" else ""
    found[0]["gradients"] = {name.removeprefix(prefix): g for name, g in gradients.items()}
    check_equal(found, alone(OTHERS[what](), "right", **more_of(what)), "balanced", "right")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_share_heads_and_tokens(ranks):
    if len(ranks) < 4:
        pytest.skip("two ranks for the heads and two for the tokens")
    expected = alone(llama_with(ha.ConeConfig()), "right")["logits"]
    # Ranks 0 and 1 have the same tokens, and so have 2 and 3.
    logits = joined([ranks[rank]["tensor parallel"]["logits"] for rank in (0, 2)], "balanced")
    real = batch("right")["attention_mask"].bool()
    assert (logits - expected)[real].abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accelerate_shares_weights_and_tokens(ranks):
    model = accelerated_model()
    data = {name: tensor for name, tensor in batch("none").items() if name != "labels"}
    model(**data).logits.square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for results in ranks:
        found = results["accelerate"]
        assert found.keys() == expected.keys()
        assert all((found[name] - g).abs().max() <= 1e-5 for name, g in expected.items())


REFUSED = {
    "positions": "position_ids that do not count the tokens of the whole text",
    "packed": "position_ids that do not count the tokens of the whole text",
    "mask": "a mask that hides more",
    "bias": "a bias by position",
    "weights": "output_attentions",
    "hierarchical cache": "a HierarchicalCache",
    "cached keys": "16 keys for 8 queries",
    "part of a hierarchy": "a hierarchy of 8 tokens",
    "backward outside": "outside the context_parallel block",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", REFUSED)
def test_what_ranks_cannot_share_is_refused_in_one_line(what, ranks):
    for results in ranks:
        if ("refused", what) not in results:
            pytest.skip("two ranks refuse for all")
        message = results["refused", what]
        assert REFUSED[what] in message and "allowed: " in message
        assert "\n" not in message


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_the_context_all_is_as_before(ranks):
    for what in ("afterwards", "notes after unpatching"):
        assert all(results.get(("refused", what), "") == "" for results in ranks)
