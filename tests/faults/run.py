"""Kill all that writes checkpoints, adapters, exports and libraries, and look at what is left.

    python -m tests.faults.run --kills 200 [--seed 0] [--only save,export]

Each kill happens in a forked child on a copy of an older state. Half of the attempts come before a drawn change of the
file system, half after a drawn time; one that comes when the child has ended is checked and not counted. Nothing
older may be lost, nothing half written may load, and the next run brings all to its end and leaves nothing of its own.
Exit code 0: so it was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

import hf_hyperattn as ha
from hf_hyperattn.engines import native
from hf_hyperattn.integration.export.repositories import export_remote_code
from hf_hyperattn.utils import folders
from hf_hyperattn.utils.files import PREFIX
from hyperattn_cli.commands import inject_task
from hyperattn_cli.shared import smollm2

from ..fuzz.run import compiler
from ..integration.models import llama, perturb
from .killing import killed


@dataclass
class Scenario:
    """Something that writes into a folder: `act` writes it, `state` says what is there.

    `state` gives a hashable value, None for nothing that loads, and raises where something half loads.
    """

    act: Callable[[Path], None]
    state: Callable[[Path], object]
    prepare: Callable[[Path], None] = lambda folder: None
    #: Whether a load may fail until `hyperattn recover` has been run.
    renames: bool = False
    #: How many changes of the file system `act` makes, and how long it takes; measured.
    changes: int = 0
    seconds: float = 0.0


def model(seed: int, layers=None):
    """A patched model that has learned something; models of other seeds differ in config and weights."""
    torch.manual_seed(seed)
    made = ha.patch_model(llama(), ha.ConeConfig(gamma=0.5), layers=layers)
    perturb(made)
    return made


def weights_state(folder: Path) -> object:
    """Which weights a real load finds: their sum, all in all; None where it fails."""
    try:
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    except Exception as error:
        if folders.is_interrupted(folder / "model"):
            assert f"hyperattn recover {folder / 'model'}" in str(error), error
        return None
    return round(
        sum(p.double().sum().item() for p in loaded.state_dict().values()), 6
    ), loaded.config.hyperattn["hosts"][0]


def adapter_state(folder: Path) -> object:
    """What adapter lies there, by its three files; None where one is missing."""
    place = folder / "model"
    try:
        weights = load_file(place / "adapter_model.safetensors")
        record = ha.HyperAttnConfig.from_pretrained(place).hosts
    except (OSError, ValueError):
        return None
    return round(sum(p.double().sum().item() for p in weights.values()), 6), record[0]


def library_state(folder: Path) -> object:
    """What a built library says when it is called, in a process of its own; None where there is none."""
    libraries = list((folder / "build").glob("faults*.so"))
    assert len(libraries) <= 1
    return ctypes.CDLL(str(libraries[0])).answer() if libraries else None


def checkpoints_state(folder: Path) -> object:
    """The whole checkpoints of a training run: their steps. Each one that has weights at all loads."""
    steps = []
    for place in sorted((folder / "model").glob("checkpoint-*")):
        if (place / "model.safetensors").exists():
            transformers.LlamaForCausalLM.from_pretrained(place)
            steps.append(place.name)
    return tuple(steps)


def build(folder: Path) -> None:
    """A library of one function, by the road that kernels take."""
    source = folder / "faults.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    os.environ["HF_HYPERATTN_BUILD_DIR"] = str(folder / "build")
    assert native.load_library("faults", source) is not None


def train(folder: Path) -> None:
    """Two steps of the Trainer, a checkpoint each, from the last one that is there whole."""
    torch.manual_seed(0)
    row = {"input_ids": list(range(5, 13)), "labels": list(range(5, 13))}
    place = folder / "model"
    whole = [
        p
        for p in sorted(place.glob("checkpoint-*"))
        if (p / "scheduler.pt").exists() and (p / "trainer_state.json").exists()
    ]
    if whole and whole[-1].name == "checkpoint-3":  # the last; the Trainer would take one step more
        return
    arguments = transformers.TrainingArguments(
        str(place),
        max_steps=3,
        save_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        save_total_limit=None,
    )
    trainer = transformers.Trainer(model(1), arguments, train_dataset=[row] * 4)
    trainer.train(resume_from_checkpoint=str(whole[-1]) if whole else None)


def lora(seed: int, layers=None) -> PeftModel:
    """An adapter on a patched model."""
    base = model(seed, layers)
    return get_peft_model(base, ha.lora_config(base, r=2))


def scenarios(root: Path) -> dict[str, Scenario]:
    """What is killed. The older states are made of other models than the newer ones."""
    old, new = model(1), model(2, layers=[1, 2, 3])
    old_adapter, new_adapter = lora(1), lora(2, layers=[1, 2, 3])
    new.save_pretrained(root / "source")

    def save_old(folder: Path, **options) -> None:
        old.save_pretrained(folder / "model", **options)
        (folder / "model" / "optimizer.pt").write_text("mine")

    def by_renames(folder: Path) -> None:
        def fail(*_):
            raise OSError("no exchange here")

        with exchanged(folders, "_exchange_folders", fail):
            new.save_pretrained(folder / "model", max_shard_size="60KB")

    def inject(folder: Path) -> None:
        arguments = SimpleNamespace(output=str(folder / "model"), model="base")
        tokenizer = SimpleNamespace(
            save_pretrained=lambda place: (place / "tokenizer.json").write_text("{}")
        )
        inject_task.write_model(arguments, new, torch.float32, tokenizer, {})

    def convert(folder: Path) -> None:
        os.environ["HF_HYPERATTN_CACHE"] = str(folder)
        with (
            exchanged(smollm2, "FOLDER", "model"),
            exchanged(smollm2, "find_gguf", lambda: None),
            exchanged(smollm2, "convert_gguf", lambda _, place: new.save_pretrained(place)),
        ):
            smollm2.smollm2()

    def export(folder: Path) -> None:
        export_remote_code(root / "source", folder / "model", force=True)

    def into_model(save: Callable, **options) -> Callable:
        return lambda folder: save(folder / "model", **options)

    shards, fewer = {"max_shard_size": "20KB"}, {"max_shard_size": "60KB"}
    new_adapters, old_adapters = (into_model(a.save_pretrained) for a in (new_adapter, old_adapter))
    return {
        "save": Scenario(into_model(new.save_pretrained), weights_state, save_old),
        "sharded": Scenario(
            into_model(new.save_pretrained, **fewer), weights_state, lambda f: save_old(f, **shards)
        ),
        "renames": Scenario(by_renames, weights_state, save_old, renames=True),
        "adapter": Scenario(new_adapters, adapter_state, old_adapters),
        "export": Scenario(export, weights_state, save_old),
        "inject": Scenario(inject, weights_state, save_old),
        "convert": Scenario(convert, weights_state),
        "checkpoints": Scenario(train, checkpoints_state),
        "build": Scenario(build, library_state),
    }


@contextlib.contextmanager
def exchanged(place, name: str, value):
    """Another value for an attribute, for a while."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def quiet() -> None:
    """What children do first: one thread, and nothing printed but tracebacks."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def check(scenario: Scenario, folder: Path, old, new, listing: set[str]) -> object:
    """Look at what a kill left, then run again and look once more; gives the state that the kill left."""
    state = scenario.state(folder)
    partly = isinstance(new, tuple) and all(
        isinstance(s, str) and s.startswith("checkpoint") for s in new
    )
    if partly:  # checkpoints come one by one
        assert set(state) <= set(new) and set(old) <= set(state), f"{state} is not of {new}"
    elif state not in (old, new):
        assert state is None and scenario.renames, f"{state} is neither {old} nor {new}"
        folders.recover(folder / "model")
        assert scenario.state(folder) in (old, new)
    if old is not None and not partly and (folder / "model" / "optimizer.pt").exists():
        assert (folder / "model" / "optimizer.pt").read_text() == "mine"
    assert not killed(scenario.act, folder, before=quiet)
    again = scenario.state(folder)
    assert again == new, f"{state} became {again}, not {new}"
    assert names(folder) == listing, names(folder) ^ listing
    return state


def names(folder: Path) -> set[str]:
    """All files, but for locks that stay, and build folders beside a whole library, which go with the next build."""
    found = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    return {
        n
        for n in found
        if not n.endswith(".lock") and not re.search(r"__pycache__|^build/\w+\.\w{8}(/|$)", n)
    }


def measure(scenario: Scenario, root: Path) -> tuple:
    """The states before and after an undisturbed run, the names it leaves; notes its length in the scenario."""
    folder = root / "whole"
    folder.mkdir(parents=True)
    scenario.prepare(folder)
    shutil.copytree(folder, root / "before")
    old = scenario.state(folder)
    counter = root / "changes"

    def counted() -> None:
        from .killing import changes_files

        seen = itertools.count()
        sys.addaudithook(
            lambda event, details: (
                changes_files(event, details) and os.write(handle, b".") and next(seen)
            )
        )
        scenario.act(folder)

    handle = os.open(counter, os.O_WRONLY | os.O_CREAT)
    begin = time.perf_counter()
    assert not killed(counted, before=quiet)
    scenario.seconds = time.perf_counter() - begin
    os.close(handle)
    scenario.changes = counter.stat().st_size
    new, listing = scenario.state(folder), names(folder)
    assert new is not None and new != old and not [n for n in listing if PREFIX in n]
    return old, new, listing


def kill_many(
    name: str, scenario: Scenario, kills: int, root: Path, draw: random.Random, every: bool = False
) -> str:
    """Kill a scenario so many times, or before every change; a line about it.

    Raises:
        AssertionError: something was lost, or three attempts a kill were not enough.
    """
    old, new, listing = measure(scenario, root)
    attempts = scenario.changes if every else 3 * kills
    died, before, after = 0, 0, 0
    for n in range(1, attempts + 1):
        moment: dict = {"kill_at": n if every else draw.randint(1, scenario.changes)}
        if not every and n % 2:
            moment = {"after": draw.uniform(0, 0.8 * scenario.seconds)}
        folder = root / str(n)
        shutil.copytree(root / "before", folder)
        death = killed(scenario.act, folder, before=quiet, **moment)
        try:
            state = check(scenario, folder, old, new, listing)
        except AssertionError as error:
            raise AssertionError(f"{name}, killed {moment}, in {folder}: {error}") from error
        died, before, after = died + death, before + (state == old), after + (state == new)
        shutil.rmtree(folder)
        if died == kills and not every:
            break
    assert every or died == kills, f"{name}: {attempts} attempts, and {died} of {kills} died"
    return f"{name:12} {died:4} killed in {n:4} attempts; {before:4} left the old state, {after:4} the new one"


def full_disk(root: Path) -> str:
    """A disk that is full at every size: the save fails, the older checkpoint stays, nothing is left."""
    found = scenarios(root / "made")["save"]
    old, _, _ = measure(found, root / "full")
    for size in (0, 1_000, 20_000, 50_000):
        folder = root / f"full-{size}"
        shutil.copytree(root / "full" / "before", folder)
        before = names(folder)

        def act(folder=folder, size=size) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            try:
                found.act(folder)
            except Exception:
                return
            raise AssertionError("the save did not fail")

        assert not killed(act, before=quiet)
        assert found.state(folder) == old and names(folder) == before
    return "full disk    4 sizes; each left the old state and nothing else"


def main(arguments: list[str] | None = None) -> int:
    """Run, print a line a scenario, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="in all (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="scenarios, separated by commas (default: all)")
    parser.add_argument(
        "--every", action="store_true", help="kill before every change in place of --kills times"
    )
    chosen = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    draw = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        found = scenarios(root)
        wanted = chosen.only.split(",") if chosen.only else list(found)
        if compiler() is None and "build" in wanted:
            wanted.remove("build")
        for n, name in enumerate(wanted):
            kills = chosen.kills // len(wanted) + (n < chosen.kills % len(wanted))
            if kills or chosen.every:
                print(
                    kill_many(name, found[name], kills, root / name, draw, chosen.every), flush=True
                )
        if not chosen.only:
            print(full_disk(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
