"""Define Hierarchical Self-Attention, dense and in float64.

The paper is arXiv 2509.15448; docs/hsa.md has the math. This module shows the exact meaning of
both tyings. The loops over nodes and queries follow the formulas, and are meant for reading and for
short sequences.

The leaves of a rooted tree are the tokens; |A| is the number of leaves under node A. For tokens i
and j, A and B are the children of their lowest common ancestor that hold i and j. S are the model's
logits, S̄_BC their mean over i in B and j in C.

`tying="both"`: attention is one number for every pair of siblings.

    bottom-up:   ρ(leaf i) = S_ii, or -inf where the diagonal is masked
                 Z_B  = exp ρ(B) + Σ over siblings C of B of |C| · exp S̄_BC
                 ρ(A) = Σ over children B of A of |B|/|A| · log Z_B
    top-down:    inside(B) = exp ρ(B) / Z_B,   weight(B, C) = exp S̄_BC / Z_B
    attention:   P_ij = weight(A, B) · Π inside(C) over i's path strictly between the root and A
                 P_ii = Π inside(C) over i's whole path without the root

`tying="key"`: only keys are tied, and each query decides which blocks it sees token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ...hierarchy.tree import Tree

INF = float("inf")


def list_kin(tree: Tree) -> tuple[list[list[int]], list[list[int]]]:
    """Return the children and the leaves of every node.

    Children are in the order of their first leaf, leaves in token order.
    """
    parents = tree.parents.tolist()
    leaves = [[i] if i < tree.leaves else [] for i in range(len(parents))]
    # A child has a lower number than its parent, so its leaves are complete when they are passed
    # on.
    for node, parent in enumerate(parents[:-1]):
        leaves[parent] = sorted(leaves[parent] + leaves[node])
    children = [
        sorted((c for c, p in enumerate(parents) if p == a), key=leaves.__getitem__)
        for a in range(len(parents))
    ]
    return children, leaves


def definition_both(
    logits: Tensor, tree: Tree, keep_diagonal: bool = True, embedding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention weights tied on both sides.

    Args:
        logits: S, [..., N, N], N the number of leaves; row and column i belong to leaf i.
        tree: Tree over the N tokens.
        keep_diagonal: Whether a token attends to itself; False is the paper's own setting.
        embedding: e, [..., nodes, w]; S̄_BC + e_B·e_C replaces S̄_BC for siblings B and C. None: no
            embeddings.

    Returns:
        P, float64 [..., N, N], and ρ(root), float64 [...]. For a tree of one leaf without its
        diagonal, P is 0.
    """
    S = logits.double()
    children, leaves = list_kin(tree)
    size = [len(under) for under in leaves]

    def mean_logit(B: int, C: int) -> Tensor:
        mean = S[..., leaves[B], :][..., leaves[C]].mean((-1, -2))
        if embedding is None:
            return mean
        return mean + (embedding[..., B, :] * embedding[..., C, :]).double().sum(-1)

    # Bottom-up: ρ and log Z.
    nothing = torch.full_like(S[..., 0, 0], -INF)
    rho = {i: S[..., i, i] if keep_diagonal else nothing for i in range(tree.leaves)}
    log_z = {}
    for A in range(tree.leaves, tree.nodes):
        for B in children[A]:
            siblings = [C for C in children[A] if C != B]
            terms = [mean_logit(B, C) + torch.tensor(size[C]).double().log() for C in siblings]
            log_z[B] = torch.logsumexp(torch.stack([rho[B], *terms]), 0)
        rho[A] = torch.stack([size[B] / size[A] * log_z[B] for B in children[A]]).sum(0)

    # Top-down: the share of every node, and the weights of its pairs of children.
    root = tree.nodes - 1
    within = {root: torch.ones_like(nothing)}
    P = torch.zeros_like(S)
    for A in range(root, tree.leaves - 1, -1):
        for B in children[A]:
            # A single leaf without its diagonal has log Z = -inf, and -inf - (-inf) would be NaN.
            empty = log_z[B].isneginf()
            inside = torch.where(empty, 0.0, torch.exp(rho[B] - torch.where(empty, 0.0, log_z[B])))
            within[B] = within[A] * inside
            for C in children[A]:
                if C != B:
                    weight = within[A] * torch.exp(mean_logit(B, C) - log_z[B])
                    P[..., torch.tensor(leaves[B])[:, None], leaves[C]] = weight[..., None, None]
    for i in range(tree.leaves):
        P[..., i, i] = within[i]
    return P, rho[root]


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
    """Return attention weights with tied keys.

    They are a softmax over the tokens and closed blocks of `find_cover`. S'_ij is the mean of S_ij'
    over the j' of the closed block that holds j, plus the block bias. If j is in no closed block,
    S'_ij = S_ij. P = softmax(S').

    Args:
        logits: S, [batch, heads, N, N] (or [heads, N, N], or [N, N]), N the number of leaves.
        tree: Tree over the N tokens.
        near, sinks, refine_top_k, block_bias: Settings of `find_cover`; one value, or one per head.
            A bias of -inf drops the closed blocks.
        is_causal: Query i sees tokens 0 ... i.
        visible: bool, broadcastable to the logits: further restricts the tokens that a query sees.
            None: no limit.

    Returns:
        P, float64, shaped as the logits. A query that sees nothing gets zeros.
    """
    S = logits.double().reshape((1,) * (4 - logits.dim()) + tuple(logits.shape))
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
    seen = (seen.tril() if is_causal else seen).expand(S.shape)
    seen = seen if visible is None else seen & visible
    batch, heads, queries, _ = S.shape
    facts = list_kin(tree)
    near, sinks, refine_top_k, block_bias = (
        _per_head(r, heads) for r in (near, sinks, refine_top_k, block_bias)
    )
    P = torch.zeros_like(S)
    for b, h, i in product(range(batch), range(heads), range(queries)):
        row = S[b, h, i]
        tokens, blocks = find_cover(
            row, i, tree, facts, seen[b, h, i], near[h], sinks[h], refine_top_k[h]
        )
        tied = torch.full_like(row, -INF)
        tied[tokens] = row[tokens]
        # All tokens of a closed block have the same logit, so the softmax counts the block |B|
        # times.
        for under in (facts[1][B] for B in blocks):
            tied[under] = row[under].mean() + block_bias[h]
        # softmax of only -inf would be NaN.
        if not tied.isneginf().all():
            P[b, h, i] = torch.softmax(tied, -1)
    return P.reshape(logits.shape)


def find_cover(
    row: Tensor,
    i: int,
    tree: Tree,
    facts: tuple[list[list[int]], list[list[int]]],
    seen: Tensor,
    near: int,
    sinks: int,
    refine_top_k: int,
) -> tuple[list[int], list[int]]:
    """Return the tokens and the closed blocks that query i attends to.

    Tokens are leaves, and closed blocks are inner nodes. The cover starts with the query's own
    leaf, and on every level with the sibling blocks of its ancestors. Nodes that the query cannot
    see at all are left out. To open a block is to replace it by its children. A block is opened,
    again and again, while

    - the query sees some of its tokens but not all, or
    - it holds one of the first `sinks` tokens of the sequence, or
    - its nearest token lies less than `near` tokens from the query's own window: the query and its
      sibling leaves.

    Then, level by level from the top (a node's level is its depth), the closed blocks with the
    `refine_top_k` largest `mean of S_ij over B + log|B|` are opened.

    Args:
        row: S_i, [N].
        i: Number of the query.
        tree: Tree over the N tokens.
        facts: Result of `list_kin`.
        seen: bool [N], the tokens that the query sees.
        near, sinks, refine_top_k: See above.
    """
    children, leaves = facts
    parents, level = tree.parents.tolist(), tree.depth.tolist()
    # The choice of blocks is not differentiable.
    row, sees = row.detach(), seen.tolist()
    window = [c for c in children[parents[i]] if c < tree.leaves]
    distance = [min(abs(j - k) for k in window) for j in range(tree.leaves)]

    def must_open(B: int) -> bool:
        under = leaves[B]
        return (
            min(under) < sinks
            or min(distance[j] for j in under) < near
            or not all(sees[j] for j in under)
        )

    def score_block(B: int) -> float:
        return float(row[leaves[B]].double().mean()) + math.log(len(leaves[B]))

    standing: list[int] = []

    def place_node(B: int) -> None:
        """Add a node to the cover, or its children if it must be open."""
        if not any(sees[j] for j in leaves[B]):
            return
        if B >= tree.leaves and must_open(B):
            for C in children[B]:
                place_node(C)
        else:
            standing.append(B)

    # Tokens and blocks by their place.
    place_node(i)
    node = i
    while parents[node] >= 0:
        for B in children[parents[node]]:
            if B != node:
                place_node(B)
        node = parents[node]

    # Refinement. Children that it adds are candidates on the next level.
    for depth in range(1, max(level) + 1):
        closed = [B for B in standing if B >= tree.leaves and level[B] == depth]
        # Of equal scores, the block of the lower first leaf is opened.
        closed.sort(key=lambda B: (-score_block(B), min(leaves[B])))
        for B in closed[:refine_top_k]:
            standing.remove(B)
            standing += children[B]
    return [x for x in standing if x < tree.leaves], [x for x in standing if x >= tree.leaves]


def _per_head(value, heads: int) -> list:
    """Return one value per head."""
    return list(value) if isinstance(value, Sequence | Tensor) else [value] * heads
