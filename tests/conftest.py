"""What every test starts from: one thread, no network, nothing of the user's settings, a fixed seed.

Hugging Face's libraries read the variables when they are imported, so they are set before any test module.
``HF_HUB_OFFLINE=0 pytest -m network`` brings the network back for the tests that need it.
"""

import os
import tempfile

os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_hyperattn_tests_")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("HF_HYPERATTN_AUTOLOAD", None)
for variable in ("HF_TOKEN", "HF_ENDPOINT", "HF_HYPERATTN_CACHE"):
    os.environ.pop(variable, None)

import atexit  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
from collections import defaultdict  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.covering import choose_covering  # noqa: E402

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
torch.set_num_threads(1)

#: Folders and files with tests of what stands beside the package. They have the marker `repository`.
REPOSITORY = {
    "benchmarks",
    "docs",
    "faults",
    "hub",
    "recipes",
    "test_address.py",
    "test_contributing.py",
    "test_packaging.py",
    "test_readme.py",
}

# The same examples in every run, so that a red run says something about the change; `explore` seeks new ones.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(autouse=True)
def seed():
    """A fixed seed before every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def recompiles():
    """Room for models that earlier tests compiled: torch counts compilations of a function for the whole process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.config.recompile_limit = 100


def pytest_addoption(parser):
    parser.addoption(
        "--full-grids",
        action="store_true",
        help="run every combination of a test's parameters, not only those in which all pairs of values meet",
    )


def pytest_collection_modifyitems(config, items):
    """Mark tests of the repository, thin out grids, and skip GPU tests where there is no GPU."""
    for item in items:
        if item.nodeid.removeprefix("tests/").split("/")[0].split("::")[0] in REPOSITORY:
            item.add_marker(pytest.mark.repository)
    if not config.getoption("--full-grids"):
        left = set(map(id, thin_out(items)))
        gone = [item for item in items if id(item) not in left]
        items[:] = [item for item in items if id(item) in left]
        config.hook.pytest_deselected(items=gone)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def thin_out(items: list) -> list:
    """Return the items without those whose pairs of parameter values all meet in others.

    Cases of one function with other marks (slow, extras) do not run with the rest, so that quick ones are chosen
    by themselves first.
    """
    grids = defaultdict(list)
    for item in items:
        grids[item.nodeid.split("[")[0]].append(item)
    left = []
    for grid in grids.values():
        if not has_grid(grid[0]):
            left += grid
            continue
        by_marks = defaultdict(list)
        for item in grid:
            by_marks[tuple(sorted({mark.name for mark in item.iter_markers()}))].append(item)
        chosen = []
        for alike in sorted(by_marks.values(), key=lambda alike: len(alike[0].own_markers)):
            chosen += choose_covering(alike, read_values, covered=chosen)
        left += chosen
    return left


def has_grid(item) -> bool:
    """Whether three or more lists of parameters are multiplied. The grid of two lists is their pairs."""
    return hasattr(item, "callspec") and len(read_axes(item)) > 2


def read_axes(item) -> list[list[str]]:
    """Return the names of the parameters of each list: of a `parametrize`, or of a fixture with `params`."""
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.kwargs.get("argnames") or mark.args[0]
        axes.append(
            [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        )
    named = {name for names in axes for name in names}
    return axes + [[name] for name in item.callspec.params if name not in named]


def read_values(item) -> tuple[tuple[int, ...], ...]:
    """Return the value of each list. Values need not be hashable, and each is one object in all cases."""
    return tuple(tuple(id(item.callspec.params[name]) for name in axis) for axis in read_axes(item))
