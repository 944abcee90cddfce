"""Measurements that are kept and taken up again, rules of `SparseConfig` as candidates, and what is allocated."""

import gc
import sys
import weakref
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.inject import choose, examples, hsa, measure, predicted_losses, sparse
from hf_hyperattn.inject.gradients import attention_gradients, loss_of
from hf_hyperattn.inject.measure import Sensitivity, draw_sample
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.mechanisms.base import Plan
from hf_hyperattn.mechanisms.sparse import Exact, Pages, SparseConfig, Window
from hf_hyperattn.registry import get_mechanism
from tests.cli import tiny

LENGTH = 128
RULES = [
    SparseHeadRule(rule)
    for rule in (Exact(), Window(20, 2), Pages(8, 2, 4, 2), Pages(8, 2, 4, 2, "mean"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.tensor(
        tiny.tokenizer()("the quick brown fox jumps over a lazy dog and goes home. " * 4).input_ids[
            :LENGTH
        ]
    )


def seen_calls(model, ids, **more):
    calls = {}
    ha.patch_model(model, SparseConfig(Exact()), mode="blend")
    attention_gradients(
        model,
        ids,
        lambda name, *rest: calls.update({name: rest}),
        partial(loss_of, ids=ids, **more),
    )
    ha.unpatch_model(model)
    return calls


def test_no_layer_stays_in_memory(model, ids):
    """A hook that referred to its own tensor kept what every layer had computed, of every text."""
    seen = []
    ha.patch_model(model, SparseConfig(Exact()), mode="blend")
    attention_gradients(
        model,
        ids,
        lambda _, call, out, g: seen.extend(map(weakref.ref, (call.query, call.key, out, g))),
        partial(loss_of, ids=ids),
    )
    ha.unpatch_model(model)
    gc.collect()
    assert seen and not any(ref() is not None for ref in seen)


def test_slopes_and_divergences_of_sparse_rules_are_those_of_their_masks(model, ids):
    """Against scaled_dot_product_attention and logits under the rule's mask."""
    measured = measure(model, ids, RULES, rows=LENGTH, keep_slopes=True)
    for name, (call, out, g) in seen_calls(model, ids).items():
        key, value = (t.repeat_interleave(2, 1) for t in (call.key, call.value))
        for c, rule in enumerate(RULES):
            mask = rule.rule.mask(call.query, call.key, call.scale)
            under = torch.nn.functional.scaled_dot_product_attention(
                call.query, key, value, attn_mask=mask, scale=call.scale
            )
            slopes = (g * (under - out)).sum(-1)[0].T
            assert torch.allclose(measured.slopes[name][..., c], slopes, rtol=1e-3, atol=1e-4)
            logits = call.scale * call.query @ key.mT
            own = logits.masked_fill(
                torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf
            ).log_softmax(-1)
            tied = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
            kl = (tied.exp() * (tied - own).masked_fill(~mask, 0)).sum(-1).mean(-1)[0]
            assert torch.allclose(measured.kl[name][:, c], kl, rtol=1e-3, atol=1e-4)


def test_long_texts_select_by_chunks_as_short_ones_do(model, ids, monkeypatch):
    rules = [
        SparseHeadRule(Pages(8, 2, 4, 2, "bounds", query, 16))
        for query in ("own", "first", "previous")
    ]
    rules.append(SparseHeadRule(Pages(8, 2, 4, 2, "bounds", "chunk", 40)))
    at_once = measure(model, ids, rules, rows=64)
    monkeypatch.setattr(sparse, "AT_ONCE", 0)
    by_chunk = measure(model, ids, rules, rows=64)
    for name, costs in at_once.costs.items():
        assert torch.allclose(costs, by_chunk.costs[name], rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("rules", [RULES, [hsa.HsaHeadRule((4, 16), 8, 2, 1, -1.0)]])
def test_groups_of_queries_are_compared_as_all_at_once(model, ids, monkeypatch, rules):
    at_once = measure(model, ids, rules, rows=64, keep_slopes=True)
    # The name in the package is the function.
    monkeypatch.setattr(sys.modules["hf_hyperattn.inject.measure"], "PAIRS", 16 * 4 * LENGTH)
    grouped = measure(model, ids, rules, rows=64, keep_slopes=True)
    for kind in ("costs", "kl", "slopes"):
        for name, values in getattr(at_once, kind).items():
            torch.testing.assert_close(getattr(grouped, kind)[name], values, rtol=1e-5, atol=1e-7)


def test_masks_of_later_tokens_are_looked_through_and_sinks_counted(ids):
    """gpt-oss makes a mask for every call: that of its layer with a sliding window hides more, and leaves it out."""
    kinds = ["full_attention", "sliding_attention"]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": kinds,
        "head_dim": 8,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    torch.manual_seed(0)
    model = GptOssForCausalLM(
        GptOssConfig(vocab_size=260, sliding_window=32, **sizes, **heads)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    rules = [*RULES[1:], hsa.HsaHeadRule((4, 16), 8, 2, 1, -1.0)]
    measured = measure(model, ids, rules, rows=LENGTH, keep_slopes=True)
    assert list(measured.costs) == ["model.layers.0.self_attn"]
    call, out, g = seen_calls(model, ids)["model.layers.0.self_attn"]
    assert call.options.mask is not None and call.options.sinks is not None
    for c, rule in enumerate(rules):
        config = rule.layer_config([rule] * 4, LENGTH)
        under, _ = (
            get_mechanism(config.mechanism)
            .layer(config, None, "replace")
            .change(Plan.from_call(call))
            .run()
        )
        slopes = (g * (under - out)).sum(-1)[0].T.detach()
        assert torch.allclose(
            measured.slopes["model.layers.0.self_attn"][..., c], slopes, rtol=1e-3, atol=1e-5
        )
        assert slopes.abs().max() > 1e-3


def test_a_rule_alone_costs_what_a_patched_model_differs_by(model, ids):
    """The patched model's attention under the allocation's config is what was compared."""
    rules = RULES[1:3]
    allocation = choose(
        rules,
        {n: torch.zeros(4, 2) for n in measure(model, ids, rules, rows=16).costs},
        LENGTH,
        pairs=0.9,
    )
    model(ids[None])
    config = allocation.config()
    assert all(own[0].tuned_length == LENGTH for own in config.overrides.values())
    ha.patch_model(model, config)
    assert ha.describe(model) and 0 < allocation.pairs <= 0.6


def test_answers_alone_count(model, ids):
    """The gradients are those of their loss, and their queries are measured wholly where there are rows enough."""
    spans = ((60, 70), (100, 104))
    calls = seen_calls(model, ids, spans=spans)
    logits = model(ids[None]).logits[0]
    at = torch.cat([torch.arange(a, b) for a, b in spans])
    loss = torch.nn.functional.cross_entropy(logits[at - 1], ids[at], reduction="sum")
    measured = measure(model, ids, RULES, rows=1024, keep_slopes=True, spans=spans)
    assert measured.loss == pytest.approx(loss.item() / 14, rel=1e-4)
    for name, slopes in measured.slopes.items():
        assert len(slopes) == LENGTH
        expected = slopes.double().square().sum(0) / 2 / 14
        assert torch.allclose(measured.costs[name], expected) and name in calls


def test_a_sample_stands_for_all_queries():
    for spans in (None, ((300, 310), (500, 512))):
        drawn = draw_sample(512, 96, 0, spans)
        assert float(drawn.weights.sum()) * 16 == pytest.approx(512)
        assert drawn.counted == (512 if spans is None else 22)
    assert {304, 496} & set(drawn.starts)


def tensors(measured):
    return [measured.costs, measured.kl]


def equal(a, b):
    return a.loss == b.loss and all(
        list(x) == list(y) and all(torch.equal(x[n], y[n]) for n in x)
        for x, y in zip(tensors(a), tensors(b))
    )


def test_a_damaged_file_is_named(model, ids, tmp_path):
    measure(model, ids, RULES, rows=32, folder=tmp_path)
    file = next(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="safetensors is damaged, delete it to measure anew"):
        measure(model, ids, RULES, rows=32, folder=tmp_path)


def test_what_is_kept_is_what_was_measured(model, ids, tmp_path):
    plain = measure(model, ids, RULES, rows=32)
    first = measure(model, ids, RULES, rows=32, folder=tmp_path)
    assert equal(plain, first) and equal(
        plain, measure(model, ids, RULES, rows=32, folder=tmp_path)
    )
    (kept,) = tmp_path.iterdir()
    layers = [f"model.layers.{i}.self_attn.safetensors" for i in range(2)]
    assert sorted(p.name for p in kept.iterdir()) == [*layers, "whole.json"]
    (kept / layers[1]).unlink()
    assert equal(plain, measure(model, ids, RULES, rows=32, folder=tmp_path))


@pytest.mark.parametrize("hurt", ["rows", "seed", "rules", "text", "model", "config", "spans"])
def test_another_measurement_is_another_folder(model, ids, tmp_path, hurt):
    options = {"rows": 32, "seed": 0, "spans": None}
    measure(model, ids, RULES, folder=tmp_path, **options)
    rules = RULES[:2] if hurt == "rules" else RULES
    ids = ids.flip(0) if hurt == "text" else ids
    options |= {"rows": {"rows": 48}, "seed": {"seed": 5}, "spans": {"spans": ((9, 12),)}}.get(
        hurt, {}
    )
    if hurt == "model":
        model.model.layers[0].self_attn.q_proj.weight.data.mul_(1.01)
    if hurt == "config":
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    measure(model, ids, rules, folder=tmp_path, **options)
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interrupted_measurement_loses_one_layer(model, ids, tmp_path, monkeypatch):
    module = sys.modules["hf_hyperattn.inject.measure"]  # the name in the package is the function
    whole, compared = measure(model, ids, RULES, rows=32), []
    inner = module.compare_rules

    def stops(*arguments):
        if compared:
            raise KeyboardInterrupt
        compared.append(1)
        return inner(*arguments)

    monkeypatch.setattr(module, "compare_rules", stops)
    with pytest.raises(KeyboardInterrupt):
        measure(model, ids, RULES, rows=32, folder=tmp_path)
    count = []
    monkeypatch.setattr(module, "compare_rules", lambda *a: count.append(1) or inner(*a))
    assert equal(whole, measure(model, ids, RULES, rows=32, folder=tmp_path)) and len(count) == 1
    assert (
        equal(whole, measure(model, ids, RULES, rows=32, folder=tmp_path, resume=False))
        and len(count) == 3
    )
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


def test_the_loss_of_a_rule_is_the_weighted_mean_over_texts(model, ids):
    one, two = (measure(model, ids, RULES, rows=64, seed=seed) for seed in (0, 1))
    for name, costs in predicted_losses([one]).items():
        assert torch.equal(costs, one.costs[name])
    for name, costs in predicted_losses([one, two], [3.0, 1.0]).items():
        assert torch.allclose(costs, 0.75 * one.costs[name] + 0.25 * two.costs[name])


@pytest.mark.parametrize(
    "weights, message",
    [
        (
            [0.5],
            "weights has 1 numbers for 2 texts; allowed: one for each, finite, from 0, not all 0",
        ),
        ([1, 2, 3], "weights has 3 numbers for 2 texts"),
        ([], "weights has 0 numbers for 2 texts"),
        ([-1.0, 2.0], r"weights=\[-1.0, 2.0\] is not allowed; allowed: one for each, finite"),
        ([1.0, float("nan")], "weights="),
        ([float("nan"), 1.0], "weights="),
        ([1.0, float("inf")], "weights="),
        ([0.0, 0.0], "weights="),
    ],
)
def test_weights_are_one_for_each_text(weights, message):
    one = Sensitivity(RULES, {"a": torch.ones(1, len(RULES))})
    with pytest.raises(ValueError, match=message):
        predicted_losses([one, one], weights)
    with pytest.raises(
        ValueError, match=r"measured=\[\] is not allowed; allowed: what was measured of one text"
    ):
        predicted_losses([])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rows": -100}, "rows=-100 is not allowed; allowed: integers from 16"),
        *(
            ({"rows": rows}, f"rows={rows} is not allowed")
            for rows in (0, 15, 32.0, True, float("nan"))
        ),
        (
            {"spans": ()},
            r"spans=\(\) is not allowed; allowed: one \(start, stop\) or more in 1..128, in order",
        ),
        *(
            ({"spans": spans}, "spans=")
            for spans in (
                ((5, 9), (8, 12)),
                ((8, 12), (5, 7)),
                ((-4, 9),),
                ((0, 9),),
                ((9, 9),),
                ((9, 200),),
            )
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        measure(model, ids, RULES, **options)


def test_texts_that_cannot_be_measured_are_refused(model, ids):
    with pytest.raises(ValueError, match="ids holds 12 tokens; allowed: 16 or more"):
        measure(model, ids[:12], RULES)
    with pytest.raises(
        ValueError, match=r"ids has shape \(2, 64\); allowed: integers \[N\] of one text"
    ):
        measure(model, ids.view(2, 64), RULES)
    shortest = measure(model, ids[:16], RULES, rows=16, spans=((1, 4), (4, 16)))
    assert all(costs.isfinite().all() for costs in shortest.costs.values())


def test_a_cost_of_ones_own_is_kept_to():
    rules = [SparseHeadRule(Window(8)), SparseHeadRule(Window(32))]
    prices = {None: 1.0, 8: 0.9, 32: 0.2}
    losses = {"a": torch.tensor([[0.1, 0.2], [0.3, 0.1]], dtype=torch.float64)}
    cost = lambda rule, length: prices[getattr(rule.rule, "near", None)]
    cheap = choose(rules, losses, 64, pairs=0.2, cost=cost)
    assert [rule.rule.near for rule in cheap.layers["a"]] == [32, 32]


def test_measured_examples_weigh_answers(model):
    """Of an example with answers, through the folder of a run."""
    text = torch.tensor(tiny.tokenizer()("words and more words " * 20).input_ids)
    (example,) = (
        e for e in examples(tiny.tokenizer(), [text], 256, tasks=["needle"]) if e.depth == 0.05
    )
    measured = measure(model, example.ids, RULES[:2], rows=64, spans=example.spans)
    predicted = predicted_losses([measured])
    assert all(costs[:, 0].abs().max() < 1e-6 for costs in predicted.values())


@pytest.mark.parametrize("length", [512, 1024])
def test_candidates_are_cheap_and_mix(length):
    found = sparse.candidates(length)
    assert len(set(found)) == len(found) and {rule.group for rule in found} == {"sparse"}
    assert all(0 < rule.share(length) < 1 for rule in found)
    families = {rule.family for rule in found}
    shared = {"Quest pages, shared by 16", "single keys, shared by 16"}
    assert shared | {"sinks and window", "Quest pages", "mean pages"} == families
    assert {rule.family for rule in hsa.candidates(length)} == {"sinks and window", "hsa"}
