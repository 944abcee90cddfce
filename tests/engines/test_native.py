"""Building kernels: once, by one process at a time, and with a plain way where it cannot be done."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_hyperattn.engines import native
from hf_hyperattn.mechanisms.hsa.key import key_tied

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
    from torch.utils import cpp_extension

    try:
        cpp_extension.verify_ninja_availability()
        subprocess.run([cpp_extension.get_cxx_compiler(), "--version"], capture_output=True, check=True)
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        return False
    return True


needs_compiler = pytest.mark.skipif(not built_here(), reason="no C++ compiler or no ninja")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path / "built"))
    monkeypatch.delenv("HF_HYPERATTN_NATIVE", raising=False)
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def source(place: Path, offset: int) -> Path:
    path = place / "add.cpp"
    path.write_text(ADD.replace("OFFSET", str(offset)))
    return path


@needs_compiler
def test_builds_keeps_and_rebuilds_when_the_source_changes(place, monkeypatch):
    path = source(place, 0)
    library = native.load("add", path)
    assert library.add(2, 3) == 5
    (kept,) = (place / "built").glob("*.so")
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built again"))
    native.load.cache_clear()
    assert native.load("add", path).add(2, 3) == 5
    monkeypatch.undo()
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(place / "built"))
    native.load.cache_clear()
    assert native.load("add", source(place, 10)).add(2, 3) == 15
    assert kept.exists() and len(list((place / "built").glob("*.so"))) == 2


@needs_compiler
def test_processes_that_build_at_once(place):
    """Two start together on an empty directory; all get a library that works, and nothing half-made is left."""
    path = source(place, 1)
    code = f"print(native.load('add', Path({str(path)!r})).add(2, 3))"
    runs = [
        subprocess.Popen([sys.executable, "-c", ALONE + code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [run.communicate(timeout=240)[0].strip() for run in runs] == ["6"] * 2
    assert sorted(p.suffix for p in (place / "built").iterdir()) == [".lock", ".so"]


def test_turned_off(place, monkeypatch, caplog):
    monkeypatch.setenv("HF_HYPERATTN_NATIVE", "0")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert native.load("add", source(place, 2)) is None
    assert not caplog.records and not (place / "built").exists()
    q = torch.ones(1, 1, 20, 16)
    assert key_tied(q, q, q, (4,), is_causal=True)[0].shape == q.shape
    with pytest.raises(ValueError, match="backend='native' cannot compute.*'auto'"):
        key_tied(q, q, q, (4,), is_causal=True, backend="native")


@pytest.mark.parametrize("broken", ["compiler", "ninja", "source", "directory"])
def test_one_line_where_it_cannot_be_built(place, monkeypatch, caplog, broken):
    path = source(place, 3)
    if broken == "compiler":
        monkeypatch.setenv("CXX", str(place / "no-such-compiler"))
    elif broken == "ninja":
        monkeypatch.setenv("PATH", "")
    elif broken == "source":
        path.write_text("this is no C++")
    else:
        (place / "built").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert native.load("add", path) is None
        assert native.load("add", path) is None
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    expected = {"compiler": "no C++ compiler", "ninja": "no ninja", "source": "error", "directory": "built"}
    assert "add is not compiled" in message and expected[broken] in message
    assert "\n" not in message and len(message) < 400


def test_the_name_says_what_a_library_depends_on(place, monkeypatch):
    name = native.library_name("add", [source(place, 4)])
    assert name == native.library_name("add", [source(place, 4)])
    assert name != native.library_name("add", [source(place, 5)])
    path = source(place, 4)
    for what, value in (("flags", lambda: ["-O0"]), ("cpu", lambda: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(native, what, value)
            assert name != native.library_name("add", [path]), what


def test_a_lock_goes_with_its_holder(place):
    """A process that is killed while it builds leaves nothing that others wait for."""
    pytest.importorskip("fcntl")
    code = f"with native.locked(Path({str(place / 'lock')!r})): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", ALONE + code]).returncode == 9
    with native.locked(place / "lock"):
        assert (place / "lock").exists()
