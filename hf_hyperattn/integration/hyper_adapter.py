"""The tuner layer of `HyperLoraConfig`: at `host.hyper`, a `Hyper` for each adapter, and the base's own beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ..mechanisms.base import HostCall, MechanismLayer
from .hyper import Hyper


class HyperAdapter(nn.Module, BaseTunerLayer):
    """Runs the `Hyper` of the adapter that is active; that of the base where none is, or adapters are disabled.

    Args:
        base: the `Hyper` of a base that was patched itself; None for a stock base, whose own attention then runs.
    """

    adapter_layer_names = ("lora_hyper",)
    base_layer: Hyper | None
    lora_hyper: Any

    def __init__(self, base: Hyper | None):
        super().__init__()
        self.register_module("base_layer", base)
        self.lora_hyper = nn.ModuleDict()  # PEFT takes parameters for LoRA's by this prefix
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters = []

    @property
    def original_module(self) -> Hyper | None:
        """The `Hyper` that the model is patched with here, also while adapters are disabled; None for none."""
        names = self.merged_adapters or self.active_adapters
        return next(
            (self.lora_hyper[name] for name in names if name in self.lora_hyper), self.base_layer
        )

    @property
    def running(self) -> Hyper | None:
        """The `Hyper` that a call goes through; None for the host's own attention."""
        return self.base_layer if self._disable_adapters else self.original_module

    def forward(
        self,
        call: HostCall,
        weights: bool = False,
        stock: Callable[[], Tensor] | None = None,
        adapter_names: Sequence[str] | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """As `Layers.forward`; `adapter_names` are those of the rows in a batch of several adapters."""
        if self._disable_adapters and self.merged_adapters:
            self.unmerge()  # as LoRA layers do
        if adapter_names is not None:
            return self.by_rows(call, adapter_names, weights, stock)
        hyper = self.running
        return None if hyper is None else hyper(call, weights, stock)

    def by_rows(
        self, call: HostCall, names: Sequence[str], weights: bool, stock
    ) -> tuple[Tensor, None]:
        """The output [B, H, N, dv] of a batch each of whose rows has its own adapter: every adapter computes all."""
        if weights or len(names) != call.query.shape[0]:
            why = (
                "attention weights are asked for"
                if weights
                else f"the batch has {call.query.shape[0]} rows"
            )
            raise ValueError(
                f"adapter_names= got {len(names)} names, and {why}; allowed: a name for each row, without "
                "output_attentions"
            )
        out = None
        for name in dict.fromkeys(names):
            hyper = self.lora_hyper[name] if name in self.lora_hyper else self.base_layer
            result = None if hyper is None else hyper(call, False, stock)
            result = stock() if result is None else result[0]
            rows = [row for row, other in enumerate(names) if other == name]
            out = torch.empty_like(result) if out is None else out
            out[rows] = result[rows].to(out.dtype)
        assert out is not None
        return out, None

    def layers(self, names: Sequence[str] = ()) -> list[MechanismLayer]:
        """The layers that run in a batch whose rows have these adapters; without names, those of `original_module`."""
        hypers = [
            self.base_layer,
            *(self.lora_hyper[n] for n in dict.fromkeys(names) if n in self.lora_hyper),
        ]
        hypers = hypers if names else [self.original_module]
        return [layer for hyper in hypers if hyper is not None for layer in hyper.layers()]

    def holding(self, names: Sequence[str], what: str) -> list[str]:
        """Those of the adapters that have parameters here; ValueError where there are two, which `what` would join."""
        names = [name for name in dict.fromkeys(names) if name in self.lora_hyper]
        refuse_two(names, what)
        return names

    def set_adapter(self, adapter_names, inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        self.holding(names, "set_adapter")
        super().set_adapter(names, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Take an adapter away; which one is active instead is said for all layers alike, by `set_adapter`."""
        if adapter_name in self.lora_hyper:
            del self.lora_hyper[adapter_name]
        self._active_adapter = [name for name in self.active_adapters if name != adapter_name]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        names = [*self.merged_adapters, *check_adapters_to_merge(self, adapter_names)]
        self.holding(names, "merge_adapter")
        self.merged_adapters = names

    def unmerge(self) -> None:
        self.merged_adapters = []

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> Hyper | None:
        """The `Hyper` that stays in the host; None for none."""
        if merge:
            self.merge(safe_merge, adapter_names)
        return self.original_module if self.merged_adapters else self.base_layer

    def combine(self, adapters: Sequence[str], weights: Sequence[float], name: str) -> None:
        """Let an adapter that has just begun be the weighted sum of what others have learned."""
        if name in self.lora_hyper:
            with torch.no_grad():
                start = {n: p.clone() for n, p in self.lora_hyper[name].named_parameters()}
                for n, parameter in self.lora_hyper[name].named_parameters():
                    for adapter, weight in zip(adapters, weights, strict=True):
                        parameter += weight * (self.lora_hyper[adapter].get_parameter(n) - start[n])
            self.lora_hyper[name].moved = False


def hyper_adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module, HyperAdapter]]:
    """Name of every host that adapters have parameters for, the host, and its `HyperAdapter`."""
    for name, module in list(model.named_modules()):
        hyper = module._modules.get("hyper")
        if isinstance(hyper, HyperAdapter):
            yield name, module, hyper


def base_hyper(host: nn.Module) -> Hyper | None:
    """The `Hyper` of a base that was patched itself."""
    hyper: Any = host._modules.get("hyper")
    return hyper.base_layer if isinstance(hyper, HyperAdapter) else hyper


def active_hyper(module: Any) -> Hyper | None:
    """The `Hyper` that is in use at a host: under PEFT that of the active adapter, else the one that is there."""
    if isinstance(module, HyperAdapter):
        return module.running
    copies = getattr(module, "modules_to_save", {})
    names = [name for name in getattr(module, "active_adapters", []) if name in copies]
    return (
        copies[names[0]]
        if names and not module.disable_adapters
        else getattr(module, "original_module", module)
    )


def refuse_two(names: Sequence[str], what: str) -> None:
    """Raise if more than one of the adapters that are to work together holds added parameters."""
    if len(names) > 1:
        raise ValueError(
            f"{what} got the adapters {list(names)}, each with added parameters of its own ('hyper'); allowed: one "
            "such adapter at a time"
        )


def refuse_adapters(model: nn.Module, what: str) -> None:
    """Raise where adapters hold the patch of a model, which `what` would change under them."""
    for _, _, adapter in hyper_adapters(model):
        raise ValueError(
            f"{what} would change {type(model).__name__} under its adapters {sorted(adapter.lora_hyper)}, which hold a "
            "patch of their own; first call merge_and_unload(), unload(), or delete_adapter"
        )
