"""Positions of queries and keys: given by the caller, or read from a host's call. Only differences matter."""

from __future__ import annotations

import torch
from torch import Tensor

from ...readable import can_read
from ..base import Host, HostCall
from ..pruned import refuse_pruned


def of_call(
    call: HostCall, host: Host | None = None, mechanism: str = "hype"
) -> tuple[Tensor, Tensor]:
    """Positions of a host's queries [B|1, 1, N] and keys [B|1, 1, M]; they count real tokens.

    A key is a real token where some query sees it: padding is not, nor are the empty slots of a static cache, and
    what a sliding window has left behind shifts all positions alike. Queries that are not all of the sequence stand
    at their own keys, see `first_query`.

    Args:
        host: where the call is made; None where that is not known.
        mechanism: its name, for the error.

    Raises:
        ValueError: the call does not tell where its queries stand, or its cache was pruned in the middle.
    """
    n, m = call.query.shape[2], call.key.shape[2]
    name = "this layer" if host is None else host.name
    if call.keywords.get("indices") is not None:
        raise ValueError(
            f"{mechanism} cannot tell the positions of tokens in {name}, where an indexer chooses the keys; allowed: "
            "layers without an indexer, choose them with layers=..."
        )
    refuse_pruned(call, mechanism)
    call.first_query(mechanism, host)  # raises where the call does not tell
    places = call.read_mask(host is not None and host.grows).places
    keys = places.count[:, None, places.dropped :]
    return (keys if n == m else keys.index_select(2, places.own_keys)), keys


def checked_positions(
    name: str, positions: Tensor | None, length: int, batch: int, device
) -> Tensor:
    """A caller's positions, checked, as [B|1, 1, length]; 0, 1, 2, ... where there are none.

    Raises:
        ValueError: they have another shape, are no numbers, not finite, or want a gradient.
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


def from_first(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions less the smallest one of each row, in the dtype to compute in: large integers keep all digits."""
    if not keys.shape[-1] or not queries.shape[-1]:
        return queries.to(dtype), keys.to(dtype)
    if queries.dtype != keys.dtype:
        wide = torch.promote_types(torch.float64, torch.promote_types(queries.dtype, keys.dtype))
        queries, keys = queries.to(wide), keys.to(wide)
    elif queries.is_floating_point():
        queries, keys = queries.double(), keys.double()
    first = torch.minimum(queries.amin(-1, keepdim=True), keys.amin(-1, keepdim=True))
    return (queries - first).to(dtype), (keys - first).to(dtype)
