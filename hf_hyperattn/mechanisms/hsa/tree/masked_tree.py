"""Key-tied attention of any tree, under any mask, in blocks of query rows: O(block x M) memory, O(N x M) work.

The slow way, for what is no matter of windows alone: other trees, users' masks, position biases, sliding windows,
dropout, and the weights themselves. A block of rows walks down the tree once, all queries and heads together; backward
computes each block again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ....engines import Options, repeat_heads
from ....engines.options import position_mask
from ....hierarchy import Hierarchy, Tree
from ....hierarchy.windows import windows_tree

#: Numbers in the logits of one block of rows.
BLOCK_ELEMENTS = 2**20


def trees_of(hierarchy: Hierarchy, is_causal: bool) -> list[tuple[Tree, Tensor]]:
    """Trees with the tokens of their leaves; causal windows are continued until all of them are complete."""
    if not hierarchy.is_windows:
        return list(zip(hierarchy.trees, hierarchy.tokens, strict=True))
    pairs, trees = [], {}
    for start, stop in map(hierarchy.span, range(hierarchy.rows)):
        whole = hierarchy.sizes[-1] if hierarchy.sizes and is_causal else 1
        count = -(-(stop - start) // whole) * whole
        if count not in trees:
            trees[count] = windows_tree(count, hierarchy.sizes or ())
        tokens = torch.arange(start, start + count)
        tokens[stop - start :] = hierarchy.length  # leaves to come, which no query sees
        pairs.append((trees[count], tokens))
    return pairs


@dataclass(frozen=True)
class MaskedCall:
    """What a call asks besides its tree.

    Args:
        near, sinks, top_k: int64 [H]. block_bias: [H] or None.
        options: masks and the rest; mask and bias have four axes.
        weights: whether the weights are asked for.
    """

    near: Tensor
    sinks: Tensor
    top_k: Tensor
    block_bias: Tensor | None
    options: Options
    weights: bool = False


def attend(
    query: Tensor, key: Tensor, value: Tensor, trees: Sequence[tuple[Tree, Tensor]], call: MaskedCall
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, dv] and, where asked for, the weights [B, H, N, M] before dropout.

    Args:
        query: [B, H, N, d], scaled. key: [B, Hkv, M, d]. value: [B, Hkv, M, dv]. All of the working dtype.
        trees: one pair for all rows, or one a row: the tree, and the token of every leaf, int64 [leaves]; a token
            beyond the keys (of a tree that is continued to the right) is never seen.
    """
    n, same = query.shape[2], len(trees) == 1
    step = max(1, BLOCK_ELEMENTS // max(1, (len(query) if same else 1) * query.shape[1] * key.shape[2]))
    outs, shares = [], []
    for rows in [slice(None)] if same else [slice(b, b + 1) for b in range(len(query))]:
        leaves = KeyTree(*trees[rows.start or 0], key.shape[2], query.device)
        for start in range(0, n, step):
            block = slice(start, min(start + step, n))
            inputs = (query[rows, :, block], key[rows], value[rows], leaves, call, rows, block)
            learning = torch.is_grad_enabled()
            out, share = checkpoint(_block, *inputs, use_reentrant=False) if learning else _block(*inputs)
            outs.append(out)
            shares.append(share)
    count = -(-n // step)  # blocks of a row
    join = lambda parts: torch.cat([torch.cat(parts[i : i + count], 2) for i in range(0, len(parts), count)])
    return join(outs), join(shares) if call.weights else None


class KeyTree:
    """A tree over the keys of a call, as the tensors that the walk needs.

    `tokens` [leaves], clamped to the keys; `real` [leaves], which leaves have a key; `levels`: nodes by depth from 1
    down, in the order of their first leaf.
    """

    def __init__(self, tree: Tree, tokens: Tensor, keys: int, device):
        self.tree, self.keys, self.device = tree, keys, device
        self.tokens, self.real = tokens.clamp_max(keys - 1).to(device), (tokens < keys).to(device)
        by_leaf = tree.first_leaf.argsort(stable=True)
        depth = tree.depth[by_leaf]
        self.levels = [by_leaf[depth == d].to(device) for d in range(1, int(depth.max()) + 1)]
        self.parents, self.first = tree.parents.to(device), tree.first_leaf.to(device)
        self.size = tree.sizes.to(device)
        self.inner = torch.arange(tree.nodes, device=device) >= tree.leaves
        self.leaf_of = torch.full((keys + 1,), -1, dtype=torch.long)
        self.leaf_of[tokens.clamp_max(keys)] = torch.arange(tree.leaves)
        self.leaf_of[keys] = -1

    def leaves_of(self, first: int, last: int) -> Tensor:
        """int64 [R]: the leaf of each of these tokens, -1 for padding and beyond the keys."""
        place = torch.arange(first, last)
        return self.leaf_of[torch.where((place >= 0) & (place < self.keys), place, self.keys)].to(self.device)

    def up(self, values: Tensor, how: str) -> Tensor:
        """[..., nodes] from [..., leaves]: each node gathers its leaves by "sum" or "amin"."""
        start = 0 if how == "sum" else torch.iinfo(torch.long).max
        inner = values.new_full((*values.shape[:-1], self.tree.nodes - self.tree.leaves), start)
        nodes_values = torch.cat([values, inner], -1)
        for nodes in reversed(self.levels):
            index = self.parents[nodes].expand(*nodes_values.shape[:-1], -1)
            nodes_values = nodes_values.scatter_reduce(-1, index, nodes_values[..., nodes], how)
        return nodes_values

    def distance(self, leaves: Tensor) -> Tensor:
        """int64 [R, nodes]: from each query's own group, itself and the leaves beside it, to a node's nearest leaf."""
        parents, which = self.parents[leaves.clamp_min(0)].unique(return_inverse=True)
        place = torch.arange(self.tree.leaves, device=self.device)
        distances = []
        for parent in parents.tolist():
            beside = place[self.parents[: self.tree.leaves] == parent] if parent >= 0 else place
            right = torch.searchsorted(beside, place).clamp_max(len(beside) - 1)
            left = (right - 1).clamp_min(0)
            distances.append(torch.minimum((beside[right] - place).abs(), (beside[left] - place).abs()))
        return self.up(torch.stack(distances), "amin")[which]

    def ancestors(self, leaves: Tensor) -> Tensor:
        """Bool [R, nodes]: the query's own leaf and what holds it."""
        own_leaf = torch.arange(self.tree.leaves, device=self.device) == leaves[:, None]
        return self.up(own_leaf.long(), "sum") > 0

    def columns(self, t: Tensor, rows: slice, block: slice) -> Tensor:
        """[B|1, H|1, R|1, leaves]: what a mask or bias [B|1, H|1, N|1, M|1] says of these rows and the leaves."""
        t = t[rows] if t.shape[0] > 1 else t
        t = t[:, :, block] if t.shape[2] > 1 else t
        return t[..., self.tokens] if t.shape[3] > 1 else t


def visible_pairs(options: Options, rows: slice, block: slice, tree: KeyTree, leaves: Tensor) -> Tensor:
    """Bool [B|1, H|1, R, leaves]: what the queries see."""
    seen = (tree.real & (leaves >= 0)[:, None])[None, None]
    by_place = position_mask(options, (block.start, block.stop), (0, tree.keys), tree.device)
    if by_place is not None:
        seen = seen & by_place[:, tree.tokens]
    if options.mask is not None:
        mask = tree.columns(options.mask, rows, block)
        seen = seen & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
    return seen


def _block(
    query: Tensor, key: Tensor, value: Tensor, tree: KeyTree, call: MaskedCall, rows: slice, block: slice
) -> tuple[Tensor, Tensor | None]:
    """Output and weights of one block of rows."""
    options, heads = call.options, query.shape[1]
    leaves = tree.leaves_of(block.start + options.offset, block.stop + options.offset)
    seen = visible_pairs(options, rows, block, tree, leaves)
    logits = products(query, repeat_heads(key, heads)[:, :, tree.tokens])
    if options.bias is not None:
        logits = logits + tree.columns(options.bias, rows, block)
    if options.mask is not None and options.mask.dtype != torch.bool:
        logits = logits + tree.columns(options.mask, rows, block).masked_fill(~seen, 0.0)
    tied = tie(logits.masked_fill(~seen, 0.0), seen, tree, leaves, call)
    shares = softmax(tied.masked_fill(~seen, float("-inf")), options.sinks)
    dropped = torch.nn.functional.dropout(shares, options.dropout_p) if options.dropout_p else shares
    out = weighted_sum(dropped, repeat_heads(value, heads)[:, :, tree.tokens])
    if not call.weights:
        return out, None
    index = tree.tokens.expand_as(shares)
    return out, shares.new_zeros(*shares.shape[:-1], tree.keys).scatter_add_(-1, index, shares)


def products(query: Tensor, key: Tensor) -> Tensor:
    """query @ keyᵀ. What is not finite gives NaN, and no gradient to what it was multiplied with."""
    logits = query @ key.mT
    if bool(logits.detach().sum().isfinite()):
        return logits
    bad_query, bad_key = (~t.isfinite() for t in (query, key))
    logits = query.masked_fill(bad_query, 0.0) @ key.masked_fill(bad_key, 0.0).mT
    bad = bad_query.any(-1)[..., :, None] | bad_key.any(-1)[..., None, :]
    return logits.masked_fill(bad, torch.nan)


def softmax(logits: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Softmax, with one extra logit per head where given; a row that sees nothing gives zeros."""
    if sink_logit is not None:
        sink = sink_logit[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sink], -1)
    nothing = logits.detach().amax(-1, keepdim=True).isneginf()
    shares = torch.softmax(logits.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return shares if sink_logit is None else shares[..., :-1]


def tie(logits: Tensor, seen: Tensor, tree: KeyTree, leaves: Tensor, call: MaskedCall) -> Tensor:
    """S' [B, H, R, leaves]: every leaf's own logit, or that of the closed block which holds it.

    From the root down: of the nodes whose parent is open, those stay closed that no rule opens and that refinement
    leaves; what lies under a closed block takes its value. Ties go to the node with the lower first leaf.
    """
    per_head = lambda t: t[:, None, None]
    mean = tree.up(logits, "sum") / tree.size
    whole = tree.up(seen.long(), "sum") == tree.size
    opened = tree.ancestors(leaves) | (tree.distance(leaves) < per_head(call.near))
    opened = (opened | (tree.first < per_head(call.sinks)) | ~whole) & tree.inner
    opened = opened.expand(mean.shape).clone()
    log_size = torch.log(tree.size.to(mean.dtype))
    bias = 0.0 if call.block_bias is None else per_head(call.block_bias)
    by_itself = torch.where(tree.inner, mean + bias, mean)
    value = by_itself
    for depth, nodes in enumerate(tree.levels):
        parents = tree.parents[nodes]
        reached = opened[..., parents]
        here = opened[..., nodes] & reached
        closed = reached & ~here & tree.inner[nodes]
        if bool((call.top_k > 0).any()):
            scores = (mean.detach()[..., nodes] + log_size[nodes]).masked_fill(~closed, float("-inf"))
            order = scores.argsort(dim=-1, descending=True, stable=True)
            best = torch.arange(len(nodes), device=tree.device) < per_head(call.top_k)
            here = here | (closed & torch.zeros_like(closed).scatter(-1, order, best.expand(order.shape)))
        opened[..., nodes] = here
        if depth:  # the top level has that value in any case
            under = torch.where(reached, by_itself[..., nodes], value[..., parents])
            value = value.index_copy(-1, nodes, under)
    return value[..., : tree.tree.leaves]


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
