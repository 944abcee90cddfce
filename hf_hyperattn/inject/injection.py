"""Injection as a whole: measure rules, allocate them, try the allocation, verify it on text that had no part in it."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis.cost import PeakMemory
from ..integration import patch_model, unpatch_model
from .allocate import Allocation
from .costs import Cost, CostName, cost_of
from .retrieval import Example
from .rules import CandidateRule

#: The part that is chosen on must keep this much of the budget: the texts to come are others.
MARGIN = 0.8
#: Timed passes of the original and of the patched model, in turn.
ROUNDS = 5
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
        alone: by layer [H, C], what every rule was measured to lose at one head (of an encoder: layer) while all others
            are exact, those of rivals last. costs: of `rules`, the same, corrected by what was tried.
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
    alone: dict[str, Tensor] = field(default_factory=dict, init=False)
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
        """The cheapest allocation that keeps `MARGIN` of the budget on the second texts, None if none does."""

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
        self.progress = progress
        self.measure()
        progress.describe("the model as it is")
        allocation = self.search()
        if allocation is None or allocation.config() is None:
            if self.pairs is not None:
                raise ValueError(
                    f"at {self.pairs:g} of the cost all attention stays exact; allowed: a smaller share"
                )
            raise ValueError(
                f"no rule keeps within the budget of {self.budget:g} on these texts: all attention stays exact; "
                "allowed: a larger budget, or longer texts"
            )
        progress.describe("verifying on held-out text")
        candidates = list(self.safer(allocation))
        stock = self.read_held_out()
        self.note_stock(stock[0])
        for candidate in candidates:
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
            progress.describe(
                f"on held-out text {self.allocation.pairs:.1%} of the pairs exceed a budget"
            )
        pair = lambda before, after: {"before": before, "after": after}
        return {
            "metric": self.metric,
            "pairs": self.allocation.pairs,
            "accepted": accepted,
            **self.verified(stock[0], sparse[0]),
            "refused": [{"pairs": a.pairs, "losses": losses} for a, losses in self.rejected],
            "seconds": self.time_in_turn(),
            "memory": pair(stock[1], sparse[1]),
            "length": self.length,
        }

    def note_stock(self, before: dict[str, Any]) -> None:
        """Note what the original model is worth on the texts, before candidates are compared with it."""
        return None

    @torch.no_grad()
    def time_in_turn(self) -> dict[str, dict[str, float]]:
        """Seconds of a pass over one held-out text, original and patched: median, least and most of `ROUNDS`.

        The two take turns, so that what else the machine does slows both. One pass each before that is not counted.
        The model is patched again in the end.
        """
        item = next(iter(self.texts[2].values()))
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        for i in range(ROUNDS + 1):
            for key in seconds:
                if key == "before":
                    unpatch_model(self.model)
                else:
                    self.patch(self.allocation)
                start = time.perf_counter()
                self.hidden(item)
                if i:
                    seconds[key].append(time.perf_counter() - start)
        return {
            key: {"median": statistics.median(taken), "least": min(taken), "most": max(taken)}
            for key, taken in seconds.items()
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
        return {
            "texts": {
                name: dict(zip(keys, self.scores(b, after[name]))) for name, b in before.items()
            }
        }

    @torch.no_grad()
    def read(self, texts: Mapping[str, Item]) -> dict[str, Any]:
        """The values of all texts."""
        values = {}
        for name, ids in texts.items():
            values[name] = self.value(self.hidden(ids), ids)
            self.progress.advance(1)
        return values

    def read_held_out(self) -> tuple[dict[str, Any], int]:
        """The values of the third texts, and the most memory in use, in bytes."""
        with torch.no_grad():  # what is set up on first use is no part of the memory
            self.hidden(next(iter(self.texts[2].values())))
        with PeakMemory(self.model.device) as memory:
            values = self.read(self.texts[2])
        return values, memory.peak

    def losses_under(self, allocation: Allocation, part: int, before: dict[str, Any]) -> Losses:
        """The losses of a part of the texts under an allocation; the model is left as it was."""
        config = allocation.config()
        if config is None:
            return dict.fromkeys(before, 0.0)
        patch_model(self.model, config)
        try:
            after = self.read(self.texts[part])
        finally:
            unpatch_model(self.model)
        return self.losses(before, after)

    @abstractmethod
    def choose(self, pairs: float, rules: Sequence[CandidateRule] | None = None) -> Allocation:
        """The allocation of least predicted loss at a share of the cost; of `rules` by what they lose alone."""

    def losses_of(self, rules: Sequence[CandidateRule]) -> dict[str, Tensor]:
        """What these rules lose alone."""
        all_ = [*self.rules, *self.rivals]
        columns = [all_.index(rule) for rule in rules]
        return {name: losses[:, columns] for name, losses in self.alone.items()}

    def compared(self) -> dict[str, Item]:
        """What rivals read."""
        return dict(self.texts[2])

    def compare(self, progress: Progress) -> dict[str, dict[str, Any]]:
        """Rivals at no more of the cost than the choice: each family of rules, one for all and chosen by head or layer.

        They are chosen by what rules lose alone, without the corrections of the choice, which the model has afterwards.
        All read held-out texts, causal models also copies of them, and one text that asks for needles, values,
        variables and a classification ("mixture").
        """
        items = self.compared()
        self.texts = [*self.texts[:2], {**self.texts[2], **items}]
        here = self.read(items)
        unpatch_model(self.model)
        stock = self.read(items)
        shown = {
            "this choice": {"pairs": self.allocation.pairs, "losses": self.losses(stock, here)}
        }
        for label, rival in self.rival_allocations().items():
            progress.describe(f"comparing with {label}")
            self.patch(rival)
            after = self.read(items)
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
        total = torch.stack([losses.sum(0) for losses in self.alone.values()]).sum(0)
        of = self.times or cost_of(self.cost, all_, self.length)
        for family, rules in families.items():
            cheap = [rule for rule in rules if of(rule, self.length) <= self.allocation.cost]
            if cheap:
                one = min(cheap, key=lambda rule: total[all_.index(rule)].item())
                layers = {name: (one,) * len(losses) for name, losses in self.alone.items()}
                made[f"{family}, one for all"] = Allocation(layers, self.length)
                made[f"{family}, by {self.unit}"] = self.choose(self.allocation.cost, rules)
        return made

    def attempt(self, allocation: Allocation, before: dict[str, Any]) -> None:
        """Try an allocation on the second texts; what has been tried is not read again."""
        self.progress.describe(f"trying {allocation.pairs:.1%} of the pairs")
        found = next(
            (losses for made, losses in self.tried if made.layers == allocation.layers), None
        )
        if found is None:
            found = self.losses_under(allocation, 1, before)
        else:
            self.progress.advance(len(self.texts[1]))
        self.tried.append((allocation, found))


def ids_of(item: Item) -> Tensor:
    """The token ids."""
    return item.ids if isinstance(item, Example) else item
