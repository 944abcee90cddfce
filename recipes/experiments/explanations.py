"""Draw the five figures that explain: a patch, three sparse rules, a tree, two cones, and the steps of `inject`.

Every figure is drawn twice, for light and for dark pages, without a background. Masks, weights and heights in them
are computed by the package. Figures are 7.6 inches wide, so that 12 points are the size of body text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import hf_hyperattn as ha
from hf_hyperattn.hierarchy.windows import windows_tree
from hf_hyperattn.mechanisms.cone.reference import umbral_height
from hf_hyperattn.mechanisms.hsa.reference import find_cover, list_kin
from hf_hyperattn.rules import Pages, Window

from .draw import ROOT
from .figures import Figure, save
from .selection_maps import CHOSEN, LEFT_OUT, LENGTH, NEAR, SINKS, find_runs, join_rows, map_rule

FOLDER = ROOT / "docs" / "figures"
WIDTH = 7.6
FONT = 12

#: The three rules show the same number of chosen keys to a query: two pages of four, or eight single keys.
RULES = {
    "Window": Window(near=12, sinks=2),
    "Pages of 4 keys": Pages(near=8, sinks=2, page=4, top=2, query="previous", chunk=8),
    "Single keys": Pages(near=8, sinks=2, page=1, top=8, query="previous", chunk=8),
}
#: The tree of tokens: windows of 4, 8 and 16, seen from token 30.
TOKENS, WINDOWS, QUERY = 32, (4, 8, 16), 30
#: Two points (horizontal part, height), and the width of their cones per height, which is sinh r.
POINT_Q, POINT_K, SLOPE = (0.0, 1.0), (4.0, 0.6), 1.2


@dataclass(frozen=True)
class Theme:
    """Colours of a figure. The ink, muted, blue and orange have a contrast of at least 4.5 to the page."""

    page: str
    ink: str
    muted: str
    pale: str
    faint: str
    blue: str
    blue_fill: str
    orange: str
    orange_fill: str


THEMES = {
    "": Theme(
        page="#ffffff",
        ink="#1f2328",
        muted="#57606a",
        pale="#b0b7c0",
        faint="#e4e7eb",
        blue="#2a5ca8",
        blue_fill="#dfeaf8",
        orange="#a84c00",
        orange_fill="#fbe3c8",
    ),
    "-dark": Theme(
        page="#131416",
        ink="#e8eaed",
        muted="#a4acb6",
        pale="#5c646e",
        faint="#3a4048",
        blue="#82b4f5",
        blue_fill="#1b304c",
        orange="#f5a742",
        orange_fill="#4a3213",
    ),
}


def make_canvas(height: float):
    """Return a figure and its only axes, without a frame, whose unit is one inch."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def write(axes, x: float, y: float, text: str, color: str, **options) -> None:
    """Write text centred at a point, in the size of body text."""
    axes.text(
        x, y, text, color=color, **{"fontsize": FONT, "ha": "center", "va": "center"} | options
    )


def draw_box(axes, left: float, bottom: float, width: float, height: float, **look) -> None:
    """Draw a box with round corners."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=style, **look))


def draw_arrow(axes, *points: tuple[float, float], color: str, head: bool = True) -> None:
    """Draw straight lines through points, with the head of an arrow at the end."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Line

    style = "-|>,head_length=6,head_width=3" if head else "-"
    axes.add_patch(
        FancyArrowPatch(
            path=Line(points), arrowstyle=style, color=color, linewidth=1.4, joinstyle="miter"
        )
    )


def draw_patch(theme: Theme) -> Figure:
    """Draw a patched layer: the model's score plus the mechanism's score times a gate."""
    figure, axes = make_canvas(3.9)
    own = {"facecolor": theme.faint, "edgecolor": theme.muted, "linewidth": 1.2}
    new = {"facecolor": theme.blue_fill, "edgecolor": theme.blue, "linewidth": 1.2}
    draw_box(axes, 2.35, 0.1, 3.95, 1.62, facecolor="none", edgecolor=theme.blue, linestyle="--")
    write(axes, 4.32, 0.32, "added by the patch: module hyper", theme.blue)
    for left, bottom, width, text, look in (
        (0.05, 1.95, 0.8, "input", own),
        (1.15, 1.95, 0.85, "q, k, v", own),
        (2.5, 2.55, 1.75, "score of\nthe model", own),
        (2.5, 0.75, 1.75, "score of\nthe mechanism", new),
        (5.35, 2.55, 1.1, "softmax,\ntimes v", own),
        (6.75, 2.55, 0.8, "output", own),
    ):
        draw_box(axes, left, bottom, width, 0.75, **look)
        write(axes, left + width / 2, bottom + 0.375, text, theme.ink)
    line = {"color": theme.muted}
    draw_arrow(axes, (0.85, 2.325), (1.15, 2.325), **line)
    draw_arrow(axes, (2.0, 2.325), (2.2, 2.325), (2.2, 2.925), (2.5, 2.925), **line)
    draw_arrow(axes, (2.2, 2.325), (2.2, 1.125), (2.5, 1.125), color=theme.blue)
    draw_arrow(axes, (1.575, 2.7), (1.575, 3.6), (5.9, 3.6), (5.9, 3.3), **line)
    write(axes, 3.7, 3.75, "v", theme.muted)
    draw_arrow(axes, (4.25, 2.925), (4.62, 2.925), **line)
    draw_arrow(axes, (4.98, 2.925), (5.35, 2.925), **line)
    draw_arrow(axes, (6.45, 2.925), (6.75, 2.925), **line)
    draw_arrow(axes, (4.25, 1.125), (4.62, 1.125), color=theme.blue)
    draw_arrow(axes, (4.8, 1.3), (4.8, 2.74), color=theme.orange)
    for y, text, color in ((2.925, "+", theme.muted), (1.125, "×", theme.orange)):
        axes.plot(4.8, y, "o", markersize=25, color="none", markeredgecolor=color)
        write(axes, 4.8, y, text, theme.ink, fontsize=16)
    write(axes, 5.1, 1.125, "gate g of\nthe head", theme.orange, ha="left")
    write(axes, 4.95, 2.1, "g = 0: the original model", theme.orange, ha="left")
    return figure


def draw_rules(theme: Theme) -> Figure:
    """Draw which query attends to which key under a window, pages and single keys."""
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path as Line

    figure = Figure(figsize=(WIDTH, 3.7), layout="constrained")
    looks = {NEAR: theme.blue, SINKS: theme.ink, CHOSEN: theme.orange, LEFT_OUT: theme.faint}
    plots = figure.subplots(1, len(RULES), sharey=True)
    for axes, (title, rule) in zip(plots, RULES.items()):
        axes.grid(False)
        axes.set(xlim=(0, LENGTH), ylim=(LENGTH, 0), aspect="equal")
        axes.set(xticks=range(0, LENGTH + 1, 16), yticks=range(0, LENGTH + 1, 16))
        axes.tick_params(colors=theme.muted, labelsize=FONT)
        axes.spines[:].set_color(theme.muted)
        axes.set_title(title, fontsize=FONT, color=theme.ink)
        axes.set_xlabel("key", fontsize=FONT, color=theme.ink)
        last = [*range(1, LENGTH + 1), LENGTH]
        axes.fill_betweenx(range(LENGTH + 1), 0, last, step="post", color=theme.faint, linewidth=0)
        for kind, seen in map_rule(rule).items():
            # One shape for each kind keeps the file small.
            boxes = [
                Line(((x, y), (x + width, y), (x + width, y + rows), (x, y + rows), (x, y)))
                for y, rows, x, width in join_rows([*find_runs(seen)])
            ]
            shape = Line.make_compound_path(*boxes)
            axes.add_patch(PathPatch(shape, facecolor=looks[kind], linewidth=0))
    plots[0].set_ylabel("query", fontsize=FONT, color=theme.ink)
    handles = [Patch(color=color, label=kind) for kind, color in looks.items()]
    figure.legend(
        handles=handles, ncols=2, loc="outside lower center", fontsize=FONT, labelcolor=theme.ink
    )
    return figure


def weigh_tokens() -> tuple[Tensor, list[int], list[int], list[list[int]]]:
    """Return the weight of every token for QUERY, its single tokens, its closed blocks and all nodes' leaves."""
    query, key = 1.3 * torch.randn(
        2, 1, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)
    )
    options = {"near": 1, "sinks": 0, "refine_top_k": 0}
    # With the identity as values, the output is the weights.
    weights = ha.functional.hierarchical_attention(
        query,
        key,
        torch.eye(TOKENS)[None, None],
        is_causal=True,
        hierarchy=WINDOWS,
        tying="key",
        **options,
    )[0, 0, QUERY]
    tree = windows_tree(TOKENS, WINDOWS)
    kin = list_kin(tree)
    logits = (query @ key.mT)[0, 0, QUERY] * TOKENS**-0.5
    visible = torch.arange(TOKENS) <= QUERY
    tokens, closed = find_cover(
        logits, QUERY, tree, kin, visible, *(options[n] for n in ("near", "sinks", "refine_top_k"))
    )
    return weights, tokens, closed, kin[1]


def draw_tree(theme: Theme) -> Figure:
    """Draw the tree over tokens, the blocks that one query reads, and its weights."""
    figure, axes = make_canvas(4.7)
    weights, tokens, closed, leaves = weigh_tokens()
    parents = windows_tree(TOKENS, WINDOWS).parents.tolist()
    step = (WIDTH - 0.4) / TOKENS
    heights = {1: 1.95, 4: 2.55, 8: 3.15, 16: 3.75, TOKENS: 4.35}
    under_closed = {token for block in closed for token in leaves[block]}

    def place(node: int) -> tuple[float, float]:
        of_node = leaves[node]
        return 0.2 + step * (min(of_node) + len(of_node) / 2), heights[len(of_node)]

    def choose_colour(node: int) -> str:
        if node in closed:
            return theme.orange
        if node in tokens:
            return theme.blue
        is_hidden = under_closed.issuperset(leaves[node]) or leaves[node][0] > QUERY
        return theme.pale if is_hidden else theme.muted

    for node, parent in enumerate(parents[:-1]):
        (x, y), (x2, y2) = place(node), place(parent)
        axes.plot((x, x2), (y, y2), color=choose_colour(node), linewidth=1, zorder=1)
    for node in range(len(parents)):
        size = 13 if node in closed else 8
        axes.plot(*place(node), "o", markersize=size, color=choose_colour(node), zorder=2)
    scale = 0.75 / float(weights.max())
    for token, weight in enumerate(weights.tolist()):
        color = theme.blue if token in tokens else theme.orange
        axes.bar(place(token)[0], scale * weight, step * 0.8, 0.75, color=color)
    for block in closed:
        x, count = place(block)[0], len(leaves[block])
        axes.plot(
            (x - step * (count / 2 - 0.1), x + step * (count / 2 - 0.1)), (0.68, 0.68),
            color=theme.orange, linewidth=2,
        )  # fmt: skip
        write(axes, x, 0.5, f"{count} tokens", theme.orange)
    write(axes, 0.2, 1.6, "weight of each token:", theme.ink, ha="left")
    write(axes, 0.2, 0.15, "closed block: one weight for all its tokens", theme.orange, ha="left")
    write(axes, WIDTH - 0.2, 0.15, "single tokens", theme.blue, ha="right")
    write(axes, place(QUERY)[0], 1.68, "query", theme.blue)
    return figure


def find_ancestor() -> tuple[float, float]:
    """Return horizontal part and height of the lowest point whose umbral cone contains both points."""
    (x_q, h_q), (x_k, h_k) = POINT_Q, POINT_K
    numbers = (abs(x_k - x_q), h_q, h_k, math.asinh(SLOPE))
    height = float(umbral_height(*(torch.tensor(n, dtype=torch.float64) for n in numbers)))
    # The point of the query lies on the left side of the ancestor's cone.
    return x_q + SLOPE * (height - h_q), height


def draw_cones(theme: Theme) -> Figure:
    """Draw two points of the half plane, their umbral cones and their lowest common ancestor."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.grid(False)
    apex = find_ancestor()
    for (x, h), color, fill in (
        (apex, theme.orange, theme.orange_fill),
        (POINT_Q, theme.blue, theme.blue_fill),
        (POINT_K, theme.blue, theme.blue_fill),
    ):
        corners = ((x - SLOPE * h, 0), (x, h), (x + SLOPE * h, 0))
        axes.fill(*zip(*corners), facecolor=fill, edgecolor=color, linewidth=1.5)
        axes.plot(x, h, "o", markersize=8, color=color, clip_on=False)
    left = -2.0
    axes.plot((left, apex[0]), (apex[1], apex[1]), color=theme.orange, linestyle=":")
    write(axes, left + 0.1, apex[1] + 0.16, f"H = {apex[1]:.2f}", theme.orange, ha="left")
    label = "lowest common ancestor\nscore = -gamma · H"
    write(axes, apex[0] + 0.45, apex[1], label, theme.orange, ha="left")
    write(axes, POINT_Q[0] - 0.15, POINT_Q[1] + 0.15, "query", theme.blue, ha="right")
    write(axes, POINT_K[0] + 0.15, POINT_K[1] + 0.15, "key", theme.blue, ha="left")
    for x, h, text in (
        (apex[0] + 0.2, 1.2, "cone of\nthe ancestor"),
        (POINT_Q[0], 0.3, "cone of\nthe query"),
        (POINT_K[0] + 1.15, 0.3, "cone of\nthe key"),
    ):
        write(axes, x, h, text, theme.ink)
    axes.set(xlim=(left, 5.9), ylim=(0, 2.8), aspect="equal", xticks=range(-1, 6), yticks=(0, 1, 2))
    axes.set_xlabel("horizontal part X", fontsize=FONT, color=theme.ink)
    axes.set_ylabel("height h", fontsize=FONT, color=theme.ink)
    axes.tick_params(colors=theme.muted, labelsize=FONT)
    axes.spines[:].set_color(theme.muted)
    return figure


def draw_inject(theme: Theme) -> Figure:
    """Draw the steps of `hyperattn inject`: measure, choose, verify, and what follows."""
    figure, axes = make_canvas(4.0)
    line = {"color": theme.muted}
    for n, (name, text) in enumerate(
        (
            ("1. Measure", "the loss of each rule\nin each head"),
            ("2. Choose", "the cheapest rules\nwithin the budgets"),
            ("3. Verify", "the patched model\non new texts"),
        )
    ):
        left = 0.05 + 2.68 * n
        centre = left + 1.07
        write(axes, centre, 3.8, f"part {n + 1} of each text", theme.muted)
        draw_arrow(axes, (centre, 3.63), (centre, 3.3), **line)
        draw_box(
            axes, left, 2.15, 2.14, 1.15, facecolor=theme.blue_fill, edgecolor=theme.blue,
            linewidth=1.2,
        )  # fmt: skip
        write(axes, centre, 3.05, name, theme.ink, fontweight="bold")
        write(axes, centre, 2.55, text, theme.ink)
        if n < 2:
            draw_arrow(axes, (left + 2.14, 2.725), (left + 2.68, 2.725), **line)
    own = {"facecolor": theme.faint, "edgecolor": theme.muted, "linewidth": 1.2}
    worse = {"facecolor": theme.orange_fill, "edgecolor": theme.orange, "linewidth": 1.2}
    for left, width, text, look in (
        (0.05, 1.4, "nothing\nis written", own),
        (2.73, 2.14, "the next safer\ncandidate", worse),
        (5.41, 2.14, "the checkpoint\nis written", own),
    ):
        draw_box(axes, left, 0.1, width, 0.75, **look)
        write(axes, left + width / 2, 0.475, text, theme.ink)
    draw_arrow(axes, (6.9, 2.15), (6.9, 0.85), **line)
    write(axes, 6.82, 1.1, "passed", theme.ink, ha="right")
    draw_arrow(axes, (5.8, 2.15), (5.8, 1.35), (4.2, 1.35), (4.2, 0.85), color=theme.orange)
    write(axes, 4.95, 1.17, "over a budget", theme.orange, fontsize=FONT)
    draw_arrow(axes, (3.4, 0.85), (3.4, 1.8), (5.55, 1.8), (5.55, 2.15), color=theme.orange)
    write(axes, 4.4, 1.97, "try again", theme.orange)
    draw_arrow(axes, (2.73, 0.475), (1.45, 0.475), **line)
    write(axes, 2.1, 0.65, "none left", theme.ink)
    return figure


EXPLANATIONS: dict[str, Callable[[Theme], Figure]] = {
    "patch": draw_patch,
    "rules": draw_rules,
    "tree": draw_tree,
    "cones": draw_cones,
    "inject": draw_inject,
}


def draw(folder: Path = FOLDER) -> None:
    """Write every figure as NAME.svg and NAME-dark.svg."""
    folder.mkdir(exist_ok=True)
    for name, make in EXPLANATIONS.items():
        for suffix, theme in THEMES.items():
            path = folder / f"{name}{suffix}.svg"
            save(make(theme), path, transparent=True)
            # A hundredth of a point is not visible, and more digits make the file a third larger.
            rounded = re.sub(
                r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path.read_text()
            )
            path.write_text(rounded)
