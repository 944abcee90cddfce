"""Allocates a rule to every head: the least predicted loss at a number of pairs, and the config that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import HyperAttnConfig
from .measure import Sensitivity
from .rules import SparseRule

#: Halvings of the interval that the price of a pair is looked for in.
HALVINGS = 60


@dataclass(frozen=True)
class Allocation:
    """A rule for every head of every layer.

    Args:
        layers: by name, a rule for each query head, all of one group; or a single one for all heads.
        length: tokens of the texts that pairs are counted for.
    """

    layers: Mapping[str, tuple[SparseRule, ...]]
    length: int

    @property
    def pairs(self) -> float:
        """Pairs computed, in proportion to ordinary attention, over all heads."""
        shares = [rule.share(self.length) for rules in self.layers.values() for rule in rules]
        return sum(shares) / len(shares)

    @property
    def sparse(self) -> dict[str, tuple[SparseRule, ...]]:
        """The layers of which some head is not exact."""
        return {name: rules for name, rules in self.layers.items() if not all(r.is_exact for r in rules)}

    def config(self) -> HyperAttnConfig | None:
        """What `patch_model` takes; None where every head is exact. Layers whose heads all are stay unpatched."""
        sparse = self.sparse
        if not sparse:
            return None
        return HyperAttnConfig(
            (next(iter(sparse.values()))[0].base_config(),),
            layers=lambda host: host.name in sparse,
            mode="replace",
            overrides={name: (rules[0].layer_config(rules, self.length),) for name, rules in sparse.items()},
        )


def predicted_losses(
    measured: Sequence[Sensitivity], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """The loss a token that every rule of every head is expected to cost, [H, C] by layer.

    Args:
        measured: one for each text, of the same rules.
        weights: of the texts; None: the same for all.
    """
    weights = weights or [1.0] * len(measured)
    total = sum(weights)
    return {
        name: torch.stack([w / total * m.costs[name] for w, m in zip(weights, measured)]).sum(0)
        for name in measured[0].costs
    }


def choose(
    rules: Sequence[SparseRule],
    losses: Mapping[str, Tensor],
    length: int,
    *,
    pairs: float | None = None,
    loss: float | None = None,
) -> Allocation:
    """The allocation of least loss with no more than `pairs` of all pairs, or of fewest pairs with no more than `loss`.

    Loss plus λ times pairs is least where every layer takes the group, and in it every head the rule, for which it is
    least; λ is found by halving.

    Args:
        rules: the candidates; exact attention is always one more.
        losses: by layer what they cost, [H, C].
        length: tokens of the texts that pairs are counted for.
        pairs: a share from 0 to 1. loss: the sum over layers and heads.
    """
    groups = by_group(rules, length)
    tables = {name: [(g, table_of(g, costs)) for g in groups] for name, costs in losses.items()}
    if pairs is not None:
        return search(tables, length, lambda some, _: some.pairs <= pairs, dear=1e3, cheap=1e-12)
    return search(tables, length, lambda _, total: total <= (loss or 0.0), dear=1e-12, cheap=1e6)


@dataclass(frozen=True)
class Group:
    """Rules that may stand in one layer, exact attention first; where the others are among all; shares [1 + n]."""

    rules: list[SparseRule]
    index: list[int]
    shares: Tensor


def by_group(rules: Sequence[SparseRule], length: int) -> list[Group]:
    """The candidates by what one layer may have."""
    groups: dict[object, list[int]] = {}
    for i, rule in enumerate(rules):
        groups.setdefault((type(rule), rule.group), []).append(i)
    return [
        Group(members, index, torch.tensor([r.share(length) for r in members], dtype=torch.float64))
        for index in groups.values()
        for members in [[rules[index[0]].exact(), *(rules[i] for i in index)]]
    ]


def table_of(group: Group, losses: Tensor) -> Tensor:
    """The losses of a group's rules, [H, 1 + n]; exact attention loses nothing."""
    return torch.cat([losses.new_zeros(len(losses), 1), losses[:, group.index]], 1)


def search(tables, length: int, fits: Callable[[Allocation, float], bool], dear: float, cheap: float):
    """The allocation at the last price that `fits`, going from the price `dear`, which does, towards `cheap`."""
    best, _ = at_price(tables, dear, length)
    for _ in range(HALVINGS):
        price = math.sqrt(dear * cheap)
        allocation, total = at_price(tables, price, length)
        if fits(allocation, total):
            dear, best = price, allocation
        else:
            cheap = price
    return best


def at_price(tables, price: float, length: int) -> tuple[Allocation, float]:
    """The best rules where all pairs of a head cost `price`, and the sum of their losses."""
    layers, total = {}, 0.0
    for name, groups in tables.items():
        options = []
        for group, losses in groups:
            cost, index = (losses + price * group.shares).min(1)
            options.append((cost.sum().item(), group, losses, index))
        _, group, losses, index = min(options, key=lambda option: option[0])
        layers[name] = tuple(group.rules[i] for i in index.tolist())
        total += losses.gather(1, index[:, None]).sum().item()
    return Allocation(layers, length), total
