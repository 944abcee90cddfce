"""Split a batch into segments of K tokens, each led by a CLS token.

The first token of a text is its CLS token. The tokens after it fill segments in order, K - 1 each,
and the rest the last one. The first place of every segment holds the text's CLS token. n tokens
therefore make max(1, ceil((n-1)/(K-1))) segments, and a text of at most K tokens is one unchanged
segment. The caller may choose other segment boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def count_segments(tokens: int, length: int) -> int:
    """Return the largest number of segments of length K for this many tokens."""
    # ceil((tokens - 1) / (length - 1)) without a negative number: ONNX rounds those towards 0.
    return max(1, (tokens + length - 3) // (length - 1))


@dataclass(frozen=True)
class Segments:
    """A batch of B texts with N places, as T segments of width W <= K.

    Args:
        tokens: Numbers of tokens among the B·N of the batch, int64 [T, W]; empty places have their
            text's first token.
        filled: Whether a place holds a token, bool [T, W]; the first place of a segment is its CLS
            token, and filled.
        places: Place of each token among the T·W, int64 [B, N]; 0 at padding.
        real: Whether a token is no padding, bool [B, N].
        members: Segments of each text among the T, int64 [B, S]; 0 if it has fewer.
        present: Whether a text has this segment, bool [B, S].
        rows: Number of each segment among the B·S, int64 [T].
    """

    tokens: Tensor
    filled: Tensor
    places: Tensor
    real: Tensor
    members: Tensor
    present: Tensor
    rows: Tensor

    def to_segments(self, batch: Tensor) -> Tensor:
        """Distribute values of tokens [B, N, ...] to the places of segments [T, W, ...]."""
        return batch.flatten(0, 1)[self.tokens]

    def to_tokens(self, states: Tensor) -> Tensor:
        """Collect values of places [T, W, ...] for tokens [B, N, ...]; 0 at padding."""
        rows = states.flatten(0, 1)[self.places]
        return rows * self.real.view(*self.real.shape, *[1] * (rows.ndim - 2))

    def cls_rows(self, states: Tensor) -> Tensor:
        """Return the CLS rows [B, S, ...] of [T, W, ...]; arbitrary where not present."""
        return states[:, 0][self.members]

    def with_cls_rows(self, states: Tensor, rows: Tensor) -> Tensor:
        """Return the states [T, W, ...] with other CLS rows, from [B, S, ...]."""
        return torch.cat([rows.flatten(0, 1)[self.rows][:, None], states[:, 1:]], 1)


def split_batch(
    real: Tensor,
    length: int,
    led: Tensor | None = None,
    packed: bool = True,
    groups: Tensor | None = None,
) -> Segments:
    """Split a batch into segments.

    Args:
        real: False at padding, which may be anywhere, bool [B, N]. A row with only padding makes
            one segment, led by its first token.
        length: K.
        led: False for texts whose first token is no CLS token and follows one, bool [B]; None: all
            are led.
        packed: True: make only the segments that are needed, as wide as the fullest one. False:
            make as many and as wide as N tokens could need, so that no shape depends on the data.
        groups: int [B, N]. A segment begins where the number changes from one token after the CLS
            token to the next, and after K - 1 tokens. None: only after K - 1 tokens. Only with
            `packed`.
    """
    B, N = real.shape
    device = real.device
    cls_tokens = torch.ones(B, dtype=torch.long, device=device) if led is None else led.long()
    # Number of each token after the CLS token, counted from 0; the CLS token has -1.
    rank = (real.cumsum(1) - 1 - cls_tokens[:, None]).clamp_min(-1)
    behind = real & (rank >= 0)
    number, inside = _assign_segments(rank, behind, length, groups)
    each = torch.where(behind, number, 0).amax(1) + 1
    if packed:
        most, total = int(each.max()), int(each.sum())
        # Reading the data gives the smallest shapes, but synchronises a GPU.
        width = 1 + int(torch.where(behind, inside + 1, 0).max())
        first = each.cumsum(0) - each
        text = torch.arange(B, device=device).repeat_interleave(each, output_size=total)
    else:
        # The worst case depends on the shape alone, as compilation and export require.
        most = count_segments(N + 1 - int(led is None), length)
        total, width = B * most, min(length, N + 1)
        first = torch.arange(B, device=device) * most
        text = torch.arange(total, device=device) // most
    # The CLS token stands at place 0 of the first segment, others one place behind their number.
    places = first[:, None] * width + torch.where(behind, number * width + 1 + inside, 0)
    tokens = _invert_places(places, real, total * width).view(total, width)
    filled = tokens >= 0
    filled[:, 0] = True
    # Every segment begins with the text's CLS token, which also fills its empty places.
    start = (real.long().argmax(1) + torch.arange(B, device=device) * N)[text][:, None]
    tokens = torch.cat([start, torch.where(tokens >= 0, tokens, start)[:, 1:]], 1)
    # Number the segments of each text, and mark the ones that exist.
    index = torch.arange(most, device=device)
    present = index < each[:, None]
    members = torch.where(present, first[:, None] + index, 0)
    rows = text * most + torch.arange(total, device=device) - first[text]
    return Segments(
        tokens=tokens,
        filled=filled,
        places=torch.where(real, places, 0),
        real=real,
        members=members,
        present=present,
        rows=rows,
    )


def _assign_segments(
    rank: Tensor, behind: Tensor, length: int, groups: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the segment of each token after the CLS token, and its position there.

    Args:
        rank: Number of each token after the CLS token, int64 [B, N].
        behind: Whether a token is real and after the CLS token, bool [B, N].
        length: K.
        groups: As in `split_batch`.
    """
    if groups is None:
        return rank // (length - 1), rank % (length - 1)
    B, N = rank.shape
    # Sort the groups by rank, so that padding does not separate neighbours. Padding goes to place
    # N.
    order = torch.where(behind, rank, N)
    ranked = torch.zeros(B, N + 1, dtype=groups.dtype, device=groups.device).scatter(
        1, order, groups
    )[:, :N]
    begins = torch.ones_like(behind)
    begins[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    at = torch.arange(N, device=rank.device)
    # Position since the last begin; a long group begins a new segment after K - 1 tokens.
    inside = (at - torch.where(begins, at, 0).cummax(1).values) % (length - 1)
    number = (inside == 0).cumsum(1) - 1
    return number.gather(1, rank.clamp_min(0)), inside.gather(1, rank.clamp_min(0))


def _invert_places(places: Tensor, real: Tensor, total: int) -> Tensor:
    """Return the token at each place, or -1 for an empty place."""
    tokens = torch.full((total + 1,), -1, device=places.device)
    number = torch.arange(places.numel(), device=places.device)
    # Padding is written to one extra place, which is cut off.
    return tokens.scatter(0, torch.where(real, places, total).flatten(), number)[:-1]
