"""The code of the benchmarks on tiny sizes: what a row says, and that none says a time for a wrong result."""

import contextlib
import dataclasses
import json
import re

import bars
import common
import frontier
import hsa_frontier
import pytest
import run
import torch
from speed import compare, measure, page
from speed.cases import Case, Job, jobs, sweep
from speed.operations import OPERATIONS
from speed.store import Store

from tests.oracles.marks import first_always

WAYS = [
    (name, way)
    for name, operation in OPERATIONS.items()
    for way in operation.ways()
    if way != "flex"
]
TINY = Case("training", 24, 1, 2, 8)


@first_always("kind", ["training", "forward", "decode"])
@pytest.mark.parametrize("name, way", WAYS, ids=[" ".join(pair) for pair in WAYS])
def test_every_way_matches_the_definition_and_gets_a_time(name, way, kind):
    case = dataclasses.replace(TINY, kind=kind, causal=kind == "training")
    row = measure.measure(Job(name, way, case), seconds=0.0)
    assert row["status"] == "ok", row
    assert row["error"] <= 5e-5 and (row["gradient_error"] or 0.0) <= 1e-4
    assert 0 < row["low"] <= row["q1"] <= row["median"] <= row["q3"] <= row["high"]
    assert row["rounds"] == measure.FEWEST_ROUNDS and row["seconds"] > 0


@pytest.mark.parametrize("spoilt", ["output", "gradient", "nan"])
def test_a_result_that_is_wrong_gets_no_time(monkeypatch, spoilt):
    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * {"output": 1.01, "nan": torch.nan}.get(spoilt, 1.0)

        @staticmethod
        def backward(ctx, grad):
            return grad * (1.01 if spoilt == "gradient" else 1.0)

    right = OPERATIONS["dot"]
    wrong = dataclasses.replace(
        right, peers={"wrong": lambda q, k, v, c: Spoilt.apply(right.run("eager", q, k, v, c))}
    )
    monkeypatch.setitem(OPERATIONS, "dot", wrong)
    monkeypatch.setitem(wrong.peers, "eager", right.peers["eager"])
    row = measure.measure(Job("dot", "wrong", TINY), seconds=0.0)
    assert row["status"] == "mismatch" and "median" not in row


@pytest.mark.parametrize(
    "error, status",
    [
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "out of memory",
        ),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (ValueError("backend='x' cannot\nmore"), "refused: backend='x' cannot"),
        (RuntimeError("other"), "RuntimeError: other"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_goes_wrong_is_a_row(monkeypatch, error, status):
    def fails(*_):
        raise error

    monkeypatch.setattr(measure, "errors", fails)
    assert measure.measure(Job("dot", "eager", TINY))["status"] == status


def test_what_would_take_too_much_is_not_run(monkeypatch):
    monkeypatch.setattr(measure, "PROBED", 2**10)
    job = Job("umbral", "naive cdist", Case("forward", 4096, 1, 2, 8))
    assert (
        "not run: would take up to" in measure.measure(job, memory_gib=1e-6, longest=1e9)["status"]
    )
    assert re.fullmatch(r"not run: would take \d+ s", measure.measure(job, longest=1e-9)["status"])


def test_what_a_quarter_refuses_is_told_for_the_whole(monkeypatch):
    monkeypatch.setattr(measure, "PROBED", 2**18)
    monkeypatch.setattr(measure, "sample", lambda *_: 0.5)  # of the smallest, of 256 tokens
    job = Job("umbral", "naive cdist", Case("forward", 4096, 1, 2, 8))
    assert measure.too_much(job, memory_gib=64, longest=127) == "not run: would take 128 s"


def test_a_worker_that_is_ended_is_a_row_and_work_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "one", _ends_at_decode)
    monkeypatch.setattr(run, "ProcessPoolExecutor", _forked)
    todo = [
        Job("dot", "eager", dataclasses.replace(TINY, kind=kind)) for kind in ("decode", "training")
    ]
    store = Store(tmp_path / "r.json")
    assert run.work(todo, store, run.parser().parse_args(["--seconds", "0"]))
    found = [store.rows[job.key]["status"] for job in todo]
    assert found == ["out of memory (the process was ended)", "ok"]


def _ends_at_decode(job, args):
    import os

    if job.case.kind == "decode":
        os._exit(9)
    return measure.measure(job, args.seconds)


def _forked(workers, _context, initializer):
    """A worker that has what the test replaced; a spawned one would import everything anew."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer)


def test_a_file_is_gone_on_with_and_belongs_to_one_machine(tmp_path):
    file = tmp_path / "r.json"
    Store(file).add({"key": "a", "status": "ok"})
    Store(file).add({"key": "b", "status": "ok"})
    assert list(Store(file).rows) == ["a", "b"] and not Store(file, fresh=True).rows
    result = json.loads(file.read_text())
    result["environment"]["chip"] = "another"
    file.write_text(json.dumps(result))
    with pytest.raises(ValueError, match="another chip"):
        Store(file)


def test_jobs_begin_with_the_table_and_come_once():
    ways = {name: operation.ways() for name, operation in OPERATIONS.items()}
    models = {"SmolLM2-135M": ["cone"], "MiniLM-L6": ["cone"]}
    found = jobs(ways, models, "cpu", full=False)
    assert found[0].subject == "umbral" and found[0].way == ways["umbral"][0]
    assert len({job.key for job in found}) == len(found) == len(set(found))
    full = jobs(ways, models, "cpu", full=True)
    assert full[: len(found)] == found
    for name, wanted in {
        "length": {512, 65536},
        "dim": {16, 256},
        "threads": {1, 2},
        "causal": {True, False},
        "dtype": {"float32", "bfloat16"},
        "kind": {"prefill", "decode"},
    }.items():
        assert wanted <= {getattr(job.case, name) for job in full}, name
    assert all(job.way != "flex" or job.case.kind == "forward" for job in full)
    gpu = jobs(ways, models, "cuda", full=True)
    assert {job.case.device for job in gpu} == {"cuda"}


def test_limits_hold_for_the_way_that_should_win_at_the_sizes_of_the_table():
    umbral = OPERATIONS["umbral"]
    best, case = umbral.ways()[0], Case("training", 2048)
    assert umbral.limit(best, case) == 1.05 and umbral.limit("naive cdist", case) is None
    assert umbral.limit(best, dataclasses.replace(case, dtype="bfloat16")) == 1.20
    for other in ({"length": 256}, {"dim": 128}, {"length": 16384}, {"dtype": "float16"}):
        assert umbral.limit(best, dataclasses.replace(case, **other)) is None
    assert (
        umbral.limit(best, Case("decode", 8192)) == 1.0
        and umbral.limit(best, Case("decode", 512)) is None
    )


def rows(**medians):
    """Rows with quartiles 2 % around their medians; a text is a status."""
    return {
        key: {"status": "ok", "median": m, "q1": 0.98 * m, "q3": 1.02 * m}
        if isinstance(m, float)
        else {"status": m}
        for key, m in medians.items()
    }


def test_a_slowdown_is_told_and_noise_is_not():
    base = rows(
        same=1.0, noise=1.0, slower=1.0, faster=1.0, gone=1.0, broken=1.0, was_broken="mismatch"
    )
    new = rows(
        same=1.0,
        noise=1.03,
        slower=1.2,
        faster=0.5,
        broken="out of memory",
        was_broken=2.0,
        fresh=9.0,
    )
    found = compare.slowdowns(base, new)
    assert [line.split(":")[0] for line in found] == ["slower", "broken"]
    wide = {"slower": base["slower"] | {"q3": 1.3}}
    assert not compare.slowdowns(wide, new)
    assert compare.summary(base, new)[1] and not compare.summary(base, base)[1]


def test_the_command_measures_goes_on_and_compares(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "ProcessPoolExecutor", _forked)
    file, base = tmp_path / "new.json", tmp_path / "base.json"
    words = [
        "--operations",
        "dot",
        "--lengths",
        "32",
        "--ways",
        "eager",
        "--seconds",
        "0",
        "--json",
        str(file),
    ]
    assert run.main([*words, "--minutes", "0"]) == 0 and "2 of 2 left" in capsys.readouterr().out
    assert run.main(words) == 0 and "all is done" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert len(result["rows"]) == 2 and result["environment"]["torch"] == torch.__version__
    for row in result["rows"].values():
        assert row["commit"] is not None and row["date"]
        row.update({name: row[name] / 100 for name in ("median", "q1", "q3")})
    base.write_text(json.dumps(result))
    assert run.main([*words, "--base", str(base)]) == 1
    assert "2 rows in both files, 2 slower" in capsys.readouterr().out
    assert run.main([*words, "--base", str(file)]) == 0


def test_tables_hold_what_was_measured_and_mark_what_is_missed():
    ways = {name: operation.ways()[:1] for name, operation in OPERATIONS.items()}
    found = {}
    for index, job in enumerate(sweep(ways, {"threads": (1, 2)}, kinds=("forward", "training"))):
        found[job.key] = {
            "status": "ok",
            "median": 1.0 + index / 1e3,
            "q1": 1.0,
            "q3": 1.1,
            "way_mib": 7.0,
            "error": 1e-6,
            "way": job.way,
            "limit": OPERATIONS[job.subject].limit(job.way, job.case),
            "commit": "abc",
            "date": "2026-01-01",
        }
    missed = next(
        key for key in found if key.startswith("umbral") and "1x8x2048x64 full fp32 1t" in key
    )
    found[missed].update(median=1.06)
    broken = next(key for key in found if key.startswith("dot"))
    found[broken] = {
        "status": "out of memory",
        "way": "sdpa",
        "commit": "abc",
        "date": "2026-01-01",
    }
    where = {"chip": "some chip", "torch": "2", "transformers": "5", "python": "3"}
    text = page.section({"environment": where, "rows": found})
    assert "1.06! (1.00-1.10)" in text and "## some chip" in text and "out of memory" in text
    assert "1.05!" not in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


X86 = "model name : AMD EPYC\ncpu family : 25\nmodel : 17\nflags : fma avx2 avx512f avx512_bf16\n"
ARM = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\nFeatures : fp asimd\n"


@pytest.mark.parametrize(
    "told, name",
    [
        (X86, "AMD EPYC (family 25, model 17, avx512_bf16)"),
        (ARM, "neoverse (implementer 0x41, part 0xd0c)"),
    ],
)
def test_a_chip_is_more_than_its_name(told, name, monkeypatch):
    monkeypatch.setattr(common.Path, "exists", lambda path: True)
    monkeypatch.setattr(common.Path, "read_text", lambda path: told)
    monkeypatch.setattr(common.platform, "processor", lambda: "neoverse")
    assert common.cpu() == name and common.environment()["chip"] == name.partition(" (")[0]


def test_bars_are_kept_row_by_row_and_drawn_beside_their_chip(monkeypatch, tmp_path):
    peak = {
        "kind": "forward",
        "score": "umbral",
        "dtype": "float32",
        "shape": "full d 64",
        "rate": 84.4,
        "most": 117.0,
    }
    peak |= {"key": "peak umbral", "share": 0.72, "ratio": 0.987}
    file = tmp_path / "bars-x.json"
    for row in (
        peak,
        {"key": "decode hype", "what": "decode hype 1t", "ratio": 1.089},
        peak | {"ratio": 0.985},
    ):
        Store(file, gpu=False).add(row)
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    text = "".join(page.bars(common.cpu()))
    assert "| float32, full d 64, forward, cone, umbral | 84 | 117 | 72% | 0.98 |" in text
    assert (
        "| decode hype 1t | 1.09 |" in text and text.count("###") == 2 and not page.bars("another")
    )


def test_a_share_of_the_peak_that_became_smaller_is_told():
    base = {
        "a": {"share": 0.8},
        "b": {"share": 0.8},
        "gone": {"share": 0.8},
        "no share": {"ratio": 1.0},
    }
    now = {"a": {"share": 0.77}, "b": {"share": 0.75}, "no share": {"ratio": 2.0}}
    assert compare.lost_shares(base, now) == ["b: 80.0% -> 75.0% of the peak"]


def test_rows_of_a_gpu_come_first_by_what_is_held_to_something_and_are_drawn():
    ways = {name: ["triton", *operation.peers] for name, operation in OPERATIONS.items()}
    found = jobs(ways, {}, "cuda", full=False)
    held = [name for name, operation in OPERATIONS.items() if operation.limits.get("cuda bfloat16")]
    first = found[: 24 * len(held)]  # three lengths, two dimensions, two directions, two kinds
    assert {job.subject for job in first} == set(held) and {job.way for job in first} == {"triton"}
    rows = {
        job.key: {
            "status": "ok",
            "median": 1.3,
            "q1": 1.2,
            "q3": 1.4,
            "way_mib": 7.0,
            "limit": None,
            "way": job.way,
            "commit": "abc",
            "date": "2026-01-01",
        }
        for job in found
    }
    where = {"chip": "some GPU", "torch": "2", "transformers": "5", "python": "3"}
    text = page.section({"environment": where, "rows": rows})
    for line in (
        "| cone, umbral | causal | 1.30 (1.20-1.40) |",
        "| geodesic | full |",
        "GPU, decoding",
        "umbral, flex",
    ):
        assert line in text
    assert "GPU" not in page.section(
        {"environment": where | {"chip": "c"}, "rows": {"x": {**rows[found[0].key]}}}
    )


def test_on_a_gpu_sdpa_is_flash_attention(monkeypatch):
    asked = []
    monkeypatch.setattr(
        measure, "sdpa_kernel", lambda backend: asked.append(backend) or contextlib.nullcontext()
    )
    q = torch.zeros(1, 1, 4, 8)
    for case in (Case("forward", 4, dtype="bfloat16", device="cuda"), Case("forward", 4)):
        measure.base(case)(q, q, q)
    assert asked == [measure.SDPBackend.FLASH_ATTENTION]


WRONG = (
    (
        run,
        ["--kinds", "forward"],
        "--kinds is for a sweep of one's own; add --operations or --lengths",
    ),
    (run, ["--heads", "2", "--full"], "--heads is for a sweep of one's own"),
    (
        run,
        ["--lengths", "32", "--ways", "eager", "typo"],
        "--ways typo: nothing here runs so; allowed: ",
    ),
    (
        bars,
        ["peak", "--threads", "2"],
        "--threads says nothing of peak; leave it out; allowed: with decode or model",
    ),
    (
        bars,
        ["decode", "--kinds", "prefill"],
        "--kinds says nothing of decode; leave it out; allowed: with model",
    ),
    (
        bars,
        ["model", "--base", "x.json"],
        "--base says nothing of model; leave it out; allowed: with peak",
    ),
    (
        bars,
        ["model", "--kinds", "training", "--context", "64"],
        "--context says nothing of training",
    ),
    (frontier, ["--draw", "--only", "Quest"], "--draw draws all that is measured; give it alone"),
    (frontier, ["--plan", "--mixed"], "--plan counts no mixtures; leave --mixed out"),
    (frontier, ["--only", "Quset"], "--only Quset: no such cell; allowed: stock, all rules, "),
    (frontier, ["--only", "Quest", "HAS"], "--only HAS: no such cell"),
    (frontier, ["--budgets", "0.15"], "--budgets 0.15: no such cell; allowed: 0.05, 0.1, 0.2"),
    (
        frontier,
        ["--length", "8192", "--budgets", "0.4"],
        "--budgets 0.4: no such cell; allowed: 0.1, 0.2",
    ),
    (
        frontier,
        ["--kind", "together", "--only", "HSA"],
        "no cell is of all that --only, --budgets and --kind name",
    ),
    (
        hsa_frontier,
        ["--only", "chosen 0.5"],
        "--only chosen 0.5: no such point; allowed: own, chosen 0.4, ",
    ),
    (
        hsa_frontier,
        ["--only", "one 0", "--config", "x.json"],
        "--only one 0: no such point; allowed: chosen 0.6, ",
    ),
    (
        hsa_frontier,
        ["--config", "x.json"],
        "--config says nothing without --only; allowed: chosen 0.6, ",
    ),
)


@pytest.mark.parametrize("command, words, said", WRONG, ids=lambda part: repr(part)[:60])
def test_options_that_would_do_nothing_are_refused(command, words, said, capsys):
    with pytest.raises(SystemExit) as left:
        command.main(words)
    assert left.value.code == 2 and said in capsys.readouterr().err


def test_threads_of_a_gpu_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(run, "device", lambda: "cuda")
    with pytest.raises(SystemExit):
        run.read_options(["--lengths", "32", "--threads", "2"])
    assert "--threads has no effect on a GPU" in capsys.readouterr().err
    assert run.read_options(["--lengths", "32"]).threads == [1]


def test_options_that_are_not_given_are_as_before():
    args = run.read_options(["--lengths", "32", "--dims", "8"])
    assert (args.dims, args.kinds, args.threads, args.causal) == (
        [8],
        ["forward", "training"],
        [1],
        "no",
    )
    args = bars.read_options(["model", "--layers", "2"])
    assert (args.layers, args.context, args.kinds, args.dtypes) == (2, 2048, ["decode"], None)


def test_a_regular_expression_that_finds_nothing_is_refused():
    for command, words in (
        (run, ["--list", "--only", "typo"]),
        (bars, ["decode", "--keys", "64", "--only", "typo"]),
    ):
        with pytest.raises(SystemExit, match="--only typo is found in no"):
            command.main(words)
