"""Segmentation: how the tokens of a batch lie in segments of K tokens, each led by a CLS token.

The first token of a text is its CLS token. The tokens after it fill segments in order, K - 1 to each, the last one
with what is left; every segment's first place holds the text's CLS token. So n tokens make max(1, ceil((n-1)/(K-1)))
segments, and a text of at most K tokens is one segment, as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def segments_of(tokens: int, length: int) -> int:
    """The most segments of length K that so many tokens make."""
    return max(1, -(-(tokens - 1) // (length - 1)))


@dataclass(frozen=True)
class Segments:
    """A batch of B texts, of N places with padding anywhere, as T segments of width W <= K.

    Args:
        tokens: int64 [T, W], numbers among the B·N tokens of the batch; places that hold none have their text's first.
        filled: bool [T, W], whether a token stands there; each segment's first place is its CLS token and is filled.
        places: int64 [B, N], where each token of the batch stands among the T·W; 0 at padding.
        real: bool [B, N], whether the token is no padding.
        members: int64 [B, S], which of the T are the segments of each text; 0 where it has fewer.
        present: bool [B, S], whether it has so many.
        rows: int64 [T], number of each segment among the B·S.
    """

    tokens: Tensor
    filled: Tensor
    places: Tensor
    real: Tensor
    members: Tensor
    present: Tensor
    rows: Tensor

    def to_segments(self, batch: Tensor) -> Tensor:
        """What each place of the segments holds, [T, W, ...], of what the tokens have, [B, N, ...]."""
        return batch.flatten(0, 1)[self.tokens]

    def to_tokens(self, states: Tensor) -> Tensor:
        """[T, W, ...] to [B, N, ...], 0 at padding."""
        found = states.flatten(0, 1)[self.places]
        return found * self.real.view(*self.real.shape, *[1] * (found.ndim - 2))

    def cls_rows(self, states: Tensor) -> Tensor:
        """The CLS rows [B, S, ...] of [T, W, ...]; where not present, those of another segment."""
        return states[:, 0][self.members]

    def with_cls_rows(self, states: Tensor, rows: Tensor) -> Tensor:
        """The states [T, W, ...] with other CLS rows, [B, S, ...]."""
        return torch.cat([rows.flatten(0, 1)[self.rows][:, None], states[:, 1:]], 1)


def segment(real: Tensor, length: int, led: Tensor | None = None, packed: bool = True) -> Segments:
    """Cut a batch into segments.

    Args:
        real: bool [B, N], False at padding, which may lie anywhere; every text has at least one token.
        length: K.
        led: bool [B], False for texts whose first token is no CLS token and stands behind one; None: all are led.
        packed: make only the segments that there are, as wide as the fullest one; else as many and as wide as N tokens
            could need, so that no shape depends on the data.
    """
    B, N = real.shape
    own = torch.ones(B, dtype=torch.long, device=real.device) if led is None else led.long()
    rank = real.cumsum(1) - 1 - own[:, None]  # among the tokens behind the CLS token; -1 for that itself
    behind = real.sum(1) - own
    number = -(-behind // (length - 1))
    number = number.clamp_min(1)
    if packed:
        most, total = int(number.max()), int(number.sum())
        width = min(length, 1 + int(behind.max()))
        first = number.cumsum(0) - number
        text = torch.arange(B, device=real.device).repeat_interleave(number, output_size=total)
    else:
        most = segments_of(N + 1 - int(led is None), length)
        total, width = B * most, min(length, N + 1)
        first = torch.arange(B, device=real.device) * most
        text = torch.arange(B, device=real.device).repeat_interleave(most, output_size=total)
    rank = rank.clamp_min(-1)
    inside = first[:, None] + rank.clamp_min(0) // (length - 1)
    places = inside * width + torch.where(rank < 0, 0, 1 + rank % (length - 1))
    start = real.long().argmax(1) + torch.arange(B, device=real.device) * N
    tokens = _inverse(places, real, total * width).view(total, width)
    filled = tokens >= 0
    filled[:, 0] = True
    tokens = torch.where(tokens >= 0, tokens, start[text][:, None])
    tokens[:, 0] = start[text]
    index = torch.arange(total, device=real.device) - first[text]
    present = torch.arange(most, device=real.device) < number[:, None]
    members = torch.where(present, first[:, None] + torch.arange(most, device=real.device), 0)
    return Segments(tokens, filled, torch.where(real, places, 0), real, members, present, text * most + index)


def _inverse(places: Tensor, real: Tensor, total: int) -> Tensor:
    """Which token stands in each of the places; -1 where none does."""
    found = torch.full((total + 1,), -1, device=places.device)
    number = torch.arange(places.numel(), device=places.device)
    return found.scatter(0, torch.where(real, places, total).flatten(), number)[:-1]
