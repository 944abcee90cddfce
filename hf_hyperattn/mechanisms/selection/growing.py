"""Tensors that tokens are added to one by one, and of which tokens are forgotten: what caches are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from ...readable import is_recorded

#: How many tokens can be taken back from what is kept in part, as assisted decoding does: the keys of a cache that
#: evicts, and the queries that selections share.
TAKEN_BACK = 64


class GrowingTensor:
    """A tensor [B, H, length, e] that tokens are added to; room grows by an eighth, so that adding costs O(1) a token.

    Once some are evicted it holds the first `head` of them, and next to those the ones from `base` on.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None):
        self.length = self.head = self.base = 0
        self.room = like.new_empty((*like.shape[:2], 0, like.shape[3]), dtype=dtype or like.dtype)

    @property
    def gone(self) -> int:
        """How many are evicted."""
        return self.base - self.head

    def view(self) -> Tensor:
        """All that is held, [B, H, length - gone, e]."""
        return self.room[:, :, : self.length - self.gone]

    def places(self) -> Tensor:
        """Where what is held stands among all, int64."""
        place = torch.arange(self.length - self.gone, device=self.room.device)
        return torch.where(place < self.head, place, place + self.gone)

    def placeholder(self, heads: int) -> Tensor:
        """NaN of the shape of all tokens, [B, heads, length, e]; it holds one number."""
        batch, _, _, width = self.room.shape
        return self.room.new_full((), float("nan")).expand(batch, heads, self.length, width)

    def extend(self, length: int) -> None:
        """Make it so long; what is new holds nothing in particular."""
        needed = length - self.gone
        # what was made under inference mode, torch lets nobody write to later
        closed = (
            not (is_recorded() or torch.is_inference_mode_enabled()) and self.room.is_inference()
        )
        if needed > self.room.shape[2] or closed:
            now = self.view()
            self.room = now.new_empty(
                (*now.shape[:2], max(needed, now.shape[2] * 9 // 8), now.shape[3])
            )
            self.room[:, :, : now.shape[2]] = now
        self.length = length

    def append(self, new: Tensor) -> None:
        """Add tokens [B, H, n, e]."""
        start = self.length - self.gone
        self.extend(self.length + new.shape[2])
        self.room[:, :, start : start + new.shape[2]] = new

    def evict(self, first: int, head: int) -> None:
        """Forget those before `first` but the first `head`, if that frees a ninth of the room or more."""
        if 9 * (first - self.base) < self.length - self.base:
            return
        head = self.head if self.gone else max(self.head, min(head, first))
        held = self.view()
        self.room = torch.cat([held[:, :, :head], held[:, :, first - self.gone :]], 2)
        self.head, self.base = head, first

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch."""
        self.room = self.view()[rows.to(self.room.device)]
