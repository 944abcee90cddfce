"""The figure of docs/selection.md: which query attends to which key, under three rules and a short text.

The maps come from the package: the masks of its sparse rules, and the definition of key-tied HSA. No model is run.
Queries and keys are random vectors around a few topics that come back, so that the best keys are not the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hf_hyperattn.hierarchy.windows import windows_tree
from hf_hyperattn.mechanisms.hsa.reference import find_cover, list_kin
from hf_hyperattn.rules import Pages, SparseRule, Window

from .draw import PLOTS

LENGTH = 64
SEED = 0
#: The topic of every stretch of eight tokens.
TOPICS = (0, 1, 2, 1, 0, 3, 2, 0)
WINDOW = Window(near=12, sinks=2)
PAGES = Pages(near=8, sinks=2, page=4, top=2, query="previous", chunk=8)
HSA = {"windows": (4, 16), "near": 4, "sinks": 2, "refine_top_k": 1}
TITLES = (
    "Window\nnear=12, sinks=2",
    'Pages\nnear=8, sinks=2, page=4, top=2,\nquery="previous", chunk=8',
    "HSA with tied keys\nwindows=(4, 16), near=4, sinks=2,\nrefine_top_k=1",
)

#: Kinds of cells and their looks, whose shades differ in grey, too. Hatching marks a block that one mean stands for.
LOOKS = {
    "near the query": {"facecolor": "#2f5f9e", "linewidth": 0},
    "first tokens (sinks)": {"facecolor": "#111111", "linewidth": 0},
    "chosen by its score": {"facecolor": "#f2a33a", "linewidth": 0},
    "block of keys, seen as one mean": {
        "facecolor": "#ffffff",
        "edgecolor": "#55779e",
        "hatch": "////",
        "linewidth": 0.7,
    },
    "earlier token, left out": {"facecolor": "#d9d9d9", "linewidth": 0},
}
NEAR, SINKS, CHOSEN, BLOCK, LEFT_OUT = LOOKS


def make_text() -> tuple[Tensor, Tensor]:
    """Return queries and keys [1, 1, LENGTH, 16]."""
    generator = torch.Generator().manual_seed(SEED)
    centres = 2 * torch.randn(max(TOPICS) + 1, 16, generator=generator)
    of_token = centres[list(TOPICS)].repeat_interleave(LENGTH // len(TOPICS), 0)
    query, key = of_token + torch.randn(2, LENGTH, 16, generator=generator)
    return query[None, None], key[None, None]


def map_rule(rule: SparseRule) -> dict[str, Tensor]:
    """Return bool [queries, keys] of each kind of key that the rule shows."""
    query, key = make_text()
    seen_by = lambda rule: rule.mask(query, key)[0, 0]
    by_place = replace(rule, top=0) if isinstance(rule, Pages) else rule
    near = seen_by(replace(by_place, sinks=0))
    sinks = seen_by(by_place) & ~near
    return {NEAR: near, SINKS: sinks, CHOSEN: seen_by(rule) & ~near & ~sinks}


def map_hsa() -> tuple[dict[str, Tensor], list[tuple[int, int, int]]]:
    """Return bool [queries, keys] of each kind of token, and (query, first key, keys) of each closed block."""
    query, key = make_text()
    logits = (query @ key.mT)[0, 0] * query.shape[-1] ** -0.5
    tree = windows_tree(LENGTH, HSA["windows"])
    facts = list_kin(tree)

    def cover_query(i: int, sinks: int, top: int) -> tuple[list[int], list[int]]:
        return find_cover(
            logits[i], i, tree, facts, torch.arange(LENGTH) <= i, HSA["near"], sinks, top
        )

    near, sinks, seen = (torch.zeros(LENGTH, LENGTH, dtype=torch.bool) for _ in range(3))
    blocks = []
    for i in range(LENGTH):
        near[i, cover_query(i, 0, 0)[0]] = True
        sinks[i, cover_query(i, HSA["sinks"], 0)[0]] = True
        tokens, closed = cover_query(i, HSA["sinks"], HSA["refine_top_k"])
        seen[i, tokens] = True
        blocks += [(i, min(facts[1][block]), len(facts[1][block])) for block in closed]
    return {NEAR: near, SINKS: sinks & ~near, CHOSEN: seen & ~sinks}, blocks


def find_runs(seen: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (query, first key, keys) of every run of keys that a query sees."""
    for i, row in enumerate(seen.int()):
        edges = torch.diff(row, prepend=row.new_zeros(1), append=row.new_zeros(1))
        starts, stops = (edges > 0).nonzero()[:, 0].tolist(), (edges < 0).nonzero()[:, 0].tolist()
        yield from ((i, start, stop - start) for start, stop in zip(starts, stops))


def join_rows(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return (first query, queries, first key, keys): equal runs of successive queries become one rectangle."""
    joined: dict[tuple[int, int], list[list[int]]] = {}
    for i, start, width in sorted(runs):
        rows = joined.setdefault((start, width), [])
        if rows and sum(rows[-1]) == i:
            rows[-1][1] += 1
        else:
            rows.append([i, 1])
    return [(*rows, start, width) for (start, width), parts in joined.items() for rows in parts]


def plot():
    """Three maps side by side, with one legend."""
    from matplotlib.patches import Rectangle

    from . import figures

    figure = figures.Figure(figsize=(9.6, 4.3), layout="constrained")
    plots = figure.subplots(1, 3, sharey=True)
    tokens, blocks = map_hsa()
    maps = [(map_rule(WINDOW), []), (map_rule(PAGES), []), (tokens, blocks)]
    for axes, title, (kinds, closed) in zip(plots, TITLES, maps):
        axes.grid(False)
        axes.set(
            xlim=(0, LENGTH), ylim=(LENGTH, 0), aspect="equal", xlabel="key: token of the text"
        )
        axes.set(xticks=range(0, LENGTH + 1, 16), yticks=range(0, LENGTH + 1, 16))
        axes.set_title(title, fontsize=9)
        label = {"label": LEFT_OUT} if not closed else {}
        last = [*range(1, LENGTH + 1), LENGTH]
        axes.fill_betweenx(range(LENGTH + 1), 0, last, step="post", **LOOKS[LEFT_OUT], **label)
        runs = {BLOCK: closed} | {kind: [*find_runs(seen)] for kind, seen in kinds.items()}
        for kind, of_kind in runs.items():
            for n, (row, rows, start, width) in enumerate(join_rows(of_kind)):
                label = {"label": kind} if n == 0 else {}
                axes.add_patch(Rectangle((start, row), width, rows, **LOOKS[kind], **label))
    plots[0].set_ylabel("query: token of the text")
    handles = {}
    for axes in plots:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    order = [kind for kind in LOOKS if kind in handles]
    figure.legend(
        [handles[kind] for kind in order], order, ncols=5, loc="outside lower center", fontsize=9
    )
    return figure


def draw(plots: Path = PLOTS) -> None:
    """Write docs/plots/selection.svg."""
    from . import figures

    figures.save(plot(), plots / "selection.svg")
