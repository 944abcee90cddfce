"""Attend with tying="key" in plain torch, forward and backward.

Any tree, mask and device is allowed. This module shows how tied attention becomes one softmax
over all nodes of a tree. Each query sees some of the nodes: tokens, and closed blocks by the means
of their keys and values.

Work: O(N x M), with 1 + 1/branching + ... times as many keys. Memory: O(block x M); backward
computes each block again. Gathering only the nodes that a query sees was slower up to 6,000 tokens
(one core).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
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
from ..config import Rule
from ..open_blocks import is_open

# Numbers in the logits of one block of rows: on a CPU a few of its caches, on other devices enough
# work.
BLOCK_ELEMENTS = 2**20
DEVICE_BLOCK_ELEMENTS = 2**26


def trees_of(hierarchy: Hierarchy, is_causal: bool) -> list[tuple[Tree, Tensor]]:
    """Return each tree with the tokens of its leaves, int64 [leaves].

    Causal windows are continued to the right until all windows are complete.
    """
    if not hierarchy.is_windows:
        return list(zip(hierarchy.trees, hierarchy.tokens, strict=True))
    made = []
    for start, stop in map(hierarchy.span, range(hierarchy.rows)):
        tokens = torch.arange(start, max(start, stop))
        sizes = leave_out_whole_windows(hierarchy.sizes or (), len(tokens))
        made.append(windows_over(tokens, sizes, hierarchy.length, is_causal))
    return made


def leave_out_whole_windows(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return the window sizes below the length of a text.

    A larger window holds the whole text, as the root does.
    """
    return tuple(size for size in sizes if size < length)


def windows_over(
    tokens: Tensor, sizes: tuple[int, ...], length: int, continued: bool
) -> tuple[Tree, Tensor]:
    """Return the tree of windows over these tokens, and the token of every leaf.

    Args:
        tokens: int64 [n].
        sizes: Window sizes, bottom first.
        length: Number of tokens of the row. Added leaves have this token, which no query sees.
        continued: Add leaves until all windows are complete.
    """
    whole = sizes[-1] if sizes and continued else 1
    count = max(1, -(-len(tokens) // whole)) * whole
    leaves = pad(tokens, (0, count - len(tokens)), value=length)
    return windows_tree(count, sizes), leaves


def attend_trees(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    rule: Rule,
    options: Options,
    weights: bool = False,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and weights of tied attention.

    Args:
        query: [B, H, N, d], scaled, in the working dtype, as key and value.
        key: [B, Hkv, M, d].
        value: [B, Hkv, M, dv].
        hierarchy: Trees over the M keys.
        rule: One number per head: lists of integers, and a block bias [H] or None.
        options: Masks and the other options of an engine; mask and bias have four axes.
        weights: Whether to return the weights.
        place: int64 [B, M], the number of each key in its text, from which the sinks count; None:
            its number in the row.

    Returns:
        Output [B, H, N, dv]; log-sum-exp [B, H, N], +inf if a query sees nothing; weights [B, H, N,
        M] or None.
    """
    # No query sees a token beyond the keys, of a tree that is continued to the right.
    trees = trees_of(hierarchy, options.is_causal)
    near, sinks, top_k = (
        torch.tensor(counts, device=query.device)
        for counts in (rule.near, rule.sinks, rule.refine_top_k)
    )
    rule = replace(rule, near=near, sinks=sinks, refine_top_k=top_k)
    heads, n = query.shape[1], query.shape[2]
    same = len(trees) == 1
    most = BLOCK_ELEMENTS if query.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    # Rows with one tree are computed together, rows with different trees one by one.
    together = len(query) if same else 1
    row_groups = [slice(None)] if same else [slice(b, b + 1) for b in range(len(query))]
    step = max(1, most // max(1, together * heads * key.shape[2]))
    parts = []
    for rows in row_groups:
        tree = KeyTree(*trees[rows.start or 0], key.shape[2], query.device)
        if place is not None:
            tree.count_from(place[rows.start or 0])
        tables = [repeat_heads(tree.compute_means(t[rows]), heads) for t in (key, value)]
        # Causal blocks grow with their position. The last and largest comes first, because blocks
        # that grow from one to the next fragment the heap (0.6 GiB).
        for start in reversed(range(0, n, step)):
            block = slice(start, min(start + step, n))
            inputs: Any = (
                query[rows, :, block],
                *tables,
                tree,
                rule,
                options,
                weights,
                rows,
                block,
            )
            if torch.is_grad_enabled():
                parts.append(checkpoint(_attend_block, *inputs, use_reentrant=False))
            else:
                parts.append(_attend_block(*inputs))
    out, lse, shares = zip(*parts, strict=True)
    count = -(-n // step)  # Blocks of one row.
    joined_shares = _join_blocks(shares, count) if weights else None
    return _join_blocks(out, count), _join_blocks(lse, count), joined_shares


def _join_blocks(parts: Sequence[Tensor], count: int) -> Tensor:
    """Return the results of all blocks as one tensor.

    Args:
        parts: Results by row of the batch, the last block of each row first.
        count: Number of blocks of a row.
    """
    starts = range(0, len(parts), count)
    rows = [torch.cat(list(reversed(parts[i : i + count])), 2) for i in starts]
    return torch.cat(rows)


class KeyTree:
    """Hold a tree over the keys of a call as the tensors that attention needs.

    Blocks come first here, then the leaves, because most steps work on all blocks at once.

    Attributes:
        leaves, blocks, keys: Numbers of leaves, blocks and keys.
        tokens: int64 [leaves], the token of every leaf, clamped to the keys.
        real: bool [leaves], which leaves have a key.
        parents: int64 [nodes], the parent of every node.
        first: int64 [nodes], the first leaf of every node, or the number of its first token in its
            text.
        size: int64 [nodes], the number of leaves of every node.
        levels: Nodes by depth from 1 down, in the order of their first leaf.
        leaf_of: int [keys + 1], the leaf of every token, -1 for padding.
    """

    def __init__(self, tree: Tree, tokens: Tensor, keys: int, device):
        self.leaves = tree.leaves
        self.blocks = tree.nodes - tree.leaves
        self.keys = keys
        self.device = device
        self.tokens = tokens.clamp_max(keys - 1).to(device)
        self.real = (tokens < keys).to(device)
        # `Tree` numbers leaves first: move the blocks to the front.
        order = torch.arange(tree.nodes).roll(self.blocks)

        def move_numbers(nodes: Tensor) -> Tensor:
            return torch.where(nodes < tree.leaves, nodes + self.blocks, nodes - tree.leaves)

        self.parents = move_numbers(tree.parents.clamp_min(0))[order].to(device)
        self.first = tree.first_leaf[order].to(device)
        self.size = tree.sizes[order].to(device)
        # Ties of scores are broken by the first leaf, so each level is kept in that order.
        by_leaf = tree.first_leaf.argsort(stable=True)
        depth = tree.depth[by_leaf]
        self.levels = [
            move_numbers(by_leaf[depth == d]).to(device) for d in range(1, int(depth.max()) + 1)
        ]
        self.leaf_of = torch.full((keys + 1,), -1, dtype=torch.int)
        self.leaf_of[tokens.clamp_max(keys)] = torch.arange(tree.leaves, dtype=torch.int)
        self.leaf_of[keys] = -1

    def count_from(self, place: Tensor) -> None:
        """Set `first` to the smallest number that a node's tokens have in their text.

        Args:
            place: int64 [M], the number of each token in its text.
        """
        far = torch.iinfo(torch.int64).max
        places = place.to(self.device)[self.tokens].where(self.real, far)
        self.first = self.gather_up(places, "amin")

    def take_first_keys(self, keys: int) -> KeyTree:
        """Return the tree with the leaves of the first tokens only, and all blocks."""
        there = (self.real & (self.tokens < keys)).nonzero()
        count = int(there[-1]) + 1 if len(there) else 0
        nodes = self.blocks + count
        short = copy(self)
        short.leaves = count
        short.tokens, short.real = self.tokens[:count], self.real[:count]
        short.parents = self.parents[:nodes]
        short.first = self.first[:nodes]
        short.size = self.size[:nodes]
        short.levels = [level[level < nodes] for level in self.levels]
        return short

    def leaves_of(self, first: int, last: int) -> Tensor:
        """Return int [R], the leaf of each token from `first` to `last` - 1.

        Padding and tokens beyond the keys have -1.
        """
        place = torch.arange(first, last)
        place = torch.where((place >= 0) & (place < self.keys), place, self.keys)
        return self.leaf_of[place].to(self.device)

    def gather_up(self, values: Tensor, how: str = "sum") -> Tensor:
        """Return [..., nodes] from [..., leaves]: each node combines its leaves.

        Args:
            values: [..., leaves].
            how: "sum" or "amin".
        """
        start = 0 if how == "sum" else torch.iinfo(values.dtype).max
        blocks = values.new_full((*values.shape[:-1], self.blocks), start)
        gathered = torch.cat([blocks, values], -1)
        for nodes in reversed(self.levels):
            if how == "sum":
                gathered = gathered.index_add(-1, self.parents[nodes], gathered[..., nodes])
            else:
                index = self.parents[nodes].expand(*gathered.shape[:-1], -1)
                gathered = gathered.scatter_reduce(-1, index, gathered[..., nodes], how)
        return gathered

    def compute_means(self, t: Tensor) -> Tensor:
        """Return [..., nodes, e] from [..., M, e]: the mean of every node's tokens."""
        return (self.gather_up(t[..., self.tokens, :].mT) / self.size).mT

    def spread_on_leaves(self, shares: Tensor) -> Tensor:
        """Return [..., leaves] from [..., nodes].

        A block spreads its weight in equal parts over its leaves.
        """
        shares = shares / self.size
        for nodes in self.levels[1:]:
            shares = shares.index_add(-1, nodes, shares[..., self.parents[nodes]])
        return shares[..., self.blocks :]

    def measure_distance(self, leaves: Tensor) -> Tensor:
        """Return int [R, nodes], the distance of nodes from each query.

        It is the distance from the query's own group to the node's nearest leaf. A query's own
        group is its leaf and the leaves with the same parent.

        Args:
            leaves: int [R], the leaf of each query.
        """
        of_leaves = self.parents[self.blocks :]
        # Queries of one group have the same distances: compute them once for each group.
        parents, which = of_leaves[leaves.clamp_min(0)].unique(return_inverse=True)
        place = torch.arange(self.leaves, device=self.device, dtype=torch.int)
        distances = []
        for parent in parents.tolist():
            group = place[of_leaves == parent]
            # The nearest leaf of a group is its next one on the right, or on the left.
            right = torch.searchsorted(group, place).clamp_max(len(group) - 1)
            left = (right - 1).clamp_min(0)
            to_right = (group[right] - place).abs()
            to_left = (group[left] - place).abs()
            distances.append(torch.minimum(to_right, to_left))
        return self.gather_up(torch.stack(distances), "amin")[which]

    def select_columns(self, t: Tensor, rows: slice, block: slice) -> Tensor:
        """Return the part of a mask or bias for these rows, with a column for each leaf.

        Args:
            t: [B|1, H|1, N|1, M|1].
            rows: Rows of the batch.
            block: Queries.

        Returns:
            [B|1, H|1, R|1, leaves|1].
        """
        t = t[rows] if t.shape[0] > 1 else t
        t = t[:, :, block] if t.shape[2] > 1 else t
        return t[..., self.tokens] if t.shape[3] > 1 else t


def visible_pairs(
    options: Options, rows: slice, block: slice, tree: KeyTree, leaves: Tensor
) -> Tensor:
    """Return bool [B|1, H|1, R, leaves]: the tokens that each query sees."""
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
    rule: Rule,
    options: Options,
    weights: bool,
    rows: slice,
    block: slice,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and weights of one block of queries.

    Args:
        query: [B, H, R, d].
        key, value: Means of all nodes, [B, H, nodes, ...].
        tree: Tree over the keys.
        rule: Counts are tensors, int64 [H].
        options, weights: As in `attend_trees`.
        rows, block: Rows of the batch, and queries, that `query` holds.
    """
    blocks = tree.blocks
    leaves = tree.leaves_of(block.start + options.offset, block.stop + options.offset)
    if options.is_causal:
        # Later tokens are hidden from the whole block: leave out their columns.
        short = tree.take_first_keys(block.stop + options.offset)
        # Without a leaf (only padding so far) keep one tree: no query sees anything, but shapes
        # must not be empty.
        tree = short if short.leaves else tree
        key, value = (t[..., : blocks + tree.leaves, :] for t in (key, value))
    seen = visible_pairs(options, rows, block, tree, leaves)

    # Logits of nodes: the mean logit of the node's tokens, for blocks plus log|B|.
    logits = compute_logits(query, key)
    for added in (options.bias, options.mask):
        if added is not None and added.dtype != torch.bool:
            added = tree.select_columns(added, rows, block).to(logits.dtype)
            added = added.masked_fill(~seen, 0.0).expand(*(-1,) * 3, tree.leaves)
            logits = logits + tree.gather_up(added) / tree.size
    logits[..., :blocks] += torch.log(tree.size[:blocks].to(logits.dtype))

    # Hide the nodes that a query does not attend to. The block bias comes after the choice, which
    # does not read it.
    attended = find_cover(logits[..., :blocks].detach(), seen, tree, leaves, rule)
    if rule.block_bias is not None:
        logits[..., :blocks] += _align_heads(rule.block_bias)
        # A query whose logits are all -inf must have gradient 0, not the NaN of 0 · infinity.
        attended &= ~logits.detach().isneginf()
    logits = torch.where(attended, logits, -torch.inf)

    # Softmax. `at_least` keeps the log-sum-exp finite if a query sees nothing.
    least = torch.finfo(logits.dtype).min
    lse = at_least(logits.logsumexp(-1, keepdim=True), least)
    if options.sinks is not None:
        lse = torch.logaddexp(lse, _align_heads(options.sinks))
    shares = torch.exp(logits - lse)
    lse = lse[..., 0].masked_fill(lse[..., 0] <= least, torch.inf)
    if not (weights or options.dropout_p):
        return weighted_sum(shares, value), lse, None

    # Weights and dropout are defined by token, so the weights of blocks are spread over their
    # tokens first.
    shares = tree.spread_on_leaves(shares)
    dropped = dropout(shares, options.dropout_p) if options.dropout_p else shares
    out = weighted_sum(dropped, value[..., blocks:, :])
    index = tree.tokens.expand_as(shares)
    by_token = shares.new_zeros(*shares.shape[:-1], tree.keys).scatter_add_(-1, index, shares)
    return out, lse, by_token


def _align_heads(numbers: Tensor) -> Tensor:
    """Return [H, 1, 1] from [H], which broadcasts to logits [B, H, R, nodes]."""
    return numbers[:, None, None]


def find_cover(scores: Tensor, seen: Tensor, tree: KeyTree, leaves: Tensor, rule: Rule) -> Tensor:
    """Return bool [B, H, R, nodes]: the nodes that a query attends to.

    These are closed blocks and tokens. From the root down, a block whose parent is open stays
    closed if no rule and no refinement opens it. Of equal scores, refinement opens the block of the
    lower first leaf.

    Args:
        scores: [B, H, R, blocks], mean logit plus log|B|.
        seen: bool [B|1, H|1, R, leaves], the tokens that a query sees.
        tree: Tree over the keys.
        leaves: int [R], the leaf of each query.
        rule: Counts are tensors, int64 [H].
    """
    blocks = tree.blocks
    # A block with a hidden token must be open, because its mean would show that token.
    part = (tree.gather_up(seen.int()) < tree.size)[..., :blocks]
    distance = tree.measure_distance(leaves)[:, :blocks]
    # Groups need not be contiguous, so one distance to the nearest leaf stands for both sides.
    by_place = is_open(
        tree.first[:blocks], distance, distance, _align_heads(rule.near), _align_heads(rule.sinks)
    )
    opened = (by_place | part).expand(scores.shape).clone()
    closed = torch.zeros_like(opened)
    refined = bool((rule.refine_top_k > 0).any())
    for level in tree.levels:
        nodes = level[level < blocks]
        reached = opened[..., tree.parents[nodes]]
        here = opened[..., nodes] & reached
        rest = reached & ~here
        if refined and len(nodes):
            # A stable sort keeps equal scores in the order of their first leaves.
            order = (
                scores[..., nodes]
                .masked_fill(~rest, -torch.inf)
                .argsort(dim=-1, descending=True, stable=True)
            )
            best = torch.arange(len(nodes), device=tree.device) < _align_heads(rule.refine_top_k)
            # Heads with few closed blocks also rank blocks that are not candidates: `rest` removes
            # them.
            best = rest & torch.zeros_like(rest).scatter(-1, order, best.expand(order.shape))
            here, rest = here | best, rest & ~best
        opened[..., nodes], closed[..., nodes] = here, rest
    tokens = opened.index_select(-1, tree.parents[blocks:]) & seen
    return torch.cat([closed, tokens], -1)


def compute_logits(query: Tensor, key: Tensor) -> Tensor:
    """Return query @ keyᵀ, and NaN for products with numbers that are not finite.

    A NaN product gives no gradient to its other factor.
    """
    logits = query @ key.mT
    if bool(logits.detach().sum().isfinite()):
        return logits
    bad_query, bad_key = (~t.isfinite() for t in (query, key))
    logits = query.masked_fill(bad_query, 0.0) @ key.masked_fill(bad_key, 0.0).mT
    bad = bad_query.any(-1)[..., :, None] | bad_key.any(-1)[..., None, :]
    return logits.masked_fill(bad, torch.nan)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return weights @ rows, in which a weight of 0 ignores NaN and infinity.

    A NaN or infinite number with any other weight gives NaN. Gradients reach both arguments.

    Args:
        weights: [..., Q, C].
        rows: [..., C, e].
    """
    out = weights @ rows
    if bool(out.detach().sum().isfinite()):
        return out
    bad = ~rows.isfinite()
    reached = (weights != 0).to(out.dtype) @ bad.to(out.dtype) > 0
    return weights @ rows.masked_fill(bad, 0.0) + torch.where(reached, torch.nan, 0.0).to(out.dtype)
