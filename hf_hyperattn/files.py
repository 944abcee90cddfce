"""JSON files that are checked, text files that are replaced whole, and the lock of who replaces a file or folder."""

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

from .fields import short

#: Without it, on Windows, two processes that save to one place at once are not kept apart.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None

logger = logging.getLogger("hf_hyperattn")

#: How the names of all that a save makes for itself begin; nothing of it is left when the save is complete.
PREFIX = ".hyperattn-saving"
#: Of a JSON file that is read: bytes and levels.
MOST_BYTES, MOST_LEVELS = 2**26, 64


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it is no regular file, cannot be read, is larger than 64 MiB, or holds no JSON object.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise ValueError("it is no regular file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"cannot read {path}: {why}; allowed: a JSON object") from error
    if not isinstance(data, dict):
        raise ValueError(f"cannot read {path}: it holds {short(data)}; allowed: a JSON object")
    level: list[Any] = [data]
    for _ in range(MOST_LEVELS):
        level = [inner for part in level for inner in parts_of(part)]
    if level:
        raise ValueError(
            f"cannot read {path}: it is nested more than {MOST_LEVELS} deep; allowed: a JSON object"
        )
    return data


def parts_of(data: Any) -> Iterable[Any]:
    """What a JSON object or array holds; nothing for other values."""
    return data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash leaves either the old file or the new one, never half of one."""
    path = Path(path)
    draft = path.with_name(
        f"{PREFIX}-{path.name}"
    )  # every time: the next write clears what a kill left
    with locked(path):
        draft.unlink(
            missing_ok=True
        )  # never written through: it may be a link that somebody else put there
        try:
            with open(draft, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder among processes and threads; it ends with its holder, however that ends.

    The lock is a file beside `path`, or inside the folder `path` where nothing can be written beside it.
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
        place.unlink(
            missing_ok=True
        )  # before the release: who waits for it sees that, and makes a new one
        release(handle)


def _open_lock(places: list[Path]) -> tuple[int, Path]:
    place = places[0]
    while True:
        try:
            handle = os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError:
            if place == places[-1]:
                raise
            place = places[-1]
            continue
        _wait_for(handle, place)
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(place)):
                return handle, place
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock an open file unless somebody holds it; True too on a file system without locks."""
    with suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _wait_for(handle: int, place: Path) -> None:
    """Lock an open file; replacing takes milliseconds, so that a longer wait is worth a warning."""
    warn_at = time.monotonic() + 10
    while not _lock(handle):
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            logger.warning(
                f"hf_hyperattn: waiting for another process that saves; it holds the lock {place}"
            )
        time.sleep(0.002)


def hold(path: Path) -> int | None:
    """Make a file that says as long as this process lives that it is at work; give the result to `release`."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if fcntl is None:  # Windows moves no folder in which a file is open
        os.close(handle)
        return None
    _lock(handle)
    return handle


def is_held(path: Path) -> bool:
    """Whether a living process, this one included, holds the file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError as error:
        return not isinstance(
            error, FileNotFoundError
        )  # a file of somebody else is better left alone
    held = fcntl is not None and not _lock(handle)
    os.close(handle)
    return held


def release(handle: int | None) -> None:
    """End what `hold` began."""
    if handle is None:
        return
    with suppress(OSError):  # by itself, since a forked child may hold a copy of the handle
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
