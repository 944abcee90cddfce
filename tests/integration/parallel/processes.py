"""One of two processes that train a patched model together on the CPU: python -m tests.integration.parallel.processes.

    python -m tests.integration.parallel.processes RANK FOLDER

Both train on half of a batch each, by DDP and by FSDP2, all weights and LoRA with `hyper` beside it. Rank 0 writes what
came out into FOLDER/results.pt: for each way the losses of rank 0 and the whole parameters.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_hyperattn as ha
from tests.integration.lessons import learn, next_character, optimizer_of, patched

STEPS = 20
WORLD = 2


def lora_model() -> nn.Module:
    """A patched model of three heads, which two processes cannot share evenly, with adapters."""
    torch.manual_seed(0)
    base = patched(sizes=dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1))
    return get_peft_model(base, ha.lora_config(base, r=4))


MODELS = {"full": patched, "lora": lora_model}


def parted(model: nn.Module) -> nn.Module:
    """FSDP2 as it is meant to be used: each layer by itself, then what is left."""
    layers = [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def share(batch: dict, rank: int) -> dict:
    """The rows of one process."""
    rows = len(batch["input_ids"]) // WORLD
    return {n: t[rank * rows : (rank + 1) * rows] for n, t in batch.items()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All trainable parameters, gathered."""
    return {
        n.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p)
        .detach()
        .clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    results = {}
    for way, wrap in (("ddp", DistributedDataParallel), ("fsdp2", parted)):
        for name, make in MODELS.items():
            model = wrap(make())
            losses = learn(model, share(next_character(), rank), STEPS, optimizer_of(model))
            results[way, name] = losses, whole(model)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(
        0
    )  # all is written; at the interpreter's end threads of the process group may still run, and abort it
