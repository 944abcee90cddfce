"""The tables and the plot of docs/results/frontier.md."""

from __future__ import annotations

import statistics
import sys

from hf_hyperattn.inject import retrieval

from .cells import BUDGETS, ROOT, STOCK, Cell, rise_of, rows_of, time_of

#: What stands above the table of mixtures.
MIXED = "Answers in eight mixtures: 80 needles, 72 words of few-shot, 40 variables, 32 values of 8 needles."
#: What stands below the plot.
PLOTTED = "The plot shows eight rows. The tables below have all rows."
#: The columns, lengths and budgets, and the rows of the table that stands first.
IN_SHORT = ((8192, 0.2), (8192, 0.1), (2048, 0.4), (2048, 0.2))
ROWS_IN_SHORT = (
    ("exact top-k", "by head"),
    ("rules with a kernel", "together"),
    ("rules with a kernel", "by head"),
    ("rules with a kernel and SparQ", "by head"),
    ("all rules", "by head"),
    ("Quest, shared by 16", "together"),
    ("Quest, shared by 16", "by head"),
    ("HSA", "by head"),
    ("trees", "by head"),
    ("mean pages", "by head"),
    ("sinks and window", "by head"),
    ("Quest", "uniform"),
    ("HSA", "uniform"),
)
#: The rows of the plot, at most eight so that each has a colour of its own. All others are in the tables.
DRAWN = (
    ("exact top-k", "by head"),
    ("rules with a kernel", "together"),
    ("rules with a kernel", "by head"),
    ("Quest, shared by 16", "by head"),
    ("HSA", "by head"),
    ("trees", "by head"),
    ("mean pages", "by head"),
    ("sinks and window", "by head"),
)


def short_table(result: dict) -> str:
    """A Markdown table of perplexity alone, of the rows that answer most questions."""
    measured = {cell.key: rise for length in BUDGETS for cell, _, rise in rows_of(result, length)}
    said = [f"{length:,} tokens, {budget:.0%}" for length, budget in IN_SHORT]
    lines = [
        "| perplexity rises by | | " + " | ".join(said) + " |",
        "|" + " --- |" * (2 + len(said)),
    ]
    for method, kind in ROWS_IN_SHORT:
        rises = [
            measured.get(Cell(length, method, kind, budget).key) for length, budget in IN_SHORT
        ]
        of = lambda rise: (
            f"{statistics.mean(rise.values()):.2%} ± {statistics.stdev(rise.values()):.2%}"
        )
        lines.append(
            f"| {method} | {kind} | "
            + " | ".join(of(rise) if rise else "" for rise in rises)
            + " |"
        )
    return "\n".join(lines)


def table(result: dict, length: int) -> str:
    """A Markdown table of a length."""
    rows, stock = rows_of(result, length), result["cells"][Cell(length, STOCK).key]
    names = list(stock["texts"])
    head = [
        "budget",
        "method",
        "",
        "pairs",
        "mean ± deviation",
        *names,
        "copying",
        "mixture",
        "worst task",
        "time",
        "memory",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell, entry, rise in rows:
        values = [rise[name] for name in names]
        took = time_of(entry, stock)
        tasks = [
            f"{found[0]:+.1%}" if (found := rise_of(entry, stock, t)) else ""
            for t in ("copying", "mixture")
        ]
        tasks.append(worst_task(entry, stock))
        lines.append(
            "| "
            + " | ".join(
                [
                    f"{cell.budget:.0%}",
                    cell.method,
                    cell.kind,
                    f"{entry['pairs']:.1%}",
                    f"{statistics.mean(values):+.2%} ± {statistics.stdev(values):.2%}",
                    *(f"{v:+.2%}" for v in values),
                    *tasks,
                    "" if took is None else f"{took:.2f}",
                    f"{entry['bytes'] / stock['bytes']:.2f}",
                ]
            )
            + " |"
        )
    return "\n".join(lines)


def mixed_table(result: dict, length: int) -> str:
    """A Markdown table of the mixtures of `--mixed`, of the rows that have them; empty where none has."""
    stock = result["cells"][Cell(length, STOCK).key]
    tasks = list(stock.get("mixed", {}))
    if not tasks:
        return ""
    right = lambda entry, task: f"right {statistics.mean(entry['mixed'][task]['exact']):.0%}"
    lines = ["| budget | method | | " + " | ".join(tasks) + " |", "|" + " --- |" * (3 + len(tasks))]
    lines.append("| | stock | | " + " | ".join(right(stock, task) for task in tasks) + " |")
    for cell, entry, _ in rows_of(result, length):
        found = [rise_of(entry, stock, task, "mixed") for task in tasks]
        if all(found):
            said = (f"{x:+.1%} ± {e:.1%}, {right(entry, t)}" for (x, e), t in zip(found, tasks))
            lines.append(
                f"| {cell.budget:.0%} | {cell.method} | {cell.kind} | " + " | ".join(said) + " |"
            )
    return "\n".join(lines)


def worst_task(entry: dict, stock: dict) -> str:
    """The task of RULER's kind that loses most, how much, and the standard error; nothing where none was run."""
    found = {task: rise for task in retrieval.TASKS if (rise := rise_of(entry, stock, task))}
    worst = max(found, key=found.__getitem__, default=None)
    return "" if worst is None else f"{worst} {found[worst][0]:+.1%} ± {found[worst][1]:.1%}"


def figure_of(result: dict):
    """The plot: a panel for every length that has rows, and a colour for every row of `DRAWN`."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "frontier"
    lengths = [n for n in BUDGETS if rows_of(result, n)]
    figure = Figure(figsize=(4.5 * len(lengths), 4.6), layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    drawn = {}
    for length, axes in zip(lengths, panels, strict=True):
        for (method, kind), colour in zip(DRAWN, matplotlib.color_sequences["Dark2"], strict=True):
            points = sorted(
                (run["pairs"], 100 * statistics.mean(rise.values()))
                for cell, run, rise in rows_of(result, length)
                if (cell.method, cell.kind) == (method, kind)
            )
            if points:
                style = "*--" if kind == "together" else "o-"
                label = f"{method}, {kind}"
                (drawn[label],) = axes.plot(
                    *zip(*points, strict=True), style, color=colour, label=label
                )
        axes.set_yscale("symlog", linthresh=2)
        low, high = axes.get_ylim()
        ticks = [tick for tick in (-1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if low < tick < high]
        axes.set(yticks=ticks, yticklabels=map(str, ticks), ylim=(low, high))
        axes.set(xlabel="share of pairs", ylabel="perplexity, % more", title=f"{length:,} tokens")
    # Below, where it hides no curve.
    figure.legend(drawn.values(), drawn, fontsize=9, ncols=3, loc="outside lower center")
    return figure


def draw(result: dict) -> None:
    """The tables into docs/results/frontier.md, and docs/plots/frontier.svg."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from experiments.theme import follow_theme

    page = ROOT / "docs" / "results" / "frontier.md"
    text, lengths = page.read_text(), [n for n in BUDGETS if rows_of(result, n)]
    parts = {
        "short": f"{short_table(result)}\n\n![Share of pairs against perplexity](../plots/frontier.svg)\n\n{PLOTTED}"
    }
    for length in lengths:
        mixed = mixed_table(result, length)
        parts[str(length)] = table(result, length) + (f"\n\n{MIXED}\n\n{mixed}" if mixed else "")
    for name, part in parts.items():
        begin, end = f"<!-- frontier-{name} -->", f"<!-- /frontier-{name} -->"
        text = f"{text.split(begin)[0]}{begin}\n{part}\n{end}{text.split(end)[1]}"
    plot = ROOT / "docs" / "plots" / "frontier.svg"
    figure_of(result).savefig(plot, metadata={"Date": None})
    follow_theme(plot)
    page.write_text(text)
