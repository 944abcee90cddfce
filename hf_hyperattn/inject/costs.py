"""Cost of one head under a rule, relative to ordinary attention: pairs, cache bytes or time.

Read `resolve_cost` for the three named costs and `measure_times` for how time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ..analysis.cost import read_clock
from ..config.registry import get_mechanism
from ..engines import Options
from ..mechanisms.base import HostCall, Plan
from .rules import CandidateRule

CostName = Literal["pairs", "bytes", "time"]
COSTS = get_args(CostName)
#: Cost of a head under a rule at a text length, where ordinary attention costs 1.
Cost = Callable[[CandidateRule, int], float]
#: Timed runs per rule; the fastest counts. Rules take turns, so that a slow phase of the machine
#: affects all of them.
ROUNDS = 3
#: Each timed query is the sum of this many random vectors and shares all but one with the next
#: query. Neighbouring queries then choose similar pages, as they do in real texts. With
#: independent queries the kernel would have to read more pages.
ALIKE = 24


def resolve_cost(
    cost: CostName | Cost | None,
    rules: Sequence[CandidateRule],
    length: int,
    like: Tensor | None = None,
) -> Cost:
    """Return the cost function of a name. A function is returned as it is.

    Args:
        cost: Name of a cost, a function, or None for "pairs".
        rules: Rules that the cost function will be called with.
        length: Number of tokens of a text.
        like: For "time": an example [G, d] of the queries of one key head, on the device to
            measure on. None: one head of dimension 64 on the CPU.

    Raises:
        ValueError: The name is unknown, or the cost is not defined for encoder rules.
    """
    if callable(cost):
        return cost
    if cost not in (None, *COSTS):
        raise ValueError(
            f"cost is {cost!r}; allowed: {', '.join(COSTS)}, or a function of a rule and a length"
        )
    if cost in ("bytes", "time") and not all(rule.causal for rule in rules):
        raise ValueError(
            f"cost is {cost!r} for rules of an encoder, which keeps no cache; allowed: 'pairs', "
            "or a function"
        )
    if cost == "time":
        # Measured here, once, so that all choices of a run use the same times.
        seconds = measure_times(rules, length, torch.empty(1, 64) if like is None else like)
        return lambda rule, _: 1.0 if rule.is_exact else seconds[rule]
    if cost == "bytes":
        return lambda rule, n: rule.kept(n)
    return lambda rule, n: rule.share(n)


@torch.no_grad()
def measure_times(
    rules: Sequence[CandidateRule], length: int, like: Tensor
) -> dict[CandidateRule, float]:
    """Measure the time of each rule on a random text, relative to ordinary attention.

    All heads of a key head run with the same rule. A single head would be charged too much for
    work that is done once per key head, such as reordering the keys.

    Args:
        rules: Rules to time. The first one must provide `exact`.
        length: Number of tokens of the text.
        like: An example [G, d] of the queries of one key head, on the device to measure on.
    """
    calls = prepare_calls(rules, length, like)
    fastest = dict.fromkeys(calls, float("inf"))
    # The first round also pays for one-time setup. The minimum over rounds removes that.
    for _ in range(ROUNDS):
        for rule, call in calls.items():
            start = read_clock()
            call()
            fastest[rule] = min(fastest[rule], read_clock() - start)
    exact = fastest[rules[0].exact()]
    return {rule: seconds / exact for rule, seconds in fastest.items()}


def prepare_calls(
    rules: Sequence[CandidateRule], length: int, like: Tensor
) -> dict[CandidateRule, Callable]:
    """Return, for ordinary attention and for each rule, a function that computes a random text."""
    group, dim = like.shape
    generator = torch.Generator().manual_seed(0)
    shape = (1, group + 2, length + ALIKE, dim)
    # Draw on the CPU, so that the same text is timed on every device.
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32).to(like.device)
    # A difference of two running sums is the sum of `ALIKE` neighbouring vectors.
    sums = drawn[:, :group].cumsum(2)
    query = (sums[:, :, ALIKE:] - sums[:, :, :-ALIKE]) * ALIKE**-0.5
    key, value = drawn[:, group:, :length].split(1, 1)
    plan = Plan.from_call(HostCall(query, key, value, dim**-0.5, True, Options(is_causal=True)))
    calls: dict[CandidateRule, Callable] = {rules[0].exact(): plan.run}
    for rule in rules:
        config = rule.layer_config([rule] * group, length)
        if not rule.is_exact:
            layer = get_mechanism(config.mechanism).layer(config, None, "replace")
            calls[rule] = layer.change(plan).run
    return calls
