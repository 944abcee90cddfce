"""Some hundred random calls of the compiled kernels: no byte outside a tensor is touched.

`run.py` does more of them.
"""

import os
import subprocess
import sys

import pytest

from . import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CALLS = int(os.environ.get("FUZZ_CALLS", "300"))
#: What a watched process does, and what it says on its end: the tools must see what they are there for.
FAULTS = {
    "behind": "a.data_ptr() + a.nbytes",
    "in front": "a.data_ptr() - 1",
    "after it was freed": "a.data_ptr()",
}


@pytest.mark.parametrize("tool", ["guard", "sanitize"])
def test_no_call_touches_what_is_not_its_own(tool):
    if reason := run.missing(tool):
        pytest.skip(reason)
    reports = run.fuzz(tool, 0, CALLS)
    assert not reports, "\n\n".join(reports)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_guard_sees(fault, tmp_path):
    if reason := run.missing("guard"):
        pytest.skip(reason)
    code = (
        "import ctypes, torch\n"
        "a = torch.zeros(100)\n"
        f"at = {FAULTS[fault]}\n"
        + ("del a\n" if "freed" in fault else "")
        + "ctypes.memset(at, 1, 1)\n"
        + ("" if "freed" in fault else "del a\n")
    )
    variables = run.environment("guard", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True
    )
    assert done.returncode < 0, done.stderr
