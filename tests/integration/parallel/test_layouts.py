"""Further layouts of Transformers' `DistributedConfig` give the numbers of one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.covering import choose_covering
from tests.integration.parallel.layouts import (
    CELLS,
    LAYOUTS,
    NAMES,
    family_of,
    model_of,
    place_of,
    rows_of,
)
from tests.integration.parallel.parallel import batch, results_of, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
COVERING = choose_covering(CELLS, tuple)
SOME = [
    (layout, name)
    for layout, name in COVERING
    if layout in ("pipeline", "experts, heads") or name in ("cone", "hsa", "talking_heads")
]


def run(folder: Path, cells) -> dict[int, list[dict]]:
    """Run the cells, and return by number of ranks what each rank found."""
    for family in {family_of(layout) for layout, _ in cells} | {"llama"}:
        for name in {name for _, name in cells} | {"cone"}:
            place = place_of(folder, f"start/{family}", name)
            model_of(family, name).save_pretrained(place)
    found = {}
    for world in (2, 4):
        (folder / "cells.json").write_text(json.dumps(cells))
        start("tests.integration.parallel.layouts", folder, world)
        found[world] = [torch.load(folder / f"{rank}.pt") for rank in range(world)]
        (folder / "meeting").unlink(missing_ok=True)
    return found


@cache
def alone(family: str, name: str) -> dict:
    """The results of one process."""
    return results_of(model_of(family, name), batch())


def apart(layout: str, name: str, ranks: list[dict]) -> float:
    """The largest difference from one process, of the logits of all ranks and of the gradients."""
    expected, most = alone(family_of(layout), name), 0.0
    for rank, results in enumerate(ranks):
        found = results[layout, name]
        logits = found["logits"] - expected["logits"][rows_of(layout, rank)]
        most = max(most, logits.abs().max().item())
        gradients = [
            (found["gradients"][key] - g).abs().max().item()
            for key, g in expected["gradients"].items()
            if found["gradients"]
        ]
        most = max([most, *gradients])
    return most


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, dict[int, list[dict]]]:
    folder = tmp_path_factory.mktemp("layouts")
    return folder, run(folder, SOME)


def test_every_layout_and_mechanism_is_tried():
    assert {layout for layout, _ in SOME} == {*LAYOUTS}
    assert {name for _, name in SOME} == {*NAMES}


@pytest.mark.parametrize("layout, name", SOME)
def test_ranks_give_the_numbers_of_one_process(layout, name, shared):
    assert apart(layout, name, shared[1][LAYOUTS[layout][0]]) <= 1e-5


@pytest.mark.parametrize("layout, name", [cell for cell in SOME if cell[0] != "pipeline"])
def test_a_checkpoint_of_any_layout_is_that_of_one_process(layout, name, shared):
    folder, _ = shared
    first = load_file(place_of(folder, f"start/{family_of(layout)}", name) / "model.safetensors")
    saved = load_file(place_of(folder, f"saved/{layout}", name) / "model.safetensors")
    assert not [n for n in saved.keys() - first.keys() if ".hyper." in n]
    assert all(torch.equal(saved[n], tensor) for n, tensor in first.items())


def test_a_stage_of_a_pipeline_is_not_saved_as_a_model(shared):
    for results in shared[1][2]:
        message = results["refused", "save a stage"]
        assert message.startswith("ValueError: LlamaForCausalLM is one stage of a pipeline")
        assert "allowed: " in message and "\n" not in message
