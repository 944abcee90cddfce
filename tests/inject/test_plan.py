"""The plan of an injection: its passes against those of a run, its memory against what a run keeps."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_hyperattn.inject import causal
from hf_hyperattn.inject.causal import POWERS, CausalInjection
from hf_hyperattn.inject.gradients import checkpoint_layers, final_hidden, freeze_parameters
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.inject.plan import (
    HeadTimes,
    PassTimes,
    Silent,
    add_stages,
    build_probe,
    count_kept,
    plan_injection,
)
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.mechanisms.sparse import Pages, Window
from tests.cli import tiny
from tests.cli.test_inject import prose

LENGTH = 192
RULES = [SparseHeadRule(rule) for rule in (Window(16), Window(64), Pages(16, 4, 8, 4), Window(96))]
TIMES = PassTimes(measure=1.0, few=1.0, forward=10.0, joint=100.0, patched=1e3, pays=1e4, rules=0.0)
NO_HEAD = HeadTimes(loss=0.0, gradient=0.0, divergence=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


def make_injection(source, meta=False, rules=RULES, **more) -> CausalInjection:
    if meta:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny.config(max_position_embeddings=256))
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.tensor(tiny.tokenizer()(prose(1)).input_ids)[: 3 * LENGTH]
    texts = [{"one.txt": part} for part in ids.split(LENGTH)]
    settings = {"tokenizer": tiny.tokenizer(), "rows": 32, "budget": 9.0} | more
    return CausalInjection(model=model, texts=texts, rules=rules, length=LENGTH, **settings)


@pytest.mark.parametrize("pairs", [None, 0.5])
def test_the_passes_are_those_of_a_run(folder, monkeypatch, pairs):
    """A run skips a try whose rules were tried before, so its search may have fewer."""
    injection = make_injection(folder, pairs=pairs, retrieval_budget=9.0)
    passes: Counter = Counter()

    def count(name, function):
        def counted(*args, **more):
            passes[injection.stage[0]] += 1
            return function(*args, **more)

        monkeypatch.setattr(causal, name, counted)

    for name in ("measure", "loss_parts", "final_hidden"):
        count(name, getattr(causal, name))
    injection.run(Silent())
    stages, planned = add_stages(injection, TIMES, NO_HEAD, compare=False)
    made = [allocation.layers for allocation, _ in injection.tried]
    tries = sum(layers not in made[:i] for i, layers in enumerate(made) if i >= len(POWERS))
    assert passes.pop("search") == len(injection.texts[1]) * (1 + tries) <= planned.pop("search")
    assert passes == planned
    assert {*injection.stages, injection.stage[0]} == stages.keys()


def test_the_seconds_are_those_of_the_passes(folder):
    injection = make_injection(folder)
    first, second, third = map(len, injection.texts)
    stages, _ = add_stages(injection, TIMES, NO_HEAD, compare=False)
    assert stages == {
        "measuring": first,
        "search": second * (10 + 3 * 1000),
        "corrections": 2 * second * 100,
        "held-out text": (third + 1) * 1010,
        "timing": 6 * 1010 + 10_000,
    }
    # With 32 rows, every text and example has two sampled chunks.
    more = replace(TIMES, measure=3.0)
    stages, _ = add_stages(injection, more, NO_HEAD, compare=False)
    assert stages["measuring"] == 3 * first
    # With 96 rows, an example with answers in one chunk has fewer than six sampled chunks.
    injection.rows = 96
    (mixture,) = (item for name, item in injection.texts[0].items() if name == "mixture")
    assert mixture.tokens < 16
    stages, _ = add_stages(injection, more, NO_HEAD, compare=False)
    assert first < stages["measuring"] < 3 * first
    head = HeadTimes(loss=1.0, gradient=1e3, divergence=1e6)
    none = PassTimes(measure=0, few=0, forward=0, joint=0, patched=0, pays=0, rules=7.0)
    tokens = [
        sum(LENGTH - 1 if isinstance(item, torch.Tensor) else item.tokens for item in part.values())
        for part in injection.texts
    ]
    stages, _ = add_stages(injection, none, head, compare=True)
    assert stages == {
        "measuring": tokens[0] * 1e3 + 7,
        "search": tokens[1] * 4,
        "corrections": 2 * tokens[1] * (1e6 + 1),
        "held-out text": 2 * tokens[2],
        "timing": 0,
        "comparison": 0,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_one_input_a_layer(folder, dtype):
    """What autograd saves in a pass with gradients, and the weights."""
    injection = make_injection(folder, meta=True)
    kept = count_kept(injection, 8, dtype)
    torch.manual_seed(0)
    config = tiny.config(max_position_embeddings=256, num_hidden_layers=8)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    saved = {}

    def note(tensor):
        if tensor.requires_grad:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = injection.texts[0]["one.txt"]
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with freeze_parameters(model), checkpoint_layers(model), hooks:
        final_hidden(model, ids)
    one = LENGTH * 32 * dtype.itemsize
    assert kept["hidden states between layers"] == 8 * one
    # The final norm keeps float32 inputs of its own.
    assert 8 * one <= sum(saved.values()) <= 8 * one + 3 * LENGTH * 32 * 4
    weights = sum(p.numel() for p in tiny_model().parameters()) * dtype.itemsize
    assert weights <= kept["weights"] <= 1.01 * weights
    assert kept["final hidden states of all texts"] == len(injection.texts[1]) * one
    assert kept["measured losses"] == len(injection.texts[0]) * 2 * 4 * len(RULES) * 12


def tiny_model():
    return AutoModelForCausalLM.from_config(tiny.config(max_position_embeddings=256))


@pytest.mark.parametrize(
    "more",
    [
        {"cost": "time"},
        {"rules": [HsaHeadRule((4,), 16), HsaHeadRule((4,), 64)]},
        {"dtype": torch.bfloat16, "compare": True, "cost": "bytes"},
    ],
    ids=["time", "hsa", "bfloat16"],
)
def test_no_weights_are_needed_and_nothing_changes(folder, tmp_path, more):
    asked = {name: more[name] for name in ("dtype", "compare") if name in more}
    settings = {name: value for name, value in more.items() if name not in asked}
    injection = make_injection(folder, meta=True, folder=tmp_path / "cache", **settings)
    before = repr(injection.model)
    plan = plan_injection(injection, longest=256, **asked)
    assert repr(injection.model) == before and not (tmp_path / "cache").exists()
    assert {p.device.type for p in injection.model.parameters()} == {"meta"}
    assert (plan.layers, plan.probed) == (2, 1)
    assert plan.seconds == sum(plan.stages.values()) > plan.candidate > 0
    assert plan.peak == sum(plan.memory.values()) > plan.memory["Python and texts"] > 0
    assert ("comparison" in plan.stages) == ("compare" in more)


def test_the_probe_has_every_kind_of_layer(folder):
    injection = make_injection(folder)
    kinds = ["full_attention", "full_attention", "sliding_attention"] * 2
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 259}
    config = Qwen3Config(
        vocab_size=260,
        num_hidden_layers=6,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
    )
    with torch.device("meta"):
        injection.model = Qwen3ForCausalLM(config)
    layers, probe = build_probe(injection, torch.device("cpu"), torch.bfloat16)
    assert layers == 6 and len(probe.model.model.layers) == 3
    assert probe.model.dtype == torch.bfloat16 and probe.model.device.type == "cpu"
    assert (
        injection.model.config.num_hidden_layers == 6 and injection.model.config.vocab_size == 260
    )
