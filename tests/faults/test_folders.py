"""`replace_folder` is killed before each of its changes of the file system, and so is what finishes it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hf_hyperattn.utils import folders
from hf_hyperattn.utils.files import PREFIX, locked, write_atomically
from hf_hyperattn.utils.folders import (
    is_entry,
    is_interrupted,
    recover,
    replace_folder,
    weights_kind,
)
from hub_cards import beside
from hyperattn_cli import main
from tests.oracles.marks import first_always

from .killing import killed, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

SINGLE = ("config.json", "model.safetensors")
SHARDS = (
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)
OTHERS = {"notes.txt": "mine", "sub/optimizer.pt": "state", "model.fp16.safetensors": "a variant"}


def fill(folder: Path, names, text: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def no_exchange(monkeypatch) -> None:
    def fail(*_):
        raise OSError("no exchange here")

    monkeypatch.setattr(folders, "_exchange_folders", fail)


WAYS = {
    "exchange": lambda monkeypatch: None,
    "renames": no_exchange,
    "inside": lambda monkeypatch: monkeypatch.setattr(folders, "_is_mount", lambda folder: True),
}


def save(target: Path, names, text: str = "new", **options) -> None:
    with replace_folder(target, **options) as stage:
        fill(stage, names, text)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def loaded(folder: Path) -> str | None:
    """What a load finds, "old", "new" or None where it fails; as Transformers looks for weights."""
    if (folder / SINGLE[1]).exists():
        used = SINGLE
    elif (folder / SHARDS[3]).exists():
        used = SHARDS
    else:
        return None
    found = {(folder / name).read_text() for name in used}
    assert len(found) == 1, f"a mixture: {contents(folder)}"
    return found.pop()


@pytest.mark.parametrize(
    "way, old, new",
    [
        ("exchange", SINGLE, SINGLE),
        ("exchange", SHARDS, SINGLE),
        ("renames", SINGLE, SHARDS),
        ("inside", SHARDS, SINGLE),
        ("exchange", (), SINGLE),
    ],
)
def test_killed_before_every_change(way, old, new, tmp_path, monkeypatch):
    WAYS[way](monkeypatch)
    outcomes = set()
    for kill_at in range(1, 200):
        target = tmp_path / str(kill_at) / "model"
        if old:
            fill(target, old, "old")
            fill(target, OTHERS, "")
            for name, text in OTHERS.items():
                (target / name).write_text(text)
        if not killed(save, target, new, kill_at=kill_at):
            break
        found = loaded(target) if target.exists() else None
        outcomes.add(found)
        assert old == () or OTHERS.items() <= contents(target).items()
        if found is None and old:
            assert way != "exchange" and is_interrupted(target)
        if kill_at % 2:  # by the next save, or by the command
            save(target, new, "newer")
        else:
            with suppress(FileNotFoundError):  # the first save, killed before it had made anything
                recover(target)
            assert not target.exists() or loaded(target) in (
                ("new",) if found is None else (found, "new")
            )
        if target.exists():
            expected = {
                **dict.fromkeys(new if loaded(target) != "old" else old),
                **(OTHERS if old else {}),
            }
            assert contents(target).keys() == expected.keys()
            assert [p.name for p in target.parent.iterdir() if p.name.startswith(PREFIX)] == []
            assert kill_at % 2 == 0 or loaded(target) == "newer"
    else:
        pytest.fail("never came to its end")
    assert loaded(target) == "new" and kill_at > 10
    assert outcomes == (
        {None, "new"} if not old else {"old", "new"} if way == "exchange" else {"old", "new", None}
    )


@first_always("way", list(WAYS))
def test_what_finishes_a_save_is_killed_too(way, tmp_path, monkeypatch):
    WAYS[way](monkeypatch)
    pairs = 0
    for first in range(9, 60, 5):
        for second in range(1, 60, 3):
            target = tmp_path / f"{first}-{second}" / "model"
            fill(target, SINGLE, "old")
            fill(target, ["notes.txt"], "mine")
            if not killed(save, target, SHARDS, kill_at=first) or not killed(
                recover, target, kill_at=second
            ):
                break
            pairs += 1
            assert loaded(target) or way != "exchange"
            recover(target)
            assert loaded(target) in ("old", "new") and contents(target)["notes.txt"] == "mine"
            assert [p.name for p in target.parent.iterdir()] == ["model"]
    assert pairs > 8


def test_renames_that_were_begun_are_not_ended_by_an_exchange(tmp_path, monkeypatch):
    for kill_at in range(10, 60):
        target = tmp_path / str(kill_at) / "model"
        fill(target, SINGLE, "old")
        with monkeypatch.context() as patch:
            no_exchange(patch)
            if not killed(save, target, SHARDS, kill_at=kill_at):
                break
        recover(target)
        assert contents(target) in (dict.fromkeys(SINGLE, "old"), dict.fromkeys(SHARDS, "new"))


@pytest.mark.parametrize("way", WAYS)
def test_all_else_goes_where_nothing_is_kept(way, tmp_path, monkeypatch):
    WAYS[way](monkeypatch)
    target = tmp_path / "model"
    fill(target, (*SHARDS, *OTHERS), "old")
    save(target, SINGLE, keep_others=False)
    assert contents(target) == dict.fromkeys(SINGLE, "new") and len(list(tmp_path.iterdir())) == 1


def test_places_where_folders_are_not_exchanged(tmp_path, monkeypatch):
    target = tmp_path / "model"
    fill(target, SINGLE, "old")
    inode = target.stat().st_ino
    monkeypatch.chdir(target)
    save(Path("."), SHARDS)
    assert target.stat().st_ino == inode and loaded(target) == "new" and os.listdir(".")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("model")
    fill(target, ["sub/a"], "x")
    (target / "to_sub").symlink_to("sub")
    (target / "empty").mkdir()
    target.chmod(0o2750)
    save(Path("link"), SINGLE, "newer")
    assert (
        (tmp_path / "link").is_symlink()
        and loaded(target) == "newer"
        and target.stat().st_ino != inode
    )
    assert (target / "to_sub" / "a").read_text() == "x" and (target / "to_sub").is_symlink()
    assert (target / "empty").is_dir() and target.stat().st_mode & 0o7777 == 0o2750


def test_what_others_put_there_meanwhile_stays(tmp_path, monkeypatch):
    """Before the exchange, and in the moment between the last look at the folder and the exchange."""
    target, plain = tmp_path / "model", folders._exchange_folders
    fill(target, SINGLE, "old")

    def exchange(*names):
        fill(target, ["late/log.txt"], "late")
        plain(*names)

    monkeypatch.setattr(folders, "_exchange_folders", exchange)
    with replace_folder(target) as stage:
        fill(stage, SINGLE, "new")
        fill(target, ["early.txt"], "early")
    assert contents(target) == dict.fromkeys(SINGLE, "new") | {
        "early.txt": "early",
        "late/log.txt": "late",
    }


def test_an_error_in_the_block_changes_nothing(tmp_path):
    target = tmp_path / "model"
    fill(target, SINGLE, "old")
    for kind in (OSError, KeyboardInterrupt):
        with pytest.raises(kind), replace_folder(target) as stage:
            fill(stage, SHARDS, "new")
            raise kind
    assert contents(target) == dict.fromkeys(SINGLE, "old") and len(list(tmp_path.iterdir())) == 1


def test_a_save_that_cannot_reach_its_place_names_the_command(tmp_path, monkeypatch, capsys):
    target = tmp_path / "model"
    fill(target, SINGLE, "old")
    no_exchange(monkeypatch)
    plain = os.replace

    def replace(old, new):
        if Path(new) == target / "model.safetensors":
            raise PermissionError(13, "in use", str(new))
        plain(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "replace", replace)
        with pytest.raises(
            OSError, match=f"in use.*new files are whole in.*hyperattn recover {target}"
        ):
            save(target, SINGLE)
    assert loaded(target) is None
    assert main(["recover", str(target)]) == 0
    assert "brought to its end" in capsys.readouterr().out and loaded(target) == "new"
    assert main(["recover", str(target)]) == 0 and "nothing to recover" in capsys.readouterr().out
    for nowhere in (tmp_path / "no" / "where", tmp_path / "no"):
        assert main(["recover", str(nowhere)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("hyperattn recover: error: ") and error.count("\n") == 1


def test_a_later_save_of_somebody_else_is_not_undone(tmp_path, monkeypatch, capsys):
    no_exchange(monkeypatch)
    target = tmp_path / "model"
    fill(target, SINGLE, "old")
    kill_at = next(
        n
        for n in range(5, 60)
        if killed(save, target, SINGLE, kill_at=n) and is_interrupted(target)
    )
    assert kill_at
    time.sleep(0.02)
    fill(target, SINGLE, "by hand")
    assert main(["recover", str(target)]) == 2
    assert "may be older than" in capsys.readouterr().err and loaded(target) == "by hand"
    save(target, SINGLE)
    assert loaded(target) == "new" and len(list(tmp_path.iterdir())) == 1


def test_what_version_0_1_0_left_is_not_deleted_while_it_is_the_only_copy(tmp_path):
    target = tmp_path / "model"
    fill(target, ["config.json"], "new")
    fill(target / f"{PREFIX}-abc_1234", SINGLE, "new")
    with pytest.raises(OSError, match="holds an interrupted save"):
        recover(target)
    with pytest.raises(RuntimeError), replace_folder(target):
        raise RuntimeError
    assert contents(target / f"{PREFIX}-abc_1234")
    save(target, SINGLE, "newer")
    assert contents(target) == dict.fromkeys(SINGLE, "newer")


def test_a_record_that_leads_elsewhere_is_not_followed(tmp_path):
    target, victim = tmp_path / "model", tmp_path / "victim"
    victim.write_text("mine")
    fill(target, SINGLE, "old")
    for n, name in enumerate(["../victim", str(victim), "link/victim"]):
        stage = target / f"{PREFIX}-0000000{n}"
        fill(stage, [name.replace("../", "").lstrip("/")], "theirs")
        record = {"stage": stage.name, "files": [name], "remove": [name], "keep_others": True}
        (stage / folders.RECORD).write_text(json.dumps(record))
    (target / "link").symlink_to("..")
    save(target, SINGLE)
    assert victim.read_text() == "mine" and loaded(target) == "new"


def test_a_stage_whose_links_lead_elsewhere_takes_no_file_from_there(tmp_path):
    target, victim = tmp_path / "model", tmp_path / "victim" / "key"
    fill(victim.parent, ["key"], "mine")
    fill(target, SINGLE, "old")
    stage = target / f"{PREFIX}-00000000"
    stage.mkdir()
    (stage / "link").symlink_to(victim.parent)
    record = {"stage": stage.name, "files": ["link/key"], "remove": [], "keep_others": True}
    (stage / folders.RECORD).write_text(json.dumps(record))
    with pytest.raises(OSError, match="link/key"):
        recover(target)
    save(target, SINGLE)
    assert victim.read_text() == "mine" and contents(target) == dict.fromkeys(SINGLE, "new")


RECORDS = {
    "nested": lambda path: path.write_text("[" * 200_000),
    "a pipe": os.mkfifo,
    "names with a zero byte": lambda path: path.write_text(
        json.dumps(
            {"stage": f"{PREFIX}-x", "files": ["a\0b"], "remove": ["a\0b"], "keep_others": True}
        )
    ),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_nobody_wrote_stops_no_save(case, tmp_path):
    target = tmp_path / "model"
    fill(target, SINGLE, "old")
    RECORDS[case](target / folders.RECORD)
    (target / f"{PREFIX}-00000000").mkdir()
    RECORDS[case](target / f"{PREFIX}-00000000" / folders.RECORD)
    recover(target)
    save(target, SINGLE)
    assert loaded(target) == "new" and not is_interrupted(target)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_files_in_between_are_never_written_through(planted, tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    fill(tmp_path, ["victim"], "mine")
    folder.mkdir()
    plant = (lambda path: path.symlink_to(victim)) if planted == "link" else os.mkfifo
    for draft in (f"{PREFIX}-text", f".card.{os.getpid()}.tmp"):
        plant(folder / draft)
    write_atomically(folder / "text", "new")
    beside.replace_file(folder / "card", b"new")
    assert contents(tmp_path) == {"victim": "mine", "folder/text": "new", "folder/card": "new"}
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_a_lock_is_no_link(tmp_path):
    (tmp_path / f"{PREFIX}-model.lock").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "model").mkdir()
    save(tmp_path / "model", SINGLE)
    assert loaded(tmp_path / "model") == "new" and not (tmp_path / "elsewhere").exists()


def test_a_folder_in_the_place_of_a_file_is_told_before_anything_changes(tmp_path):
    target = tmp_path / "model"
    fill(target, ["config.json", "model.safetensors/notes"], "old")
    with pytest.raises(OSError, match="Is a directory: .*model/model.safetensors"):
        save(target, SINGLE)
    assert contents(target) == {"config.json": "old", "model.safetensors/notes": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("there", [(), SINGLE], ids=["empty", "a checkpoint"])
def test_a_process_still_stands_in_the_folder_it_saved_into(there, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    fill(tmp_path / "model", there, "old")
    monkeypatch.chdir(tmp_path / "model")
    save(Path("."), SINGLE)
    save(Path("."), SHARDS)
    assert loaded(Path(".")) == "new" and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_circle_of_links_is_told_before_anything_is_written(tmp_path):
    (tmp_path / "model").symlink_to("model")
    with pytest.raises(OSError, match="Not a directory"):
        save(tmp_path / "model", SINGLE)
    assert os.listdir(tmp_path) == ["model"]


def test_two_processes_save_to_one_folder(tmp_path):
    target = tmp_path / "model"

    def many(text: str, names) -> None:
        for _ in range(40):
            save(target, names, text)

    children = [start(many, str(n), (SINGLE, SHARDS)[n % 2]) for n in range(4)]
    seen, ends = set(), []
    while len(ends) < len(children):
        done, status = os.waitpid(-1, os.WNOHANG)
        if done in children:
            ends.append(status)
        if target.exists():
            names = set(os.listdir(target))
            seen.add(tuple(sorted(n for n in names if not n.startswith(PREFIX))))
        time.sleep(0.001)
    assert ends == [0] * 4 and len({p.read_text() for p in target.iterdir()}) == 1
    assert seen <= {tuple(sorted(SINGLE)), tuple(sorted(SHARDS)), ()}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_living_save_is_left_alone(tmp_path, capsys):
    target = tmp_path / "model"
    with replace_folder(target) as stage:
        fill(stage, SINGLE, "first")
        save(target, SHARDS, "second")
        assert stage.exists() and main(["recover", str(target)]) == 2
        assert "a process is saving" in capsys.readouterr().err
    assert loaded(target) == "first"


def test_the_lock_is_passed_on_and_leaves_nothing(tmp_path):
    path, order = tmp_path / "file", []

    def hold(n: int) -> None:
        for _ in range(20):
            with locked(path):
                order.append(n)
                time.sleep(0.0005)
                order.append(n)

    threads = [threading.Thread(target=hold, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[::2] == order[1::2] and len(order) == 160 and list(tmp_path.iterdir()) == []


def test_a_text_file_is_killed_before_every_change(tmp_path):
    path = tmp_path / "config.json"
    for kill_at in range(1, 20):
        path.write_text("old")
        if not killed(write_atomically, path, "new", kill_at=kill_at):
            break
        assert path.read_text() in ("old", "new")
        write_atomically(path, "newer")
        assert contents(tmp_path) == {"config.json": "newer"}
    assert kill_at > 3


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not shutil.which("mount"), reason="mounts"
)
def test_a_mount_point_is_saved_into(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    if os.system(f"mount -t tmpfs -o size=200k tmpfs {target} 2>/dev/null") != 0:
        pytest.skip("may not mount")
    try:
        fill(target, SINGLE, "old")
        save(target, SHARDS)
        assert loaded(target) == "new" and len(list(target.iterdir())) == 4
        with (
            pytest.raises(OSError, match=f"No space left.*{target}"),
            replace_folder(target) as stage,
        ):
            (stage / "model.safetensors").write_bytes(bytes(300_000))
        assert loaded(target) == "new" and len(list(target.iterdir())) == 4
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
    finally:
        os.system(f"umount {target}")


def test_names_of_weights():
    assert weights_kind("model-00001-of-00002.safetensors") == weights_kind(
        "model.safetensors.index.json"
    )
    assert (
        weights_kind("a/adapter_model.bin")
        == weights_kind("a/adapter_model.safetensors")
        != weights_kind("model.bin")
    )
    assert weights_kind("model.fp16.safetensors") == weights_kind(
        "model.safetensors.index.fp16.json"
    )
    assert is_entry("a/adapter_model.safetensors") and not is_entry(
        "model-00001-of-00002.safetensors"
    )
