"""Folders of checkpoints that are replaced whole: at every moment one whole checkpoint is there.

`replace_folder` gives a new folder beside the target to write into (the stage). When it is complete and on the disk, it
writes down what the save replaces and removes (the record, a file in the stage), links the target's other files into
the stage, and exchanges the two folders in one step of the file system. Where that cannot be done (a mount point, the
current directory, a file system or operating system without such a step), the files are renamed one by one: the file by
which a load finds weights goes first and comes last, so that no load mixes two checkpoints.

What a killed save leaves is told by its record: without one the stage is incomplete, and the next save deletes it; with
one the save is complete, and the next save, or `recover`, brings it to its end. A stage whose process lives is left
alone.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .files import PREFIX, hold, is_held, locked, read_json, release

RECORD = f"{PREFIX}.json"
VARIANT = r"(?P<variant>\.\w+)?"
WEIGHTS = re.compile(
    rf"(?P<rank>shard-\d+-)?(?P<of>(adapter_)?model){VARIANT}(?P<shard>-\d+-of-\d+)?\.(safetensors|(?<=adapter_model\.)bin)"
)
INDEX = re.compile(rf"(?P<of>(adapter_)?model)\.safetensors\.index{VARIANT}\.json")
#: More files than this are not linked into the new folder: the new files are renamed into the old one.
MOST_LINKS = 20_000


def weights_kind(name: str) -> tuple | None:
    """Which weights a file is part of: folder, model or adapter, variant. None for other files."""
    folder, file = os.path.split(name)
    match = WEIGHTS.fullmatch(file) or INDEX.fullmatch(file)
    return match and (folder, match["of"], match["variant"])


def is_entry(name: str) -> bool:
    """Whether a load of weights looks for this file: all in one, the index of the shards, or one that a rank wrote."""
    name = os.path.basename(name)
    match = WEIGHTS.fullmatch(name)
    return bool(INDEX.fullmatch(name) or (match and (match["rank"] or not match["shard"])))


def check_replaceable(target: Path, force: bool, source: str | os.PathLike) -> None:
    """Refuse a folder that is to hold new files and nothing else, where something would be lost that is not meant.

    Args:
        target: allowed are an absent and an empty folder; where `force`, also one that holds another checkpoint.
        source: what the new files are made from; a name on the Hub is in no folder.

    Raises:
        ValueError: it is not allowed.
    """
    allowed = "an absent or empty directory"
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ValueError(f"{target} is no directory; allowed: {allowed}")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise ValueError(
            f"{target} is not empty; allowed: {allowed}, or --force to replace a checkpoint"
        )
    if os.path.lexists(source) and Path(os.path.realpath(source)).is_relative_to(
        os.path.realpath(target)
    ):
        raise ValueError(f"{target} is or holds {source}, which would be lost; allowed: {allowed}")
    if not os.path.lexists(target / "config.json"):
        raise ValueError(
            f"{target} holds no checkpoint (no config.json) but other files; allowed: {allowed}"
        )


@contextmanager
def replace_folder(target: str | os.PathLike, keep_others: bool = True) -> Iterator[Path]:
    """A folder to write into, whose files take the place of those of `target` when the block ends without an error.

    Args:
        target: a folder, absent or not; a link to a folder is followed.
        keep_others: whether files of `target` stay that the block does not write, but for weights that belong to those
            it writes (shards of an older save). False: `target` then holds what the block wrote and nothing else.

    Raises:
        OSError: the folder cannot be written; or, once the new folder is complete, its files cannot be brought to their
            places: the message then names `hyperattn recover`, which does it.
    """
    target = Path(os.path.realpath(target))
    if target.name.startswith(f"{PREFIX}-") and target.is_dir():
        yield target  # a stage already: it is replaced whole by who made it
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target) and not (target.is_dir() and os.access(target, os.W_OK | os.X_OK)):
        number = errno.EACCES if target.is_dir() else errno.ENOTDIR
        raise OSError(number, os.strerror(number), str(target))
    with locked(target):
        with suppress(OSError):  # what cannot be finished is kept until this save is complete
            _finish_interrupted(target)
        stage = _new_stage(target)
        handle = hold(stage / RECORD)
    complete = False
    try:
        yield stage
        _sync(stage)
        with locked(target):
            with suppress(OSError):
                _finish_interrupted(target)
            record = _write_record(stage, target, keep_others)
            complete = True
            _commit(stage, target, record)
            for left in _stages(target):
                if not is_held(left / RECORD):
                    shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        if not complete:
            error.filename = error.filename or str(
                target
            )  # "No space left on device" does not say where
            raise
        text = f"saving into {target} stopped halfway ({error}); the new files are whole in {stage}: make way, then run"
        raise OSError(error.errno, f"{text} `hyperattn recover {target}`") from error
    finally:
        if not complete:
            shutil.rmtree(stage, ignore_errors=True)
        release(handle)


def recover(target: str | os.PathLike) -> list[str]:
    """Bring interrupted saves into a folder to their end and remove what they left.

    Returns:
        A sentence for each save that was found; none where nothing was interrupted.

    Raises:
        OSError: there is no such folder, a save into it is under way, or what is left cannot be put in its place
            without a decision of the user's.
    """
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    with locked(target):
        if any(is_held(stage / RECORD) for stage in _stages(target)):
            raise OSError(
                f"a process is saving into {target}; wait for it, or end it, and run this again"
            )
        done = _finish_interrupted(target)
        if left := _stages(target):
            raise OSError(
                f"{left[0]} holds an interrupted save that may be older than {target}; "
                f"move what you want of it into {target}, then delete it"
            )
    if not done and not target.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    return done


def is_interrupted(target: str | os.PathLike) -> bool:
    """Whether a complete save waits beside or in the folder to be brought to its end."""
    return any(_read_record(stage) for stage in _stages(Path(os.path.realpath(target))))


def _finish_interrupted(target: Path) -> list[str]:
    """Finish and clean what dead processes left, the oldest first; the lock of the target is held."""
    done, removed = [], f"{target}: what an interrupted save left was removed"
    if (
        record := _read_record(target)
    ) is not None:  # killed after the exchange: the stage is the old folder
        old = target.parent / record["stage"]
        _clean(old if old in _stages(target) else None, target, record)
        done.append(removed)
    for stage in _stages(target):
        if is_held(stage / RECORD):
            continue
        record = _read_record(stage)
        if record is None and not _may_be_the_only_copy(stage, target):
            shutil.rmtree(stage, ignore_errors=True)
            done.append(removed)
        elif record is not None and not _saved_since(stage, target, record):
            _commit(stage, target, record)
            done.append(f"{target}: the interrupted save was brought to its end")
    return done


def _saved_since(stage: Path, target: Path, record: dict) -> bool:
    """Whether somebody saved the same weights into the target, without us, after the stage was complete."""
    kinds = {weights_kind(name) for name in (*record["files"], *record["remove"])}
    written = (stage / RECORD).stat().st_mtime_ns
    entries = [name for name in _files(target) if is_entry(name) and weights_kind(name) in kinds]
    return any((target / name).lstat().st_mtime_ns > written for name in entries)


def _may_be_the_only_copy(stage: Path, target: Path) -> bool:
    """Whether a stage without a record holds weights and the target none: so version 0.1.0 could leave a folder."""
    return (
        stage.parent == target
        and any(is_entry(name) for name in os.listdir(stage))
        and not any(is_entry(name) for name in os.listdir(target))
    )


def _new_stage(target: Path) -> Path:
    """An empty folder on the file system of the target: beside it, or where that cannot be, in it."""
    token = secrets.token_hex(4)
    beside, inside = target.parent / f"{PREFIX}-{target.name}-{token}", target / f"{PREFIX}-{token}"
    if not target.is_dir():
        beside.mkdir()
        return beside
    if not _is_mount(target):
        with suppress(OSError):
            beside.mkdir()
            _make_alike(target, beside)
            return beside
        with suppress(OSError):  # the exchange would change whose folder it is
            beside.rmdir()
    inside.mkdir()
    return inside


def _make_alike(old: Path, new: Path) -> None:
    """Give a folder another one's permissions and owner."""
    shutil.copystat(old, new)
    before, after = old.stat(), new.stat()
    if (before.st_uid, before.st_gid) != (after.st_uid, after.st_gid):
        os.chown(new, before.st_uid, before.st_gid)


def _is_mount(folder: Path) -> bool:
    if os.path.ismount(folder):
        return True
    with suppress(OSError):  # one folder mounted at another place of the same file system
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        return any(
            line.split()[4] == str(folder).replace(" ", "\\040") for line in text.splitlines()
        )
    return False


def _stages(target: Path) -> list[Path]:
    """The stages of this target, of living and of dead processes, those with the oldest record first."""
    stages = []
    for folder, pattern in (
        (target.parent, rf"{re.escape(f'{PREFIX}-{target.name}')}-[0-9a-f]{{8}}"),
        (target, rf"{re.escape(PREFIX)}-\w{{8}}"),
    ):
        with suppress(OSError), os.scandir(folder) as entries:
            stages += [
                Path(e.path)
                for e in entries
                if re.fullmatch(pattern, e.name) and e.is_dir(follow_symlinks=False)
            ]
    return sorted(stages, key=_age)


def _age(stage: Path) -> tuple:
    try:
        return (stage / RECORD).stat().st_mtime_ns, stage.name
    except OSError:
        return 0, stage.name


def _files(folder: Path) -> list[str]:
    """Names of all that is no folder, relative to the folder, without what saves made for themselves."""
    names = []
    for place, folders, files in os.walk(folder):
        at = os.path.relpath(place, folder)
        if at == ".":
            folders[:] = [
                n for n in folders if not re.fullmatch(rf"{re.escape(PREFIX)}-\w{{8}}", n)
            ]
            files = [n for n in files if n not in (RECORD, f"{PREFIX}.lock")]
        files += [n for n in folders if os.path.islink(os.path.join(place, n))]
        names += [os.path.normpath(os.path.join(at, n)) for n in files]
    return sorted(names)


def _write_record(stage: Path, target: Path, keep_others: bool) -> dict:
    """Decide what the save does, and write it down: from now on it is complete."""
    new = sorted(_files(stage), key=is_entry)
    for name in new if keep_others else ():
        if _inside(target, name).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target / name))
    kinds = {weights_kind(name) for name in new} - {None}
    old = _files(target) if target.is_dir() else []
    goes = [name for name in old if not keep_others or weights_kind(name) in kinds]
    gone = [name for name in goes if is_entry(name) or name not in new]
    removed = sorted(gone, key=is_entry, reverse=True)
    record = {"stage": stage.name, "files": new, "remove": removed, "keep_others": keep_others}
    with open(stage / RECORD, "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(stage)
    return record


def _read_record(folder: Path) -> dict | None:
    """The record in a folder, None where there is none that is whole and whose names stay inside."""
    try:
        record = read_json(folder / RECORD)
        names = [*record["files"], *record["remove"]]
        stage, _ = record["stage"], record["keep_others"]
        if any(b"\0" in os.fsencode(name) for name in (*names, stage)):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    if os.path.basename(stage) != stage or not stage.startswith(f"{PREFIX}-"):
        return None
    inside = (not os.path.isabs(name) and ".." not in Path(name).parts for name in names)
    return record if all(inside) else None


def _commit(stage: Path, target: Path, record: dict) -> None:
    """Bring a complete stage to its place; what was done of it already is not done again."""
    untouched = all(
        os.path.lexists(stage / name) for name in record["files"]
    )  # no file was renamed yet
    if stage.parent == target.parent and untouched and not _stands_in(target):
        with suppress(OSError):
            if not (target.is_dir() and any(target.iterdir())):
                os.rename(stage, target)
            else:
                if record["keep_others"]:
                    _link_others(target, stage, {*record["files"], *record["remove"]})
                _exchange(stage, target)
    if _read_record(stage) is not None:
        _rename_files(stage, target, record)
        (stage / RECORD).unlink()
        shutil.rmtree(stage, ignore_errors=True)
        return
    _sync_folder(target.parent)
    _clean(stage, target, record)


def _stands_in(folder: Path) -> bool:
    """Whether this process would stand in the old folder after an exchange."""
    try:
        return Path(os.getcwd()).is_relative_to(folder)
    except OSError:  # it stands in a folder that is gone
        return False


def _link_others(target: Path, stage: Path, replaced: set[str]) -> None:
    """Put the target's other files into the stage too, without copying them."""
    others = [name for name in _files(target) if name not in replaced]
    if len(others) > MOST_LINKS:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
    for place, folders, _ in os.walk(target):
        for name in folders:
            old = Path(place, name)
            new = stage / old.relative_to(target)
            if not old.is_symlink() and not new.exists():
                new.mkdir()
                _make_alike(old, new)
    for name in others:
        old, new = target / name, _inside(stage, name)
        if os.path.lexists(new):
            new.unlink()
        if old.is_symlink():
            os.symlink(os.readlink(old), new)
        else:
            os.link(old, new)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change names in one step; OSError where the system cannot."""
    libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform in ("linux", "darwin") else None
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):
        at = ctypes.c_int(-100)  # AT_FDCWD; 2 is RENAME_EXCHANGE
        failed = libc.renameat2(at, names[0], at, names[1], ctypes.c_uint(2))
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, ctypes.c_uint(2))  # RENAME_SWAP
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _clean(old: Path | None, target: Path, record: dict) -> None:
    """After an exchange: move what came into the old folder at the last moment, and remove it."""
    for name in set(_files(old) if old else ()) - {*record["files"], *record["remove"]}:
        before, after = Path(old or "", name), _inside(target, name)
        if not os.path.lexists(after) or after.lstat().st_mtime_ns < before.lstat().st_mtime_ns:
            after.parent.mkdir(parents=True, exist_ok=True)
            os.replace(before, after)
    (target / RECORD).unlink(missing_ok=True)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _rename_files(stage: Path, target: Path, record: dict) -> None:
    """Every file to its place: first the entries of the old weights go, at last those of the new ones come."""
    target.mkdir(exist_ok=True)
    for name in record["remove"]:
        if name not in record["files"] or os.path.lexists(stage / name):
            _inside(target, name).unlink(missing_ok=True)
    for name in record["files"]:
        if os.path.lexists(stage / name):
            place = _inside(target, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if is_entry(name):
                _sync_folder(target)
            os.replace(_inside(stage, name), place)
    _sync_folder(target)


def _inside(folder: Path, name: str) -> Path:
    """The place of a file in a folder; OSError where a link in the folder leads out of it."""
    place = folder / name
    if not Path(os.path.realpath(place.parent)).is_relative_to(folder):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(place))
    return place


def _sync(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for path in (os.path.join(place, name) for name in files):
            if not os.path.islink(path):
                with open(path, "rb" if os.name == "posix" else "r+b") as file:
                    os.fsync(file.fileno())
        _sync_folder(Path(place))


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
