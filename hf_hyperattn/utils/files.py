"""Read checked JSON files, replace files atomically, and lock files and folders.

A read fails with one line for a damaged file. A write leaves either the old file or the new one.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .text import short

#: File locks of POSIX; None on Windows, where concurrent saves to one place are not synchronised.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None

logger = logging.getLogger("hf_hyperattn")

#: Prefix of all temporary files and folders of a save; a complete save has removed them.
PREFIX = ".hyperattn-saving"
#: Largest JSON file, in bytes, and deepest nesting. Python's parser could exhaust memory or
#: recursion.
MOST_BYTES, MOST_LEVELS = 2**26, 64


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: The file is not regular, cannot be read, is larger than 64 MiB, or holds no JSON
            object.
    """
    try:
        # Reading a pipe could wait forever.
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"cannot read {path}: {why}; allowed: a JSON object") from error
    if not isinstance(data, dict):
        raise ValueError(f"cannot read {path}: it holds {short(data)}; allowed: a JSON object")
    # Descend level by level: a recursive check could fail on the data that it should reject.
    level: list[Any] = [data]
    for _ in range(MOST_LEVELS):
        level = [inner for part in level for inner in parts_of(part)]
    if level:
        raise ValueError(
            f"cannot read {path}: it is nested more than {MOST_LEVELS} deep; allowed: a JSON object"
        )
    return data


def parts_of(data: Any) -> Iterable[Any]:
    """Return the values of a JSON object or array; () for other values."""
    if isinstance(data, dict):
        return data.values()
    return data if isinstance(data, list) else ()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash leaves either the old or the new content."""
    path = Path(path)
    # The draft always has the same name, so that the next write removes one that a killed process
    # left.
    draft = path.with_name(f"{PREFIX}-{path.name}")
    with locked(path):
        # The old draft may be a link that somebody planted: remove it instead of writing through
        # it.
        draft.unlink(missing_ok=True)
        try:
            with open(draft, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                # The content must be on disk before the rename, or a power cut leaves an empty
                # file.
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file or folder, among processes and threads.

    The lock ends with its holder, even if the process is killed. The lock file is next to `path`,
    or inside the folder `path` if nothing can be written next to it.
    """
    if fcntl is None:
        yield
        return
    places = [path.with_name(f"{PREFIX}-{path.name}.lock")]
    if path.is_dir():
        places.append(path / f"{PREFIX}.lock")
    handle, place = _open_lock(places)
    try:
        yield
    finally:
        # Delete before releasing: a waiting process then sees a deleted file and makes a new one.
        place.unlink(missing_ok=True)
        release(handle)


def _open_lock(places: list[Path]) -> tuple[int, Path]:
    """Open and lock a lock file at the first place that is writable."""
    place = places[0]
    while True:
        try:
            handle = os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError:
            if place == places[-1]:
                raise
            place = places[-1]
            continue
        _wait_for_lock(handle, place)
        # The previous holder may have deleted the file meanwhile. A lock on a deleted file protects
        # nothing, since others lock a new file of this name.
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(place)):
                return handle, place
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Try to lock an open file without waiting.

    Returns:
        False if another process holds the lock; True also on a file system without locks.
    """
    with suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _wait_for_lock(handle: int, place: Path) -> None:
    """Lock an open file, waiting as long as necessary.

    A replacement takes milliseconds, so a wait of ten seconds logs a warning.
    """
    warn_at = time.monotonic() + 10
    while not _try_lock(handle):
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            logger.warning(
                f"hf_hyperattn: waiting for another process that saves; it holds the lock {place}"
            )
        time.sleep(0.002)


def hold(path: Path) -> int | None:
    """Create and lock a file that marks this process as working.

    Returns:
        A handle for `release`. The lock disappears with the process, so `is_held` notices a killed
        one.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    # Windows cannot rename a folder that contains an open file.
    if fcntl is None:
        os.close(handle)
        return None
    _try_lock(handle)
    return handle


def is_held(path: Path) -> bool:
    """Return whether a living process, possibly this one, holds the file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError as error:
        # A file that cannot be opened belongs to another user: treat it as held, and leave it
        # alone.
        return not isinstance(error, FileNotFoundError)
    held = fcntl is not None and not _try_lock(handle)
    os.close(handle)
    return held


def release(handle: int | None) -> None:
    """Release and close a handle of `hold`."""
    if handle is None:
        return
    # Closing is not enough: a forked child may hold a copy of the handle, and with it the lock.
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
