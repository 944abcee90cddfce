"""Injection as a whole: measure rules, allocate them, try the allocation, verify it on text that had no part in it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..analysis.cost import PeakMemory, attention_times
from ..integration import patch_model, unpatch_model
from ..integration.hosts import find_hosts, host_facts
from .allocate import Allocation, choose, predicted_losses
from .costs import Cost, CostName, cost_of
from .gradients import final_hidden, head_of, loss_of, to_model
from .measure import Sensitivity, measure
from .retrieval import TASKS, Example, Score, by_task, copying, examples, mixture, opening, score_hidden
from .rules import CandidateRule
from .together import corrected, loss_parts

#: The part that is chosen on must keep this much of the budget: the texts to come are others.
MARGIN = 0.8
LAYER_STEPS = 10  # progress steps of the measurement of a layer; a pass over a text is one
TRIES_AT_PAIRS = 3  # choices at one share of the pairs
#: What the first choices lose together corrects the next, by these powers of it: see `together`.
POWERS = (0.75, 0.5)
#: Passes that the parts of all heads take, in progress steps.
PARTS = 4
USUAL_RETRIEVAL_BUDGET = 0.05
Losses = dict[str, float]  # by text
Item = Tensor | Example  # a text as token ids, or with answers in it that alone are scored


class Progress(Protocol):
    """What hears of the work as it goes."""

    def describe(self, text: str) -> None: ...

    def advance(self, steps: int) -> None: ...


@dataclass
class Injection(ABC):
    """Makes the attention of a model cheaper within a budget of loss.

    Args:
        model: in evaluation mode, not patched; `run` patches it.
        texts: to measure on, to choose on, to verify on, by name: token ids [N], for an encoder passages [B, N].
        rules: the candidates. length: tokens of a text or passage.
        budget: largest loss. pairs: compute this share of the pairs (of what `cost` names), whatever it loses.
        rivals: rules that are measured to be compared with, and never chosen.
        cost: what is to be little: see `choose`.

    Attributes:
        tried: all allocations that were tried, with their losses on the texts to choose on.
        rejected: those that the held-out texts refused, with their losses there.
        costs: by layer [H, C], what every rule is expected to lose, those of rivals last.
        allocation: what the model is patched with in the end.
    """

    model: PreTrainedModel
    texts: Sequence[Mapping[str, Item]]
    rules: Sequence[CandidateRule]
    length: int
    budget: float
    pairs: float | None = None
    rivals: Sequence[CandidateRule] = ()
    cost: CostName = "pairs"
    tried: list[tuple[Allocation, Losses]] = field(default_factory=list, init=False)
    rejected: list[tuple[Allocation, Losses]] = field(default_factory=list, init=False)
    costs: dict[str, Tensor] = field(default_factory=dict, init=False)
    allocation: Allocation = field(init=False)
    times: Cost | None = field(default=None, init=False)
    metric: ClassVar[str]
    tries: ClassVar[int]
    unit: ClassVar[str]  # what has a rule of its own

    @abstractmethod
    def steps(self) -> int:
        """Of the progress."""

    @abstractmethod
    def measure(self) -> None:
        """Find what every rule costs, on the first texts."""

    @abstractmethod
    def search(self) -> Allocation | None:
        """The allocation of fewest pairs that keeps `MARGIN` of the budget on the second texts, None if none does."""

    @abstractmethod
    def hidden(self, item: Item) -> Tensor:
        """What the model makes of one text; this is timed."""

    @abstractmethod
    def value(self, hidden: Tensor, item: Item) -> Any:
        """What `scores` compares."""

    @abstractmethod
    def scores(self, before: Any, after: Any) -> tuple[float, float, float]:
        """The metric before and after, and the loss, of one text."""

    def safer(self, chosen: Allocation) -> Iterator[Allocation]:
        """What is verified, one after the other until one holds: fixed before any held-out text is read."""
        yield chosen
        if self.pairs is None:
            fit = [a for a, losses in self.tried if a.cost > chosen.cost and self.keeps(losses)]
            yield from sorted({a.cost: a for a in fit}.values(), key=lambda a: a.cost)

    def bar(self, name: str) -> float | None:
        """The largest loss of a text, None where any is allowed."""
        return self.budget

    def keeps(self, losses: Losses, margin: float = MARGIN) -> bool:
        """Whether all losses keep this share of their budgets."""
        bars = {name: self.bar(name) for name in losses}
        return all(bar is None or losses[name] <= margin * bar for name, bar in bars.items())

    def run(self, progress: Progress) -> dict[str, Any]:
        """The whole of it; a report, as plain data, of pairs, loss, time and memory on the held-out texts.

        Where the held-out texts refuse the choice, the next safer candidate takes its place, and so on; the report says
        how many were refused, and under "accepted" whether one was not.

        Raises:
            ValueError: no rule keeps the budget, or the model is of another kind.
        """
        self.progress, held_out = progress, self.texts[2]
        self.measure()
        progress.describe("the model as it is")
        allocation = self.search()
        if allocation is None or allocation.config() is None:
            raise ValueError(
                f"no rule keeps within the budget of {self.budget:g} on these texts: all attention stays exact; "
                "allowed: a larger budget, or longer texts"
            )
        progress.describe("verifying on held-out text")
        stock = self.read_held_out()
        for candidate in list(self.safer(allocation)):
            self.allocation = candidate
            if self.rejected:
                unpatch_model(self.model)
            self.patch(candidate)
            sparse = self.read_held_out()
            losses = self.losses(stock[0], sparse[0])
            accepted = self.pairs is not None or self.keeps(losses, 1.0)
            if accepted:
                break
            self.rejected.append((self.allocation, losses))
            progress.describe(f"held-out text refuses {self.allocation.pairs:.1%} of the pairs")
        pair = lambda before, after: {"before": before, "after": after}
        return {
            "metric": self.metric,
            "pairs": self.allocation.pairs,
            "accepted": accepted,
            **self.verified(stock[0], sparse[0]),
            "refused": [{"pairs": a.pairs, "losses": losses} for a, losses in self.rejected],
            "seconds": pair(stock[1], sparse[1]),
            "attention_seconds": pair(*attention_times(self.model, ids_of(next(iter(held_out.values()))))),
            "memory": pair(stock[2], sparse[2]),
            "length": self.length,
        }

    def patch(self, allocation: Allocation) -> None:
        """Patch the model, as far as some head is not exact."""
        config = allocation.config()
        if config is not None:
            patch_model(self.model, config)

    def losses(self, before: dict[str, Any], after: dict[str, Any]) -> Losses:
        """By text."""
        return {name: self.scores(value, after[name])[2] for name, value in before.items()}

    def verified(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """What the report says of the held-out texts."""
        keys = ("before", "after", "loss")
        return {"texts": {name: dict(zip(keys, self.scores(b, after[name]))) for name, b in before.items()}}

    @torch.no_grad()
    def read(self, texts: Mapping[str, Item]) -> tuple[dict[str, Any], float]:
        """The values of all texts, and the seconds that the model took."""
        values, seconds = {}, 0.0
        for name, ids in texts.items():
            start = time.perf_counter()
            hidden = self.hidden(ids)
            seconds += time.perf_counter() - start
            values[name] = self.value(hidden, ids)
            self.progress.advance(1)
        return values, seconds

    def read_held_out(self) -> tuple[dict[str, Any], float, int]:
        """The values of the third texts, the seconds, and the most memory in use, in bytes."""
        with torch.no_grad():  # what is set up on first use is no part of the time
            self.hidden(next(iter(self.texts[2].values())))
        with PeakMemory(self.model.device) as memory:
            values, seconds = self.read(self.texts[2])
        return values, seconds, memory.peak

    def losses_under(self, allocation: Allocation, part: int, before: dict[str, Any]) -> Losses:
        """The losses of a part of the texts under an allocation; the model is left as it was."""
        config = allocation.config()
        if config is None:
            return dict.fromkeys(before, 0.0)
        patch_model(self.model, config)
        try:
            after, _ = self.read(self.texts[part])
        finally:
            unpatch_model(self.model)
        return self.losses(before, after)

    @abstractmethod
    def choose(self, pairs: float, rules: Sequence[CandidateRule] | None = None) -> Allocation:
        """The allocation of least predicted loss at a share of the cost; of `rules`, where they are given."""

    def losses_of(self, rules: Sequence[CandidateRule]) -> dict[str, Tensor]:
        """What these rules are expected to cost."""
        all_ = [*self.rules, *self.rivals]
        columns = [all_.index(rule) for rule in rules]
        return {name: costs[:, columns] for name, costs in self.costs.items()}

    def compared(self) -> dict[str, Item]:
        """What rivals read."""
        return dict(self.texts[2])

    def compare(self, progress: Progress) -> dict[str, dict[str, Any]]:
        """Rivals at no more of the cost than the choice: each family of rules, one for all and chosen by head or layer.

        They are chosen by the same measurements as the allocation, which the model has afterwards. All read held-out
        texts, causal models also copies of them, and needles of all kinds in one text ("mixture").
        """
        items = self.compared()
        self.texts = [*self.texts[:2], {**self.texts[2], **items}]
        here, _ = self.read(items)
        unpatch_model(self.model)
        stock, _ = self.read(items)
        shown = {"this choice": {"pairs": self.allocation.pairs, "losses": self.losses(stock, here)}}
        for label, rival in self.rival_allocations().items():
            progress.describe(f"comparing with {label}")
            self.patch(rival)
            after, _ = self.read(items)
            unpatch_model(self.model)
            shown[label] = {"pairs": rival.pairs, "losses": self.losses(stock, after)}
        self.patch(self.allocation)
        return shown

    def rival_allocations(self) -> dict[str, Allocation]:
        """By label; those that no rule of a family is cheap enough for are left out."""
        families: dict[str, list[CandidateRule]] = {}
        for rule in (*self.rules, *self.rivals):
            families.setdefault(rule.family, []).append(rule)
        all_, made = [*self.rules, *self.rivals], {}
        total = torch.stack([costs.sum(0) for costs in self.costs.values()]).sum(0)
        of = self.times or cost_of(self.cost, all_, self.length)
        for family, rules in families.items():
            cheap = [rule for rule in rules if of(rule, self.length) <= self.allocation.cost]
            if cheap:
                one = min(cheap, key=lambda rule: total[all_.index(rule)].item())
                layers = {name: (one,) * len(costs) for name, costs in self.costs.items()}
                made[f"{family}, one for all"] = Allocation(layers, self.length)
                made[f"{family}, by {self.unit}"] = self.choose(self.allocation.cost, rules)
        return made

    def attempt(self, allocation: Allocation, before: dict[str, Any]) -> None:
        """Try an allocation on the second texts."""
        self.progress.describe(f"trying {allocation.pairs:.1%} of the pairs")
        self.tried.append((allocation, self.losses_under(allocation, 1, before)))


RETRIEVAL = ("copying", "mixture", *TASKS)


def ids_of(item: Item) -> Tensor:
    """The token ids."""
    return item.ids if isinstance(item, Example) else item


@dataclass
class CausalInjection(Injection):
    """Of a causal language model: rules by head; the loss is relative perplexity, 0.02 being 2 % more.

    Args:
        rows, seed: the sampled queries; the seed draws what is to be retrieved, too.
        tokenizer: makes examples of retrieval, which are measured, chosen and verified on beside the texts; None: none.
        retrieval_budget: largest relative rise of the perplexity of answers, in every task; None: it is only shown.
        folder: keeps what is measured. resume: take from there what an earlier run left.
    """

    rows: int = 384
    seed: int = 0
    tokenizer: Any = None
    retrieval_budget: float | None = None
    folder: Path | str | None = None
    resume: bool = True
    measured: list[Sensitivity] = field(default_factory=list, init=False)
    key_heads: dict[str, int] = field(default_factory=dict, init=False)  # by layer
    metric, tries, unit = "perplexity", 5, "head"

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self.texts = [{**texts, **self.retrieval(i, list(texts.values()))} for i, texts in enumerate(self.texts)]

    def retrieval(self, part: int, texts: list[Any]) -> dict[str, Item]:
        """Examples of a part: to verify on every task, else a copied text and all needles at once.

        Words and numbers are drawn anew for every part, so that none that was chosen on is verified on.
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
        return self.retrieval_budget if name in RETRIEVAL and self.tokenizer is not None else self.budget

    def measure(self) -> None:
        self.head = head_of(self.model, ids_of(next(iter(self.texts[0].values()))))
        step = lambda _: self.progress.advance(LAYER_STEPS)
        for name, item in self.texts[0].items():
            self.progress.describe(f"measuring on {name}")
            options: Any = {"rows": self.rows, "seed": self.seed, "on_layer": step}
            options |= {"folder": self.folder, "resume": self.resume, "spans": getattr(item, "spans", None)}
            self.measured.append(measure(self.model, ids_of(item), [*self.rules, *self.rivals], **options))
        if not self.measured[0].costs:
            raise ValueError(
                f"{type(self.model).__name__}: no layer attends causally to all of {self.length} tokens; allowed: "
                "models without sliding windows as short, soft caps or position biases"
            )
        self.costs = predicted_losses(self.measured)
        hosts = [host_facts(n, host, 0) for n, host in find_hosts(self.model) if n in self.measured[0].costs]
        self.key_heads = {host.name: host.kv_heads for host in hosts}
        if self.cost == "time":  # once, so that all choices of this run know the same
            self.progress.describe("timing rules")
            like = torch.empty(hosts[0].head_dim or 64, device=self.model.device)
            self.times = cost_of("time", [*self.rules, *self.rivals], self.length, like)

    def choose(self, pairs: float, rules: Sequence[CandidateRule] | None = None) -> Allocation:
        """The allocation of least predicted loss at a share of the cost."""
        rules = rules or self.rules
        named = self.times if self.cost == "time" else self.cost
        return choose(rules, self.losses_of(rules), self.length, pairs=pairs, cost=named, key_heads=self.key_heads)

    def search(self) -> Allocation | None:
        """As in `Injection`. What the first choices lose together corrects what rules are expected to lose.

        With `pairs` that alone changes, and the allocation is kept whose worst loss, in units of its budget, is least.
        """
        with torch.no_grad():
            stock = {name: self.hidden(item) for name, item in self.texts[1].items()}
            before = {name: self.value(stock[name], item) for name, item in self.texts[1].items()}
        best, low, high, pairs = None, 0.0, 1.0, self.pairs or 0.4
        for i in range(TRIES_AT_PAIRS if self.pairs else self.tries):
            allocation = self.choose(pairs)
            if i < len(POWERS):
                self.correct(allocation, before, stock, POWERS[i])
            else:
                self.attempt(allocation, before)
            if self.pairs is None:
                fits = self.keeps(self.tried[-1][1])
                best, low, high = (allocation, low, pairs) if fits else (best, pairs, high)
            pairs = self.pairs or math.sqrt(max(low, high / 4) * high)
        if self.pairs is None:
            return best
        return min(self.tried, key=lambda tried: max(self.in_budgets(tried[1]).values()))[0]

    def correct(
        self, allocation: Allocation, before: dict[str, Score], stock: dict[str, Tensor], power: float
    ) -> None:
        """Try an allocation as `attempt` does, and correct `costs` by what its heads lose together.

        Args:
            before, stock: scores and final hidden states of the model as it was.
        """
        if not allocation.sparse:
            return self.attempt(allocation, before)
        after, sums = {}, {}
        self.progress.describe(f"trying {allocation.pairs:.1%} of the pairs, and what heads lose together")
        self.patch(allocation)
        try:
            for name, item in self.texts[1].items():
                hidden, parts = loss_parts(self.model, ids_of(item), stock[name], getattr(item, "spans", None))
                after[name] = self.value(hidden, item)
                weight = 1 / self.budget_of(name)
                sums = {layer: sums.get(layer, 0) + weight * found for layer, found in parts.items()}
                self.progress.advance(PARTS)
        finally:
            unpatch_model(self.model)
        self.tried.append((allocation, self.losses(before, after)))
        self.costs = corrected(self.costs, [*self.rules, *self.rivals], allocation, sums, power)

    def in_budgets(self, losses: Losses) -> Losses:
        """In units of their budgets."""
        return {name: loss / self.budget_of(name) for name, loss in losses.items()}

    def budget_of(self, name: str) -> float:
        """Of a text or task, one where any loss is allowed too."""
        return self.bar(name) or USUAL_RETRIEVAL_BUDGET

    def compared(self) -> dict[str, Item]:
        texts = {name: item for name, item in self.texts[2].items() if not isinstance(item, Example)}
        items: dict[str, Item] = dict(texts)
        if self.tokenizer is not None:
            mixed = mixture(self.tokenizer, list(texts.values())[-1], self.length, seed=3 * self.seed + 2)
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
        before, after = self.together(before), self.together(after)
        return super().losses(before, after)

    def together(self, scores: dict[str, Score]) -> dict[str, Score]:
        """The scores of the examples of a task as one."""
        part = next(texts for texts in self.texts if scores.keys() <= texts.keys())
        items = {name: item for name, item in part.items() if isinstance(item, Example)}
        tasks = by_task(list(items.values()), [scores[name] for name in items])
        return {name: value for name, value in scores.items() if name not in items} | tasks

    def verified(self, before: dict[str, Score], after: dict[str, Score]) -> dict[str, Any]:
        first, last = self.together(before), self.together(after)
        keys = ("before", "after", "loss")
        cost = {"name": self.cost, "share": self.allocation.cost}
        report: dict[str, dict[str, Any]] = {"cost": cost, "texts": {}, "retrieval": {}}
        for name, score in first.items():
            row = dict(zip(keys, self.scores(score, last[name])))
            if name in before:
                report["texts"][name] = row
            else:
                report["retrieval"][name] = row | {"exact_before": score.exact, "exact_after": last[name].exact}
        return report


@dataclass
class EncoderInjection(Injection):
    """Of an encoder of text: rules by layer; the loss is 1 - cosine of mean-pooled embeddings.

    What a layer loses is measured under each rule alone. What several lose together is more than the sum, so that the
    allocation is tried, with a smaller sum until the budget holds.
    """

    metric, tries, unit = "cosine", 6, "layer"

    def steps(self) -> int:
        return len(self.texts[0]) * (len(list(find_hosts(self.model))) * len(self.rules) + self.tries + 4)

    def measure(self) -> None:
        plain, _ = self.read(self.texts[0])
        for name, _ in find_hosts(self.model):
            self.progress.describe(f"measuring {name}")
            alone = (Allocation({name: (rule,)}, self.length) for rule in (*self.rules, *self.rivals))
            worst = [max(self.losses_under(allocation, 0, plain).values()) for allocation in alone]
            self.costs[name] = torch.tensor([worst], dtype=torch.float64)

    def search(self) -> Allocation | None:
        before, _ = self.read(self.texts[1])
        for halvings in range(1 if self.pairs else self.tries):
            loss = MARGIN * self.budget / 2**halvings
            allocation = choose(
                self.rules, self.losses_of(self.rules), self.length, pairs=self.pairs, loss=loss, cost=self.cost
            )
            self.attempt(allocation, before)
            if self.pairs is not None or self.keeps(self.tried[-1][1]):
                return allocation
        return None

    def choose(self, pairs: float, rules: Sequence[CandidateRule] | None = None) -> Allocation:
        rules = rules or self.rules
        return choose(rules, self.losses_of(rules), self.length, pairs=pairs, cost=self.cost)

    def hidden(self, item: Item) -> Tensor:
        return embeddings(self.model, ids_of(item))

    def value(self, hidden: Tensor, item: Item) -> Tensor:
        return hidden

    def scores(self, before: Tensor, after: Tensor) -> tuple[float, float, float]:
        loss = distance(before, after)
        return 1.0, 1 - loss, loss


def embeddings(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean-pooled last hidden states [B, e] of passages [B, N]."""
    return model.base_model(to_model(ids, model)).last_hidden_state.float().mean(1)


def distance(before: Tensor, after: Tensor) -> float:
    """1 - cosine of embeddings [B, e], mean over passages."""
    return 1 - F.cosine_similarity(after, before).mean().item()
