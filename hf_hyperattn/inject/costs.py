"""What a head costs under a rule, ordinary attention being 1: its pairs, its part of a cache, or its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ..engines import Options
from ..mechanisms.base import HostCall, Plan
from ..registry import get_mechanism
from .rules import CandidateRule

CostName = Literal["pairs", "bytes", "time"]
COSTS = get_args(CostName)
#: What a head costs under a rule at a length.
Cost = Callable[[CandidateRule, int], float]
#: The lowest of so many times counts; rules take turns.
ROUNDS = 3
#: Queries that are timed are sums of so many random vectors, of which the next query has all but one: neighbours choose
#: much the same pages, as they do in texts. Queries drawn apart do not, and the kernel then computes more for each.
ALIKE = 24


def cost_of(
    cost: CostName | Cost | None,
    rules: Sequence[CandidateRule],
    length: int,
    like: Tensor | None = None,
) -> Cost:
    """A cost by its name; a function is one.

    Args:
        rules: those that are asked for. length: tokens of a text.
        like: a query [G, d] of the heads that share a key, on the device that "time" is measured on; None: of one head
            and 64 numbers, on the CPU.

    Raises:
        ValueError: there is no such cost, or none for rules of encoders.
    """
    if callable(cost):
        return cost
    if cost not in (None, *COSTS):
        raise ValueError(
            f"cost is {cost!r}; allowed: {', '.join(COSTS)}, or a function of a rule and a length"
        )
    if cost in ("bytes", "time") and not all(rule.causal for rule in rules):
        raise ValueError(
            f"cost is {cost!r} for rules of an encoder, which keeps no cache; allowed: 'pairs', or a function"
        )
    if cost == "time":
        seconds = times(rules, length, torch.empty(1, 64) if like is None else like)
        return lambda rule, _: 1.0 if rule.is_exact else seconds[rule]
    return (lambda rule, n: rule.kept(n)) if cost == "bytes" else (lambda rule, n: rule.share(n))


@torch.no_grad()
def times(rules: Sequence[CandidateRule], length: int, like: Tensor) -> dict[CandidateRule, float]:
    """Time of a whole text, made at random, over that of ordinary attention; heads that share keys have the same rule.

    What such heads do once for all of them, as to bring keys in another order, would count too much at one head alone.
    """
    group, dim = like.shape
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(
        1, group + 2, length + ALIKE, dim, generator=generator, dtype=torch.float32
    ).to(like.device)
    sums = drawn[:, :group].cumsum(2)
    query = (sums[:, :, ALIKE:] - sums[:, :, :-ALIKE]) * ALIKE**-0.5
    key, value = drawn[:, group:, :length].split(1, 1)
    plan = Plan.from_call(
        HostCall(query, key, value, len(like) ** -0.5, True, Options(is_causal=True))
    )
    calls: dict[CandidateRule, Callable] = {rules[0].exact(): plan.run}
    for rule in rules:
        config = rule.layer_config([rule] * group, length)
        if not rule.is_exact:
            calls[rule] = (
                get_mechanism(config.mechanism).layer(config, None, "replace").change(plan).run
            )
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):  # the first of which sets up what is set up on first use
        for rule, run in calls.items():
            start = time.perf_counter()
            run()
            if like.is_cuda:
                torch.cuda.synchronize(like.device)
            found[rule] = min(found[rule], time.perf_counter() - start)
    return {rule: seconds / found[rules[0].exact()] for rule, seconds in found.items()}
