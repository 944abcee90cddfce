"""Compiled kernels: C++ sources are built on first use for this machine, kept, checked, and loaded as plain libraries.

All that is needed is a C++ compiler: $CXX, else c++, g++ or clang++. A library is kept under a name that says all it
depends on: its sources, the flags, and the instructions of this CPU (`-march=native`). Several processes may build at
once: one builds, the others wait for it. Where nothing can be built, `load` logs one line and returns None, and callers
take their plain way.

A library runs with the rights of who loads it. So the directory that keeps them must be the user's own, and nobody else
may write to it; and beside every library lies a SHA-256 of its name and content, without which it is built anew, not
loaded.

Environment: HF_HYPERATTN_NATIVE=0 turns compiled kernels off; HF_HYPERATTN_BUILD_DIR says where they are kept (default:
~/.cache/hf_hyperattn/native).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("hf_hyperattn")
_logged: set[str] = set()  # the reasons for which libraries were not built


#: The environment variable that turns compiled kernels off.
SETTING = "HF_HYPERATTN_NATIVE"


def enabled() -> bool:
    """Whether compiled kernels may be used at all: HF_HYPERATTN_NATIVE is not 0, off, false or no."""
    return os.environ.get(SETTING, "1").strip().lower() not in ("0", "off", "false", "no")


def build_directory() -> Path:
    """Where libraries are kept."""
    chosen = os.environ.get("HF_HYPERATTN_BUILD_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_hyperattn" / "native"


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
        raise OSError(f"{directory} {fault}; HF_HYPERATTN_BUILD_DIR must name a directory of your own with mode 700")
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
    """Flags of the compiler: fast arithmetic that still knows infinities, for the very CPU it runs on."""
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    return [
        "-O3", "-std=c++20", "-fPIC", tuned, "-fopenmp", "-ffast-math", "-fno-finite-math-only", "-Wno-psabi",
    ]  # fmt: skip


@functools.cache
def cpu() -> str:
    """What the CPU is and can do; a library runs only where this is the same."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        features = re.findall(r"^(?:flags|Features|model name)\s*:\s*(.*)$", info.read_text(), re.MULTILINE)
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
    """The library made of these sources, built if need be; None where that fails, after one line in the log for each
    reason: of many libraries that lack a compiler, the first says so.

    Args:
        name: an identifier, part of the file's name.
        sources: C++ files, which export `extern "C"` functions, and the headers they include; a string is C++ text.
    """
    if not enabled():
        return None
    try:
        return ctypes.CDLL(str(built(name, sources).absolute()))
    except Exception as error:  # whatever a compiler, a file system or a loader can do wrong
        why = reason(error)
        if why not in _logged:
            _logged.add(why)
            logger.warning("hf_hyperattn: %s is not compiled (%s); the plain torch way is used", name, why)
        return None


def reason(error: Exception) -> str:
    """What went wrong, in one short line: the compiler's own first error where there is one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = next((line for line in lines if " error: " in line and "ld returned" not in line), lines[0])
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
    for left in library.parent.glob(f"{library.stem}.*"):
        if left.is_dir() and os.name == "posix":  # of one that was killed: the lock on this name is ours
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as place:
        made = Path(place) / library.name
        files = [source for source in sources if isinstance(source, Path) and source.suffix == ".cpp"]
        for text in (source for source in sources if isinstance(source, str)):
            files.append(Path(place) / f"text_{len(files)}.cpp")
            files[-1].write_text(text, encoding="utf-8")
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


def compiler() -> list[str]:
    """The C++ compiler as the beginning of a command: $CXX, else the first of c++, g++ and clang++ there is.

    Raises:
        RuntimeError: there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise RuntimeError(f"no C++ compiler {(chosen or ['c++'])[0]!r}; install one, or set CXX")


def compile_library(sources: Sequence[Path], library: Path, more: Sequence[str] = ()) -> None:
    """Compile C++ files, all at once, into a shared library; object files are left beside it.

    Args:
        more: flags to add in compiling and linking, such as `-fsanitize=address`.

    Raises:
        RuntimeError: no compiler, or what it said against a source.
    """
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    _run([[*flags(), *more, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)])
    # not linked with -ffast-math, which would turn denormal numbers off in the whole process
    _run([["-shared", *map(str, objects), "-fopenmp", *more, "-o", str(library)]])


def _run(calls: list[list[str]]) -> None:
    """Call the compiler with each list of arguments, at the same time."""
    options: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = [subprocess.Popen([*compiler(), *call], text=True, errors="replace", **options) for call in calls]
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
