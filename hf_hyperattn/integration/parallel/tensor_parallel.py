"""Run mechanisms under tensor parallelism (`tp_plan`), in which each rank computes some heads.

Added parameters are few. Every rank keeps all of them, so a checkpoint is the same for any number
of ranks.

- A mechanism that treats heads separately gets the rows of its rank's heads.
- For a mechanism that mixes heads, queries, keys and values of all ranks are gathered. Every rank
  computes all heads of that attention layer and continues with its own.
- Gradients are summed over the ranks in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.func import functional_call

from ...mechanisms.base import HostCall, MechanismLayer, Plan, RankHeads


def heads_of_rank(
    module: nn.Module, count: int, count_all: Callable[[nn.Module], int]
) -> RankHeads | None:
    """Return the heads of an attention layer that a call computes, None for all.

    A projection that is sharded by rows shows that ranks share the heads.

    Args:
        module: The attention layer.
        count: Number of query heads in the call.
        count_all: Returns the number of the layer's heads on all ranks together. It is called
            only if ranks share the heads.

    Raises:
        ValueError: The call has neither all heads nor the rank's share.
    """
    for weight in module.parameters():
        if isinstance(weight, DTensor) and weight.placements == (Shard(0),):
            mesh: Any = weight.device_mesh
            total = count_all(module)
            # This plan gathers the output of the projections, so every rank has all heads.
            if count == total:
                return None
            if count * mesh.size() != total:
                raise ValueError(
                    f"{type(module).__name__} has {total} heads, and a rank of {mesh.size()} was called with {count}; "
                    "allowed: a tp_plan that cuts queries, keys and values into whole heads, as many on every rank"
                )
            return RankHeads(total, count * mesh.get_local_rank(), mesh)
    return None


def on_rank(
    layers: Sequence[MechanismLayer], call: HostCall, heads: RankHeads
) -> tuple[HostCall, list[Callable[[Plan], Plan]], bool]:
    """Return the part of a call that a rank computes.

    Args:
        layers: The layers of the mechanisms.
        call: The call, with this rank's heads.
        heads: Which heads these are.

    Returns:
        The call, its layers as functions of a plan, and whether they compute all heads.
    """
    # Every rank has the whole hidden states, but derives gradients from its own heads only.
    if call.hidden is not None:
        call = replace(call, hidden=with_summed_gradient(call.hidden, heads))
    everything = any(layer.mixes_heads for layer in layers)
    # Nothing to compute: skip the communication between ranks.
    if everything and all(layer.idle() for layer in layers):
        return call, list(layers), False
    if everything:
        call = gather_call(call, heads)
    return call, [partial(run_layer, layer, heads, everything) for layer in layers], everything


def run_layer(layer: MechanismLayer, heads: RankHeads, everything: bool, plan: Plan) -> Plan:
    """Run a layer with the parameters of its rank's heads, or of all heads.

    Args:
        layer: The layer of a mechanism.
        heads: The heads of this rank.
        everything: Whether the plan contains all heads of the attention layer.
        plan: The plan that the layer changes.
    """
    parameters = {}
    for name, parameter in layer.named_parameters():
        tensor = with_summed_gradient(parameter, heads)
        parameters[name] = (
            tensor if everything or name in layer.for_all_heads else heads.slice_rank(tensor)
        )
    return functional_call(layer, parameters, (plan,)) if parameters else layer(plan)


def with_summed_gradient(tensor: Tensor, heads: RankHeads) -> Tensor:
    """Return a tensor whose gradient is the sum over the ranks.

    Args:
        tensor: A tensor that every rank has whole and reads for its own heads.
        heads: The heads of this rank.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    # `Partial` declares the local gradients as summands, so that torch adds them up.
    everywhere = DTensor.from_local(tensor, heads.mesh, [Replicate()], run_check=False)
    return everywhere.to_local(grad_placements=[Partial()])


def gather_call(call: HostCall, heads: RankHeads) -> HostCall:
    """Return the call with the heads of all ranks.

    Args:
        call: The call with this rank's heads.
        heads: Which heads these are.
    """
    count = call.query.shape[1]

    def gather_if_by_head(tensor: Tensor | None, axis: int) -> Tensor | None:
        # A tensor without this axis, or of size 1 there, is the same for all heads.
        if tensor is None or tensor.dim() < -axis or tensor.shape[axis] != count:
            return tensor
        return gather_parts(tensor, axis, heads.mesh)

    options = call.options
    return replace(
        call,
        query=gather_parts(call.query, 1, heads.mesh),
        key=gather_parts(call.key, 1, heads.mesh),
        value=gather_parts(call.value, 1, heads.mesh),
        options=replace(
            options,
            mask=gather_if_by_head(options.mask, -3),
            bias=gather_if_by_head(options.bias, -3),
            sinks=gather_if_by_head(options.sinks, -1),
        ),
        heads=None,
    )


def gather_parts(tensor: Tensor, axis: int, mesh: Any) -> Tensor:
    """Concatenate the parts of all ranks along an axis.

    In the backward pass each part gets the sum of all ranks' gradients for it.

    Args:
        tensor: The rank's part; all ranks have parts of equal shape.
        axis: The axis.
        mesh: torch's device mesh of the ranks.
    """
    # Collective operations of some backends do not support booleans.
    if tensor.dtype == torch.bool:
        return gather_parts(tensor.byte(), axis, mesh).bool()
    parts = DTensor.from_local(
        tensor.contiguous(), mesh, [Shard(axis % tensor.dim())], run_check=False
    )
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
