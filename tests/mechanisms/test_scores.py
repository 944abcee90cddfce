"""`@ha.score`: scores from outside, against their formulas written out, and every way to get one wrong."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
import transformers as hf
from peft import PeftModel, get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.registry import MECHANISMS
from tests.engines.test_native import needs_compiler
from tests.integration.models import difference, llama, perturb, run, text_inputs
from tests.oracles.cases import assert_close, tensor
from tests.registries import restored

F = ha.functional


@pytest.fixture(autouse=True)
def registries():
    with restored():
        yield


def define_decay(name="decay", factor=1.0):
    @ha.score(name)
    def decay(dot, query_position, key_position, height=1.0, slope=0.1):
        """Logarithmic decay."""
        return factor * dot - height * torch.log1p(slope * (query_position - key_position).abs())

    return decay


def define_far():
    along = lambda x, direction=0.1: (x * direction).sum(-1)

    @ha.score("far", statistics={"along": along})
    def far(
        squared_distance, query_along, key_along, query_norm, weight=0.5, turn=0.0, *, power=2.0
    ):
        stretched = squared_distance.sqrt() + (query_along - key_along).abs()
        return -weight * stretched * power + turn * query_norm * key_along

    return far


def decay_by_hand(q, k, height, slope):
    far = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs()
    return 0.3 * q @ k.mT - height[:, None, None] * (1 + slope[:, None, None] * far).log()


def far_by_hand(q, k, weight, turn, direction):
    q, k = 0.3**0.5 * q, 0.3**0.5 * k
    difference = q[:, :, :, None] - k[:, :, None]
    squared = difference.square().sum(-1)
    distance = torch.where(squared > 0, squared, 1.0).sqrt() * (squared > 0)
    a, b = ((x * direction[:, None]).sum(-1) for x in (q, k))
    weight, turn = (x[:, None, None] for x in (weight, turn))
    bent = (a[..., None] - b[:, :, None]).abs()
    return -1.5 * weight * (distance + bent) + turn * q.norm(dim=-1)[..., None] * b[:, :, None]


CASES = {
    "decay": (define_decay, decay_by_hand, {"height": (4,), "slope": (4,)}, {}),
    "far": (
        define_far,
        far_by_hand,
        {"weight": (4,), "turn": (4,), "direction": (4, 6)},
        {"power": 1.5},
    ),
}
ENGINES = [
    ("reference", torch.float64, 1e-9),
    ("blockwise", torch.float64, 1e-9),
    ("blockwise", torch.float32, 1e-5),
    pytest.param("cpu", torch.float32, 1e-5, marks=needs_compiler),
    pytest.param("cpu", torch.bfloat16, 6e-2, marks=needs_compiler),
]


@pytest.mark.parametrize("backend, dtype, tolerance", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_every_engine_computes_the_formula_and_its_gradients(name, backend, dtype, tolerance):
    define, by_hand, shapes, constants = CASES[name]
    function = define()
    q, k, v = (tensor(2, h, n, 6, seed=i) for i, (h, n) in enumerate(((4, 9), (2, 11), (2, 11))))
    k[:, :, 2] = q[:, ::2, 5]  # where points coincide
    numbers = {n: tensor(*shape, seed=7).abs() + 0.2 for n, shape in shapes.items()}
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)] + [
        t.requires_grad_() for t in numbers.values()
    ]
    for score in (name, function):
        values = dict(zip(numbers, leaves[3:], strict=True))
        out = F.scored_attention(
            *leaves[:3],
            is_causal=True,
            scale=0.3,
            enable_gqa=True,
            score=score,
            backend=backend,
            **values,
            **constants,
        )
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wide = [t.repeat_interleave(2, 1) for t in exact[1:3]]
    logits = by_hand(exact[0], wide[0], *exact[3:])
    hidden = torch.ones(9, 11, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ wide[1]
    assert out.dtype == dtype
    assert_close(out, expected, tolerance, "output")
    weight = tensor(*out.shape, seed=8)
    gradients = torch.autograd.grad((out.double() * weight).sum(), leaves)
    for label, g, e in zip(
        "qkv....", gradients, torch.autograd.grad((expected * weight).sum(), exact), strict=False
    ):
        assert_close(g, e, 3 * tolerance * max(1.0, e.abs().max().item()), f"gradient of {label}")


def test_positions_masks_and_starting_values():
    define_decay()
    q, k, v = (tensor(1, 2, 5, 4, seed=i) for i in range(3))
    places = torch.tensor([0, 10, 20, 30, 40])
    mask = torch.rand(5, 5) > 0.3
    out = F.scored_attention(
        q, k, v, mask, score="decay", query_positions=places, key_positions=places + 3
    )
    far = (places[:, None] - places - 3).abs().double()
    logits = q @ k.mT / 2 - torch.log1p(0.1 * far)
    assert_close(
        out, logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0) @ v, 1e-12, "output"
    )


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_decoding(name):
    """One query against many keys, read once: by shared keys, with positions that the caller has."""
    CASES[name][0]()
    q, k, v = (
        tensor(2, h, n, 6, seed=i).float() for i, (h, n) in enumerate(((4, 1), (2, 300), (2, 300)))
    )
    places = dict(query_positions=torch.tensor([299])) if name == "decay" else {}
    call = lambda backend, dtype: F.scored_attention(
        *(t.to(dtype) for t in (q, k, v)), enable_gqa=True, score=name, backend=backend, **places
    )
    assert_close(call("cpu", torch.float32), call("reference", torch.float64), 1e-5, "output")


def test_an_adapter_patches_its_base(tmp_path):
    define_far()
    llama().save_pretrained(tmp_path / "base")
    load = lambda: hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = ha.HyperLoraConfig(
        mechanisms=[ha.ScoreConfig("far", power=1.5)], r=2, target_modules=["q_proj"]
    )
    model = get_peft_model(load(), config)
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.3 * tensor(*parameter.shape, seed=i).float())
    model.save_pretrained(tmp_path / "adapter")
    expected, stock = run(model.eval(), text_inputs()), run(load(), text_inputs())
    again = PeftModel.from_pretrained(load(), tmp_path / "adapter").eval()
    assert difference(expected, run(again, text_inputs())) <= 1e-6 < difference(expected, stock)
    assert (
        'import tests.mechanisms.test_scores  # registers "far"'
        in (tmp_path / "adapter" / "README.md").read_text()
    )


def score_of(function, **more):
    return lambda: ha.score("wrong", **more)(function)


def branching(dot, height=1.0):
    return height * dot if dot > 0 else dot


WRONG = {
    "sine": (
        score_of(lambda dot: dot.sin()),
        r"'wrong' cannot be compiled: operator sin \(allowed are abs, .*where",
    ),
    "branch": (score_of(branching), r"operator \w+ \(a branch on values; use torch.where\)"),
    "sum": (
        score_of(lambda dot: dot.sum()),
        r"operator sum \(a reduction or product; a term is arithmetic",
    ),
    "tensor": (
        score_of(lambda dot: dot + torch.ones(1)),
        "a tensor of its own; use a statistic, a",
    ),
    "no tensor": (score_of(lambda dot: "dot"), "'wrong' cannot be compiled: it returns a str"),
    "unknown": (
        score_of(lambda dot, slope: dot),
        "takes the argument 'slope', which is unknown and has no default",
    ),
    "default": (
        score_of(lambda dot=1.0: dot),
        "takes the argument 'dot', which has a default; allowed: dot",
    ),
    "many": (score_of(lambda *dots: dots[0]), "takes .*positional-only arguments; allowed"),
    "text": (
        score_of(lambda dot, a="x": dot),
        "'wrong': a='x' is not allowed; allowed: a finite number",
    ),
    "unused": (
        score_of(lambda dot, a=1.0, b=1.0: a * dot),
        "does not depend on its parameter 'b'; use it",
    ),
    "query": (
        score_of(lambda query_norm, a=1.0: a * query_norm),
        "'wrong' does not depend on the key",
    ),
    "not read": (
        score_of(lambda dot: dot, statistics={"last": lambda x: x[..., -1]}),
        "does not read its statistic",
    ),
    "statistic": (
        score_of(lambda dot, key_all: dot + key_all, statistics={"all": lambda x: x}),
        r"statistic 'all' gives shape \(3, 8\) of vectors \[3, 8\]; allowed: one number each, \[3\]",
    ),
    "twice": (
        score_of(
            lambda dot, key_all, a=1.0: a * dot + key_all,
            statistics={"all": lambda x, a=1.0: (a * x).sum(-1)},
        ),
        "statistic 'all' a parameter with a name that is taken",
    ),
    "other tokens": (
        score_of(
            lambda dot, key_all: dot + key_all,
            statistics={"all": lambda x: (x - x.mean(-2)).sum(-1)},
        ),
        "statistic 'all' of a vector depends on others; allowed: functions of one vector",
    ),
    "needed": (
        score_of(lambda dot, score=1.0: dot * score),
        "a parameter 'score', a name that configs and calls need",
    ),
    "ours": (lambda: define_decay("cone"), "score 'cone' has a name that is taken"),
    "eager": (lambda: define_decay("eager"), "score 'eager' has a name that is taken"),
    "term": (lambda: define_decay("dot"), "score 'dot' has a name that is taken"),
    "form": (
        lambda: define_decay("My Score"),
        "score 'My Score' is no name; allowed: lower-case letters",
    ),
    "flash": (lambda: define_decay("flash_decay"), "without flash, sdpa"),
    "another": (
        lambda: (define_decay(), define_decay(factor=2.0)),
        "'decay' is registered already, by .*test_scores:define_decay.* with another formula",
    ),
    "config": (
        lambda: ha.ScoreConfig("sharp"),
        "'sharp' is no score of @ha.score's; allowed: none yet; import",
    ),
    "value": (
        lambda: (define_decay(), ha.ScoreConfig("decay", slope="x")),
        "ScoreConfig.slope='x' is not allowed",
    ),
    "zero": (
        lambda: (define_decay(), ha.ScoreConfig("decay", slope=(1.0, 0.0))),
        "not 0 for some of them alone",
    ),
    "count": (
        lambda: (
            define_decay(),
            ha.patch_model(llama(), ha.ScoreConfig("decay", slope=(1.0, 2.0))),
        ),
        r"ScoreConfig.slope=\(1.0, 2.0\) is not allowed; allowed: a number, or one for every query head, 4",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case):
    call, said = WRONG[case]
    before = set(MECHANISMS)
    with pytest.raises(ValueError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value) and set(MECHANISMS) <= before | {"decay"}


def test_wrong_calls():
    define_decay()
    define_far()
    q = tensor(1, 2, 5, 4)
    for more, said in (
        (
            dict(score="decay", sharpness=1.0),
            "'decay' has no 'sharpness'; allowed: height, slope, query_positions",
        ),
        (
            dict(score="decay", slope=torch.ones(3)),
            r"slope has shape \(3,\); allowed: one value",
        ),
        (
            dict(score="far", query_positions=torch.arange(5)),
            "'far' has no 'query_positions'; allowed: weight, turn, ",
        ),
        (dict(score="sharp"), "'sharp' is no score"),
        (dict(score=branching), "'branching' is no score"),
        (
            dict(score="decay", scale=-1.0),
            "scale=-1.0 is not allowed; allowed: numbers above 0, or None",
        ),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            F.scored_attention(q, q, q, **more)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        TypeError,
        match="ScoreConfig has no field 'slop'; allowed: score, height, slope; did you mean",
    ):
        ha.ScoreConfig("decay", slop=1.0)


def test_a_module_that_is_imported_again_changes_nothing():
    define_decay()
    first = MECHANISMS["decay"]
    again = define_decay()
    assert MECHANISMS["decay"] is first
    q = tensor(1, 2, 5, 4)
    assert torch.equal(*(F.scored_attention(q, q, q, score=score) for score in ("decay", again)))


def test_starts_constants_and_heads_of_a_config():
    define_far()
    config = ha.ScoreConfig("far", weight=[0.1, 0.2, 0.3, 0.4], power=1.5, direction=0.3)
    assert config == ha.ScoreConfig("far", weight=(0.1, 0.2, 0.3, 0.4), power=1.5, direction=0.3)
    model, inputs = llama(), text_inputs()
    ha.patch_model(model, config, mode="replace")
    names = {n.rpartition(".")[2]: p for n, p in model.named_parameters() if ".hyper." in n}
    shapes = {n: tuple(p.shape) for n, p in names.items()}
    assert shapes == {"log_weight": (4,), "added_turn": (4,), "added_direction": (4, 8)}
    seen = []
    attention = model.model.layers[0].self_attn
    attention.hyper.register_forward_hook(lambda module, args, out: seen.append((args[0], out[0])))
    run(model, inputs)
    call, out = seen[0]
    expected = F.scored_attention(
        *(call.query, call.key, call.value),
        call.options.mask,
        is_causal=call.options.is_causal,
        scale=call.scale,
        enable_gqa=True,
        score="far",
        weight=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        power=1.5,
        direction=0.3,
    )
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
    assert_close(out.transpose(1, 2)[real], expected.transpose(1, 2)[real], 1e-5, "output")


def saved(folder):
    model = ha.patch_model(llama(), ha.ScoreConfig("decay", slope=0.2))
    perturb(model)
    model.save_pretrained(folder)
    return model


def test_a_checkpoint_says_what_defines_its_score_and_is_refused_without_it(tmp_path):
    define_decay()
    model = saved(tmp_path)
    (record,) = json.loads((tmp_path / "config.json").read_text())["hyperattn"]["mechanisms"]
    assert record["defined_in"] == "tests.mechanisms.test_scores:define_decay.<locals>.decay"
    card = (tmp_path / "README.md").read_text()
    assert (
        'import tests.mechanisms.test_scores  # registers "decay"' in card
        and "Logarithmic decay." in card
    )
    again = type(model).from_pretrained(tmp_path)
    assert difference(run(model, text_inputs()), run(again, text_inputs())) == 0
    by_name = tmp_path / "by name"
    model = llama()
    model.set_attn_implementation("decay")
    model.save_pretrained(by_name)
    assert (
        difference(
            run(model, text_inputs()), run(type(model).from_pretrained(by_name), text_inputs())
        )
        == 0
    )
    with restored():
        del MECHANISMS["decay"]
        for folder in (tmp_path, by_name):
            with pytest.raises(
                ValueError,
                match="score 'decay' is not registered; first import 'tests.mechanisms.test_scores', which",
            ) as caught:
                type(model).from_pretrained(folder)
            assert "\n" not in str(caught.value)


def test_a_formula_that_was_edited_is_warned_of(tmp_path, caplog):
    with restored():
        define_decay()
        model = saved(tmp_path)
        with caplog.at_level(logging.WARNING, "hf_hyperattn"):
            type(model).from_pretrained(tmp_path)
        assert not caplog.messages
    define_decay(factor=1.5)
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        type(model).from_pretrained(tmp_path)
    (message,) = caplog.messages
    assert (
        "score 'decay' of tests.mechanisms.test_scores" in message
        and "computes another formula" in message
    )


def test_what_the_hash_of_a_formula_tells_apart():
    hashes = []
    along = {"a": lambda x, u=0.1: (x * u).sum(-1)}
    more = {"a": lambda x, u=0.1: (x * u * 1.01).sum(-1)}
    for function, statistics in (
        (lambda dot, key_a, h=1.0: h * dot + key_a, along),
        (lambda dot, key_a, h=1.0: h * dot - key_a, along),
        (lambda dot, key_a, h=1.0: h * dot + key_a.detach(), along),
        (lambda dot, query_a, key_norm, h=1.0: h * dot * key_norm + query_a, along),
        (lambda dot, key_a, h=1.0: 1.5 * h * dot + key_a, along),
        (lambda dot, key_a, h=1.0: h * dot + key_a, more),
    ):
        with restored():
            ha.score("one", statistics=statistics)(function)
            hashes.append(ha.ScoreConfig("one").definition.formula)
    assert len(set(hashes)) == len(hashes)
    with restored():
        ha.score("one", statistics=along)(
            lambda dot, key_a, h=2.0: key_a * 1 + (h * dot + 0.0) * 1.0
        )
        assert isinstance(ha.ScoreConfig("one").definition.formula, str)


PROCESS = """
import sys, torch
import hf_hyperattn as ha
from transformers import AutoModelForCausalLM
if sys.argv[2] == "with":
    import outside_score_for_test
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model(torch.arange(9)[None]).logits.double().sum().item().hex())
"""


@pytest.mark.slow
def test_another_process_needs_the_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    lines = ["import hf_hyperattn as ha", "@ha.score('outside')", "def outside(dot, height=1.0):"]
    text = "\n".join([*lines, "    return height * dot.tanh()", ""])
    (tmp_path / "outside_score_for_test.py").write_text(text)
    __import__("outside_score_for_test")
    model = ha.patch_model(llama(), ha.ScoreConfig("outside"))
    perturb(model)
    model.save_pretrained(tmp_path / "model")
    expected = model.eval()(torch.arange(9)[None]).logits.double().sum().item()
    del sys.modules["outside_score_for_test"]
    outcomes = []
    for how in ("with", "without"):
        command = [sys.executable, "-c", PROCESS, str(tmp_path / "model"), how]
        where = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        outcomes.append(
            subprocess.run(command, capture_output=True, text=True, env=where, check=False)
        )
    assert abs(float.fromhex(outcomes[0].stdout.strip()) - expected) <= 1e-4 * abs(expected), (
        outcomes[0].stderr
    )
    assert (
        "score 'outside' is not registered; first import 'outside_score_for_test'"
        in outcomes[1].stderr
    )
