"""Key-tied attention in plain torch: any tree, any mask, any device, forward and backward.

A block of query rows takes one softmax over all nodes of the tree, of which each query sees some: tokens, and closed
blocks by the means of their keys and values. That is one product with 1 + 1/branching + ... times as many keys, and
bool arithmetic on what stands in whose cover: O(N x M) work, O(block x M) memory; backward computes each block again.
Reading only what a query sees, by gathering, was slower up to 6,000 tokens (one core).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad
from torch.utils.checkpoint import checkpoint

from ....engines import Options, repeat_heads
from ....engines.options import position_mask, read_visible
from ....geometry.scalars import at_least
from ....hierarchy import Hierarchy, Tree
from ....hierarchy.windows import windows_tree
from ..open_blocks import is_open

#: Numbers in the logits of one block of rows: on a CPU a few of its caches, elsewhere enough work.
BLOCK_ELEMENTS = 2**20
DEVICE_BLOCK_ELEMENTS = 2**26


def trees_of(hierarchy: Hierarchy, is_causal: bool) -> list[tuple[Tree, Tensor]]:
    """Trees with the tokens of their leaves; causal windows are continued until all of them are complete."""
    if not hierarchy.is_windows:
        return list(zip(hierarchy.trees, hierarchy.tokens, strict=True))
    rows = (
        torch.arange(start, max(start, stop))
        for start, stop in map(hierarchy.span, range(hierarchy.rows))
    )
    made = []
    for tokens in rows:
        sizes = leave_out_whole_windows(hierarchy.sizes or (), len(tokens))
        made.append(windows_over(tokens, sizes, hierarchy.length, is_causal))
    return made


def leave_out_whole_windows(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return the sizes below the length of a text: a larger window holds all of it, as the root does."""
    return tuple(size for size in sizes if size < length)


def windows_over(
    tokens: Tensor, sizes: tuple[int, ...], length: int, continued: bool
) -> tuple[Tree, Tensor]:
    """The tree of windows over these tokens, and the token of every leaf.

    If the tree is continued until all windows are complete, leaves to come have the token `length`: no query sees them.
    """
    whole = sizes[-1] if sizes and continued else 1
    count = max(1, -(-len(tokens) // whole)) * whole
    return windows_tree(count, sizes), pad(tokens, (0, count - len(tokens)), value=length)


@dataclass(frozen=True)
class KeyTying:
    """How a call is tied and masked.

    Args:
        near, sinks, top_k: int64 [H]. block_bias: [H] or None.
        options: masks and the rest; mask and bias have four axes.
        weights: whether the weights are wanted.
        place: int64 [B, M], the number of each key in its text, which `sinks` counts by; None: in its row.
    """

    near: Tensor
    sinks: Tensor
    top_k: Tensor
    block_bias: Tensor | None
    options: Options
    weights: bool = False
    place: Tensor | None = None


def attend_trees(
    query: Tensor, key: Tensor, value: Tensor, trees: Sequence[tuple[Tree, Tensor]], call: KeyTying
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output [B, H, N, dv]; log-sum-exp [B, H, N], +inf where a query sees nothing; weights [B, H, N, M] or None.

    Args:
        query: [B, H, N, d], scaled. key: [B, Hkv, M, d]. value: [B, Hkv, M, dv]. All of the working dtype.
        trees: one pair for all rows, or one a row: the tree, and the token of every leaf, int64 [leaves]; a token
            beyond the keys (of a tree that is continued to the right) is never seen.
    """
    n, heads, same = query.shape[2], query.shape[1], len(trees) == 1
    most = BLOCK_ELEMENTS if query.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    step = max(1, most // max(1, (len(query) if same else 1) * heads * key.shape[2]))
    parts = []
    for rows in [slice(None)] if same else [slice(b, b + 1) for b in range(len(query))]:
        tree = KeyTree(*trees[rows.start or 0], key.shape[2], query.device)
        if call.place is not None:
            tree.count_from(call.place[rows.start or 0])
        tables = [repeat_heads(tree.compute_means(t[rows]), heads) for t in (key, value)]
        for start in reversed(
            range(0, n, step)
        ):  # causal blocks grow, and growing ones fragment the heap: 0.6 GiB
            block = slice(start, min(start + step, n))
            inputs: Any = (query[rows, :, block], *tables, tree, call, rows, block)
            learning = torch.is_grad_enabled()
            parts.append(
                checkpoint(_attend_block, *inputs, use_reentrant=False)
                if learning
                else _attend_block(*inputs)
            )
    count = -(-n // step)  # blocks of a row
    join = lambda parts: torch.cat(
        [torch.cat(parts[i : i + count][::-1], 2) for i in range(0, len(parts), count)]
    )
    out, lse, weights = zip(*parts, strict=True)
    return join(out), join(lse), join(weights) if call.weights else None


class KeyTree:
    """A tree over the keys of a call, as the tensors that attention needs. Here blocks come first, then the leaves.

    `tokens` [leaves], clamped to the keys; `real` [leaves], which leaves have a key; `parents`, `first` (leaf) and
    `size` of the nodes; `levels`: nodes by depth from 1 down, in the order of their first leaf.
    """

    def __init__(self, tree: Tree, tokens: Tensor, keys: int, device):
        self.leaves, self.blocks, self.keys, self.device = (
            tree.leaves,
            tree.nodes - tree.leaves,
            keys,
            device,
        )
        self.tokens, self.real = tokens.clamp_max(keys - 1).to(device), (tokens < keys).to(device)
        order = torch.arange(tree.nodes).roll(self.blocks)
        place = lambda nodes: torch.where(
            nodes < tree.leaves, nodes + self.blocks, nodes - tree.leaves
        )
        self.parents = place(tree.parents.clamp_min(0))[order].to(device)
        self.first, self.size = tree.first_leaf[order].to(device), tree.sizes[order].to(device)
        by_leaf = tree.first_leaf.argsort(stable=True)
        depth = tree.depth[by_leaf]
        self.levels = [
            place(by_leaf[depth == d]).to(device) for d in range(1, int(depth.max()) + 1)
        ]
        self.leaf_of = torch.full((keys + 1,), -1, dtype=torch.int)
        self.leaf_of[tokens.clamp_max(keys)] = torch.arange(tree.leaves, dtype=torch.int)
        self.leaf_of[keys] = -1

    def count_from(self, place: Tensor) -> None:
        """Let `first` be the smallest of the numbers int64 [M] that tokens have in their texts."""
        far = torch.iinfo(torch.int64).max
        self.first = self.gather_up(
            place.to(self.device)[self.tokens].where(self.real, far), "amin"
        )

    def take_first_keys(self, keys: int) -> KeyTree:
        """The same of the first tokens alone, with all blocks."""
        there = (self.real & (self.tokens < keys)).nonzero()
        count = int(there[-1]) + 1 if len(there) else 0
        short, nodes = copy(self), self.blocks + count
        short.leaves, short.tokens, short.real = count, self.tokens[:count], self.real[:count]
        short.parents, short.first, short.size = (
            t[:nodes] for t in (self.parents, self.first, self.size)
        )
        short.levels = [level[level < nodes] for level in self.levels]
        return short

    def leaves_of(self, first: int, last: int) -> Tensor:
        """int [R]: the leaf of each of these tokens, -1 for padding and beyond the keys."""
        place = torch.arange(first, last)
        return self.leaf_of[torch.where((place >= 0) & (place < self.keys), place, self.keys)].to(
            self.device
        )

    def gather_up(self, values: Tensor, how: str = "sum") -> Tensor:
        """[..., nodes] from [..., leaves]: each node gathers its leaves by "sum" or "amin"."""
        start = 0 if how == "sum" else torch.iinfo(values.dtype).max
        gathered = torch.cat(
            [values.new_full((*values.shape[:-1], self.blocks), start), values], -1
        )
        for nodes in reversed(self.levels):
            if how == "sum":
                gathered = gathered.index_add(-1, self.parents[nodes], gathered[..., nodes])
            else:
                index = self.parents[nodes].expand(*gathered.shape[:-1], -1)
                gathered = gathered.scatter_reduce(-1, index, gathered[..., nodes], how)
        return gathered

    def compute_means(self, t: Tensor) -> Tensor:
        """[..., nodes, e] of [..., M, e]: the mean of every node's tokens."""
        return (self.gather_up(t[..., self.tokens, :].mT) / self.size).mT

    def spread_on_leaves(self, shares: Tensor) -> Tensor:
        """[..., leaves] of [..., nodes]: what a block weighs, spread over its leaves."""
        shares = shares / self.size
        for nodes in self.levels[1:]:
            shares = shares.index_add(-1, nodes, shares[..., self.parents[nodes]])
        return shares[..., self.blocks :]

    def measure_distance(self, leaves: Tensor) -> Tensor:
        """int [R, nodes]: from each query's own group, itself and the leaves beside it, to a node's nearest leaf."""
        of_leaves = self.parents[self.blocks :]
        parents, which = of_leaves[leaves.clamp_min(0)].unique(return_inverse=True)
        place = torch.arange(self.leaves, device=self.device, dtype=torch.int)
        distances = []
        for parent in parents.tolist():
            beside = place[of_leaves == parent]
            right = torch.searchsorted(beside, place).clamp_max(len(beside) - 1)
            left = (right - 1).clamp_min(0)
            distances.append(
                torch.minimum((beside[right] - place).abs(), (beside[left] - place).abs())
            )
        return self.gather_up(torch.stack(distances), "amin")[which]

    def select_columns(self, t: Tensor, rows: slice, block: slice) -> Tensor:
        """[B|1, H|1, R|1, leaves|1]: what a mask or bias [B|1, H|1, N|1, M|1] says of these rows and the leaves."""
        t = t[rows] if t.shape[0] > 1 else t
        t = t[:, :, block] if t.shape[2] > 1 else t
        return t[..., self.tokens] if t.shape[3] > 1 else t


def visible_pairs(
    options: Options, rows: slice, block: slice, tree: KeyTree, leaves: Tensor
) -> Tensor:
    """Bool [B|1, H|1, R, leaves]: what the queries see."""
    seen = (tree.real & (leaves >= 0)[:, None])[None, None]
    by_place = position_mask(options, (block.start, block.stop), (0, tree.keys), tree.device)
    if by_place is not None:
        seen = seen & by_place[:, tree.tokens]
    if options.mask is not None:
        seen = seen & read_visible(tree.select_columns(options.mask, rows, block))
    return seen


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: KeyTree,
    call: KeyTying,
    rows: slice,
    block: slice,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, log-sum-exp and weights of one block of rows; keys and values are those of all nodes."""
    options, blocks, per_head = call.options, tree.blocks, lambda t: t[:, None, None]
    leaves = tree.leaves_of(block.start + options.offset, block.stop + options.offset)
    if options.is_causal:
        short = tree.take_first_keys(block.stop + options.offset)
        tree = (
            short if short.leaves else tree
        )  # padding alone so far, of which nobody sees anything
        key, value = (t[..., : blocks + tree.leaves, :] for t in (key, value))
    seen = visible_pairs(options, rows, block, tree, leaves)
    logits = compute_logits(query, key)
    for added in (options.bias, options.mask):
        if added is not None and added.dtype != torch.bool:
            added = tree.select_columns(added, rows, block).to(logits.dtype)
            added = added.masked_fill(~seen, 0.0).expand(*(-1,) * 3, tree.leaves)
            logits = logits + tree.gather_up(added) / tree.size
    logits[..., :blocks] += torch.log(tree.size[:blocks].to(logits.dtype))
    attended = find_cover(logits[..., :blocks].detach(), seen, tree, leaves, call)
    if call.block_bias is not None:
        logits[..., :blocks] += per_head(call.block_bias)
        attended &= (
            ~logits.detach().isneginf()
        )  # a row of nothing else has no gradient, and not that of 0 · infinity
    logits = torch.where(attended, logits, -torch.inf)
    least = torch.finfo(logits.dtype).min
    lse = at_least(logits.logsumexp(-1, keepdim=True), least)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, per_head(options.sinks))
    shares, lse = torch.exp(logits - lse), lse[..., 0].masked_fill(lse[..., 0] <= least, torch.inf)
    if not (call.weights or options.dropout_p):
        return weighted_sum(shares, value), lse, None
    shares = tree.spread_on_leaves(shares)
    dropped = dropout(shares, options.dropout_p) if options.dropout_p else shares
    out = weighted_sum(dropped, value[..., blocks:, :])
    index = tree.tokens.expand_as(shares)
    return out, lse, shares.new_zeros(*shares.shape[:-1], tree.keys).scatter_add_(-1, index, shares)


def find_cover(
    scores: Tensor, seen: Tensor, tree: KeyTree, leaves: Tensor, call: KeyTying
) -> Tensor:
    """Bool [B, H, R, nodes]: what a query attends to, closed blocks and tokens.

    From the root down: of the blocks whose parent is open, those stay closed that no rule opens and that refinement
    leaves. Of equal scores, the block of the lower first leaf is opened.

    Args:
        scores: [B, H, R, blocks], mean logit plus log|B|. seen: bool [B|1, H|1, R, leaves].
    """
    blocks, per_head = tree.blocks, lambda t: t[:, None, None]
    part = (tree.gather_up(seen.int()) < tree.size)[..., :blocks]  # some of the block is hidden
    distance = tree.measure_distance(leaves)[:, :blocks]
    by_place = is_open(
        tree.first[:blocks], distance, distance, per_head(call.near), per_head(call.sinks)
    )
    opened = (by_place | part).expand(scores.shape).clone()
    closed, refined = torch.zeros_like(opened), bool((call.top_k > 0).any())
    for level in tree.levels:
        nodes = level[level < blocks]
        reached = opened[..., tree.parents[nodes]]
        here = opened[..., nodes] & reached
        rest = reached & ~here
        if refined and len(nodes):
            order = (
                scores[..., nodes]
                .masked_fill(~rest, -torch.inf)
                .argsort(dim=-1, descending=True, stable=True)
            )
            best = torch.arange(len(nodes), device=tree.device) < per_head(call.top_k)
            best = rest & torch.zeros_like(rest).scatter(-1, order, best.expand(order.shape))
            here, rest = here | best, rest & ~best
        opened[..., nodes], closed[..., nodes] = here, rest
    tokens = opened.index_select(-1, tree.parents[blocks:]) & seen
    return torch.cat([closed, tokens], -1)


def compute_logits(query: Tensor, key: Tensor) -> Tensor:
    """query @ keyᵀ. What is not finite gives NaN, and no gradient to what it was multiplied with."""
    logits = query @ key.mT
    if bool(logits.detach().sum().isfinite()):
        return logits
    bad_query, bad_key = (~t.isfinite() for t in (query, key))
    logits = query.masked_fill(bad_query, 0.0) @ key.masked_fill(bad_key, 0.0).mT
    bad = bad_query.any(-1)[..., :, None] | bad_key.any(-1)[..., None, :]
    return logits.masked_fill(bad, torch.nan)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [..., Q, C] times rows [..., C, e], where a weight of 0 takes nothing of NaN and infinity either.

    Any other weight of such a number gives NaN. With gradients.
    """
    out = weights @ rows
    if bool(out.detach().sum().isfinite()):
        return out
    bad = ~rows.isfinite()
    reached = (weights != 0).to(out.dtype) @ bad.to(out.dtype) > 0
    return weights @ rows.masked_fill(bad, 0.0) + torch.where(reached, torch.nan, 0.0).to(out.dtype)
