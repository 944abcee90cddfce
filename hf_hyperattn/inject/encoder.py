"""Injection into an encoder of text: rules by layer, chosen by what its embeddings lose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..analysis.cost import patched_layers
from ..integration import patch_model, unpatch_model
from ..integration.hosts import find_hosts
from ..mechanisms.base import HostCall
from .allocate import Allocation, choose
from .gradients import to_model
from .injection import MARGIN, Injection, Item, ids_of
from .rules import CandidateRule


@dataclass
class EncoderInjection(Injection):
    """Of an encoder of text: rules by layer; the loss is 1 - cosine of mean-pooled embeddings.

    What a layer loses is measured under each rule alone. What several lose together is more than the sum, so that the
    allocation is tried, with a smaller sum until the budget holds.
    """

    metric, tries, unit = "cosine", 6, "layer"

    def steps(self) -> int:
        return len(self.texts[0]) * (
            len(list(find_hosts(self.model))) * len(self.rules) + self.tries + 4
        )

    def measure(self) -> None:
        plain = self.read(self.texts[0])
        for name in self.whole_layers(ids_of(next(iter(self.texts[0].values())))):
            self.progress.describe(f"measuring {name}")
            alone = (
                Allocation({name: (rule,)}, self.length) for rule in (*self.rules, *self.rivals)
            )
            worst = [max(self.losses_under(allocation, 0, plain).values()) for allocation in alone]
            self.alone[name] = torch.tensor([worst], dtype=torch.float64)
        self.costs = self.losses_of(self.rules)

    def whole_layers(self, ids: Tensor) -> list[str]:
        """The layers that attend to all of a passage; those of windows or segments stay as they are.

        Raises:
            ValueError: there is none.
        """
        found = set()

        def see(_, arguments, name: str) -> None:
            if is_whole(arguments[0], self.length):
                found.add(name)

        patch_model(
            self.model, self.rules[0].base_config()
        )  # gates at 0: the attention is the model's own
        try:
            with ExitStack() as hooks, torch.no_grad():
                for name, hyper in patched_layers(self.model):
                    hooks.enter_context(hyper.register_forward_pre_hook(partial(see, name=name)))
                self.hidden(ids)
        finally:
            unpatch_model(self.model)
        if not found:
            raise ValueError(
                f"{type(self.model).__name__}: no layer attends to all of {self.length} tokens; allowed: a length that "
                "some layer attends to, such as that of the segments of a HAT model"
            )
        return [name for name, _ in find_hosts(self.model) if name in found]

    def search(self) -> Allocation | None:
        before = self.read(self.texts[1])
        for halvings in range(1 if self.pairs else self.tries):
            loss = None if self.pairs else MARGIN * self.budget / 2**halvings
            allocation = choose(
                self.rules, self.costs, self.length, pairs=self.pairs, loss=loss, cost=self.cost
            )
            self.attempt(allocation, before)
            if self.pairs is not None or self.keeps(self.tried[-1][1]):
                return allocation
        return None

    def choose(self, pairs: float, rules: Sequence[CandidateRule] | None = None) -> Allocation:
        rules, losses = (
            (self.rules, self.costs) if rules is None else (rules, self.losses_of(rules))
        )
        return choose(rules, losses, self.length, pairs=pairs, cost=self.cost)

    def hidden(self, item: Item) -> Tensor:
        return embeddings(self.model, ids_of(item))

    def value(self, hidden: Tensor, item: Item) -> Tensor:
        return hidden

    def scores(self, before: Tensor, after: Tensor) -> tuple[float, float, float]:
        loss = distance(before, after)
        return 1.0, 1 - loss, loss


def is_whole(call: HostCall, length: int) -> bool:
    """Whether every token of a passage attends to all of it."""
    options = call.options
    if (
        call.query.shape[2] != length
        or call.key.shape[2] != length
        or (options.window or length) < length
    ):
        return False
    real = None if options.mask is None else call.read_mask().real_if_only_padding
    return options.mask is None or (real is not None and bool(real.all()))


def embeddings(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean-pooled last hidden states [B, e] of passages [B, N]."""
    return model.base_model(to_model(ids, model)).last_hidden_state.float().mean(1)


def distance(before: Tensor, after: Tensor) -> float:
    """1 - cosine of embeddings [B, e], mean over passages."""
    return 1 - F.cosine_similarity(after, before).mean().item()
