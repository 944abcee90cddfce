"""Load compiled kernels from the wheel, or compile C++ sources on first use.

A wheel for Linux on x86-64 or AArch64 has one library for each instruction set in `LEVELS`. The
best one for this CPU is loaded if it matches the wheel's manifest byte for byte, and if the
installed sources match too. Everything else is compiled on this machine.

Compiling needs only a C++ compiler: $CXX, else c++, g++ or clang++. The file name of a library
contains a digest of everything it depends on: sources, flags, and the instructions of this CPU
(`-march=native`, or the wheel's level). If several processes need the same library, one compiles it
and the others wait. If nothing can be compiled, `load_library` logs one line and returns None, and
callers use plain torch.

A library runs with the rights of the process that loads it. Therefore the cache directory must
belong to the user and be writable only by the user. Each library has a file with the SHA-256 of its
name and content; without a match it is compiled again.

Environment variables:

- HF_HYPERATTN_NATIVE: 0 turns compiled kernels off, `build` compiles all of them on this machine,
  and v2, v3, v4, v4_bf16 or armv8 selects that instruction set.
- HF_HYPERATTN_BUILD_DIR: the cache directory (default: ~/.cache/hf_hyperattn/native).
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
from typing import NamedTuple

logger = logging.getLogger("hf_hyperattn")
_logged: set[str] = set()  # reasons for missing libraries that were logged already

#: Environment variable that turns compiled kernels off or selects them.
SETTING = "HF_HYPERATTN_NATIVE"
OFF = ("0", "off", "false", "no")
BUILD = "build"
ANY = ("", "1", "on", "true", "yes", "auto")

#: Instruction sets: the flags that /proc/cpuinfo lists for such CPUs, in addition to the flags of
#: the sets before it in `OF_MACHINES`, and the compiler's flags.
LEVELS = {
    "v2": ("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3", ["-march=x86-64-v2"]),
    "v3": ("abm avx avx2 bmi1 bmi2 f16c fma movbe xsave", ["-march=x86-64-v3"]),
    "v4": ("avx512bw avx512cd avx512dq avx512f avx512vl", ["-march=x86-64-v4"]),
    "v4_bf16": ("avx512_bf16", ["-march=x86-64-v4", "-mavx512bf16"]),
    "armv8": ("", ["-march=armv8-a"]),  # every AArch64 CPU that runs Linux
}
#: Instruction sets of each machine, the best last.
OF_MACHINES = {"x86_64": ("v2", "v3", "v4", "v4_bf16"), "aarch64": ("armv8",)}

#: Folder of the package; includes in sources are relative to it.
PACKAGE = Path(__file__).parents[1]
#: Libraries of the wheel.
PREBUILT = PACKAGE / "engines" / "prebuilt"
MANIFEST = PREBUILT / "manifest.json"
MANIFEST_KEYS = {"names", "libraries", "sources", "fingerprint", "scores"}

#: Consequences, for the log.
AGAIN = "install the wheel again; until then kernels are built anew"
PLAIN = "the plain torch way is used"

#: Longest reason in the log; errors of compilers can have thousands of characters.
REASON_CHARACTERS = 240


class Prebuilt(NamedTuple):
    """A library of the wheel.

    Args:
        level: Its instruction set, a key of `LEVELS`.
        library: The loaded library.
        names: Names of the libraries that it replaces.
        scores: Name of the exported function and its argument, by description of the score
            (engines/cpu/library.py).
    """

    level: str
    library: ctypes.CDLL
    names: list[str]
    scores: dict[str, tuple[str, int]]


def read_setting() -> str:
    """Return the value of HF_HYPERATTN_NATIVE in lower case."""
    return os.environ.get(SETTING, "").strip().lower()


def is_enabled() -> bool:
    """Return whether compiled kernels may be used.

    They may, unless HF_HYPERATTN_NATIVE is 0, off, false or no.
    """
    return read_setting() not in OFF


@functools.cache
def read_levels() -> list[str]:
    """Return the instruction sets of this CPU, the best last.

    The list is empty if they are unknown.
    """
    features: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        features = set(next((line for line in info if line.startswith("flags")), "").split())
    # By machine: an emulated one reads the /proc/cpuinfo of the CPU that emulates it.
    names = OF_MACHINES.get(platform.machine(), ())
    return list(itertools.takewhile(lambda name: set(LEVELS[name][0].split()) <= features, names))


def choose_level() -> str | None:
    """Return the instruction set to use, or None to compile for exactly this CPU.

    HF_HYPERATTN_NATIVE selects it. The default is the best one that the wheel has.

    Raises:
        ValueError: HF_HYPERATTN_NATIVE has an unknown value, or names an instruction set that this
            CPU lacks.
    """
    wish = read_setting()
    if wish in ANY:
        carried = read_manifest().get("libraries", ())
        return next((name for name in reversed(read_levels()) if name in carried), None)
    if wish == BUILD:
        return None
    if wish not in read_levels():
        allowed = ", ".join((OFF[0], ANY[1], BUILD, *read_levels()))
        raise ValueError(f"{SETTING}={wish!r} is unknown or not of this CPU; allowed: {allowed}")
    return wish


@functools.cache
def read_manifest() -> dict:
    """Return the wheel's description of its libraries.

    The result is empty if there is none. A damaged one is logged and counts as none.
    """
    if not MANIFEST.is_file():
        return {}
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and manifest.keys() >= MANIFEST_KEYS:
            return manifest
    log_once(f"{MANIFEST} is damaged", AGAIN)
    return {}


def load_prebuilt() -> Prebuilt | None:
    """Return the wheel's library for this CPU, or None if there is none.

    A library that does not match the manifest is logged and not loaded.
    """
    if not is_enabled() or read_setting() == BUILD:
        return None
    try:
        return _open_prebuilt(choose_level())
    except (ValueError, OSError) as error:
        log_once(str(error), AGAIN if isinstance(error, OSError) else PLAIN)
        return None


@functools.cache
def _open_prebuilt(name: str | None) -> Prebuilt | None:
    manifest = read_manifest()
    if name is None or name not in manifest.get("libraries", ()):
        return None
    library = PREBUILT / f"{name}.so"
    # Sources first: after an edit of the installed sources, the library is intact but computes
    # something else.
    if hash_sources(manifest["sources"]) != manifest["fingerprint"]:
        log_once(
            f"the installed sources are not those that {library} was made of",
            "kernels are built anew",
        )
        return None
    if hashlib.sha256(library.read_bytes()).hexdigest() != manifest["libraries"][name]:
        log_once(f"{library} is damaged", AGAIN)
        return None
    return Prebuilt(
        level=name,
        library=ctypes.CDLL(str(library)),
        names=manifest["names"],
        scores=manifest["scores"],
    )


def hash_sources(sources: Iterable[str]) -> str:
    """Return the SHA-256 of files of the package, given by their paths in it."""
    digest = hashlib.sha256()
    for source in sources:
        path = PACKAGE / source
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{source}\0".encode() + content + b"\0")
    return digest.hexdigest()


def build_directory() -> Path:
    """Return the cache directory of libraries."""
    chosen = os.environ.get("HF_HYPERATTN_BUILD_DIR")
    if chosen:
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hf_hyperattn" / "native"


def private_directory() -> Path:
    """Return the cache directory, created for this user only if it is missing.

    Raises:
        OSError: It cannot be created, is a link, belongs to another user, is writable by others, or
            forbids execution.
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
    """Return why another user may have written a file or directory.

    None if only this user can have written it.
    """
    # Without following links: the target of a link may change between this check and the load.
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


def compiler_flags() -> list[str]:
    """Return the compiler's flags for the chosen instruction set.

    If none is chosen, they are for exactly this CPU.
    """
    level = choose_level()
    if level is not None:
        return flags_for(LEVELS[level][1])
    x86 = platform.machine() in ("x86_64", "AMD64", "i686")
    return flags_for(["-march=native" if x86 else "-mcpu=native"])


def flags_for(tuned: Sequence[str]) -> list[str]:
    """Return the compiler's flags.

    Args:
        tuned: Flags that select the CPU.
    """
    return [
        "-O3",
        "-std=c++20",
        "-fPIC",
        *tuned,
        "-fopenmp",
        # Fast arithmetic, but hidden logits are -inf, so infinities must survive.
        "-ffast-math",
        "-fno-finite-math-only",
        "-Wno-psabi",
    ]


@functools.cache
def describe_cpu() -> str:
    """Return the model and features of the CPU.

    A library only runs on CPUs where they are the same.
    """
    info = Path("/proc/cpuinfo")
    if info.exists():
        features = re.findall(
            r"^(?:flags|Features|model name)\s*:\s*(.*)$", info.read_text(), re.MULTILINE
        )
        return platform.machine() + " ".join(sorted(set(features)))
    return platform.machine() + platform.processor()


def library_name(name: str, sources: Sequence[Path | str]) -> str:
    """Return `name` with a digest of everything that the library depends on."""
    digest = hashlib.sha256()
    for part in (describe_cpu(), *compiler_flags()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        content = source.encode() if isinstance(source, str) else source.read_bytes()
        digest.update(content + b"\0")
    return f"{name}_{digest.hexdigest()[:16]}"


@functools.cache
def load_library(name: str, *sources: Path | str) -> ctypes.CDLL | None:
    """Return the library of these sources, compiled if necessary.

    It comes from the wheel or from the cache.

    Args:
        name: An identifier, part of the file name.
        sources: C++ files that export `extern "C"` functions, and headers that they include. A
            string is C++ text.

    Returns:
        The loaded library, or None if that fails. Each reason is logged once, for the first library
        that it affects.
    """
    if not is_enabled():
        return None
    try:
        carried = load_prebuilt()
        if carried is not None and name in carried.names:
            return carried.library
        return ctypes.CDLL(str(build_library(name, sources).absolute()))
    # Anything: compilers, file systems and loaders fail in many ways, and attention must run
    # without kernels.
    except Exception as error:
        log_once(summarize_error(error), PLAIN, f"{name} is not compiled (%s)")
        return None


def log_once(why: str, instead: str, what: str = "%s") -> None:
    """Log one line for each reason.

    Args:
        why: The reason.
        instead: What is done instead.
        what: Text with %s for the reason. Default: only the reason.
    """
    if why not in _logged:
        _logged.add(why)
        logger.warning(f"hf_hyperattn: {what}; %s", why, instead)


def summarize_error(error: Exception) -> str:
    """Return an error in one short line: the compiler's first error, if there is one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    errors = [line for line in lines if " error: " in line and "ld returned" not in line]
    first = errors[0] if errors else lines[0]
    return first if len(first) <= REASON_CHARACTERS else first[:REASON_CHARACTERS] + "..."


def build_library(name: str, sources: Sequence[Path | str]) -> Path:
    """Return the path of a library; compile it if it is missing or damaged.

    Args:
        name, sources: As in `load_library`.

    Raises:
        RuntimeError: No compiler, or a source that does not compile.
        OSError: No private directory for libraries.
    """
    library = private_directory() / f"{library_name(name, sources)}.so"
    if not is_intact(library):
        with hold_lock(library.with_suffix(".lock")):
            # Another process may have compiled it while this one waited for the lock.
            if not is_intact(library):
                _compile_into_place(sources, library)
    return library


def hash_library(library: Path) -> str:
    """Return the SHA-256 of a library's content and name.

    The name stands for its sources.
    """
    return hashlib.sha256(library.name.encode() + b"\0" + library.read_bytes()).hexdigest()


def is_intact(library: Path) -> bool:
    """Return whether a library is as it was compiled.

    Only this user may have write access to it and its checksum.
    """
    proof = library.with_suffix(".sha256")
    try:
        if open_to_others(library) or open_to_others(proof):
            return False
        return proof.read_text(encoding="ascii") == hash_library(library)
    except (OSError, ValueError):
        return False


def _compile_into_place(sources: Sequence[Path | str], library: Path) -> None:
    """Compile in a temporary directory and move the result in place.

    Each file is moved in one step.
    """
    # Raises without a compiler, before a line is printed or a directory is made.
    find_compiler()
    for left in library.parent.glob(f"{library.stem}.*"):
        # Left by a process that was killed: this process holds the lock for the name, so no other one uses it.
        if left.is_dir() and os.name == "posix":
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as place:
        made = Path(place) / library.name
        files = [s for s in sources if isinstance(s, Path) and s.suffix == ".cpp"]
        for text in (s for s in sources if isinstance(s, str)):
            files.append(Path(place) / f"text_{len(files)}.cpp")
            files[-1].write_text(text, encoding="utf-8")
        with progress_line(library):
            compile_library(files, made)
        if not made.is_file():
            raise RuntimeError(f"{find_compiler()[0]} ended without an error and made no library")
        # Loading proves that the library works. If it raises, nothing is kept.
        ctypes.CDLL(str(made.absolute()))
        proof = made.with_suffix(".sha256")
        proof.write_text(hash_library(made), encoding="ascii")
        made.chmod(0o700)
        proof.chmod(0o600)
        # The checksum last: until it is there, the library does not count as intact.
        os.replace(made, library)
        os.replace(proof, library.with_suffix(".sha256"))


@contextlib.contextmanager
def progress_line(library: Path) -> Iterator[None]:
    """Print one line to stderr while a library is compiled.

    Nothing is printed if warnings of the package are off.
    """
    start = time.perf_counter()
    loud = logger.isEnabledFor(logging.WARNING) and sys.stderr is not None
    if loud:
        name = library.name.rpartition("_")[0]
        line = f"hf_hyperattn: compiling {name} for this CPU, once, into {library.parent} ..."
        print(line, end=" ", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if loud:
            print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def find_compiler() -> list[str]:
    """Return the C++ compiler as the beginning of a command.

    It is $CXX, else the first of c++, g++ and clang++ on PATH or next to this Python interpreter,
    whose environment need not be activated.

    Raises:
        RuntimeError: There is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    beside_python = str(Path(sys.executable).parent)
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0]) or shutil.which(command[0], path=beside_python)
        if path is not None:
            return [path, *command[1:]]
    raise RuntimeError(f"no C++ compiler {(chosen or ['c++'])[0]!r}; install one, or set CXX")


def compile_library(sources: Sequence[Path], library: Path, more: Sequence[str] = ()) -> None:
    """Compile C++ files in parallel and link them into a shared library.

    Args:
        sources: The C++ files.
        library: Path of the library. Object files are left in its folder.
        more: Further flags for compiling and linking, such as `-fsanitize=address`. Default: none.

    Raises:
        RuntimeError: No compiler, or its errors.
    """
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    # Not in `compiler_flags`: the path of the installation must not change a library's name.
    headers = ["-iquote", str(PACKAGE)]
    _run_compiler(
        [
            [*compiler_flags(), *headers, *more, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
    )
    # Linking with -ffast-math would turn denormal numbers off in the whole process.
    _run_compiler([["-shared", *map(str, objects), "-fopenmp", *more, "-o", str(library)]])


def _run_compiler(calls: list[list[str]]) -> None:
    """Run the compiler in parallel, once for each list of arguments."""
    running = [
        subprocess.Popen(
            [*find_compiler(), *call],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for call in calls
    ]
    # All are read to their end before any error is raised, so that no compiler is left running.
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            reason = f"{find_compiler()[0]} ended with {process.returncode}"
            raise RuntimeError(output.strip() or reason)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock among processes.

    The system releases it when the process ends, even if it is killed.
    """
    try:
        import fcntl
    except ImportError:
        # Windows: two processes may compile the same library. The later one replaces the other's.
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
