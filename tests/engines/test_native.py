"""Building kernels: once, by one process at a time, and with a plain way where it cannot be done."""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_hyperattn.engines import native
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.functional import hierarchical_attention

#: In a new process: the module alone, without the package round it, which takes seconds to import.
ALONE = f"""
import importlib.util, os
from pathlib import Path
spec = importlib.util.spec_from_file_location("native", {native.__file__!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
"""
ADD = 'extern "C" int add(int a, int b) { return a + b + OFFSET; }\n'


def built_here() -> bool:
    try:
        subprocess.run([*native.find_compiler(), "--version"], capture_output=True, check=True)
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        return False
    return True


needs_compiler = pytest.mark.skipif(not built_here(), reason="no C++ compiler")
posix = pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path / "built"))
    monkeypatch.delenv("HF_HYPERATTN_NATIVE", raising=False)
    native.load_library.cache_clear()
    yield tmp_path
    native.load_library.cache_clear()


def source(place: Path, offset: int) -> Path:
    path = place / "add.cpp"
    path.write_text(ADD.replace("OFFSET", str(offset)))
    return path


@needs_compiler
def test_builds_keeps_and_rebuilds_when_the_source_changes(place, monkeypatch):
    path = source(place, 0)
    library = native.load_library("add", path)
    assert library.add(2, 3) == 5
    (kept,) = (place / "built").glob("*.so")
    monkeypatch.setattr(native, "_compile_into_place", lambda *_: pytest.fail("built again"))
    native.load_library.cache_clear()
    assert native.load_library("add", path).add(2, 3) == 5
    monkeypatch.undo()
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(place / "built"))
    native.load_library.cache_clear()
    assert native.load_library("add", source(place, 10)).add(2, 3) == 15
    assert kept.exists() and len(list((place / "built").glob("*.so"))) == 2


@needs_compiler
def test_processes_that_build_at_once(place):
    """Two start together on an empty directory; all get a library that works, and nothing half-made is left."""
    path = source(place, 1)
    code = f"print(native.load_library('add', Path({str(path)!r})).add(2, 3))"
    runs = [
        subprocess.Popen([sys.executable, "-c", ALONE + code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [run.communicate(timeout=240)[0].strip() for run in runs] == ["6"] * 2
    assert sorted(p.suffix for p in (place / "built").iterdir()) == [".lock", ".sha256", ".so"]


def test_turned_off(place, monkeypatch, caplog):
    monkeypatch.setenv("HF_HYPERATTN_NATIVE", "0")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert native.load_library("add", source(place, 2)) is None
    assert not caplog.records and not (place / "built").exists()
    q = torch.ones(1, 1, 20, 16)
    call = partial(hierarchical_attention, hierarchy=(4,), tying="key", is_causal=True)
    assert call(q, q, q).shape == q.shape
    with pytest.raises(ValueError, match="backend='native' cannot compute.*'auto'"):
        call(q, q, q, backend="native")


@pytest.mark.parametrize("broken", ["compiler", "path", "source", "directory"])
def test_one_line_where_it_cannot_be_built(place, monkeypatch, caplog, broken):
    path = source(place, 3)
    if broken == "source" and not built_here():
        pytest.skip("no C++ compiler")
    if broken == "compiler":
        monkeypatch.setenv("CXX", str(place / "no-such-compiler"))
    elif broken == "path":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(place))
    elif broken == "source":
        path.write_text("this is no C++")
    else:
        (place / "built").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        for name in ("add", "add", "another"):
            assert native.load_library(name, path) is None
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    expected = {
        "compiler": "no C++ compiler",
        "path": "no C++ compiler",
        "source": "error",
        "directory": "no directory",
    }
    assert "add is not compiled" in message and expected[broken] in message
    assert "\n" not in message and len(message) < 400


def test_the_name_says_what_a_library_depends_on(place, monkeypatch):
    name = native.library_name("add", [source(place, 4)])
    assert name == native.library_name("add", [source(place, 4)])
    assert name != native.library_name("add", [source(place, 5)])
    path = source(place, 4)
    for what, value in (("compiler_flags", lambda: ["-O0"]), ("describe_cpu", lambda: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(native, what, value)
            assert name != native.library_name("add", [path]), what


@posix
def test_a_compiler_beside_the_interpreter_is_found(place, monkeypatch):
    """As in an environment that is not activated: a notebook's, or a service's."""
    (place / "bin").mkdir()
    (place / "bin" / "g++").write_text("#!/bin/sh")
    (place / "bin" / "g++").chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(sys, "executable", str(place / "bin" / "python"))
    assert native.find_compiler() == [str(place / "bin" / "g++")]


def test_a_lock_goes_with_its_holder(place):
    """A process that is killed while it builds leaves nothing that others wait for."""
    pytest.importorskip("fcntl")
    code = f"with native.hold_lock(Path({str(place / 'lock')!r})): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", ALONE + code]).returncode == 9
    with native.hold_lock(place / "lock"):
        assert (place / "lock").exists()


def test_only_a_compiler_is_needed(place, monkeypatch):
    """Not ninja, nor torch's headers, nor anything of an activated environment."""
    compiler = (
        shutil.which(native.find_compiler()[0]) if built_here() else pytest.skip("no C++ compiler")
    )
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert native.load_library("add", source(place, 6)).add(2, 3) == 11


# what lies in the cache is checked before it is loaded

DAMAGE = {
    "truncated": lambda library: library.write_bytes(
        library.read_bytes()[: library.stat().st_size // 2]
    ),
    "empty": lambda library: library.write_bytes(b""),
    "garbled": lambda library: library.write_bytes(garbled(library.read_bytes())),
    "of another source": lambda library: shutil.copy(planted(library), library),
    "of another source, with its checksum": lambda library: [
        shutil.copy(planted(library).with_suffix(end), library.with_suffix(end))
        for end in (".so", ".sha256")
    ],
    "without checksum": lambda library: library.with_suffix(".sha256").unlink(),
    "open to others": lambda library: [
        garble(library),
        sign(library),
        library.chmod(0o777),
        library.with_suffix(".sha256").chmod(0o666),
    ],
    "a link": lambda library: [
        library.rename(library.parent.parent / "x.so"),
        garble(library.parent.parent / "x.so"),
        library.symlink_to("../x.so"),
        sign(library),
    ],
    "a pipe for a checksum": lambda library: [
        library.with_suffix(".sha256").unlink(),
        os.mkfifo(library.with_suffix(".sha256")),
    ],
    "another checksum": lambda library: library.with_suffix(".sha256").write_bytes(b"\xff" * 64),
}


def garble(library: Path) -> None:
    library.write_bytes(garbled(library.read_bytes()))


def sign(library: Path) -> None:
    library.with_suffix(".sha256").write_text(native.hash_library(library))


def garbled(content: bytes) -> bytes:
    """The same with other instructions: all that is not in the first 4 kB."""
    return content[:4096] + bytes(255 - b for b in content[4096:])


def planted(library: Path) -> Path:
    """A whole library of another source in the same folder, which would return another number."""
    path = library.parent.parent / "planted.cpp"
    path.write_text(ADD.replace("OFFSET", "1000"))
    return native.build_library("add", [path])


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_library_is_built_anew_and_never_loaded(place, damage):
    path = source(place, 7)
    library = native.build_library("add", [path])
    whole = library.read_bytes()
    # the file that this process has loaded stays whole: it is read once more when the process ends
    shutil.copy2(library, place / "copy")
    os.replace(place / "copy", library)
    DAMAGE[damage](library)
    # in a process of its own: before, some of these killed it
    code = f"print(native.load_library('add', Path({str(path)!r})).add(2, 3))"
    done = subprocess.run(
        [sys.executable, "-c", ALONE + code], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr
    assert library.read_bytes()[:64] == whole[:64] and native.is_intact(library)


def by_others(directory: Path, monkeypatch) -> None:
    monkeypatch.setattr(native.os, "geteuid", lambda: os.stat(directory).st_uid + 1)


NOT_OWN = {
    "writable by all": (lambda d, _: d.chmod(0o777), "can be written to by others"),
    "writable by its group": (lambda d, _: d.chmod(0o770), "can be written to by others"),
    "shared, as /tmp is": (lambda d, _: d.chmod(0o1777), "can be written to by others"),
    "of another user": (by_others, "belongs to another user"),
    "a link": (
        lambda d, _: [d.rename(d.parent / "elsewhere"), d.symlink_to(d.parent / "elsewhere")],
        "is a symbolic link",
    ),
    "a dead link": (
        lambda d, _: [shutil.rmtree(d), d.symlink_to(d.parent / "nowhere")],
        "is a symbolic link",
    ),
}


@posix
@needs_compiler
@pytest.mark.parametrize("case", NOT_OWN)
def test_nothing_is_loaded_from_a_directory_that_others_may_fill(place, monkeypatch, caplog, case):
    path = source(place, 8)
    native.build_library("add", [path])  # a whole library with its checksum lies there
    spoil, message = NOT_OWN[case]
    spoil(place / "built", monkeypatch)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda *_: pytest.fail("loaded"))
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert native.load_library("add", path) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        message in line
        and "HF_HYPERATTN_BUILD_DIR" in line
        and "mode 700" in line
        and "\n" not in line
    )


COMPILERS = {
    "makes nothing": ("exit 0", "made no library"),
    "makes rubbish": ('for last; do :; done; echo rubbish | tee "$last"', "too short|invalid ELF"),
    "says a lot and fails": ("yes rubbish | head -c 1000000; exit 1", "rubbish"),
    "fails to link": (
        "echo 'ld: final link failed: No space left'; echo 'collect2: error: ld returned 1'; exit 1",
        "No space left",
    ),
}


@posix
@pytest.mark.parametrize("case", COMPILERS)
def test_a_compiler_that_compiles_nothing_leaves_nothing(place, monkeypatch, caplog, case):
    script, message = COMPILERS[case]
    (place / "my compiler").write_text(f"#!/bin/sh\n{script}\n")
    (place / "my compiler").chmod(0o755)
    monkeypatch.setenv("CXX", f"'{place / 'my compiler'}' -v")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert native.load_library("add", source(place, 10)) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(message, line) and "\n" not in line and len(line) < 400
    assert not list((place / "built").glob("*.so")) and not list((place / "built").glob("*.sha256"))
    if built_here():  # and a better one is used
        monkeypatch.delenv("CXX")
        native.load_library.cache_clear()
        assert native.load_library("add", source(place, 10)).add(2, 3) == 15


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not shutil.which("mount"), reason="mounts"
)
def test_nothing_is_compiled_where_nothing_may_run(place, monkeypatch, caplog):
    (place / "built").mkdir(mode=0o700)
    if os.system(f"mount -t tmpfs -o noexec,mode=700 tmpfs {place / 'built'} 2>/dev/null") != 0:
        pytest.skip("may not mount")
    try:
        monkeypatch.setattr(native, "_compile_into_place", lambda *_: pytest.fail("compiled"))
        with caplog.at_level(logging.WARNING, "hf_hyperattn"):
            assert native.load_library("add", source(place, 11)) is None
        (line,) = [record.getMessage() for record in caplog.records]
        assert "noexec" in line and "HF_HYPERATTN_BUILD_DIR" in line
    finally:
        os.system(f"umount {place / 'built'}")


@posix
@needs_compiler
def test_the_directory_is_the_users_alone(place):
    old = os.umask(0)
    try:
        native.load_library("add", source(place, 9))
    finally:
        os.umask(old)
    assert (place / "built").stat().st_mode & 0o777 == 0o700
    modes = {p.suffix: p.stat().st_mode & 0o777 for p in (place / "built").iterdir()}
    assert (modes[".so"], modes[".sha256"]) == (0o700, 0o600)


# what a wheel carries

V2, V3, V4 = (native.LEVELS[name][0] for name in ("v2", "v3", "v4"))


@pytest.mark.parametrize(
    "flags, levels",
    [("fpu", []), (V2, ["v2"]), (f"{V2} {V3} {V4}", ["v2", "v3", "v4"]), (f"{V2} {V4}", ["v2"])],
)
def test_a_level_needs_those_before_it(flags, levels, monkeypatch):
    lines = f"processor : 0\nflags : {flags}\n\nprocessor : 1\nflags : {flags}\n"
    monkeypatch.setattr(native, "open", lambda *_: io.StringIO(lines), raising=False)
    for machine, found in (
        ("x86_64", levels),
        ("aarch64", ["armv8"]),
        ("riscv64", []),
    ):  # it may be emulated
        monkeypatch.setattr(native.platform, "machine", lambda machine=machine: machine)
        assert native.read_levels.__wrapped__() == found


def test_the_best_level_of_the_wheel_is_taken(monkeypatch):
    monkeypatch.delenv("HF_HYPERATTN_NATIVE", raising=False)
    monkeypatch.setattr(native, "read_levels", lambda: ["v2", "v3", "v4"])
    for carried, taken in (("v2 v3", "v3"), ("v2 v3 v4 v4_bf16", "v4"), ("v4_bf16", None)):
        libraries = dict.fromkeys(carried.split(), "")
        monkeypatch.setattr(
            native, "read_manifest", lambda libraries=libraries: {"libraries": libraries}
        )
        assert native.choose_level() == taken


@pytest.fixture
def carried(place, monkeypatch):
    """A manifest and one library for v2, which is said to be all that the CPU has: add(2, 3) gives 105."""
    if not built_here():
        pytest.skip("no C++ compiler")
    folder = place / "prebuilt"
    folder.mkdir()
    made = folder / "v2.so"
    path = place / "made.cpp"
    path.write_text(ADD.replace("OFFSET", "100"))
    shutil.copy(native.build_library("made", [path]), made)
    sources = ["engines/cpu/core.cpp", "engines/native.py"]
    said = {
        "names": ["add"],
        "sources": sources,
        "fingerprint": native.hash_sources(sources),
        "scores": {},
    }
    said["libraries"] = {"v2": hashlib.sha256(made.read_bytes()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(said))
    monkeypatch.setattr(native, "PREBUILT", folder)
    monkeypatch.setattr(native, "MANIFEST", folder / "manifest.json")
    monkeypatch.setattr(native, "read_levels", lambda: ["v2"])
    monkeypatch.setattr(native, "_logged", set())
    for cached in (native.load_library, native.read_manifest, native._open_prebuilt):
        cached.cache_clear()
    yield folder
    for cached in (native.load_library, native.read_manifest, native._open_prebuilt):
        cached.cache_clear()


def loaded(place: Path, name: str = "add") -> int:
    library = native.load_library(name, source(place, 3))
    return None if library is None else library.add(2, 3)


def test_what_the_wheel_carries_is_taken_without_a_compiler(place, carried, monkeypatch):
    monkeypatch.setenv("CXX", "/no/compiler")
    assert loaded(place) == 105
    assert loaded(place, "another") is None


@pytest.mark.parametrize(
    "wish, result, tuned", [("v2", 105, "x86-64-v2"), ("build", 8, "native"), ("0", None, "")]
)
def test_which_library_is_taken(place, carried, monkeypatch, wish, result, tuned):
    monkeypatch.setenv("HF_HYPERATTN_NATIVE", wish)
    assert loaded(place) == result
    # what is built beside a library of the wheel is of the same level: both must know registers of one width
    assert not tuned or f"-march={tuned}" in native.compiler_flags()


@pytest.mark.parametrize("wish", ["v3", "v9", "fast"])
def test_a_level_that_is_not_there_is_refused_in_one_line(
    place, carried, monkeypatch, caplog, wish
):
    monkeypatch.setenv("HF_HYPERATTN_NATIVE", wish)
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert loaded(place) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        f"HF_HYPERATTN_NATIVE={wish!r}" in line
        and "allowed: 0, 1, build, v2" in line
        and "\n" not in line
    )
    assert line.endswith("the plain torch way is used")


@pytest.mark.parametrize("what", ["library", "not there", "sources", "manifest", "keys"])
def test_a_damaged_wheel_is_never_loaded(place, carried, monkeypatch, caplog, what):
    if what == "library":
        garble(carried / "v2.so")
    elif what == "not there":
        (carried / "v2.so").unlink()
    elif what in ("manifest", "keys"):
        (carried / "manifest.json").write_text('{"names": ["add"]}'[: 18 if what == "keys" else 9])
    else:
        said = json.loads((carried / "manifest.json").read_text())
        (carried / "manifest.json").write_text(json.dumps(said | {"fingerprint": "0" * 64}))
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert [loaded(place), loaded(place, "another")] == [8, 8]
    (line,) = [record.getMessage() for record in caplog.records]
    expected = {"not there": "No such file", "sources": "are not those"}
    assert (
        expected.get(what, "is damaged") in line
        and line.endswith("kernels are built anew")
        and "\n" not in line
    )


def test_a_source_names_no_path_of_the_installation():
    text = library.write_source(
        "dot+*umbral_on_product", True, "", "1 cone umbral xi squared=True clamp=False"
    )
    assert '#include "engines/cpu/score.h"' in text and str(native.PACKAGE.parent) not in text


@needs_compiler
def test_one_line_says_that_something_is_built(place, monkeypatch, capfd):
    path = source(place, 12)
    native.build_library("add", [path])
    native.build_library("add", [path])
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"hf_hyperattn: compiling add for this CPU, once, into .*/built \.\.\. \d+\.\d s", line
    )
    monkeypatch.setattr(native.logger, "level", logging.ERROR)
    native.logger.manager._clear_cache()
    native.build_library("other", [path])
    native.logger.manager._clear_cache()
    assert not capfd.readouterr().err
