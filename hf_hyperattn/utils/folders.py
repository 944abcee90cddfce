"""Replace checkpoint folders so that one complete checkpoint exists at any moment.

A save works in these steps:

1. `replace_folder` creates a new folder next to the target (the *stage*) to write into.
2. When the stage is complete and on disk, a *record* in it lists the files that the save replaces
   and removes.
3. Hard links bring the target's other files into the stage.
4. One step of the file system exchanges stage and target.

The exchange can be impossible: at a mount point, for the current directory, or on some file and
operating systems. The files are then renamed one by one. The *entry*, the file that a load
opens first, is removed first and created last, so that no load mixes two checkpoints.

The record also tells what a killed save left behind. Without a record the stage is incomplete, and
the next save deletes it. With a record the save is complete, and the next save or `recover`
finishes it. A stage whose process is alive is left alone.
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

#: File in a stage that marks it as complete and lists its changes.
RECORD = f"{PREFIX}.json"
#: Names of weight files of Transformers and PEFT, with variants, shards and files of single ranks.
VARIANT = r"(?P<variant>\.\w+)?"
WEIGHTS = re.compile(
    rf"(?P<rank>shard-\d+-)?(?P<of>(adapter_)?model){VARIANT}(?P<shard>-\d+-of-\d+)?\.(safetensors|(?<=adapter_model\.)bin)"
)
INDEX = re.compile(rf"(?P<of>(adapter_)?model)\.safetensors\.index{VARIANT}\.json")
#: With more other files than this, files are renamed one by one instead of linking the others.
MOST_LINKS = 20_000


def weights_kind(name: str) -> tuple | None:
    """Return the weights that a file belongs to, or None for other files.

    Returns:
        Folder, "model" or "adapter_model", and variant.
    """
    folder, file = os.path.split(name)
    match = WEIGHTS.fullmatch(file) or INDEX.fullmatch(file)
    return match and (folder, match["of"], match["variant"])


def is_entry(name: str) -> bool:
    """Return whether a load of weights begins with this file.

    Entries are an unsharded file, the index of shards, and a file of a single rank.
    """
    name = os.path.basename(name)
    match = WEIGHTS.fullmatch(name)
    return bool(INDEX.fullmatch(name) or (match and (match["rank"] or not match["shard"])))


def check_replaceable(target: Path, force: bool, source: str | os.PathLike) -> None:
    """Check that replacing a folder loses nothing unintended.

    Args:
        target: The folder: absent or empty, or with another checkpoint if `force`.
        force: Whether a checkpoint may be replaced.
        source: Path or Hub id of the model that the new files are made from.

    Raises:
        ValueError: The folder may not be replaced.
    """
    allowed = "an absent or empty directory"
    # A link to a folder would be replaced by the new folder.
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ValueError(f"{target} is no directory; allowed: {allowed}")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise ValueError(
            f"{target} is not empty; allowed: {allowed}, or --force to replace a checkpoint"
        )
    # The source would be deleted together with the old folder.
    if os.path.lexists(source) and Path(os.path.realpath(source)).is_relative_to(
        os.path.realpath(target)
    ):
        raise ValueError(f"{target} is or holds {source}, which would be lost; allowed: {allowed}")
    # Even with `force`, delete only folders that look like checkpoints: DIR may be a home folder.
    if not os.path.lexists(target / "config.json"):
        raise ValueError(
            f"{target} holds no checkpoint (no config.json) but other files; allowed: {allowed}"
        )


@contextmanager
def replace_folder(target: str | os.PathLike, keep_others: bool = True) -> Iterator[Path]:
    """Yield a folder to write into, which replaces `target` at the end of the block.

    Args:
        target: A folder, which need not exist. A link to a folder is followed.
        keep_others: True: keep files of `target` that the block does not write, except old weights
            of the same kind (such as shards of an older save). False: `target` then holds only the
            new files.

    Raises:
        OSError: The folder cannot be written. Or the new folder is complete, but its files cannot
            be moved into place; the message then names `hyperattn recover`, which finishes the
            save.
    """
    target = Path(os.path.realpath(target))
    if target.name.startswith(f"{PREFIX}-") and target.is_dir():
        # The target is a stage of an outer save, which replaces the folder as a whole.
        yield target
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target) and not (target.is_dir() and os.access(target, os.W_OK | os.X_OK)):
        number = errno.EACCES if target.is_dir() else errno.ENOTDIR
        raise OSError(number, os.strerror(number), str(target))
    with locked(target):
        # If an interrupted save cannot be finished, keep its stage until this save is complete.
        with suppress(OSError):
            _finish_interrupted(target)
        stage = _new_stage(target)
        handle = hold(stage / RECORD)
    complete = False
    try:
        yield stage
        _sync_files(stage)
        with locked(target):
            with suppress(OSError):
                _finish_interrupted(target)
            record = _write_record(stage, target, keep_others)
            complete = True
            _commit_stage(stage, target, record)
            # Older stages are obsolete now, unless their process is still writing.
            for left in _find_stages(target):
                if not is_held(left / RECORD):
                    shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        if not complete:
            # "No space left on device" does not name the place.
            error.filename = error.filename or str(target)
            raise
        text = f"saving into {target} stopped halfway ({error}); the new files are whole in {stage}: make way, then run"
        raise OSError(error.errno, f"{text} `hyperattn recover {target}`") from error
    finally:
        if not complete:
            shutil.rmtree(stage, ignore_errors=True)
        release(handle)


def recover(target: str | os.PathLike) -> list[str]:
    """Finish interrupted saves into a folder and remove their temporary files.

    Returns:
        A sentence for each interrupted save.

    Raises:
        OSError: The folder does not exist, a process is saving into it, or the user must decide
            about a save.
    """
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    with locked(target):
        # A living process finishes its own save.
        if any(is_held(stage / RECORD) for stage in _find_stages(target)):
            raise OSError(
                f"a process is saving into {target}; wait for it, or end it, and run this again"
            )
        done = _finish_interrupted(target)
        # The remaining stages may be older or newer than the target. Only the user can tell.
        if left := _find_stages(target):
            raise OSError(
                f"{left[0]} holds an interrupted save that may be older than {target}; "
                f"move what you want of it into {target}, then delete it"
            )
    if not done and not target.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    return done


def is_interrupted(target: str | os.PathLike) -> bool:
    """Return whether a complete but unfinished save waits next to or in the folder."""
    return any(_read_record(stage) for stage in _find_stages(Path(os.path.realpath(target))))


def _finish_interrupted(target: Path) -> list[str]:
    """Finish saves of dead processes, the oldest first; remove incomplete ones.

    The caller holds the lock of the target.
    """
    done = []
    removed = f"{target}: what an interrupted save left was removed"
    # A record in the target: the process was killed after the exchange, so the stage is the old
    # folder.
    if (record := _read_record(target)) is not None:
        old = target.parent / record["stage"]
        _remove_old(old if old in _find_stages(target) else None, target, record)
        done.append(removed)
    for stage in _find_stages(target):
        if is_held(stage / RECORD):
            continue
        record = _read_record(stage)
        if record is None and not _may_be_the_only_copy(stage, target):
            shutil.rmtree(stage, ignore_errors=True)
            done.append(removed)
        elif record is not None and not _saved_since(stage, target, record):
            _commit_stage(stage, target, record)
            done.append(f"{target}: the interrupted save was brought to its end")
    return done


def _saved_since(stage: Path, target: Path, record: dict) -> bool:
    """Return whether another program saved the same weights after the stage.

    Finishing the stage would then replace newer weights by older ones.
    """
    kinds = {weights_kind(name) for name in (*record["files"], *record["remove"])}
    written = (stage / RECORD).stat().st_mtime_ns
    entries = [
        name for name in _list_files(target) if is_entry(name) and weights_kind(name) in kinds
    ]
    return any((target / name).lstat().st_mtime_ns > written for name in entries)


def _may_be_the_only_copy(stage: Path, target: Path) -> bool:
    """Return whether a stage without a record holds weights, and the target none.

    Version 0.1.0 could leave a folder in this state; deleting the stage would lose the weights.
    """
    return (
        stage.parent == target
        and any(is_entry(name) for name in os.listdir(stage))
        and not any(is_entry(name) for name in os.listdir(target))
    )


def _new_stage(target: Path) -> Path:
    """Create an empty stage on the file system of the target.

    It is next to the target, or inside the target if that is impossible.
    """
    token = secrets.token_hex(4)
    sibling = target.parent / f"{PREFIX}-{target.name}-{token}"
    inside = target / f"{PREFIX}-{token}"
    if not target.is_dir():
        sibling.mkdir()
        return sibling
    # A mount point cannot be exchanged, and its parent is on another file system.
    if not _is_mount(target):
        with suppress(OSError):
            sibling.mkdir()
            _copy_permissions(target, sibling)
            return sibling
        # Without equal permissions, the exchange would change the owner of the folder.
        with suppress(OSError):
            sibling.rmdir()
    inside.mkdir()
    return inside


def _copy_permissions(old: Path, new: Path) -> None:
    """Give a folder the permissions and the owner of another one."""
    shutil.copystat(old, new)
    before, after = old.stat(), new.stat()
    if (before.st_uid, before.st_gid) != (after.st_uid, after.st_gid):
        os.chown(new, before.st_uid, before.st_gid)


def _is_mount(folder: Path) -> bool:
    """Return whether a folder is a mount point, bind mounts included."""
    if os.path.ismount(folder):
        return True
    # A bind mount on the same file system looks like a plain folder to `os.path.ismount`.
    with suppress(OSError):
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        # Field 5 is the mount point, in which the kernel writes a space as \040.
        name = str(folder).replace(" ", "\\040")
        return any(line.split()[4] == name for line in text.splitlines())
    return False


def _find_stages(target: Path) -> list[Path]:
    """Return all stages of a target, the one with the oldest record first."""
    stages = []
    # Stages are next to the target or in it, see `_new_stage`.
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
    return sorted(stages, key=_sort_key)


def _sort_key(stage: Path) -> tuple:
    """Return the time of a stage's record, or 0 if it has none."""
    try:
        return (stage / RECORD).stat().st_mtime_ns, stage.name
    except OSError:
        return 0, stage.name


def _list_files(folder: Path) -> list[str]:
    """List all files and links in a folder, by relative path.

    Temporary files and stages of saves are left out.
    """
    names = []
    for place, folders, files in os.walk(folder):
        at = os.path.relpath(place, folder)
        if at == ".":
            folders[:] = [
                n for n in folders if not re.fullmatch(rf"{re.escape(PREFIX)}-\w{{8}}", n)
            ]
            files = [n for n in files if n not in (RECORD, f"{PREFIX}.lock")]
        # `os.walk` counts links to folders among the folders, but does not follow them.
        files += [n for n in folders if os.path.islink(os.path.join(place, n))]
        names += [os.path.normpath(os.path.join(at, n)) for n in files]
    return sorted(names)


def _write_record(stage: Path, target: Path, keep_others: bool) -> dict:
    """Decide which files a save replaces and removes, and write the record."""
    # False sorts before True: entries come last among the new files, so that they appear last.
    new = sorted(_list_files(stage), key=is_entry)
    for name in new if keep_others else ():
        if _resolve_inside(target, name).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target / name))
    # A save of a model replaces old shards of the model, but keeps an adapter in the same folder.
    kinds = {weights_kind(name) for name in new} - {None}
    old = _list_files(target) if target.is_dir() else []
    replaced = [name for name in old if not keep_others or weights_kind(name) in kinds]
    # An old entry is removed even if a new file has its name: while files are renamed one by one,
    # no load may find the old entry with new shards.
    gone = [name for name in replaced if is_entry(name) or name not in new]
    removed = sorted(gone, key=is_entry, reverse=True)
    record = {"stage": stage.name, "files": new, "remove": removed, "keep_others": keep_others}
    # From here on the save is complete, and is finished even if this process dies.
    with open(stage / RECORD, "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(stage)
    return record


def _read_record(folder: Path) -> dict | None:
    """Read the record in a folder; return None if there is no valid one."""
    try:
        record = read_json(folder / RECORD)
        names = [*record["files"], *record["remove"]]
        stage, _ = record["stage"], record["keep_others"]
        # No file name contains a zero byte; system calls would raise on it later.
        if any(b"\0" in os.fsencode(name) for name in (*names, stage)):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    if os.path.basename(stage) != stage or not stage.startswith(f"{PREFIX}-"):
        return None
    # A forged record must not name files outside of the folder.
    inside = (not os.path.isabs(name) and ".." not in Path(name).parts for name in names)
    return record if all(inside) else None


def _commit_stage(stage: Path, target: Path, record: dict) -> None:
    """Move a complete stage to its place, or finish a move that was interrupted."""
    # After the first rename, an exchange would move back what was renamed already.
    untouched = all(os.path.lexists(stage / name) for name in record["files"])
    if stage.parent == target.parent and untouched and not _is_current_directory(target):
        with suppress(OSError):
            # There is nothing to exchange: a rename suffices.
            if not (target.is_dir() and any(target.iterdir())):
                os.rename(stage, target)
            else:
                if record["keep_others"]:
                    _link_others(target, stage, {*record["files"], *record["remove"]})
                _exchange_folders(stage, target)
    # The record is still in the stage, so there was no exchange.
    if _read_record(stage) is not None:
        _rename_files(stage, target, record)
        (stage / RECORD).unlink()
        shutil.rmtree(stage, ignore_errors=True)
        return
    _sync_folder(target.parent)
    _remove_old(stage, target, record)


def _is_current_directory(folder: Path) -> bool:
    """Return whether this process works in a folder or below it.

    After an exchange, its current directory would be the old folder.
    """
    try:
        return Path(os.getcwd()).is_relative_to(folder)
    except OSError:  # the current directory was deleted
        return False


def _link_others(target: Path, stage: Path, replaced: set[str]) -> None:
    """Hard-link the target's other files into the stage."""
    others = [name for name in _list_files(target) if name not in replaced]
    if len(others) > MOST_LINKS:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
    # Create the folders first, so that links have a place.
    for place, folders, _ in os.walk(target):
        for name in folders:
            old = Path(place, name)
            new = stage / old.relative_to(target)
            if not old.is_symlink() and not new.exists():
                new.mkdir()
                _copy_permissions(old, new)
    for name in others:
        old, new = target / name, _resolve_inside(stage, name)
        if os.path.lexists(new):
            new.unlink()
        # A hard link to a symbolic link is not possible everywhere, so copy the link.
        if old.is_symlink():
            os.symlink(os.readlink(old), new)
        else:
            os.link(old, new)


def _exchange_folders(one: Path, other: Path) -> None:
    """Exchange two folders in one step; raise OSError if the system cannot."""
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


def _remove_old(old: Path | None, target: Path, record: dict) -> None:
    """Remove the old folder after an exchange.

    Files that another process wrote into it at the last moment are moved to the target.
    """
    for name in set(_list_files(old) if old else ()) - {*record["files"], *record["remove"]}:
        before, after = Path(old or "", name), _resolve_inside(target, name)
        # A file that is newer in the target stays.
        if not os.path.lexists(after) or after.lstat().st_mtime_ns < before.lstat().st_mtime_ns:
            after.parent.mkdir(parents=True, exist_ok=True)
            os.replace(before, after)
    (target / RECORD).unlink(missing_ok=True)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _rename_files(stage: Path, target: Path, record: dict) -> None:
    """Move every file of a stage to its place, one by one.

    The old entries are removed first and the new ones created last, so that no load mixes two
    checkpoints.
    """
    target.mkdir(exist_ok=True)
    for name in record["remove"]:
        if name not in record["files"] or os.path.lexists(stage / name):
            _resolve_inside(target, name).unlink(missing_ok=True)
    for name in record["files"]:
        if os.path.lexists(stage / name):
            place = _resolve_inside(target, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            # All shards must be on disk before the entry that refers to them.
            if is_entry(name):
                _sync_folder(target)
            os.replace(_resolve_inside(stage, name), place)
    _sync_folder(target)


def _resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; raise OSError if a link leads out of it."""
    place = folder / name
    if not Path(os.path.realpath(place.parent)).is_relative_to(folder):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(place))
    return place


def _sync_files(folder: Path) -> None:
    """Write all files and folders in a folder to disk."""
    for place, _, files in os.walk(folder):
        for path in (os.path.join(place, name) for name in files):
            if not os.path.islink(path):
                # Windows can sync only a file that is open for writing.
                with open(path, "rb" if os.name == "posix" else "r+b") as file:
                    os.fsync(file.fileno())
        _sync_folder(Path(place))


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk, if the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
