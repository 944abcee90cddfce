"""Random calls of the compiled kernels, under sanitizers or between guard pages.

    python -m tests.fuzz.run sanitize --calls 20000     address and undefined-behaviour sanitizers
    python -m tests.fuzz.run guard --calls 20000        the kernels as users run them, tensors between guard pages
    python -m tests.fuzz.run guard --first 123 --calls 1    one call again

Calls run in processes of their own, some hundred each, so that one that dies is named by its seed.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PORTION = 400
SANITIZERS = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]


def compiler() -> list[str] | None:
    """The C++ compiler that the kernels are built with, or None."""
    from hf_hyperattn.engines import native

    try:
        return native.find_compiler()
    except RuntimeError:
        return None


def missing(tool: str) -> str | None:
    """Why the tool cannot be used on this machine; None if it can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if compiler() is None:
        return "needs a C++ compiler"
    if tool == "sanitize" and not all(Path(path).is_file() for path in runtimes()):
        return "needs the compiler's sanitizer libraries"
    return None


def runtimes() -> list[str]:
    """The sanitizers' libraries: Python is not built with them, so they have to be loaded first."""
    ask = lambda name: [*compiler(), f"-print-file-name={name}"]
    return [
        subprocess.run(ask(n), capture_output=True, text=True).stdout.strip()
        for n in ("libasan.so", "libubsan.so")
    ]


def environment(tool: str, folder: Path) -> dict[str, str]:
    """Variables of a process whose calls are watched."""
    found = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    if tool == "sanitize":
        found["LD_PRELOAD"] = " ".join(runtimes())
        # Python never frees all of its memory; deep stacks and a large quarantine only take time here
        found["ASAN_OPTIONS"] = (
            "detect_leaks=0:abort_on_error=0:malloc_context_size=3:quarantine_size_mb=32"
        )
    else:
        library = folder / "guard.so"
        command = [
            *compiler(),
            "-x",
            "c",
            "-O2",
            "-shared",
            "-fPIC",
            str(HERE / "guard.c"),
            "-o",
            str(library),
            "-ldl",
        ]
        subprocess.run(command, check=True)
        found["LD_PRELOAD"] = str(library)
    return found


def fuzz(tool: str, first: int, calls: int) -> list[str]:
    """Run the calls; a report for each process that died."""
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(tool, Path(folder))
        while calls > 0:
            portion = min(calls, PORTION)
            command = [
                sys.executable,
                "-m",
                "tests.fuzz.run",
                tool,
                "--first",
                str(first),
                "--calls",
                str(portion),
            ]
            done = subprocess.run(
                [*command, "--here"],
                cwd=ROOT,
                env=variables,
                capture_output=True,
                text=True,
                errors="replace",
            )
            begun = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
            if done.returncode:
                last = int(begun[-1].split()[1].rstrip(":")) if begun else first
                reports.append(
                    f"{tool}, seed {last}, exit code {done.returncode}\n{done.stderr[-6000:]}"
                )
                portion = last - first + 1  # go on behind it
            first, calls = first + portion, calls - portion
            print(f"{tool}: {first} done, {len(reports)} died", flush=True)
    return reports


def work(tool: str, first: int, calls: int) -> None:
    """The calls themselves, in the watched process."""
    from hf_hyperattn.engines import cpu, native

    if tool == "sanitize":
        plain = [flag for flag in native.compiler_flags() if not flag.startswith("-O")]
        native.compiler_flags = lambda: (
            plain + SANITIZERS
        )  # libraries are kept under a name that depends on the flags
        native.compile_library = functools.partial(native.compile_library, more=SANITIZERS)
    if not cpu.library.core():
        raise SystemExit("the kernels were not built")
    from . import calls as kernels

    for seed in range(first, first + calls):
        print(f"seed {seed}:", flush=True)
        print(kernels.run(seed), flush=True)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("tool", choices=("sanitize", "guard"))
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        work(args.tool, args.first, args.calls)
        return 0
    if reason := missing(args.tool):
        print(f"{args.tool} {reason}", file=sys.stderr)
        return 2
    reports = fuzz(args.tool, args.first, args.calls)
    print("\n\n".join(reports) or f"{args.calls} calls, none died")
    return int(bool(reports))


if __name__ == "__main__":
    sys.exit(main())
