"""The PEFT tuner layer of `HyperLoraConfig`, which stands at `host.hyper`.

It holds one `Hyper` for each adapter, and the `Hyper` of the base model if that was patched itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ...mechanisms.base import HostCall, MechanismLayer
from ..attention.hyper import Hyper


class HyperAdapter(nn.Module, BaseTunerLayer):
    """Run the `Hyper` of the active adapter.

    The `Hyper` of the base runs if no adapter is active, or if adapters are disabled.

    Args:
        base: The `Hyper` of a base model that was patched itself. None for an unpatched base model,
            whose own attention then runs.
    """

    # Names that PEFT's `BaseTunerLayer` reads.
    adapter_layer_names = ("lora_hyper",)
    base_layer: Hyper | None
    lora_hyper: Any

    def __init__(self, base: Hyper | None):
        super().__init__()
        self.register_module("base_layer", base)
        # PEFT recognises the parameters of LoRA adapters by the prefix "lora_".
        self.lora_hyper = nn.ModuleDict()
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters = []

    @property
    def original_module(self) -> Hyper | None:
        """The `Hyper` of the patch, also while adapters are disabled.

        It has the name that PEFT's `ModulesToSaveWrapper` uses, so that `unwrap_hyper` reads both.
        """
        names = self.merged_adapters or self.active_adapters
        return next(
            (self.lora_hyper[name] for name in names if name in self.lora_hyper), self.base_layer
        )

    @property
    def running_hyper(self) -> Hyper | None:
        """The `Hyper` that a call runs. None for the attention layer's own attention.

        `active_hyper` reads it.
        """
        return self.base_layer if self._disable_adapters else self.original_module

    def forward(
        self,
        call: HostCall,
        weights: bool = False,
        stock: Callable[[], Tensor] | None = None,
        adapter_names: Sequence[str] | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Run the active `Hyper`; arguments and result as in `Layers.forward`.

        Args:
            adapter_names: The adapter of each row, in a batch with several adapters. Default: the
                active adapter for all rows.
        """
        if self._disable_adapters and self.merged_adapters:
            self.unmerge()  # as PEFT's LoRA layers do
        if adapter_names is not None:
            return self.compute_rows(call, adapter_names, weights, stock)
        hyper = self.running_hyper
        return None if hyper is None else hyper(call, weights, stock)

    def compute_rows(
        self, call: HostCall, names: Sequence[str], weights: bool, stock
    ) -> tuple[Tensor, None]:
        """Compute a batch in which each row has its own adapter.

        Every adapter computes all rows, and the rows of the others are dropped.

        Returns:
            The output [B, H, N, dv], and no attention weights.

        Raises:
            ValueError: There are not as many names as rows, or attention weights are requested.
        """
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
            # Allocated now: only a result tells the shape and dtype of the output.
            out = torch.empty_like(result) if out is None else out
            out[rows] = result[rows].to(out.dtype)
        assert out is not None
        return out, None

    def layers(self, names: Sequence[str] = ()) -> list[MechanismLayer]:
        """Return the layers that run in a batch whose rows have these adapters.

        Args:
            names: Names of adapters. Default: the layers of `original_module`.
        """
        if names:
            # Rows whose adapter has no `Hyper` here run the one of the base.
            held = [self.lora_hyper[n] for n in dict.fromkeys(names) if n in self.lora_hyper]
            hypers = [self.base_layer, *held]
        else:
            hypers = [self.original_module]
        return [layer for hyper in hypers if hyper is not None for layer in hyper.layers()]

    def select_holding(self, names: Sequence[str], what: str) -> list[str]:
        """Return the given adapters that have parameters here: none or one.

        Args:
            names: Names of adapters.
            what: The operation that would combine them, for the error.

        Raises:
            ValueError: Two of the adapters have parameters here.
        """
        names = [name for name in dict.fromkeys(names) if name in self.lora_hyper]
        refuse_two(names, what)
        return names

    def set_adapter(self, adapter_names, inference_mode: bool = False) -> None:
        """Activate adapters. At most one of them may have parameters here."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        self.select_holding(names, "set_adapter")
        super().set_adapter(names, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter. `HyperLoraModel` then activates another one for all layers."""
        # Not PEFT's own method: it lets each layer choose the next active adapter by itself.
        if adapter_name in self.lora_hyper:
            del self.lora_hyper[adapter_name]
        self._active_adapter = [name for name in self.active_adapters if name != adapter_name]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Mark adapters as merged: the merged `Hyper` then runs in place of the base's."""
        names = [*self.merged_adapters, *check_adapters_to_merge(self, adapter_names)]
        self.select_holding(names, "merge_adapter")
        self.merged_adapters = names

    def unmerge(self) -> None:
        """Undo `merge`."""
        self.merged_adapters = []

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> Hyper | None:
        """Return the `Hyper` that stays in the attention layer, or None."""
        if merge:
            self.merge(safe_merge, adapter_names)
        return self.original_module if self.merged_adapters else self.base_layer

    def combine_adapters(
        self, adapters: Sequence[str], weights: Sequence[float], name: str
    ) -> None:
        """Add the weighted sum of what adapters have learned to a new adapter.

        Args:
            adapters: Names of the trained adapters.
            weights: One weight for each.
            name: The new adapter, still at its starting values.
        """
        if name in self.lora_hyper:
            with torch.no_grad():
                # All adapters start from the same values, so differences from them add up.
                start = {n: p.clone() for n, p in self.lora_hyper[name].named_parameters()}
                for n, parameter in self.lora_hyper[name].named_parameters():
                    for adapter, weight in zip(adapters, weights, strict=True):
                        parameter += weight * (self.lora_hyper[adapter].get_parameter(n) - start[n])
            self.lora_hyper[name].moved = False


def hyper_adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module, HyperAdapter]]:
    """Yield name, module and `HyperAdapter` of every attention layer with adapters."""
    # As a list: callers replace modules during the loop.
    for name, module in list(model.named_modules()):
        hyper = module._modules.get("hyper")
        if isinstance(hyper, HyperAdapter):
            yield name, module, hyper


def base_hyper(host: nn.Module) -> Hyper | None:
    """Return the `Hyper` of a base model that was patched itself, or None."""
    hyper: Any = host._modules.get("hyper")
    return hyper.base_layer if isinstance(hyper, HyperAdapter) else hyper


def refuse_two(names: Sequence[str], what: str) -> None:
    """Raise if more than one adapter with added parameters would be active at once.

    Args:
        names: The adapters with added parameters.
        what: The operation, for the error.

    Raises:
        ValueError: There is more than one.
    """
    # LoRA matrices of two adapters add up. Attention scores of two patches do not.
    if len(names) > 1:
        raise ValueError(
            f"{what} got the adapters {list(names)}, each with added parameters of its own ('hyper'); allowed: one "
            "such adapter at a time"
        )


def refuse_adapters(model: nn.Module, what: str) -> None:
    """Raise if `what` would change a model under adapters with their own patch.

    Args:
        model: The base model.
        what: The operation, for the error.

    Raises:
        ValueError: There is such an adapter.
    """
    for _, _, adapter in hyper_adapters(model):
        raise ValueError(
            f"{what} would change {type(model).__name__} under its adapters {sorted(adapter.lora_hyper)}, which hold a "
            "patch of their own; first call merge_and_unload(), unload(), or delete_adapter"
        )
