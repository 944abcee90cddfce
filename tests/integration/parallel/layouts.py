"""One of several processes that load a patched model by `DistributedConfig`.

    python -m tests.integration.parallel.layouts RANK FOLDER WORLD

FOLDER/start/FAMILY/PATCH holds patched checkpoints, and FOLDER/cells.json lists layouts with patches. Every rank writes
FOLDER/RANK.pt: by (layout, patch) the logits of its rows and the loss's gradients, and ("refused", what) for errors.
Models are saved to FOLDER/saved/LAYOUT/PATCH.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from transformers.distributed import DistributedConfig

import hf_hyperattn as ha
from tests.integration.parallel.parallel import (
    FAMILIES,
    PATCHES,
    SIZES,
    batch,
    error_of,
    results_of,
)

#: Layout -> number of ranks, and the arguments of `DistributedConfig`.
LAYOUTS = {
    "pipeline": (2, dict(pp_size=2)),
    "experts, heads": (2, dict(tp_size=2, ep_size=2)),
    "experts, FSDP2": (2, dict(fsdp_size=2, ep_size=2)),
    "FSDP2, heads": (4, dict(fsdp_size=2, tp_size=2)),
    "replicated FSDP2": (4, dict(dp_replicate_size=2, fsdp_size=2)),
    "experts, FSDP2, heads": (4, dict(fsdp_size=2, tp_size=2, ep_size=4)),
}
EXPERTS = dict(
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
NAMES = [name for name in PATCHES if PATCHES[name]("llama") is not None]
CELLS = [(layout, name) for layout in LAYOUTS for name in NAMES]


def family_of(layout: str) -> str:
    return "qwen3_moe" if "experts" in layout else "llama"


def model_of(family: str, name: str) -> nn.Module:
    """A patched model with random added parameters."""
    torch.manual_seed(0)
    config = (
        FAMILIES["llama"]()
        if family == "llama"
        else hf.AutoConfig.for_model(family, **SIZES | EXPERTS)
    )
    model = ha.patch_model(hf.AutoModelForCausalLM.from_config(config), PATCHES[name]("llama"))
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if ".hyper." in parameter_name:
                p.add_(0.5 * torch.randn_like(p))
    return model.eval()


def place_of(folder: Path, kind: str, name: str) -> Path:
    return folder / kind.replace(", ", "_") / name.replace(", ", "_")


def rows_of(layout: str, rank: int) -> slice:
    """The rows of a rank: ranks that share heads or layers have the same ones."""
    sizes = DistributedConfig(**LAYOUTS[layout][1])
    part = rank // sizes.tp_size % sizes.dp_size
    count = len(batch()["input_ids"]) // sizes.dp_size
    return slice(part * count, (part + 1) * count)


def one_cell(layout: str, name: str, folder: Path, rank: int) -> dict:
    """Load a model in a layout, compute, and save it from there."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        place_of(folder, f"start/{family_of(layout)}", name),
        distributed_config=DistributedConfig(**LAYOUTS[layout][1]),
    ).eval()
    data = {key: tensor[rows_of(layout, rank)] for key, tensor in batch().items()}
    if layout == "pipeline":
        # Transformers' pipelines compute logits, and have no backward pass.
        del data["labels"]
        with torch.no_grad():
            return {"logits": model(**data).logits, "gradients": {}}
    found = results_of(model, data)
    model.zero_grad()
    model.save_pretrained(place_of(folder, f"saved/{layout}", name))
    dist.barrier()
    return found


def refusals(folder: Path) -> dict[str, str]:
    model = hf.AutoModelForCausalLM.from_pretrained(
        place_of(folder, "start/llama", "cone"), distributed_config=DistributedConfig(pp_size=2)
    )
    return {"save a stage": error_of(lambda: model.save_pretrained(folder / "stage"))}


def main(rank: int, folder: Path, world: int) -> None:
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group(
        "gloo",
        f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=2),
    )
    results = {}
    for layout, name in json.loads((folder / "cells.json").read_text()):
        if LAYOUTS[layout][0] == world:
            results[layout, name] = one_cell(layout, name, folder, rank)
    if world == 2:
        results |= {("refused", what): error for what, error in refusals(folder).items()}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # at the interpreter's end threads of the process group may still run, and abort it
