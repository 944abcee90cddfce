"""One loopback Hub a session, and clients in processes of their own.

``huggingface_hub`` reads HF_ENDPOINT and its kin when it is imported, so nothing in the test process itself
can be pointed at the loopback Hub. Each client is a script that prints one JSON object of facts; it runs once
a session and many tests read its facts, because importing Transformers is most of its time.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .loopback import OWNER_TOKEN, Hub

CLIENTS = Path(__file__).parent / "clients"
ROOT = Path(__file__).parents[2]
FORGET = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "HF_HUB_CACHE",
)


@pytest.fixture(scope="session")
def hub():
    """A running loopback Hub."""
    with Hub() as running:
        yield running
        assert running.unknown == [], "clients used endpoints that the loopback Hub does not know"


def client_environment(hub: Hub, home: Path) -> dict[str, str]:
    """The environment of a client: the loopback Hub as the only network, one core, nothing of the user's."""
    kept = {key: value for key, value in os.environ.items() if key not in FORGET}
    return kept | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": OWNER_TOKEN,
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "NO_PROXY": "*",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@pytest.fixture(scope="session")
def client(hub, tmp_path_factory):
    """``client("stock")`` runs ``clients/stock.py`` and gives the facts it printed."""
    seen = {}

    def run(name: str) -> dict:
        if name not in seen:
            home = tmp_path_factory.mktemp(name)
            done = subprocess.run(
                [sys.executable, str(CLIENTS / f"{name}.py"), str(home / "work")],
                env=client_environment(hub, home / "hf"),
                capture_output=True,
                text=True,
                timeout=240,
                cwd=home,
            )
            assert done.returncode == 0, f"client {name} failed\n{done.stdout}\n{done.stderr}"
            seen[name] = json.loads(done.stdout.splitlines()[-1])
        return seen[name]

    return run
