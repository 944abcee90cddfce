"""`hyperattn inject --plan`, `--device` and `--dtype`: what is printed, written and refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from hf_hyperattn.inject import sparse
from hyperattn_cli import main
from hyperattn_cli.commands.inject_plan import format_time
from tests.integration.models import bert

from . import tiny
from .test_inject import prose
from .test_inject_more import FEW

STAGES = ("measuring", "search", "corrections", "held-out text", "timing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "one.txt").write_text(prose(1))
    tiny.save(folder / "model", max_position_embeddings=256)
    bert(max_position_embeddings=256, vocab_size=260).save_pretrained(folder / "bert")
    tiny.tokenizer().save_pretrained(folder / "bert")
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    """Few rules, and a cache of one's own."""
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sparse, "candidates", lambda length: FEW)


def inject(capsys, folder, *more, model="model") -> tuple[int, str, str]:
    line = ["inject", folder / model, "--text", folder / "one.txt", *more]
    return main(list(map(str, line))), *capsys.readouterr()


def test_a_plan_is_one_screen_and_writes_nothing(capsys, folder, tmp_path):
    more = ("--length", "192", "--rows", "32", "--plan", "--output", tmp_path / "out")
    code, out, err = inject(capsys, folder, *more, "--dtype", "bfloat16")
    assert code == 0, out + err
    assert out.count("\n") < 32 and max(map(len, out.splitlines())) < 120
    assert "bfloat16 on cpu" in out and "1 of 2 layers with random weights" in out
    for stage in (*STAGES, "total"):
        assert re.search(rf"^{stage} +\d+ +\d+ s$", out, re.MULTILINE), stage
    sizes = re.findall(r"^[\w, ]+?  +(\d+\.\d\d)$", out, re.MULTILINE)
    assert float(sizes[-1]) == pytest.approx(sum(map(float, sizes[:-1])), abs=0.03)
    assert [p.name for p in tmp_path.iterdir()] == []


def test_the_weights_need_not_be_there(capsys, folder, tmp_path):
    """Only the config and the tokenizer are read."""
    (tmp_path / "model").mkdir()
    for file in (folder / "model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "one.txt").write_text(prose(1))
    code, out, _ = inject(capsys, tmp_path, "--length", "192", "--plan", "--json")
    report = json.loads(out)
    assert code == 0 and report["written"] is None
    plan = report["report"]["plan"]
    assert plan["seconds"] == pytest.approx(sum(plan["stages"].values()))
    assert plan["peak"] == sum(plan["memory"].values())
    assert tuple(plan["stages"]) == tuple(plan["passes"]) == STAGES


def test_a_run_in_bfloat16_writes_it_and_tells_its_stages(capsys, folder, tmp_path):
    """The checkpoint is float32; a file in float32 would only hold rounded numbers."""
    more = ("--length", "192", "--rows", "32", "--pairs", "0.6", "--allow-slower")
    out = tmp_path / "out"
    code, text, err = inject(capsys, folder, *more, "--dtype", "bfloat16", "--output", out)
    assert code == 0, text + err
    dtypes = {t.dtype for t in load_file(out / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    report = json.loads((out / "hyperattn_inject.json").read_text())
    assert report["asked"]["dtype"] == "bfloat16"
    assert set(report["stages"]) == set(STAGES) and min(report["stages"].values()) > 0


def test_auto_is_the_dtype_of_the_checkpoint(capsys, folder):
    code, out, _ = inject(capsys, folder, "--length", "192", "--plan", "--dtype", "auto")
    assert code == 0 and "float32 on cpu" in out


@pytest.mark.parametrize(
    "model, more, said",
    [
        ("model", ["--device", "nowhere"], "--device nowhere: not usable here"),
        ("model", ["--device", "cpu", "--device-map", "auto"], "says nothing with --device-map"),
        ("model", ["--plan", "--device-map", "auto"], "leave out --device-map"),
        (
            "bert",
            ["--plan", "--length", "64"],
            "--plan has no effect on an encoder, whose run takes",
        ),
        (
            "bert",
            ["--mechanism", "collaborative", "--rank", "8", "--plan"],
            "--plan says nothing for --mechanism collaborative",
        ),
        (
            "model",
            ["--mechanism", "collaborative", "--rank", "8", "--dtype", "bfloat16"],
            "--dtype says nothing for --mechanism collaborative",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(capsys, folder, model, more, said):
    code, out, err = inject(capsys, folder, *more, model=model)
    assert code == 2 and not out and err.count("\n") == 1 and said in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused_before_anything_is_read(capsys, folder, tmp_path):
    more = ("--mechanism", "sparse", "--device", "cuda")
    code, out, err = inject(capsys, tmp_path, *more, model="none")
    assert code == 2 and not out and err.count("\n") == 1
    assert "--device cuda: not usable here" in err and "allowed: cpu, cuda" in err


def test_a_layer_that_does_not_fit_is_told(capsys, folder, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hyperattn_cli.commands.inject_plan.plan_injection", fail)
    code, _, err = inject(capsys, folder, "--length", "192", "--plan")
    assert code == 2 and "one layer does not fit into the memory of cpu" in err


@pytest.mark.parametrize(
    "seconds, said", [(89, "89 s"), (91, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_times_are_short(seconds, said):
    assert format_time(seconds) == said
