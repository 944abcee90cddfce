"""Pairs, cache bytes and time as what an allocation costs: against every combination, and against what caches hold."""

import itertools
import math
import pickle

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn import HierarchicalCache
from hf_hyperattn.inject import OutOfReach, choose, costs, hsa
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.mechanisms.hsa.layer import EVERYTHING
from hf_hyperattn.mechanisms.selection.growing import TAKEN_BACK
from hf_hyperattn.mechanisms.sparse import Exact, Pages, Window
from tests.mechanisms.sparse.test_sparse_models import drawn, in_steps, llama

LENGTH = 256
RULES = [SparseHeadRule(rule) for rule in (Window(16, 2), Window(64, 2), Pages(8, 2, 4, 2))]


def losses_of(layers, heads, rules):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(heads, rules, generator=generator, dtype=torch.float64) for name in layers
    }


@pytest.mark.parametrize("key_heads", [1, 2, 4, None])
@pytest.mark.parametrize("share", [0.55, 0.8])
def test_bytes_are_those_of_key_heads_and_the_choice_is_the_best_of_all(key_heads, share):
    """Of one layer of four heads: no combination that a cache holds as little of loses less."""
    losses, every = losses_of("a", 4, 3), [SparseHeadRule(Exact()), *RULES]
    found = choose(
        RULES,
        losses,
        LENGTH,
        pairs=share,
        cost="bytes",
        key_heads=None if key_heads is None else {"a": key_heads},
    )
    group = 4 // (key_heads or 4)
    lost = lambda heads: sum(
        losses["a"][h, RULES.index(r)].item() for h, r in enumerate(heads) if not r.rule.is_exact
    )
    kept = lambda rule: (
        min(1.0, (sum(rule.rule.reach) + TAKEN_BACK) / LENGTH) if rule.rule.reach else 1.0
    )

    def held(heads):
        return sum(max(map(kept, heads[i : i + group])) for i in range(0, 4, group)) * group / 4

    cheap = [
        heads for heads in itertools.product(every, repeat=4) if held(heads) <= found.spent + 1e-9
    ]
    assert (
        found.cost == found.spent == pytest.approx(held(found.layers["a"])) and found.spent <= share
    )
    assert lost(found.layers["a"]) == pytest.approx(min(map(lost, cheap)))


def test_a_share_that_nothing_reaches_is_refused_and_the_cheapest_is_told():
    losses, least = losses_of("a", 4, 3), min(rule.share(LENGTH) for rule in RULES)
    assert choose(RULES, losses, LENGTH, pairs=least).cost == pytest.approx(
        least
    )  # the cheapest itself is in reach
    with pytest.raises(
        OutOfReach, match="1.0% of stock's pairs is out of reach: the cheapest rules take"
    ) as refused:
        choose(RULES, losses, LENGTH, pairs=0.01)
    assert refused.value.cheapest.cost == pytest.approx(least)
    elsewhere = pickle.loads(pickle.dumps(refused.value))  # as a worker process hands it back
    assert str(elsewhere) == str(refused.value) and elsewhere.cheapest == refused.value.cheapest


def test_pairs_and_functions_cost_as_before():
    losses = losses_of("ab", 4, 3)
    plain = choose(RULES, losses, LENGTH, pairs=0.5)
    assert plain.spent == pytest.approx(plain.pairs) and plain.pairs <= 0.5
    for cost in ("pairs", lambda rule, length: rule.share(length)):
        assert (
            choose(RULES, losses, LENGTH, pairs=0.5, cost=cost, key_heads={"a": 1}).layers
            == plain.layers
        )


@pytest.mark.parametrize(
    "rules",
    [
        [
            SparseHeadRule(Window(16, 2)),
            SparseHeadRule(Window(9, 5)),
            SparseHeadRule(Exact()),
            RULES[2],
        ],
        [SparseHeadRule(Window(40, 4))] * 4,
        [HsaHeadRule((4, 16), 20, 4)] * 4,
        [HsaHeadRule((8,), 3, 1)] * 4,
    ],
    ids=["split", "windows", "hsa of two levels", "hsa of one"],
)
def test_what_is_counted_is_what_a_cache_holds(rules):
    """At least what is counted, and an eighth of room more; of HSA whole windows, too."""
    model = ha.patch_model(llama().float(), rules[0].layer_config(rules, 400), mode="replace")
    cache = HierarchicalCache(model, evict=True)
    in_steps(model, drawn(1, 400), [100] * 3 + [1] * 100, cache)
    store = cache.layers[0].store
    group = rules[0].sharing(4, 2)
    counted = (
        sum(max(r.kept(400) for r in rules[i : i + group]) for i in range(0, 4, group)) * group / 4
    )
    means = store.beside["means"].means if "means" in store.beside else []
    keys = [*(part.tokens[0] for part in store.parts), *(k for k, _ in means)]
    held = sum(k.view().numel() for k in keys) / (2 * 400 * 8)  # two key heads of eight numbers
    assert counted - 0.07 <= held <= 1.125 * counted + 0.07


def test_the_time_of_rules_is_measured_once_for_each(monkeypatch):
    clock = iter(itertools.count())
    monkeypatch.setattr(costs, "read_clock", lambda: next(clock))
    rules = [*RULES, HsaHeadRule((4, 16), 8), HsaHeadRule((4, 16), EVERYTHING)]
    found = costs.measure_times(rules[:3], 64, torch.empty(2, 8))
    assert found == dict.fromkeys([SparseHeadRule(Exact()), *RULES], 1.0)  # each call took one tick
    costs.measure_times(rules[3:], 64, torch.empty(2, 8))
    monkeypatch.setattr(
        costs,
        "measure_times",
        lambda rules, *_: {rule: 0.5 - 0.1 * i for i, rule in enumerate(rules)},
    )
    members = [SparseHeadRule(Exact()), *RULES]
    of = costs.resolve_cost("time", members, 64)
    assert [of(rule, 64) for rule in members] == pytest.approx([1.0, 0.4, 0.3, 0.2])


def test_what_makes_no_sense_is_refused():
    (rule, *_) = hsa.layer_candidates(64)
    losses = {"a": torch.rand(1, 1)}
    for cost in ("bytes", "time"):
        with pytest.raises(
            ValueError, match="for rules of an encoder, which keeps no cache; allowed: 'pairs'"
        ):
            choose([rule], losses, 64, pairs=0.5, cost=cost)
    table = losses_of("a", 4, 3)
    for wanted in ({}, {"pairs": 0.5, "loss": 1.0}):
        with pytest.raises(ValueError, match="pairs and loss; allowed: one of them"):
            choose(RULES, table, 64, **wanted)
    for wanted in (
        {"pairs": 1.5},
        {"pairs": -0.1},
        {"pairs": math.nan},
        {"loss": -1.0},
        {"loss": math.nan},
    ):
        with pytest.raises(ValueError, match="allowed: a share from 0 to 1|allowed: 0 or more"):
            choose(RULES, table, 64, **wanted)
    with pytest.raises(
        ValueError, match="key_heads names b; allowed: layers that have losses, such as a"
    ):
        choose(RULES, table, 64, pairs=0.5, cost="bytes", key_heads={"b": 2})
    with pytest.raises(
        ValueError, match="cost is 'flops'; allowed: pairs, bytes, time, or a function"
    ):
        choose(RULES, losses_of("a", 4, 3), 64, pairs=0.5, cost="flops")
