"""The script for the first minutes on a GPU runs whole on a CPU: a typing error must not cost a minute there."""

import json

import gpu
import pytest


def test_every_group_runs_and_is_right(tmp_path, capsys):
    path = tmp_path / "rows.json"
    words = ["--device", "cpu", "--seconds", "0.001", "--json", str(path)]
    assert gpu.main(words) == 0, capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert {row["group"] for row in rows} == set(gpu.GROUPS)
    assert all(row["error"] < 1e-5 for row in rows if row["group"] in ("forward", "sparse", "hsa"))
    assert {row["what"] for row in rows if row["group"] == "training"} == set(gpu.SCORES)


def test_a_failure_is_a_row_and_costs_no_other(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise RuntimeError("out of registers")

    monkeypatch.setitem(gpu.SCORES, "umbral", fail)
    path = tmp_path / "rows.json"
    words = ["--device", "cpu", "--seconds", "0.001", "--json", str(path), "--groups", "decoding"]
    assert gpu.main(words) == 1
    first, *others = json.loads(path.read_text())["rows"]
    assert first["failed"] == "RuntimeError: out of registers"
    assert len(others) == len(gpu.SCORES) - 1 and not any("failed" in row for row in others)


def test_without_a_gpu_the_way_out_is_named(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cpu shows that the script runs" in capsys.readouterr().err
