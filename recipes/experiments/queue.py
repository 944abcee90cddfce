"""All experiments that are not done yet, one after the other, each run of them once; see `python recipes/experiments
queue --help` for how it is paused.
"""

from __future__ import annotations

import importlib
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from .pausing import PAUSE, only_one, pause, resume
from .store import FOLDER, Experiment, begin


def main(names: tuple[str, ...], left_only: bool = False) -> int:
    """Do what is left of every experiment; 1 where one of them failed, after the others were done.

    Args:
        names: of the experiments, in their order.
        left_only: only say what is left.
    """
    print(report(names), flush=True)
    if left_only:
        return 0
    alone = only_one("queue")  # noqa: F841  held until the end
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # which ends the experiment that runs, too
    signal.signal(signal.SIGUSR1, lambda *_: pause())
    signal.signal(signal.SIGUSR2, lambda *_: resume())
    os.nice(19 - os.nice(0))
    print(
        f"pause: touch {PAUSE} or kill -USR1 {os.getpid()}; go on: rm {PAUSE} or kill -USR2 {os.getpid()}"
    )
    failed = []
    for name in names:
        # A process each, so that what one of them leaves behind, or breaks, is nothing to the others.
        one_core = os.environ | {"OMP_NUM_THREADS": "1"}
        if subprocess.run(
            [sys.executable, str(Path(__file__).parent), name], env=one_core
        ).returncode:
            failed.append(name)
        print(report(names), flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def report(names: tuple[str, ...], folder: Path = FOLDER) -> str:
    """What is left: runs and CPU hours of each experiment, and in all."""
    lines, total = [], 0.0
    for name in names:
        try:
            done, every, hours = left(
                importlib.import_module(f"experiments.{name}").EXPERIMENT, folder
            )
        except ValueError as error:
            lines.append(f"{name:14}cannot go on: {error}")
            continue
        total += hours
        lines.append(f"{name:14}{done:4} of {every:4} runs done, {hours:5.2f} CPU hours left")
    return "\n".join([*lines, f"{'in all':14}{total:35.2f} CPU hours left"])


def left(experiment: Experiment, folder: Path = FOLDER) -> tuple[int, int, float]:
    """Runs that are done, all runs, and the hours of the others: as long as those done took, on the mean, or as planned
    where none is.

    Raises:
        ValueError: the results that are there are of other settings.
    """
    keys = [key for key, _ in experiment.runs(experiment.settings, {})]
    runs = begin(experiment, folder / f"{experiment.name}.json", fresh=False)["runs"]
    seconds = [runs[key]["seconds"]["cpu"] for key in keys if key in runs]
    planned = 3600 * (experiment.hours or 0.0) / len(keys)
    return (
        len(seconds),
        len(keys),
        (len(keys) - len(seconds)) * (statistics.mean(seconds) if seconds else planned) / 3600,
    )
