"""Move padding to the front of every row, so that windows count only real tokens.

The engines count slots of a row. Padding between tokens would make distances larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...engines import Options
from ...engines.options import read_visible
from ...utils.readable import can_read, is_exporting
from ..base import HostCall


@dataclass(frozen=True, eq=False)
class Order:
    """An order of the tokens of a row: padding first, then the real tokens.

    Args:
        places: Place of each token in this order, int64 [B|1, N].
        tokens: Token at each place, int64 [B|1, N].
    """

    places: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Joined:
    """The order in which queries and keys are read.

    The last real query and its own key are then the last of all, so query 0's own key is M - N.
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
        mask, bias = (
            None if tensor is None else take_pairs(tensor, self.queries.tokens, self.keys.tokens)
            for tensor in (options.mask, options.bias)
        )
        return replace(options, mask=mask, bias=bias)

    def restore(self, out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return output [B, H, N, dv] and weights [B, H, N, M] in the order of the call."""
        if weights is not None:
            weights = take_pairs(weights, self.queries.places, self.keys.places)
        return take_rows(out, self.queries.places), weights


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return the rows, int64 [B|1, N], of a tensor [B, H, N, d]."""
    # Either may be the same for all batch elements.
    batch = max(tensor.shape[0], rows.shape[0])
    tensor = tensor.expand(batch, -1, -1, -1)
    return tensor.gather(
        2, rows[:, None, :, None].expand(batch, tensor.shape[1], -1, tensor.shape[3])
    )


def take_pairs(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows and columns of a tensor [B|1, H|1, N|1, M|1].

    Args:
        tensor: The tensor; axes of size 1 are kept.
        rows: int64 [B|1, N].
        columns: int64 [B|1, M].
    """
    # Axes of size 1 are broadcast and need no reordering.
    tensor = tensor[(None,) * (4 - tensor.dim())]
    tensor = tensor if tensor.shape[2] == 1 else take_rows(tensor, rows)
    return tensor if tensor.shape[3] == 1 else take_rows(tensor.mT, columns).mT


def make_order(real: Tensor) -> Order:
    """Return the order that moves padding to the front.

    Args:
        real: Which tokens are no padding, bool [B|1, N].
    """
    # A real token comes after all padding of its row. Padding keeps its own order at the front.
    padding = (~real).long()
    place_if_real = padding.sum(1, keepdim=True) + real.long().cumsum(1) - 1
    places = torch.where(real, place_if_real, padding.cumsum(1) - 1)
    slots = torch.arange(real.shape[1], device=real.device).expand_as(places)
    # `tokens` is the inverse permutation of `places`.
    return Order(places, torch.zeros_like(places).scatter(1, places, slots))


@dataclass(frozen=True, eq=False)
class RealTokens:
    """The tokens of a call that are no padding.

    Args:
        keys: Bool [B|1, M].
        own_keys: The key of each query's own token, int64 [N]; None: query i is key i.
    """

    keys: Tensor
    own_keys: Tensor | None = None

    def of_queries(self, of_keys: Tensor) -> Tensor:
        """Return the values [B|1, N] of the queries' own keys."""
        return of_keys if self.own_keys is None else of_keys.index_select(1, self.own_keys)


def find_real_tokens(call: HostCall, grows: bool) -> RealTokens | None:
    """Return which tokens are real, or None if all are.

    Args:
        call: The attention call.
        grows: Whether the layer is a prefix LM that reads a cache, see `Host`.
    """
    mask = call.options.mask
    # In export, lengths are symbols. The usual reader of masks would turn them into fixed numbers.
    if is_exporting():
        if mask is None:
            return None
        real = read_visible(mask).any(1).any(1)
        return RealTokens(real.expand(real.shape[0], call.key.shape[2]))
    places = call.read_mask(grows).places
    if places.real is None:
        return None
    return RealTokens(places.real[:, places.dropped :], places.own_keys)


def join_tokens(call: HostCall, start: int | Tensor, grows: bool) -> Joined | None:
    """Return the order that joins the real tokens of every row, or None.

    None means that they are joined already.

    Compiled and exported calls cannot read the mask. They join tokens whenever there is a mask.

    Args:
        call: The attention call.
        start: The key of the first query's own token.
        grows: Whether the layer is a prefix LM that reads a cache, see `Host`.
    """
    tokens = find_real_tokens(call, grows)
    if tokens is None:
        return None
    # If the mask can be read and all real tokens are adjacent already, nothing needs to move.
    if (
        can_read(tokens.keys)
        and isinstance(start, int)
        and call.read_mask(grows).places.spans is not None
    ):
        return None
    real = tokens.keys
    # A static cache has empty slots after the key of the last query; they count as padding.
    if tokens.own_keys is not None:
        slot = torch.arange(real.shape[1], device=real.device)
        real = real & (slot < start + call.query.shape[2])
    return Joined(make_order(tokens.of_queries(real)), make_order(real))
