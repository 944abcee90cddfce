"""Sparse rules: the definitions, query by query, for one head and one text in float64.

A rule gives every query i a set V_i of tokens, j <= i, and attention is a softmax over these alone:

    o_i = Σ over j in V_i of exp(S_ij) v_j  /  Σ over j in V_i of exp(S_ij),    S_ij = scale · q_i·k_j

All sets hold the sinks, j < sinks, and the near tokens. A selection is made for a chunk of queries, i // chunk = c, by
one vector s:

    own       chunk = 1, s = q_i                    first     s = q of the chunk's first token, c·chunk
    previous  s = mean of q over chunk c - 1        chunk     s = mean of q over chunk c

Loops over queries; meant for reading, and for short texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .mask_rules.clusters import Clusters
from .mask_rules.nested import NestedWindows
from .mask_rules.vertical_slash import VerticalSlash
from .pages import Pages
from .rules import Exact, SparseRule, Window

Tokens = set[int]


def attention(rule: SparseRule, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[N, dv] of queries, keys [N, d] and values [N, dv] of a text."""
    query, key, value = query.double(), key.double(), value.double()
    rows = []
    for i, seen in enumerate(definition(rule, query, key, scale)):
        tokens = sorted(seen)
        rows.append(torch.softmax(scale * key[tokens] @ query[i], 0) @ value[tokens])
    return torch.stack(rows)


def definition(rule: SparseRule, query: Tensor, key: Tensor, scale: float) -> list[Tokens]:
    """V_i for every query i of a text; queries and keys are [N, d].

    Raises:
        TypeError: a rule from outside this package, which is defined by its own `visible`.
    """
    kinds: dict[type, Callable[..., Tokens]] = {
        Exact: exact,
        Window: window,
        Pages: pages,
        NestedWindows: tree,
        Clusters: clusters,
        VerticalSlash: vertical_slash,
    }
    if type(rule) not in kinds:
        raise TypeError(
            f"{type(rule).__name__} is defined by its own visible; allowed: {', '.join(RULE_NAMES)}"
        )
    define = kinds[type(rule)]
    return [
        {j for j in define(rule, query.double(), key.double(), scale, i) if j <= i}
        for i in range(len(query))
    ]


RULE_NAMES = ("Exact", "Window", "Pages", "NestedWindows", "Clusters", "VerticalSlash")


def exact(rule: Exact, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """Every token."""
    return set(range(i + 1))


def window(
    rule: Window | VerticalSlash | Clusters, query: Tensor, key: Tensor, scale: float, i: int
) -> Tokens:
    """The last `near` and the first `sinks`."""
    return set(range(max(0, i - rule.near + 1), i + 1)) | set(range(rule.sinks))


def pages(rule: Pages, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """The pages with the largest scores among those that end before the near ones begin and are not all sinks."""
    start = i // rule.chunk * rule.chunk
    opening = max(0, start - rule.near + 1) // rule.page * rule.page
    seen = set(range(opening, i + 1)) | set(range(rule.sinks))
    tokens = {a: range(a * rule.page, (a + 1) * rule.page) for a in range(opening // rule.page)}
    tokens = {a: page for a, page in tokens.items() if page.stop > rule.sinks}
    s = largest_channels(rule, selector(rule, query, i) if tokens else query[i])

    for a in sorted(tokens, key=lambda a: score(rule, s, key[list(tokens[a])]), reverse=True)[
        : rule.top
    ]:
        seen |= set(tokens[a])
    return seen


def score(rule: Pages | NestedWindows, s: Tensor, keys: Tensor) -> float:
    """What a page or window is chosen by, from its keys."""
    if rule.summary == "mean":
        return float(s @ keys.mean(0))
    return float(torch.maximum(s * keys.amin(0), s * keys.amax(0)).sum())


def largest_channels(rule: Pages, s: Tensor) -> Tensor:
    """s, 0 in all but its largest channels."""
    count, strength = max(1, round(rule.channels * len(s))), s.abs().tolist()
    largest = sorted(range(len(s)), key=strength.__getitem__, reverse=True)[:count]
    return torch.tensor(
        [float(s[d]) if d in largest else 0.0 for d in range(len(s))], dtype=s.dtype
    )


def tree(rule: NestedWindows, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """Windows opened by where they are, again and again; then the best of those that stand, level by level."""
    own = i // rule.chunk * rule.chunk // rule.windows[0] * rule.windows[0]
    seen: Tokens = set()
    sizes = (1, *rule.windows)
    standing: list[list[int]] = [[] for _ in sizes]

    def place(level: int, begin: int) -> None:
        end = begin + sizes[level]
        if not level:
            seen.add(begin)
        elif end > own or begin < rule.sinks or own - (end - 1) < rule.near:
            for inside in range(begin, end, sizes[level - 1]):
                place(level - 1, inside)
        else:
            standing[level].append(begin)

    for begin in range(0, i + 1, sizes[-1]):
        place(len(sizes) - 1, begin)
    for level in range(len(sizes) - 1, 0, -1):
        tokens = lambda begin, level=level: range(begin, begin + sizes[level])
        worth = lambda begin, tokens=tokens: score(
            rule, selector(rule, query, i), key[list(tokens(begin))]
        )
        for begin in sorted(standing[level], key=worth, reverse=True)[: rule.top]:
            standing[level - 1] += range(begin, begin + sizes[level], sizes[level - 1])
    return seen | set(standing[0])


def clusters(rule: Clusters, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """The clusters with the largest mass, as their means tell it, among those of the segments before the query's."""
    start = i // rule.chunk * rule.chunk
    own = start // rule.segment
    seen = window(rule, query, key, scale, i) | set(range(own * rule.segment, i + 1))
    members = []
    for s in range(own):
        if s * rule.segment < start - rule.near:  # else all of it is near
            members += [
                [s * rule.segment + t for t in m]
                for m in lloyd(rule, key[s * rule.segment :][: rule.segment])
            ]
    s_ = selector(rule, query, i) if members else query[i]
    mass = lambda tokens: float(scale * s_ @ key[tokens].mean(0)) + math.log(len(tokens))
    for tokens in sorted(members, key=mass, reverse=True)[: rule.top]:
        seen |= set(tokens)
    return seen


def lloyd(rule: Clusters, key: Tensor) -> list[list[int]]:
    """The clusters of a segment's keys [segment, d], without empty ones."""
    means = [key[m] for m in range(rule.size // 2, rule.segment, rule.size)]
    members: list[list[int]] = []
    for _ in range(rule.rounds + 1):
        nearest = [
            min(range(len(means)), key=lambda c: float((k - means[c]).square().sum())) for k in key
        ]
        members = [[t for t, c in enumerate(nearest) if c == label] for label in range(len(means))]
        means = [key[m].mean(0) if m else mean for m, mean in zip(members, means, strict=True)]
    return [m for m in members if m]


def vertical_slash(rule: VerticalSlash, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """Columns and diagonals by the weights of the last queries of the block before; all tokens in the first block."""
    start = i // rule.every * rule.every
    if not start:
        return set(range(i + 1))
    columns, diagonals = [0.0] * start, [0.0] * len(key)
    for p in range(start - rule.measured, start):
        for j, weight in enumerate(torch.softmax(scale * key[: p + 1] @ query[p], 0).tolist()):
            columns[j] += weight
            diagonals[p - j] += weight
    heaviest = sorted(range(rule.sinks, start), key=columns.__getitem__, reverse=True)[
        : rule.columns
    ]
    distances = sorted(range(rule.near, len(key)), key=diagonals.__getitem__, reverse=True)[
        : rule.diagonals
    ]
    return window(rule, query, key, scale, i) | set(heaviest) | {i - d for d in distances if d <= i}


def selector(rule: Pages | NestedWindows | Clusters, query: Tensor, i: int) -> Tensor:
    """s, what the chunk of query i selects by."""
    start = i // rule.chunk * rule.chunk
    if rule.query in ("own", "first"):
        return query[start]
    start = start - rule.chunk if rule.query == "previous" else start
    return query[start : start + rule.chunk].mean(0)
