"""The plots of docs/plots tell the truth: their own data, as drawn, against their axes, legends and colours."""

import importlib
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from recipes.experiments import (
    adaptation_tables,
    explanations,
    figures,
    head_tables,
    hyperbolicity_tables,
    selection_maps,
    theme,
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


def test_a_plot_has_at_most_eight_series(figure):
    for axes in figure.axes:
        assert len(set(axes.get_legend_handles_labels()[1])) <= 8, axes.get_title()


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


def test_figures_that_explain_are_those_of_the_command_and_on_a_page(tmp_path):
    explanations.draw(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert set(drawn) == {path.name for path in explanations.FOLDER.iterdir()}
    for name, text in drawn.items():
        committed = (explanations.FOLDER / name).read_text()
        # Other versions of matplotlib place points with other digits.
        assert read_texts(committed) == read_texts(text), (
            f"run: python recipes/experiments draw ({name})"
        )
        assert len(committed) < 60_000 and f'"figures/{name}"' in pages


def read_texts(svg: str) -> list[str]:
    """Return the texts of a figure."""
    return [
        "".join(part.itertext())
        for part in ElementTree.fromstring(svg).iter()
        if part.tag.endswith("}text")
    ]


@pytest.mark.parametrize("suffix", explanations.THEMES)
@pytest.mark.parametrize("name", explanations.EXPLANATIONS)
def test_figures_that_explain_have_large_text_apart_and_no_background(name, suffix):
    text = (explanations.FOLDER / f"{name}{suffix}.svg").read_text()
    background = next(
        part for part in ElementTree.fromstring(text).iter() if part.get("id") == "patch_1"
    )
    assert "fill: none" in ElementTree.tostring(background, encoding="unicode")
    figure = explanations.EXPLANATIONS[name](explanations.THEMES[suffix])
    figure.draw_without_rendering()
    texts = [part for part in figure.findobj(Text) if part.get_text() and part.get_visible()]
    assert min(part.get_fontsize() for part in texts) >= explanations.FONT
    boxes = [part.get_window_extent() for part in texts]
    for n, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:n]), texts[n].get_text()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, texts[n].get_text()


def compute_contrast(color: str, page: str) -> float:
    """Return the contrast of two colours, as the Web Content Accessibility Guidelines define it."""
    light, dark = sorted((luminance(color), luminance(page)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    """Return the relative luminance of an sRGB colour."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", explanations.THEMES.values(), ids=("light", "dark"))
def test_text_of_figures_has_contrast_in_both_themes(theme):
    for color in (theme.ink, theme.muted, theme.blue, theme.orange):
        assert compute_contrast(color, theme.page) >= 4.5, color
    for fill in (theme.faint, theme.blue_fill, theme.orange_fill):
        assert compute_contrast(theme.ink, fill) >= 4.5, fill


def test_the_ancestor_is_the_lowest_point_whose_cone_contains_both():
    (x, height), slope = explanations.find_ancestor(), explanations.SLOPE

    def contains(x: float, height: float) -> bool:
        points = (explanations.POINT_Q, explanations.POINT_K)
        return all(abs(x - p) <= slope * (height - h) + 1e-9 for p, h in points)

    assert contains(x, height)
    assert not any(contains(at, height - 1e-3) for at in np.linspace(-5, 5, 2001))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "plots").glob("*.svg")), ids=lambda p: p.stem
)
def test_plots_have_no_background_and_follow_the_theme(path):
    text = path.read_text(encoding="utf-8")
    assert theme.RULE in text and not theme.BACKGROUND.search(text)
