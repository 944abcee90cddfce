"""Injection from start to end: measure rules, choose an allocation, and verify it on unused text.

Read `Injection.run` for the steps. `CausalInjection` and `EncoderInjection` define what is lost.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis.cost import PeakMemory, read_clock
from ..integration import patch_model, unpatch_model
from .allocate import Allocation
from .costs import Cost, CostName, resolve_cost
from .retrieval import Example
from .rules import CandidateRule

#: An allocation is chosen only if its losses are within this share of their budgets, because it
#: will be verified, and used, on other texts.
MARGIN = 0.8
#: Timed passes of the original model and of the patched model.
ROUNDS = 5
#: Number of allocations beyond the tried ones that verification may fall back to. Each of them
#: saves half as much as the one before.
FALLBACKS = 3
#: For each text or task, its loss.
Losses = dict[str, float]
#: A text as token ids, or an example, where only the answers are scored.
Item = Tensor | Example


class Progress(Protocol):
    """Progress callbacks."""

    def describe(self, text: str) -> None: ...

    def advance(self, steps: int) -> None: ...


@dataclass
class Injection(ABC):
    """Base class: make a pretrained model's attention cheaper without training, within a budget.

    Args:
        model: Unpatched model in evaluation mode. `run` patches it in place.
        texts: Three mappings from text name to token ids: to measure on, to choose on, to verify
            on. Token ids have shape [N] for causal models and [B, N] (passages) for encoders.
        rules: Candidate rules.
        length: Number of tokens per text or passage.
        budget: Largest accepted loss.
        pairs: If given, spend this share of the cost; the budget then no longer blocks.
        rivals: Rules that are measured for comparison but never chosen.
        cost: Quantity to minimise: "pairs", "bytes" or "time". See `choose`.

    Attributes:
        tried: Allocations tried on the second texts, with their losses.
        rejected: Allocations that failed verification, with their losses on the third texts.
        alone: For each layer, the measured loss [H, C] of every rule applied to one head
            (encoders: one layer) while all others are exact. Columns of `rivals` come last.
        costs: As `alone`, for `rules` only, corrected by the allocations tried so far.
        allocation: The allocation that the model is patched with in the end.
        times: Measured times of the rules, if `cost` is "time".
        stages: Seconds of each finished stage of the run, see `enter_stage`.
        stage: Name and start of the current stage.
        metric: Name of the quality measure in the report.
        tries: Number of allocations that `search_allocation` tries.
        unit: What gets a rule of its own: "head" or "layer".
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
    stages: dict[str, float] = field(default_factory=dict, init=False)
    stage: tuple[str, float] | None = field(default=None, init=False)
    metric: ClassVar[str]
    tries: ClassVar[int]
    unit: ClassVar[str]

    @abstractmethod
    def count_steps(self) -> int:
        """Return the number of progress steps of a run."""

    @abstractmethod
    def measure_rules(self) -> None:
        """Measure the loss of every rule on the first texts. Sets `alone` and `costs`."""

    @abstractmethod
    def search_allocation(self) -> Allocation | None:
        """Return the cheapest allocation whose losses are within `MARGIN` · budget on the second texts.

        Returns None if no tried allocation does.
        """

    @abstractmethod
    def compute_hidden(self, item: Item) -> Tensor:
        """Run the model on one text. This is the part that is timed."""

    @abstractmethod
    def evaluate_hidden(self, hidden: Tensor, item: Item) -> Any:
        """Return what `compare_values` needs of one text."""

    @abstractmethod
    def compare_values(self, before: Any, after: Any) -> tuple[float, float, float]:
        """Return the metric before, the metric after, and the loss of one text."""

    @abstractmethod
    def choose_allocation(
        self, pairs: float, rules: Sequence[CandidateRule] | None = None
    ) -> Allocation:
        """Return the allocation of least predicted loss at a share of the cost.

        Args:
            pairs: Share of the cost.
            rules: Rules to choose from, by their losses in `alone`. None: the candidates, by
                their corrected losses.
        """

    def run(self, progress: Progress) -> dict[str, Any]:
        """Measure, choose and verify, and leave the model patched.

        If verification exceeds a budget, the next safer candidate is verified. The report lists
        the refused candidates, and under "accepted" whether the last one passed.

        Args:
            progress: Progress callbacks.

        Returns:
            A report as JSON-serialisable data: pairs, losses, time and memory on the third texts.

        Raises:
            ValueError: No rule keeps the budget, or the model is of another kind.
        """
        self.progress = progress
        self.enter_stage("measuring")
        self.measure_rules()
        self.enter_stage("search")
        progress.describe("the model as it is")
        allocation = self.search_allocation()
        if allocation is None or allocation.config() is None:
            raise self.explain_failure()
        self.enter_stage("held-out text")
        progress.describe("verifying on held-out text")
        # The list is complete before any held-out text is read, so these cannot change the order.
        candidates = list(self.list_candidates(allocation))
        before, memory_before = self.read_held_out()
        self.note_original(before)
        for candidate in candidates:
            if self.rejected:
                unpatch_model(self.model)
            self.allocation = candidate
            self.apply_allocation(candidate)
            after, memory_after = self.read_held_out()
            losses = self.compute_losses(before, after)
            # A requested share of the cost is accepted at any loss.
            accepted = self.pairs is not None or self.meets_budgets(losses, 1.0)
            if accepted:
                break
            self.rejected.append((candidate, losses))
            progress.describe(
                f"{candidate.pairs:.1%} of the pairs exceed a budget on held-out text"
            )
        self.enter_stage("timing")
        return {
            "metric": self.metric,
            "pairs": self.allocation.pairs,
            "accepted": accepted,
            **self.report_texts(before, after),
            "refused": [{"pairs": a.pairs, "losses": losses} for a, losses in self.rejected],
            "seconds": self.time_both_models(),
            "memory": {"before": memory_before, "after": memory_after},
            "length": self.length,
        }

    def enter_stage(self, name: str | None) -> None:
        """Count the time from now on for this stage, in `stages`. None ends the count."""
        now = read_clock()
        if self.stage is not None:
            last, since = self.stage
            self.stages[last] = self.stages.get(last, 0.0) + now - since
        self.stage = None if name is None else (name, now)

    def explain_failure(self) -> ValueError:
        """Return the error for a search that found no cheaper attention."""
        if self.pairs is not None:
            return ValueError(
                f"at {self.pairs:g} of the cost all attention stays exact; allowed: a smaller share"
            )
        return ValueError(
            f"no rule keeps within the budget of {self.budget:g} on these texts: all attention "
            "stays exact; allowed: a larger budget, or longer texts"
        )

    def list_candidates(self, chosen: Allocation) -> Iterator[Allocation]:
        """Yield the allocations to verify: the chosen one, then safer ones, the cheapest first.

        After the tried ones come allocations that save a half, a quarter and an eighth of what the
        last one saves. No third text has a part in them.
        """
        yield chosen
        if self.pairs is not None:
            return
        by_cost = {
            allocation.cost: allocation
            for allocation, losses in self.tried
            if allocation.cost > chosen.cost and self.meets_budgets(losses)
        }
        safer = sorted(by_cost.values(), key=lambda allocation: allocation.cost)
        yield from safer
        share = max([chosen, *safer], key=lambda allocation: allocation.cost).cost
        for _ in range(FALLBACKS):
            share = (share + 1) / 2
            fallback = self.choose_allocation(share)
            if fallback.config() is not None:
                yield fallback

    def find_budget(self, name: str) -> float | None:
        """Return the largest loss of a text or task, or None if any loss is allowed."""
        return self.budget

    def meets_budgets(self, losses: Losses, margin: float = MARGIN) -> bool:
        """Return whether every loss is within this share of its budget."""
        budgets = {name: self.find_budget(name) for name in losses}
        return all(
            budget is None or losses[name] <= margin * budget for name, budget in budgets.items()
        )

    def note_original(self, before: dict[str, Any]) -> None:
        """Receive the values of the original model, before candidates are compared with it.

        Subclasses mark here the texts that cannot judge a candidate.
        """
        return None

    @torch.no_grad()
    def time_both_models(self) -> dict[str, dict[str, float]]:
        """Time a pass over one third text, with the original and with the patched model.

        Returns:
            Under "before" and "after", the median, least and most seconds of `ROUNDS` passes.
        """
        item = next(iter(self.texts[2].values()))
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        # The models take turns, so that other work on the machine slows both. The patched model
        # comes last, so the model is patched again in the end.
        for i in range(ROUNDS + 1):
            for key in seconds:
                if key == "before":
                    unpatch_model(self.model)
                else:
                    self.apply_allocation(self.allocation)
                start = read_clock()
                self.compute_hidden(item)
                # The first round also pays for one-time setup and does not count.
                if i:
                    seconds[key].append(read_clock() - start)
        return {
            key: {"median": statistics.median(taken), "least": min(taken), "most": max(taken)}
            for key, taken in seconds.items()
        }

    def apply_allocation(self, allocation: Allocation) -> None:
        """Patch the model with an allocation. Nothing is patched if every head is exact."""
        config = allocation.config()
        if config is not None:
            patch_model(self.model, config)

    def compute_losses(self, before: dict[str, Any], after: dict[str, Any]) -> Losses:
        """Return the loss of each text."""
        return {name: self.compare_values(value, after[name])[2] for name, value in before.items()}

    def report_texts(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the report about the third texts."""
        keys = ("before", "after", "loss")
        rows = {
            name: dict(zip(keys, self.compare_values(value, after[name])))
            for name, value in before.items()
        }
        return {"texts": rows}

    @torch.no_grad()
    def read_texts(self, texts: Mapping[str, Item]) -> dict[str, Any]:
        """Run the model on all texts and return their values by name."""
        values = {}
        for name, item in texts.items():
            values[name] = self.evaluate_hidden(self.compute_hidden(item), item)
            self.progress.advance(1)
        return values

    def read_held_out(self) -> tuple[dict[str, Any], int]:
        """Return the values of the third texts, and the peak memory in bytes."""
        # A first pass, so that one-time setup does not count as memory of the model.
        with torch.no_grad():
            self.compute_hidden(next(iter(self.texts[2].values())))
        with PeakMemory(self.model.device) as memory:
            values = self.read_texts(self.texts[2])
        return values, memory.peak

    def measure_losses(self, allocation: Allocation, part: int, before: dict[str, Any]) -> Losses:
        """Return the losses of one part of the texts under an allocation.

        The model is unpatched again afterwards.
        """
        config = allocation.config()
        if config is None:
            return dict.fromkeys(before, 0.0)
        patch_model(self.model, config)
        try:
            after = self.read_texts(self.texts[part])
        finally:
            unpatch_model(self.model)
        return self.compute_losses(before, after)

    def select_losses(self, rules: Sequence[CandidateRule]) -> dict[str, Tensor]:
        """Return the columns of `alone` that belong to these rules."""
        measured = [*self.rules, *self.rivals]
        columns = [measured.index(rule) for rule in rules]
        return {name: losses[:, columns] for name, losses in self.alone.items()}

    def try_allocation(self, allocation: Allocation, before: dict[str, Any]) -> None:
        """Add an allocation and its losses on the second texts to `tried`."""
        self.progress.describe(f"trying {allocation.pairs:.1%} of the pairs")
        # Different shares of the cost often give the same rules. Do not run them again.
        known = next(
            (losses for made, losses in self.tried if made.layers == allocation.layers), None
        )
        if known is None:
            known = self.measure_losses(allocation, 1, before)
        else:
            self.progress.advance(len(self.texts[1]))
        self.tried.append((allocation, known))

    def compare_rivals(self, progress: Progress) -> dict[str, dict[str, Any]]:
        """Compare the allocation with other choices that cost at most as much.

        Each family of rules is tried twice: one rule for everything, and a choice per head
        (encoders: per layer). Rivals are chosen by single-head losses, without corrections. The
        model has the allocation again afterwards.

        Args:
            progress: Progress callbacks.

        Returns:
            For each label, the share of pairs and the losses on the third texts. Causal models
            also read a copied text and a "mixture" of retrieval tasks.
        """
        self.enter_stage("comparison")
        items = self.make_comparison_texts()
        # The new texts become part of the third ones, so that their tasks are found by name.
        self.texts = [*self.texts[:2], {**self.texts[2], **items}]
        chosen = self.read_texts(items)
        unpatch_model(self.model)
        original = self.read_texts(items)
        results = {
            "this choice": {
                "pairs": self.allocation.pairs,
                "losses": self.compute_losses(original, chosen),
            }
        }
        for label, rival in self.choose_rivals().items():
            progress.describe(f"comparing with {label}")
            self.apply_allocation(rival)
            after = self.read_texts(items)
            unpatch_model(self.model)
            results[label] = {"pairs": rival.pairs, "losses": self.compute_losses(original, after)}
        self.apply_allocation(self.allocation)
        return results

    def make_comparison_texts(self) -> dict[str, Item]:
        """Return the texts that `compare_rivals` reads."""
        return dict(self.texts[2])

    def choose_rivals(self) -> dict[str, Allocation]:
        """Return the rival allocations by label.

        Families without a rule that is cheap enough are left out.
        """
        measured = [*self.rules, *self.rivals]
        families: dict[str, list[CandidateRule]] = {}
        for rule in measured:
            families.setdefault(rule.family, []).append(rule)
        total = torch.stack([losses.sum(0) for losses in self.alone.values()]).sum(0)
        cost = self.times or resolve_cost(self.cost, measured, self.length)
        rivals: dict[str, Allocation] = {}
        for family, rules in families.items():
            cheap = [rule for rule in rules if cost(rule, self.length) <= self.allocation.cost]
            if cheap:
                best = min(cheap, key=lambda rule: total[measured.index(rule)].item())
                layers = {name: (best,) * len(losses) for name, losses in self.alone.items()}
                rivals[f"{family}, one for all"] = Allocation(layers, self.length)
                rivals[f"{family}, by {self.unit}"] = self.choose_allocation(
                    self.allocation.cost, rules
                )
        return rivals


def ids_of(item: Item) -> Tensor:
    """Return the token ids of a text or an example."""
    return item.ids if isinstance(item, Example) else item
