"""Read or check the positions of queries and keys.

Here you learn where positions come from: an attention layer's call, or the caller of a function. Only
their differences matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.readable import can_read
from .base import Host, HostCall
from .call_cache import refuse_pruned


def read_positions(call: HostCall, host: Host | None, mechanism: str) -> tuple[Tensor, Tensor]:
    """Return the positions of a call's queries [B|1, 1, N] and keys [B|1, 1, M].

    Positions count the real tokens. A key is a real token if some query sees it. Padding and empty
    slots of a static cache are not. Tokens that a sliding window has dropped shift all positions
    alike. Queries of a part of the sequence have the positions of their own keys, see
    `first_query`.

    Args:
        call: Call of the attention layer.
        host: The attention layer, or None if unknown.
        mechanism: Name of the mechanism, for the error.

    Raises:
        ValueError: The call does not tell where its queries stand, or its cache was pruned in the
            middle.
    """
    n = call.query.shape[2]
    m = call.key.shape[2]
    name = "this layer" if host is None else host.name
    if call.keywords.get("indices") is not None:
        raise ValueError(
            f"{mechanism} cannot tell the positions of tokens in {name}, where an indexer chooses the keys; allowed: "
            "layers without an indexer, choose them with layers=..."
        )
    refuse_pruned(call, mechanism)
    # Raises an error if the call does not tell which keys belong to the queries.
    call.first_query(mechanism, host)
    places = call.read_mask(host is not None and host.grows).places
    keys = places.count[:, None, places.dropped :]
    queries = keys if n == m else keys.index_select(2, places.own_keys)
    return queries, keys


def check_call_positions(
    query: Tensor, key: Tensor, query_positions: Tensor | None, key_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check the positions of a function's call, and return them as [B|1, 1, N] and [B|1, 1, M].

    Args:
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d].
        query_positions, key_positions: As in `check_positions`.
    """
    batch, _, n, _ = query.shape
    queries = check_positions("query_positions", query_positions, n, batch, query.device)
    keys = check_positions("key_positions", key_positions, key.shape[2], batch, query.device)
    return queries, keys


def check_positions(name: str, positions: Tensor | None, length: int, batch: int, device) -> Tensor:
    """Return a caller's positions, checked, as [B|1, 1, length].

    Args:
        name: Name of the argument, for the error.
        positions: Numbers [length] or [B, length]. None: 0, 1, 2, ...
        length: Number of tokens.
        batch: Batch size B.
        device: Device of the result.

    Raises:
        ValueError: Positions have another shape, are no finite numbers, or require a gradient.
    """
    if positions is None:
        return torch.arange(length, device=device)[None, None]
    if not isinstance(positions, Tensor) or positions.dtype == torch.bool or positions.is_complex():
        what = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(
            f"{name} is {what}; allowed: a tensor of integers or floating point numbers"
        )
    allowed = ((length,), (1, length), (batch, length))
    if tuple(positions.shape) not in allowed:
        raise ValueError(
            f"{name} has shape {tuple(positions.shape)}; allowed: one position a token, ({length},) or "
            f"({batch}, {length})"
        )
    if positions.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, which positions do not get; pass {name}.detach()"
        )
    if (
        can_read(positions)
        and positions.is_floating_point()
        and not bool(positions.isfinite().all())
    ):
        raise ValueError(f"{name} holds infinite numbers or NaN; allowed: finite numbers")
    positions = positions.to(device)
    if not positions.is_floating_point():
        positions = positions.long()
    return positions.reshape(-1, 1, length)


def subtract_first(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return positions minus the smallest one of each row, in the dtype of the computation.

    Large integers keep all their digits.
    """
    # The minimum of no positions is an error.
    if not keys.shape[-1] or not queries.shape[-1]:
        return queries.to(dtype), keys.to(dtype)
    if queries.dtype != keys.dtype:
        wide = torch.promote_types(torch.float64, torch.promote_types(queries.dtype, keys.dtype))
        queries, keys = queries.to(wide), keys.to(wide)
    elif queries.is_floating_point():
        queries, keys = queries.double(), keys.double()
    first = torch.minimum(queries.amin(-1, keepdim=True), keys.amin(-1, keepdim=True))
    return (queries - first).to(dtype), (keys - first).to(dtype)
