"""Tiles of three-way attention: a block of queries, a chunk of keys k, all keys j.

For one k, three-way attention is ordinary attention of the query q_i ∘ k2_k. A tile is therefore
one matrix product of modified queries with keys. If windows are shorter than the sequence, the keys
k of neighbouring queries lie on a diagonal and are read as a view of a short span. The gradients of
a tile are the gradients of its partial sums.
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
from .reference import Windows, sum_masks

#: Logits per tile: many enough to hide the overhead of an operation, few enough for a core's cache.
ELEMENTS = 2**18


@dataclass
class SimplicialTensors:
    """The tensors of a call, or their gradients, grouped by key heads.

    Args:
        query: Scaled, shape [B, Hkv, G, N, d].
        key: Shape [B, Hkv, M, d].
        key2: Shape [B, Hkv, M, d].
        value: Shape [B, Hkv, M, dv].
        value2: Shape [B, Hkv, M, dv].
        mask: Shape [B|1, Hkv|1, G|1, N|1, M|1], or None.
        bias: Shape [B|1, Hkv|1, G|1, N|1, M|1], or None.
        sinks: Shape [Hkv, G], or None.
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
    """A call of three-way attention.

    Args:
        tensors: All tensors, also the ones that `Options` usually holds.
        options: Options without tensors.
        windows: Largest distances of the keys.
        seed: Seed of dropout.
    """

    tensors: SimplicialTensors
    options: Options
    windows: Windows
    seed: int = 0

    @property
    def keys(self) -> int:
        return self.tensors.key.shape[2]

    def count_reachable(self, window: int | None) -> int:
        """Return the largest number of keys that a query sees through a window."""
        if window is None:
            return self.keys
        return min(self.keys, window if self.windows.back else 2 * window - 1)

    def iterate_blocks(self) -> Iterator[tuple[Block, list[Chunk]]]:
        """Yield blocks of queries, one key head at a time, with their chunks.

        Chunks are numbered consecutively, because dropout is seeded by their number.
        """
        batch, kv_heads, group, n, _ = self.tensors.query.shape
        first, second = (
            self.count_reachable(self.windows.first),
            self.count_reachable(self.windows.second),
        )
        # First guess: as many queries as fit if all of them saw the same keys.
        size = max(1, ELEMENTS // max(1, group * second * first))
        # Several queries see more keys j than one, so shrink the block until a tile fits.
        while size > 1 and group * second * size * min(self.keys, first + size - 1) > ELEMENTS:
            size -= 1
        size = min(size, max(1, n))
        index = 0
        for b in range(batch):
            for h in range(kv_heads):
                for i in range(0, n, size):
                    block = Block(self, b, h, range(i, min(i + size, n)))
                    chunks = [
                        Chunk(block, part, index + number)
                        for number, part in enumerate(block.iterate_parts())
                    ]
                    index += len(chunks)
                    yield block, chunks


@dataclass
class Block:
    """A block of queries of one key head.

    Args:
        call: The call.
        batch: Number of the batch element.
        head: Number of the key head.
        rows: The queries.

    Attributes:
        columns: The keys j that these queries can see.
        sliding: Whether the keys k differ between queries.
        first: Masks to add for the keys j.
    """

    call: SimplicialCall
    batch: int
    head: int
    rows: range

    def __post_init__(self):
        call, options, windows = self.call, self.call.options, self.call.windows
        # The keys j of all rows form one range, found from causality and the window alone.
        near = options.is_causal or (windows.back and windows.first is not None)
        reach = Options(is_causal=near, window=windows.first, offset=options.offset)
        # Keys outside of this range are never loaded.
        self.columns = key_range(reach, self.rows, call.keys)
        self.sliding = call.count_reachable(windows.second) < call.keys
        like = call.tensors.query
        mask = call.tensors.mask
        self.i = torch.arange(self.rows.start, self.rows.stop, device=like.device)[:, None]
        j = torch.arange(self.columns.start, self.columns.stop, device=like.device)[None]
        mask = None if mask is None else self.of_pair(mask)
        self.first = sum_masks(options, windows.first, windows.back, self.i, j, like, mask)

    def of_rows(self, t: Tensor) -> Tensor:
        """Return [G|1, R|1, M|1] of [B|1, Hkv|1, G|1, N|1, M|1]."""
        t = t[self.batch if t.shape[0] > 1 else 0]
        t = t[self.head if t.shape[0] > 1 else 0]
        return t if t.shape[1] == 1 else t[:, self.rows.start : self.rows.stop]

    def of_pair(self, t: Tensor) -> Tensor:
        """Return [G|1, R|1, J|1] of [B|1, Hkv|1, G|1, N|1, M|1]."""
        t = self.of_rows(t)
        return t if t.shape[2] == 1 else t[..., self.columns.start : self.columns.stop]

    def of_query(self, t: Tensor) -> Tensor:
        """Return [G, R, ...] of [B, Hkv, G, N, ...]."""
        return t[self.batch, self.head, :, self.rows.start : self.rows.stop]

    def iterate_parts(self) -> Iterator[range]:
        """Yield the keys k in parts: of the window, or of the sequence without a window."""
        call = self.call
        group = call.tensors.query.shape[2]
        total = call.count_reachable(call.windows.second)
        # Without a window of k, causality hides all keys after the last query.
        if not self.sliding and call.options.is_causal:
            total = min(total, self.rows.stop + call.options.offset)
        size = max(1, ELEMENTS // max(1, group * len(self.rows) * len(self.columns)))
        for start in range(0, total, size):
            yield range(start, min(start + size, total))


@dataclass
class Chunk:
    """The keys k with number `part` of each query's window, or of the sequence.

    All of them lie in the span from `start` to `stop`. The keys from `low` to `high` of it exist.

    Args:
        block: The block of queries.
        part: Numbers of the keys k.
        index: Number of the chunk in the call, which seeds dropout.

    Attributes:
        second: Masks to add for the keys k, [G|1, R, C].
    """

    block: Block
    part: range
    index: int

    def __post_init__(self):
        block, call = self.block, self.block.call
        keys = torch.arange(self.part.start, self.part.stop, device=block.i.device)[None]
        self.start, self.stop = self.low, self.high = self.part.start, self.part.stop
        if block.sliding:
            # A sliding block has a second window. Key k number c of row r is at start + r + c.
            second: Any = call.windows.second
            self.start = block.rows.start + call.options.offset - second + 1 + self.part.start
            keys = keys - self.part.start + self.start + block.i - block.rows.start
            self.stop = self.start + len(block.rows) + len(self.part) - 1
            self.low = min(max(self.start, 0), self.stop)
            self.high = max(self.low, min(self.stop, call.keys))
        # Keys before the first or behind the last one are clamped to read the mask, then hidden.
        inside = keys.clamp(0, call.keys - 1)
        mask = call.tensors.mask
        if mask is not None:
            mask = block.of_rows(mask)
            if mask.shape[2] > 1:
                rows = len(block.rows)
                mask = mask.expand(-1, rows, -1).gather(2, inside.expand(len(mask), rows, -1))
        second = sum_masks(
            call.options,
            call.windows.second,
            call.windows.back,
            block.i,
            keys,
            call.tensors.query,
            keys == inside,
            mask,
        )
        groups = 1 if mask is None else mask.shape[0]
        self.second = second.expand(groups, len(block.rows), -1)  # [G|1, R, C]

    def take_views(self, t: SimplicialTensors) -> dict[str, Tensor]:
        """Return the views of tensors or gradients that the chunk uses.

        Args:
            t: Tensors, or gradients of the same shapes.

        Returns:
            A dict with query [G, R, d]; key and value [J, d] of the block's columns; key2 and
            value2 of the keys in the span; and, if present, bias [G|1, R|1, J|1] and sinks [G].
        """
        place = (self.block.batch, self.block.head)
        columns = self.block.columns
        # All rows are views, so that gradients can be added in place.
        views = {"query": self.block.of_query(t.query)}
        for name, low, high in (("", columns.start, columns.stop), ("2", self.low, self.high)):
            views |= {n + name: getattr(t, n + name)[place][low:high] for n in ("key", "value")}
        if t.bias is not None:
            views["bias"] = self.block.of_pair(t.bias)
        if t.sinks is not None:
            views["sinks"] = t.sinks[self.block.head]
        return views

    def spread_by_query(self, t: Tensor) -> Tensor:
        """Return the keys k of each query, [R|1, C, d], from those in the span.

        In a sliding block, row r reads the window that begins r keys later. `unfold` is a view,
        without a copy.
        """
        if not self.block.sliding:
            return t[None]
        # Zeros take the place of keys before the first and behind the last; they are masked.
        span = pad(t, (0, 0, self.low - self.start, self.stop - self.high))
        return span.unfold(0, len(self.part), 1).mT

    def compute_logits(self, views: dict[str, Tensor]) -> Tensor:
        """Return capped logits (q_i ∘ k2_k)·k_j plus masks and bias of j, [G, R, C, J]."""
        logits = multiply_features(
            views["query"][:, :, None] * self.spread_by_query(views["key2"]), views["key"].mT
        )
        cap = self.block.call.options.softcap
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        # In place: the tile is the largest tensor of this computation.
        logits = logits.add_(self.block.first[..., None, :])
        return logits.add_(views["bias"][..., None, :]) if "bias" in views else logits

    def sum_weights(
        self, views: dict[str, Tensor], logits: Tensor, top: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum over the chunk's pairs; the logits are overwritten.

        Args:
            views: Views of the tensors.
            logits: Logits of the chunk, [G, R, C, J].
            top: Number to subtract from the logits before exp, [G, R].

        Returns:
            The sum of exp(L - top) · (v_j ∘ v2_k), [G, R, dv], and of exp(L - top) with sinks, [G,
            R].
        """
        shift = top[..., None] - self.second
        weights = logits.sub_(shift[..., None]).exp_()
        total = weights.sum((-2, -1))
        if "sinks" in views:
            total = total + torch.exp(views["sinks"][:, None, None] - shift).sum(-1)
        # Dropout acts on normalised weights, so the total above is computed without it.
        weights = self.apply_dropout(weights)
        return (
            multiply_features(weights, views["value"]) * self.spread_by_query(views["value2"])
        ).sum(2), total

    def apply_dropout(self, weights: Tensor) -> Tensor:
        """Apply dropout with the chunk's own seed, equal in forward and backward."""
        p = self.block.call.options.dropout_p
        if not p:
            return weights
        seed = (self.block.call.seed + self.index) % 2**63
        generator = torch.Generator(weights.device).manual_seed(seed)
        kept = weights.new_empty(weights.shape).bernoulli_(1 - p, generator=generator)
        return weights * kept.div_(1 - p)


def multiply_features(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [G, R, C, a] with [a, b] as one matrix product."""
    return (x.flatten(0, 2) @ matrix).view(*x.shape[:3], matrix.shape[1])


def compute_block(block: Block, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
    """Compute a block by an online softmax over its chunks.

    Returns:
        Output [G, R, dv], and the largest logits and sums [2, G, R] for the backward pass.
    """
    t = block.call.tensors
    query = block.of_query(t.query)
    out = query.new_zeros(*query.shape[:2], t.value.shape[-1])
    top = query.new_full(query.shape[:2], torch.finfo(query.dtype).min)
    sums = torch.zeros_like(top)
    for chunk in chunks:
        views = chunk.take_views(t)
        logits = chunk.compute_logits(views)
        # `amax` of an empty axis is an error: the queries may see no key j at all.
        if logits.shape[-1]:
            highest = logits.amax(-1)
        else:
            highest = torch.full_like(logits.sum(-1), float("-inf"))
        if t.sinks is not None:
            highest = torch.maximum(highest, views["sinks"][:, None, None])
        # The new maximum includes the masks of k, which are not in the logits yet.
        new = torch.maximum(top, (highest + chunk.second).amax(-1))
        part, total = chunk.sum_weights(views, logits, new)
        # Online softmax: rescale earlier sums to the new maximum.
        shrink = torch.exp(top - new)
        out = out * shrink[..., None] + part
        sums = sums * shrink + total
        top = new
    # A query that sees nothing has sum 0; dividing by 1 gives zeros.
    sums = sums.masked_fill(sums == 0, 1.0)
    return out / sums[..., None], torch.stack([top, sums])


def add_chunk_gradients(
    chunk: Chunk, grads: SimplicialTensors, grad: Tensor, delta: Tensor, top: Tensor
) -> None:
    """Add a chunk's share to all gradients.

    With `top` and `delta` constant, they are the gradients of grad · Σ E (v ∘ v2) - delta · Σ E,
    where E = exp(L - top).

    Args:
        chunk: The chunk.
        grads: Gradients to add to.
        grad: Gradient of the output, divided by the sum of E, [G, R, dv].
        delta: Product of `grad` and the output, [G, R].
        top: Largest logits, [G, R]. A log-sum-exp would not do: for a row that an additive mask
            hides, it is about -1e9 or -3.4e38, and the logarithm of the sum is lost in rounding.
    """
    views = chunk.take_views(chunk.block.call.tensors)
    into = chunk.take_views(grads)

    with autograd_inside_operator():
        # Autograd computes the gradients of this chunk only.
        learned = {name: views[name].detach().requires_grad_() for name in into}
        out, total = chunk.sum_weights(views | learned, chunk.compute_logits(views | learned), top)
        share = (grad * out).sum() - (delta * total).sum()
        gradients = torch.autograd.grad(share, list(learned.values()))
    for name, gradient in zip(into, gradients, strict=True):
        into[name].add_(gradient)
