"""`GrowingTensor`: the storage of a cache, which appends and evicts tokens.

Eviction leaves the first tokens and the last ones. Indices of tokens never change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.readable import is_recorded

#: Number of tokens that can be taken back, as assisted decoding does, from what is only kept in
#: part: the keys of a cache that evicts, and the queries that selections share.
TAKEN_BACK = 64


class GrowingTensor:
    """A tensor [B, H, length, e] that grows token by token.

    After an eviction it holds the first `head` tokens, and next to them the tokens from `base` on.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None):
        self.length = self.head = self.base = 0
        self.room = like.new_empty((*like.shape[:2], 0, like.shape[3]), dtype=dtype or like.dtype)

    @property
    def gone(self) -> int:
        """Number of evicted tokens."""
        return self.base - self.head

    def view(self) -> Tensor:
        """Return all held tokens, a view [B, H, length - gone, e]."""
        return self.room[:, :, : self.length - self.gone]

    def find_places(self) -> Tensor:
        """Return the index of each held token among all tokens, int64."""
        place = torch.arange(self.length - self.gone, device=self.room.device)
        return torch.where(place < self.head, place, place + self.gone)

    def make_placeholder(self, heads: int) -> Tensor:
        """Return NaN with the shape of all tokens, [B, heads, length, e].

        It is one number, expanded.
        """
        batch, _, _, width = self.room.shape
        return self.room.new_full((), float("nan")).expand(batch, heads, self.length, width)

    def set_length(self, length: int) -> None:
        """Make room for `length` tokens; the content of new ones is undefined."""
        needed = length - self.gone
        # torch forbids writing to a tensor that was made under inference mode once that mode has
        # ended. Then copy it.
        is_closed = (
            not (is_recorded() or torch.is_inference_mode_enabled()) and self.room.is_inference()
        )
        if needed > self.room.shape[2] or is_closed:
            held = self.view()
            # The room grows by an eighth, so that appending a token costs O(1) on average.
            size = max(needed, held.shape[2] * 9 // 8)
            self.room = held.new_empty((*held.shape[:2], size, held.shape[3]))
            self.room[:, :, : held.shape[2]] = held
        self.length = length

    def append(self, new: Tensor) -> None:
        """Append tokens [B, H, n, e]."""
        start = self.length - self.gone
        self.set_length(self.length + new.shape[2])
        self.room[:, :, start : start + new.shape[2]] = new

    def evict(self, first: int, head: int) -> None:
        """Evict the tokens before `first`, except for the first `head` ones.

        Does nothing if less than a ninth of the tokens would be freed, so that copies are rare.
        """
        if 9 * (first - self.base) < self.length - self.base:
            return
        # After the first eviction the head cannot grow: the tokens behind it are gone.
        head = self.head if self.gone else max(self.head, min(head, first))
        held = self.view()
        self.room = torch.cat([held[:, :, :head], held[:, :, first - self.gone :]], 2)
        self.head, self.base = head, first

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.room = self.view()[rows.to(self.room.device)]
