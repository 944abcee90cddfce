"""The plots of docs/plots tell the truth: their own data, as drawn, against their axes, legends and colours."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from recipes.experiments import (
    adaptation_tables,
    figures,
    head_tables,
    hyperbolicity_tables,
    selection_maps,
    translation_tables,
    trilinear_tables,
    vision_tables,
)
from recipes.experiments.store import load

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def benchmark(name: str):
    """A module beside the benchmarks, which import each other by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def hsa_frontier() -> Figure:
    files = [RESULTS / f"hsa_frontier_{length}.json" for length in (2048, 8192)]
    return benchmark("hsa_frontier").figure_of(
        [json.loads(file.read_text()) for file in files], [8192]
    )


def frontier() -> Figure:
    return benchmark("frontiers.table").figure_of(
        json.loads((RESULTS / "frontier.json").read_text())
    )


def performance() -> Figure:
    from benchmarks.speed import page

    return page.figure_of(json.loads(min(RESULTS.glob("attention-*.json")).read_text())["rows"])


MAKERS = {
    name: lambda name=name, make=make: make(load(name)) for name, make in figures.FIGURES.items()
} | {
    "adaptation": lambda: adaptation_tables.plot(load("adaptation")),
    "trilinear": lambda: trilinear_tables.curves(load("trilinear")),
    "head_pruning": lambda: head_tables.plot(load("head_pruning")),
    "hyperbolicity": lambda: hyperbolicity_tables.plot(load("hyperbolicity")),
    "translation": lambda: translation_tables.plot(load("translation")),
    "selection": selection_maps.plot,
    "vision": lambda: vision_tables.plot(load("vision")),
    "hsa_frontier": hsa_frontier,
    "frontier": frontier,
    "performance": performance,
}
NAMES = "names alone"  # lines across groups of bars
_DRAWN: dict[str, Figure] = {}


@pytest.fixture(params=MAKERS)
def figure(request) -> Figure:
    if request.param not in _DRAWN:
        _DRAWN[request.param] = MAKERS[request.param]()
        _DRAWN[request.param].draw_without_rendering()  # limits are settled
    return _DRAWN[request.param]


def lines(axes) -> list:
    """What is drawn of data: no marks of ours, no lines across the whole plot."""
    own = [line for line in axes.get_lines() if line.get_gid() != "cut"]
    own = [
        line for line in own if line.get_linestyle() != "None" or line.get_label()[0] != "_"
    ]  # ends of error bars
    return [line for line in own if line.get_transform() == axes.transData]


def drawn(axes) -> np.ndarray:
    """All finite points of lines, as shares of the axes, [n, 2]."""
    points = [np.asarray(line.get_xydata(), dtype=float) for line in lines(axes)]
    points += [
        np.array([[0, 0], [1, 1]]) @ np.diag(p.get_bbox().size) + p.get_bbox().min
        for p in axes.patches
    ]
    shares = axes.transAxes.inverted().transform(axes.transData.transform(np.concatenate(points)))
    return shares[np.isfinite(shares).all(1)]


def test_every_plot_of_the_docs_is_looked_at_and_on_a_page():
    assert {path.stem for path in (ROOT / "docs" / "plots").glob("*.svg")} == set(MAKERS)
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("**/*.md"))
    assert all(f"plots/{name}.svg)" in pages for name in MAKERS)


def test_no_point_is_cut_off_without_a_mark(figure):
    for axes in figure.axes:
        marked = {to_hex(line.get_color()) for line in axes.get_lines() if line.get_gid() == "cut"}
        for line in lines(axes):
            shares = axes.transAxes.inverted().transform(
                axes.transData.transform(line.get_xydata())
            )
            shares = shares[np.isfinite(shares).all(1)]
            outside = (shares < -1e-6).any() or (shares > 1 + 1e-6).any()
            assert not outside or to_hex(line.get_color()) in marked, line.get_label()


def test_axes_end_where_data_ends(figure):
    for axes in figure.axes:
        shares = np.clip(
            np.concatenate([drawn(a) for a in axes.get_shared_y_axes().get_siblings(axes)]), 0, 1
        )
        for low, high in zip(shares.min(0), shares.max(0), strict=True):
            assert low < 0.17 and high > 0.8, (axes.get_title(), axes.get_ylabel(), low, high)


def labelled(figure) -> list[tuple[str, str, tuple]]:
    """Label, colour, and mark and dashes of everything in a plot that has a label."""
    named = []
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            artist = handle[0] if isinstance(handle, tuple) else handle
            line = hasattr(artist, "get_marker")
            colour = (
                artist.get_color()
                if line
                else artist.get_edgecolor()
                if label == NAMES
                else artist.get_facecolor()
            )
            colour = (
                colour if isinstance(colour, str) else tuple(np.asarray(colour).reshape(-1)[:4])
            )
            style = (artist.get_marker(), artist.get_linestyle()) if line else ()
            named.append((label, to_hex(colour), style))
    return named


def test_a_name_has_one_look_and_a_look_one_name(figure):
    named = labelled(figure)
    looks = {}
    for label, *look in named:
        assert looks.setdefault(label, look) == look, label
    assert len({tuple(look) for look in looks.values()}) == len(looks)


def test_every_colour_is_in_a_legend(figure):
    entries = set()
    for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)]:
        entries |= {text.get_text() for text in legend.get_texts()} if legend else set()
    named = labelled(figure)
    assert {label for label, *_ in named} == entries
    colours = {colour for _, colour, _ in named}
    for axes in figure.axes:
        assert {to_hex(line.get_color()) for line in lines(axes)} - {
            to_hex("black")
        } <= colours | error_bars(axes)


def error_bars(axes) -> set[str]:
    """The colours of error bars of bars, which are black."""
    return {to_hex("black"), to_hex("0.3")} if axes.patches else set()


def test_a_cut_is_marked_where_it_is():
    axes = Figure().subplots()
    axes.plot([0, 1, 2], [1, 3, 1])
    axes.plot([0, 1, 2], [9, 8, 9])
    axes.set_ylim(0, 2)
    figures.mark_cut(axes)
    marks = [line for line in axes.get_lines() if line.get_gid() == "cut"]
    assert [(m.get_marker(), *m.get_xydata()[0]) for m in marks] == [
        ("^", 0.5, 2),
        ("^", 1.5, 2),
        ("^", 0, 2),
    ]
