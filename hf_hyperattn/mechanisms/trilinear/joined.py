"""Rows whose real tokens are joined: padding between them moves to the front, so that windows count tokens.

The engines count slots. Where padding stands between the tokens of a row, that is another number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...engines import Options
from ...readable import can_read, is_exporting
from ..base import HostCall


@dataclass(frozen=True, eq=False)
class Joined:
    """In which order queries and keys are read: those that are not real first, then the real ones as they stand.

    The last real query is then the last of all, and so is its key: query 0's own key is M - N.

    Args:
        queries: int64 [B|1, N].
        keys: int64 [B|1, M].
    """

    queries: Tensor
    keys: Tensor

    def move_queries(self, tensor: Tensor) -> Tensor:
        """Return [B, H, N, d] in this order."""
        return torch.take_along_dim(tensor, self.queries[:, None, :, None], 2)

    def move_keys(self, tensor: Tensor) -> Tensor:
        """Return [B, H, M, d] in this order."""
        return torch.take_along_dim(tensor, self.keys[:, None, :, None], 2)

    def move_options(self, options: Options) -> Options:
        """Return options whose mask and bias are in this order."""
        return replace(options, mask=self._move_pairs(options.mask), bias=self._move_pairs(options.bias))

    def _move_pairs(self, tensor: Tensor | None) -> Tensor | None:
        """[B|1, H|1, N|1, M|1] in this order."""
        if tensor is None:
            return None
        tensor = tensor[(None,) * (4 - tensor.dim())]
        tensor = tensor if tensor.shape[2] == 1 else self.move_queries(tensor)
        if tensor.shape[3] == 1:
            return tensor
        return torch.take_along_dim(tensor, self.keys[:, None, None], 3)

    def restore(self, out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, N, dv] and the weights [B, H, N, M] in the order of the call."""
        queries, keys = self.queries.argsort(1), self.keys.argsort(1)
        back = Joined(queries, keys)
        return back.move_queries(out), back._move_pairs(weights)


def join_tokens(call: HostCall, start: int | Tensor, grows: bool) -> Joined | None:
    """Return the order in which the real tokens of every row follow each other; None if they do so already.

    In compiled calls, which cannot read the mask, tokens are joined wherever there is one. Exported programs keep the
    order of the slots: sorting would fix their lengths, and padding there stands at an end of a row.

    Args:
        call: Of the attention layer.
        start: The key that is the first query's own.
        grows: Of the layer, see `Host`.
    """
    if is_exporting():
        return None
    places = call.read_mask(grows).places
    if places.real is None or (can_read(places.real) and isinstance(start, int) and places.spans is not None):
        return None
    slot = torch.arange(places.keys, device=places.device)
    # Keys after the last query's own are empty slots of a cache.
    real = places.real[:, places.dropped :] & (slot < start + places.queries)
    own = real.index_select(1, places.own_keys)
    # In sorted order False stands before True, and equals keep their places.
    return Joined(own.int().argsort(dim=1, stable=True), real.int().argsort(dim=1, stable=True))
