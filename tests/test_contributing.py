"""CONTRIBUTING.md does what it says: its mechanism, its engine and its family are built from the page, as written."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import hf_hyperattn as ha
import model_patches
from hf_hyperattn.testing import CONTRACTS, check_engine, check_mechanism
from tests.integration.models import FAMILIES, difference, run
from tests.registries import restored

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a block of the page into a file of its name and imports it as a module."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(name: str):
        (source,) = re.findall(rf"```python\n# file: \S*?{name}\.py\n(.*?)```", PAGE, re.DOTALL)
        (tmp_path / f"{name}.py").write_text(source)
        return importlib.import_module(name)

    with restored():
        yield written
    for name in ("every_fourth", "dot_and_cosine", "whole_matrix", "mpnet_again"):
        sys.modules.pop(name, None)


def test_a_rule(write):
    """Its mask is what it says, and what it says that it costs."""
    mine = write("every_fourth").EveryFourth(near=3)
    query, key, value = (torch.randn(1, 2, 21, 8, dtype=torch.float64) for _ in range(3))
    out = ha.functional.sparse_attention(query, key, value, is_causal=True, rules=mine)
    seen = [[j <= i and (i - j < 3 or j % 4 == 0) for j in range(21)] for i in range(21)]
    assert mine.share(21) == pytest.approx(sum(map(sum, seen)) / (21 * 22 / 2))
    mask = torch.tensor(seen)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(out, expected)


def test_a_mechanism(write):
    module = write("dot_and_cosine")
    lines = Path(module.__file__).read_text().count("\n")
    assert lines <= 10
    quick = [name for name in CONTRACTS if name != "compiled"]
    done = check_mechanism("dot_and_cosine", contracts=quick, families=["llama", "bert"])
    assert done["held"] >= 40, done


def test_an_engine(write):
    """As the page calls it: the scores that measure distances are refused."""
    write("whole_matrix")
    (refuses,) = re.findall(r'check_engine\("whole_matrix", refuses=(\{.*?\})\)', PAGE)
    done = check_engine("whole_matrix", [torch.float64], refuses=ast.literal_eval(refuses))
    assert done == {"held": 10, "refused": 25}  # the dot product and HyPE


def test_a_family(write, monkeypatch):
    """The stock model's numbers, and a cone in it."""
    module = write("mpnet_again")
    monkeypatch.setitem(model_patches.FAMILIES, "mpnet", ("mpnet", "mpnet_again"))
    monkeypatch.setitem(model_patches.FILES, "mpnet", "mpnet_again")
    monkeypatch.setitem(sys.modules, "model_patches.mpnet_again", module)
    model, inputs = FAMILIES["mpnet"][0](), FAMILIES["mpnet"][1]()
    before = run(model, inputs)
    ha.patch_model(model, ha.ConeConfig(), mode="replace")
    assert any(isinstance(m, module.MPNetRoute) for m in model.modules())
    assert difference(before, run(model, inputs)) > 1e-4
    model.set_attn_implementation("eager")
    ha.unpatch_model(model)
    assert difference(before, run(model, inputs)) == 0
