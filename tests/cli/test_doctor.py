"""`hyperattn doctor`: what it says here, and where something is missing."""

import json

import pytest

from hf_hyperattn.engines import native
from hf_hyperattn.engines.cpu import library
from hyperattn_cli import main

NAMES = "hf-hyperattn|python|cpu|gpu|compiler|kernels|cache|cone attention|hsa and sparse|missing".split(
    "|"
)


def test_ten_lines_and_the_same_as_json(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == NAMES and len(lines) == 10
    assert all(
        line.startswith(name) and line.endswith(str(report[name]))
        for name, line in zip(NAMES, lines)
    )
    engine = "cpu" if library.core() is not None else "blockwise"
    assert report["cone attention"].startswith(engine)


@pytest.mark.parametrize("case", ["off", "no compiler", "unknown"])
def test_what_is_missing_is_named(monkeypatch, tmp_path, capsys, case):
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path / "built"))
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv(
        "HF_HYPERATTN_NATIVE", {"off": "0", "no compiler": "1", "unknown": "v9"}[case]
    )
    monkeypatch.setattr(native, "_logged", set())
    monkeypatch.setattr(library, "TABLES", {})
    monkeypatch.setattr(library, "CORES", {})
    native.load_library.cache_clear()
    try:
        assert main(["doctor", "--json"]) == 0
    finally:
        native.load_library.cache_clear()
    report = json.loads(capsys.readouterr().out)
    assert (
        report["cone attention"].startswith("blockwise")
        and report["hsa and sparse"] == "plain PyTorch"
    )
    expected = {
        "off": "turned off by HF_HYPERATTN_NATIVE=0",
        "no compiler": "no prebuilt ones",
        "unknown": "allowed: 0",
    }
    assert expected[case] in report["kernels"]
    assert "compiled kernels" in report["missing"] and "C++ compiler" in report["missing"]
