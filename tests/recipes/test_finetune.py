"""recipes/finetune.py from beginning to end on a tiny model: what it leaves, and that a kill changes none of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time

import pytest
import torch
import transformers as hf
from finetuning.run import run
from finetuning.settings import read_settings
from peft import PeftModel
from safetensors.torch import load_file

import hf_hyperattn as ha

from ..hub.conftest import client_environment
from ..hub.loopback import Hub
from ..oracles.marks import first_always
from .tiny import finish, recipe, save_model, start, write

WEIGHTS = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def do(folder, data, **options) -> dict:
    """Run a recipe in this process."""
    return run(read_settings(write(folder / "recipe.yaml", data)), "a command", **options)


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """A run that nothing interrupts: its folder, its recipe and its results."""
    folder = tmp_path_factory.mktemp("straight")
    data = recipe(model, folder / "out", trainer={"held_out_every": 4})
    return folder, data, do(folder, data)


def test_the_results_say_what_was_done(straight):
    folder, data, results = straight
    assert results == json.loads((folder / "out/results.json").read_text())
    before, after = results["before"], results["after"]
    assert after["perplexity"] < 0.95 * before["perplexity"]
    assert after["next_token_accuracy"] > before["next_token_accuracy"]
    assert results["difference_at_start"] <= 1e-5
    assert [step for step, _ in results["loss_curve"]] == list(range(1, 9))
    assert [step for step, _ in results["held_out_curve"]] == [4, 8]
    assert results["held_out_curve"][-1][1] == pytest.approx(after["loss"], abs=1e-5)
    lora = 2 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32))  # layers, rank, q and k and v and o
    assert (
        results["parameters"]["trained"]
        == lora + results["parameters"]["added"]
        == lora + 2 * 3 * 4
    )
    assert results["gates"]["lowest"] < 0 < results["gates"]["highest"]
    assert results["resumed_from_step"] is None and results["seconds"]["train"] > 0
    assert {"torch", "transformers", "peft"} <= results["versions"].keys()
    assert results["peak_memory_mib"] > 100 and results["machine"]["cores"] >= 1
    assert results["recipe"]["trainer"]["steps"] == 8


def test_the_adapter_alone_gives_the_model_back(straight, model):
    folder, _, results = straight
    base = hf.AutoModelForCausalLM.from_pretrained(model)
    ha.patch_model(base, ha.HyperAttnConfig.from_pretrained(folder / "out/adapter"))
    again = PeftModel.from_pretrained(base, folder / "out/adapter")
    gates = torch.cat(
        [p.flatten() for n, p in again.named_parameters() if n.endswith("default.cone.gate")]
    )
    assert gates.min().item() == results["gates"]["lowest"]
    config = json.loads((folder / "out/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None  # and no path of this machine
    card = (folder / "out/adapter/README.md").read_text()
    assert f"{results['after']['perplexity']:.4g}"[:5] in card and "perplexity" in card
    assert str(folder) not in card


def test_a_finished_run_is_not_done_again(straight, capsys):
    folder, data, results = straight
    changed = json.loads(json.dumps(data))
    changed["trainer"]["learning_rate"] = 0.5
    with pytest.raises(
        ValueError, match=r"holds a run with trainer.learning_rate=0.01, now it is 0.5; [^\n]*$"
    ):
        do(folder, changed)
    assert do(folder, data) == results  # with the seconds that it took
    assert "Finished already" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_and_resumed_it_ends_bit_for_bit_where_it_would_have(straight, tmp_path):
    folder, data, results = straight
    out = tmp_path / "out"
    data = recipe(data["model"]["name"], out, trainer={"held_out_every": 4})
    path = write(tmp_path / "recipe.yaml", data)
    process = start("--config", path)
    while not (out / "checkpoint-4/whole").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    code, _, said = finish(process)
    assert code == -signal.SIGKILL, said
    assert not (out / "results.json").exists() and not (out / "adapter").exists()
    half_written = out / "checkpoint-7"  # as a kill in the middle of a save leaves one
    shutil.copytree(
        out / "checkpoint-4", half_written, ignore=shutil.ignore_patterns("whole", "optimizer.pt")
    )
    code, out_text, said = finish(start("--config", path))
    assert code == 0, said
    resumed = json.loads((out / "results.json").read_text())
    assert resumed["resumed_from_step"] in (4, 6) and not half_written.exists()
    expected, found = load_file(folder / "out" / WEIGHTS), load_file(out / WEIGHTS)
    assert expected.keys() == found.keys() and all(
        torch.equal(found[n], expected[n]) for n in expected
    )
    for same in ("before", "after", "loss_curve", "held_out_curve", "gates", "data"):
        assert without_times(resumed[same]) == without_times(results[same]), same


def without_times(value):
    return {k: v for k, v in value.items() if k != "seconds"} if isinstance(value, dict) else value


@first_always("method", ["full", "added"])
def test_whole_models_come_back_by_from_pretrained(method, model, tmp_path):
    changes = {"steps": 3, "learning_rate": 1e-3}
    results = do(
        tmp_path,
        recipe(
            model,
            tmp_path / "out",
            peft={"method": method, "r": 8, "dropout": 0.0},
            trainer=changes,
        ),
    )
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    assert ha.describe(again)["patched"] == 2 and again.config.use_cache
    original = hf.AutoModelForCausalLM.from_pretrained(model).state_dict()
    values = again.state_dict()
    moved = [not torch.equal(values[n], original[n]) for n in original]
    assert all(moved) if method == "full" else not any(moved)
    assert (
        results["parameters"]["trained"]
        == results["parameters"]["all" if method == "full" else "added"]
    )
    assert results["after"]["perplexity"] < results["before"]["perplexity"]


def test_the_merged_model_needs_no_adapter(model, tmp_path):
    changes = {"steps": 3, "merged": True, "checkpointing": True}
    results = do(tmp_path, recipe(model, tmp_path / "out", trainer=changes))
    assert results["after"]["perplexity"] < results["before"]["perplexity"]
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    base = hf.AutoModelForCausalLM.from_pretrained(model)
    ha.patch_model(base, ha.HyperAttnConfig.from_pretrained(tmp_path / "out/adapter"))
    adapted = PeftModel.from_pretrained(base, tmp_path / "out/adapter").eval()
    ids = torch.arange(40)[None]
    assert (merged(ids).logits - adapted(ids).logits).abs().max() < 1e-5
    assert "tokenizer.json" in {p.name for p in (tmp_path / "out/model").iterdir()}


@pytest.mark.slow
def test_the_control_run_leaves_the_gates_shut(model, tmp_path):
    changes = {"steps": 2}
    results = do(tmp_path, recipe(model, tmp_path / "out", peft={"added": False}, trainer=changes))
    assert results["gates"] == {"lowest": 0.0, "highest": 0.0, "mean_size": 0.0}
    assert not any("hyper" in name for name in load_file(tmp_path / "out" / WEIGHTS))


@pytest.mark.slow
def test_two_processes_share_a_run(model, tmp_path):
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    data = recipe(model, tmp_path / "out", trainer={"steps": 4, "batch_size": 1})
    path = write(tmp_path / "recipe.yaml", data)
    code, _, said = finish(start("--config", path, launcher=launcher, ACCELERATE_USE_CPU="true"))
    if "cannot import name 'EmbeddingParallel' from 'transformers" in said:
        pytest.skip(
            "this PEFT cannot load an adapter beside this Transformers once processes are several"
        )
    assert code == 0, said[-3000:]
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["distributed"] == "MULTI_CPU" and results["recipe"]["launch"] == {"processes": 2}
    assert results["after"]["perplexity"] < results["before"]["perplexity"]


def launched(config: str) -> tuple[str, ...]:
    """A launcher by one of the committed configs, at a port that the system chooses."""
    file = f"recipes/accelerate_configs/{config}.yaml"
    return (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        file,
        "--main_process_port",
        "0",
    )


@pytest.mark.slow
def test_fsdp2_ends_where_ddp_ends_and_resumes_exactly(model, tmp_path):
    adapters = {}
    launchers = {
        "ddp": launched("ddp"),
        "fsdp": (*launched("fsdp2"), "--module", "tests.recipes.fsdp_on_cpu"),
    }
    for way, launcher in launchers.items():
        out = tmp_path / way
        data = recipe(model, out, peft={"dropout": 0.0}, trainer={"batch_size": 1})
        path = write(tmp_path / f"{way}.yaml", data)
        for _ in range(2):
            process = start(
                "--config", path, launcher=launcher, script=way == "ddp", ACCELERATE_USE_CPU="true"
            )
            code, _, said = finish(process)
            assert code == 0, said[-3000:]
            adapters.setdefault(way, []).append(load_file(out / WEIGHTS))
            results = json.loads((out / "results.json").read_text())
            assert results["distributed"] == {"ddp": "MULTI_CPU", "fsdp": "FSDP"}[way]
            for left in ("results.json", "checkpoint-8/whole"):
                (out / left).unlink()
        assert results["resumed_from_step"] == 6
    for first, again in adapters.values():
        assert all(torch.equal(first[n], again[n]) for n in first)
    for name, value in adapters["ddp"][0].items():
        assert (value - adapters["fsdp"][0][name]).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_ends_where_ddp_ends(stage, model, tmp_path):
    pytest.importorskip("deepspeed")
    launchers = {
        "ddp": launched("ddp"),
        "deepspeed": (
            *launched(f"deepspeed_zero{stage}"),
            "--module",
            "tests.recipes.deepspeed_on_cpu",
        ),
    }
    adapters = {}
    for way, launcher in launchers.items():
        out = tmp_path / way
        data = recipe(model, out, peft={"dropout": 0.0}, trainer={"batch_size": 1})
        path = write(tmp_path / f"{way}.yaml", data)
        process = start(
            "--config", path, launcher=launcher, script=way == "ddp", ACCELERATE_USE_CPU="true"
        )
        code, _, said = finish(process)
        assert code == 0, said[-3000:]
        adapters[way] = load_file(out / WEIGHTS)
        results = json.loads((out / "results.json").read_text())
        assert results["distributed"] == {"ddp": "MULTI_CPU", "deepspeed": "DEEPSPEED"}[way]
    assert adapters["ddp"].keys() == adapters["deepspeed"].keys()
    for name, value in adapters["ddp"].items():
        assert (value - adapters["deepspeed"][name]).abs().max() < 1e-5


@pytest.mark.slow
def test_two_machines_of_slurm_share_a_run(model, tmp_path):
    """Both are this one, behind a stand-in for Slurm's commands."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    commands = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'SLURM_NODEID=0 "$@" & first=$!; SLURM_NODEID=1 "$@"; wait $first',
        "accelerate": f'shift; exec {sys.executable} -m accelerate.commands.launch "$@"',
    }
    for name, body in commands.items():
        (bin_ / name).write_text(f"#!/bin/bash\nset -e\n{body}\n")
        (bin_ / name).chmod(0o755)
    path = write(
        tmp_path / "recipe.yaml",
        recipe(model, tmp_path / "out", trainer={"steps": 2, "batch_size": 1}),
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "here[0-1]", "GPUS": "1", "PORT": str(port)}
    environment = slurm | {"PATH": f"{bin_}:{os.environ['PATH']}", "ACCELERATE_USE_CPU": "true"}
    process = start(
        "recipes/slurm.sh", "--config", path, launcher=("bash",), script=False, **environment
    )
    code, said, errors = finish(process)
    assert code == 0, errors[-3000:]
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["distributed"] == "MULTI_CPU" and results["recipe"]["launch"] == {"processes": 2}


@pytest.mark.slow
def test_accelerate_launches_it(model, tmp_path):
    launcher = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "recipes/accelerate_configs/cpu.yaml",
    )
    path = write(tmp_path / "recipe.yaml", recipe(model, tmp_path / "out", trainer={"steps": 1}))
    code, said, errors = finish(
        start("--config", path, "--set", "data.length=32", launcher=launcher)
    )
    assert code == 0, errors
    assert "held-out perplexity" in said
    assert json.loads((tmp_path / "out/results.json").read_text())["recipe"]["data"]["length"] == 32


@pytest.mark.slow
def test_what_was_trained_is_published_with_its_numbers(model, tmp_path):
    data = recipe(
        model, tmp_path / "out", trainer={"steps": 1}, hub={"push": True, "id": "tester/tiny-cone"}
    )
    path = write(tmp_path / "recipe.yaml", data)
    with Hub() as hub:
        environment = client_environment(hub, tmp_path / "home")
        code, _, said = finish(start("--config", path, **environment | {"HF_TOKEN": "hf_wrong"}))
        assert code == 2 and said.splitlines()[-1].startswith(
            "finetune: error: hub.id='tester/tiny-cone' failed: "
        )
        assert (
            "token" in said.splitlines()[-1] and not (tmp_path / "out").exists()
        )  # told before the work
        code, said, errors = finish(start("--config", path, **environment))
        assert code == 0, errors
        assert "published            tester/tiny-cone" in said
        repository = hub.store.repositories["tester/tiny-cone"]
        files = repository.trees[repository.resolve("main")]
        assert repository.private and hub.unknown == []
    local = {p.name: p.read_bytes() for p in (tmp_path / "out/adapter").iterdir()}
    assert {n: files[n] for n in local} == local and "training_args.bin" not in files
    assert b"perplexity" in files["README.md"] and b"tester/tiny-cone" in files["README.md"]


@pytest.mark.slow
def test_errors_are_one_line_and_code_two(model, tmp_path):
    path = write(tmp_path / "recipe.yaml", recipe(model, tmp_path / "out"))
    code, said, errors = finish(start("--config", path, "--set", "trainer.steps=0"))
    assert (code, said) == (2, "")
    assert (
        errors.splitlines()[-1]
        == "finetune: error: trainer.steps=0 is not allowed; allowed: numbers from 1"
    )


def test_a_model_or_text_that_is_not_there_is_named(model, tmp_path):
    with pytest.raises(
        ValueError, match=r"^model.name='nobody/nothing': cannot be loaded as a causal LM: "
    ):
        do(tmp_path, recipe("nobody/nothing", tmp_path / "out"))
    with pytest.raises(ValueError, match=r"^data.length=256 is not allowed; allowed: up to 128"):
        do(tmp_path, recipe(model, tmp_path / "out", data={"length": 256}))
    missing = {"data": {"name": str(tmp_path / "none.txt")}}
    with pytest.raises(ValueError, match=r"^data.name='.*none.txt': "):
        do(tmp_path, recipe(model, tmp_path / "out", **missing))
    assert not (tmp_path / "out").exists()
