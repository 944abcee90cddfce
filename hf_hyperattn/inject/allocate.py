"""Choose a rule for every head: the smallest predicted loss at a given cost, or the reverse.

Read `choose` for the optimisation problem and `choose_at_price` for its solution at one price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import HyperAttnConfig
from ..config.fields import refuse
from .costs import Cost, CostName, resolve_cost
from .measure import Sensitivity
from .rules import CandidateRule

#: Halvings of the price interval. It spans up to 18 decades, so 60 halvings narrow it to the last
#: digit.
HALVINGS = 60
#: Tolerance between requested and found cost: the mean of many equal costs is rounded.
ROUNDING = 1e-9


class GroupTable(NamedTuple):
    """The rules of one group for one layer, sorted by cost.

    Args:
        rules: Exact attention and the n candidates of the group, the cheapest first.
        costs: Cost of each rule, [1 + n], float64.
        losses: Predicted loss of each head under each rule, [H, 1 + n].
        sharing: Number of consecutive heads that all pay for the most expensive rule among them.
    """

    rules: list[CandidateRule]
    costs: Tensor
    losses: Tensor
    sharing: int


#: For each layer name, one table per group of rules.
Tables = dict[str, list[GroupTable]]


@dataclass(frozen=True)
class Allocation:
    """A rule for every head of every layer.

    Args:
        layers: For each layer name, one rule per query head, all of one group. A single rule
            applies to all heads.
        length: Number of tokens of the texts that pairs are counted for.
        spent: Mean cost per head, in the cost that the allocation was chosen by. None: use its
            share of pairs.
    """

    layers: Mapping[str, tuple[CandidateRule, ...]]
    length: int
    spent: float | None = None

    @property
    def cost(self) -> float:
        """Return the cost as a share of the cost of ordinary attention."""
        return self.pairs if self.spent is None else self.spent

    @property
    def pairs(self) -> float:
        """Return the attention logits (pairs) as a share of ordinary attention, over all heads."""
        shares = [rule.share(self.length) for rules in self.layers.values() for rule in rules]
        return sum(shares) / len(shares)

    @property
    def sparse(self) -> dict[str, tuple[CandidateRule, ...]]:
        """Return the layers in which at least one head is not exact."""
        return {
            name: rules for name, rules in self.layers.items() if not all(r.is_exact for r in rules)
        }

    def config(self) -> HyperAttnConfig | None:
        """Return the config for `patch_model`, or None if every head is exact.

        Layers in which all heads are exact stay unpatched: their own attention is the fastest.
        """
        sparse = self.sparse
        if not sparse:
            return None
        first_rule = next(iter(sparse.values()))[0]
        overrides = {
            name: (rules[0].layer_config(rules, self.length),) for name, rules in sparse.items()
        }
        return HyperAttnConfig(
            (first_rule.base_config(),),
            layers=lambda host: host.name in sparse,
            mode="replace",
            overrides=overrides,
        )


class OutOfReach(ValueError):
    """Raised if no allocation is as cheap as requested.

    Attributes:
        cheapest: The cheapest allocation that exists.
    """

    def __init__(self, pairs: float, cheapest: Allocation, of: str):
        # Pass the raw arguments on: pickle rebuilds the error from them in another process.
        super().__init__(pairs, cheapest, of)
        self.cheapest = cheapest

    def __str__(self) -> str:
        pairs, cheapest, of = self.args
        return (
            f"{pairs:.1%} of stock's {of} is out of reach: the cheapest rules take "
            f"{cheapest.cost:.1%} at {cheapest.length:,} tokens; allowed: a larger share, or "
            "longer texts"
        )


def predicted_losses(
    measured: Sequence[Sensitivity], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """Average the measured losses over texts.

    Args:
        measured: One measurement per text, all of the same rules.
        weights: Weight of each text. None: all texts count the same.

    Returns:
        For each layer name, the expected loss of every rule at every head, [H, C], in nats per
        token.

    Raises:
        ValueError: `measured` is empty, or `weights` does not hold one finite number per text,
            from 0, with a positive sum.
    """
    if not measured:
        refuse("measured", measured, "what was measured of one text or more")
    shares = normalize_weights([1.0] * len(measured) if weights is None else weights, len(measured))

    def average_layer(name: str) -> Tensor:
        weighted = [share * m.costs[name] for share, m in zip(shares, measured)]
        return torch.stack(weighted).sum(0)

    return {name: average_layer(name) for name in measured[0].costs}


def normalize_weights(weights: Sequence[float], texts: int) -> list[float]:
    """Return the share of each text, or raise ValueError for unusable weights."""
    allowed = "one for each, finite, from 0, not all 0"
    if len(weights) != texts:
        raise ValueError(
            f"weights has {len(weights)} numbers for {texts} texts; allowed: {allowed}"
        )
    total = sum(weights)
    # The comparisons are written so that NaN fails them.
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
    """Choose a rule for every head: least loss within a cost, or least cost within a loss.

    Give either `pairs` or `loss`. The objective is loss + λ·cost. It separates over layers: each
    layer takes its best group of rules, and each head the best rule of that group. The price λ
    is found by halving.

    Args:
        rules: Candidate rules. Exact attention is always a further candidate.
        losses: For each layer name, the predicted loss of each rule at each head, [H, C].
        length: Number of tokens of the texts that costs are computed for.
        pairs: Largest allowed cost, as a share from 0 to 1 of the cost of ordinary attention.
        loss: Largest allowed sum of losses over layers and heads.
        cost: Cost of one head, where ordinary attention costs 1:

            - "pairs" or None: share of the attention logits that are computed.
            - "bytes": share of keys and values that `HierarchicalCache(evict=True)` keeps. Heads
              with a common key head all pay for the most expensive rule among them.
            - "time": measured now, for one head of dimension 64 on the CPU. Another run may
              therefore choose differently.
            - A function of a rule and a length.
        key_heads: For "bytes", the number of key heads of each layer. None: as many as query
            heads.

    Raises:
        OutOfReach: No allocation costs as little as `pairs`. This is a `ValueError`, too.
        ValueError: Both or neither of `pairs` and `loss` are given, or one is out of range; the
            cost is unknown, or is "bytes" or "time" for encoder rules; `key_heads` names a layer
            without losses.
    """
    check_choice(losses, pairs, loss, key_heads)
    cost_function = resolve_cost(cost, rules, length)
    tables = build_tables(rules, losses, length, cost_function)
    if cost == "bytes":
        tables = share_costs(tables, key_heads or {})
    if pairs is not None:
        # A high price gives the cheapest allocation; lower it while the cost still fits.
        made = search_price(
            tables, length, lambda spent, _: spent <= pairs, accepted=1e3, refused=1e-12
        )
        if made.cost > pairs * (1 + ROUNDING):
            raise OutOfReach(pairs, made, "cost" if callable(cost) else cost or "pairs")
        return made
    # A low price gives exact attention, which loses nothing; raise it while the loss still fits.
    most = 0.0 if loss is None else loss
    return search_price(tables, length, lambda _, total: total <= most, accepted=1e-12, refused=1e6)


def check_choice(
    losses: Mapping[str, Tensor],
    pairs: float | None,
    loss: float | None,
    key_heads: Mapping[str, int] | None,
) -> None:
    """Raise ValueError if the limits or the layers given to `choose` are invalid."""
    if (pairs is None) == (loss is None):
        raise ValueError(
            f"choose has {'no' if pairs is None else 'both'} pairs and loss; allowed: one of them"
        )
    # `not loss >= 0` instead of `loss < 0`, so that NaN is rejected.
    if pairs is not None and not 0 <= pairs <= 1 + ROUNDING:
        raise ValueError(f"pairs is {pairs}; allowed: a share from 0 to 1")
    if loss is not None and not loss >= 0:
        raise ValueError(f"loss is {loss}; allowed: 0 or more")
    if unknown := (key_heads or {}).keys() - losses.keys():
        raise ValueError(
            f"key_heads names {min(unknown)}; allowed: layers that have losses, such as "
            f"{min(losses)}"
        )


def build_tables(
    rules: Sequence[CandidateRule], losses: Mapping[str, Tensor], length: int, cost: Cost
) -> Tables:
    """Return the sorted costs and losses of every layer and group of rules.

    The heads of a layer must agree in their group, because one mechanism config describes them.
    """
    groups: dict[object, list[int]] = {}
    for i, rule in enumerate(rules):
        groups.setdefault((type(rule), rule.group), []).append(i)
    tables: Tables = {name: [] for name in losses}
    for columns in groups.values():
        members = [rules[columns[0]].exact(), *(rules[i] for i in columns)]
        costs = torch.tensor([cost(rule, length) for rule in members], dtype=torch.float64)
        # A stable sort makes the choice reproducible if several rules cost the same.
        costs, order = costs.sort(stable=True)
        members = [members[i] for i in order.tolist()]
        for name, lost in losses.items():
            exact = lost.new_zeros(len(lost), 1)
            with_exact = torch.cat([exact, lost[:, columns]], 1)
            tables[name].append(
                GroupTable(rules=members, costs=costs, losses=with_exact[:, order], sharing=1)
            )
    return tables


def share_costs(tables: Tables, key_heads: Mapping[str, int]) -> Tables:
    """Return the tables for a cost that heads with a common key head pay together."""
    shared: Tables = {}
    for name, groups in tables.items():
        heads = len(groups[0].losses)
        keys = key_heads.get(name, heads)
        shared[name] = [
            table._replace(sharing=table.rules[0].sharing(heads, keys)) for table in groups
        ]
    return shared


def search_price(
    tables: Tables,
    length: int,
    fits: Callable[[float, float], bool],
    accepted: float,
    refused: float,
) -> Allocation:
    """Return the fitting allocation whose price is nearest to `refused`.

    Args:
        tables: Costs and losses of all layers.
        length: Number of tokens that the allocation is for.
        fits: Whether a mean cost and a total loss are allowed.
        accepted: Price at one end of the interval. Its allocation is the fallback.
        refused: Price at the other end.
    """
    best, _, _ = choose_at_price(tables, accepted, length)
    for _ in range(HALVINGS):
        # The geometric mean, because the interval spans many orders of magnitude.
        price = math.sqrt(accepted * refused)
        allocation, spent, total = choose_at_price(tables, price, length)
        if fits(spent, total):
            accepted = price
            best = allocation
        else:
            refused = price
    return best


def choose_at_price(tables: Tables, price: float, length: int) -> tuple[Allocation, float, float]:
    """Choose the best rules if one unit of cost has this price.

    Returns:
        The allocation, the mean cost per head, and the sum of all losses.
    """
    layers: dict[str, tuple[CandidateRule, ...]] = {}
    spent: list[float] = []
    total = 0.0
    for name, groups in tables.items():
        options = [choose_in_group(table, price) for table in groups]
        best = min(range(len(options)), key=lambda i: options[i][0])
        _, columns = options[best]
        rules, costs, losses, sharing = groups[best]
        layers[name] = tuple(rules[i] for i in columns[:, 0].tolist())
        # Each head is charged the most expensive rule among the heads that share its cost.
        charged = costs[columns].view(-1, sharing).amax(1).repeat_interleave(sharing)
        spent += charged.tolist()
        total += losses.gather(1, columns).sum().item()
    mean = sum(spent) / len(spent)
    return Allocation(layers, length, mean), mean, total


def choose_in_group(table: GroupTable, price: float) -> tuple[float, Tensor]:
    """Choose one rule of a group for each head of a layer.

    Returns:
        The smallest loss + price·cost, and the column of each head's rule, [H, 1].
    """
    # Column c: the least loss among rules that cost at most as much as rule c, and that rule.
    least, best_rule = table.losses.cummin(1)
    # Heads that share a cost agree on a limit c. Below it, each head uses its own best rule.
    shared_losses = least.unflatten(0, (-1, table.sharing)).sum(1)
    shared_costs = price * table.sharing * table.costs
    value, limit = (shared_losses + shared_costs).min(1)
    columns = best_rule.gather(1, limit.repeat_interleave(table.sharing)[:, None])
    return value.sum().item(), columns
