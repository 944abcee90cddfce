"""Two ranks that share the heads of a model by name give the numbers of one process, and save in parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from tests.integration.models import llama, text_inputs
from tests.integration.parallel.tensor_parallel import NAMES, WORLD, logits

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, dict]:
    """The checkpoints, and what two ranks found."""
    folder = tmp_path_factory.mktemp("shared")
    torch.manual_seed(0)  # a fixture of a module is made before that of every test
    model = llama(num_hidden_layers=2)
    hsa = ha.HsaConfig(
        windows=(2, 4), near=1, sinks=0, refine_top_k=0
    )  # of which a short text sees something
    model.config.hyperattn = ha.HyperAttnConfig([hsa]).to_dict()
    model.save_pretrained(folder / "stock")
    model.save_pretrained(folder / "parts")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.parallel.tensor_parallel",
                str(rank),
                str(folder),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [process.communicate(timeout=180)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(
        text[-3000:] for text in said
    )
    return folder, torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", NAMES)
def test_names_give_the_numbers_of_one_process(name, shared):
    folder, results = shared
    alone = logits(
        hf.AutoModelForCausalLM.from_pretrained(folder / "stock", attn_implementation=name)
    )
    seen = text_inputs()["attention_mask"].bool()
    assert (results[name] - alone)[seen].abs().max() <= 1e-5
    if name != "sdpa":
        assert (results["sdpa"] - alone)[seen].abs().max() > 1e-3


def test_a_checkpoint_that_every_rank_writes_a_part_of_takes_the_old_one_s_place_as_a_whole(shared):
    folder, results = shared
    parts, old = results["parts"], sorted(path.name for path in (folder / "stock").iterdir())
    assert "no space left" in parts["error"] and parts["failed"] == old
    shards = [name for name in parts["saved"] if name.startswith("shard-")]
    assert len(shards) == WORLD and "model.safetensors" not in parts["saved"]
    assert parts["name"] == "cone" and torch.equal(parts["logits"], results["cone"])
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
