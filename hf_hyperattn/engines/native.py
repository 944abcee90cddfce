"""Compiled kernels: what the wheel carries, and what is built of C++ sources on first use, kept, checked, and loaded.

A wheel for Linux on x86-64 or AArch64 carries one library for each of its instruction sets in `LEVELS`; the best that
the CPU has is loaded where it is, byte for byte, what the wheel's manifest says, and where the sources beside it are
those that it was made of. All else is built on this machine.

For that a C++ compiler is enough: $CXX, else c++, g++ or clang++. A library is kept under a name that says all it
depends on: its sources, the flags, and the instructions of this CPU (`-march=native`, or the wheel's level). Several
processes may build at once: one builds, the others wait for it. Where nothing can be built, `load` logs one line and
returns None, and callers take their plain way.

A library runs with the rights of who loads it. So the directory that keeps them must be the user's own, and nobody else
may write to it; and beside every library lies a SHA-256 of its name and content, without which it is built anew, not
loaded.

Environment: HF_HYPERATTN_NATIVE=0 turns compiled kernels off, =build builds all of them on this machine, and =v2, =v3,
=v4, =v4_bf16 or =armv8 takes that instruction set; HF_HYPERATTN_BUILD_DIR says where they are kept (default:
~/.cache/hf_hyperattn/native).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("hf_hyperattn")
_logged: set[str] = set()  # the reasons for which libraries were not built

#: The environment variable that turns compiled kernels off, or says which are taken.
SETTING = "HF_HYPERATTN_NATIVE"
OFF, BUILD, ANY = ("0", "off", "false", "no"), "build", ("", "1", "on", "true", "yes", "auto")

#: Instruction sets: the flags that Linux tells of such CPUs, beside those of the sets before it in `OF_MACHINES`, and
#: the compiler's.
LEVELS = {
    "v2": ("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3", ["-march=x86-64-v2"]),
    "v3": ("abm avx avx2 bmi1 bmi2 f16c fma movbe xsave", ["-march=x86-64-v3"]),
    "v4": ("avx512bw avx512cd avx512dq avx512f avx512vl", ["-march=x86-64-v4"]),
    "v4_bf16": ("avx512_bf16", ["-march=x86-64-v4", "-mavx512bf16"]),
    "armv8": ("", ["-march=armv8-a"]),  # of every AArch64 CPU that Linux runs on
}
#: Those of each machine, the best last.
OF_MACHINES = {"x86_64": ("v2", "v3", "v4", "v4_bf16"), "aarch64": ("armv8",)}

#: The package, which sources name their headers relative to, and what a wheel carries in it.
PACKAGE = Path(__file__).parents[1]
PREBUILT = PACKAGE / "engines" / "prebuilt"
MANIFEST = PREBUILT / "manifest.json"

#: What is done instead, in a line of the log.
AGAIN, PLAIN = (
    "install the wheel again; until then kernels are built anew",
    "the plain torch way is used",
)


class Prebuilt(NamedTuple):
    """A library of the wheel.

    Args:
        level: its instruction set, a key of `LEVELS`.
        library: what exports the functions of all of `names`, and a function for each of `scores`.
        names: of the libraries that it stands for.
        scores: by what they are (engines/cpu/library.py), the function's name and its argument.
    """

    level: str
    library: ctypes.CDLL
    names: list[str]
    scores: dict[str, tuple[str, int]]


def setting() -> str:
    """What HF_HYPERATTN_NATIVE says, in small letters."""
    return os.environ.get(SETTING, "").strip().lower()


def enabled() -> bool:
    """Whether compiled kernels may be used at all: HF_HYPERATTN_NATIVE is not 0, off, false or no."""
    return setting() not in OFF


@functools.cache
def levels() -> list[str]:
    """The levels that this CPU has; none where that is not known. Every AArch64 CPU has the one there is."""
    has: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        has = set(next((line for line in info if line.startswith("flags")), "").split())
    of_machine = OF_MACHINES.get(
        platform.machine(), ()
    )  # emulated ones read /proc/cpuinfo of the CPU that emulates
    return list(itertools.takewhile(lambda name: set(LEVELS[name][0].split()) <= has, of_machine))


def level() -> str | None:
    """The level to take: what HF_HYPERATTN_NATIVE says, else the best that the wheel carries; None to build for this
    very CPU.

    Raises:
        ValueError: HF_HYPERATTN_NATIVE says nothing that is known, or a level that this CPU has not.
    """
    wish = setting()
    if wish in ANY:
        return next(
            (name for name in reversed(levels()) if name in manifest().get("libraries", ())), None
        )
    if wish != BUILD and wish not in levels():
        allowed = ", ".join((OFF[0], ANY[1], BUILD, *levels()))
        raise ValueError(f"{SETTING}={wish!r} is unknown or not of this CPU; allowed: {allowed}")
    return wish if wish != BUILD else None


@functools.cache
def manifest() -> dict:
    """What the wheel says of its libraries; empty where there are none, or where it is damaged, which is logged."""
    if not MANIFEST.is_file():
        return {}
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(MANIFEST.read_text(encoding="utf-8"))
        if isinstance(said, dict) and said.keys() >= {
            "names",
            "libraries",
            "sources",
            "fingerprint",
            "scores",
        }:
            return said
    log_once(f"{MANIFEST} is damaged", AGAIN)
    return {}


def prebuilt() -> Prebuilt | None:
    """The wheel's library for this CPU; None where it has none, or that is not what it should be, which is logged."""
    if not enabled() or setting() == BUILD:
        return None
    try:
        return _open_prebuilt(level())
    except (ValueError, OSError) as error:
        log_once(str(error), AGAIN if isinstance(error, OSError) else PLAIN)
        return None


@functools.cache
def _open_prebuilt(name: str | None) -> Prebuilt | None:
    said = manifest()
    if name is None or name not in said.get("libraries", ()):
        return None
    library = PREBUILT / f"{name}.so"
    if fingerprint(said["sources"]) != said["fingerprint"]:
        log_once(
            f"the installed sources are not those that {library} was made of",
            "kernels are built anew",
        )
    elif hashlib.sha256(library.read_bytes()).hexdigest() != said["libraries"][name]:
        log_once(f"{library} is damaged", AGAIN)
    else:
        return Prebuilt(name, ctypes.CDLL(str(library)), said["names"], said["scores"])
    return None


def fingerprint(sources: Iterable[str]) -> str:
    """SHA-256 of files of the package, by their paths in it."""
    digest = hashlib.sha256()
    for source in sources:
        path = PACKAGE / source
        digest.update(
            f"{source}\0".encode() + (path.read_bytes() if path.is_file() else b"") + b"\0"
        )
    return digest.hexdigest()


def build_directory() -> Path:
    """Where libraries are kept."""
    chosen = os.environ.get("HF_HYPERATTN_BUILD_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_hyperattn" / "native"
    )


def private_directory() -> Path:
    """The directory of libraries, made where it is missing, for this user alone.

    Raises:
        OSError: it cannot be made, or it is a link, another user's, or one that others may write to.
    """
    directory = build_directory()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    fault = open_to_others(directory)
    if fault is None and not directory.is_dir():
        fault = "is no directory"
    elif fault is None and hasattr(os, "ST_NOEXEC") and os.statvfs(directory).f_flag & os.ST_NOEXEC:
        fault = "is on a file system from which nothing may run (noexec)"
    if fault is not None:
        raise OSError(
            f"{directory} {fault}; HF_HYPERATTN_BUILD_DIR must name a directory of your own with mode 700"
        )
    return directory


def open_to_others(path: Path) -> str | None:
    """Why what lies at a path need not be this user's work; None where nobody else can have written it."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        return "is no directory and no regular file"
    if os.name == "posix" and status.st_uid != os.geteuid():
        return "belongs to another user"
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by others"
    return None


def flags() -> list[str]:
    """Flags of the compiler, for the very CPU it runs on, or for the level of what is loaded beside."""
    name = level()
    native = [
        "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    ]
    return flags_for(native if name is None else LEVELS[name][1])


def flags_for(tuned: Sequence[str]) -> list[str]:
    """Flags of the compiler: fast arithmetic that still knows infinities, for the CPUs that `tuned` says."""
    return [
        "-O3",
        "-std=c++20",
        "-fPIC",
        *tuned,
        "-fopenmp",
        "-ffast-math",
        "-fno-finite-math-only",
        "-Wno-psabi",
    ]


@functools.cache
def cpu() -> str:
    """What the CPU is and can do; a library runs only where this is the same."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        features = re.findall(
            r"^(?:flags|Features|model name)\s*:\s*(.*)$", info.read_text(), re.MULTILINE
        )
        return platform.machine() + " ".join(sorted(set(features)))
    return platform.machine() + platform.processor()


def library_name(name: str, sources: Sequence[Path | str]) -> str:
    """`name` with a digest of everything the built library depends on."""
    digest = hashlib.sha256()
    for part in (cpu(), *flags()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update((source.encode() if isinstance(source, str) else source.read_bytes()) + b"\0")
    return f"{name}_{digest.hexdigest()[:16]}"


@functools.cache
def load(name: str, *sources: Path | str) -> ctypes.CDLL | None:
    """The library made of these sources, the wheel's or built if need be; None where that fails, after one line in the
    log for each reason: of many libraries that lack a compiler, the first says so.

    Args:
        name: an identifier, part of the file's name.
        sources: C++ files, which export `extern "C"` functions, and the headers they include; a string is C++ text.
    """
    if not enabled():
        return None
    try:
        carried = prebuilt()
        if carried is not None and name in carried.names:
            return carried.library
        return ctypes.CDLL(str(built(name, sources).absolute()))
    except Exception as error:  # whatever a compiler, a file system or a loader can do wrong
        log_once(reason(error), PLAIN, f"{name} is not compiled (%s)")
        return None


def log_once(why: str, instead: str, what: str = "%s") -> None:
    """One line in the log for each reason."""
    if why not in _logged:
        _logged.add(why)
        logger.warning(f"hf_hyperattn: {what}; %s", why, instead)


def reason(error: Exception) -> str:
    """What went wrong, in one short line: the compiler's own first error where there is one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = next(
        (line for line in lines if " error: " in line and "ld returned" not in line), lines[0]
    )
    return first if len(first) <= 240 else first[:240] + "..."


def built(name: str, sources: Sequence[Path | str]) -> Path:
    """The path of the library; builds it where it is not there yet, or is not what was built.

    Raises:
        RuntimeError, OSError: no compiler, a source that it refuses, no directory of the user's own.
    """
    library = private_directory() / f"{library_name(name, sources)}.so"
    if not is_intact(library):
        with locked(library.with_suffix(".lock")):
            if not is_intact(library):
                _build(sources, library)
    return library


def checksum(library: Path) -> str:
    """SHA-256 of a library's name, which stands for its sources, and its content."""
    return hashlib.sha256(library.name.encode() + b"\0" + library.read_bytes()).hexdigest()


def is_intact(library: Path) -> bool:
    """Whether a library is there, byte for byte as it was built, and nobody else may write to it or its checksum."""
    proof = library.with_suffix(".sha256")
    try:
        if open_to_others(library) or open_to_others(proof):
            return False
        return proof.read_text(encoding="ascii") == checksum(library)
    except (OSError, ValueError):
        return False


def _build(sources: Sequence[Path | str], library: Path) -> None:
    """Build in a directory of its own, and move the result in place, in one step for each file."""
    compiler()  # or its error, before anything is said or made
    for left in library.parent.glob(f"{library.stem}.*"):
        if (
            left.is_dir() and os.name == "posix"
        ):  # of one that was killed: the lock on this name is ours
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as place:
        made = Path(place) / library.name
        files = [
            source for source in sources if isinstance(source, Path) and source.suffix == ".cpp"
        ]
        for text in (source for source in sources if isinstance(source, str)):
            files.append(Path(place) / f"text_{len(files)}.cpp")
            files[-1].write_text(text, encoding="utf-8")
        with progress_line(library):
            compile_library(files, made)
        if not made.is_file():
            raise RuntimeError(f"{compiler()[0]} ended without an error and made no library")
        ctypes.CDLL(str(made.absolute()))  # what cannot be loaded is not kept
        proof = made.with_suffix(".sha256")
        proof.write_text(checksum(made), encoding="ascii")
        made.chmod(0o700)
        proof.chmod(0o600)
        os.replace(made, library)
        os.replace(proof, library.with_suffix(".sha256"))


@contextlib.contextmanager
def progress_line(library: Path) -> Iterator[None]:
    """One line on stderr while a library is being built; none where warnings of the package are turned off."""
    start, loud = (
        time.perf_counter(),
        logger.isEnabledFor(logging.WARNING) and sys.stderr is not None,
    )
    if loud:
        name = library.name.rpartition("_")[0]
        line = f"hf_hyperattn: compiling {name} for this CPU, once, into {library.parent} ..."
        print(line, end=" ", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if loud:
            print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def compiler() -> list[str]:
    """The C++ compiler as the beginning of a command: $CXX, else the first of c++, g++ and clang++ there is, on PATH or
    beside this interpreter, whose environment need not be activated.

    Raises:
        RuntimeError: there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0]) or shutil.which(
            command[0], path=str(Path(sys.executable).parent)
        )
        if path is not None:
            return [path, *command[1:]]
    raise RuntimeError(f"no C++ compiler {(chosen or ['c++'])[0]!r}; install one, or set CXX")


def compile_library(sources: Sequence[Path], library: Path, more: Sequence[str] = ()) -> None:
    """Compile C++ files, all at once, into a shared library; object files are left beside it.

    Args:
        more: flags to add in compiling and linking, such as `-fsanitize=address`.

    Raises:
        RuntimeError: no compiler, or what it said against a source.
    """
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    headers = [
        "-iquote",
        str(PACKAGE),
    ]  # no part of a library's name: paths of an installation change nothing
    _run(
        [
            [*flags(), *headers, *more, "-c", str(s), "-o", str(o)]
            for s, o in zip(sources, objects, strict=True)
        ]
    )
    # not linked with -ffast-math, which would turn denormal numbers off in the whole process
    _run([["-shared", *map(str, objects), "-fopenmp", *more, "-o", str(library)]])


def _run(calls: list[list[str]]) -> None:
    """Call the compiler with each list of arguments, at the same time."""
    options: Any = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    running = [
        subprocess.Popen([*compiler(), *call], text=True, errors="replace", **options)
        for call in calls
    ]
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise RuntimeError(text.strip() or f"{compiler()[0]} ended with {process.returncode}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes; it goes when its holder does, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two may build the same, and the later one wins
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
