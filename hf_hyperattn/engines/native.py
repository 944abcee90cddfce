"""Compiled kernels: C++ sources are built on first use for this machine, kept, and loaded as plain libraries.

A library is kept under a name that says all it depends on: its sources, the flags, torch, and the instructions of this
CPU (`-march=native`). Several processes may build at once: one builds, the others wait for it. Where nothing can be
built, `load` logs one line and returns None, and callers take their plain way.

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
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

logger = logging.getLogger("hf_hyperattn")


def enabled() -> bool:
    """Whether compiled kernels may be used at all: HF_HYPERATTN_NATIVE is not 0, off, false or no."""
    return os.environ.get("HF_HYPERATTN_NATIVE", "1").strip().lower() not in ("0", "off", "false", "no")


def build_directory() -> Path:
    """Where libraries are kept."""
    chosen = os.environ.get("HF_HYPERATTN_BUILD_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_hyperattn" / "native"


def flags() -> list[str]:
    """Flags of the compiler: fast arithmetic that still knows infinities, for the very CPU it runs on."""
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    found = ["-O3", "-std=c++20", tuned, "-fopenmp", "-ffast-math", "-fno-finite-math-only", "-Wno-psabi"]
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX512", "AVX2"):  # for at::vec
        found += [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    return found


@functools.cache
def cpu() -> str:
    """What the CPU is and can do; a library runs only where this is the same."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.findall(r"^(?:flags|Features|model name)\s*:\s*(.*)$", info.read_text(), re.MULTILINE)
        return platform.machine() + " ".join(sorted(set(found)))
    return platform.machine() + platform.processor()


def library_name(name: str, sources: Sequence[Path]) -> str:
    """`name` with a digest of everything the built library depends on."""
    digest = hashlib.sha256()
    for part in (torch.__version__, cpu(), *flags()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.read_bytes() + b"\0")
    return f"{name}_{digest.hexdigest()[:16]}"


@functools.cache
def load(name: str, *sources: Path) -> ctypes.CDLL | None:
    """The library made of these sources, built if need be; None, after one line in the log, where that fails.

    Args:
        name: an identifier, part of the file's name.
        sources: C++ files, which export `extern "C"` functions, and the headers they include.
    """
    if not enabled():
        return None
    try:
        return ctypes.CDLL(str(built(name, sources)))
    except Exception as error:  # whatever a compiler, a file system or a loader can do wrong
        logger.warning(
            "hf_hyperattn: %s is not compiled (%s); the plain torch way is used", name, reason(error)
        )
        return None


def reason(error: Exception) -> str:
    """What went wrong, in one short line: the compiler's own first error where there is one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    found = next((line for line in lines if " error: " in line), lines[0])
    return found if len(found) <= 200 else found[:200] + "..."


def built(name: str, sources: Sequence[Path]) -> Path:
    """The path of the library; builds it where it is not there yet.

    Raises:
        RuntimeError, OSError, ImportError: no compiler, no ninja, nowhere to write.
    """
    full = library_name(name, sources)
    directory = build_directory()
    library = directory / f"{full}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / f"{full}.lock"):
        if not library.exists():
            _build(full, [str(s) for s in sources if s.suffix == ".cpp"], library)
    return library


def _build(full: str, sources: list[str], library: Path) -> None:
    """Build in a directory of its own, and move the result in place in one step."""
    from torch.utils import cpp_extension  # slow to import

    if not cpp_extension.is_ninja_available():
        raise RuntimeError("no ninja; pip install ninja")
    if shutil.which(compiler := cpp_extension.get_cxx_compiler()) is None:
        raise RuntimeError(f"no C++ compiler {compiler!r}; install one, or set CXX")
    for left in library.parent.glob(f"{full}.*"):
        if left.is_dir() and os.name == "posix":  # of one that was killed: the lock on this name is ours
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{full}.") as place:
        made = cpp_extension.load(
            full, sources, extra_cflags=flags(), extra_ldflags=["-fopenmp"], build_directory=place,
            is_python_module=False, verbose=False,
        )  # fmt: skip
        os.replace(made or Path(place) / f"{full}.so", library)


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
