"""Injection into a text encoder: one rule per layer, chosen by how far the embeddings move.

Read `EncoderInjection.search_allocation` for the search.
"""

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
from ..integration.attention.hosts import find_hosts
from ..mechanisms.base import HostCall
from .allocate import Allocation, choose
from .gradients import to_model
from .injection import MARGIN, Injection, Item, ids_of
from .rules import CandidateRule


@dataclass
class EncoderInjection(Injection):
    """Injection into a text encoder. The loss is 1 - cosine of mean-pooled embeddings.

    Each layer is measured under each rule while all others are exact. Several layers together
    lose more than the sum, so allocations are tried with smaller and smaller sums until the
    budget holds.
    """

    metric = "cosine"
    tries = 6
    unit = "layer"

    def count_steps(self) -> int:
        layers = len(list(find_hosts(self.model)))
        # Besides rules and tries: the original model on all three parts, and verification.
        return len(self.texts[0]) * (layers * len(self.rules) + self.tries + 4)

    def measure_rules(self) -> None:
        original = self.read_texts(self.texts[0])
        first = ids_of(next(iter(self.texts[0].values())))
        for name in self.find_whole_layers(first):
            self.progress.describe(f"measuring {name}")
            worst = []
            for rule in (*self.rules, *self.rivals):
                allocation = Allocation({name: (rule,)}, self.length)
                # The budget holds for every text, so the worst one counts.
                worst.append(max(self.measure_losses(allocation, 0, original).values()))
            self.alone[name] = torch.tensor([worst], dtype=torch.float64)
        self.costs = self.select_losses(self.rules)

    def find_whole_layers(self, ids: Tensor) -> list[str]:
        """Return the names of the layers that attend to a whole passage.

        Layers with windows or segments are cheap already and stay as they are.

        Args:
            ids: Token ids [B, N] of passages.

        Raises:
            ValueError: No layer attends to a whole passage.
        """
        found = set()

        def note_whole(_, arguments, name: str) -> None:
            if is_whole(arguments[0], self.length):
                found.add(name)

        # With gates at 0, the patched model still computes its own attention.
        patch_model(self.model, self.rules[0].base_config())
        try:
            with ExitStack() as hooks, torch.no_grad():
                for name, hyper in patched_layers(self.model):
                    hook = partial(note_whole, name=name)
                    hooks.enter_context(hyper.register_forward_pre_hook(hook))
                self.compute_hidden(ids)
        finally:
            unpatch_model(self.model)
        if not found:
            raise ValueError(
                f"{type(self.model).__name__}: no layer attends to all of {self.length} tokens; "
                "allowed: a length that some layer attends to, such as the segment length of a HAT "
                "model"
            )
        # In model order; a set has none.
        return [name for name, _ in find_hosts(self.model) if name in found]

    def search_allocation(self) -> Allocation | None:
        before = self.read_texts(self.texts[1])
        # At a given share of the cost there is only one choice: without corrections, a second try
        # would be the same.
        for halvings in range(1 if self.pairs else self.tries):
            loss = None if self.pairs else MARGIN * self.budget / 2**halvings
            allocation = choose(
                self.rules, self.costs, self.length, pairs=self.pairs, loss=loss, cost=self.cost
            )
            self.try_allocation(allocation, before)
            if self.pairs is not None or self.meets_budgets(self.tried[-1][1]):
                return allocation
        return None

    def choose_allocation(
        self, pairs: float, rules: Sequence[CandidateRule] | None = None
    ) -> Allocation:
        if rules is None:
            return choose(self.rules, self.costs, self.length, pairs=pairs, cost=self.cost)
        losses = self.select_losses(rules)
        return choose(rules, losses, self.length, pairs=pairs, cost=self.cost)

    def compute_hidden(self, item: Item) -> Tensor:
        return embed_passages(self.model, ids_of(item))

    def evaluate_hidden(self, hidden: Tensor, item: Item) -> Tensor:
        return hidden

    def compare_values(self, before: Tensor, after: Tensor) -> tuple[float, float, float]:
        loss = cosine_distance(before, after)
        return 1.0, 1 - loss, loss


def is_whole(call: HostCall, length: int) -> bool:
    """Return whether every token of a passage attends to all of it."""
    options = call.options
    if call.query.shape[2] != length or call.key.shape[2] != length:
        return False
    if (options.window or length) < length:
        return False
    if options.mask is None:
        return True
    # A mask is allowed if it only marks padding, and there is none.
    real = call.read_mask().real_if_only_padding
    return real is not None and bool(real.all())


def embed_passages(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the mean-pooled last hidden states [B, e] of passages [B, N]."""
    return model.base_model(to_model(ids, model)).last_hidden_state.float().mean(1)


def cosine_distance(before: Tensor, after: Tensor) -> float:
    """Return 1 - cosine of two embeddings [B, e], averaged over passages."""
    return 1 - F.cosine_similarity(after, before).mean().item()
