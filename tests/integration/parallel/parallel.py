"""One of two processes that share a model: python -m tests.integration.parallel.parallel RANK FOLDER.

FOLDER/start/CASE holds a patched checkpoint for every case. FOLDER/cells.json lists layouts with cases. For each of
them the processes load the checkpoint under tensor parallelism, FSDP2 or DDP, compute, and save it to
FOLDER/LAYOUT/CASE (not DDP). Rank 0 writes FOLDER/results.pt:

- by (layout, case): the loss's gradients, and the logits (of the rank's own rows if data is shared out),
- by ("patched", case): the logits of a stock model that was patched after it was cut,
- by ("other", what): the logits of other models,
- by ("refused", what): the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Exact, Pages, Window
from tests.covering import choose_covering
from tests.integration.models import TEXT

WORLD = 2
AUTO = {
    "llama": hf.AutoModelForCausalLM,
    "qwen3": hf.AutoModelForCausalLM,
    "bert": hf.AutoModelForMaskedLM,
}
SIZES = TEXT | dict(
    num_hidden_layers=2, hidden_size=32, max_position_embeddings=64, initializer_range=0.1
)
#: family -> config. Two key heads for four query heads, but in BERT.
FAMILIES = {
    "llama": lambda: hf.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "bert": lambda: hf.BertConfig(**SIZES),
}
#: BERT says nothing of how it is to be cut.
BERT_TP = {
    f"bert.encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")
} | {"bert.encoder.layer.*.attention.output.dense": "rowwise"}
BERT_FSDP = {"bert.encoder.layer.*": "free_full_weight"}
HSA = ha.HsaConfig(windows=(2, 4), near=(1, 0, 2, 1), sinks=0, refine_top_k=(1, 0, 0, 1))
BOTH = ha.HsaConfig(windows=(2, 4))
RULES = [
    Exact(),
    Pages(near=2, sinks=1, page=2, top=1),
    Pages(near=2, sinks=1, page=1, top=2, query="first", chunk=4),
    Window(near=3, sinks=1),
]
some = dict(heads=(0, 2, 3))
#: name -> the patch of a family; None where the family has no use for the mechanism
PATCHES = {
    "cone": lambda family: ha.HyperAttnConfig([ha.ConeConfig(gamma=0.5)]),
    "cone_penumbral": lambda family: ha.HyperAttnConfig(
        [ha.ConeConfig(variant="penumbral", gamma=0.5, radius=2.0)]
    ),
    "hyperbolic": lambda family: ha.HyperAttnConfig([ha.HyperbolicConfig(aggregation="mean")]),
    "hyperbolic, midpoint": lambda family: ha.HyperAttnConfig([ha.HyperbolicConfig()]),
    "hype": lambda family: ha.HyperAttnConfig([ha.HypeConfig(max_length=64)]),
    "hsa": lambda family: ha.HyperAttnConfig([BOTH if family == "bert" else HSA]),
    "sparse": lambda family: (
        None if family == "bert" else ha.HyperAttnConfig([ha.SparseConfig(RULES)])
    ),
    "head_fusion": lambda family: ha.HyperAttnConfig([ha.HeadFusionConfig()]),
    "talking_heads": lambda family: ha.HyperAttnConfig([ha.TalkingHeadsConfig()]),
    "mkl": lambda family: ha.HyperAttnConfig([ha.MklConfig()]),
    "mkl, conditional": lambda family: ha.HyperAttnConfig([ha.MklConfig(kind="conditional")]),
    "trilinear": lambda family: ha.HyperAttnConfig([ha.TrilinearConfig(windows=(4, 3))]),
    "trilinear, bidaf": lambda family: ha.HyperAttnConfig([ha.TrilinearConfig(form="bidaf")]),
    "collaborative": lambda family: (
        ha.HyperAttnConfig([ha.CollaborativeConfig()]) if family == "bert" else None
    ),
    "cone and hype, some heads": lambda family: ha.HyperAttnConfig(
        [ha.ConeConfig(), ha.HypeConfig()], **some
    ),
    "hsa, some heads": lambda family: (
        None if family == "bert" else ha.HyperAttnConfig([HSA], mode="replace", **some)
    ),
    "hype and talking heads, some heads": lambda family: ha.HyperAttnConfig(
        [ha.HypeConfig(), ha.TalkingHeadsConfig()], **some
    ),
    "head_fusion, some heads": lambda family: ha.HyperAttnConfig([ha.HeadFusionConfig()], **some),
    "mkl, some heads": lambda family: ha.HyperAttnConfig([ha.MklConfig()], **some),
}
CASES = [
    (family, name) for name in PATCHES for family in FAMILIES if PATCHES[name](family) is not None
]
LAYOUTS = ("tp", "fsdp2", "ddp")
#: Layout, family and patch: all that there are, and those of the tests, in which every two of them meet.
ALL_CELLS = [(layout, *case) for case in CASES for layout in LAYOUTS]
CELLS = choose_covering(ALL_CELLS, tuple)
AFTERWARDS = [("llama", "cone"), ("llama", "talking_heads"), ("qwen3", "head_fusion")]


def start(module: str, folder: Path, world: int = WORLD) -> None:
    """Run `python -m module RANK FOLDER WORLD` for every rank, and wait; an error of one is an AssertionError."""
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    logs = [folder / f"{rank}.log" for rank in range(world)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder), str(world)],
            cwd=root,
            env=environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=1200) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-3000:] for log in logs)


def path(folder: Path, layout: str, case) -> Path:
    return folder / layout / "-".join(case).replace(", ", "_").replace(" ", "_")


def batch() -> dict:
    """Four rows without padding, so that the mean over two halves of the loss is that of the whole."""
    ids = torch.randint(5, 90, (4, 13), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


def half(rank: int) -> dict:
    return {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in batch().items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def results_of(model: nn.Module, data: dict) -> dict:
    """Logits, and the gradients of all parameters."""
    out = model.eval()(**data)
    out.loss.backward()
    named = {
        name.removeprefix("module."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {
        "logits": whole(out.logits),
        "gradients": {name: whole(gradient) for name, gradient in named.items()},
    }


def layout(kind: str, family: str) -> DistributedConfig:
    if kind == "tp":
        return DistributedConfig(tp_size=WORLD, tp_plan=BERT_TP if family == "bert" else "auto")
    return DistributedConfig(fsdp_size=WORLD, fsdp_plan=BERT_FSDP if family == "bert" else None)


def error_of(function) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_cell(kind: str, case, folder: Path, rank: int) -> dict:
    """Load a case in a layout, compute, and save it from there."""
    load, source = AUTO[case[0]].from_pretrained, path(folder, "start", case)
    if kind == "ddp":
        return results_of(DistributedDataParallel(load(source)), half(rank))
    model = load(source, distributed_config=layout(kind, case[0]))
    found = results_of(model, batch() if kind == "tp" else half(rank))
    model.zero_grad()
    model.save_pretrained(path(folder, kind, case))
    dist.barrier()
    return found


def patched_afterwards(case, folder: Path) -> Tensor:
    """The logits of a model that is patched after it was cut, with the case's added parameters."""
    model = AUTO[case[0]].from_pretrained(
        path(folder, "stock", case[:1]), distributed_config=layout("tp", case[0])
    )
    ha.patch_model(model, PATCHES[case[1]](case[0]))
    values = AUTO[case[0]].from_pretrained(path(folder, "start", case)).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.copy_(values[name])
        return model(**batch()).logits


@torch.no_grad()
def others(folder: Path) -> dict:
    """Heads that the plan gathers again, by name and by patch."""
    load, shared, results = AUTO["llama"].from_pretrained, DistributedConfig(tp_size=WORLD), {}
    for how, options in (("by name", {"attn_implementation": "hype"}), ("patched", {})):
        model = load(folder / "gathered" / how, distributed_config=shared, **options)
        results["other", f"gathered heads, {how}"] = model(**batch()).logits
    return results


def refusals(folder: Path) -> dict[str, str]:
    load, shared = AUTO["llama"].from_pretrained, layout("tp", "llama")
    return {
        "three heads": error_of(lambda: load(folder / "three_heads", distributed_config=shared)),
        "converted": error_of(
            lambda: AUTO["bert"].from_pretrained(
                folder / "converted", distributed_config=layout("tp", "bert")
            )
        ),
        "convert": error_of(
            lambda: ha.convert(
                AUTO["bert"].from_pretrained(
                    path(folder, "stock", ("bert",)), distributed_config=layout("tp", "bert")
                ),
                ha.CollaborativeConfig(rank=16),
            )
        ),
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group(
        "gloo",
        f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(minutes=5),
    )
    results = {}
    for kind, *case in json.loads((folder / "cells.json").read_text()):
        results[(kind, *case)] = one_cell(kind, tuple(case), folder, rank)
    results |= {("patched", *case): patched_afterwards(case, folder) for case in AFTERWARDS}
    results |= others(folder)
    results |= {("refused", what): error for what, error in refusals(folder).items()}
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # at the interpreter's end threads of the process group may still run, and abort it
