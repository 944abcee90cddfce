"""Roads that two processes take together, on gloo, and roads into a process without the plugin.

A pair of processes runs the jobs in FOLDER/jobs.json, [[road, case], ...], and each writes FOLDER/NUMBER.RANK.json.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.nn.parallel import DistributedDataParallel

import hf_hyperattn as ha
from hf_hyperattn.integration.export.repositories import export_remote_code

from .cases import BY_LABEL, LAYERS, Case, copy_of, inputs_of, logits, stock_folder, workplace
from .outcome import Cell, cell
from .road import ROADS, road

ROOT = Path(__file__).resolve().parents[2]
GROUP = "Processes"
WORLD = 2
PATIENCE = 120  # seconds a job may take
in_attention = lambda case: case.how in ("patch", "name")


def batch() -> dict:
    """Rows without padding, so that the mean of two halves' losses is that of the whole."""
    ids = inputs_of(rows=4)["input_ids"]
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


def half() -> dict:
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    return {n: t[rows] for n, t in batch().items()}


def learn(model, data: dict) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        model(**data).loss.backward()
        optimizer.step()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def trained_together(case: Case, wrap):
    """Two steps, in float64 where rounding moves the case's logits most: steps would move them 1,000 times further."""
    dtype = torch.float64 if case.tolerance else torch.float32
    alone, together, found = (case.model().to(dtype) for _ in range(3))
    learn(alone, batch())
    yield (logits(alone) - case.logits).abs().max().item() > 1e-4, True
    wrapped = wrap(together)
    wrapped.eval()
    learn(wrapped, half())
    state = {n.removeprefix("module."): whole(p) for n, p in wrapped.named_parameters()}
    found.load_state_dict(state, strict=False)
    yield logits(found), logits(alone)


@road("DDP: train", GROUP, ranks=WORLD, tolerance=1e-4)
def ddp(case, folder):
    yield from trained_together(case, DistributedDataParallel)


@road("FSDP2: train", GROUP, ranks=WORLD, tolerance=1e-4)
def fsdp2(case, folder):
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        for stack in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]:
            for layer in stack:
                fully_shard(layer)
        return fully_shard(model)

    yield from trained_together(case, wrap)


def parallel(case: Case):
    """Loaded by two ranks: a checkpoint, or the stock model's by name."""
    if case.how == "name":
        return case.by_name(tp_plan="auto")
    return case.auto.from_pretrained(case.folder(), tp_plan="auto")


@road("tensor parallel: load", GROUP, ranks=WORLD)
def tensor_parallel(case, folder):
    model = parallel(case)
    yield any(hasattr(p, "full_tensor") for p in model.parameters()), True
    yield logits(model), case.logits


@road("tensor parallel: gradients", GROUP, ranks=WORLD, tolerance=1e-4)
def tensor_parallel_gradients(case, folder):
    model, alone = parallel(case).eval(), case.model()
    for one in (model, alone):
        one(**batch()).loss.backward()
    wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if name in wanted:
            yield whole(parameter.grad), wanted[name]


@road("tensor parallel: save, load", GROUP, ranks=WORLD)
def tensor_parallel_saved(case, folder):
    model = parallel(case)
    model.save_pretrained(folder)
    dist.barrier()
    yield logits(case.auto.from_pretrained(folder)), case.logits


@road("tensor parallel: patch", GROUP, ranks=WORLD, applies=lambda case: case.how == "patch")
def tensor_parallel_patched(case, folder):
    model = case.auto.from_pretrained(stock_folder(case.family), tp_plan="auto")
    if case.how == "patch":
        ha.patch_model(model, case.config, layers=LAYERS)
    values, shared = case.model().state_dict(), torch.distributed.tensor.distribute_tensor
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".hyper." in name:
                value = values[name]
                p.copy_(
                    shared(value, p.device_mesh, p.placements)
                    if hasattr(p, "full_tensor")
                    else value
                )
    yield logits(model), case.logits


BARE = """
import json, sys
sys.modules["hf_hyperattn"] = None  # as if it were not installed
import torch, transformers
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
answers = {}
for name, auto, trust in json.loads(sys.argv[1]):
    try:
        model = getattr(transformers, auto).from_pretrained(name, trust_remote_code=trust).eval()
        with torch.no_grad():
            torch.save(model(**torch.load(name + "/inputs.pt")).logits, name + "/logits.pt")
        answers[name] = None
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
assert not any(name.partition(".")[0] == "hf_hyperattn" and sys.modules[name] for name in sys.modules)
print(json.dumps(answers))
"""


@functools.cache
def bare_answers() -> dict[tuple[str, str], tuple[str | None, Path]]:
    """(case, "plain" or "export") -> the error of a process without the plugin, or None, and the folder with logits."""
    folders = {}
    for label, case in BY_LABEL.items():
        place = workplace() / "bare" / label
        folders[label, "plain"] = copy_of(case.folder(), place)
        if case.how in ("patch", "convert"):
            try:
                export_remote_code(case.folder(), place.with_name(f"{label} exported"))
                folders[label, "export"] = place.with_name(f"{label} exported")
            except ValueError:
                pass  # the road itself shows it
    for place in folders.values():
        torch.save(inputs_of(), place / "inputs.pt")
    jobs = [
        [str(place), BY_LABEL[label].auto.__name__, kind == "export"]
        for (label, kind), place in folders.items()
    ]
    run = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(jobs)],
        cwd=workplace(),
        env=environment() | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answers = json.loads(run.stdout.splitlines()[-1])
    return {key: (answers[str(place)], place) for key, place in folders.items()}


def without_plugin(case: Case, kind: str):
    error, place = bare_answers()[case.label, kind]
    if error is not None:
        raise RuntimeError(error)
    yield torch.load(place / "logits.pt")[inputs_of()["attention_mask"].bool()], case.logits


@road("load without the plugin", "Files")
def no_plugin(case, folder):
    yield from without_plugin(case, "plain")


@road(
    "hyperattn export, load without the plugin",
    "Files",
    applies=lambda case: case.how != "name",
    control=False,
)
def exported(case, folder):
    if (case.label, "export") not in bare_answers():
        export_remote_code(case.folder(), folder / "out")
    yield from without_plugin(case, "export")


def environment() -> dict:
    """For child processes: this checkout for the ranks, nothing of ours for a process without the plugin."""
    kept = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(folder: Path, jobs: list) -> list[subprocess.Popen]:
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    variables = environment() | {"PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.roads.rank", str(rank), str(folder)],
            cwd=ROOT,
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)},
            stdout=(folder / f"{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]


def together(jobs: list[tuple[str, str]], folder: Path, write) -> None:
    """Run the jobs by pairs of processes; `write(road, case, cell)` for each. A pair that breaks is replaced."""
    jobs, turn = list(jobs), 0
    while jobs:
        place, turn = folder / f"pair{turn}", turn + 1
        processes = start(place, jobs)
        try:
            done = follow(place, jobs, processes, write)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if done == 0 and not any(place.glob("0.*.json")):
            broken = (place / "0.log").read_text()[-2000:]
            raise RuntimeError(f"no process of a pair answers: {broken}")
        if done < len(jobs):
            tail = [
                (place / f"{rank}.log").read_text().strip().splitlines()[-1:]
                for rank in range(WORLD)
            ]
            found = gathered(place, done) or Cell(
                "crash", words=f"the processes hung or died; they said last: {tail}"
            )
            write(*jobs[done], found)
            done += 1
        jobs = jobs[done:]


def gathered(place: Path, number: int) -> Cell | None:
    """What the ranks that answered say, the worst of it."""
    files = [place / f"{number}.{rank}.json" for rank in range(WORLD)]
    cells = [Cell(**json.loads(f.read_text())) for f in files if f.exists()]
    if len(cells) < WORLD:
        cells = [c for c in cells if c.outcome == "crash"]
        return cells[0] if cells else None
    order = ("equal", "no road", "warned", "refused", "vacuous", "silent", "crash")
    if len({c.outcome for c in cells} & {"equal", "refused", "no road"}) > 1:
        return Cell(
            "crash",
            words=f"the ranks disagree: {[c.outcome for c in cells]} {cells[0].words}{cells[1].words}",
        )
    return max(cells, key=lambda c: (order.index(c.outcome), c.difference))


def follow(place: Path, jobs: list, processes: list, write) -> int:
    """How many jobs were done before both processes ended, or one of them stood still."""
    done, since = 0, time.monotonic()
    while done < len(jobs):
        if all((place / f"{done}.{rank}.json").exists() for rank in range(WORLD)):
            write(*jobs[done], gathered(place, done))
            done, since = done + 1, time.monotonic()
        elif time.monotonic() - since > PATIENCE or all(p.poll() is not None for p in processes):
            break
        else:
            time.sleep(0.05)
    return done


def main(rank: int, folder: Path) -> None:
    """The jobs of one rank, until one breaks off: then the ranks may be out of step."""
    torch.set_num_threads(1)
    jobs = json.loads((folder / "jobs.json").read_text())
    for label in {label for _, label in jobs}:  # in a process group only rank 0 would save
        case = BY_LABEL[label]
        _ = case.margin, case.folder(), case.control.logits, case.control.folder()
    patience = datetime.timedelta(seconds=PATIENCE / 2)
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD, timeout=patience
    )
    controls: dict = {}
    for number, (name, label) in enumerate(jobs):
        found = cell(ROADS[name], BY_LABEL[label], folder / str(number), controls)
        part = folder / f"{number}.{rank}.part"
        part.write_text(json.dumps(found.as_dict()))
        part.rename(folder / f"{number}.{rank}.json")
        other = folder / f"{number}.{1 - rank}.json"
        while not other.exists():
            time.sleep(0.02)
        if found.outcome == "crash" or found.outcome != json.loads(other.read_text())["outcome"]:
            return
        dist.barrier()
