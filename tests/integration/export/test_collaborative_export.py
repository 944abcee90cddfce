"""A converted model exported with its code: it loads where the package is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from hf_hyperattn.integration.export.repositories import export_remote_code
from tests.integration.architectures.collaborative import shared
from tests.integration.models import difference, run

FAMILIES = ("bert", "gpt2")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """What a process without the package made of the exports, and the models that were exported."""
    root, models = tmp_path_factory.mktemp("exports"), {}
    for family in FAMILIES:
        model, inputs = models[family] = shared(family)
        model.save_pretrained(root / family / "source")
        assert export_remote_code(root / family / "source", root / family / "export").packages == []
        with torch.no_grad():
            expected = [t for t in model(**inputs).to_tuple() if isinstance(t, torch.Tensor)]
        torch.save((inputs, expected), root / family / "io.pt")
    script = Path(__file__).with_name("remote.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(script), *(str(root / family) for family in models)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=environment, timeout=250
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return root, {family: (answers[str(root / family)], *models[family]) for family in models}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_package_the_outputs_are_the_same(family, elsewhere):
    answer, model, _ = elsewhere[1][family]
    assert answer["error"] is None
    assert answer["same"] and answer["saved again"] and answer["remote"]
    assert answer["class"] == type(model).__name__


def test_with_the_package_it_is_a_checkpoint_like_any_other(elsewhere):
    root, found = elsewhere
    _, model, inputs = found["bert"]
    again = hf.AutoModel.from_pretrained(root / "bert" / "export").eval()
    assert difference(run(model, inputs), run(again, inputs)) == 0.0
