"""The whole zoo: every model type, each in a process of its own; resumable. `python -m tests.zoo.run` or `make zoo`.

Results are kept per type in a cache folder named after the versions and the sources they depend on, so that a run
that was interrupted goes on where it stopped, and one after a change starts anew.
"""

import argparse
import hashlib
import json
import pathlib
import platform
import sys

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.zoo import report, worker
from tests.zoo.forks import run_forked
from tests.zoo.tiny import KINDS, types

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ("hf_hyperattn", "model_patches", "tests/zoo")
AT_LEAST = {"base": 440, "causal": 155}
FOLDER = pathlib.Path.home() / ".cache" / "hf_hyperattn" / "zoo"


def versions():
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def fingerprint():
    """Hash of the versions and of every source that a result depends on; git has no part in it."""
    digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.name not in ("run.py", "report.py"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def result_of(reply, seconds):
    """What a worker's reply means; a process that died or ran over its time is a failure that says so."""
    if reply[0] == "done":
        return reply[1] | {"seconds": round(seconds, 1)}
    return {
        "verdict": "failure",
        "why": reply[1].splitlines()[0],
        "checks": {},
        "seconds": round(seconds, 1),
    }


def file_of(folder, item):
    return folder / item[0] / f"{item[1]}.json"


def examine_all(items, folder, processes, timeout):
    """Fill the folder with the results that are not there yet."""
    missing = [item for item in items if not file_of(folder, item).exists()]
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("zoo", total=len(items), completed=len(items) - len(missing))
        for item, reply, seconds in run_forked(worker.answer, missing, processes, timeout):
            file = file_of(folder, item)
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(result_of(reply, seconds)))
            part.replace(file)
            progress.update(bar, advance=1, description=" ".join(item))


def arguments(argv):
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all where none is given")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="auto classes"
    )
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800,
        help="seconds a type may wait for its answer (default: 1800)",
    )
    parser.add_argument(
        "--cache", type=pathlib.Path, default=FOLDER, help=f"folder of results (default: {FOLDER})"
    )
    parser.add_argument(
        "--report",
        type=pathlib.Path,
        default=ROOT / "docs" / "compatibility.md",
        help="file to write",
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Returns the exit status: 0 where nothing failed and, in a whole run, enough types work."""
    options = arguments(argv)
    worker.prepare()
    items = [
        (kind, t)
        for kind in options.kinds
        for t in types(kind)
        if not options.types or t in options.types
    ]
    folder = options.cache / fingerprint()
    examine_all(items, folder, options.processes, options.timeout)
    results = {item: json.loads(file_of(folder, item).read_text()) for item in items}
    whole = not options.types and set(options.kinds) == set(KINDS)
    if whole:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(report.page(results, versions()))
    failed = show(results)
    few = [k for k in options.kinds if whole and report.totals(results, k)["works"] < AT_LEAST[k]]
    return 1 if failed or few else 0


def show(results):
    """Print the totals and every failure; returns how many there are."""
    for kind in dict.fromkeys(kind for kind, _ in results):
        print(f"{kind}: " + ", ".join(f"{n} {v}" for v, n in report.totals(results, kind).items()))
    failed = {item: r["why"] for item, r in results.items() if r["verdict"] == "failure"}
    for (kind, model_type), why in failed.items():
        print(f"  {kind} {model_type}: {why}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
