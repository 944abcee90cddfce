"""Tiles of three-way attention: a block of queries, a chunk of keys k, and all keys j that the block can see.

For one k, three-way attention is an ordinary row of attention of the query q_i ∘ k2_k; a tile is therefore one matrix
product of modified queries with keys. Where windows are shorter than the sequence, the keys k of neighbouring queries
lie on a diagonal: they are read as a view of a short span. A tile's gradients are those of the numbers it adds up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engines.options import Options, key_range
from ...engines.serialize import autograd_inside_operator
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
                    chunks = [
                        Chunk(block, part, index + at) for at, part in enumerate(block.parts())
                    ]
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
        like, mask = call.tensors.query, call.tensors.mask
        self.i = torch.arange(self.rows.start, self.rows.stop, device=like.device)[:, None]
        j = torch.arange(self.columns.start, self.columns.stop, device=like.device)[None]
        mask = None if mask is None else self.of_pair(mask)
        self.first = added(options, windows.first, windows.back, self.i, j, like, mask)

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
    """Keys k number `part` of each query's window, or of the sequence; `second` is what is added for these.

    All of them lie in the span from `start` to `stop`, of which there are the keys from `low` to `high`.
    """

    block: Block
    part: range
    index: int

    def __post_init__(self):
        block, call = self.block, self.block.call
        keys = torch.arange(self.part.start, self.part.stop, device=block.i.device)[None]
        self.start, self.stop = self.low, self.high = self.part.start, self.part.stop
        if block.sliding:
            second: Any = call.windows.second  # where blocks slide, both windows are there
            self.start = block.rows.start + call.options.offset - second + 1 + self.part.start
            keys = keys - self.part.start + self.start + block.i - block.rows.start
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
        self.second = second.expand(
            mask.shape[0] if mask is not None else 1, len(block.rows), -1
        )  # [G|1, R, C]

    def views(self, t: SimplicialTensors) -> dict[str, Tensor]:
        """What the chunk reads of the tensors, or where its gradients go: query [G, R, d]; key and value [J, d] of the
        block's columns; key2 and value2 of the keys in the span; bias [G|1, R|1, J|1] and sinks [G] where there are.
        """
        place, columns = (self.block.batch, self.block.head), self.block.columns
        views = {"query": self.block.of_query(t.query)}
        for name, low, high in (("", columns.start, columns.stop), ("2", self.low, self.high)):
            views |= {n + name: getattr(t, n + name)[place][low:high] for n in ("key", "value")}
        if t.bias is not None:
            views["bias"] = self.block.of_pair(t.bias)
        if t.sinks is not None:
            views["sinks"] = t.sinks[self.block.head]
        return views

    def by_query(self, t: Tensor) -> Tensor:
        """The keys k of each query, [R|1, C, d], of those in the span."""
        if not self.block.sliding:
            return t[None]
        return (
            pad(t, (0, 0, self.low - self.start, self.stop - self.high))
            .unfold(0, len(self.part), 1)
            .mT
        )

    def logits(self, views: dict[str, Tensor]) -> Tensor:
        """(q_i ∘ k2_k)·k_j with the cap, and all that is added for j, [G, R, C, J]."""
        logits = product(views["query"][:, :, None] * self.by_query(views["key2"]), views["key"].mT)
        cap = self.block.call.options.softcap
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        logits = logits.add_(self.block.first[..., None, :])
        return logits.add_(views["bias"][..., None, :]) if "bias" in views else logits

    def sums(self, views: dict[str, Tensor], logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """Over the chunk's pairs: of exp(L - top) · (v_j ∘ v2_k), [G, R, dv], and of exp(L - top), sinks included,
        [G, R]; the logits are overwritten.
        """
        shift = top[..., None] - self.second
        weights = logits.sub_(shift[..., None]).exp_()
        total = weights.sum((-2, -1))
        if "sinks" in views:
            total = total + torch.exp(views["sinks"][:, None, None] - shift).sum(-1)
        weights = self.dropped(weights)
        return (product(weights, views["value"]) * self.by_query(views["value2"])).sum(2), total

    def dropped(self, weights: Tensor) -> Tensor:
        """What dropout leaves of them; the same in forward and backward."""
        p = self.block.call.options.dropout_p
        if not p:
            return weights
        generator = torch.Generator(weights.device).manual_seed(
            (self.block.call.seed + self.index) % 2**63
        )
        return weights * weights.new_empty(weights.shape).bernoulli_(
            1 - p, generator=generator
        ).div_(1 - p)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """[G, R, C, a] times [a, b], as one product."""
    return (x.flatten(0, 2) @ matrix).view(*x.shape[:3], matrix.shape[1])


def forward(block: Block, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
    """Output [G, R, dv] and, for `backward`, the largest logits and sums [2, G, R] of a block: a softmax over all
    chunks with a running maximum.
    """
    t = block.call.tensors
    query = block.of_query(t.query)
    out = query.new_zeros(*query.shape[:2], t.value.shape[-1])
    top = query.new_full(query.shape[:2], torch.finfo(query.dtype).min)
    sums = torch.zeros_like(top)
    for chunk in chunks:
        views = chunk.views(t)
        logits = chunk.logits(views)
        highest = (
            logits.amax(-1) if logits.shape[-1] else torch.full_like(logits.sum(-1), float("-inf"))
        )
        if t.sinks is not None:
            highest = torch.maximum(highest, views["sinks"][:, None, None])
        new = torch.maximum(top, (highest + chunk.second).amax(-1))
        part, total = chunk.sums(views, logits, new)
        shrink = torch.exp(top - new)
        out, sums, top = out * shrink[..., None] + part, sums * shrink + total, new
    sums = sums.masked_fill(sums == 0, 1.0)
    return out / sums[..., None], torch.stack([top, sums])


def backward(
    chunk: Chunk, grads: SimplicialTensors, grad: Tensor, delta: Tensor, top: Tensor
) -> None:
    """Add a chunk's share to all gradients.

    With top and delta held fixed, they are those of the chunk's grad · Σ E (v ∘ v2) - delta · Σ E, E = exp(L - top).

    Args:
        grad: of the output, divided by the sum of E, [G, R, dv]; delta: its product with the output, [G, R].
        top: the largest logits, [G, R]; with their sums they say what a log-sum-exp cannot beside -1e9 or -3.4e38, of
            a row that an additive mask hides.
    """
    views, into = chunk.views(chunk.block.call.tensors), chunk.views(grads)

    with autograd_inside_operator():
        learned = {name: views[name].detach().requires_grad_() for name in into}
        out, total = chunk.sums(views | learned, chunk.logits(views | learned), top)
        share = (grad * out).sum() - (delta * total).sum()
        gradients = torch.autograd.grad(share, list(learned.values()))
    for name, gradient in zip(into, gradients, strict=True):
        into[name].add_(gradient)
