"""Hierarchical Self-Attention by brute force, in float64 numpy, from lists of ancestors.

Source: arXiv 2509.15448. `optimum` knows nothing of dynamic programmes: it is told which entries of an attention
matrix must be equal and finds the matrix nearest to softmax(S) by Newton's method. `key_attention` opens blocks until
nothing changes, as the rules say.
"""

import math
import random

import numpy as np


def random_parents(leaves, rng, branching=(1, 2, 2, 3, 4, 5)):
    """Parents of a random tree, leaves first; groups need not be contiguous, and chains of single children occur."""
    rng = random.Random(rng) if isinstance(rng, int) else rng
    loose, parent, count = list(range(leaves)), {}, leaves
    while len(loose) > 1:
        taken = rng.sample(loose, min(len(loose), rng.choice(branching)))
        for node in taken:
            parent[node] = count
        loose = [node for node in loose if node not in taken] + [count]
        count += 1
    if loose[0] < leaves:
        parent[loose[0]], count = count, count + 1
    return [parent.get(node, -1) for node in range(count)]


def windows_parents(leaves, sizes):
    """Parents of windows of these sizes, bottom first, under one root; a window may hold one node."""
    parents, below, first = [], leaves, leaves
    for small, large in zip((1, *sizes), sizes, strict=False):
        parents += [first + i * small // large for i in range(below)]
        below = math.ceil(below * small / large)
        first += below
    return [*parents, *[first] * below, -1]


def ancestors(parents, node):
    """The node, its parent, ..., the root."""
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def under(parents, leaves):
    """For every node the list of leaves under it."""
    found = [[] for _ in parents]
    for leaf in range(leaves):
        for node in ancestors(parents, leaf):
            found[node].append(leaf)
    return found


def parting(parents, i, j):
    """The children of the lowest common ancestor of two leaves that hold the one and the other."""
    up, other = ancestors(parents, i), ancestors(parents, j)
    while len(up) > 1 and len(other) > 1 and up[-1] == other[-1] and up[-2] == other[-2]:
        up, other = up[:-1], other[:-1]
    return up[-2], other[-2]


def ties(parents, leaves):
    """int [N, N]: equal numbers stand where attention must be equal."""
    labels, found = {}, np.empty((leaves, leaves), dtype=int)
    for i in range(leaves):
        for j in range(leaves):
            key = ("own", i) if i == j else parting(parents, i, j)
            found[i, j] = labels.setdefault(key, len(labels))
    return found


def optimum(logits, labels, keep_diagonal=True):
    """The row-stochastic matrix, constant where `labels` are, that minimises Σ_i KL(P_i ‖ softmax(S_i)).

    Newton's method on the values of the labels under the constraints that rows sum to 1 (infeasible start, with
    backtracking on the residual of the optimality conditions).
    """
    S, n = np.asarray(logits, dtype=np.float64), len(logits)
    S = S - S.max()
    used = np.ones((n, n), dtype=bool) if keep_diagonal else ~np.eye(n, dtype=bool)
    names, index = np.unique(labels[used], return_inverse=True)
    m = len(names)
    A = np.zeros((n, m))
    np.add.at(A, (np.nonzero(used)[0], index), 1.0)
    count, total = A.sum(0), np.bincount(index, weights=S[used], minlength=m)

    def residual(x, price):
        return np.concatenate([count * (np.log(x) + 1) - total + A.T @ price, A @ x - 1])

    x, price = np.full(m, 1.0 / n), np.zeros(n)
    for _ in range(200):
        r = residual(x, price)
        size = np.linalg.norm(r)
        if size < 1e-11:
            break
        inverse = x / count
        schur = (A * inverse) @ A.T
        d_price = np.linalg.lstsq(schur, r[m:] - A @ (inverse * r[:m]), rcond=None)[0]
        dx = -inverse * (r[:m] + A.T @ d_price)
        step = 1.0
        while (x + step * dx <= 0).any() or np.linalg.norm(
            residual(x + step * dx, price + step * d_price)
        ) > (1 - 0.1 * step) * size:
            step /= 2
            if step < 1e-12:
                break
        x, price = x + step * dx, price + step * d_price
    P = np.zeros((n, n))
    P[used] = x[index]
    return P


def divergence(P, logits, keep_diagonal=True):
    """Σ_i KL(P_i ‖ softmax(S_i)), the softmax without the diagonal where that is masked."""
    S = np.asarray(logits, dtype=np.float64).copy()
    if not keep_diagonal:
        np.fill_diagonal(S, -np.inf)
    total = 0.0
    for p, s in zip(P, S, strict=True):
        lse = s.max() + math.log(math.fsum(math.exp(x - s.max()) for x in s))
        total += math.fsum(
            a * (math.log(a) - (x - lse)) for a, x in zip(p, s, strict=True) if a > 0
        )
    return total


def key_attention(
    logits, parents, *, near=0, sinks=0, refine_top_k=0, block_bias=0.0, causal=False, visible=None
):
    """P of one head, [N, N], with tied keys; `parents` has no chains of single children."""
    S = np.asarray(logits, dtype=np.float64)
    n = len(S)
    seen = np.tril(np.ones((n, n), dtype=bool)) if causal else np.ones((n, n), dtype=bool)
    seen = seen if visible is None else seen & np.asarray(visible)
    rules = (near, sinks, refine_top_k)
    return np.stack([_key_row(S[i], i, parents, seen[i], rules, block_bias) for i in range(n)])


def _key_row(row, i, parents, seen, rules, block_bias):
    near, sinks, top_k = rules
    n, holds = len(row), under(parents, len(row))
    children = {a: [c for c, p in enumerate(parents) if p == a] for a in range(len(parents))}
    beside = [j for j in range(n) if parents[j] == parents[i]]
    partition = {i} | {c for a in ancestors(parents, i)[1:] for c in children[a]} - set(
        ancestors(parents, i)[1:]
    )

    def opens(block):
        far = min(abs(j - w) for j in holds[block] for w in beside)
        part = any(seen[j] for j in holds[block]) and not all(seen[j] for j in holds[block])
        return block >= n and (far < near or min(holds[block]) < sinks or part)

    while wide := {b for b in partition if opens(b)}:
        partition = partition - wide | {c for b in wide for c in children[b]}
    partition = {b for b in partition if any(seen[j] for j in holds[b])}
    for depth in range(n):
        level = sorted(b for b in partition if b >= n and len(ancestors(parents, b)) - 1 == depth)
        chosen = sorted(
            level, key=lambda b: (-np.mean(row[holds[b]]) - math.log(len(holds[b])), holds[b])
        )[:top_k]
        partition = partition - set(chosen) | {c for b in chosen for c in children[b]}
    P = np.zeros(n)
    for block in partition:
        if block < n:
            P[block] = math.exp(row[block] - row.max())
        else:
            P[holds[block]] = math.exp(np.mean(row[holds[block]]) + block_bias - row.max())
    return P / P.sum() if P.sum() else P
