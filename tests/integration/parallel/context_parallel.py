"""One of several processes that share the tokens of every row: python -m tests.integration.parallel.context_parallel.

    python -m tests.integration.parallel.context_parallel RANK FOLDER WORLD

FOLDER/cells.json lists cells: order of the tokens, family, patch and padding. Every rank writes FOLDER/RANK.pt: by cell
the logits of its own tokens, and the sum over the ranks of the loss's gradients. Further keys are ("other", what) for
single models, and ("refused", what) for errors.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig

import hf_hyperattn as ha
from hf_hyperattn.rules import Pages
from tests.integration.parallel.parallel import AUTO, CASES, FAMILIES, HSA, PATCHES, SIZES, error_of

LENGTH = 16
#: Of the tokens: torch's load balancing gives a rank its part from the front and its part from the end.
ORDERS = ("balanced", "plain")
PADDINGS = ("none", "right", "left")
ALL_CELLS = [(order, *case, padding) for order in ORDERS for case in CASES for padding in PADDINGS]


def changed(model: nn.Module) -> nn.Module:
    """The model with random added parameters, without dropout."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".hyper." in name or "lora_B" in name:
                p.add_(0.5 * torch.randn_like(p))
    return model.eval()


def stock(config) -> nn.Module:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config)


def model_of(family: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    model = AUTO[family].from_config(FAMILIES[family]())
    return changed(ha.patch_model(model, PATCHES[name](family)))


def llama_with(*mechanisms, **options) -> nn.Module:
    return changed(ha.patch_model(stock(FAMILIES["llama"]()), *mechanisms, **options))


def windowed(name: str, *mechanisms, **changes) -> nn.Module:
    """A family whose layers have sliding windows of 5 tokens, some or all."""
    sizes = SIZES | dict(num_key_value_heads=2, head_dim=8, sliding_window=5)
    return changed(
        ha.patch_model(stock(hf.AutoConfig.for_model(name, **sizes, **changes)), *mechanisms)
    )


def by_name() -> nn.Module:
    model = stock(FAMILIES["llama"]())
    model.set_attn_implementation("hype")
    return model.eval()


def with_adapter() -> nn.Module:
    config = ha.HyperLoraConfig(
        mechanisms=[ha.HypeConfig(max_length=64), HSA], r=2, target_modules=["q_proj"]
    )
    return changed(get_peft_model(stock(FAMILIES["llama"]()), config))


def checkpointed() -> nn.Module:
    model = llama_with(ha.HypeConfig(max_length=64), HSA).train()
    model.gradient_checkpointing_enable()
    return model


#: Models beyond the cells: mechanisms in some layers, by name, beside windows, softcaps and sinks, in an adapter.
OTHERS = {
    "one layer": lambda: llama_with(ha.ConeConfig(), layers=[-1]),
    "by name": by_name,
    "gates at their start": lambda: ha.patch_model(
        stock(FAMILIES["llama"]()), ha.ConeConfig()
    ).eval(),
    "sliding windows, pair scores": lambda: windowed(
        "mistral", ha.ConeConfig(gamma=0.5), ha.HypeConfig(max_length=64)
    ),
    "sliding windows, hsa": lambda: windowed("mistral", HSA),
    "sliding windows, sparse": lambda: windowed(
        "mistral", ha.SparseConfig([Pages(near=2, sinks=1, page=2, top=1)] * 4)
    ),
    "softcap": lambda: windowed("gemma2", ha.HypeConfig(max_length=64)),
    "sinks": lambda: windowed(
        "gpt_oss", ha.HypeConfig(max_length=64), num_local_experts=2, num_experts_per_tok=1
    ),
    "adapter": with_adapter,
    "checkpointed": checkpointed,
    "hierarchy": lambda: llama_with(HSA),
    "compiled": lambda: llama_with(ha.ConeConfig()),
}


def batch(padding: str) -> dict:
    """Two rows with the positions of their tokens, and the tokens that come next."""
    ids = torch.randint(5, 90, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[0, slice(0, 5) if padding == "left" else slice(-5, None)] = 0
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels = labels.masked_fill(mask == 0, -100)
    positions = torch.arange(LENGTH).repeat(2, 1)
    data = dict(input_ids=ids, position_ids=positions, labels=labels, attention_mask=mask)
    if padding == "none":
        del data["attention_mask"]
    return data


def more_of(what: str) -> dict:
    """Arguments that are not shared out: group ids of the whole text."""
    if what != "hierarchy":
        return {}
    groups = torch.tensor([0] * 3 + [1] * 4 + [2] * 2 + [3] * 5 + [4] * 2)
    return dict(hierarchy=torch.stack([groups // 2, groups], 1).repeat(2, 1, 1))


def results_of(model: nn.Module, data: dict, count: int, **more) -> dict:
    """Logits, and the gradients of all parameters of the mean loss over `count` tokens of all ranks."""
    data = dict(data)
    labels = data.pop("labels")
    logits = model(**data, **more).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "gradients": gradients}


def alone(model: nn.Module, padding: str, **more) -> dict:
    """The results of one process."""
    data = batch(padding)
    return results_of(model, data, int((data["labels"] >= 0).sum()), **more)


@contextmanager
def order_of(name: str):
    """Share tokens out in one of `ORDERS`."""
    before = _attention._cp_options.enable_load_balance
    _attention._cp_options.enable_load_balance = name == "balanced"
    try:
        yield
    finally:
        _attention._cp_options.enable_load_balance = before


@contextmanager
def shared(mesh, data: dict):
    """Torch's context, with the data shared out in place."""
    buffers = list(data.values())
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        yield


def together(mesh, model: nn.Module, padding: str, **more) -> dict:
    """The results of all ranks: the rank's own logits, and gradients summed over the ranks."""
    data = batch(padding)
    count = int((data["labels"] >= 0).sum())
    with shared(mesh, data):
        found = results_of(model, data, count, **more)
    for gradient in found["gradients"].values():
        dist.all_reduce(gradient, group=mesh.get_group())
    return found


def under_tensor_parallelism(folder: Path) -> dict:
    """Logits of the rank's tokens: two ranks share the heads, two the tokens and the weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    layout = DistributedConfig(tp_size=2, fsdp_size=2)
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "cone", distributed_config=layout)
    model.eval()
    data = batch("right")
    with torch.no_grad(), shared(mesh["cp"], data):
        del data["labels"]
        logits = model(**data).logits
    return {"logits": logits.full_tensor() if hasattr(logits, "full_tensor") else logits}


def under_accelerate(world: int) -> dict:
    """Gradients by FSDP2 and `cp_size`, which Accelerate itself offers for accelerators only."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    begin = AcceleratorState.__init__

    def begin_with_fsdp(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    with mock.patch.object(AcceleratorState, "__init__", begin_with_fsdp):
        accelerator = Accelerator(
            cpu=True, parallelism_config=ParallelismConfig(cp_size=world), fsdp_plugin=plugin
        )
        model = accelerated_model()
        optimizer = torch.optim.SGD(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
    data = {name: tensor for name, tensor in batch("none").items() if name != "labels"}
    buffers = list(data.values())
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
    ):
        accelerator.backward(model(**data).logits.square().mean())
    return {
        name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None
    }


def accelerated_model() -> nn.Module:
    return llama_with(ha.HypeConfig(max_length=64), HSA)


def refusals(mesh) -> dict[str, str]:
    cone = llama_with(ha.ConeConfig())

    def call(model, data: dict, **more):
        with shared(mesh, data):
            return model(**data, **more)

    def backward_outside():
        logits = call(checkpointed(), batch("none")).logits
        logits.sum().backward()

    ids = {"input_ids": batch("none")["input_ids"]}
    packed = torch.tensor([*range(5), *range(11)]).repeat(2, 1)
    own = LENGTH // mesh.size()
    odd = torch.ones(2, 1, own, own, dtype=torch.bool).tril()
    odd[0, 0, 3, 1] = False
    sizes = dict(hidden_size=32, n_layer=1, n_head=4, vocab_size=99)
    bloom = ha.patch_model(stock(hf.BloomConfig(**sizes)), ha.ConeConfig())
    cache = ha.HierarchicalCache(llama_with(HSA).config)
    groups = torch.zeros(2, own, 1, dtype=torch.int64)
    kept = hf.DynamicCache()
    return {
        "positions": error_of(lambda: call(cone, dict(ids))),
        "packed": error_of(lambda: call(cone, {**ids, "position_ids": packed})),
        "mask": error_of(lambda: call(cone, batch("none"), attention_mask=odd)),
        "bias": error_of(lambda: call(bloom, dict(ids))),
        "weights": error_of(lambda: call(cone, batch("none"), output_attentions=True)),
        "hierarchical cache": error_of(
            torch.no_grad()(lambda: call(llama_with(HSA), batch("none"), past_key_values=cache))
        ),
        "cached keys": error_of(
            lambda: [call(cone, batch("none"), past_key_values=kept) for _ in range(2)]
        ),
        "part of a hierarchy": error_of(
            lambda: call(llama_with(HSA), batch("none"), hierarchy=groups)
        ),
        "backward outside": error_of(backward_outside),
        "afterwards": error_of(lambda: cone(**batch("none"))),
        "notes after unpatching": notes_left(mesh),
    }


def notes_left(mesh) -> str:
    """Attributes of ours that a call within the context leaves on an unpatched model."""
    model = llama_with(ha.ConeConfig(), layers=[-1])
    with shared(mesh, data := batch("none")):
        model(**data)
    ha.unpatch_model(model)
    names = {name for module in model.modules() for name in vars(module) if "hyperattn" in name}
    return ", ".join(sorted(names))


def main(rank: int, folder: Path, world: int) -> None:
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)} | sizes
    dist.init_process_group(
        "gloo",
        f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=1),
    )
    mesh, results = init_device_mesh("cpu", (world,)), {}
    task = json.loads((folder / "cells.json").read_text())
    for order, *case, padding in task["cells"]:
        with order_of(order):
            results[(order, *case, padding)] = together(mesh, model_of(*case), padding)
    for what in task.get("others", ()):
        model = OTHERS[what]()
        if what == "compiled":
            model = torch.compile(model, backend="eager")
            alone(model, "right")  # A graph of the model outside of the context.
            model.zero_grad()
        results["other", what] = together(mesh, model, "right", **more_of(what))
    if task.get("refusals"):
        results |= {("refused", what): error for what, error in refusals(mesh).items()}
    if (folder / "cone").exists():
        results["tensor parallel"] = under_tensor_parallelism(folder)
    if task.get("accelerate"):
        results["accelerate"] = under_accelerate(world)
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # at the interpreter's end threads of the process group may still run, and abort it
