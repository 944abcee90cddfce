"""Keep the means of windows in a cache, each computed once, and attend to them.

This module shows how means grow with the cache, which tokens and means an evicting cache can
forget, and which calls a cache can serve.

A generated token completes one window in w_1, and one in w_2/w_1 of these completes a window of the
next level. Keeping all means up to date therefore costs O(1) per token, and no tensor is copied as
a whole.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...engines import Options, working_dtype
from ...hierarchy import Hierarchy
from ...utils.torch_private import count_dispatch_modes
from ..selection.cache import EVICTING, Blocks, KeepWindows, KeptWithKeys, LayerCache, Pair
from ..selection.growing import TAKEN_BACK, GrowingTensor
from .config import Rule, list_numbers
from .open_blocks import first_near, is_seen
from .windowed import native
from .windowed.key import attend_levels
from .windowed.native import Levels

#: Up to this many queries, tokens and means that some query sees are copied, and the others left out.
FEW = 16


class WindowMeans(KeptWithKeys):
    """Hold the means of cached keys and values over complete windows.

    The cache holds this object, so this object does not refer to the cache. Python then frees both
    at once.

    Args:
        cache: Cache of the tokens.
        sizes: Window sizes, bottom first.
        starts: int64 [B], the first real token of every row, where windows start; None: 0.
    """

    def __init__(self, cache: LayerCache, sizes: tuple[int, ...], starts: Tensor | None):
        self.sizes, self.starts = sizes, starts
        key_room, value_room = (tensor.room for tensor in cache.tokens)
        dtype = working_dtype(key_room)
        first = [0] * len(key_room) if starts is None else starts.tolist()
        self.means: list[Pair] = [
            (GrowingTensor(key_room, dtype), GrowingTensor(value_room, dtype)) for _ in sizes
        ]
        self.blocks = [Blocks(first, size) for size in sizes]
        #: Views of all means, None after a change: making them for every token would slow down
        #: decoding.
        self.shown: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def has_evicted(self, cache: LayerCache) -> bool:
        """Return whether any token or mean was evicted."""
        return any(t.gone for pair in (cache.tokens, *self.means) for t in pair)

    def complete_levels(self, cache: LayerCache) -> Levels:
        """Return the tokens and the means of all complete windows.

        Tokens have the dtype of the cache.
        """
        # Windows of all levels end where a window of the lowest level ends, so only that level is
        # checked.
        if self.blocks and self.blocks[0].count_complete(cache.length) != self.blocks[0].counts:
            below, width = cache.tokens, 1
            for level, size in enumerate(self.sizes):
                self._append_means(level, below, width, cache.length)
                below, width = self.means[level], size
            self.shown = None
        if self.shown is None:
            self.shown = (
                tuple(k.view() for k, _ in self.means),
                tuple(v.view() for _, v in self.means),
            )
        keys, values = (
            (tokens.view(), *shown) for tokens, shown in zip(cache.tokens, self.shown, strict=True)
        )
        held = None
        if self.has_evicted(cache):
            tables = (cache.tokens, *self.means)
            held = cache.length, tuple((k.head, k.gone) for k, _ in tables)
        return Levels(self.sizes, keys, values, self.starts, held=held)

    def _append_means(self, level: int, below: Pair, width: int, length: int) -> None:
        """Append the means of windows that became complete.

        Args:
            level: Level of the windows, 0 for the smallest.
            below: Tokens, or means of the level below, which the means are computed from.
            width: Number of tokens of a part of a window: 1, or the size of the level below.
            length: Number of tokens in the cache.
        """
        blocks = self.blocks[level]
        before, counts = blocks.counts, blocks.count_complete(length)
        blocks.counts = counts
        if counts == before:
            return
        branching, gone = self.sizes[level] // width, below[0].gone
        # Tokens count from the beginning of the row, means from its first real token.
        first = [0] * len(counts) if width > 1 else blocks.starts
        for mean, parts in zip(self.means[level], below, strict=True):
            mean.set_length(max(counts))
            for row, (done, count, start) in enumerate(zip(before, counts, first, strict=True)):
                if count <= done:
                    continue
                # A tensor without its evicted rows is shorter: places move to the front by their
                # number.
                inside = slice(start + done * branching - gone, start + count * branching - gone)
                new = parts.room[row, :, inside].unflatten(1, (count - done, branching))
                new = new.to(mean.room.dtype).mean(2)
                mean.room[row, :, done - mean.gone : count - mean.gone] = new

    def before_append(self, cache: LayerCache) -> None:
        """Evict the rows that no later query sees.

        The last `TAKEN_BACK` tokens may be removed again, so queries from there on count as later.
        Below the top level, a query sees only children of open blocks. These are a range around the
        query and, at the front, the blocks that hold one of the first tokens.
        """
        keep = cache.keep
        if not isinstance(keep, KeepWindows):
            return
        starts = self.blocks[0].starts
        safe = cache.length - TAKEN_BACK
        # Only a new bottom window changes the open blocks. Before the latest row starts, nothing
        # can be evicted.
        if safe <= max(starts) or safe < cache.shortest + self.sizes[0]:
            return
        cache.shortest, self.shown = max(cache.shortest, safe), None
        for pair, width, parent in zip((cache.tokens, *self.means), (1, *self.sizes), self.sizes):
            first, head = [], []
            for start in starts:
                window = (safe - start) // self.sizes[0] * self.sizes[0]
                open_from = first_near(window, keep.near) // parent * parent
                front = -(-keep.sinks // parent) * parent
                shift = start if width == 1 else 0
                first.append(shift + open_from // width)
                head.append(shift + front // width)
            # One table holds all rows of the batch, so only what no row needs can go.
            for tensor in pair:
                tensor.evict(min(first), max(head))

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        self.shown = None
        for blocks, pair in zip(self.blocks, self.means, strict=True):
            blocks.crop(length)
            for mean in pair:
                mean.length = max(blocks.counts)

    def select_rows(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        self.shown = None
        for blocks, pair in zip(self.blocks, self.means, strict=True):
            blocks.select_rows(rows)
            for mean in pair:
                mean.select_rows(rows)
        if self.starts is not None:
            self.starts = none_if_zero(self.starts[rows.to(self.starts.device)])


def read_levels(cache: LayerCache, sizes: tuple[int, ...], starts: Tensor | None) -> Levels:
    """Return the tokens of a cache, and the means of all complete windows.

    Args:
        cache: Cache of a layer.
        sizes: Window sizes, bottom first.
        starts: int64 [B], the first real token of every row, where windows start; None: 0.

    Raises:
        ValueError: Padding is at another place than before, and the cache has evicted tokens.
    """
    starts = none_if_zero(starts)
    means = cache.get_kept("means", lambda: WindowMeans(cache, sizes, starts))
    same = starts is means.starts
    if starts is not None and means.starts is not None:
        same = torch.equal(starts, means.starts)
    if not (same and sizes == means.sizes):
        # Other windows need other means, which can only be computed from all tokens.
        if means.has_evicted(cache):
            raise ValueError(
                "HierarchicalCache(evict=True) was called with padding at another place than before; allowed: the "
                "attention_mask of the earlier calls, continued"
            )
        cache.beside["means"] = means = WindowMeans(cache, sizes, starts)
    return means.complete_levels(cache)


def none_if_zero(starts: Tensor | None) -> Tensor | None:
    """Return the starts of rows, or None if all rows start at 0."""
    return starts if starts is not None and bool(starts.any()) else None


def attend_cached(
    query: Tensor,
    keys: int,
    cache: LayerCache,
    hierarchy: Hierarchy,
    rule: Rule,
    options: Options,
    scale: float,
) -> Tensor | None:
    """Return the output of tied keys from cached means, or None if they do not fit.

    Args:
        query: [B, H, N, d].
        keys: Number of keys of the call.
        cache: Cache of the keys and values.
        hierarchy: Trees over the keys.
        rule, options, scale: As in `windowed.key.attend_keys`.

    Returns:
        [B, H, N, dv] or None.
    """
    check_kept(cache, rule)
    levels = None
    if keys == cache.length:
        levels = find_levels(query, cache, hierarchy, options)
    # FLOP counters see only operators, so under a dispatch mode the call must go through one.
    if levels is None or (cache.keep is None and count_dispatch_modes()):
        return None
    # Without windows there is no cover: all tokens are read.
    is_few = (
        query.shape[2] <= FEW and bool(levels.sizes) and not any(list_numbers(rule.refine_top_k))
    )
    if (levels.held is not None or is_few) and not native.can_serve(query):
        return attend_cover(query, levels, rule, options, scale)
    return attend_levels(query, levels, rule, options, scale, lse=False)[0]


def check_kept(cache: LayerCache, rule: Rule) -> None:
    """Raise if a cache has evicted keys that this rule needs.

    This happens if the model was patched again after the cache was made.

    Raises:
        ValueError: The rule opens more tokens than were kept, or opens blocks by their scores.
    """
    keep = cache.keep
    if not isinstance(keep, KeepWindows):
        return
    near, sinks, top_k = (
        max(list_numbers(number)) for number in (rule.near, rule.sinks, rule.refine_top_k)
    )
    if near > keep.near or sinks > keep.sinks or top_k:
        raise ValueError(
            f"{EVICTING} keeps {keep.near} near keys and {keep.sinks} first ones, and hsa asks for {near} and {sinks}, "
            f"with refine_top_k={top_k}; allowed: a cache that was made for this model, as it is patched now"
        )


def check_not_evicted(cache: LayerCache) -> None:
    """Raise if a cache that a call cannot use may have evicted its keys.

    The keys of the call are then placeholders.

    Raises:
        ValueError: The cache keeps only a part of its keys.
    """
    if cache.keep is not None:
        raise ValueError(
            f"{EVICTING} keeps too little for this call; allowed: windows, left padding and no other mask, no "
            "gradients, no attention weights; or evict=False"
        )


def find_levels(
    query: Tensor, cache: LayerCache, hierarchy: Hierarchy, options: Options
) -> Levels | None:
    """Return the cached tokens and means, or None if the call cannot use them.

    The means fit causal attention over plain windows over all cached keys, without sliding window,
    bias, dropout and gradients. Incomplete windows have no mean in a cache, and queries that see
    later tokens need it.

    Args:
        query, cache, hierarchy, options: As in `attend_cached`.
    """
    length, sizes = cache.length, hierarchy.sizes
    windowed = options.window is not None and options.window < length
    if windowed or options.bias is not None or options.dropout_p or not options.is_causal:
        return None
    end = options.offset + query.shape[2]
    if sizes is None or end != length or torch.is_grad_enabled():
        return None
    if isinstance(cache.keep, KeepWindows) and cache.keep.sizes != sizes:
        return None
    starts, stops = hierarchy.starts, hierarchy.stops
    if stops is not None and bool((stops != length).any()):
        return None
    return read_levels(cache, sizes, None if starts is None else starts.expand(len(query)))


def attend_cover(
    query: Tensor, levels: Levels, rule: Rule, options: Options, scale: float
) -> Tensor:
    """Compute `attend_levels` in plain torch, causal and without refinement.

    This serves calls that the kernel for CPUs cannot compute: a few queries, whose time is that of
    their cover alone, and any queries after keys were evicted. Refinement would need scores of all
    blocks. The cover of a query follows from its position (docs/hsa.md), so one softmax over the
    tokens and means that are left is enough.

    Args:
        query: [B, H, N, d]; query i is token `options.offset + i` of the row.
        levels: Tokens and means, or those that were kept.
        rule, options, scale: As in `attend_levels`.

    Returns:
        [B, H, N, dv].
    """
    # The means decide dtype and device: tokens may be in half precision.
    like, queries = levels.keys[-1], query.shape[2]
    starts = torch.zeros(1).long() if levels.starts is None else levels.starts
    starts = starts.to(like.device).view(-1, 1, 1, 1)
    _, held = levels.held or (0, ((0, 0),) * len(levels.keys))

    def by_head(x, dtype) -> Tensor:
        return torch.as_tensor(x, dtype=dtype, device=like.device).reshape(1, -1, 1, 1)

    last = options.offset + queries
    place = torch.arange(options.offset, last, device=like.device).view(1, 1, -1, 1) - starts
    near, sinks = by_head(rule.near, torch.long), by_head(rule.sinks, torch.long)
    added = by_head(rule.block_bias, like.dtype)

    # Collect keys, values and additive masks [B|1, H|1, N, columns] of every level.
    parts = []
    tables = zip(levels.keys, levels.values, held, strict=True)
    for level, (key, value, (head, gone)) in enumerate(tables):
        row = torch.arange(key.shape[2], device=like.device)
        # Rows behind the front stand `gone` places later in the text. Windows start at each row's
        # first real token.
        index = torch.where(row < head, row, row + gone) - (0 if level else starts)
        seen = is_seen(levels.sizes, level, index, place, near, sinks)
        if level:
            # Mean logit + log|B| + block bias.
            bias = added + math.log(levels.sizes[level - 1])
        else:
            bias = torch.zeros_like(added)
        # Leave out columns that no query of any row sees.
        shown = seen.flatten(0, 2).any(0)
        seen = seen[..., shown]
        # Rows of a table that no query of a batch row sees may hold NaN, which a weight of 0 would
        # pass on.
        hidden = ~seen.flatten(1, 2).any(1)[:, None, :, None]
        key, value = (t[:, :, shown].masked_fill(hidden, 0.0) for t in (key, value))
        parts.append((key, value, torch.where(seen, bias, -math.inf)))
    if options.sinks is not None:
        # A key and a value of zeros give the sink's logit no value.
        no_key, no_value = (torch.zeros_like(t[:, :, :1]) for t in parts[0][:2])
        logit = by_head(options.sinks, like.dtype).expand(-1, -1, queries, 1)
        parts.append((no_key, no_value, logit))

    keys, values, biases = zip(*parts, strict=True)
    batch, heads = (max(b.shape[axis] for b in biases) for axis in (0, 1))
    mask = torch.cat([b.expand(batch, heads, -1, -1) for b in biases], -1)
    out = scaled_dot_product_attention(
        query.to(like.dtype),
        torch.cat(keys, 2),
        torch.cat(values, 2),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    # A query that sees nothing gives 0. SDPA does not promise this on every device.
    return out.masked_fill(mask.isneginf().all(-1, keepdim=True), 0.0)
