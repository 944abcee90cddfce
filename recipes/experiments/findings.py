"""What committed results say of a claim, and the verdict that follows from the numbers by one rule for all."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from . import (
    adaptation,
    adaptation_tables,
    ball,
    ball_tables,
    coattention_tables,
    depth,
    graph_trees,
    graph_trees_tables,
    graphs_tables,
    head_tables,
    hsa_joined_deep_tables,
    hyperbolicity_tables,
    hypernyms_tables,
    injected_lora,
    injected_lora_tables,
    kernels_tables,
    length,
    recovered_tables,
    starts,
    starts_tables,
    store,
    tables,
    token_weights_tables,
    translation,
    translation_tables,
    trilinear_tables,
    vision,
    vision_tables,
)
from .adaptation import ALONE
from .draw import ROOT

HOLDS, PARTLY, NOT, UNDECIDED, NOT_RUN = (
    "holds",
    "holds in part",
    "does not hold",
    "undecided",
    "not run",
)
#: What a claim's function gives: a text, and the verdict.
Found = tuple[str, str]


def load(name: str) -> dict:
    """The committed results of an experiment.

    Raises:
        ValueError: there are none, or they are of other settings than it has now.
    """
    results = store.load(name)
    settings = importlib.import_module(f"{__package__}.{name}").EXPERIMENT.settings
    store.check_same("settings", store.FOLDER / f"{name}.json", results, {"settings": settings})
    return results


def judge(low: float, high: float, claimed: float = 0.0) -> str:
    """The verdict by the 95 % interval of a gain.

    Args:
        low, high: its ends, larger being better.
        claimed: the gain that the source claims; 0 where it gives no number.
    """
    if low > 0:
        return HOLDS if high >= claimed else PARTLY
    return NOT if high < claimed or high <= 0 else UNDECIDED


def interval(mine: list[float], others: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences, by Student's t."""
    from scipy.stats import ttest_rel

    low, high = ttest_rel(mine, others).confidence_interval()
    return float(low), float(high)


def gain(
    mine: list[float],
    others: dict[str, list[float]],
    unit: str,
    claimed: float = 0.0,
    digits: int = 1,
) -> Found:
    """Paired gains over controls. The verdict is that over the first; if that holds but the one over another control
    does not, the claim holds in part: the gain is there, and the control explains it.
    """
    said, verdicts = [], []
    for name, theirs in others.items():
        power = tables.detectable(mine, theirs)
        said.append(
            f"{tables.paired(mine, theirs, digits)} against {name} (found from {power:.{digits}f} on)"
        )
        verdicts.append(judge(*interval(mine, theirs), claimed))
    verdict = verdicts[0]
    if verdict == HOLDS and any(other != HOLDS for other in verdicts[1:]):
        verdict = PARTLY
    return f"{unit}, {len(mine)} pairs: {'; '.join(said)}", verdict


def depth_gain(
    kind: str, level: int, size: str = "full", claimed: float = 0.0, controls=depth.CONTROLS
) -> Found:
    """The accuracy of a score in the depth task, against each control."""
    results = load("depth")
    values = partial(tables.depth_accuracies, results, level=level, size=size)
    return gain(values(kind), {c: values(c) for c in controls}, f"points at depth {level}", claimed)


def depth_everywhere(kind: str) -> Found:
    """The same of the mean over both depths and sizes."""
    results = load("depth")
    others = {control: tables.depth_means(results, control) for control in depth.CONTROLS}
    return gain(tables.depth_means(results, kind), others, "points, mean over depths and sizes")


def deeper(kind: str) -> Found:
    """How much more a score gains over each control at depth 10 than at depth 5."""
    results = load("depth")

    def rise(name: str) -> list[float]:
        high, low = (tables.depth_accuracies(results, name, level, "full") for level in (10, 5))
        return [a - b for a, b in zip(high, low)]

    others = {control: rise(control) for control in depth.CONTROLS}
    return gain(rise(kind), others, "points more at depth 10 than at depth 5")


def depth_level(kind: str, level: int, claimed: float) -> Found:
    """Whether an accuracy in percent is reached."""
    found = tables.depth_accuracies(load("depth"), kind, level, "full")
    text = (
        f"{tables.mean_and_deviation(found, 1)} % at depth {level}, where {claimed:.0f} are claimed"
    )
    return text, HOLDS if statistics.mean(found) >= claimed else NOT


def depth_tenth(kind: str, level: int) -> Found:
    """What a tenth of the parameters costs, of a score; the claim is that it costs nothing."""
    results = load("depth")
    small, full = (
        tables.depth_accuracies(results, kind, level, size) for size in ("tenth", "full")
    )
    text = f"a tenth of the parameters at depth {level}: {tables.paired(small, full)} points"
    return text, NOT if interval(small, full)[1] < 0 else UNDECIDED


def both(*makes: Callable[[], Found]) -> Found:
    """Several findings: all texts, and the worst of the verdicts."""
    found = [make() for make in makes]
    order = (NOT, UNDECIDED, PARTLY, HOLDS)
    return "; ".join(text for text, _ in found), min(
        (verdict for _, verdict in found), key=order.index
    )


def length_gain(name: str, controls: tuple[str, ...], at: int) -> Found:
    """How much lower the perplexity of a byte is than that of each control."""
    runs, seeds = load("length")["runs"], load("length")["settings"]["seeds"]
    values = lambda n: [-runs[length.key_of(n, seed)]["perplexity"][str(at)] for seed in seeds]
    return gain(
        values(name),
        {c: values(c) for c in controls},
        f"perplexity gained at {at:,} bytes",
        digits=3,
    )


def length_same(name: str, control: str) -> Found:
    """Whether two kinds of positions are the same to 0.05 of perplexity at every length."""
    results, found = load("length"), []
    runs, settings = results["runs"], results["settings"]
    for at in settings["lengths"]:
        pairs = [
            (runs[length.key_of(n, s)]["perplexity"][str(at)] for n in (name, control))
            for s in settings["seeds"]
        ]
        found += [abs(a - b) for a, b in pairs]
    text = f"perplexities differ by {max(found):.3f} at most, over all lengths and seeds"
    return text, HOLDS if max(found) < 0.05 else NOT


def translation_gain(
    kind: str, width: int, others: dict[str, tuple[str, int]], claimed: float = 0.0
) -> Found:
    """BLEU of a score and a width, against others by name."""
    results = load("translation")
    values = lambda row: [run["bleu"] for run in translation_tables.seeds(results, *row)]
    rows = {name: values(row) for name, row in others.items()}
    mine = values((kind, width))
    rows = {name: found for name, found in rows.items() if len(found) == len(mine)}
    if len(mine) < 2 or not rows:
        raise KeyError(kind)
    return gain(mine, rows, "BLEU", claimed, 2)


def translation_again(kind: str, others: tuple[str, ...]) -> Found:
    """BLEU of a score that was picked by its first seeds, with other seeds, against scores that had the same."""
    results = load("translation")
    rows, seeds = (results["settings"]["again"][name] for name in ("rows", "seeds"))
    keys = lambda kind, width: [translation.key_of(kind, width, seed) for seed in seeds]
    values = {
        k: [run["bleu"] for run in tables.all_done(results, keys(k, width))] for k, width in rows
    }
    if not all(values[name] for name in (kind, *others)):
        raise KeyError(kind)
    return gain(values[kind], {name: values[name] for name in others}, "BLEU", digits=2)


def translation_narrow(kind: str, narrow: int, full: int) -> Found:
    """Whether a narrow row is less than one BLEU behind dot product at the full width."""
    results = load("translation")
    mine, others = (
        [run["bleu"] for run in translation_tables.seeds(results, *row)]
        for row in ((kind, narrow), ("dot product", full))
    )
    if len(mine) < 2 or len(mine) != len(others):
        raise KeyError(kind)
    low, high = interval(mine, others)
    verdict = HOLDS if low > -1 else NOT if high < -1 else UNDECIDED
    return (
        f"BLEU, width {narrow} less dot product at {full}: {tables.paired(mine, others, 2)}; parity: within 1",
        verdict,
    )


def adapted(name: str, *controls: str) -> Found:
    """What a mechanism gains beside LoRA, a hundred times the loss, over LoRA alone and with controls in its place.

    There is no verdict on a gain that its controls were not run for.
    """
    results = load("adaptation")
    whole = adaptation_tables.whole(results)
    if name not in whole:
        raise KeyError(name)
    losses = {
        row: [-x for x in adaptation_tables.losses(results, row)]
        for row in (name, ALONE, *controls)
        if row in whole
    }
    text, verdict = gain(losses.pop(name), losses, "100 x loss gained", 0.0, 3)
    if verdict == HOLDS and not set(controls) <= set(whole):
        raise KeyError(name)
    settings = results["settings"]
    rates, rate = (
        settings["search"]["added_rates"],
        adaptation.best_rate(settings, results["runs"], name),
    )
    edges = {min(rates): "lowest", max(rates): "highest"}
    return text + (
        f"; its rate is the {edges[rate]} that was searched" if rate in edges else ""
    ), verdict


def recovered(kind: str, k: str) -> Found:
    """How much less a model loses by a score in k of its layers, after their training, than by what has no cones."""
    results = load("recovered")
    mine, *others = (
        [-x for x in recovered_tables.added(results, row, k)]
        for row in (kind, *recovered_tables.CONTROLS)
    )
    before = recovered_tables.added_before(results, kind, k)
    back = tables.mean_and_deviation([100 * (1 + x / before) for x in mine], 0)
    text, verdict = gain(
        mine, dict(zip(recovered_tables.CONTROLS, others)), f"k = {k}, 100 x loss gained"
    )
    return f"{kind}, k = {k}: {back} % of the lost log perplexity comes back; {text}", verdict


def injected_first(what: str) -> Found:
    """What is gained where a model is injected before it is fine-tuned, and not after."""
    results = load("injected_lora")
    mine, others, own = (
        [-x for x in injected_lora_tables.values(results, row, what, is_own)]
        for row, is_own in (
            (injected_lora.FIRST, 0),
            (injected_lora.AFTER, 0),
            (injected_lora.AFTER, 1),
        )
    )
    if not mine or not others:
        raise KeyError(what)
    alone = [-100 * results["runs"]["injected"][what]] * len(mine)
    text, verdict = gain(
        mine,
        {injected_lora.AFTER: others, "no training": alone},
        f"{injected_lora_tables.READ[what]}, nats x 100",
    )
    return (
        f"{text}; {tables.paired(mine, own)} against the fine-tuned model with its own attention",
        verdict,
    )


def of_models(experiment: str, mine: str, others: dict[str, str], claimed: float = 0.0) -> Found:
    """Accuracy in points of models that are trained with seeds, against others by name."""
    results = load(experiment)
    seeds = results["settings"]["seeds"]
    values = lambda name: [
        100 * results["runs"][f"{name}, seed {seed}"]["accuracy"] for seed in seeds
    ]
    return gain(
        values(mine), {label: values(name) for label, name in others.items()}, "points", claimed
    )


def fewer_pairs(
    length: int,
    method: str,
    budgets: Sequence[float] = (0.2, 0.1),
    most: tuple[float, float] = (0.5, 2.0),
    kind: str = "by head",
) -> Found:
    """What SmolLM2 loses by sparse rules chosen by head, at shares of the pairs, as frontier.py measured.

    It holds where at the first share the texts lose at most the first of `most`, in percent of perplexity, and every
    task the second; in part where the texts do.
    """
    measured = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text())["cells"]
    stock, said, bars = measured[f"{length}/stock//1"], [], []
    for budget in budgets:
        cell = measured[f"{length}/{method}/{kind}/{budget}"]
        texts = [
            100
            * statistics.mean(
                math.expm1(a - b) for a, b in zip(losses, stock["texts"][name], strict=True)
            )
            for name, losses in cell["texts"].items()
        ]
        mean = lambda entry, task: statistics.mean(entry["retrieval"][task]["nats"])
        tasks = {
            t: 100 * math.expm1(mean(cell, t) - mean(stock, t))
            for t in cell["retrieval"]
            if t != "mixture"
        }
        worst = max(tasks, key=tasks.__getitem__)
        said.append(
            f"{budget:.0%} of the pairs: {tables.mean_and_deviation(texts, 2)} % more perplexity, copying "
            f"{tasks['copying']:+.1f} %, the worst of {len(tasks)} tasks {tasks[worst]:+.1f} % ({worst})"
        )
        bars.append((statistics.mean(texts), tasks[worst]))
    said[0] += f" (asked for: at most {most[0]:g} and {most[1]:g} %)"
    texts, task = bars[0]
    verdict = NOT if texts > most[0] else HOLDS if task <= most[1] else PARTLY
    return f"{len(stock['texts'])} texts; {'; '.join(said)}", verdict


def joined_deep(layers: int) -> Found:
    """Hierarchical against flat attention over joined text and image, at a depth and each at its own rate."""
    tree, flat = (
        hsa_joined_deep_tables.accuracies(load("hsa_joined_deep"), m, layers)
        for m in ("joined, tree", "joined, flat")
    )
    if not tree or not flat:
        raise KeyError(str(layers))
    return gain(tree, {f"flat, {layers} layers": flat}, "points")


def hat_pairs(other: str) -> Found:
    """Reviews that trained HAT alone judges rightly, against those that another model alone does; where it wins, beside
    its segments without cross-segment attention, before they were trained on long reviews.
    """
    from scipy.stats import binomtest

    results, won, lost = load("hat_imdb"), 0, 0
    runs = {
        name: [results["runs"][f"{name}, seed {seed}"] for seed in results["settings"]["seeds"]]
        for name in ("HAT", other, "segments alone")
    }
    for mine, theirs in zip(runs["HAT"], runs[other]):
        won += sum(a > b for a, b in zip(mine["right"], theirs["right"]))
        lost += sum(a < b for a, b in zip(mine["right"], theirs["right"]))
    p = binomtest(won, won + lost).pvalue
    after = [100 * run["accuracy"] for run in runs["HAT"]]
    before = [100 * run["accuracy_before"] for run in runs["segments alone"]]
    text = (
        f"HAT alone is right {won} times, the other {lost} times, p {'< 0.001' if p < 0.0005 else f'= {p:.3f}'}; "
        f"HAT {tables.mean_and_deviation(after, 1)} %, segments alone before that training "
        f"{tables.mean_and_deviation(before, 1)} %"
    )
    if p >= 0.05:
        return text, UNDECIDED
    if won < lost:
        return text, NOT
    return text, HOLDS if interval(after, before)[0] > 0 else PARTLY


def fusion_gain() -> Found:
    """Input-dependent against static weights of heads, in percents of perplexity."""
    results = load("head_pruning")
    gains = [
        [
            -100 * head_tables.losses(run["perplexity"])
            for run in head_tables.seeds(results, way, "trained")
        ]
        for way in ("input-dependent", "static")
    ]
    if len(gains[0]) < 2 or len(gains[0]) != len(gains[1]):
        raise KeyError("head_pruning")
    return gain(gains[0], {"static weights": gains[1]}, "percents of perplexity gained", 0.0, 2)


def pruning_cost(share: float) -> Found:
    """What it costs to drop a share of the heads, by whatever ranking costs least."""
    results = load("head_pruning")
    costs = {
        (way, ranking): head_tables.growth(results, way, ranking, share)
        for way, ranking in head_tables.rankings(results)
    }
    (way, ranking), least = min(costs.items(), key=lambda item: statistics.mean(item[1]))
    cost = 100 * (statistics.geometric_mean(least) - 1)
    text = (
        f"{100 * share:.0f} % of heads dropped by {ranking} ({way}) cost {cost:.0f} % of perplexity, "
        "the least of all"
    )
    return text, NOT if min(least) > 1.01 else HOLDS


def pruning_gain(rival: str, way: str = "input-dependent", share: float = 0.3) -> Found:
    """How much less the logarithm of the perplexity grows, x 100, with heads dropped by beta than by a rival."""
    results = load("head_pruning")
    mine, others = (
        [-100 * math.log(x) for x in head_tables.growth(results, way, ranking, share)]
        for ranking in ("beta", rival)
    )
    if len(mine) < 2 or len(mine) != len(others):
        raise KeyError(rival)
    return gain(
        mine,
        {rival: others},
        f"100 x log perplexity gained, {100 * share:.0f} % of heads dropped",
        0.0,
        1,
    )


def minilm_cosines(way: str, choice: str, wanted: float) -> Found:
    """The mean cosine of sentence embeddings with three layers patched."""
    run = load("hsa_minilm")["runs"][f"{way}; {choice}"]
    text = f"{way}, {choice} layers: mean cosine {run['mean']:.3f} at {100 * run['pairs']:.0f} % of the pairs"
    return text, HOLDS if run["mean"] >= wanted else NOT


def match3(rival: str) -> Found:
    """Three-way against pairwise attention."""
    found = trilinear_tables.by_kind(load("trilinear"))
    mine, others = ([100 * run["accuracy"] for run in found[name]] for name in ("three-way", rival))
    return gain(mine, {rival: others}, "points")


def kernel_alignment(lead: str = "") -> Found:
    """How much more the learned mixture of kernels aligns with the classes than mixtures that are not learned, and than
    no mixture; with projections, first of all than before its training.
    """
    found = kernels_tables.whole(load("kernels"))
    learned, align = found[f"{lead}learned mixture"], kernels_tables.aligned
    others = {"itself before training": align(learned, "before")} if lead else {}
    others |= {control: align(found[lead + control]) for control in kernels_tables.CONTROLS}
    return gain(align(learned), others, f"{lead}100 x alignment above chance")


def kernels_by_token(lead: str = "") -> Found:
    """Accuracy with weights of kernels by token, against one weight a kernel."""
    found = kernels_tables.whole(load("kernels"))
    mine, others = (
        kernels_tables.accuracies(found[lead + kind]) for kind in reversed(kernels_tables.MIXTURES)
    )
    return gain(mine, {"one weight a kernel": others}, f"nouns, {lead}points")


def token_weights() -> Found:
    """The loss of small language models with weights of heads by token, against one number a head."""
    found = token_weights_tables.whole(load("token_weights"))
    mine, *others = (
        [-x for x in found[kind]]
        for kind in ("weights by token", "one weight a head", "no weights")
    )
    return gain(
        mine,
        dict(zip(("one weight a head", "none"), others)),
        "language model, nats x 100",
        digits=2,
    )


def coattention() -> Found:
    """Three-way attention over question and context, against pairwise attention, and without either of the two."""
    found = coattention_tables.whole(load("coattention"))
    others = ("pairwise", "pairwise, chained", "without question", "without context")
    return gain(
        found[coattention_tables.THREE_WAY], {other: found[other] for other in others}, "points"
    )


def entropy_effect(ways: tuple[str, ...], usual: str = "input-dependent") -> Found:
    """What subtracting entropy changes: how evenly heads are weighed, and the perplexity; the claim is that it keeps
    weights from collapsing, which they have to do without it.
    """
    results, texts = load("head_pruning"), []
    runs = {way: head_tables.seeds(results, way, "trained") for way in (usual, *ways)}
    if any(len(found) != len(results["settings"]["seeds"]) for found in runs.values()):
        raise KeyError(usual)
    loss = {
        way: [-100 * head_tables.losses(run["perplexity"]) for run in found]
        for way, found in runs.items()
    }
    least = {way: [min(run["entropy"].values()) for run in found] for way, found in runs.items()}
    for way in ways:
        measure = f"{way}: percents of perplexity gained"
        cost, _ = gain(loss[way], {"none": loss[usual]}, measure, 0.0, 2)
        texts.append(f"{way}: {tables.mean_and_deviation(least[way], 3)} of the largest; {cost}")
    even = f"least entropy of a layer without it {tables.mean_and_deviation(least[usual], 3)} of the largest"
    # a layer of nine heads that uses half of them evenly has 0.68 of the largest entropy
    if statistics.mean(least[usual]) > 0.68:
        return f"{even}: no collapse to prevent; {'; '.join(texts)}", UNDECIDED
    kept = all(interval(least[way], least[usual])[0] > 0 for way in ways)
    return f"{even}; {'; '.join(texts)}", HOLDS if kept else NOT


def collaborative(way: str) -> Found:
    """Cosine and probe of MiniLM with fewer parameters, without training."""
    runs = load("collaborative")["runs"]
    run, stock = runs[way], runs["stock"]
    points = 100 * (run["probe"]["accuracy"] - stock["probe"]["accuracy"])
    return f"{way}: mean cosine {run['cosine']['mean']:.3f}, probe {points:+.1f} points", PARTLY


def alibi_bend() -> Found:
    """How much attention HyPE moves from ALiBi's at mu = 1/L."""
    found = load("alibi")["runs"]["heads"]["total_variation"]
    most = max(100 * x for values in found.values() for x in values)
    return (
        f"at mu = 1/L at most {most:.1f} % of attention differs from ALiBi's",
        HOLDS if most < 5 else NOT,
    )


def ball_orders(level: int) -> Found:
    """Whether norms of keys order the tree's levels, and more so with hyperbolic than with Euclidean distance."""
    results = load("hyperbolicity")
    values = {
        kind: [
            hyperbolicity_tables.of_keys(run["after"])
            for run in hyperbolicity_tables.seeds(results, level, kind)
        ]
        for kind in (hyperbolicity_tables.HYPERBOLIC, hyperbolicity_tables.EUCLIDEAN)
    }
    mine, others = values.values()
    if len(mine) < 2 or len(mine) != len(others):
        raise KeyError(str(level))
    text = f"rank correlation of keys' norms with the level {tables.mean_and_deviation(mine, 2)} at depth {level}"
    more, _ = gain(mine, {"Euclidean distance": others}, "more", 0.0, 2)
    # a correlation of less than 0.3 orders nothing
    return f"{text}; {more}", judge(*interval(mine, [0.0] * len(mine)), 0.3)


def hypernyms(kind: str, source: str = "WordNet") -> Found:
    """How much oftener a score over frozen states finds the word above a noun than scores without geometry do."""
    found = hypernyms_tables.whole(load("hypernyms"), source)
    others = {
        control: hypernyms_tables.accuracies(found[control])
        for control in hypernyms_tables.CONTROLS[1:]
    }
    return gain(hypernyms_tables.accuracies(found[kind]), others, f"{source}, {kind}, points")


def words_order(name: str) -> Found:
    """Whether norms of a pretrained model's words follow WordNet's depth, at equal frequency."""
    run = load("hyperbolicity")["runs"][f"{name}, words"]
    found = run["table of words"]
    alone = hyperbolicity_tables.partial(
        found["norm and depth"]["value"],
        found["norm and frequency"]["value"],
        run["frequency and depth"]["value"],
    )
    text = (
        f"{name}: norm and frequency {found['norm and frequency']['value']:+.2f}, norm and depth "
        f"{found['norm and depth']['value']:+.2f}, at equal frequency {alone:+.2f}, of {run['count']:,} nouns"
    )
    return text, NOT if abs(alone) < 0.3 else PARTLY


def names_order(name: str, source: str) -> Found:
    """Whether norms of a pretrained model's names of several words follow the depth of a hierarchy, at equal length."""
    run = load("hyperbolicity")["runs"][f"{name}, {source}"]
    found = run[f"last hidden states, {source}"]
    alone = hyperbolicity_tables.partial(
        found["norm and depth"]["value"],
        found["norm and length"]["value"],
        run["length and depth"]["value"],
    )
    text = (
        f"{name}, {source}: norm and depth {found['norm and depth']['value']:+.2f}, at equal length {alone:+.2f}, of "
        f"{run['count']:,} names"
    )
    return text, NOT if abs(alone) < 0.3 else PARTLY


def start_effect(kind: str, start: str) -> Found:
    """What another start changes in the depth task; the claim is that it changes something."""
    results = load("starts")
    mine, usual = (starts_tables.accuracies(results, kind, one) for one in (start, starts.USUAL))
    if len(mine) < 2 or len(mine) != len(usual):
        raise KeyError(start)
    low, high = interval(mine, usual)
    text = f"{kind}, {start}: {tables.paired(mine, usual)} points (found from {tables.detectable(mine, usual):.1f} on)"
    return text, HOLDS if low > 0 or high < 0 else UNDECIDED


def start_gain(kind: str, start: str) -> Found:
    """Whether another start is better."""
    results = load("starts")
    mine, usual = (starts_tables.accuracies(results, kind, one) for one in (start, starts.USUAL))
    if len(mine) < 2 or len(mine) != len(usual):
        raise KeyError(start)
    return gain(mine, {"gamma 1": usual}, "points")


def any_start(kinds: tuple[str, ...], start: str) -> Found:
    """The same of several scores; one that changes is enough."""
    found = [start_effect(kind, start) for kind in kinds]
    verdict = HOLDS if any(one == HOLDS for _, one in found) else UNDECIDED
    return "; ".join(text for text, _ in found), verdict


def graph_gain(kind: str) -> Found:
    """Accuracy on the graph of packages, against scores without geometry and against none."""
    values = graphs_tables.whole(load("graphs"))
    if kind not in values:
        raise KeyError(kind)
    others = {
        name: values[name] for name in ("dot product", "Euclidean distance", "mean of neighbours")
    }
    return gain(values[kind], others, "points")


def graph_trees_gain() -> Found:
    """Accuracy of hierarchical attention over a package's neighbourhood as a tree, against what has no tree."""
    values = graphs_tables.whole(load("graph_trees"))
    return gain(
        values[graph_trees.TREE],
        {name: values[name] for name in graph_trees_tables.CONTROLS},
        "points",
    )


def vision_gain(kind: str, gamma: float, claimed: float = 0.0) -> Found:
    """Accuracy of a small DeiT, against scores without geometry."""
    results = load("vision")
    values = vision_tables.whole(results)
    others = {control: values[control, 1.0] for control in vision.CONTROLS}
    text, verdict = gain(
        values[kind, gamma], others, f"points on Fashion-MNIST, gamma {gamma:g}", claimed, 2
    )
    settings = results["settings"]
    if vision.best_rate(settings, results["runs"], kind, gamma) == max(settings["search"]["rates"]):
        text += "; its rate is the highest that was searched"
    return text, verdict


def vision_gammas() -> Found:
    """What another gamma at the start changes there; one change is enough that is none by chance in so many tests."""
    from scipy.stats import ttest_rel

    values = vision_tables.whole(load("vision"))
    tests = {
        (kind, gamma): (values[kind, gamma], values[kind, 1.0])
        for kind in vision.CONES
        for gamma in vision.GAMMAS[1:]
    }
    said = (
        f"Fashion-MNIST, {kind}, gamma {gamma:g}: {tables.paired(*both, 2)} points"
        for (kind, gamma), both in tests.items()
    )
    changes = any(ttest_rel(*both).pvalue < 0.05 / len(tests) for both in tests.values())
    return "; ".join(said), HOLDS if changes else UNDECIDED


def gammas(kinds: tuple[str, ...], start: str) -> Found:
    """What gamma changes in the depth task and, once its runs are done, on images."""
    text, verdict = any_start(kinds, start)
    try:
        more, other = vision_gammas()
    except (KeyError, ValueError):
        return f"{text}; on images the runs are not done", verdict
    return f"{text}; {more}", HOLDS if HOLDS in (verdict, other) else UNDECIDED


def ball_times() -> Found:
    """Microseconds of operations, beside those that a source gives."""
    runs = load("operations")["runs"]
    distance, attention = runs["distance"], runs["hyperbolic attention"]
    text = (
        f"distance {distance['one']:.1f} µs a call, {distance['many']:.2f} a pair of many; attention over 64 tokens "
        f"{attention['one']:.0f} µs, SDPA {runs['SDPA']['one']:.0f}"
    )
    return text, HOLDS if distance["many"] <= 0.5 and attention[
        "one"
    ] <= 50 else PARTLY if distance["many"] <= 0.5 else NOT


def ball_gain(dim: int) -> Found:
    """Points in the ball against points of Euclidean space."""
    mine, others = (
        ball_tables.precisions(load("ball"), space, dim) for space in (ball.BALL, ball.FLAT)
    )
    if not mine or not others:
        raise KeyError(str(dim))
    return gain(mine, {f"Euclidean space in {dim} dimensions": others}, "points of precision")
