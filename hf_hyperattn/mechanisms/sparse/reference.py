"""The definitions of the sparse rules, query by query, in float64.

A rule gives each query i a set V_i of tokens j <= i. Attention is a softmax over these tokens:

    o_i = Σ over j in V_i of exp(S_ij) v_j  /  Σ over j in V_i of exp(S_ij),    S_ij = scale ·
    q_i·k_j

All sets hold the sinks, j < sinks, and the near tokens. A selection is made for a chunk of queries,
i // chunk = c, by one vector s:

    own       chunk = 1, s = q_i                    first     s = q of the chunk's first token,
    c·chunk previous  s = mean of q over chunk c - 1        chunk     s = mean of q over chunk c

The loops are made for reading, for tests, and for short texts.
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


def attend_by_definition(
    rule: SparseRule, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Return the attention output of a text under a rule.

    Args:
        rule: Of the head.
        query, key: [N, d].
        value: [N, dv].
        scale: The attention logit is scale · q·k.

    Returns:
        float64 [N, dv].
    """
    query, key, value = query.double(), key.double(), value.double()
    rows = []
    for i, seen in enumerate(list_seen(rule, query, key, scale)):
        tokens = sorted(seen)
        weights = torch.softmax(scale * key[tokens] @ query[i], 0)
        rows.append(weights @ value[tokens])
    return torch.stack(rows)


def list_seen(rule: SparseRule, query: Tensor, key: Tensor, scale: float) -> list[Tokens]:
    """Return V_i for every query i of a text.

    Args:
        rule: Of the head.
        query, key: [N, d].
        scale: The attention logit is scale · q·k.

    Raises:
        TypeError: The rule comes from outside this package. Its own `visible` defines it.
    """
    kinds: dict[type, Callable[..., Tokens]] = {
        Exact: define_exact,
        Window: define_window,
        Pages: define_pages,
        NestedWindows: define_nested_windows,
        Clusters: define_clusters,
        VerticalSlash: define_vertical_slash,
    }
    if type(rule) not in kinds:
        raise TypeError(
            f"{type(rule).__name__} is defined by its own visible; allowed: "
            f"{', '.join(kind.__name__ for kind in kinds)}"
        )
    define = kinds[type(rule)]
    query, key = query.double(), key.double()
    return [{j for j in define(rule, query, key, scale, i) if j <= i} for i in range(len(query))]


# One function for each rule: V_i, possibly with later tokens, which `list_seen` removes


def define_exact(rule: Exact, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """Return every token."""
    return set(range(i + 1))


def define_window(
    rule: Window | VerticalSlash | Clusters, query: Tensor, key: Tensor, scale: float, i: int
) -> Tokens:
    """Return the last `near` and the first `sinks` tokens."""
    return set(range(max(0, i - rule.near + 1), i + 1)) | set(range(rule.sinks))


def define_pages(rule: Pages, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """Return the near tokens, the sinks and the pages with the largest scores.

    Candidates are pages that end before the near tokens begin and hold more than sinks.
    """
    start = i // rule.chunk * rule.chunk
    opening = max(0, start - rule.near + 1) // rule.page * rule.page
    seen = set(range(opening, i + 1)) | set(range(rule.sinks))
    pages = [range(a * rule.page, (a + 1) * rule.page) for a in range(opening // rule.page)]
    pages = [page for page in pages if page.stop > rule.sinks]
    if not pages:
        return seen
    s = keep_largest_channels(rule, find_selector(rule, query, i))
    # Sorting is stable, so that ties go to the first page.
    pages.sort(key=lambda page: score_keys(rule, s, key[list(page)]), reverse=True)
    for page in pages[: rule.top]:
        seen |= set(page)
    return seen


def define_nested_windows(
    rule: NestedWindows, query: Tensor, key: Tensor, scale: float, i: int
) -> Tokens:
    """Open windows by place, then on each level the best closed ones."""
    own = i // rule.chunk * rule.chunk // rule.windows[0] * rule.windows[0]
    seen: Tokens = set()
    sizes = (1, *rule.windows)
    standing: list[list[int]] = [[] for _ in sizes]

    def place_window(level: int, begin: int) -> None:
        end = begin + sizes[level]
        if not level:
            seen.add(begin)
        elif end > own or begin < rule.sinks or own - (end - 1) < rule.near:
            for inside in range(begin, end, sizes[level - 1]):
                place_window(level - 1, inside)
        else:
            standing[level].append(begin)

    # By place, from the largest windows down.
    for begin in range(0, i + 1, sizes[-1]):
        place_window(len(sizes) - 1, begin)
    # By score: the windows in an opened one stand on the level below.
    for level in range(len(sizes) - 1, 0, -1):
        size, below = sizes[level], sizes[level - 1]
        worth = {
            begin: score_keys(rule, find_selector(rule, query, i), key[begin : begin + size])
            for begin in standing[level]
        }
        for begin in sorted(standing[level], key=worth.__getitem__, reverse=True)[: rule.top]:
            standing[level - 1] += range(begin, begin + size, below)
    return seen | set(standing[0])


def define_clusters(rule: Clusters, query: Tensor, key: Tensor, scale: float, i: int) -> Tokens:
    """Return the own segment, near tokens, sinks and the heaviest clusters.

    The mass of a cluster is estimated by its mean. Candidates lie in segments before the query's
    own.
    """
    start = i // rule.chunk * rule.chunk
    own = start // rule.segment
    seen = define_window(rule, query, key, scale, i) | set(range(own * rule.segment, i + 1))
    members: list[list[int]] = []
    # All clusters of the segments before the own one, as lists of tokens.
    for segment in range(own):
        first = segment * rule.segment
        # Otherwise the whole segment is near.
        if first < start - rule.near:
            clusters = cluster_by_lloyd(rule, key[first:][: rule.segment])
            members += [[first + t for t in cluster] for cluster in clusters]
    if not members:
        return seen
    s = find_selector(rule, query, i)

    def find_mass(tokens: list[int]) -> float:
        return float(scale * s @ key[tokens].mean(0)) + math.log(len(tokens))

    for tokens in sorted(members, key=find_mass, reverse=True)[: rule.top]:
        seen |= set(tokens)
    return seen


def define_vertical_slash(
    rule: VerticalSlash, query: Tensor, key: Tensor, scale: float, i: int
) -> Tokens:
    """Return the heaviest columns and diagonals at the end of the block before.

    In the first block, return all tokens.
    """
    start = i // rule.every * rule.every
    if not start:
        return set(range(i + 1))
    # Sum the weights of the measured queries, by token and by distance.
    columns, diagonals = [0.0] * start, [0.0] * len(key)
    for p in range(start - rule.measured, start):
        for j, weight in enumerate(torch.softmax(scale * key[: p + 1] @ query[p], 0).tolist()):
            columns[j] += weight
            diagonals[p - j] += weight
    heaviest = sorted(range(rule.sinks, start), key=columns.__getitem__, reverse=True)
    distances = sorted(range(rule.near, len(key)), key=diagonals.__getitem__, reverse=True)
    seen = define_window(rule, query, key, scale, i)
    seen |= set(heaviest[: rule.columns])
    return seen | {i - d for d in distances[: rule.diagonals] if d <= i}


# The parts that rules share


def find_selector(rule: Pages | NestedWindows | Clusters, query: Tensor, i: int) -> Tensor:
    """Return s, the selecting vector of the chunk of query i."""
    start = i // rule.chunk * rule.chunk
    if rule.query in ("own", "first"):
        return query[start]
    start = start - rule.chunk if rule.query == "previous" else start
    return query[start : start + rule.chunk].mean(0)


def score_keys(rule: Pages | NestedWindows, s: Tensor, keys: Tensor) -> float:
    """Return the score of a page or window from its keys."""
    if rule.summary == "mean":
        return float(s @ keys.mean(0))
    return float(torch.maximum(s * keys.amin(0), s * keys.amax(0)).sum())


def keep_largest_channels(rule: Pages, s: Tensor) -> Tensor:
    """Return s with 0 in all but its largest channels."""
    count = max(1, round(rule.channels * len(s)))
    strength = s.abs().tolist()
    largest = sorted(range(len(s)), key=strength.__getitem__, reverse=True)[:count]
    kept = [float(s[d]) if d in largest else 0.0 for d in range(len(s))]
    return torch.tensor(kept, dtype=s.dtype)


def cluster_by_lloyd(rule: Clusters, key: Tensor) -> list[list[int]]:
    """Return the clusters of a segment's keys [segment, d], without empty ones."""
    means = [key[m] for m in range(rule.size // 2, rule.segment, rule.size)]
    members: list[list[int]] = []
    for _ in range(rule.rounds + 1):
        nearest = [
            min(range(len(means)), key=lambda c: float((k - means[c]).square().sum())) for k in key
        ]
        members = [[t for t, c in enumerate(nearest) if c == label] for label in range(len(means))]
        # A cluster without keys keeps its mean.
        means = [key[m].mean(0) if m else mean for m, mean in zip(members, means, strict=True)]
    return [m for m in members if m]
