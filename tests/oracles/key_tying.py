"""Key-tied attention by brute force: for every query the cover of its visible tokens is built from nested lists.

A tree is an int (a leaf: the index of its token) or a list of trees. Written from the text of the definition alone:
one query at a time, sets of tokens, no tensors but the logits [N, M] in and the weights [N, M] out.
"""

import math

import torch


def tokens(tree):
    """The tokens under a node, left to right."""
    return [tree] if isinstance(tree, int) else [j for child in tree for j in tokens(child)]


def collapse(tree):
    """The tree without nodes of one child."""
    while not isinstance(tree, int) and len(tree) == 1:
        tree = tree[0]
    return tree if isinstance(tree, int) else [collapse(child) for child in tree]


def windows(first, last, sizes):
    """The nested list of windows of `sizes` (bottom first) over the tokens first..last-1."""
    if not sizes:
        return list(range(first, last))
    return [windows(a, min(a + sizes[-1], last), sizes[:-1]) for a in range(first, last, sizes[-1])]


def bottom_window(i, first, last, size):
    """The tokens of the query's own bottom-level window."""
    a = first + (i - first) // size * size
    return range(a, min(a + size, last))


def weights(
    logits,
    tree,
    group,
    *,
    near=0,
    sinks=0,
    top_k=0,
    block_bias=0.0,
    visible=None,
    queries=None,
    order=None,
):
    """Weights [N, M] of key-tied attention for one head.

    logits: [N, M] float64. tree: nested list over real tokens. group(i): the tokens of query i's smallest group.
    queries: the token that each row stands for, default row i is token i. visible: [N, M] bool.
    order: the list of real tokens, for `sinks`; default the tree's own tokens in order of their index.
    """
    tree = collapse(tree)
    real = sorted(tokens(tree)) if order is None else order
    first = set(real[:sinks])
    out = torch.zeros_like(logits)
    for row in range(logits.shape[0]):
        i = row if queries is None else queries[row]
        if i not in real:
            continue
        seen = set(real) if visible is None else {j for j in real if visible[row, j]}
        closed = cover(tree, i, seen, first, group(i), near)
        for block in refine(closed, logits[row], top_k):
            members = tokens(block)
            value = sum(float(logits[row, j]) for j in members) / len(members)
            if not isinstance(block, int):
                value += block_bias
            for j in members:
                out[row, j] = value
            seen -= set(members)
        assert not seen
        shown = [j for j in real if visible is None or visible[row, j]]
        if not shown:
            continue
        top = max(float(out[row, j]) for j in shown)
        total = sum(math.exp(float(out[row, j]) - top) for j in shown)
        for j in shown:
            out[row, j] = math.exp(float(out[row, j]) - top) / total
        for j in set(range(logits.shape[1])) - set(shown):
            out[row, j] = 0.0
    return out


def cover(node, i, seen, first, group, near, depth=0):
    """(depth, node) of the blocks and tokens that are left after the rules which know no score."""
    members = set(tokens(node))
    if not members & seen:
        return []
    if isinstance(node, int):
        return [(depth, node)]
    distance = min(abs(j - g) for j in members for g in group)
    if not (i in members or members - seen or members & first or distance < near):
        return [(depth, node)]
    return [
        found for child in node for found in cover(child, i, seen, first, group, near, depth + 1)
    ]


def refine(closed, row, top_k):
    """Blocks and tokens after opening, from the top level down, the best `top_k` blocks of each level."""
    level = 0
    while any(depth >= level for depth, _ in closed):
        here = [node for depth, node in closed if depth == level and not isinstance(node, int)]
        here.sort(
            key=lambda node: min(tokens(node))
        )  # ties go to the lower index: the sort below is stable
        here.sort(key=lambda node: -score(node, row))
        for node in here[:top_k]:
            closed.remove((level, node))
            closed += [(level + 1, child) for child in node]
        level += 1
    return [node for _, node in closed]


def score(node, row):
    """Mean logit over the block plus the logarithm of its size."""
    members = tokens(node)
    return sum(float(row[j]) for j in members) / len(members) + math.log(len(members))
