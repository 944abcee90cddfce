"""A model on two ranks gives the numbers of one process in each layout, saves what any layout loads, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import hf_hyperattn as ha
from tests.integration.architectures.collaborative import quiet
from tests.integration.parallel.parallel import (
    AFTERWARDS,
    AUTO,
    CASES,
    CELLS,
    FAMILIES,
    PATCHES,
    SIZES,
    batch,
    path,
    results_of,
    start,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # a pair of processes runs all cases


def stock(family: str, **changes):
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.update(changes)
    model = AUTO[family].from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # biases and norms
                p.add_(0.1 * torch.randn_like(p))
    return model


def write(folder: Path, cells) -> None:
    """The checkpoints that the ranks load, and what they do with them."""
    for family in FAMILIES:
        stock(family).save_pretrained(path(folder, "stock", (family,)))
    for case in CASES:
        model = ha.patch_model(stock(case[0]), PATCHES[case[1]](case[0]))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".hyper." in name:
                    p.add_(0.5 * torch.randn_like(p))
        model.save_pretrained(path(folder, "start", case))
    gathered = hf.Olmo2Config(
        **SIZES | dict(num_attention_heads=1, num_key_value_heads=1, hidden_size=8)
    )
    torch.manual_seed(0)
    model = hf.Olmo2ForCausalLM(gathered).eval()  # of one head, which its plan does not cut
    model.save_pretrained(folder / "gathered" / "by name")
    ha.patch_model(model, ha.HypeConfig(), mode="replace").save_pretrained(
        folder / "gathered" / "patched"
    )
    odd = stock("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
    ha.patch_model(odd, ha.ConeConfig()).save_pretrained(folder / "three_heads")
    with quiet():
        ha.convert(stock("bert"), ha.CollaborativeConfig(rank=16)).save_pretrained(
            folder / "converted"
        )
    (folder / "cells.json").write_text(json.dumps(cells))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, dict]:
    """The checkpoints, and what two ranks found."""
    return shared_in(tmp_path_factory.mktemp("parallel"), CELLS)


def shared_in(folder: Path, cells) -> tuple[Path, dict]:
    write(folder, cells)
    start("tests.integration.parallel.parallel", folder)
    return folder, torch.load(folder / "results.pt")


def apart(together: dict, alone: dict) -> tuple[float, float]:
    """The largest difference of the logits that there are, and of the gradients."""
    assert together["gradients"].keys() == alone["gradients"].keys()
    gradients = [
        (g - alone["gradients"][n]).abs().max().item() for n, g in together["gradients"].items()
    ]
    logits = together["logits"] - alone["logits"][: len(together["logits"])]
    return logits.abs().max().item(), max(gradients)


def alone_of(folder: Path, family: str, name: str) -> dict:
    """What one process finds."""
    return results_of(AUTO[family].from_pretrained(path(folder, "start", (family, name))), batch())


@pytest.mark.parametrize("layout, family, name", CELLS)
def test_two_ranks_give_the_numbers_of_one_process(layout, family, name, shared):
    folder, results = shared
    alone = alone_of(folder, family, name)
    plain = results_of(AUTO[family].from_pretrained(path(folder, "stock", (family,))), batch())
    assert (alone["logits"] - plain["logits"]).abs().max() > 1e-3
    assert any(".hyper." in n and g.abs().max() > 1e-4 for n, g in alone["gradients"].items())
    assert max(apart(results[layout, family, name], alone)) <= 1e-5


@pytest.mark.parametrize("layout, family, name", [cell for cell in CELLS if cell[0] != "ddp"])
def test_a_checkpoint_of_any_layout_is_that_of_one_process(layout, family, name, shared):
    """So that it loads under every other layout, as the first one did."""
    folder, _ = shared
    first = load_file(path(folder, "start", (family, name)) / "model.safetensors")
    saved = load_file(path(folder, layout, (family, name)) / "model.safetensors")
    # Tied weights are written twice.
    assert not [n for n in saved.keys() - first.keys() if ".hyper." in n]
    assert all(torch.equal(saved[n], tensor) for n, tensor in first.items())
    again = AUTO[family].from_pretrained(path(folder, layout, (family, name)))
    config = json.loads((path(folder, "start", (family, name)) / "config.json").read_text())
    assert again.config.hyperattn == config["hyperattn"]


@pytest.mark.parametrize("family, name", AFTERWARDS)
def test_a_model_that_is_cut_already_can_be_patched(family, name, shared):
    folder, results = shared
    with torch.no_grad():
        alone = (
            AUTO[family].from_pretrained(path(folder, "start", (family, name)))(**batch()).logits
        )
    assert (results["patched", family, name] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("what", ["gathered heads, by name", "gathered heads, patched"])
def test_heads_that_a_plan_gathers_again(what, shared):
    folder, results = shared
    source = folder / "gathered" / what.split(", ")[1]
    name = {"attn_implementation": "hype"} if what.endswith("by name") else {}
    with torch.no_grad():
        alone = AUTO["llama"].from_pretrained(source, **name)(**batch()).logits
    assert (results["other", what] - alone).abs().max() <= 1e-5


REFUSED = {
    "three heads": "model.layers.0.self_attn of LlamaForCausalLM has 3 query heads and 1 key heads",
    "converted": "cut into 2 ranks by tensor parallelism, for which what a conversion by collaborative puts in it",
    "convert": "cut into 2 ranks by tensor parallelism, for which what a conversion by collaborative puts in it",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_ranks_cannot_share_is_refused_in_one_line(what, shared):
    message = shared[1]["refused", what]
    assert (
        message.startswith("ValueError: ") and REFUSED[what] in message and "allowed: " in message
    )
    assert "\n" not in message
