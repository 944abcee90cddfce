"""One of two processes that train patched models by DeepSpeed: python -m tests.integration.deepspeed_zero RANK FOLDER.

FOLDER is laid out as for tests.integration.parallel. Rank 0 writes FOLDER/results.pt: by ZeRO stage and case all
parameters after two steps, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from .parallel import AUTO, WORLD, half, path

RATE = 0.1


def config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 where nothing is said
    }


def trained(stage: int, case, folder: Path, rank: int) -> dict[str, torch.Tensor]:
    model = AUTO[case[0]].from_pretrained(path(folder, "start", case))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))
    for _ in range(2):
        engine.backward(engine(**half(rank)).loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    results = {}
    for case in map(tuple, json.loads((folder / "cases.json").read_text())):
        for stage in (1, 2, 3):
            try:
                results[(stage, *case)] = trained(stage, case, folder, rank)
            except Exception as error:
                results[(stage, *case)] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
