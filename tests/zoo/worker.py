"""One model type in one process: `python -m tests.zoo.worker base llama` prints its result as JSON."""

import importlib
import json
import os
import resource
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.zoo.checks import examine  # noqa: E402

MEMORY, SECONDS = 8 << 30, 600


def prepare():
    """Quiet and single-threaded; to be called before forking, so that children inherit what it imports."""
    for name in ("generation", "modeling_layers", "modeling_rope_utils"):
        importlib.import_module(f"transformers.{name}")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def answer(item):
    """The result of `(kind, model type)`, within limits of memory and of time on the processor."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    return examine(*item)


if __name__ == "__main__":
    prepare()
    json.dump(answer(tuple(sys.argv[1:3])), sys.stdout, indent=1)
    print()
