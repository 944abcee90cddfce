"""Injection into a causal language model: one rule per head, chosen by text and retrieval losses.

Read `CausalInjection.search_allocation` for the search, and `together` for the correction of
single-head losses by what heads lose jointly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..integration import unpatch_model
from ..integration.attention.hosts import find_hosts, host_facts
from .allocate import Allocation, OutOfReach, choose, predicted_losses
from .costs import resolve_cost
from .gradients import final_hidden, head_of, loss_of
from .injection import Injection, Item, Losses, ids_of
from .kept import MeasurementFolder, fingerprint
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
    opening_tokens,
    refuse_names,
    score_hidden,
    share_right,
)
from .rules import CandidateRule
from .together import ByHead, corrected, loss_parts

#: Progress steps per measured layer. A forward pass over a text is one step, and takes longer: 1.3 s
#: against 0.5 s for SmolLM2 and 512 tokens.
LAYER_STEPS = 1
#: Progress steps of the pass that finds the parts of all heads.
PARTS = 4
#: Number of allocations that are tried at a requested share of the cost.
TRIES_AT_PAIRS = 3
#: Share of the cost that is tried first if none is requested.
FIRST_SHARE = 0.4
#: The joint losses of the first allocations correct the next choice, by these powers, see
#: `together.corrected`.
POWERS = (0.75, 0.5)
#: Weight of tasks without a budget, as if this were their budget.
USUAL_RETRIEVAL_BUDGET = 0.05
#: Name of the file that stores the joint losses of a text.
TOGETHER = "together"
#: Key of the text's score in this file. The other keys are layer names.
SCORE = "score"
#: Names of retrieval tasks, including the ones that measure several tasks at once.
RETRIEVAL = ("copying", "mixture", *TASKS)


@dataclass
class CausalInjection(Injection):
    """Injection into a causal language model. The loss is relative perplexity: 0.02 is 2 % more.

    Args:
        texts: As in `Injection`. With a tokenizer, no text may have the name of a retrieval task,
            also not with a number after it.
        rows: Number of queries sampled per text.
        seed: Seed of the sampled queries and of the retrieval examples.
        tokenizer: Makes retrieval examples, which are used like texts in all three parts. None:
            no examples.
        retrieval_budget: Largest relative rise of the answers' perplexity in each task. None: it
            is only reported.
        folder: Folder that stores measurements. None: store nothing.
        resume: Reuse the measurements of an earlier run.

    Attributes:
        measured: One measurement per text.
        key_heads: Number of key heads of each layer.
        corrections: Number of corrections by joint losses.
        unable: Tasks that the original model cannot do, with its share of right answers.

    Raises:
        ValueError: A text has the name of a retrieval task, which would overwrite it.
    """

    rows: int = 384
    seed: int = 0
    tokenizer: Any = None
    retrieval_budget: float | None = None
    folder: Path | str | None = None
    resume: bool = True
    measured: list[Sensitivity] = field(default_factory=list, init=False)
    key_heads: dict[str, int] = field(default_factory=dict, init=False)
    corrections: int = field(default=0, init=False)
    unable: dict[str, float] = field(default_factory=dict, init=False)
    metric = "perplexity"
    tries = 5
    unit = "head"

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            for texts in self.texts:
                refuse_names(texts, RETRIEVAL)
            self.texts = [
                {**texts, **self.make_retrieval(i, list(texts.values()))}
                for i, texts in enumerate(self.texts)
            ]

    def make_retrieval(self, part: int, texts: list[Any]) -> dict[str, Item]:
        """Make the retrieval examples of one part of the texts.

        The third part gets examples of every task. The others get only a copied text and a
        mixture, because each further example would cost a pass with gradients.
        """
        # Another seed for each part, so that verification has new words and numbers. The word
        # lists of few-shot are short, so most of its words come again.
        seed = 3 * self.seed + part
        if part == 2:
            made = examples(self.tokenizer, texts, self.length, seed=seed)
            return {f"{example.task} {i}": example for i, example in enumerate(made)}
        first = opening_tokens(self.tokenizer, texts[0])
        items: dict[str, Item] = {"copying": copying(texts[0], self.length, first)}
        mixed = mixture(self.tokenizer, texts[-1], self.length, seed=seed)
        if mixed:
            items["mixture"] = mixed
        return items

    def count_steps(self) -> int:
        layers = sum(1 for m in self.model.modules() if hasattr(m, "layer_idx")) or 1
        # The tries that find parts take `PARTS` steps instead of one.
        tries = self.tries + (PARTS - 1) * len(POWERS)
        return len(self.texts[0]) * (LAYER_STEPS * layers + tries + 1) + 3 * len(self.texts[2])

    def find_budget(self, name: str) -> float | None:
        """Return the largest loss of a text or task, or None if any loss is allowed.

        Tasks that the original model cannot do have no budget.
        """
        if name in self.unable:
            return None
        if name in RETRIEVAL and self.tokenizer is not None:
            return self.retrieval_budget
        return self.budget

    def note_original(self, before: dict[str, Score]) -> None:
        """Note the tasks that the original model cannot do: a loss there is no retrieval loss."""
        if self.tokenizer is None:
            return
        for task, score in self.average_tasks(before).items():
            # The result for the last texts counts, since ability may differ between parts.
            self.unable.pop(task, None)
            if task in RETRIEVAL and share_right(task, score) < least_right(task):
                self.unable[task] = share_right(task, score)

    def measure_rules(self) -> None:
        self.head = head_of(self.model, ids_of(next(iter(self.texts[0].values()))))
        self.measure_texts()
        self.alone = predicted_losses(self.measured)
        self.costs = self.select_losses(self.rules)
        layers = [
            host_facts(name, host, 0)
            for name, host in find_hosts(self.model)
            if name in self.measured[0].costs
        ]
        self.key_heads = {layer.name: layer.kv_heads for layer in layers}
        if self.cost == "time":
            # Once, so that all choices of this run use the same times.
            self.progress.describe("timing rules")
            group = layers[0].heads // layers[0].kv_heads
            like = torch.empty(group, layers[0].head_dim or 64, device=self.model.device)
            self.times = resolve_cost("time", [*self.rules, *self.rivals], self.length, like)

    def measure_texts(self) -> None:
        """Measure all rules on each of the first texts. Adds to `measured`."""
        for name, item in self.texts[0].items():
            self.progress.describe(f"measuring on {name}")
            sensitivity = measure(
                self.model,
                ids_of(item),
                [*self.rules, *self.rivals],
                rows=self.rows,
                seed=self.seed,
                on_layer=lambda _: self.progress.advance(LAYER_STEPS),
                spans=getattr(item, "spans", None),
                folder=self.folder,
                resume=self.resume,
            )
            self.measured.append(sensitivity)
        if not self.measured[0].costs:
            raise ValueError(
                f"{type(self.model).__name__}: no layer attends causally to all of {self.length} "
                "tokens; allowed: models without position biases, soft caps, or sliding windows "
                "that are shorter than the text"
            )

    def choose_allocation(
        self, pairs: float, rules: Sequence[CandidateRule] | None = None
    ) -> Allocation:
        losses = self.costs if rules is None else self.select_losses(rules)
        return choose(
            self.rules if rules is None else rules,
            losses,
            self.length,
            pairs=pairs,
            cost=self.times if self.cost == "time" else self.cost,
            key_heads=self.key_heads,
        )

    def search_allocation(self) -> Allocation | None:
        """Search the cheapest allocation that keeps `MARGIN` of the budgets on the second texts.

        Shares of the cost are tried by bisection. The first allocations are also used to correct
        the losses by what heads lose jointly. With `pairs`, the share stays the same, only the
        corrections change the choice, and the allocation with the smallest worst loss wins. Losses
        are compared in units of their budgets.

        The original's final hidden states of all second texts, [N, e] each, are kept for the
        corrections.

        Returns:
            The allocation, or None if none keeps the budgets.

        Raises:
            OutOfReach: No rules are as cheap as `pairs`.
        """
        with torch.no_grad():
            # The corrections need these hidden states as the teacher's.
            hidden = {name: self.compute_hidden(item) for name, item in self.texts[1].items()}
            before = {
                name: self.evaluate_hidden(hidden[name], item)
                for name, item in self.texts[1].items()
            }
        self.note_original(before)
        self.progress.advance(len(hidden))
        best = None
        # `high`: the cheapest share that kept the budgets. `low`: the largest that did not.
        low, high = 0.0, 1.0
        share = self.pairs or FIRST_SHARE
        for i in range(TRIES_AT_PAIRS if self.pairs else self.tries):
            allocation = self.choose_reachable(share)
            if i < len(POWERS):
                self.try_and_correct(allocation, before, hidden, POWERS[i])
            else:
                # The hidden states are not needed any more; free their memory.
                hidden.clear()
                self.try_allocation(allocation, before)
            if self.pairs is None and self.meets_budgets(self.tried[-1][1]):
                best = allocation
                high = share
            elif i >= len(POWERS):
                # An earlier failure sets no bound: with corrected losses the same share may hold.
                low = share
            # The geometric mean, and never below half of `high` in one step.
            share = self.pairs or math.sqrt(max(low, high / 4) * high)
        if self.pairs is None:
            return best
        best, _ = min(self.tried, key=lambda tried: max(self.losses_in_budgets(tried[1]).values()))
        return best

    def choose_reachable(self, share: float) -> Allocation:
        """Choose an allocation at a share of the cost, or the cheapest one if none costs as little.

        Raises:
            OutOfReach: The share was requested as `pairs` and cannot be reached.
        """
        try:
            return self.choose_allocation(share)
        except OutOfReach as error:
            if self.pairs:
                # Raise it again with the name of the cost: measured times have none.
                raise OutOfReach(share, error.cheapest, self.cost) from None
            return error.cheapest

    def try_and_correct(
        self,
        allocation: Allocation,
        before: dict[str, Score],
        hidden: dict[str, Tensor],
        power: float,
    ) -> None:
        """Try an allocation, and correct `costs` by what its heads lose jointly.

        Args:
            allocation: The allocation.
            before: Scores of the original model on the second texts.
            hidden: Its final hidden states on these texts.
            power: Strength of the correction, see `together.corrected`.
        """
        if not allocation.sparse:
            return self.try_allocation(allocation, before)
        self.enter_stage("corrections")
        after: dict[str, Score] = {}
        sums: dict[str, Tensor] = {}
        self.progress.describe(
            f"trying {allocation.pairs:.1%} of the pairs, and what heads lose together"
        )
        for name, item in self.texts[1].items():
            after[name], parts = self.measure_joint_loss(allocation, item, hidden[name])
            # Losses of texts and tasks are comparable in units of their budgets.
            weight = 0.0 if name in self.unable else 1 / self.weighting_budget(name)
            for layer, part in parts.items():
                sums[layer] = sums.get(layer, torch.zeros(())) + weight * part
            self.progress.advance(PARTS)
        self.tried.append((allocation, self.compute_losses(before, after)))
        self.corrections += 1
        self.costs = corrected(self.costs, self.rules, allocation, sums, power)
        self.enter_stage("search")

    def measure_joint_loss(
        self, allocation: Allocation, item: Item, hidden: Tensor
    ) -> tuple[Score, ByHead]:
        """Return the score of a text under an allocation, and the parts of all heads in its loss.

        The result is stored in `folder`, like the measurements.

        Args:
            allocation: The allocation.
            item: The text.
            hidden: Final hidden states [N, e] of the original model.
        """
        spans = getattr(item, "spans", None)
        stored = self.open_folder(allocation, item)
        found = stored.read_layer(TOGETHER) if stored and self.resume else None
        if found is None:
            self.apply_allocation(allocation)
            try:
                patched_hidden, parts = loss_parts(self.model, ids_of(item), hidden, spans)
            finally:
                unpatch_model(self.model)
            with torch.no_grad():
                score = self.evaluate_hidden(patched_hidden, item)
            numbers = torch.tensor([score.nats, score.exact], dtype=torch.float64)
            found = parts | {SCORE: numbers}
            if stored:
                stored.write_layer(TOGETHER, found)
        return Score(*found.pop(SCORE).tolist()), found

    def open_folder(self, allocation: Allocation, item: Item) -> MeasurementFolder | None:
        """Return the folder for the joint losses of a text under an allocation, if one is used."""
        if self.folder is None:
            return None
        spans = getattr(item, "spans", None)
        rules = [rule for heads in allocation.layers.values() for rule in heads]
        options = {
            "layers": list(allocation.layers),
            "spans": None if spans is None else [list(span) for span in spans],
        }
        name = fingerprint(self.model, ids_of(item), rules, **options)
        return MeasurementFolder(Path(self.folder) / name)

    def losses_in_budgets(self, losses: Losses) -> Losses:
        """Return losses in units of their budgets, without tasks that the original cannot do."""
        return {
            name: loss / self.weighting_budget(name)
            for name, loss in losses.items()
            if name not in self.unable
        }

    def weighting_budget(self, name: str) -> float:
        """Return the budget of a text or task, or the usual one of retrieval if it has none."""
        return self.find_budget(name) or USUAL_RETRIEVAL_BUDGET

    def make_comparison_texts(self) -> dict[str, Item]:
        """Return the third texts, a copied text, and a mixture of retrieval tasks if one fits."""
        texts = {
            name: item for name, item in self.texts[2].items() if not isinstance(item, Example)
        }
        items: dict[str, Item] = dict(texts)
        if self.tokenizer is not None:
            first_text = next(iter(texts.values()))
            last_text = list(texts.values())[-1]
            first = opening_tokens(self.tokenizer, first_text)
            items["copying"] = copying(first_text, self.length, first)
            # The seed of the third part, see `make_retrieval`.
            mixed = mixture(self.tokenizer, last_text, self.length, seed=3 * self.seed + 2)
            if mixed:
                items["mixture"] = mixed
        return items

    def compute_hidden(self, item: Item) -> Tensor:
        return final_hidden(self.model, ids_of(item))

    def evaluate_hidden(self, hidden: Tensor, item: Item) -> Any:
        if isinstance(item, Example):
            return score_hidden(hidden, self.head, item)
        return Score(loss_of(self.head, hidden, item, gradient=False)[0], 0.0)

    def compare_values(self, before: Score, after: Score) -> tuple[float, float, float]:
        return math.exp(before.nats), math.exp(after.nats), after.loss(before)

    def compute_losses(self, before: dict[str, Score], after: dict[str, Score]) -> Losses:
        """Return the loss of each text and of each retrieval task."""
        return super().compute_losses(self.average_tasks(before), self.average_tasks(after))

    def average_tasks(self, scores: dict[str, Score]) -> dict[str, Score]:
        """Replace the scores of the examples of each task by their mean."""
        # Scores do not say which part they belong to. That does not matter: every part that has
        # all these names has the same tasks under them.
        part = next(texts for texts in self.texts if scores.keys() <= texts.keys())
        items = {name: item for name, item in part.items() if isinstance(item, Example)}
        tasks = by_task(list(items.values()), [scores[name] for name in items])
        return {name: value for name, value in scores.items() if name not in items} | tasks

    def report_texts(self, before: dict[str, Score], after: dict[str, Score]) -> dict[str, Any]:
        """Return the part of the report about the third texts and the retrieval tasks."""
        first = self.average_tasks(before)
        last = self.average_tasks(after)
        keys = ("before", "after", "loss")
        texts: dict[str, Any] = {}
        retrieval: dict[str, Any] = {}
        for name, score in first.items():
            row: dict[str, Any] = dict(zip(keys, self.compare_values(score, last[name])))
            if name in before:
                texts[name] = row
            else:
                # Averaging replaced the names of examples by the name of their task.
                row |= {"exact_before": score.exact, "exact_after": last[name].exact}
                row |= {"right_before": score.right, "right_after": last[name].right}
                row["decides"] = self.find_budget(name) is not None
                retrieval[name] = row
        return {
            "cost": {"name": self.cost, "share": self.allocation.cost},
            "corrections": self.corrections,
            "texts": texts,
            "retrieval": retrieval,
        }
