"""Mechanisms in models of which every rank has some of the heads (`tp_plan`); of the tokens is refused.

Added parameters are few: every rank keeps all of them, so that a checkpoint is the same under any number of ranks. A
layer whose heads are computed one by one gets the rows of its rank's heads. For a layer that mixes heads, queries, keys
and values of all ranks are gathered, every rank computes all heads of that host, and goes on with its own. Gradients
are summed over the ranks on their way back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.func import functional_call

from ..mechanisms.base import HostCall, MechanismLayer, Plan, RankHeads
from .hosts import module_dims, settings_of

#: Where torch keeps which functions it has replaced for context parallelism.
CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)
#: What DeepSpeed's ZeRO-3 sets on modules whose parameters it takes apart.
PARTITIONED = "ds_id"
#: Where a host keeps the number of its heads on all ranks together.
HEADS = "_hyperattn_heads"


def heads_of_rank(module: nn.Module, count: int) -> RankHeads | None:
    """Which heads a call's `count` query heads are, told from a projection that is cut by rows; None where all are.

    Raises:
        ValueError: they are neither all heads of the host nor its rank's share of them, or ranks share the tokens.
    """
    if not torch.compiler.is_compiling():
        refuse_context_parallel(module)
    for weight in module.parameters():
        if isinstance(weight, DTensor) and weight.placements == (Shard(0),):
            mesh: Any = weight.device_mesh
            if HEADS not in module.__dict__:
                dims = module_dims("a host", module, settings_of(getattr(module, "config", None)))
                module.__dict__[HEADS] = dims["heads"]
            total: int = module.__dict__[HEADS]
            if count == total:  # a plan that gathers what the projections give
                return None
            if count * mesh.size() != total:
                raise ValueError(
                    f"{type(module).__name__} has {total} heads, and a rank of {mesh.size()} was called with {count}; "
                    "allowed: a tp_plan that cuts queries, keys and values into whole heads, as many on every rank"
                )
            return RankHeads(total, count * mesh.get_local_rank(), mesh)
    return None


def refuse_context_parallel(module: nn.Module) -> None:
    """Raise within torch's `context_parallel`, which gives every rank some tokens and serves SDPA alone."""
    for name in CONTEXT_PARALLEL:
        replaced = getattr(sys.modules.get(name), "_replaced_functions", {})
        if nn.functional.scaled_dot_product_attention in replaced:
            raise ValueError(
                f"{type(module).__name__} was called within context parallelism (context_parallel, cp_size), which "
                "gives every rank some of the tokens, while mechanisms of hf_hyperattn need all of them; allowed: "
                "FSDP2 or tensor parallelism, or set_attn_implementation('sdpa') on a model that is not patched"
            )


def refuse_partitioned(hyper: nn.Module) -> None:
    """Raise under DeepSpeed's ZeRO-3, which empties parameters when their layer returns: plans read them later."""
    raise ValueError(
        f"attention patched with {' and '.join(hyper._modules)} was called under DeepSpeed ZeRO-3, which takes added "
        "parameters away while attention still reads them; allowed: zero_optimization.stage 1 or 2, or FSDP2"
    )


def on_rank(
    layers: Sequence[MechanismLayer], call: HostCall, heads: RankHeads
) -> tuple[HostCall, list[Callable[[Plan], Plan]], bool]:
    """What a rank computes of a call: the call, its layers, and whether these are of all heads of the host."""
    if call.hidden is not None:
        call = replace(call, hidden=with_summed_gradient(call.hidden, heads))
    everything = any(layer.mixes_heads for layer in layers)
    if everything and all(layer.idle() for layer in layers):
        return call, list(layers), False
    if everything:
        call = of_all_heads(call, heads)
    return call, [partial(run_layer, layer, heads, everything) for layer in layers], everything


def run_layer(layer: MechanismLayer, heads: RankHeads, everything: bool, plan: Plan) -> Plan:
    """A layer with the parameters of its rank's heads, or with all where it computes all heads."""
    parameters = {}
    for name, parameter in layer.named_parameters():
        tensor = with_summed_gradient(parameter, heads)
        parameters[name] = (
            tensor if everything or name in layer.for_all_heads else heads.slice_rank(tensor)
        )
    return functional_call(layer, parameters, (plan,)) if parameters else layer(plan)


def with_summed_gradient(tensor: Tensor, heads: RankHeads) -> Tensor:
    """A tensor that every rank has whole, and reads for its own heads: its gradient is the sum over the ranks."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    everywhere = DTensor.from_local(tensor, heads.mesh, [Replicate()], run_check=False)
    return everywhere.to_local(grad_placements=[Partial()])


def of_all_heads(call: HostCall, heads: RankHeads) -> HostCall:
    """The call with what every rank has of it put together."""
    count = call.query.shape[1]

    def whole(tensor: Tensor | None, axis: int) -> Tensor | None:
        if tensor is None or tensor.dim() < -axis or tensor.shape[axis] != count:
            return tensor  # the same for all heads
        return gathered(tensor, axis, heads)

    options = call.options
    return replace(
        call,
        query=gathered(call.query, 1, heads),
        key=gathered(call.key, 1, heads),
        value=gathered(call.value, 1, heads),
        options=replace(
            options,
            mask=whole(options.mask, -3),
            bias=whole(options.bias, -3),
            sinks=whole(options.sinks, -1),
        ),
        heads=None,
    )


def gathered(tensor: Tensor, axis: int, heads: RankHeads) -> Tensor:
    """The parts of all ranks beside each other; each rank's gradient for every part is summed where the part is."""
    if tensor.dtype == torch.bool:
        return gathered(tensor.byte(), axis, heads).bool()
    parts = DTensor.from_local(
        tensor.contiguous(), heads.mesh, [Shard(axis % tensor.dim())], run_check=False
    )
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
