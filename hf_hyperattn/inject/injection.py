"""Injection as a whole: measure rules, allocate them, try the allocation, verify it on text that had no part in it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..analysis.cost import PeakMemory, attention_times
from ..integration import patch_model, unpatch_model
from ..integration.hosts import find_hosts
from .allocate import Allocation, choose, predicted_losses
from .gradients import final_hidden, head_of, loss_of, to_model
from .measure import Sensitivity, measure
from .rules import SparseRule

#: The part that is chosen on must keep this much of the budget: the texts to come are others.
MARGIN = 0.8
LAYER_STEPS = 10  # progress steps of the measurement of a layer; a pass over a text is one
Losses = dict[str, float]  # by text


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
        budget: largest loss. pairs: compute this share of the pairs, whatever it costs.

    Attributes:
        tried: all allocations that were tried, with their losses on the texts to choose on.
        allocation: what the model is patched with in the end.
    """

    model: PreTrainedModel
    texts: Sequence[dict[str, Tensor]]
    rules: Sequence[SparseRule]
    length: int
    budget: float
    pairs: float | None = None
    tried: list[tuple[Allocation, Losses]] = field(default_factory=list, init=False)
    allocation: Allocation = field(init=False)
    metric: ClassVar[str]
    tries: ClassVar[int]

    @abstractmethod
    def steps(self) -> int:
        """Of the progress."""

    @abstractmethod
    def measure(self) -> None:
        """Find what every rule costs, on the first texts."""

    @abstractmethod
    def search(self, before: dict[str, Any]) -> Allocation | None:
        """The allocation of fewest pairs that keeps `MARGIN` of the budget on the second texts, None if none does."""

    @abstractmethod
    def hidden(self, ids: Tensor) -> Tensor:
        """What the model makes of one text; this is timed."""

    @abstractmethod
    def value(self, hidden: Tensor, ids: Tensor) -> Any:
        """What `scores` compares."""

    @abstractmethod
    def scores(self, before: Any, after: Any) -> tuple[float, float, float]:
        """The metric before and after, and the loss, of one text."""

    def run(self, progress: Progress) -> dict[str, Any]:
        """The whole of it; a report, as plain data, of pairs, loss, time and memory on the held-out texts.

        Raises:
            ValueError: no rule keeps the budget, or the model is of another kind.
        """
        self.progress, (_, choosing, held_out) = progress, self.texts
        self.measure()
        progress.describe("the model as it is")
        allocation = self.search(self.read(choosing)[0])
        config = None if allocation is None else allocation.config()
        if allocation is None or config is None:
            raise ValueError(
                f"no rule keeps within the budget of {self.budget:g} on these texts: all attention stays exact; "
                "allowed: a larger budget, or longer texts"
            )
        self.allocation = allocation
        progress.describe("verifying on held-out text")
        stock = self.read_held_out()
        patch_model(self.model, config)
        sparse = self.read_held_out()
        times = attention_times(self.model, next(iter(held_out.values())))
        scores = {name: self.scores(value, sparse[0][name]) for name, value in stock[0].items()}
        pair = lambda before, after: {"before": before, "after": after}
        return {
            "metric": self.metric,
            "pairs": allocation.pairs,
            "texts": {name: pair(a, b) | {"loss": loss} for name, (a, b, loss) in scores.items()},
            "seconds": pair(stock[1], sparse[1]),
            "attention_seconds": pair(*times),
            "memory": pair(stock[2], sparse[2]),
            "length": self.length,
        }

    @torch.no_grad()
    def read(self, texts: dict[str, Tensor]) -> tuple[dict[str, Any], float]:
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
        return {name: self.scores(value, after[name])[2] for name, value in before.items()}

    def fits(self, allocation: Allocation, before: dict[str, Any]) -> bool:
        """Try an allocation on the second texts: whether it keeps `MARGIN` of the budget, where there is one."""
        self.progress.describe(f"trying {allocation.pairs:.1%} of the pairs")
        losses = self.losses_under(allocation, 1, before)
        self.tried.append((allocation, losses))
        return self.pairs is not None or max(losses.values()) <= MARGIN * self.budget


@dataclass
class CausalInjection(Injection):
    """Of a causal language model: rules by head; the loss is relative perplexity, 0.02 being 2 % more.

    rows, seed: the sampled queries.
    """

    rows: int = 384
    seed: int = 0
    measured: list[Sensitivity] = field(default_factory=list, init=False)
    metric, tries = "perplexity", 5

    def steps(self) -> int:
        layers = sum(1 for m in self.model.modules() if hasattr(m, "layer_idx")) or 1
        return len(self.texts[0]) * (LAYER_STEPS * layers + self.tries + 3)

    def measure(self) -> None:
        self.head = head_of(self.model, next(iter(self.texts[0].values())))
        step = lambda _: self.progress.advance(LAYER_STEPS)
        for name, ids in self.texts[0].items():
            self.progress.describe(f"measuring on {name}")
            options: Any = {"rows": self.rows, "seed": self.seed, "on_layer": step}
            self.measured.append(measure(self.model, ids, self.rules, **options))
        if not self.measured[0].costs:
            raise ValueError(
                f"{type(self.model).__name__}: no layer attends causally to all of {self.length} tokens; allowed: "
                "models without sliding windows as short, soft caps or position biases"
            )

    def search(self, before: dict[str, float]) -> Allocation | None:
        """As in `Injection`. A text that loses more than the others gets more weight in the next choice."""
        weights, best, low, high = [1.0] * len(self.measured), None, 0.0, 1.0
        pairs = self.pairs or 0.4
        for _ in range(1 if self.pairs else self.tries):
            predicted = predicted_losses(self.measured, weights)
            allocation = choose(self.rules, predicted, self.length, pairs=pairs)
            if self.fits(allocation, before):
                best, high = allocation, pairs
            else:
                low = pairs
            weights = reweighted(weights, list(self.tried[-1][1].values()))
            pairs = math.sqrt(max(low, high / 4) * high)
        return best

    def hidden(self, ids: Tensor) -> Tensor:
        return final_hidden(self.model, ids)

    def value(self, hidden: Tensor, ids: Tensor) -> float:
        return loss_of(self.head, hidden, ids, gradient=False)[0]

    def scores(self, before: float, after: float) -> tuple[float, float, float]:
        return math.exp(before), math.exp(after), math.expm1(after - before)


@dataclass
class EncoderInjection(Injection):
    """Of an encoder of text: rules by layer; the loss is 1 - cosine of mean-pooled embeddings.

    What a layer loses is measured under each rule alone. What several lose together is more than the sum, so that the
    allocation is tried, with a smaller sum until the budget holds.
    """

    costs: dict[str, Tensor] = field(default_factory=dict, init=False)
    metric, tries = "cosine", 6

    def steps(self) -> int:
        return len(self.texts[0]) * (len(list(find_hosts(self.model))) * len(self.rules) + self.tries + 4)

    def measure(self) -> None:
        plain, _ = self.read(self.texts[0])
        for name, _ in find_hosts(self.model):
            self.progress.describe(f"measuring {name}")
            alone = (Allocation({name: (rule,)}, self.length) for rule in self.rules)
            worst = [max(self.losses_under(allocation, 0, plain).values()) for allocation in alone]
            self.costs[name] = torch.tensor([worst], dtype=torch.float64)

    def search(self, before: dict[str, Tensor]) -> Allocation | None:
        for halvings in range(1 if self.pairs else self.tries):
            loss = MARGIN * self.budget / 2**halvings
            allocation = choose(self.rules, self.costs, self.length, pairs=self.pairs, loss=loss)
            if self.fits(allocation, before):
                return allocation
        return None

    def hidden(self, ids: Tensor) -> Tensor:
        return embeddings(self.model, ids)

    def value(self, hidden: Tensor, ids: Tensor) -> Tensor:
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


def reweighted(weights: list[float], losses: list[float]) -> list[float]:
    """More weight for the texts that lose more than the mean, at most four times as much a step."""
    mean = max(sum(max(x, 0.0) for x in losses) / len(losses), 1e-6)
    changed = [w * min(4.0, max(0.25, x / mean)) for w, x in zip(weights, losses)]
    return [w * len(changed) / sum(changed) for w in changed]
