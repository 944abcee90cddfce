"""Hierarchical Self-Attention: the definition (arXiv 2509.15448; math in docs/hsa.md), dense and in float64.

The leaves of a rooted tree are the tokens; |A| is the number of leaves under node A. For tokens i and j, A and B are
the children of their lowest common ancestor that hold i and j. S are the model's logits, S̄_BC their mean over i in B
and j in C.

`tying="both"`: attention is one number for every pair of siblings.

    bottom-up:   ρ(leaf i) = S_ii, or -inf where the diagonal is masked
                 Z_B  = exp ρ(B) + Σ over siblings C of B of |C| · exp S̄_BC
                 ρ(A) = Σ over children B of A of |B|/|A| · log Z_B
    top-down:    inside(B) = exp ρ(B) / Z_B,   weight(B, C) = exp S̄_BC / Z_B
    attention:   P_ij = weight(A, B) · Π inside(C) over i's path strictly between the root and A
                 P_ii = Π inside(C) over i's whole path without the root

`tying="key"`: only keys are tied, and what a query sees finely depends on the query. Both functions loop over nodes
and queries and are meant for reading, and for short sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...hierarchy.tree import Tree

INF = float("inf")


def kin(tree: Tree) -> tuple[list[list[int]], list[list[int]]]:
    """For every node its children, in the order of their first leaf, and the leaves under it in token order."""
    parents = tree.parents.tolist()
    leaves = [[i] if i < tree.leaves else [] for i in range(len(parents))]
    for node, parent in enumerate(parents[:-1]):  # a child stands before its parent
        leaves[parent] = sorted(leaves[parent] + leaves[node])
    children = [
        sorted((c for c, p in enumerate(parents) if p == a), key=leaves.__getitem__)
        for a in range(len(parents))
    ]
    return children, leaves


def definition_both(
    logits: Tensor, tree: Tree, keep_diagonal: bool = True, embedding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention tied on both sides.

    Args:
        logits: S, [..., N, N], N the number of leaves; row and column i belong to leaf i.
        keep_diagonal: whether a token attends to itself; False is the paper's own setting.
        embedding: e, [..., nodes, w]: S̄_BC + e_B·e_C takes the place of S̄_BC for siblings B and C.

    Returns:
        P, float64 [..., N, N], and ρ(root), float64 [...]. Of a tree of one leaf without its diagonal, P is 0.
    """
    S = logits.double()
    children, leaves = kin(tree)
    size = [len(under) for under in leaves]

    def mean(B: int, C: int) -> Tensor:
        block = S[..., leaves[B], :][..., leaves[C]].mean((-1, -2))
        return (
            block
            if embedding is None
            else block + (embedding[..., B, :] * embedding[..., C, :]).double().sum(-1)
        )

    nothing = torch.full_like(S[..., 0, 0], -INF)
    rho = {i: S[..., i, i] if keep_diagonal else nothing for i in range(tree.leaves)}
    log_z = {}
    for A in range(tree.leaves, tree.nodes):
        for B in children[A]:
            beside = [mean(B, C) + torch.tensor(size[C]).double().log() for C in children[A] if C != B]
            log_z[B] = torch.logsumexp(torch.stack([rho[B], *beside]), 0)
        rho[A] = sum(size[B] / size[A] * log_z[B] for B in children[A])

    root = tree.nodes - 1
    within = {root: torch.ones_like(nothing)}
    P = torch.zeros_like(S)
    for A in range(root, tree.leaves - 1, -1):
        for B in children[A]:
            alone = log_z[B].isneginf()
            inside = torch.where(alone, 0.0, torch.exp(rho[B] - torch.where(alone, 0.0, log_z[B])))
            within[B] = within[A] * inside
            for C in children[A]:
                if C != B:
                    P[..., _pairs(leaves[B]), leaves[C]] = (within[A] * torch.exp(mean(B, C) - log_z[B]))[
                        ..., None, None
                    ]
    for i in range(tree.leaves):
        P[..., i, i] = within[i]
    return P, rho[root]


def _pairs(rows: list[int]) -> Tensor:
    return torch.tensor(rows)[:, None]


def definition_key(
    logits: Tensor,
    tree: Tree,
    *,
    near: int | Sequence[int] = 0,
    sinks: int | Sequence[int] = 0,
    refine_top_k: int | Sequence[int] = 0,
    block_bias: float | Sequence[float] = 0.0,
    is_causal: bool = False,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention with tied keys: a softmax over what `cover` leaves, tokens and closed blocks.

    S'_ij is the mean of S_ij' over the j' of the closed block that holds j, plus the block bias, and S_ij where j
    is a token of its own; P = softmax(S').

    Args:
        logits: S, [batch, heads, N, N] (or [heads, N, N], or [N, N]), N the number of leaves.
        near, sinks, refine_top_k, block_bias: the rules of `cover`; one value, or one per head. A bias of -inf drops
            the closed blocks.
        is_causal: query i sees tokens 0 ... i.
        visible: bool, broadcastable to the logits: which tokens a query sees besides.

    Returns:
        P, float64, shaped as the logits. A query that sees nothing gets zeros.
    """
    shape = logits.shape
    S = logits.double().reshape((1,) * (4 - logits.dim()) + tuple(shape))
    seen = torch.ones(shape[-2:], dtype=torch.bool)
    seen = (seen.tril() if is_causal else seen).expand(S.shape)
    if visible is not None:
        seen = seen & visible
    heads, facts = S.shape[1], kin(tree)
    rules = [_per_head(r, heads) for r in (near, sinks, refine_top_k)]
    bias = _per_head(block_bias, heads)
    P = torch.zeros_like(S)
    for b in range(S.shape[0]):
        for h in range(heads):
            for i in range(S.shape[2]):
                tokens, blocks = cover(S[b, h, i], i, tree, facts, seen[b, h, i], *(r[h] for r in rules))
                _spread(P, (b, h, i), S[b, h, i], tokens, [facts[1][B] for B in blocks], bias[h])
    return P.reshape(shape)


def cover(
    row: Tensor,
    i: int,
    tree: Tree,
    facts: tuple[list[list[int]], list[list[int]]],
    seen: Tensor,
    near: int,
    sinks: int,
    refine_top_k: int,
) -> tuple[list[int], list[int]]:
    """What query i attends to: tokens (leaves), and closed blocks (inner nodes).

    At first its own leaf, and on every level the sibling blocks of its ancestors; of these what it cannot see at all
    is left out. To open a block is to put its children in its place. A block is opened, again and again, while

    - the query sees some of its tokens but not all, or
    - it holds one of the first `sinks` tokens of the sequence, or
    - its nearest token lies less than `near` tokens from the query's own window, that is, from the query and the
      leaves beside it.

    Then, level by level from the top (a node's level is its depth): of the closed blocks of that level, those with
    the `refine_top_k` largest `mean of S_ij over B + log|B|` are opened.

    Args:
        row: S_i, [N]. `seen`: bool [N]. `facts`: what `kin` returns.
    """
    children, leaves = facts
    parents, level, row, seen = (
        tree.parents.tolist(),
        tree.depth.tolist(),
        row.detach().tolist(),
        seen.tolist(),
    )
    own = [c for c in children[parents[i]] if c < tree.leaves]
    distance = [min(abs(j - k) for k in own) for j in range(tree.leaves)]

    def must_open(B: int) -> bool:
        under = leaves[B]
        return min(under) < sinks or min(distance[j] for j in under) < near or not all(seen[j] for j in under)

    def place(B: int, found: list[int]) -> None:
        if not any(seen[j] for j in leaves[B]):
            return
        if B >= tree.leaves and must_open(B):
            for C in children[B]:
                place(C, found)
        else:
            found.append(B)

    found: list[int] = []
    place(i, found)
    node = i
    while parents[node] >= 0:
        for B in children[parents[node]]:
            if B != node:
                place(B, found)
        node = parents[node]

    for depth in range(1, max(level) + 1):
        closed = [B for B in found if B >= tree.leaves and level[B] == depth]
        closed.sort(key=lambda B: -(torch.tensor([row[j] for j in leaves[B]], dtype=torch.float64).mean()
                                    + torch.tensor(len(leaves[B])).double().log()).item())  # fmt: skip
        for B in closed[:refine_top_k]:
            found.remove(B)
            found += children[B]
    return [x for x in found if x < tree.leaves], [x for x in found if x >= tree.leaves]


def _spread(
    P: Tensor, at: tuple, row: Tensor, tokens: list[int], blocks: list[list[int]], bias: float
) -> None:
    """Write softmax(S') of one query into its row of P."""
    tied = torch.full_like(row, -INF)
    tied[tokens] = row[tokens]
    for under in blocks:
        tied[under] = row[under].mean() + bias
    if not tied.isneginf().all():
        P[at] = torch.softmax(tied, -1)


def _per_head(value, heads: int) -> list:
    return list(value) if isinstance(value, Sequence | Tensor) else [value] * heads
