"""One of two processes that share the heads of a model: python -m tests.integration.tensor_parallel RANK FOLDER.

FOLDER/stock and FOLDER/patched hold checkpoints. Rank 0 writes FOLDER/results.pt: by name of an attention
implementation, the logits of stock under tensor parallelism; under "patched", the error of loading that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from transformers.distributed import DistributedConfig

import hf_hyperattn as ha  # noqa: F401  registers the names

from .models import text_inputs

WORLD = 2
NAMES = ("sdpa", "cone", "cone_penumbral", "hyperbolic", "hype", "hsa")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**text_inputs()).logits


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    load, shared = hf.AutoModelForCausalLM.from_pretrained, DistributedConfig(tp_size=WORLD, tp_plan="auto")
    results = {}
    for name in NAMES:
        results[name] = logits(load(folder / "stock", attn_implementation=name, distributed_config=shared))
    try:
        load(folder / "patched", distributed_config=shared)
    except ValueError as error:
        results["patched"] = str(error)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # at the interpreter's end threads of the process group may still run, and abort it
