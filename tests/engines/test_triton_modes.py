"""The Triton engine where there is no GPU: its tests in the interpreter, and what it says without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton", reason="needs Triton")


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


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on in this process")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_in_the_interpreter(which):
    said = interpret("tests/engines/test_triton.py", "-m", f"{which} and not gpu")
    assert " passed" in said and "failed" not in said
