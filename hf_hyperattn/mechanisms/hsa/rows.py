"""Key-tied attention of any tree, under any mask, in blocks of query rows: O(block x M) memory, O(N x M) work.

The slow way, for what windows.py does not do: trees that are no windows, users' masks, position biases, sliding
windows, dropout, and the weights themselves. A block of rows walks down the tree once, all queries and heads together;
backward computes each block again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...engines import repeat_heads
from ...hierarchy import Tree
from .tile import weighted_sum

#: Numbers in the logits of one block of rows.
BLOCK_ELEMENTS = 2**20


@dataclass(frozen=True)
class Asked:
    """What a call asks besides its tree.

    Args:
        near, sinks, top_k: int64 [H]. block_bias, sink_logit: [H] or None.
        is_causal, offset: query i is token `offset + i`, and where causal sees no later one.
        window: query i sees key j where i - j < window, and where not causal also j - i < window.
        mask: bool (True = take part) or additive, [B|1, H|1, N|1, M|1]. bias: likewise, added to the logits.
        dropout_p: probability that the weight of a pair is dropped.
    """

    near: Tensor
    sinks: Tensor
    top_k: Tensor
    block_bias: Tensor | None = None
    sink_logit: Tensor | None = None
    is_causal: bool = False
    offset: int = 0
    window: int | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    dropout_p: float = 0.0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    trees: Sequence[tuple[Tree, Tensor]],
    asked: Asked,
    weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, dv] and, where asked for, the weights [B, H, N, M] before dropout.

    Args:
        query: [B, H, N, d], scaled. key: [B, Hkv, M, d]. value: [B, Hkv, M, dv]. All of the working dtype.
        trees: one pair for all rows, or one a row: the tree, and the token of every leaf, int64 [leaves]; a token
            beyond the keys (of a tree that is continued to the right) is never seen.
    """
    n, keys = query.shape[2], key.shape[2]
    same = len(trees) == 1
    many = max(1, BLOCK_ELEMENTS // max(1, (len(query) if same else 1) * query.shape[1] * keys))
    found = []
    for rows in [slice(None)] if same else [slice(b, b + 1) for b in range(len(query))]:
        plant = Plant(*(trees[0] if same else trees[rows.start]), keys, query.device)
        blocks = []
        for start in range(0, n, many):
            block = slice(start, min(start + many, n))
            tensors = (query[rows, :, block], key[rows], value[rows])
            if torch.is_grad_enabled():
                made = checkpoint(_block, *tensors, plant, asked, rows, block, weights, use_reentrant=False)
            else:
                made = _block(*tensors, plant, asked, rows, block, weights)
            blocks.append(made)
        found.append([torch.cat(part, 2) if part[0] is not None else None for part in zip(*blocks)])
    out, shown = zip(*found)
    return torch.cat(out), torch.cat(shown) if weights else None


class Plant:
    """A tree over the keys of a call, as the tensors that the walk needs.

    `tokens` [leaves], clamped to the keys; `real` [leaves], which leaves have a key; `levels`: nodes by depth from 1
    down, in the order of their first leaf; `own` and `distance` for `near`.
    """

    def __init__(self, tree: Tree, tokens: Tensor, keys: int, device):
        self.tree, self.keys, self.device = tree, keys, device
        self.tokens, self.real = tokens.clamp_max(keys - 1).to(device), (tokens < keys).to(device)
        by_leaf = tree.first_leaf.argsort(stable=True)
        depth = tree.depth[by_leaf]
        self.levels = [by_leaf[depth == d].to(device) for d in range(1, int(depth.max()) + 1)]
        self.parents, self.first = tree.parents.to(device), tree.first_leaf.to(device)
        self.size = tree.sizes.to(device)
        self.leaf_of = torch.full((keys,), -1, dtype=torch.long)
        inside = tokens < keys
        self.leaf_of[tokens[inside]] = torch.arange(tree.leaves)[inside]

    def leaves_of(self, positions: range) -> Tensor:
        """int64 [R]: the leaf of each of these tokens, -1 for padding."""
        inside = [0 <= p < self.keys for p in positions]
        found = self.leaf_of[torch.tensor([p if ok else 0 for p, ok in zip(positions, inside)])]
        return torch.where(torch.tensor(inside), found, -1).to(self.device)

    def up(self, values: Tensor, how: str) -> Tensor:
        """[..., nodes] from [..., leaves]: each node gathers its leaves by "sum", "amin" or "amax"."""
        start = 0 if how == "sum" else torch.iinfo(torch.long).max if how == "amin" else False
        inner = values.new_full((*values.shape[:-1], self.tree.nodes - self.tree.leaves), start)
        found = torch.cat([values, inner], -1)
        for nodes in reversed(self.levels):
            index = self.parents[nodes].expand(*found.shape[:-1], -1)
            found = found.scatter_reduce(-1, index, found[..., nodes], how)
        return found

    def distance(self, leaves: Tensor) -> Tensor:
        """int64 [R, nodes]: from each query's own group, itself and the leaves beside it, to a node's nearest leaf."""
        parents, which = self.parents[leaves.clamp_min(0)].unique(return_inverse=True)
        place = torch.arange(self.tree.leaves, device=self.device)
        found = []
        for parent in parents.tolist():
            own = place[self.parents[: self.tree.leaves] == parent] if parent >= 0 else place
            right = torch.searchsorted(own, place).clamp_max(len(own) - 1)
            near = torch.minimum((own[right] - place).abs(), (own[(right - 1).clamp_min(0)] - place).abs())
            found.append(self.up(near, "amin"))
        return torch.stack(found)[which]

    def ancestors(self, leaves: Tensor) -> Tensor:
        """Bool [R, nodes]: the query's own leaf and what holds it."""
        own = torch.arange(self.tree.leaves, device=self.device) == leaves[:, None]
        return self.up(own.long(), "sum") > 0


def visible_pairs(asked: Asked, rows: slice, block: slice, plant: Plant, leaves: Tensor) -> Tensor:
    """Bool [B|1, H|1, R, leaves]: what the queries see."""
    i = torch.arange(block.start, block.stop, device=plant.device)[:, None] + asked.offset
    j = plant.tokens
    seen = plant.real & (leaves >= 0)[:, None]
    if asked.is_causal:
        seen = seen & (j <= i)
    if asked.window is not None:
        seen = seen & (i - j < asked.window)
        if not asked.is_causal:
            seen = seen & (j - i < asked.window)
    seen = seen[None, None]
    if asked.mask is not None:
        mask = of_block(asked.mask, rows, block, plant)
        seen = seen & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
    return seen


def of_block(t: Tensor, rows: slice, block: slice, plant: Plant) -> Tensor:
    """[B|1, H|1, R|1, leaves] of a mask or bias [B|1, H|1, N|1, M|1]."""
    t = t[rows] if t.shape[0] > 1 else t
    t = t[:, :, block] if t.shape[2] > 1 else t
    return t[..., plant.tokens] if t.shape[3] > 1 else t


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plant: Plant,
    asked: Asked,
    rows: slice,
    block: slice,
    weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and weights of one block of rows."""
    leaves = plant.leaves_of(range(block.start + asked.offset, block.stop + asked.offset))
    seen = visible_pairs(asked, rows, block, plant, leaves)
    heads = query.shape[1]
    logits = products(query, repeat_heads(key, heads)[:, :, plant.tokens])
    if asked.bias is not None:
        logits = logits + of_block(asked.bias, rows, block, plant)
    if asked.mask is not None and asked.mask.dtype != torch.bool:
        logits = logits + of_block(asked.mask, rows, block, plant).masked_fill(~seen, 0.0)
    tied = tie(logits.masked_fill(~seen, 0.0), seen, plant, leaves, asked)
    shares = softmax(tied.masked_fill(~seen, float("-inf")), asked.sink_logit)
    dropped = torch.nn.functional.dropout(shares, asked.dropout_p) if asked.dropout_p else shares
    out = weighted_sum(dropped, repeat_heads(value, heads)[:, :, plant.tokens])
    if not weights:
        return out, None
    index = plant.tokens.expand_as(shares)
    return out, shares.new_zeros(*shares.shape[:-1], plant.keys).scatter_add_(-1, index, shares)


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


def tie(logits: Tensor, seen: Tensor, plant: Plant, leaves: Tensor, asked: Asked) -> Tensor:
    """S' [B, H, R, leaves]: every leaf's own logit, or that of the closed block which holds it.

    From the root down: of the nodes whose parent is open, those stay closed that no rule opens and that refinement
    leaves; what lies under a closed block takes its value. Ties go to the node with the lower first leaf.
    """
    mean = plant.up(logits, "sum") / plant.size
    count = plant.up(seen.long(), "sum")
    whole = count == plant.size
    column = lambda t: t[:, None, None]
    opened = plant.ancestors(leaves) | (plant.distance(leaves) < column(asked.near))
    opened = opened | (plant.first < column(asked.sinks)) | ~whole
    opened[..., : plant.tree.leaves] = False
    opened = opened.expand(mean.shape).clone()
    size = torch.log(plant.size.to(mean.dtype))
    inner = torch.arange(plant.tree.nodes, device=plant.device) >= plant.tree.leaves
    bias = 0.0 if asked.block_bias is None else column(asked.block_bias)
    own, value = torch.where(inner, mean + bias, mean), None
    for nodes in plant.levels:
        parents = plant.parents[nodes]
        reached = opened[..., parents]
        here = opened[..., nodes] & reached
        closed = reached & ~here & inner[nodes]
        if bool((asked.top_k > 0).any()):
            scores = (mean.detach()[..., nodes] + size[nodes]).masked_fill(~closed, float("-inf"))
            order = scores.argsort(dim=-1, descending=True, stable=True)
            best = torch.arange(len(nodes), device=plant.device) < column(asked.top_k)
            chosen = torch.zeros_like(closed).scatter(-1, order, best.expand(order.shape))
            here = here | (closed & chosen)
        opened[..., nodes] = here
        taken = (
            own[..., nodes] if value is None else torch.where(reached, own[..., nodes], value[..., parents])
        )
        value = own if value is None else value
        value = value.index_copy(-1, nodes, taken)
    return own[..., : plant.tree.leaves] if value is None else value[..., : plant.tree.leaves]
