"""Chunks of queries that share a selection, and the choice of the best scores.

All rules that select keys by scores are built from these parts.
"""

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
#: Sizes up to this are never compared with the length of a text. A comparison would tie a traced
#: program to texts on one side of it.
SMALL = 4096
CHUNK_HELP = "so many queries share a selection; with query='own' it is 1"


class SelectingRule(SparseRule):
    """A rule whose chunks of queries share a selection.

    Subclasses have the fields `query` and `chunk`.
    """

    query: Selector
    chunk: int

    def __post_init__(self):
        super().__post_init__()
        if self.query == "own":
            # The dataclass is frozen, so a plain assignment raises.
            object.__setattr__(self, "chunk", 1)

    @property
    def earlier(self) -> int:
        """Number of earlier queries of the chunk; with "previous" also of the one before."""
        return {"own": 0, "previous": 2 * self.chunk - 1}.get(self.query, self.chunk - 1)


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks that the queries of a call lie in.

    Args:
        query: [B, H, R, d], the selecting vector of each chunk.
        start: int64 [B, 1, R, 1], the first token of each chunk.
        known: bool [B, R], whether the call held all queries that `query` is made of.
        of_query: int64 [B, N], the chunk of each query.
    """

    query: Tensor
    start: Tensor
    known: Tensor
    of_query: Tensor

    def spread_to_queries(self, rows: Tensor) -> Tensor:
        """Repeat rows of chunks, [B, 1 or H, R, X], for their queries, [B, 1 or H, N, X]."""
        index = self.of_query[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
        return rows.expand(len(index), -1, -1, -1).gather(2, index)

    def take(self, rows: Tensor) -> Chunks:
        """Return some of the chunks; `of_query` stays as it is.

        Args:
            rows: int64 [B, R], the numbers of the chunks.
        """
        index = rows[:, None, :, None]
        heads, width = self.query.shape[1], self.query.shape[-1]
        return Chunks(
            query=self.query.gather(2, index.expand(-1, heads, -1, width)),
            start=self.start.expand(len(rows), -1, -1, -1).gather(2, index),
            known=self.known.expand(len(rows), -1).gather(1, rows),
            of_query=self.of_query,
        )

    def check_known(self, call: RuleCall, candidates: Tensor) -> None:
        """Raise if a query would choose among candidates by queries that are unknown.

        Args:
            call: The call of these chunks.
            candidates: Bool [B, 1, R, X].

        Raises:
            ValueError: See `RuleCall.check`.
        """
        # Without candidates there is nothing to choose, so unknown queries do no harm.
        fine = self.known | ~candidates.any(-1)[:, 0]
        call.check(fine.gather(1, self.of_query))


def limit_to_text(size: int, length: int) -> int:
    """Return a size in tokens, cut to the length of the text if both are large.

    Memory then grows with the text only, and not with a page or chunk that is longer than any text.

    Args:
        size: Of a page, a chunk, ...; one as long as the text holds all of it.
        length: Tokens of the text.
    """
    return size if size <= SMALL else max(1, min(size, length))


def scatter_rows(x: Tensor, slot: Tensor, slots: int) -> Tensor:
    """Return [B, H, slots, d] with the rows of x at their slots, 0 elsewhere.

    Args:
        x: [B, H, N, d].
        slot: int64 [B, N], the slot of each row; rows with a slot below 0 are dropped.
        slots: Number of slots.
    """
    # Dropped rows go to one more slot, which is cut off again.
    index = slot.where(slot >= 0, slots)[:, None, :, None].expand_as(x)
    return x.new_zeros(*x.shape[:2], slots + 1, x.shape[3]).scatter(2, index, x)[:, :, :slots]


def split_chunks(
    call: RuleCall, size: int, by: Selector | Literal["tail"], tail: int = 0
) -> Chunks:
    """Return the chunks of a call's queries and their selecting vectors.

    Args:
        call: With the queries and their places.
        size: Tokens of a chunk.
        by: As in `QUERY_HELP`. "tail": the last `tail` queries of the chunk before, as `query` [B,
            H, R, tail, d].
        tail: See `by`.
    """
    place = call.place
    real = place >= 0
    if by == "own":
        number = torch.arange(place.shape[1], device=place.device)
        return Chunks(
            query=call.query, start=call.places, known=real, of_query=number.expand_as(place)
        )
    size = max(tail, limit_to_text(size, call.key.shape[2]))
    # Number of the first chunk of each row that holds a query. The clamp is for rows of padding
    # only.
    smallest = place.where(real, torch.iinfo(place.dtype).max).amin(1, keepdim=True)
    base = smallest.clamp_max(place.amax()) // size
    # N consecutive queries lie in at most N // size + 2 chunks: both ends may be cut.
    count = place.shape[1] // size + 2
    slot = (place - base * size).where(real, -1)
    laid = scatter_rows(call.query, slot, count * size).unflatten(2, (count, size))
    there = scatter_rows(real[:, None, :, None].to(laid.dtype), slot, count * size)
    there = there.unflatten(2, (count, size))  # [B, 1, R, size, 1], 1 where a query is
    if by == "first":
        query = laid[:, :, :, 0]
        known = there[:, 0, :, 0, 0] > 0
    elif by == "tail":
        query = laid[:, :, :, size - tail :]
        known = there[:, 0, :, size - tail :, 0].amin(2) > 0
    else:
        held = there.sum(3)
        query = laid.sum(3) / held.clamp_min(1)
        # A chunk may end after the call. Its queries before the call must be there.
        known = held[:, 0, :, 0] >= size if by == "previous" else there[:, 0, :, 0, 0] > 0
    if by in ("previous", "tail"):
        # Chunk c selects by chunk c - 1. The first chunk would get the last one, so it counts as
        # unknown.
        query = query.roll(1, 2)
        known = known.roll(1, 1)
        known = known & (torch.arange(count, device=place.device) > 0)
    start = (base + torch.arange(count, device=place.device)) * size
    return Chunks(
        query=query,
        start=start[:, None, :, None],
        known=known,
        of_query=(place // size - base).clamp(0, count - 1),
    )
