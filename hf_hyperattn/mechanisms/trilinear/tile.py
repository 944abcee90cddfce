"""Tiles of three-way attention: a block of queries, a chunk of keys k, and all keys j that the block can see.

For one k, three-way attention is an ordinary row of attention of the query q_i ∘ k2_k; a tile is therefore one matrix
product of modified queries with keys. Where windows are shorter than the sequence, the keys k of neighbouring queries
lie on a diagonal: they are read as a view of a short span, and their gradients are summed along it in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engines.options import Options
from .pairs import Windows, of_first, of_second

#: Logits of one tile: enough that the overhead of an operation vanishes, few enough for the cache of a core.
ELEMENTS = 2**18


@dataclass
class Tensors:
    """What a call is about, or the gradients of that, grouped by key heads.

    query [B, Hkv, G, N, d], scaled; key, key2 [B, Hkv, M, d]; value, value2 [B, Hkv, M, dv]; mask and bias
    [B|1, Hkv|1, G|1, N|1, M|1]; sinks [Hkv, G].
    """

    query: Tensor
    key: Tensor
    key2: Tensor
    value: Tensor
    value2: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass
class Call:
    """Tensors, options (whose tensors stand in `tensors`), windows, and the seed of dropout."""

    tensors: Tensors
    options: Options
    windows: Windows
    seed: int = 0

    @property
    def keys(self) -> int:
        return self.tensors.key.shape[2]

    def reach(self, window: int | None) -> int:
        """Of how many keys a query sees at most."""
        if window is None:
            return self.keys
        return min(self.keys, window if self.windows.back else 2 * window - 1)

    def blocks(self) -> Iterator[Block]:
        """Blocks of queries, one key head at a time."""
        batch, kv_heads, group, n, _ = self.tensors.query.shape
        first, second = self.reach(self.windows.first), self.reach(self.windows.second)
        size = max(1, ELEMENTS // max(1, group * second * first))
        while size > 1 and group * second * size * min(self.keys, first + size - 1) > ELEMENTS:
            size -= 1
        size = min(size, max(1, n))
        for b in range(batch):
            for h in range(kv_heads):
                for i in range(0, n, size):
                    yield Block(self, b, h, range(i, min(i + size, n)))


@dataclass
class Block:
    """Queries `rows` of key head `head`; `columns` are the keys j that they can see."""

    call: Call
    batch: int
    head: int
    rows: range

    def __post_init__(self):
        call, place = self.call, self.call.options.offset
        w, back, start, stop = call.windows.first, call.windows.back, 0, call.keys
        if w is not None:
            start = max(0, self.rows.start + place - w + 1)
            stop = min(stop, self.rows.stop + place + (0 if back else w - 1))
        if call.options.is_causal:
            stop = min(stop, self.rows.stop + place)
        self.columns = range(min(start, call.keys), max(stop, min(start, call.keys)))
        self.sliding = call.reach(call.windows.second) < call.keys
        own = Options(
            self._pairs(call.tensors.mask), self._pairs(call.tensors.bias), call.options.is_causal,
            call.options.window, place, call.options.softcap,
        )  # fmt: skip
        self.options = own
        self.first = of_first(own, call.windows, self.rows, self.columns, call.tensors.query)[0]

    def _pairs(self, t: Tensor | None) -> Tensor | None:
        """[1, G|1, N|1, M|1] of [B|1, Hkv|1, G|1, N|1, M|1]."""
        if t is None:
            return None
        t = t[self.batch if t.shape[0] > 1 else 0]
        return t[self.head if t.shape[0] > 1 else 0][None]

    def of_query(self, t: Tensor) -> Tensor:
        """[G, R, ...] of [B, Hkv, G, N, ...]."""
        return t[self.batch, self.head, :, self.rows.start : self.rows.stop]

    def of_first(self, t: Tensor) -> Tensor:
        """[J, d] of [B, Hkv, M, d]."""
        return t[self.batch, self.head, self.columns.start : self.columns.stop]

    def chunks(self) -> Iterator[Chunk]:
        """The keys k in parts: of the window, or of the sequence where there is none."""
        call, group = self.call, self.call.tensors.query.shape[2]
        total = call.reach(call.windows.second)
        if not self.sliding and call.options.is_causal:
            total = min(total, self.rows.stop + call.options.offset)
        size = max(1, ELEMENTS // max(1, group * len(self.rows) * len(self.columns)))
        for start in range(0, total, size):
            yield Chunk(self, range(start, min(start + size, total)))


@dataclass
class Chunk:
    """Keys k number `part` of each query's window, or of the sequence."""

    block: Block
    part: range

    def __post_init__(self):
        block, call = self.block, self.block.call
        device = call.tensors.query.device
        index = torch.arange(self.part.start, self.part.stop, device=device)[None]
        if block.sliding:
            self.start = block.rows.start + call.options.offset - call.windows.second + 1 + self.part.start
            at = torch.arange(len(block.rows), device=device)[:, None]
            index = at + torch.arange(len(self.part), device=device)[None] + self.start
        second = of_second(block.options, call.windows, block.rows, index, call.keys, call.tensors.query)
        self.second = second[0].expand(-1, len(block.rows), -1)  # [G|1, R, C]

    def read(self, t: Tensor) -> Tensor:
        """[R|1, C, d] of [B, Hkv, M, d]."""
        t = t[self.block.batch, self.block.head]
        if not self.block.sliding:
            return t[self.part.start : self.part.stop][None]
        low, high = self._span()
        t = pad(t[low:high], (0, 0, low - self.start, self.start + self._length() - high))
        return t.unfold(0, len(self.part), 1).mT

    def add(self, buffer: Tensor, gradient: Tensor) -> None:
        """Add [R, C, d] to a buffer [B, Hkv, M, d]: the adjoint of `read`."""
        buffer = buffer[self.block.batch, self.block.head]
        if not self.block.sliding:
            buffer[self.part.start : self.part.stop] += gradient.sum(0)
            return
        rows, count, width = gradient.shape
        # rows one longer than the step from row to row: each then starts one place further
        shifted = pad(gradient, (0, 0, 0, rows)).flatten(0, 1)[: rows * (rows + count - 1)]
        total = shifted.view(rows, rows + count - 1, width).sum(0)
        low, high = self._span()
        buffer[low:high] += total[low - self.start : high - self.start]

    def _length(self) -> int:
        return len(self.block.rows) + len(self.part) - 1

    def _span(self) -> tuple[int, int]:
        """The keys of the span that there are; low <= high and both within it."""
        keys, end = self.block.call.keys, self.start + self._length()
        low = min(max(self.start, 0), end)
        return low, max(low, min(end, keys))

    def modified(self) -> Tensor:
        """q_i ∘ k2_k, [G, R, C, d]."""
        tensors = self.block.call.tensors
        return self.block.of_query(tensors.query)[:, :, None] * self.read(tensors.key2)

    def dots(self, modified: Tensor) -> Tensor:
        """(q_i ∘ k2_k)·k_j, [G, R, C, J]."""
        key = self.block.of_first(self.block.call.tensors.key)
        return (modified.flatten(0, 2) @ key.mT).view(*modified.shape[:3], len(key))

    def logits(self, dots: Tensor) -> Tensor:
        """With the cap, and all that is added for j; in place where there is no cap."""
        cap = self.block.options.softcap
        dots = dots if cap is None else (dots / cap).tanh_().mul_(cap)
        return dots.add_(self.block.first[:, :, None])

    def kept(self, like: Tensor, index: int) -> Tensor | None:
        """What dropout leaves, as factors 0 or 1/(1-p); the same in forward and backward."""
        p = self.block.call.options.dropout_p
        if not p:
            return None
        generator = torch.Generator(like.device).manual_seed((self.block.call.seed + index) % 2**63)
        return torch.empty_like(like).bernoulli_(1 - p, generator=generator).div_(1 - p)
