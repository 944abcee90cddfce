"""Trees as nested lists, written out by recursion: what `hf_hyperattn.hierarchy` must agree with."""

from __future__ import annotations

from hypothesis import strategies as st


def nested(parents):
    """A tree of parent pointers as nested lists of leaf numbers, unary chains collapsed, siblings by first leaf."""
    children = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def build(node):
        if node not in children:
            return node
        parts = sorted((build(child) for child in children[node]), key=first)
        return parts[0] if len(parts) == 1 else parts

    (root,) = children[-1]
    tree = build(root)
    return tree if isinstance(tree, list) else [tree]


def first(tree):
    return tree if isinstance(tree, int) else min(map(first, tree))


def size(tree):
    return 1 if isinstance(tree, int) else sum(map(size, tree))


def height(tree):
    return 0 if isinstance(tree, int) else 1 + max(map(height, tree))


def leaves(tree):
    return [tree] if isinstance(tree, int) else [leaf for part in tree for leaf in leaves(part)]


def inner_nodes(tree, depth=0):
    """(node, depth) of every inner node, the tree itself first."""
    if isinstance(tree, list):
        yield tree, depth
        for part in tree:
            yield from inner_nodes(part, depth + 1)


def by_ids(rows):
    """The tree of rows of group ids, coarse to fine, one a leaf: equal beginnings share a node."""

    def build(members, level):
        if level == len(rows[0]):
            return members
        groups = {}
        for member in members:
            groups.setdefault(rows[member][level], []).append(member)
        return [build(group, level + 1) for group in groups.values()]

    return collapsed(build(list(range(len(rows))), 0))


def collapsed(tree):
    """Nested lists without chains, siblings by first leaf; always a list."""

    def walk(node):
        if isinstance(node, int):
            return node
        parts = sorted(map(walk, node), key=first)
        return parts[0] if len(parts) == 1 else parts

    tree = walk(tree)
    return tree if isinstance(tree, list) else [tree]


@st.composite
def random_parents(draw, most=24):
    """Parent pointers of a random tree, leaves first, inner nodes in any order; unary chains included."""
    leaves = draw(st.integers(1, most))
    inner = draw(st.integers(1, most))
    order = draw(st.permutations(range(leaves, leaves + inner)))
    parents = [None] * (leaves + inner)
    parents[order[0]] = -1
    for place, node in enumerate(order[1:], 1):
        parents[node] = order[draw(st.integers(0, place - 1))]
    used = set(p for p in parents if p is not None)
    childless = [node for node in order if node not in used]
    for leaf in range(leaves):
        free = childless if len(childless) and leaves - leaf <= len(childless) else order
        parents[leaf] = draw(st.sampled_from(free))
        if parents[leaf] in childless:
            childless.remove(parents[leaf])
    while childless:  # inner nodes that got no leaf go, with chains that end in them
        gone = childless.pop()
        if parents[gone] == -1:
            return draw(random_parents(most))
        parent = parents[gone]
        parents = [None if n == gone else p for n, p in enumerate(parents)]
        if parent not in [p for p in parents if p is not None]:
            childless.append(parent)
    kept = [n for n, p in enumerate(parents) if p is not None]
    number = {n: i for i, n in enumerate(kept)} | {-1: -1}
    return [number[parents[n]] for n in kept]
