"""What rules that select have in common: chunks of queries that share a selection, and the best of what they score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .rules import RuleCall, SparseRule

Selector = Literal["own", "first", "previous", "chunk"]
SELECTORS = get_args(Selector)

#: What `query=` means, for the help of rules.
QUERY_HELP = (
    "own: each query selects for itself; first: the first query of a chunk selects for all of it; previous: the mean "
    "query of the chunk before; chunk: the mean of the chunk's own queries up to the end of the call: those of a "
    "prompt then depend on up to chunk - 1 tokens after them, and those before the call must be known"
)
#: Sizes up to this are not compared with a text: a traced program would hold for texts on one side of it alone.
SMALL = 4096
CHUNK_HELP = "so many queries share a selection; with query='own' it is 1"


class SelectingRule(SparseRule):
    """A rule whose chunks of queries share a selection. Subclasses have the fields `query` and `chunk`."""

    query: Selector
    chunk: int

    def __post_init__(self):
        super().__post_init__()
        if self.query == "own":
            object.__setattr__(self, "chunk", 1)

    @property
    def earlier(self) -> int:
        """Those of the query's chunk, or of the one before it too."""
        return {"own": 0, "previous": 2 * self.chunk - 1}.get(self.query, self.chunk - 1)


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks that the queries of a call lie in.

    Args:
        query: [B, H, R, d], what each chunk selects by.
        start: int64 [B, 1, R, 1], the first token of each.
        known: bool [B, R], whether all queries that `query` is made of were there.
        of_query: int64 [B, N], the chunk of each query.
    """

    query: Tensor
    start: Tensor
    known: Tensor
    of_query: Tensor

    def spread(self, rows: Tensor) -> Tensor:
        """[B, 1 or H, R, X] of chunks as [B, 1 or H, N, X] of queries."""
        index = self.of_query[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
        return rows.expand(len(index), -1, -1, -1).gather(2, index)

    def check(self, call: RuleCall, candidates: Tensor) -> None:
        """Raise where a query would choose among candidates, bool [B, 1, R, X], by queries that are not known."""
        fine = self.known | ~candidates.any(-1)[:, 0]
        call.check(fine.gather(1, self.of_query))


def cut_to_text(size: int, length: int) -> int:
    """A size in tokens, no more than a text has where both are large: what is made then grows with the text alone.

    Args:
        size: of a page, a chunk, ...: one as long as the text holds all of it.
        length: tokens of the text.
    """
    return size if size <= SMALL else max(1, min(size, length))


def lay(x: Tensor, slot: Tensor, slots: int) -> Tensor:
    """[B, H, slots, d]: row n of x [B, H, N, d] at `slot` [B, N], 0 where there is none; slots below 0 are dropped."""
    index = slot.where(slot >= 0, slots)[:, None, :, None].expand_as(x)
    return x.new_zeros(*x.shape[:2], slots + 1, x.shape[3]).scatter(2, index, x)[:, :, :slots]


def chunks_of(call: RuleCall, size: int, by: Selector | Literal["tail"], tail: int = 0) -> Chunks:
    """The chunks of `size` tokens that a call's queries lie in, and what they select by.

    Args:
        by: as QUERY_HELP has it; tail: the last `tail` queries of the chunk before, as `query` [B, H, R, tail, d].
    """
    place, real = call.place, call.place >= 0
    if by == "own":
        return Chunks(
            call.query,
            call.places,
            real,
            torch.arange(place.shape[1], device=place.device).expand_as(place),
        )
    size = max(tail, cut_to_text(size, call.key.shape[2]))
    base = (
        place.where(real, torch.iinfo(place.dtype).max)
        .amin(1, keepdim=True)
        .clamp_max(place.amax())
        // size
    )
    count = place.shape[1] // size + 2
    laid = lay(call.query, (place - base * size).where(real, -1), count * size).unflatten(
        2, (count, size)
    )
    there = lay(
        real[:, None, :, None].to(laid.dtype), (place - base * size).where(real, -1), count * size
    )
    there = there.unflatten(2, (count, size))  # [B, 1, R, size, 1]
    if by == "first":
        query, known = laid[:, :, :, 0], there[:, 0, :, 0, 0] > 0
    elif by == "tail":
        query, known = laid[:, :, :, size - tail :], there[:, 0, :, size - tail :, 0].amin(2) > 0
    else:
        held = there.sum(3)
        query = laid.sum(3) / held.clamp_min(1)
        # A chunk may end after the call. Its queries before the call must be there.
        known = held[:, 0, :, 0] >= size if by == "previous" else there[:, 0, :, 0, 0] > 0
    if by in ("previous", "tail"):
        query, known = query.roll(1, 2), known.roll(1, 1)
        known = known & (torch.arange(count, device=place.device) > 0)
    start = (base + torch.arange(count, device=place.device)) * size
    return Chunks(query, start[:, None, :, None], known, (place // size - base).clamp(0, count - 1))


def best(score: Tensor, candidates: Tensor, top: int) -> Tensor:
    """Bool, shaped as `score` [..., X]: the `top` largest scores among the candidates; of equal ones the first."""
    score = score.masked_fill(~candidates, -torch.inf)
    top = min(top, score.shape[-1])
    if not top:
        return torch.zeros_like(candidates).expand_as(score)
    least = score.topk(top, -1).values[..., -1:]
    above, equal = score > least, score == least
    room = top - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & candidates
