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

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
torch.set_num_threads(1)

# The same examples in every run, so that a red run says something about the change; `explore` seeks new ones.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(autouse=True)
def seed():
    """A fixed seed before every test, whatever ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """GPU tests are skipped by name where there is no GPU, also when they are asked for."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
