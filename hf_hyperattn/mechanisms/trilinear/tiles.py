"""Tiles of three-way attention: a block of queries, a chunk of keys k, and all keys j that the block can see.

For one k, three-way attention is an ordinary row of attention of the query q_i ∘ k2_k; a tile is therefore one matrix
product of modified queries with keys. Where windows are shorter than the sequence, the keys k of neighbouring queries
lie on a diagonal: they are read as a view of a short span, and their gradients are summed along it in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engines.blockwise import add
from ...engines.options import Options, key_range
from .reference import Windows, added

#: Logits of one tile: enough that the overhead of an operation vanishes, few enough for the cache of a core.
ELEMENTS = 2**18


@dataclass
class SimplicialTensors:
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
class SimplicialCall:
    """Tensors, options (whose tensors stand in `tensors`), windows, and the seed of dropout."""

    tensors: SimplicialTensors
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

    def blocks(self) -> Iterator[tuple[Block, list[Chunk]]]:
        """Blocks of queries, one key head at a time, with their chunks, which are numbered through."""
        batch, kv_heads, group, n, _ = self.tensors.query.shape
        first, second = self.reach(self.windows.first), self.reach(self.windows.second)
        size = max(1, ELEMENTS // max(1, group * second * first))
        while size > 1 and group * second * size * min(self.keys, first + size - 1) > ELEMENTS:
            size -= 1
        size, index = min(size, max(1, n)), 0
        for b in range(batch):
            for h in range(kv_heads):
                for i in range(0, n, size):
                    block = Block(self, b, h, range(i, min(i + size, n)))
                    chunks = [Chunk(block, part, index + at) for at, part in enumerate(block.parts())]
                    index += len(chunks)
                    yield block, chunks


@dataclass
class Block:
    """Queries `rows` of key head `head`; `columns` are the keys j that they can see, `first` is added for these."""

    call: SimplicialCall
    batch: int
    head: int
    rows: range

    def __post_init__(self):
        call, options, windows = self.call, self.call.options, self.call.windows
        near = options.is_causal or (windows.back and windows.first is not None)
        reach = Options(is_causal=near, window=windows.first, offset=options.offset)
        self.columns = key_range(reach, self.rows, call.keys)
        self.sliding = call.reach(windows.second) < call.keys
        device, masks = call.tensors.query.device, (call.tensors.mask, call.tensors.bias)
        self.i = torch.arange(self.rows.start, self.rows.stop, device=device)[:, None]
        j = torch.arange(self.columns.start, self.columns.stop, device=device)[None]
        like, tensors = call.tensors.query, [None if t is None else self.of_pair(t) for t in masks]
        self.first = added(options, windows.first, windows.back, self.i, j, like, *tensors)

    def of_rows(self, t: Tensor) -> Tensor:
        """[G|1, R|1, M|1] of [B|1, Hkv|1, G|1, N|1, M|1]."""
        t = t[self.batch if t.shape[0] > 1 else 0]
        t = t[self.head if t.shape[0] > 1 else 0]
        return t if t.shape[1] == 1 else t[:, self.rows.start : self.rows.stop]

    def of_pair(self, t: Tensor) -> Tensor:
        """[G|1, R|1, J|1] of [B|1, Hkv|1, G|1, N|1, M|1]."""
        t = self.of_rows(t)
        return t if t.shape[2] == 1 else t[..., self.columns.start : self.columns.stop]

    def of_query(self, t: Tensor) -> Tensor:
        """[G, R, ...] of [B, Hkv, G, N, ...]."""
        return t[self.batch, self.head, :, self.rows.start : self.rows.stop]

    def of_first(self, t: Tensor) -> Tensor:
        """[J, d] of [B, Hkv, M, d]."""
        return t[self.batch, self.head, self.columns.start : self.columns.stop]

    def parts(self) -> Iterator[range]:
        """The keys k in parts: of the window, or of the sequence where there is none."""
        call, group = self.call, self.call.tensors.query.shape[2]
        total = call.reach(call.windows.second)
        if not self.sliding and call.options.is_causal:
            total = min(total, self.rows.stop + call.options.offset)
        size = max(1, ELEMENTS // max(1, group * len(self.rows) * len(self.columns)))
        for start in range(0, total, size):
            yield range(start, min(start + size, total))


@dataclass
class Chunk:
    """Keys k number `part` of each query's window, or of the sequence; `second` is what is added for these."""

    block: Block
    part: range
    index: int

    def __post_init__(self):
        block, call = self.block, self.block.call
        keys = torch.arange(self.part.start, self.part.stop, device=block.i.device)[None]
        if block.sliding:
            second: Any = call.windows.second  # where blocks slide, both windows are there
            self.start = block.rows.start + call.options.offset - second + 1 + self.part.start
            keys = keys - self.part.start + self.start + block.i - block.rows.start
            # the span of all of them, and the keys of it that there are
            self.stop = self.start + len(block.rows) + len(self.part) - 1
            self.low = min(max(self.start, 0), self.stop)
            self.high = max(self.low, min(self.stop, call.keys))
        inside, mask = keys.clamp(0, call.keys - 1), call.tensors.mask
        if mask is not None:
            mask = block.of_rows(mask)
            if mask.shape[2] > 1:
                rows = len(block.rows)
                mask = mask.expand(-1, rows, -1).gather(2, inside.expand(len(mask), rows, -1))
        w, back, like = call.windows.second, call.windows.back, call.tensors.query
        second = added(call.options, w, back, block.i, keys, like, keys == inside, mask)
        self.second = second.expand(mask.shape[0] if mask is not None else 1, len(block.rows), -1)  # [G|1, R, C]

    def read(self, t: Tensor) -> Tensor:
        """[R|1, C, d] of [B, Hkv, M, d]."""
        t = t[self.block.batch, self.block.head]
        if not self.block.sliding:
            return t[self.part.start : self.part.stop][None]
        t = pad(t[self.low : self.high], (0, 0, self.low - self.start, self.stop - self.high))
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
        buffer[self.low : self.high] += total[self.low - self.start : self.high - self.start]

    def modified(self) -> Tensor:
        """q_i ∘ k2_k, [G, R, C, d]."""
        tensors = self.block.call.tensors
        return self.block.of_query(tensors.query)[:, :, None] * self.read(tensors.key2)

    def dots(self, modified: Tensor) -> Tensor:
        """(q_i ∘ k2_k)·k_j, [G, R, C, J]."""
        return product(modified, self.block.of_first(self.block.call.tensors.key).mT)

    def logits(self, dots: Tensor) -> Tensor:
        """With the cap, and all that is added for j; in place where there is no cap."""
        cap = self.block.call.options.softcap
        dots = dots if cap is None else (dots / cap).tanh_().mul_(cap)
        return dots.add_(self.block.first[..., None, :])

    def keep(self, weights: Tensor) -> Tensor | None:
        """What dropout leaves, as factors 0 or 1/(1-p); the same in forward and backward."""
        p = self.block.call.options.dropout_p
        if not p:
            return None
        generator = torch.Generator(weights.device).manual_seed((self.block.call.seed + self.index) % 2**63)
        return torch.empty_like(weights).bernoulli_(1 - p, generator=generator).div_(1 - p)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """[G, R, C, a] times [a, b], as one product."""
    return (x.flatten(0, 2) @ matrix).view(*x.shape[:3], matrix.shape[1])


def forward(block: Block, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
    """Output [G, R, dv] and log-sum-exp [G, R] of a block: a softmax over all chunks with a running maximum."""
    t = block.call.tensors
    query, value = block.of_query(t.query), block.of_first(t.value)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    top = query.new_full(query.shape[:2], torch.finfo(query.dtype).min)
    sums = torch.zeros_like(top)
    for chunk in chunks:
        logits = chunk.logits(chunk.dots(chunk.modified()))
        highest = logits.amax(-1) if logits.shape[-1] else torch.full_like(logits.sum(-1), float("-inf"))
        sink = None if t.sinks is None else t.sinks[block.head][:, None, None]
        highest = highest if sink is None else torch.maximum(highest, sink)
        new = torch.maximum(top, (highest + chunk.second).amax(-1))
        shift = new[..., None] - chunk.second
        weights = logits.sub_(shift[..., None]).exp_()
        shrink = torch.exp(top - new)
        sums = sums * shrink + weights.sum((-2, -1))
        sums = sums if sink is None else sums + torch.exp(sink - shift).sum(-1)
        factors = chunk.keep(weights)
        weights = weights if factors is None else weights.mul_(factors)
        out = out * shrink[..., None] + (product(weights, value) * chunk.read(t.value2)).sum(2)
        top = new
    sums = sums.masked_fill(sums == 0, 1.0)
    return out / sums[..., None], top + sums.log()


def backward(chunk: Chunk, grads: SimplicialTensors, grad: Tensor, delta: Tensor, lse: Tensor) -> None:
    """Add a chunk's share to all gradients: with y_ik = Σ_j P_ijk v_j, the output is Σ_k y_ik ∘ v2_k.

    Args:
        grad: of the output, [G, R, dv]; delta: its product with the output, [G, R]; lse: log-sum-exp [G, R].
    """
    block, t = chunk.block, chunk.block.call.tensors
    value, value2 = block.of_first(t.value), chunk.read(t.value2)
    modified = chunk.modified()
    dots = chunk.dots(modified)
    cap = block.call.options.softcap
    slope = None if cap is None else 1 - (dots / cap).tanh_().square_()
    shift = lse[..., None] - chunk.second
    weights = chunk.logits(dots).sub_(shift[..., None]).exp_()
    d_y = grad[:, :, None] * value2
    d_weights = product(d_y, value.mT)
    factors = chunk.keep(weights)
    dropped = weights if factors is None else weights * factors
    d_weights = d_weights if factors is None else d_weights.mul_(factors)
    block.of_first(grads.value).add_(dropped.flatten(0, 2).mT @ d_y.flatten(0, 2))
    chunk.add(grads.value2, (grad[:, :, None] * product(dropped, value)).sum(0))
    d_logits = d_weights.sub_(delta[..., None, None]).mul_(weights)
    if grads.sinks is not None and t.sinks is not None:
        sink = torch.exp(t.sinks[block.head][:, None, None] - shift).sum(-1)
        grads.sinks[block.head].sub_((sink * delta).sum(-1))
    if grads.bias is not None:
        add(block.of_pair(grads.bias), d_logits.sum(2))
    d_dots = d_logits if slope is None else d_logits.mul_(slope)
    d_modified = product(d_dots, block.of_first(t.key))
    block.of_first(grads.key).add_(d_dots.flatten(0, 2).mT @ modified.flatten(0, 2))
    block.of_query(grads.query).add_((d_modified * chunk.read(t.key2)).sum(2))
    chunk.add(grads.key2, (d_modified * block.of_query(t.query)[:, :, None]).sum(0))
