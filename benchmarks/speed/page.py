"""docs/results/performance.md: tables and a plot from the committed result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .cases import DIMS, LENGTHS, Case, gpu_case, shape
from .models import MODELS
from .operations import OPERATIONS
from .store import FOLDER

DOCS = FOLDER.parents[1] / "docs"
LENGTHS_HELD = (512, 2048, 8192)
KIND_TITLES = {"forward": "forward", "training": "forward+backward"}


def draw() -> int:
    """Write the page's tables and its plot."""
    page = DOCS / "results" / "performance.md"
    files = sorted(FOLDER.glob("attention-*.json"))
    results = [json.loads(file.read_text()) for file in files]
    text, (begin, end) = page.read_text(), ("<!-- results -->", "<!-- /results -->")
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(
        f"{before}{begin}\n{''.join(section(r) for r in results)}{sparse()}{end}{after}"
    )
    plot(results[0]["rows"], DOCS / "plots" / "performance.svg")
    print(f"wrote {page} from {', '.join(f.name for f in files)}")
    return 0


def sparse() -> str:
    """What benchmarks/sparse.py has measured; "" where it was not run."""
    results = [
        json.loads(file.read_text()) for file in sorted(FOLDER.glob("sparse*.json"), reverse=True)
    ]
    return "## Sparse rules by head\n\n" + "\n".join(map(sparse_table, results)) if results else ""


def sparse_table(result: dict) -> str:
    """One run of benchmarks/sparse.py."""
    where, lines = result["environment"], []
    for r in result["rows"]:
        products = f"{r['rate']:.0f} GF/s" if "rate" in r else ""
        error = f"{r['error']:.0e}" if "error" in r else ""
        ratios = [f"{r[over]:.2f}" for over in ("over_sdpa", "over_dense")]
        held = (
            f", {r['bytes']['sparse'] / r['bytes']['sdpa']:.2f} of the bytes"
            if "bytes" in r
            else ""
        )
        lines.append(
            [r["kind"] + held, f"{r['length']:,}", f"{r['pairs']:.0%}", *ratios, products, error]
        )
    header = [
        "",
        "tokens",
        "pairs",
        "relative to SDPA",
        "to our dense kernel",
        "visible pairs",
        "error",
    ]
    chosen, layers = result["arguments"].get("chosen"), result["arguments"]["layers"]
    of = (
        "with the rules that `frontier.py` gives SmolLM2-135M"
        if chosen
        else f"with models of {layers} layers"
    )
    chip = result.get("processor", where["chip"])
    about = (
        f"{chip}, torch {where['torch']}, {where['date']}, 1 thread, CPU time, lowest of several rounds on a shared "
        "machine.\nHeads: 9 of queries on 3 of keys, d = 64, float32. Rules and kinds as in "
        "`benchmarks/sparse.py`, "
        f"{of}.\nSDPA runs with the original cache, which copies all keys and values at every token. Our dense "
        "kernel runs with the\ncache of its row."
    )
    return f"{about}\n\n{grid(header, lines)}\n"


def section(result: dict) -> str:
    """All tables of one chip."""
    rows, where = result["rows"], result["environment"]
    commits = sorted({r["commit"] for r in rows.values()})
    dates = sorted({r["date"] for r in rows.values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    parts = [
        f"\n## {where['chip']}\n\ntorch {where['torch']}, transformers {where['transformers']}, Python "
        f"{where['python']}; commit{'s' * (len(commits) > 1)} {', '.join(commits)}; {when}. "
        "Time relative\nto SDPA: median (quartiles). An exclamation mark shows a ratio above its target.\n"
    ]
    parts += bars(where["chip"])
    for title, table in TABLES.items():
        found = table(rows)
        parts.append(f"\n### {title}\n\n{found}" if found else "")
    return "".join(parts) + "\n"


def bars(chip: str) -> list[str]:
    """What `bars.py --save` has measured on this chip, as tables; none where it was not run."""
    results = [json.loads(file.read_text()) for file in FOLDER.glob("bars-*.json")]
    rows = next((list(r["rows"].values()) for r in results if r["environment"]["chip"] == chip), [])
    peak, single, model = (
        [r for r in rows if r["key"].startswith(what)] for what in ("peak ", "decode ", "model ")
    )
    shares = grid(
        ["", "GFLOP/s", "peak of a core", "share", "time relative to SDPA"],
        [
            [
                f"{r['dtype']}, {r['shape']}, {KIND_TITLES[r['kind']]}, {OPERATIONS[r['score']].title}",
                f"{r['rate']:.0f}",
                f"{r['most']:.0f}",
                f"{r['share']:.0%}",
                f"{r['ratio']:.2f}",
            ]
            for r in peak
        ],
    )
    names = lambda found: [[r["what"], f"{r['ratio']:.2f}"] for r in found]
    tables = {
        "Share of a core's peak, 2,048 tokens, 4 heads, 1 thread": shares,
        "Decoding, 8,192 keys, the lowest times (`bars.py decode`)": grid(
            ["", "time relative to SDPA"], names(single)
        ),
        "Models of SmolLM2's shape, 2,048 tokens, training 512, the lowest times (`bars.py model`)": grid(
            ["", "time relative to the original"], names(model)
        ),
    }
    commits = ", ".join(sorted({r["commit"] for r in rows}))
    said = f"\nCommit {commits}.\n" if commits else ""
    return [f"\n### {title}\n{said}\n{table}" for title, table in tables.items() if table]


def cell(row: dict | None, memory: bool = False) -> str:
    """A ratio, or why there is none."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return row["status"].split(":")[0]
    ratio = f"{row['median']:.2f}{'!' if over(row) else ''} ({row['q1']:.2f}-{row['q3']:.2f})"
    return f"{ratio} {row['way_mib']:.0f} MiB" if memory else ratio


def over(row: dict) -> bool:
    """Whether a row is above its limit, to two digits."""
    return bool(row.get("limit")) and round(row["median"], 2) > row["limit"]


def grid(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table of the lines that hold anything beside their name; "" if none does."""
    lines = [line for line in lines if any(line[1:])]
    if not lines:
        return ""
    rule = ["---"] * len(header)
    return "".join("| " + " | ".join(x) + " |\n" for x in (header, rule, *lines))


def best(rows: dict, name: str, case: Case) -> dict | None:
    """The row of the operation by the engine that should win."""
    for way in ("triton", "cpu", "sdpa", "blockwise"):
        found = rows.get(f"{name} | {way} | {case.key}")
        if found is not None:
            return found
    return None


def held(threads: int):
    """The table of ratios that have a target, for a number of threads."""

    def table(rows):
        header, lines = ["", "engine"], []
        for kind in KIND_TITLES:
            header += [f"{KIND_TITLES[kind]} {n}" for n in LENGTHS_HELD] + ["target"]
        for name, operation in OPERATIONS.items():
            line, engine = [operation.title], ""
            for kind in KIND_TITLES:
                found = [best(rows, name, shape(kind, n, threads=threads)) for n in LENGTHS_HELD]
                limit = operation.limits.get("cpu float32", ())[kind == "training" :][:1]
                engine = engine or next((r["way"] for r in found if r), "")
                line += [cell(r) for r in found] + [
                    f"{limit[0]:.2f}" if limit and any(found) else ""
                ]
            lines.append([line[0], engine, *line[1:]])
        return grid(header, lines)

    return table


def gpu(dim: int):
    """A line for each operation and direction, a column for each length and kind."""

    def table(rows):
        header, lines = ["", ""], []
        for kind in KIND_TITLES:
            header += [f"{KIND_TITLES[kind]} {n}" for n in LENGTHS_HELD] + ["target"]
        for name, operation in OPERATIONS.items():
            for causal in (False, True):
                line, any_found = [operation.title, "causal" if causal else "full"], False
                for kind in KIND_TITLES:
                    found = [best(rows, name, gpu_case(kind, n, dim, causal)) for n in LENGTHS_HELD]
                    limit = operation.limits.get("cuda bfloat16", ())[kind == "training" :][:1]
                    line += [cell(r) for r in found] + [f"{limit[0]:.2f}" if limit else ""]
                    any_found |= any(found)
                lines += [line] if any_found else []
        return grid(header, lines)

    return table


def gpu_ways(rows):
    """The table of all ways on a GPU at 2,048 tokens."""
    lines = []
    for name, operation in OPERATIONS.items():
        for way in ("triton", "sdpa", "blockwise", *operation.peers):
            found = [
                rows.get(f"{name} | {way} | {gpu_case(kind, 2048, 64, True).key}")
                for kind in KIND_TITLES
            ]
            lines.append([f"{operation.title}, {way}", *[cell(r, memory=True) for r in found]])
    return grid(["", *KIND_TITLES.values()], lines)


def ways(rows):
    """The table of all ways on a CPU at 2,048 tokens, with the largest error."""
    lines = []
    for name, operation in OPERATIONS.items():
        for way in ("cpu", "sdpa", "blockwise", *operation.peers):
            found = [rows.get(f"{name} | {way} | {shape(kind, 2048).key}") for kind in KIND_TITLES]
            error = max((r["error"] for r in found if r and "error" in r), default=None)
            lines.append(
                [
                    f"{operation.title}, {way}",
                    *[cell(r, memory=True) for r in found],
                    f"{error:.0e}" if error is not None else "",
                ]
            )
    return grid(["", *KIND_TITLES.values(), "error"], lines)


def over_cases(title: str, cases: dict[str, dict], names=tuple(OPERATIONS), memory=False):
    """A table of operations by the winning engine over some cases, forward and training."""

    def table(rows):
        header = [
            title,
            *[f"{KIND_TITLES[k]} {OPERATIONS[n].title}" for n in names for k in KIND_TITLES],
        ]
        lines = [
            [
                label,
                *[
                    cell(best(rows, n, shape(kind, **given)), memory)
                    for n in names
                    for kind in KIND_TITLES
                ],
            ]
            for label, given in cases.items()
        ]
        return grid(header, lines)

    return table


def by_operation(given: dict[str, dict], kinds=tuple(KIND_TITLES), memory=False):
    """A table with a line for each operation and a column for each case and kind."""

    def table(rows):
        columns = [(label, case, kind) for label, case in given.items() for kind in kinds]
        lines = [
            [
                op.title,
                *[cell(best(rows, name, Case(kind, **case)), memory) for _, case, kind in columns],
            ]
            for name, op in OPERATIONS.items()
        ]
        return grid(
            ["", *[f"{KIND_TITLES.get(kind, kind)}{label}" for label, _, kind in columns]], lines
        )

    return table


def models(rows):
    """The table of whole models on one and two threads."""
    lines = []
    for name, model in MODELS.items():
        for kind, (length, batch) in model.kinds.items():
            for way in model.names:
                found = [rows.get(f"{name} | {way} | {model.case(kind, t).key}") for t in (1, 2)]
                limit = model.limits.get(kind) if way == "cone" else None
                lines.append(
                    [
                        f"{name}, {kind} {batch} x {length}, {way}",
                        *[cell(r) for r in found],
                        f"{limit:.2f}" if limit else "",
                    ]
                )
    lines = [line for line in lines if line[1] or line[2]]
    return grid(["", "1 thread", "2 threads", "target"], lines)


def unmeasured(rows):
    """The table of what could not be measured, and why."""
    lines = [
        [key.replace("|", ","), row["status"]] for key, row in rows.items() if row["status"] != "ok"
    ]
    return grid(["", "why"], lines)


SIZES = {512: 4, 2048: 1}
SHAPES = {n: {"length": n, "batch": b} for n, b in SIZES.items()}
TABLES = {
    "float32, d = 64, 1 thread": held(1),
    "float32, d = 64, 2 threads": held(2),
    "Decoding: one query against 8,192 keys, 8 heads; the target of umbral is 1.00": by_operation(
        {f", {t} thread{'s' * (t > 1)}": {"length": 8192, "threads": t} for t in (1, 2)},
        ("decode",),
    ),
    "GPU, bfloat16, d = 64; SDPA's FlashAttention is 1": gpu(64),
    "GPU, bfloat16, d = 128; SDPA's FlashAttention is 1": gpu(128),
    "GPU, all ways at length 2,048, causal, 32 heads, d = 64": gpu_ways,
    "GPU, decoding: one query against 8,192 keys, 8 heads, bfloat16": by_operation(
        {"": {"length": 8192, "dtype": "bfloat16", "device": "cuda"}}, ("decode",)
    ),
    "Whole models by name": models,
    "Extra memory at length 8,192, 8 heads": by_operation(
        {"": {"length": 8192}}, ("training",), True
    ),
    "All ways at length 2,048, 8 heads, 1 thread": ways,
    "bfloat16, 1 thread": by_operation(
        {f" {n}": s | {"dtype": "bfloat16"} for n, s in SHAPES.items()}
    ),
    "Causal, float32, 1 thread": by_operation(
        {f" {n}": s | {"causal": True} for n, s in SHAPES.items()}
    ),
    "By length": over_cases(
        "length", {str(n): {"length": n} for n in LENGTHS}, ("umbral", "dot"), True
    ),
    "By head dimension, length 2,048, 4 heads": over_cases(
        "d", {str(d): {"length": 2048, "dim": d, "heads": 4} for d in DIMS}, ("umbral", "geodesic")
    ),
    "Not measured": unmeasured,
}


def plot(rows: dict, path: Path) -> None:
    """Write the plot."""
    sys.path.insert(0, str(DOCS.parent / "recipes"))
    from experiments.theme import follow_theme

    path.parent.mkdir(exist_ok=True)
    figure_of(rows).savefig(path, metadata={"Date": None})
    follow_theme(path)


def figure_of(rows: dict):
    """Ratio over length, a colour for each operation that was measured at several lengths; the tables have the rest."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "performance"
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axis, kind in zip(panels, KIND_TITLES):
        for colour, (name, operation) in zip(
            matplotlib.colormaps["tab10"].colors, OPERATIONS.items(), strict=False
        ):
            line(
                axis,
                operation.title,
                [(n, best(rows, name, shape(kind, n))) for n in LENGTHS],
                "o-",
                colour,
            )
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="length",
            ylabel="time, SDPA = 1",
            title=KIND_TITLES[kind],
        )
        measured = [n for n in LENGTHS if any(n in drawn.get_xdata() for drawn in axis.get_lines())]
        axis.set_xticks(measured, [str(n) for n in measured], rotation=45)
        axis.minorticks_off()
        low, high = axis.get_ylim()
        ticks = [
            tick for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2) if low < tick < high
        ]
        axis.set(yticks=ticks, yticklabels=map(str, ticks))
    drawn = {
        name: handle for axis in panels for handle, name in zip(*axis.get_legend_handles_labels())
    }
    figure.legend(drawn.values(), drawn, fontsize=9, ncols=4, loc="outside lower center")
    return figure


def line(axis, label: str, found: list, style: str, colour) -> None:
    """Draw the measured ones of (length, row) pairs as one line of a plot, if there are several."""
    points = [(n, r["median"]) for n, r in found if r and r["status"] == "ok"]
    if len(points) > 1:
        axis.plot(*zip(*points), style, label=label, color=colour, markersize=5)
