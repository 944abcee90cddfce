"""Where LoRA goes unless it is told: the linear layers inside patched hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def projections(base: PreTrainedModel, hosts: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of the linear layers inside some hosts, in the short form that PEFT matches with name endings.

    "self_attn.q_proj" where that means patched hosts alone, else a name for each, "layers.20.self_attn.q_proj".
    """
    layers = [f"{host}.{name}" for host, module in hosts for name in linear_layers(module)]
    if not layers:
        raise ValueError(
            f"the patched hosts of {type(base).__name__} hold no linear layers; pass target_modules=[...], or r=0"
        )
    others = sorted({name for name, _ in base.named_modules()} - set(layers))
    targets = set()
    for name in layers:
        short = ".".join(name.split(".")[-2:])
        ambiguous = any(n == short or n.endswith("." + short) for n in others)
        targets.add(name.removeprefix(base.base_model_prefix + ".") if ambiguous else short)
    return sorted(targets)


def linear_layers(module: nn.Module, path: str = "") -> Iterator[str]:
    """Names of the linear layers in a module, those that carry an adapter already included, and ours not."""
    for name, child in module.named_children():
        layer: Any = child
        layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        if isinstance(layer, nn.Linear | Conv1D):
            yield path + name
        elif layer is child and name != "hyper":
            yield from linear_layers(child, f"{path}{name}.")
