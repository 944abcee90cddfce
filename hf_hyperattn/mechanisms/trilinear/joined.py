"""Rows whose real tokens are joined: padding between them moves to the front, so that windows count tokens.

The engines count slots. If padding stands between the tokens of a row, that is another number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...engines import Options
from ...engines.options import read_visible
from ...readable import can_read, is_exporting
from ..base import HostCall


@dataclass(frozen=True, eq=False)
class Order:
    """An order of the tokens of a row: first padding, then the real tokens in their own order.

    Args:
        places: int64 [B|1, N], the place of each token in this order.
        tokens: int64 [B|1, N], the token at each place.
    """

    places: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Joined:
    """In which order queries and keys are read.

    The last real query is then the last of all, and so is its key: query 0's own key is M - N.
    """

    queries: Order
    keys: Order

    def move_queries(self, tensor: Tensor) -> Tensor:
        """Return [B, H, N, d] in this order."""
        return take_rows(tensor, self.queries.tokens)

    def move_keys(self, tensor: Tensor) -> Tensor:
        """Return [B, H, M, d] in this order."""
        return take_rows(tensor, self.keys.tokens)

    def move_options(self, options: Options) -> Options:
        """Return options whose mask and bias are in this order."""
        move = lambda tensor: (
            None if tensor is None else take_pairs(tensor, self.queries.tokens, self.keys.tokens)
        )
        return replace(options, mask=move(options.mask), bias=move(options.bias))

    def restore(self, out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, N, dv] and the weights [B, H, N, M] in the order of the call."""
        if weights is not None:
            weights = take_pairs(weights, self.queries.places, self.keys.places)
        return take_rows(out, self.queries.places), weights


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return [B, H, N, d] with these rows, int64 [B|1, N]."""
    batch = max(tensor.shape[0], rows.shape[0])
    tensor = tensor.expand(batch, -1, -1, -1)
    return tensor.gather(
        2, rows[:, None, :, None].expand(batch, tensor.shape[1], -1, tensor.shape[3])
    )


def take_pairs(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return [B|1, H|1, N|1, M|1] with these rows and columns, int64 [B|1, N] and [B|1, M]."""
    tensor = tensor[(None,) * (4 - tensor.dim())]
    tensor = tensor if tensor.shape[2] == 1 else take_rows(tensor, rows)
    return tensor if tensor.shape[3] == 1 else take_rows(tensor.mT, columns).mT


def order_of(real: Tensor) -> Order:
    """Return the order of the tokens of rows.

    Args:
        real: Bool [B|1, N], which tokens are no padding.
    """
    padding = (~real).long()
    places = torch.where(
        real, padding.sum(1, keepdim=True) + real.long().cumsum(1) - 1, padding.cumsum(1) - 1
    )
    slots = torch.arange(real.shape[1], device=real.device).expand_as(places)
    return Order(places, torch.zeros_like(places).scatter(1, places, slots))


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Which tokens of a call are no padding.

    Args:
        keys: bool [B|1, M].
        own_keys: int64 [N], the key that is each query's own; None: query i is key i.
    """

    keys: Tensor
    own_keys: Tensor | None = None

    def of_queries(self, of_keys: Tensor) -> Tensor:
        """Return [B|1, N] of what holds for keys, [B|1, M]."""
        return of_keys if self.own_keys is None else of_keys.index_select(1, self.own_keys)


def find_real_tokens(call: HostCall, grows: bool) -> RealTokens | None:
    """Return which tokens are real; None if all are.

    Args:
        call: Of the attention layer.
        grows: Of the layer, see `Host`.
    """
    mask = call.options.mask
    if is_exporting():  # lengths are symbols, which the reader of masks would turn into numbers
        if mask is None:
            return None
        real = read_visible(mask).any(1).any(1)
        return RealTokens(real.expand(real.shape[0], call.key.shape[2]))
    places = call.read_mask(grows).places
    if places.real is None:
        return None
    return RealTokens(places.real[:, places.dropped :], places.own_keys)


def join_tokens(call: HostCall, start: int | Tensor, grows: bool) -> Joined | None:
    """Return the order in which the real tokens of every row follow each other; None if they do so already.

    Calls that are compiled or exported cannot read the mask: tokens are joined there whenever there is one.

    Args:
        call: Of the attention layer.
        start: The key that is the first query's own.
        grows: Of the layer, see `Host`.
    """
    tokens = find_real_tokens(call, grows)
    if tokens is None:
        return None
    if (
        can_read(tokens.keys)
        and isinstance(start, int)
        and call.read_mask(grows).places.spans is not None
    ):
        return None
    real = tokens.keys
    if tokens.own_keys is not None:  # keys after the last query's own are empty slots of a cache
        slot = torch.arange(real.shape[1], device=real.device)
        real = real & (slot < start + call.query.shape[2])
    return Joined(order_of(tokens.of_queries(real)), order_of(real))
