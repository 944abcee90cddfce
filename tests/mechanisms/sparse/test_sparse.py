"""Sparse rules: against their definitions, against single steps, with padding, groups of heads and lengths, as JSON."""

import json
from dataclasses import dataclass

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.config import MechanismConfig
from hf_hyperattn.config.fields import option
from hf_hyperattn.engines import Options
from hf_hyperattn.hierarchy.windows import windows_tree
from hf_hyperattn.mechanisms.hsa.reference import definition_key
from hf_hyperattn.mechanisms.sparse import (
    RULES,
    Clusters,
    Exact,
    NestedWindows,
    Pages,
    SparseRule,
    VerticalSlash,
    Window,
    reference,
    rules,
    sparse_rule,
)
from hf_hyperattn.mechanisms.sparse.masking import mask_by_rules

LENGTH, SCALE = 41, 0.7
CAUSAL = [
    Exact(),
    Window(7, 2),
    Window(60, 0),
    Pages(5, 1, 4, 2),
    Pages(5, 6, 4, 2, "mean"),
    Pages(1, 0, 1, 3, query="first", chunk=4),
    Pages(6, 1, 4, 3, "mean", "first", 4),
    Pages(6, 1, 4, 3, query="previous", chunk=4),
    Pages(3, 1, 2, 5, query="previous", chunk=8),
    Pages(5, 1, 1, 4, "mean", channels=0.34),
    Pages(1, 7, 1, 3, channels=0.01),
    Pages(4, 1, 2, 4, query="previous", chunk=4, channels=0.5),
    NestedWindows((2, 8), 3, 1, 2),
    NestedWindows((3, 6), 0, 5, 1, "bounds", "previous", 4),
    NestedWindows((4,), 6, 0, 3, "mean", "first", 8),
    Clusters(3, 1, 8, 2, 3, 1),
    Clusters(11, 2, 8, 4, 2, 2, "previous", 4),
    Clusters(4, 0, 16, 4, 1, 0, "first", 8),
    VerticalSlash(4, 1, 3, 2, 16, 5),
    VerticalSlash(2, 0, 0, 4, 8, 8),
]
CHUNKED = [Pages(6, 1, 4, 3, query="chunk", chunk=4), Clusters(4, 0, 16, 4, 2, 1, "chunk", 8)]
name = lambda rule: json.dumps(rule.to_dict())[9:60]


def drawn(*shape, seed=0):
    return torch.randn(
        *shape, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def attend(query, key, value, rules, **more):
    return ha.functional.sparse_attention(
        query, key, value, is_causal=True, scale=SCALE, enable_gqa=True, rules=rules, **more
    )


@pytest.mark.parametrize("rule", CAUSAL + CHUNKED, ids=name)
def test_a_rule_is_its_definition(rule):
    query, key, value = (
        drawn(1, 2, LENGTH),
        drawn(1, 1, LENGTH, seed=1),
        drawn(1, 1, LENGTH, seed=2),
    )
    out, mask = attend(query, key, value, rule), rule.mask(query, key, SCALE)
    for h in range(2):
        expected = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for i, tokens in enumerate(reference.list_seen(rule, query[0, h], key[0, 0], SCALE)):
            expected[i, list(tokens)] = True
        assert torch.equal(mask[0, h], expected)
        whole = reference.attend_by_definition(rule, query[0, h], key[0, 0], value[0, 0], SCALE)
        torch.testing.assert_close(out[0, h], whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", CAUSAL, ids=name)
def test_a_token_does_not_see_what_comes_after_it(rule):
    query, key = drawn(1, 1, LENGTH), drawn(1, 1, LENGTH, seed=1)
    whole = rule.mask(query, key, SCALE)
    for stop in (1, 9, 30, 40):
        part = rule.mask(query[:, :, :stop], key[:, :, :stop], SCALE)
        assert torch.equal(part, whole[:, :, :stop, :stop])
        first = max(0, stop - 1 - rule.earlier)
        step = rule.mask(query[:, :, first:stop], key[:, :, :stop], SCALE, first, stop - 1 - first)
        assert torch.equal(step, whole[:, :, stop - 1 : stop, :stop])


def test_rules_by_head_groups_and_padding():
    query, key, value = (
        drawn(2, 4, LENGTH),
        drawn(2, 2, LENGTH, seed=1),
        drawn(2, 2, LENGTH, seed=2),
    )
    rules = [CAUSAL[i] for i in (1, 7, 9, 15)]
    out = attend(query, key, value, rules)
    for h, rule in enumerate(rules):
        alone = attend(
            query[:, h : h + 1], key[:, h // 2][:, None], value[:, h // 2][:, None], rule
        )
        torch.testing.assert_close(out[:, h], alone[:, 0], atol=1e-12, rtol=0)
    for pad, real in ((slice(0, 9), slice(9, LENGTH)), (slice(30, LENGTH), slice(0, 30))):
        mask = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
        mask[0, ..., pad] = False
        padded = attend(query, key, value, rules, attn_mask=mask)
        torch.testing.assert_close(padded[1], out[1], atol=1e-12, rtol=0)
        alone = attend(query[:1, :, real], key[:1, :, real], value[:1, :, real], rules)
        torch.testing.assert_close(padded[:1, :, real], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "rule", [*CAUSAL, *CHUNKED, Pages(), Clusters(segment=64), VerticalSlash(every=64)], ids=name
)
def test_shares_are_what_is_seen_and_scored(rule):
    query, key, length = drawn(1, 1, 300), drawn(1, 1, 300, seed=1), 300
    seen = rule.mask(query, key, SCALE).sum().item() / (length * (length + 1) / 2)
    assert rule.share(length) <= 1 and rule.share(1) == 1
    if isinstance(rule, Exact | Window):
        assert rule.share(length) == pytest.approx(seen, abs=1e-12)
    elif not isinstance(rule, Clusters):
        assert seen <= rule.share(length)


@pytest.mark.parametrize(
    "windows, near, sinks, top", [((2, 8), 3, 1, 2), ((4, 8, 16), 5, 0, 1), ((3,), 4, 5, 2)]
)
def test_a_tree_is_hsa_without_its_blocks(windows, near, sinks, top):
    query, key = drawn(1, 1, LENGTH), drawn(1, 1, LENGTH, seed=1)
    settings = dict(
        near=near, sinks=sinks, refine_top_k=top, block_bias=float("-inf"), is_causal=True
    )
    P = definition_key(SCALE * query @ key.mT, windows_tree(LENGTH, windows), **settings)
    assert torch.equal(P > 0, NestedWindows(windows, near, sinks, top).mask(query, key, SCALE))


def test_pages_are_counted_as_they_are_scored():
    length, rule = 64, Pages(8, 0, 4, 2, query="first", chunk=4)
    seen = scored = 0
    for i in range(length):
        opening = max(0, i // 4 * 4 - 7) // 4
        seen += i - 4 * opening + 1 + 4 * min(2, opening)
        scored += opening / 4 if opening > 2 else 0
    assert rule.share(length) == pytest.approx(
        (seen + scored) / (length * (length + 1) / 2), abs=1e-12
    )


def test_lengths_are_looked_up_by_the_query():
    query, key = drawn(1, 2, LENGTH), drawn(1, 2, LENGTH, seed=1)
    config = ha.SparseConfig([[Window(4, 0)], [Window(9, 1), Exact()]], lengths=(20, 40))
    assert config.tuned_length == 40
    hidden = mask_by_rules(
        query, key, 1.0, Options(is_causal=True), config.head_rules(2, "it")
    ).mask
    short, long = Window(4, 0).mask(query, key), Window(9, 1).mask(query, key)
    causal = Exact().mask(query, key)
    seen = hidden & causal
    assert torch.equal(seen[:, :, :20], short[:, :, :20])
    assert torch.equal(seen[:, :1, 20:], long[:, :1, 20:])
    assert torch.equal(seen[:, 1:, 20:], causal[:, 1:, 20:])


def test_json():
    config = ha.SparseConfig(CAUSAL + CHUNKED, tuned_length=64)
    assert MechanismConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    config = ha.SparseConfig([[Exact()], [Window(), Pages()]], lengths=[64, 128])
    assert MechanismConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(MechanismConfig.from_dict(config.to_dict()))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Window(near=0), r"Window.near=0 is not allowed; allowed: numbers from 1"),
        (lambda: Pages(query="last"), "Pages.query='last' is not allowed; allowed: 'own', 'first'"),
        (
            lambda: Clusters(size=24),
            "Clusters.size=24 is not allowed; allowed: divisors of segment=512",
        ),
        (
            lambda: VerticalSlash(every=8),
            "VerticalSlash.measured=64 is not allowed; allowed: at most every=8",
        ),
        (lambda: Pages(channels=1.5), "Pages.channels=1.5 is not allowed; allowed: at most 1"),
        (lambda: Window(far=1), "Window has no field 'far'; allowed: near, sinks"),
        (
            lambda: SparseRule.from_dict({"rule": "none"}),
            "sparse rule 'none' is unknown; allowed: clusters, exact",
        ),
        (lambda: SparseRule.from_dict({"rule": "window", "x": 1}), "Window has no field 'x'"),
        (lambda: SparseRule.from_dict(3), "a sparse rule is 3; allowed: a dict"),
        (lambda: ha.SparseConfig(()), r"SparseConfig.rules=\(\) is not allowed"),
        (lambda: ha.SparseConfig([3]), "allowed: sparse rules such as Window"),
        (
            lambda: ha.SparseConfig([[Exact()]], lengths=(4, 2)),
            "SparseConfig.lengths=.* rising numbers",
        ),
        (lambda: ha.SparseConfig([[Exact()]], lengths=(2, 4)), "rules for each of the 2 lengths"),
        (
            lambda: attend(*[drawn(1, 2, 8)] * 3, [Exact()] * 3),
            "SparseConfig.rules has 3 rules; allowed: one, or",
        ),
        (
            lambda: attend(*[drawn(1, 2, 8)] * 3, Exact(), first=1),
            "first=1 is not allowed; allowed: integers from 0",
        ),
        (lambda: sparse_rule("window")(Window), "'window' is registered already"),
    ],
)
def test_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_selection_by_queries_that_are_not_there_is_refused():
    query, key = drawn(1, 1, 1), drawn(1, 1, LENGTH)
    with pytest.raises(ValueError, match="which are not known"):
        attend(query, key, key, Pages(6, 1, 4, 3, query="previous", chunk=4), first=LENGTH - 1)
    attend(query, key, key, Pages(6, 1, 4, 3), first=LENGTH - 1)


def test_a_rule_of_ones_own():
    try:

        @sparse_rule("every_other")
        @dataclass(frozen=True)
        class EveryOther(SparseRule):
            near: int = option(16, "tokens before a query that it sees", least=1)

            def share(self, length):
                return 0.5

            def visible(self, call):
                return (call.tokens > call.places - self.near) | (call.tokens % 2 == 0)

        query, key = drawn(1, 1, LENGTH), drawn(1, 1, LENGTH)
        config = ha.SparseConfig([EveryOther(3)])
        assert MechanismConfig.from_dict(config.to_dict()) == config
        mask = EveryOther(3).mask(query, key)[0, 0]
        assert mask[10].nonzero().flatten().tolist() == [0, 2, 4, 6, 8, 9, 10]
        torch.testing.assert_close(
            attend(query, key, key, EveryOther(3)),
            torch.nn.functional.scaled_dot_product_attention(query, key, key, mask, scale=SCALE),
        )
        with pytest.raises(TypeError, match="defined by its own visible"):
            reference.list_seen(EveryOther(3), query[0, 0], key[0, 0], 1.0)
    finally:
        RULES.pop("every_other", None)


def test_a_rule_that_would_be_lost_is_refused(monkeypatch):
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))

    class Renamed(Pages):
        """Its JSON would be that of pages."""

    @dataclass(frozen=True)
    class Nameless(Window):
        name = ""

    @sparse_rule("changing")
    @dataclass
    class Changing(SparseRule):
        share = visible = Exact.visible

    for rule, message in (
        (Renamed(), "no name of its own"),
        (Nameless(), "no name of"),
        (Changing(), "be hashed"),
    ):
        with pytest.raises(ValueError, match=message):
            ha.SparseConfig([Exact(), rule])


def test_tuples_of_a_rule_of_ones_own_come_back_from_json(monkeypatch):
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))

    @sparse_rule("spans")
    @dataclass(frozen=True)
    class Spans(Window):
        spans: tuple[int, ...] = option((1, 2), "any")

    config = ha.SparseConfig([Spans(5, 1, (3, 4))])
    assert MechanismConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
