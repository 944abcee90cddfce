"""The results of an experiment: one JSON file, written anew after every run, so that a stop loses one run at most."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from finetuning.report import circumstances, write

from .pausing import only_one, wait_while_paused

#: Where the committed results lie.
FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Experiment:
    """A question, and the runs that answer it.

    Args:
        name: of the command and of its files.
        settings: all that the results depend on, as plain JSON.
        runs: `runs(settings, found)` gives the key of every run and a function that does it and returns plain JSON.
            `found` holds the runs that are done, those before included by the time that one is started.
        rows: names of settings that are tables of rows, dicts or lists: rows may be added to results that are there,
            since no run reads another row than its own.
        hours: of one core, planned for all runs.
    """

    name: str
    settings: dict
    runs: Callable[[dict, dict], Iterator[tuple[str, Callable[[], dict]]]]
    rows: tuple[str, ...] = ()
    hours: float | None = None


def load(name: str, folder: Path = FOLDER) -> dict:
    """The results of an experiment as they stand.

    Raises:
        ValueError: there are none.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        raise ValueError(f"{path} is missing; run: python recipes/experiments {name}")
    return json.loads(path.read_text())


def perform(
    experiment: Experiment, folder: Path = FOLDER, minutes: float | None = None, fresh: bool = False
) -> bool:
    """Do the runs that are not done yet; whether all are done now.

    Args:
        folder: of the JSON file.
        minutes: start no further run after this long; None: go on to the end.
        fresh: forget the runs of the file.

    Raises:
        ValueError: the file holds runs of other settings or other versions of the packages, or another process of this
            checkout is at work on the committed results.
    """
    alone = only_one(experiment.name) if folder == FOLDER else None  # noqa: F841  held until the end
    torch.set_num_threads(
        1
    )  # the same sums in the same order on every machine with the same instructions
    path, start = folder / f"{experiment.name}.json", time.monotonic()
    results = begin(experiment, path, fresh)
    for key, do in experiment.runs(experiment.settings, results["runs"]):
        if key in results["runs"]:
            continue
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            print(f"{experiment.name}: stopped before {key}; the same command goes on from here")
            return False
        wait_while_paused()
        check_same("versions", path, results, circumstances())
        began, cpu = time.perf_counter(), time.process_time()
        found = do()
        found["seconds"] = {"wall": round(time.perf_counter() - began, 1)}
        found["seconds"]["cpu"] = round(time.process_time() - cpu, 1)
        results["runs"][key] = found
        results["last_run"] = date.today().isoformat()
        write(path, results)
        print(f"{experiment.name}: {key}  {found['seconds']['wall']:.1f} s", flush=True)
    return True


def begin(experiment: Experiment, path: Path, fresh: bool) -> dict:
    """What the file holds, after a check that it fits; or the beginning of a new one."""
    now = circumstances()
    now["machine"]["chip"] = chip()
    new = {
        "experiment": experiment.name,
        "command": f"python recipes/experiments {experiment.name}",
        "settings": experiment.settings,
        **now,
        "runs": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if fresh or not path.exists():
        return new
    old = json.loads(path.read_text())
    mine = json.loads(json.dumps(experiment.settings))
    tables = {
        k: type(mine[k])() for k in experiment.rows
    }  # one that the old settings lack had no rows
    theirs = {"settings": tables | old["settings"]}
    kept = {k: theirs["settings"][k] for k in tables if only_adds(theirs["settings"][k], mine[k])}
    check_same("settings", path, theirs, {"settings": mine | kept})
    chips = [name for name in (old["machine"].get("chip"), now["machine"]["chip"]) if name]
    if len(chips) == 2 and chips[1] not in chips[0].split(" and "):
        old["machine"]["chip"] = " and ".join(chips)
    return old | {"settings": mine}


def only_adds(old: dict | list | None, new: dict | list) -> bool:
    """Whether all rows of an old table are in the new one, and the same there."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and new[key] == value for key, value in old.items())
    return isinstance(old, list) and isinstance(new, list) and all(row in new for row in old)


def check_same(what: str, path: Path, old: dict, new: dict) -> None:
    """Raise where the file's runs were done otherwise than runs would be done now."""
    theirs, mine = old[what], json.loads(json.dumps(new[what]))
    changed = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
    if changed:
        name = changed[0]
        raise ValueError(
            f"{path.name} holds runs with {what}.{name}={theirs.get(name)!r}, now it is {mine.get(name)!r}; "
            "--fresh begins anew"
        )


def chip() -> str | None:
    """The processor's name as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None
    )
