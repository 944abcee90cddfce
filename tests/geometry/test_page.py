"""docs/geometry.md does what it says: its code runs, and what it names exists."""

import re
from pathlib import Path

import pytest
import torch

from hf_hyperattn import geometry

PAGE = (Path(__file__).parents[2] / "docs" / "geometry.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(block: str) -> dict:
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(block, "docs/geometry.md", "exec"), names)
    return names


def test_the_geometry():
    left = run(BLOCKS[0])
    assert left["depth"].shape == left["alike"].shape == (10,) and left["depth"].gt(0).all()


def test_the_module():
    left = run(BLOCKS[1])
    assert left["moved"].shape == left["combined"].shape == (2, 10, 64)
    assert left["combined"].norm(dim=-1).max() < 1


def test_every_block_of_python_is_among_these():
    assert len(BLOCKS) == 2


def test_the_functions_that_the_page_lists_are_all_there_are():
    (listed,) = re.findall(r"^Functions of `poincare`: (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    public = {
        name
        for name, part in vars(geometry.poincare).items()
        if callable(part)
        and part.__module__ == geometry.poincare.__name__
        and not name.startswith("_")
    }
    assert set(re.findall(r"`(\w+)", listed)) == public


def test_the_distance_that_the_page_gives_for_the_rim():
    rim = torch.tensor([geometry.poincare.LIMIT, 0.0], dtype=torch.float64)
    assert geometry.poincare.distance(torch.zeros_like(rim), rim, 1.0).item() == pytest.approx(
        12.2, abs=0.05
    )
