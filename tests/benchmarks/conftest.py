"""`benchmarks/` is run from a checkout and no package: its modules are imported from there."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="package", autouse=True)
def nothing_to_collect():
    """Memory is measured after a garbage collection, which takes long in a process that has imported much."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
