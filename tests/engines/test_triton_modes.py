"""The Triton engine where there is no GPU: its tests in the interpreter, what it says, and who takes over."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_hyperattn.engines import Options, attention, dispatch, dot_score, triton
from hf_hyperattn.engines import triton as engine
from hf_hyperattn.engines.score import TERMS, PairScore, ScoreTerm, Term, register_term
from tests.engines.triton_scores import SCORES, learned
from tests.oracles.cases import qkv

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.extras


#: These tests start a process with the interpreter.
apart = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on in this process"
)


def interpret(*arguments):
    """Run tests in a process of their own with Triton's interpreter on."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *arguments,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@apart
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_in_the_interpreter(which):
    said = interpret("tests/engines/test_triton.py", "-m", f"{which} and not gpu")
    assert " passed" in said and "failed" not in said


@apart
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_listed_keys_in_the_interpreter(which):
    files = (
        "tests/engines/test_selected_triton.py",
        "tests/mechanisms/hsa/test_hsa_triton.py",
        "tests/mechanisms/sparse/test_sparse_triton.py",
    )
    said = interpret(*files, "-m", f"{which} and not gpu")
    assert " passed" in said and "failed" not in said


@apart
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_masks_and_calls_of_sparse_rules_in_the_interpreter():
    said = interpret("tests/test_masks_and_calls.py", "-k", "sparse or window or sinks or pages")
    assert " passed" in said and "failed" not in said


class Distant(Term):
    """A term that cannot be written in Triton."""

    name = "toy_without_triton"

    def logits(self, dot, row, column, head, squared_distance=None):
        return -torch.erf(dot)


DISTANT = register_term(Distant())
without_gpu = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on in this process"
)


@without_gpu
def test_it_refuses_tensors_on_the_cpu():
    q, k, v = qkv(d=4, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"backend='triton'.*CUDA device, these are on cpu; use backend='auto'"
    ):
        attention(dot_score(q, k), v, backend="triton")


def reason_of(monkeypatch, score, v, **options):
    monkeypatch.setattr(engine, "is_interpreted", lambda: True)  # as if the device were no matter
    return engine.unsupported_reason(score, v, Options(**options))


def test_what_it_cannot_serve_is_named(monkeypatch):
    q, k, v = qkv(d=4, dtype=torch.float32)
    assert reason_of(monkeypatch, dot_score(q, k), v) is None
    assert "float64" in reason_of(monkeypatch, dot_score(q.double(), k.double()), v.double())
    other = PairScore(q, k, (ScoreTerm(DISTANT, lambda: -q @ k.mT),))
    assert "'toy_without_triton' cannot be compiled: operator erf" in reason_of(
        monkeypatch, other, v
    )
    two = PairScore(
        q, k, tuple(ScoreTerm(TERMS[name], lambda: q) for name in ("umbral", "geodesic"))
    )
    assert "more than one term of umbral+geodesic reads distances" == reason_of(monkeypatch, two, v)
    wide = torch.zeros(1, 1, 2, 257)
    assert "wider than 256" in reason_of(monkeypatch, dot_score(wide, wide), wide)
    bias = torch.zeros(1, 1, 5, 5, requires_grad=True)
    assert "no gradient" in reason_of(monkeypatch, dot_score(q, k), v, bias=bias)
    with torch.no_grad():
        assert reason_of(monkeypatch, dot_score(q, k), v, bias=bias) is None


class Elsewhere:
    """A tensor as `supports` sees it: on a GPU."""

    device, dtype, shape = torch.device("cuda"), torch.float32, (2, 4, 5, 3)


def test_auto_falls_back_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(engine, "unsupported_reason", lambda *_: "for a test")
    engine.log_once.cache_clear()
    q, k, _ = qkv(d=4, dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        assert not any(engine.supports(dot_score(q, k), Elsewhere, Options()) for _ in range(3))
    assert [r.getMessage() for r in caplog.records] == [
        "hf_hyperattn: the Triton kernels cannot compute a call (for a test); another engine does"
    ]


@pytest.mark.parametrize(
    "name, taken", [("dot", "sdpa"), ("hype_sinh", "triton"), ("umbral", "triton")]
)
def test_auto_takes_it_where_it_serves(monkeypatch, name, taken):
    q, k, v = qkv(lq=80, d=4, dtype=torch.float32)
    monkeypatch.setattr(triton, "supports", lambda *_: True)
    monkeypatch.setattr(dispatch.cpu, "supports", lambda *_: False)
    assert (
        dispatch.choose_engine(SCORES[name](q, k, learned(4)), v, Options(), weights=False) == taken
    )


def test_importing_the_package_imports_no_kernels():
    """Triton costs half a second: it waits for the first call."""
    code = (
        "import sys, hf_hyperattn; names = [n for n in sys.modules if n.startswith('hf_hyperattn')]; "
        "assert not [n for n in names if n.endswith('engines.triton.launch')], names"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)
