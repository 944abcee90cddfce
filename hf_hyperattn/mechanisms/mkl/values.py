"""Weights of heads from values: a softmax over heads of a linear image of a token's value rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import HostCall
from ..places import first_query
from .score import head_weights


def image(value: Tensor, value_map: Tensor) -> Tensor:
    """The linear image of the value rows, concatenated over key heads, [B, H, M].

    Args:
        value: [B, Hkv, M, dv].
        value_map: [H, Hkv · dv].
    """
    kv_heads, width = value.shape[1], value.shape[-1]
    by_head = value_map.view(len(value_map), kv_heads, width).transpose(0, 1)  # [Hkv, H, dv]
    return (by_head @ value.mT).sum(1)


def weights_of(
    call: HostCall, value_map: Tensor, dtype: torch.dtype, chosen: tuple[int, ...] | None, host: str
) -> tuple[Tensor, Tensor]:
    """The weights of queries [B, H, N] and of keys [B, H, M].

    The value rows of a query are those of its own token: values are cached as they are made, are not rotated, and move
    with the beams, so that generation with a cache sees the same ones.

    Args:
        value_map: [H, Hkv · dv].
        dtype: to compute in.
        chosen: the heads that share the weights.
        host: its name, for errors.

    Raises:
        ValueError: the call does not say which keys are the queries' own, or has values of another shape.
    """
    value, n = call.value, call.query.shape[2]
    if value.shape[1] * value.shape[-1] != value_map.shape[1]:
        raise ValueError(
            f"mkl was built for value rows of {value_map.shape[1]} numbers in {host}, and its attention is called with "
            f"{value.shape[1]} heads of {value.shape[-1]}; allowed: hosts whose config says what they hand over, "
            "choose them with layers=..."
        )
    start = first_query(call, "mkl", host)
    keys = head_weights(image(value.to(dtype), value_map.to(dtype)), chosen)
    if isinstance(start, int):
        return keys.narrow(2, start, n), keys
    return keys.index_select(2, torch.arange(n, device=keys.device) + start), keys
