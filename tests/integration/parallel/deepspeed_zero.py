"""One of two processes that train patched models by DeepSpeed.

    python -m tests.integration.parallel.deepspeed_zero RANK FOLDER

FOLDER is laid out as for tests.integration.parallel.parallel, and FOLDER/cells.json lists ZeRO stages with cases.
Rank 0 writes FOLDER/results.pt: by stage and case all parameters after `STEPS` steps. The case ("patched", ...) is a
model that was patched after DeepSpeed shared out its weights, and ("refused", "save") the error of `save_pretrained`
then. Of stage 3 the whole weights before the first step are in FOLDER/zero3/CASE/weights.bin.
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
from torch import nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_hyperattn as ha
from tests.integration.parallel.parallel import AUTO, PATCHES, WORLD, error_of, half, path

RATE = 0.1
#: The first step under ZeRO-3 registers parameters, the second records their order, the third uses it.
STEPS = 3


def config(stage: int) -> dict:
    sharing = {"stage": stage}
    if stage == 3:
        # By default small parameters are not shared out.
        sharing["stage3_param_persistence_threshold"] = 0
        sharing["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": sharing,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 where nothing is said
    }


def loaded(stage: int, case, folder: Path) -> nn.Module:
    """A patched checkpoint, as the Trainer loads it: under ZeRO-3 the weights are shared out at once."""
    plugin = HfDeepSpeedConfig(config(stage))
    model = AUTO[case[0]].from_pretrained(path(folder, "start", case))
    unset_hf_deepspeed_config()
    del plugin
    return model


def patched(case, folder: Path) -> nn.Module:
    """A model that is patched after its weights were shared out, with the case's added parameters."""
    plugin = HfDeepSpeedConfig(config(3))
    model = AUTO[case[0]].from_pretrained(path(folder, "stock", case[:1]))
    ha.patch_model(model, PATCHES[case[1]](case[0]))
    unset_hf_deepspeed_config()
    del plugin
    values = AUTO[case[0]].from_pretrained(path(folder, "start", case)).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.copy_(values[name])
    return model.eval()


def trained(model: nn.Module, stage: int, rank: int, folder: Path | None = None) -> dict:
    """All parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))
    if folder is not None:
        assert engine.save_16bit_model(str(folder), "weights.bin")
    for _ in range(STEPS):
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
    for stage, *case in json.loads((folder / "cells.json").read_text()):
        if stage == "patched":
            results[(stage, *case)] = trained(patched(case, folder), 3, rank)
            continue
        place = path(folder, "zero3", case) if stage == 3 else None
        results[(stage, *case)] = trained(loaded(stage, case, folder), stage, rank, place)
    model = loaded(3, ("llama", "cone"), folder)
    results["refused", "save"] = error_of(lambda: model.save_pretrained(folder / "empty"))
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
