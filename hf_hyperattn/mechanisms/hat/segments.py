"""Segmentation: how the tokens of a batch lie in segments of K tokens, each led by a CLS token.

The first token of a text is its CLS token. The tokens after it fill segments in order, K - 1 to each, the last one
with what is left; every segment's first place holds the text's CLS token. So n tokens make max(1, ceil((n-1)/(K-1)))
segments, and a text of at most K tokens is one segment, as it was. A caller may say where else segments begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def segments_of(tokens: int, length: int) -> int:
    """The most segments of length K that so many tokens make."""
    return max(
        1, (tokens + length - 3) // (length - 1)
    )  # no negative number: ONNX rounds towards 0


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
        rows = states.flatten(0, 1)[self.places]
        return rows * self.real.view(*self.real.shape, *[1] * (rows.ndim - 2))

    def cls_rows(self, states: Tensor) -> Tensor:
        """The CLS rows [B, S, ...] of [T, W, ...]; where not present, those of another segment."""
        return states[:, 0][self.members]

    def with_cls_rows(self, states: Tensor, rows: Tensor) -> Tensor:
        """The states [T, W, ...] with other CLS rows, [B, S, ...]."""
        return torch.cat([rows.flatten(0, 1)[self.rows][:, None], states[:, 1:]], 1)


def segment(
    real: Tensor,
    length: int,
    led: Tensor | None = None,
    packed: bool = True,
    groups: Tensor | None = None,
) -> Segments:
    """Cut a batch into segments.

    Args:
        real: bool [B, N], False at padding, which may lie anywhere. A row of padding alone makes one segment, which its
            first token leads.
        length: K.
        led: bool [B], False for texts whose first token is no CLS token and stands behind one; None: all are led.
        packed: make only the segments that there are, as wide as the fullest one; else as many and as wide as N tokens
            could need, so that no shape depends on the data.
        groups: int [B, N]: where the number changes from one token behind the CLS token to the next a segment begins,
            and where K - 1 tokens are in one. None: only the latter. Only where packed.
    """
    B, N = real.shape
    device = real.device
    cls_tokens = torch.ones(B, dtype=torch.long, device=device) if led is None else led.long()
    # number among the tokens behind the CLS token, which has -1
    rank = (real.cumsum(1) - 1 - cls_tokens[:, None]).clamp_min(-1)
    behind = real & (rank >= 0)
    number, inside = _numbered(rank, behind, length, groups)
    each = torch.where(behind, number, 0).amax(1) + 1
    if packed:
        most, total = int(each.max()), int(each.sum())
        width = 1 + int(torch.where(behind, inside + 1, 0).max())
        first = each.cumsum(0) - each
        text = torch.arange(B, device=device).repeat_interleave(each, output_size=total)
    else:
        most = segments_of(N + 1 - int(led is None), length)
        total, width = B * most, min(length, N + 1)
        first = torch.arange(B, device=device) * most
        text = torch.arange(total, device=device) // most
    places = first[:, None] * width + torch.where(behind, number * width + 1 + inside, 0)
    tokens = _inverse(places, real, total * width).view(total, width)
    filled = tokens >= 0
    filled[:, 0] = True
    start = (real.long().argmax(1) + torch.arange(B, device=device) * N)[text][:, None]
    tokens = torch.cat([start, torch.where(tokens >= 0, tokens, start)[:, 1:]], 1)
    index = torch.arange(most, device=device)
    present = index < each[:, None]
    members = torch.where(present, first[:, None] + index, 0)
    rows = text * most + torch.arange(total, device=device) - first[text]
    return Segments(tokens, filled, torch.where(real, places, 0), real, members, present, rows)


def _numbered(
    rank: Tensor, behind: Tensor, length: int, groups: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In which segment of its text each token behind the CLS token stands, and how many stand before it there."""
    if groups is None:
        return rank // (length - 1), rank % (length - 1)
    B, N = rank.shape
    order = torch.where(behind, rank, N)
    ranked = torch.zeros(B, N + 1, dtype=groups.dtype, device=groups.device).scatter(
        1, order, groups
    )[:, :N]
    begins = torch.ones_like(behind)
    begins[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    at = torch.arange(N, device=rank.device)
    inside = (at - torch.where(begins, at, 0).cummax(1).values) % (length - 1)
    number = (inside == 0).cumsum(1) - 1
    return number.gather(1, rank.clamp_min(0)), inside.gather(1, rank.clamp_min(0))


def _inverse(places: Tensor, real: Tensor, total: int) -> Tensor:
    """Which token stands in each of the places; -1 where none does."""
    none, number = (
        torch.full((total + 1,), -1, device=places.device),
        torch.arange(places.numel(), device=places.device),
    )
    return none.scatter(0, torch.where(real, places, total).flatten(), number)[:-1]
