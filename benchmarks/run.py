"""The benchmarks of attention: every figure a ratio to SDPA in the same process, in rounds that take turns.

    python benchmarks/run.py                    what matters most first, some minutes; again: goes on from there
    python benchmarks/run.py --full             everything: lengths to 65,536, head dimensions 16 to 256, ...
    python benchmarks/run.py --only "umbral.*cpu.*2048"
    python benchmarks/run.py --operations umbral --lengths 4096 --dims 128 --causal both
    python benchmarks/run.py --base OLD.json    compare with an earlier file; --minutes 0 measures nothing new
    python benchmarks/run.py --draw             docs/results/performance.md from the results

A row is a time only where the result matches the definition in float64. Rows are kept in benchmarks/results, one file
a chip, and not measured again (--fresh starts over). What runs out of memory, is refused or goes wrong is a row too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from speed.cases import KINDS, Job, jobs, sweep
from speed.compare import summary
from speed.measure import blank, failure, measure
from speed.models import MODELS, measure_model
from speed.operations import OPERATIONS
from speed.store import Store, default_path

#: Options of a sweep of one's own, and what they are where they are not given.
OWN = {
    "kinds": ["forward", "training"],
    "dtypes": ["float32"],
    "dims": [64],
    "threads": [1],
    "causal": "no",
    "heads": None,
    "batches": None,
    "ways": None,
}


def parser() -> argparse.ArgumentParser:
    """The options of this command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--minutes", type=float, default=8.0, help="start nothing new after this long")
    p.add_argument("--full", action="store_true", help="sweep everything; hours")
    p.add_argument("--only", metavar="REGEX", help="only jobs whose key this is found in")
    p.add_argument("--again", action="store_true", help="measure chosen jobs again")
    p.add_argument("--fresh", action="store_true", help="drop the rows there are")
    p.add_argument("--json", type=Path, help="the file of the results")
    p.add_argument("--seconds", type=float, default=2.0, help="of turns with SDPA, for each job")
    p.add_argument("--memory", type=float, default=6.0, help="GiB that a job may take")
    p.add_argument("--longest", type=float, default=60.0, help="seconds that one call may take")
    p.add_argument(
        "--base",
        type=Path,
        metavar="FILE.json",
        help="report measurements that are slower than in this file",
    )
    p.add_argument("--list", action="store_true", help="only list the jobs")
    p.add_argument("--draw", action="store_true", help="only write docs/results/performance.md")
    own = p.add_argument_group("a sweep of one's own in place of the list")
    own.add_argument("--operations", nargs="+", choices=OPERATIONS)
    own.add_argument("--lengths", nargs="+", type=int)
    own.add_argument("--dims", nargs="+", type=int)
    own.add_argument("--batches", nargs="+", type=int)
    own.add_argument("--heads", type=int)
    own.add_argument("--kinds", nargs="+", choices=KINDS)
    own.add_argument("--causal", choices=("no", "yes", "both"))
    own.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"])
    own.add_argument("--threads", nargs="+", type=int)
    own.add_argument("--ways", nargs="+", help="engines and peers; default: all there are")
    return p


def read_options(words: list[str] | None) -> argparse.Namespace:
    """The options; what would do nothing is refused."""
    p = parser()
    args = p.parse_args(words)
    given = [name for name in OWN if getattr(args, name) is not None]
    if given and not (args.operations or args.lengths):
        p.error(f"--{given[0]} is for a sweep of one's own; add --operations or --lengths")
    ways = {way for name in args.operations or OPERATIONS for way in OPERATIONS[name].ways()}
    unknown = [way for way in args.ways or () if way not in ways]
    if unknown:
        p.error(f"--ways {unknown[0]}: nothing here runs so; allowed: {', '.join(sorted(ways))}")
    if "threads" in given and device() == "cuda":
        p.error("--threads has no effect on a GPU, and this machine has one; leave it out")
    for name in OWN.keys() - set(given):
        setattr(args, name, OWN[name])
    return args


def device() -> str:
    """What is measured: the GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def chosen(args) -> list[Job]:
    """The jobs that were asked for, in order."""
    ways = {name: operation.ways() for name, operation in OPERATIONS.items()}
    if args.operations or args.lengths:
        if args.ways:
            ways = {name: [w for w in args.ways if w in found] for name, found in ways.items()}
        causal = {"no": (False,), "yes": (True,), "both": (False, True)}[args.causal]
        places = {"threads": args.threads} if device() == "cpu" else {"device": ("cuda",)}
        given = {"batches": args.batches} if args.batches else {}
        found = list(
            dict.fromkeys(
                sweep(
                    ways,
                    places,
                    args.operations,
                    args.lengths or (512, 2048, 8192),
                    args.dims,
                    kinds=args.kinds,
                    causal=causal,
                    dtypes=args.dtypes,
                    heads=args.heads,
                    **given,
                )
            )
        )
    else:
        models = {name: list(model.names) for name, model in MODELS.items() if model.available()}
        found = jobs(ways, models, device(), args.full)
    return [job for job in found if not args.only or re.search(args.only, job.key)]


def one(job: Job, args) -> dict:
    """The row of a job; runs in the worker process."""
    if job.subject in MODELS:
        try:
            return measure_model(job, args.seconds)
        except Exception as error:  # whatever a model does wrong is no reason to stop
            return blank(job) | {"status": failure(error)}
    return measure(job, args.seconds, args.memory, args.longest)


def work(todo: list[Job], store: Store, args) -> bool:
    """Measure until all is done (True) or the minutes are used up."""
    end, pool = time.monotonic() + 60 * args.minutes, None
    try:
        for job in todo:
            if time.monotonic() > end:
                return False
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)
            try:
                row = pool.submit(one, job, args).result()
            except BrokenProcessPool:  # the system takes the memory of a process by ending it
                row, pool = blank(job) | {"status": "out of memory (the process was ended)"}, None
            store.add(row)
            print(line(row), flush=True)
        return True
    finally:
        if pool:
            pool.shutdown()


def _prepare() -> None:
    """Of a worker: what is imported is not looked through for garbage again and again."""
    import gc

    gc.collect()
    gc.freeze()


def line(row: dict) -> str:
    """A row as text."""
    if row["status"] != "ok":
        return f"{row['key']:75} {row['status']}"
    held = f"  held to {row['limit']:.2f}" if row.get("limit") else ""
    return (
        f"{row['key']:75} {row['median']:6.2f} x SDPA ({row['q1']:.2f} to {row['q3']:.2f}), "
        f"{row['way_mib']:.0f} MiB, error {row['error']:.0e}{held}"
    )


def main(words: list[str] | None = None) -> int:
    """Measure, compare or draw; 1 where something is slower than the base."""
    args = read_options(words)
    if args.draw:
        from speed.page import draw

        return draw()
    found = chosen(args)
    if args.only and not found:
        raise SystemExit(
            f"--only {args.only} is found in no job; allowed: a part of what --list shows"
        )
    if args.list:
        print("\n".join(job.key for job in found))
        return 0
    store = Store(args.json or default_path(), args.fresh)
    todo = [job for job in found if args.again or args.fresh or job.key not in store.rows]
    done = work(todo, store, args)
    left = sum(job.key not in store.rows for job in found)
    print(
        f"{store.path}: "
        + ("all is done" if done else f"{left} of {len(found)} left; the same command goes on")
    )
    if args.base:
        text, slower = summary(json.loads(args.base.read_text())["rows"], store.rows)
        print(text)
        return int(slower)
    return 0


if __name__ == "__main__":
    sys.exit(main())
