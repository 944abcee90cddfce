"""Allocates a rule to every head: the least predicted loss at a number of pairs, and the config that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import HyperAttnConfig
from ..fields import refuse
from .costs import Cost, CostName, cost_of
from .measure import Sensitivity
from .rules import CandidateRule

#: Halvings of the interval that the price of a pair is looked for in.
HALVINGS = 60
#: How far a cost may lie above the share that was asked for: the mean of many equal costs is rounded.
ROUNDING = 1e-9
#: By layer, for each group: exact attention and the other n rules, the cheapest first, their costs [1 + n], their
#: losses [H, 1 + n], and how many heads share what the dearest of them costs.
Tables = dict[str, list[tuple[list[CandidateRule], Tensor, Tensor, int]]]


@dataclass(frozen=True)
class Allocation:
    """A rule for every head of every layer.

    Args:
        layers: by name, a rule for each query head, all of one group; or a single one for all heads.
        length: tokens of the texts that pairs are counted for.
        spent: the mean cost of a head, by the cost that it was chosen by; None: its pairs.
    """

    layers: Mapping[str, tuple[CandidateRule, ...]]
    length: int
    spent: float | None = None

    @property
    def cost(self) -> float:
        """What it costs, in proportion to ordinary attention."""
        return self.pairs if self.spent is None else self.spent

    @property
    def pairs(self) -> float:
        """Pairs computed, in proportion to ordinary attention, over all heads."""
        shares = [rule.share(self.length) for rules in self.layers.values() for rule in rules]
        return sum(shares) / len(shares)

    @property
    def sparse(self) -> dict[str, tuple[CandidateRule, ...]]:
        """The layers of which some head is not exact."""
        return {
            name: rules for name, rules in self.layers.items() if not all(r.is_exact for r in rules)
        }

    def config(self) -> HyperAttnConfig | None:
        """What `patch_model` takes; None where every head is exact. Layers whose heads all are stay unpatched."""
        sparse = self.sparse
        if not sparse:
            return None
        return HyperAttnConfig(
            (next(iter(sparse.values()))[0].base_config(),),
            layers=lambda host: host.name in sparse,
            mode="replace",
            overrides={
                name: (rules[0].layer_config(rules, self.length),) for name, rules in sparse.items()
            },
        )


class OutOfReach(ValueError):
    """No allocation is as cheap as was asked for.

    Attributes:
        cheapest: the cheapest that there is.
    """

    def __init__(self, pairs: float, cheapest: Allocation, of: str):
        super().__init__(
            pairs, cheapest, of
        )  # as they are, so that another process can make it again
        self.cheapest = cheapest

    def __str__(self) -> str:
        pairs, cheapest, of = self.args
        return (
            f"{pairs:.1%} of stock's {of} is out of reach: the cheapest rules take {cheapest.cost:.1%} at "
            f"{cheapest.length:,} tokens; allowed: a larger share, or longer texts"
        )


def predicted_losses(
    measured: Sequence[Sensitivity], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """The loss a token that every rule of every head is expected to cost, [H, C] by layer.

    Args:
        measured: one for each text, of the same rules.
        weights: of the texts; None: the same for all.

    Raises:
        ValueError: weights that are not one for each text, finite, from 0, not all 0; no text.
    """
    if not measured:
        refuse("measured", measured, "what was measured of one text or more")
    shares = checked_weights([1.0] * len(measured) if weights is None else weights, len(measured))
    of_layer = lambda name: torch.stack(
        [share * m.costs[name] for share, m in zip(shares, measured)]
    ).sum(0)
    return {name: of_layer(name) for name in measured[0].costs}


def checked_weights(weights: Sequence[float], texts: int) -> list[float]:
    """The share of each text."""
    allowed = "one for each, finite, from 0, not all 0"
    if len(weights) != texts:
        raise ValueError(
            f"weights has {len(weights)} numbers for {texts} texts; allowed: {allowed}"
        )
    total = sum(weights)
    if not all(weight >= 0 for weight in weights) or not 0 < total < math.inf:
        refuse("weights", weights, allowed)
    return [weight / total for weight in weights]


def choose(
    rules: Sequence[CandidateRule],
    losses: Mapping[str, Tensor],
    length: int,
    *,
    pairs: float | None = None,
    loss: float | None = None,
    cost: CostName | Cost | None = None,
    key_heads: Mapping[str, int] | None = None,
) -> Allocation:
    """The allocation of least loss at no more than `pairs` of the cost, or the cheapest with no more than `loss`.

    One of both is given.

    Loss plus λ times cost is least where every layer takes the group, and in it every head the rule, for which it is
    least; λ is found by halving.

    Args:
        rules: the candidates; exact attention is always one more.
        losses: by layer what they cost, [H, C].
        length: tokens of the texts that costs are counted for.
        pairs: a share from 0 to 1, of the cost of ordinary attention. loss: the sum over layers and heads.
        cost: what a head costs under a rule at a length, ordinary attention being 1: "pairs" (or None); "bytes", what
            `HierarchicalCache(evict=True)` keeps of its keys and values, where heads that share a key head cost what
            the dearest of them does; "time", measured here and now, of one head of 64 numbers on the CPU, so that
            another run may choose otherwise; or a function of your own.
        key_heads: by layer, for "bytes"; None: as many as query heads.

    Raises:
        OutOfReach: no allocation costs as little as `pairs`; a ValueError, as the others are.
        ValueError: `pairs` and `loss` are both given, or none, or out of range; there is no such cost, or it is "bytes"
            or "time" of rules for encoders; `key_heads` names a layer that has no losses.
    """
    if (pairs is None) == (loss is None):
        raise ValueError(
            f"choose has {'no' if pairs is None else 'both'} pairs and loss; allowed: one of them"
        )
    if pairs is not None and not 0 <= pairs <= 1 + ROUNDING:
        raise ValueError(f"pairs is {pairs}; allowed: a share from 0 to 1")
    if loss is not None and not loss >= 0:
        raise ValueError(f"loss is {loss}; allowed: 0 or more")
    if strange := (key_heads or {}).keys() - losses.keys():
        raise ValueError(
            f"key_heads names {min(strange)}; allowed: layers that have losses, such as {min(losses)}"
        )
    of = cost_of(cost, rules, length)
    groups: dict[object, list[int]] = {}
    for i, rule in enumerate(rules):
        groups.setdefault((type(rule), rule.group), []).append(i)
    tables: Tables = {name: [] for name in losses}
    for index in groups.values():
        members = [rules[index[0]].exact(), *(rules[i] for i in index)]
        shares, order = torch.tensor(
            [of(rule, length) for rule in members], dtype=torch.float64
        ).sort(stable=True)
        members = [members[i] for i in order.tolist()]
        for name, lost in losses.items():
            heads = len(lost)
            shared = (
                members[0].sharing(heads, (key_heads or {}).get(name, heads))
                if cost == "bytes"
                else 1
            )
            all_ = torch.cat([lost.new_zeros(heads, 1), lost[:, index]], 1)
            tables[name].append((members, shares, all_[:, order], shared))
    if pairs is not None:
        made = search(tables, length, lambda spent, _: spent <= pairs, accepted=1e3, refused=1e-12)
        if made.cost > pairs * (1 + ROUNDING):
            raise OutOfReach(pairs, made, "cost" if callable(cost) else cost or "pairs")
        return made
    most = 0.0 if loss is None else loss
    return search(tables, length, lambda _, total: total <= most, accepted=1e-12, refused=1e6)


def search(
    tables: Tables,
    length: int,
    fits: Callable[[float, float], bool],
    accepted: float,
    refused: float,
) -> Allocation:
    """The allocation at the last price whose cost and loss fit, from the price `accepted` towards `refused`."""
    best, _, _ = at_price(tables, accepted, length)
    for _ in range(HALVINGS):
        price = math.sqrt(accepted * refused)
        allocation, spent, total = at_price(tables, price, length)
        if fits(spent, total):
            accepted, best = price, allocation
        else:
            refused = price
    return best


def at_price(tables: Tables, price: float, length: int) -> tuple[Allocation, float, float]:
    """The best rules where the whole cost of a head has this price, the mean of their costs, and all their losses."""
    layers, spent, total = {}, [], 0.0
    for name, groups in tables.items():
        options = []
        for members, shares, losses, shared in groups:
            least, rule = losses.cummin(1)  # of the rules that cost no more
            value, most = (least.unflatten(0, (-1, shared)).sum(1) + price * shared * shares).min(1)
            index = rule.gather(1, most.repeat_interleave(shared)[:, None])
            dearest = shares[index].view(-1, shared).amax(1).repeat_interleave(shared)
            options.append((value.sum().item(), members, dearest, losses, index))
        _, members, costs, losses, index = min(options, key=lambda option: option[0])
        layers[name] = tuple(members[i] for i in index[:, 0].tolist())
        spent += costs.tolist()
        total += losses.gather(1, index).sum().item()
    mean = sum(spent) / len(spent)
    return Allocation(layers, length, mean), mean, total
