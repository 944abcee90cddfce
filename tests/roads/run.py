"""The whole table: `python -m tests.roads.run` or `make roads`; resumable; writes docs/roads.md.

Every cell is run in a process of its own, forked from one that has imported everything; results are kept in a cache
folder named after the versions and the sources they depend on. Exit status 1 where a cell is silent, or a third party's
program is missing though `--all` says that all are there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import re
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.roads import adapters, files, processes, report, running, situations, tools  # noqa: F401  they register roads
from tests.roads.cases import BY_LABEL, CASES, CONTROLS
from tests.roads.outcome import Cell, cell, control
from tests.roads.road import GROUPS, ROADS
from tests.zoo.forks import run_forked

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path.home() / ".cache" / "hf_hyperattn" / "roads"
SOURCES = ("hf_hyperattn", "model_patches", "hub_cards", "tests/roads", "tests/integration")
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "torchao",
    "bitsandbytes",
    "onnx",
    "onnxruntime",
)


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"python": platform.python_version()}


def fingerprint() -> str:
    """Hash of the versions and of every source that a cell depends on."""
    digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h") and file.name not in ("run.py", "report.py"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def file_of(folder: pathlib.Path, item) -> pathlib.Path:
    return folder / f"{re.sub(r'[^a-zA-Z0-9]+', '-', ' '.join(item))}.json"


def write(folder: pathlib.Path, item, found: Cell) -> None:
    part = file_of(folder, item).with_suffix(".part")
    part.write_text(json.dumps(found.as_dict()))
    part.replace(file_of(folder, item))


def prepare() -> None:
    """What all forked processes share: checkpoints, kernels that are built, programs that are imported."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("hf_hyperattn").addHandler(logging.NullHandler())
    for case in CASES + CONTROLS:
        _ = case.margin, case.folder()
    processes.bare_answers()
    for name in ("trl", "torchao"):
        if importlib.util.find_spec(name):
            importlib.import_module(name)


CONTROLLED: dict = {}  # what the stock models lose, known to the processes that are forked after them


def answer(item):
    """One road for one case, or for a stock model."""
    name, case = item[0], BY_LABEL[item[1]]
    with tempfile.TemporaryDirectory() as folder:
        if case in CONTROLS:
            return control(ROADS[name], case, pathlib.Path(folder))
        return cell(ROADS[name], case, pathlib.Path(folder), CONTROLLED).as_dict()


def run_cells(items, folder: pathlib.Path, options) -> None:
    """Fill the folder with the cells that are not there yet."""
    missing = [item for item in items if not file_of(folder, item).exists()]
    if not missing:
        return
    prepare()
    columns = (
        TextColumn("{task.description:60}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("roads", total=len(items), completed=len(items) - len(missing))

        def done(name, label, found):
            write(folder, (name, label), found)
            progress.update(bar, advance=1, description=f"{name}, {label}"[:60])

        for name, label in [item for item in missing if ROADS[item[0]].missing()]:
            done(name, label, Cell("not run", words=f"{ROADS[name].missing()} is not installed"))
        missing = [item for item in missing if not ROADS[item[0]].missing()]
        for group in GROUPS:
            alone = [
                item
                for item in missing
                if ROADS[item[0]].group == group and ROADS[item[0]].ranks == 1
            ]
            stock = dict.fromkeys((name, BY_LABEL[label].control.label) for name, label in alone)
            for item, reply, _ in run_forked(answer, stock, options.processes, options.timeout):
                if (
                    reply[0] == "done"
                ):  # where the stock model ends its process, so do the cells: crashes
                    CONTROLLED[item] = reply[1]
            for item, reply, _ in run_forked(answer, alone, options.processes, options.timeout):
                ok = reply[0] == "done"
                done(
                    *item, Cell(**reply[1]) if ok else Cell("crash", words=reply[1].splitlines()[0])
                )
        with tempfile.TemporaryDirectory() as place:
            pairs = [item for item in missing if ROADS[item[0]].ranks > 1]
            processes.together(pairs, pathlib.Path(place), done)


def arguments(argv):
    parser = argparse.ArgumentParser(prog="roads", description=__doc__.splitlines()[0])
    parser.add_argument(
        "roads",
        nargs="?",
        default="",
        help="regular expression of roads or groups; all where left out",
    )
    parser.add_argument("--cases", default="", help="regular expression of cases")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds a cell may take (default: 600)"
    )
    parser.add_argument(
        "--write", action="store_true", help="run nothing, write what there is so far"
    )
    parser.add_argument(
        "--all", action="store_true", help="fail where a third party's program is missing"
    )
    parser.add_argument(
        "--cache", type=pathlib.Path, default=FOLDER, help=f"folder of results (default: {FOLDER})"
    )
    parser.add_argument(
        "--report", type=pathlib.Path, default=ROOT / "docs" / "roads.md", help="file to write"
    )
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """Returns the exit status."""
    options = arguments(argv)
    items = [
        (road.name, case.label)
        for road in sorted(ROADS.values(), key=lambda road: GROUPS.index(road.group))
        for case in CASES
        if road.open_to(case)
        and (re.search(options.roads, road.name) or re.search(options.roads, road.group))
        and re.search(options.cases, case.label)
    ]
    folder = options.cache / fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    if not options.write:
        run_cells(items, folder, options)
    cells = {
        i: Cell(**json.loads(file_of(folder, i).read_text()))
        for i in items
        if file_of(folder, i).exists()
    }
    if not options.roads and not options.cases:
        options.report.write_text(report.page(cells, versions()))
    print(", ".join(f"{n} {outcome}" for outcome, n in report.totals(cells).items() if n))
    bad = [
        item for item, c in cells.items() if not c.holds and (c.outcome != "not run" or options.all)
    ]
    for item in bad:
        print(f"  {cells[item].outcome}: {', '.join(item)}: {cells[item].words[:300]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
