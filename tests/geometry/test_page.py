"""docs/geometry.md does what it says: its code runs, and what it names exists."""

import re
from pathlib import Path

import pytest
import torch

from hf_hyperattn import geometry
from tests.geometry.spaces import MODELS

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


def test_the_table_of_functions_is_true():
    rows = re.findall(r"^\| (`.*?|more) \|(.*)\|$", PAGE, re.MULTILINE)
    columns = list(MODELS)
    seen = 0
    for names, cells in rows:
        for column, cell in zip(columns, cells.split("|"), strict=False):
            listed = re.findall(r"`(\w+)", cell if names == "more" else names)
            for name in listed if names != "more" else []:
                assert hasattr(MODELS[column].module, name) == (cell.strip() == "yes"), (column, name)
                seen += 1
            for name in listed if names == "more" else []:
                assert callable(getattr(MODELS[column].module, name)), (column, name)
                seen += 1
    assert seen >= 30


def test_the_conversions_and_their_inverses_exist():
    (line,) = re.findall(r"^Conversions: (.*)$", PAGE, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", line):
        a, b = name.split("_to_")
        assert callable(getattr(geometry, name)) and callable(getattr(geometry, f"{b}_to_{a}"))


def test_the_distance_that_the_page_gives_for_the_rim():
    rim = torch.tensor([geometry.poincare.LIMIT, 0.0], dtype=torch.float64)
    assert geometry.poincare.distance(torch.zeros_like(rim), rim, 1.0).item() == pytest.approx(12.2, abs=0.05)
