"""Patched models train in two processes: DDP and FSDP2 on gloo end where one process with the whole batch ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.lessons import learn, next_character
from tests.integration.parallel.processes import MODELS, STEPS, WORLD, whole

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> dict:
    """What two processes found, for each way and model."""
    folder = tmp_path_factory.mktemp("together")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.parallel.processes", str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(
        text[-3000:] for text in said
    )
    return torch.load(folder / "results.pt")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_as_one(way, name, together):
    losses, parameters = together[way, name]
    assert losses[-1] < 0.9 * losses[0] if name == "full" else losses[-1] < losses[0]
    alone = MODELS[name]()
    learn(alone, next_character(), STEPS)
    expected = whole(alone)
    assert parameters.keys() == expected.keys()
    for parameter_name, value in parameters.items():
        assert value.shape == expected[parameter_name].shape
        assert (value - expected[parameter_name]).abs().max() < 2e-5, parameter_name
    gates = {n: p for n, p in parameters.items() if ".hyper." in n}
    assert len(gates) == 6 and all(g.isfinite().all() and g.abs().min() > 0 for g in gates.values())
