"""Patched models under DeepSpeed on two CPU processes train as one process does, by ZeRO-1, 2 and 3.

DeepSpeed is installed on CPUs by DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed; at its first start it
compiles its operators, which takes minutes.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.parallel.parallel import AUTO, CASES, batch, path, start
from tests.integration.parallel.test_parallel import write

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.extras, pytest.mark.timeout(1500)]
SOME = [("llama", name) for name in ("cone and hype, some heads", "hsa", "trilinear", "mkl")] + [
    ("bert", "collaborative")
]
#: ZeRO-3 gathers parameters when they are read, so every mechanism is tried.
ALL = [case for case in CASES if case[0] == "llama" or case == ("bert", "collaborative")]
CELLS = [(stage, *case) for stage in (1, 2) for case in SOME] + [(3, *case) for case in ALL]
AFTERWARDS = [("patched", *case) for case in (*SOME, ("llama", "head_fusion"))]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    write(folder, [*CELLS, *AFTERWARDS])
    start("tests.integration.parallel.deepspeed_zero", folder)
    return folder, torch.load(folder / "results.pt")


@pytest.mark.parametrize("stage, family, name", [*CELLS, *AFTERWARDS])
def test_zero_trains_as_one_process_does(stage, family, name, together):
    folder, results = together
    model = AUTO[family].from_pretrained(path(folder, "start", (family, name))).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch()).loss.backward()
        optimizer.step()
    trained = results[stage, family, name]
    assert len(trained) == len(dict(model.named_parameters()))
    assert all((trained[n] - p).abs().max() <= 1e-5 for n, p in model.named_parameters())


@pytest.mark.parametrize("family, name", ALL)
def test_a_checkpoint_of_zero_3_is_that_of_one_process(family, name, together):
    folder, _ = together
    first = load_file(path(folder, "start", (family, name)) / "model.safetensors")
    saved = torch.load(path(folder, "zero3", (family, name)) / "weights.bin")
    assert not [n for n in saved.keys() - first.keys() if ".hyper." in n]
    assert all(torch.equal(saved[n], tensor) for n, tensor in first.items())


def test_empty_tensors_are_not_saved(together):
    message = together[1]["refused", "save"]
    assert message.startswith("ValueError: LlamaForCausalLM has weights that DeepSpeed's ZeRO-3")
    assert "allowed: " in message and "\n" not in message
