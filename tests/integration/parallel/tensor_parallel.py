"""One of two processes that share the heads of a model.

    python -m tests.integration.parallel.tensor_parallel RANK FOLDER

FOLDER/stock holds a checkpoint. Rank 0 writes FOLDER/results.pt: by name of an attention implementation, the logits of
that under tensor parallelism; under "parts", what saves with distributed_checkpoint=True into FOLDER/parts left.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import transformers as hf
from transformers.distributed import DistributedConfig

import hf_hyperattn as ha  # noqa: F401  registers the names
from tests.integration.models import text_inputs

WORLD = 2
NAMES = ("sdpa", "cone", "cone_penumbral", "hyperbolic", "hype", "hsa")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**text_inputs()).logits


def save_in_parts(folder: Path, load, shared) -> dict:
    """What is in FOLDER/parts, an older checkpoint at first, after a save that failed and after one that did not."""
    target, save, found = folder / "parts", torch.distributed.checkpoint.save, {}

    def failing(*args, **kwargs):
        raise RuntimeError("no space left")

    model = load(folder / "stock", attn_implementation="cone", distributed_config=shared)
    for name, function in (("failed", failing), ("saved", save)):
        torch.distributed.checkpoint.save = function
        try:
            model.save_pretrained(target, distributed_checkpoint=True)
        except RuntimeError as error:
            found["error"] = str(error)
        dist.barrier()
        found[name] = sorted(path.name for path in target.parent.glob("parts/*"))
    again = load(target, distributed_config=shared)
    return {"parts": found | {"logits": logits(again), "name": again.config._attn_implementation}}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    load, shared = (
        hf.AutoModelForCausalLM.from_pretrained,
        DistributedConfig(tp_size=WORLD, tp_plan="auto"),
    )
    results = {}
    for name in NAMES:
        results[name] = logits(
            load(folder / "stock", attn_implementation=name, distributed_config=shared)
        )
    results |= save_in_parts(folder, load, shared)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # at the interpreter's end threads of the process group may still run, and abort it
