"""Patched models under DeepSpeed on two CPU processes: ZeRO-1 and 2 train as one process does, ZeRO-3 is refused.

DeepSpeed is installed on CPUs by DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed; at its first start it
compiles its operators, which takes minutes.
"""

from __future__ import annotations

import json

import pytest
import torch

from .parallel import AUTO, batch, path, start
from .test_parallel import write

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.extras, pytest.mark.timeout(1500)]
CASES = [("llama", name) for name in ("cone and hype, some heads", "hsa", "trilinear", "mkl")] + [
    ("bert", "collaborative")
]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    write(folder, [])
    (folder / "cases.json").write_text(json.dumps(CASES))
    start("tests.integration.deepspeed_zero", folder)
    return folder, torch.load(folder / "results.pt")


@pytest.mark.parametrize("case", CASES)
def test_zero_trains_as_one_process_does_or_is_refused(case, together):
    folder, results = together
    model = AUTO[case[0]].from_pretrained(path(folder, "start", case)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch()).loss.backward()
        optimizer.step()
    for stage in (1, 2):
        trained = results[(stage, *case)]
        assert len(trained) == len(dict(model.named_parameters()))
        assert all((trained[n] - p).abs().max() <= 1e-5 for n, p in model.named_parameters())
    message = results[(3, *case)]
    assert (
        message.startswith("ValueError: ")
        and "DeepSpeed ZeRO-3" in message
        and "allowed: " in message
    )
