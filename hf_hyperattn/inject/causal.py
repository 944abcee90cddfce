"""Injection into a causal language model: rules by head, chosen by what running text and retrieval lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..integration import unpatch_model
from ..integration.hosts import find_hosts, host_facts
from .allocate import Allocation, OutOfReach, choose, predicted_losses
from .costs import cost_of
from .gradients import final_hidden, head_of, loss_of
from .injection import Injection, Item, Losses, ids_of
from .kept import Kept, fingerprint
from .measure import Sensitivity, measure
from .retrieval import (
    TASKS,
    Example,
    Score,
    by_task,
    copying,
    examples,
    least_right,
    mixture,
    opening,
    refuse_names,
    score_hidden,
    share_right,
)
from .rules import CandidateRule
from .together import ByHead, corrected, loss_parts

LAYER_STEPS = 10  # progress steps of the measurement of a layer; a pass over a text is one
TRIES_AT_PAIRS = 3  # choices at one share of the pairs
#: What the first choices lose together corrects the next, by these powers of it: see `together`.
POWERS = (0.75, 0.5)
#: Passes that the parts of all heads take, in progress steps.
PARTS = 4
USUAL_RETRIEVAL_BUDGET = 0.05
#: Of the file that keeps what heads lose together on a text: its name, and that of the text's score among layers.
TOGETHER, SCORE = "together", "score"
RETRIEVAL = ("copying", "mixture", *TASKS)


@dataclass
class CausalInjection(Injection):
    """Of a causal language model: rules by head; the loss is relative perplexity, 0.02 being 2 % more.

    Args:
        texts: with a tokenizer, no text is called like a task of retrieval, alone or with a number after it.
        rows, seed: the sampled queries; the seed draws what is to be retrieved, too.
        tokenizer: makes examples of retrieval, which are measured, chosen and verified on beside the texts; None: none.
        retrieval_budget: largest relative rise of the perplexity of answers, in every task; None: it is only shown.
        folder: keeps what is measured. resume: take from there what an earlier run left.

    Raises:
        ValueError: a text is called like a task of retrieval, which would take its place.
    """

    rows: int = 384
    seed: int = 0
    tokenizer: Any = None
    retrieval_budget: float | None = None
    folder: Path | str | None = None
    resume: bool = True
    measured: list[Sensitivity] = field(default_factory=list, init=False)
    key_heads: dict[str, int] = field(default_factory=dict, init=False)  # by layer
    corrections: int = field(default=0, init=False)  # by what heads lose together
    unable: dict[str, float] = field(
        default_factory=dict, init=False
    )  # tasks that the model cannot do: share right
    metric, tries, unit = "perplexity", 5, "head"

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            for texts in self.texts:
                refuse_names(texts, RETRIEVAL)
            self.texts = [
                {**texts, **self.retrieval(i, list(texts.values()))}
                for i, texts in enumerate(self.texts)
            ]

    def retrieval(self, part: int, texts: list[Any]) -> dict[str, Item]:
        """Examples of a part: to verify on every task, else a copied text and all needles at once.

        Words and numbers are drawn anew for every part; of few-shot they are few, so that most come again.
        """
        seed = 3 * self.seed + part
        if part == 2:
            made = examples(self.tokenizer, texts, self.length, seed=seed)
            return {f"{example.task} {i}": example for i, example in enumerate(made)}
        mixed = mixture(self.tokenizer, texts[-1], self.length, seed=seed)
        copied = copying(texts[0], self.length, opening(self.tokenizer, texts[0]))
        return {"copying": copied, **({"mixture": mixed} if mixed else {})}

    def steps(self) -> int:
        layers = sum(1 for m in self.model.modules() if hasattr(m, "layer_idx")) or 1
        tries = self.tries + (PARTS - 1) * len(POWERS)
        return len(self.texts[0]) * (LAYER_STEPS * layers + tries + 1) + 3 * len(self.texts[2])

    def bar(self, name: str) -> float | None:
        """As in `Injection`; a task that the original model cannot do decides nothing."""
        if name in self.unable:
            return None
        return (
            self.retrieval_budget
            if name in RETRIEVAL and self.tokenizer is not None
            else self.budget
        )

    def note_stock(self, before: dict[str, Score]) -> None:
        """Note which tasks the original model cannot do: what it loses there is no loss of retrieval."""
        if self.tokenizer is None:
            return
        for task, score in self.of_tasks(before).items():
            self.unable.pop(task, None)
            if task in RETRIEVAL and share_right(task, score) < least_right(task):
                self.unable[task] = share_right(task, score)

    def measure(self) -> None:
        self.head = head_of(self.model, ids_of(next(iter(self.texts[0].values()))))
        step = lambda _: self.progress.advance(LAYER_STEPS)
        for name, item in self.texts[0].items():
            self.progress.describe(f"measuring on {name}")
            options: Any = {"rows": self.rows, "seed": self.seed, "on_layer": step}
            options |= {
                "folder": self.folder,
                "resume": self.resume,
                "spans": getattr(item, "spans", None),
            }
            self.measured.append(
                measure(self.model, ids_of(item), [*self.rules, *self.rivals], **options)
            )
        if not self.measured[0].costs:
            raise ValueError(
                f"{type(self.model).__name__}: no layer attends causally to all of {self.length} tokens; allowed: "
                "models without sliding windows as short, soft caps or position biases"
            )
        self.alone = predicted_losses(self.measured)
        self.costs = self.losses_of(self.rules)
        hosts = [
            host_facts(n, host, 0)
            for n, host in find_hosts(self.model)
            if n in self.measured[0].costs
        ]
        self.key_heads = {host.name: host.kv_heads for host in hosts}
        if self.cost == "time":  # once, so that all choices of this run know the same
            self.progress.describe("timing rules")
            group, dim = hosts[0].heads // hosts[0].kv_heads, hosts[0].head_dim or 64
            like = torch.empty(group, dim, device=self.model.device)
            self.times = cost_of("time", [*self.rules, *self.rivals], self.length, like)

    def choose(self, pairs: float, rules: Sequence[CandidateRule] | None = None) -> Allocation:
        rules, losses = (
            (self.rules, self.costs) if rules is None else (rules, self.losses_of(rules))
        )
        named = self.times if self.cost == "time" else self.cost
        return choose(rules, losses, self.length, pairs=pairs, cost=named, key_heads=self.key_heads)

    def search(self) -> Allocation | None:
        """As in `Injection`. What the first choices lose together corrects what rules are expected to lose.

        With `pairs` that alone changes, and the allocation is kept whose worst loss, in units of its budget, is least.

        Raises:
            OutOfReach: no rules are as cheap as `pairs` says.
        """
        with torch.no_grad():
            stock = {name: self.hidden(item) for name, item in self.texts[1].items()}
            before = {name: self.value(stock[name], item) for name, item in self.texts[1].items()}
        self.note_stock(before)
        self.progress.advance(len(stock))
        best, low, high, pairs = None, 0.0, 1.0, self.pairs or 0.4
        for i in range(TRIES_AT_PAIRS if self.pairs else self.tries):
            try:
                allocation = self.choose(pairs)
            except OutOfReach as nothing:
                if self.pairs:
                    raise OutOfReach(
                        pairs, nothing.cheapest, self.cost
                    ) from None  # `choose` got times without a name
                allocation = nothing.cheapest
            if i < len(POWERS):
                self.correct(allocation, before, stock, POWERS[i])
            else:
                stock.clear()
                self.attempt(allocation, before)
            if self.pairs is None and self.keeps(self.tried[-1][1]):
                best, high = allocation, pairs
            elif i >= len(POWERS):  # before, what failed may hold by costs that are corrected
                low = pairs
            pairs = self.pairs or math.sqrt(max(low, high / 4) * high)
        if self.pairs is None:
            return best
        return min(self.tried, key=lambda tried: max(self.in_budgets(tried[1]).values()))[0]

    def correct(
        self,
        allocation: Allocation,
        before: dict[str, Score],
        stock: dict[str, Tensor],
        power: float,
    ) -> None:
        """Try an allocation as `attempt` does, and correct `costs` by what its heads lose together.

        Args:
            before, stock: scores and final hidden states of the model as it was.
        """
        if not allocation.sparse:
            return self.attempt(allocation, before)
        after: dict[str, Score] = {}
        sums: dict[str, Tensor] = {}
        self.progress.describe(
            f"trying {allocation.pairs:.1%} of the pairs, and what heads lose together"
        )
        for name, item in self.texts[1].items():
            after[name], parts = self.lost_together(allocation, item, stock[name])
            weight = 0.0 if name in self.unable else 1 / self.budget_of(name)
            sums = {
                layer: sums.get(layer, torch.zeros(())) + weight * found
                for layer, found in parts.items()
            }
            self.progress.advance(PARTS)
        self.tried.append((allocation, self.losses(before, after)))
        self.corrections += 1
        self.costs = corrected(self.costs, self.rules, allocation, sums, power)

    def lost_together(
        self, allocation: Allocation, item: Item, stock: Tensor
    ) -> tuple[Score, ByHead]:
        """The score of a text under an allocation, and every head's part of what is lost; kept as measurements are."""
        ids, spans = ids_of(item), getattr(item, "spans", None)
        kept, found = None, None
        if self.folder is not None:
            rules = [rule for heads in allocation.layers.values() for rule in heads]
            options = {
                "layers": list(allocation.layers),
                "spans": None if spans is None else [list(s) for s in spans],
            }
            kept = Kept(Path(self.folder) / fingerprint(self.model, ids, rules, **options))
            found = kept.read(TOGETHER) if self.resume else None
        if found is None:
            self.patch(allocation)
            try:
                hidden, parts = loss_parts(self.model, ids, stock, spans)
            finally:
                unpatch_model(self.model)
            with torch.no_grad():
                score = self.value(hidden, item)
            found = parts | {SCORE: torch.tensor([score.nats, score.exact], dtype=torch.float64)}
            if kept:
                kept.write(TOGETHER, found)
        return Score(*found.pop(SCORE).tolist()), found

    def in_budgets(self, losses: Losses) -> Losses:
        """In units of their budgets; tasks that the original model cannot do are left out."""
        return {
            name: loss / self.budget_of(name)
            for name, loss in losses.items()
            if name not in self.unable
        }

    def budget_of(self, name: str) -> float:
        """The bar of a text or task; where there is none, the usual one of retrieval."""
        return self.bar(name) or USUAL_RETRIEVAL_BUDGET

    def compared(self) -> dict[str, Item]:
        texts = {
            name: item for name, item in self.texts[2].items() if not isinstance(item, Example)
        }
        items: dict[str, Item] = dict(texts)
        if self.tokenizer is not None:
            mixed = mixture(
                self.tokenizer, list(texts.values())[-1], self.length, seed=3 * self.seed + 2
            )
            text = next(iter(texts.values()))
            items["copying"] = copying(text, self.length, opening(self.tokenizer, text))
            items |= {"mixture": mixed} if mixed else {}
        return items

    def hidden(self, item: Item) -> Tensor:
        return final_hidden(self.model, ids_of(item))

    def value(self, hidden: Tensor, item: Item) -> Any:
        if isinstance(item, Example):
            return score_hidden(hidden, self.head, item)
        return Score(loss_of(self.head, hidden, item, gradient=False)[0], 0.0)

    def scores(self, before: Score, after: Score) -> tuple[float, float, float]:
        return math.exp(before.nats), math.exp(after.nats), after.loss(before)

    def losses(self, before: dict[str, Score], after: dict[str, Score]) -> Losses:
        """By text, and by task of retrieval."""
        before, after = self.of_tasks(before), self.of_tasks(after)
        return super().losses(before, after)

    def of_tasks(self, scores: dict[str, Score]) -> dict[str, Score]:
        """The scores of the examples of a task as one."""
        part = next(texts for texts in self.texts if scores.keys() <= texts.keys())
        items = {name: item for name, item in part.items() if isinstance(item, Example)}
        tasks = by_task(list(items.values()), [scores[name] for name in items])
        return {name: value for name, value in scores.items() if name not in items} | tasks

    def verified(self, before: dict[str, Score], after: dict[str, Score]) -> dict[str, Any]:
        first, last = self.of_tasks(before), self.of_tasks(after)
        keys = ("before", "after", "loss")
        cost = {"name": self.cost, "share": self.allocation.cost}
        report: dict[str, Any] = {
            "cost": cost,
            "corrections": self.corrections,
            "texts": {},
            "retrieval": {},
        }
        for name, score in first.items():
            row = dict(zip(keys, self.scores(score, last[name])))
            if name in before:
                report["texts"][name] = row
            else:
                right = {"exact_before": score.exact, "exact_after": last[name].exact}
                right |= {"right_before": score.right, "right_after": last[name].right}
                report["retrieval"][name] = row | right | {"decides": self.bar(name) is not None}
        return report
