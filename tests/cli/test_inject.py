"""`hyperattn inject` on tiny models: what is measured, chosen, verified and written; and what stands behind it."""

import getpass
import json
import math
import random
import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel

import hf_hyperattn
import hub_cards
from hf_hyperattn.inject import Allocation, CandidateRule, choose, hsa, measure
from hf_hyperattn.inject.gradients import attention_gradients, loss_of
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.mechanisms.hsa.layer import EVERYTHING
from hyperattn_cli import build_parser, main
from hyperattn_cli.commands.inject_task import public_command
from tests.integration.models import bert
from tests.mechanisms.hsa.hsa_calls import key_tied
from tests.oracles.marks import first_always

from . import tiny

WORDS = "the quick brown fox jumps over a lazy dog and then goes home to sleep near its own red barn".split()


def prose(seed: int, words: int = 700) -> str:
    choose = random.Random(seed).choice
    return " ".join(choose(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inject")
    for name, seed in (("one", 1), ("two", 2)):
        (folder / f"{name}.txt").write_text(prose(seed))
    tiny.save(folder / "model", max_position_embeddings=256)
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """What is measured is kept in a folder of the test's own."""
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()


def inject(capsys, folder, *more) -> tuple[int, str, str]:
    texts = [str(folder / "one.txt"), str(folder / "two.txt")]
    arguments = ["--mechanism", "hsa", "--length", "192", "--rows", "32", "--text", *texts]
    code = main(["inject", str(folder / "model"), *arguments, *map(str, more)])
    return code, *capsys.readouterr()


def brute_pairs(n, sizes, near, sinks, top, dropped) -> int:
    """Pairs by walking down the windows query by query, with one drawn score for every block."""
    draw, total = random.Random(n), 0
    for i in range(n):
        own = i // sizes[0] * sizes[0]
        stand = {}  # open parents' closed children, level by level
        queue = [b for b in range(0, i // sizes[-1] * sizes[-1], sizes[-1])]
        inside = [i // sizes[-1] * sizes[-1]]
        for level in range(len(sizes) - 1, -1, -1):
            size = sizes[level]
            forced = [b for b in queue if own - (b + size - 1) < near or b < sinks]
            free = sorted((b for b in queue if b not in forced), key=lambda _: draw.random())
            total += len(free) if top or not dropped else 0
            opened = forced + free[:top]
            below = sizes[level - 1] if level else 1
            queue = [c for b in opened for c in range(b, b + size, below)]
            if level:
                start, end = inside[0], i // below * below
                queue += list(range(start, end, below))
                inside = [end]
        stand[i] = queue
        total += len(queue) + i - own + 1
    return total


@pytest.mark.parametrize("sizes", [(4,), (4, 16), (2, 8, 32)])
@pytest.mark.parametrize("rule", [(0, 0, 0), (5, 3, 2), (17, 0, 1), (9, 4, 0)])
@pytest.mark.parametrize("dropped", [False, True])
def test_pairs_are_those_of_a_walk_down_the_windows(sizes, rule, dropped):
    for n in (1, 31, 70):
        assert hsa.count_pairs(n, sizes, *rule, dropped=dropped) == brute_pairs(
            n, sizes, *rule, dropped
        )


def test_near_as_long_as_the_text_is_every_pair():
    assert HsaHeadRule((4,), 50, 0).share(50) == 1


def test_gradients_are_those_of_plain_autograd(model):
    """By a change of the value projection: o is linear in it, so d loss / d W_o meets both."""
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0))
    seen = {}
    hf_hyperattn.patch_model(model, hf_hyperattn.HsaConfig(), mode="blend")
    loss = attention_gradients(
        model,
        ids,
        lambda name, call, out, g: seen.update({name: (out, g)}),
        partial(loss_of, ids=ids),
    )
    hf_hyperattn.unpatch_model(model)
    assert loss == pytest.approx(model(ids[None], labels=ids[None]).loss.item(), rel=1e-5)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    logits = model(ids[None]).logits[0, :-1]
    F.cross_entropy(logits, ids[1:], reduction="sum").backward()
    for i, layer in enumerate(model.model.layers):
        out, g = seen[f"model.layers.{i}.self_attn"]
        rows = (
            out[0].transpose(0, 1).flatten(1)
        )  # what o_proj reads; W_o.grad = Σ (d/d output) rowᵀ
        slopes = g[0].transpose(0, 1).flatten(1)  # = (d/d output) W_o
        weight = layer.self_attn.o_proj.weight
        assert torch.allclose(
            (slopes * rows).sum(), (weight.grad * weight).sum(), rtol=1e-3, atol=1e-4
        )


def test_slopes_are_the_gradient_along_the_change(model):
    """Against the torch way of the mechanism, at every query."""
    ids = torch.tensor(tiny.tokenizer()(prose(3)).input_ids[:128])
    settings = [HsaHeadRule((4,), EVERYTHING), HsaHeadRule((4, 16), 8, 2, 1, -1.0)]
    seen = {}
    hf_hyperattn.patch_model(model, hf_hyperattn.HsaConfig(), mode="blend")
    attention_gradients(
        model, ids, lambda name, *rest: seen.update({name: rest}), partial(loss_of, ids=ids)
    )
    hf_hyperattn.unpatch_model(model)
    measured = measure(model, ids, settings, rows=128, keep_slopes=True)
    assert list(measured.costs) == list(seen)[::-1]
    for name, (call, out, g) in seen.items():
        rule = dict(near=8, sinks=2, refine_top_k=1, block_bias=-1.0)
        tied, _ = key_tied(
            call.query,
            call.key,
            call.value,
            (4, 16),
            is_causal=True,
            scale=call.scale,
            backend="rows",
            **rule,
        )
        expected = (g * (tied - out)).sum(-1)[0].T
        assert torch.allclose(measured.slopes[name][..., 0], torch.zeros(128, 4), atol=1e-4)
        assert torch.allclose(measured.slopes[name][..., 1], expected, rtol=1e-3, atol=1e-4)
        assert torch.allclose(
            measured.costs[name], (measured.slopes[name].double() ** 2).mean(0) / 2
        )


def test_the_certificate_is_that_of_the_weights(model):
    ids = torch.tensor(tiny.tokenizer()(prose(4)).input_ids[:96])
    from hf_hyperattn.analysis.hsa_certificate import certificate

    settings = [HsaHeadRule((4, 16), 8, 2, 1, bias) for bias in (0.0, 1.5, -2.0, -math.inf)]
    measured = measure(model, ids, settings, rows=96)
    for i, setting in enumerate(settings):
        for loss in certificate(model, ids[None], setting.layer_config([setting] * 4)):
            assert measured.kl[loss.name][:, i].tolist() == pytest.approx(loss.heads, abs=1e-4)


def test_the_choice_is_the_cheapest_of_all():
    """Against every combination, for two layers of two heads."""
    settings = [HsaHeadRule((4,), 8), HsaHeadRule((4,), 16, refine_top_k=1), HsaHeadRule((8,), 8)]
    drawn = torch.Generator().manual_seed(0)
    losses = {name: torch.rand(2, 3, generator=drawn, dtype=torch.float64) for name in "ab"}
    chosen = choose(settings, losses, 64, pairs=0.6)
    cost = lambda s: sum(
        losses[n][h, settings.index(x)].item()
        for n in "ab"
        for h, x in enumerate(s[n])
        if not x.is_exact
    )
    kinds = [
        [HsaHeadRule((4,), EVERYTHING, 0), *settings[:2]],
        [HsaHeadRule((8,), EVERYTHING, 0), settings[2]],
    ]
    layers = [(x, y) for kind in kinds for x in kind for y in kind]
    better = [
        {"a": a, "b": b}
        for a in layers
        for b in layers
        if Allocation({"a": a, "b": b}, 64).pairs <= chosen.pairs
    ]
    assert chosen.pairs <= 0.6
    assert {
        config.tuned_length for own in chosen.config().overrides.values() for config in own
    } == {64}
    assert cost(chosen.layers) == pytest.approx(min(map(cost, better)))


@first_always("length", [192, 2048, 8192])
def test_candidates_fit_the_length(length):
    """No window or nearness as long as the text, refinement within its pairs, biases of one rule in a row."""
    found = hsa.candidates(length)
    rules = [(s.windows, s.near, s.refine_top_k) for s in found]
    assert len(set(found)) == len(found) == len(hsa.BIASES) * len(set(rules))
    assert rules == sorted(rules, key=list(dict.fromkeys(rules)).index)
    assert all(s.windows[-1] < length and s.near <= length / 2 for s in found)
    assert all(s.share(length) <= hsa.MOST for s in found if s.refine_top_k)


def test_it_measures_chooses_verifies_and_writes(capsys, folder, tmp_path):
    code, out, err = inject(capsys, folder, "--output", tmp_path / "out", "--budget", "0.5")
    assert code == 0, out + err
    assert "KL of tied from own attention" in out and f"written: {tmp_path / 'out'}" in out
    assert "verifying on held-out text" in err
    report = json.loads((tmp_path / "out" / "hyperattn_inject.json").read_text())
    assert 0 < report["pairs"] < 1
    assert re.search(rf"attended pairs +100.0% +{report['pairs']:.1%}", out)
    card = (tmp_path / "out" / "README.md").read_text()
    texts = "one.txt two.txt"
    run = f"hyperattn inject model --mechanism hsa --length 192 --rows 32 --text {texts} --output out --budget 0.5"
    assert "perplexity" in card and f"`{run}`" in card  # as it was run, of paths the last part
    assert_nothing_private(tmp_path / "out", folder, tmp_path)
    patched = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for name in ("one", "two"):  # the third part of the text has the perplexity that was printed
        ids = torch.tensor(
            tiny.tokenizer()((folder / f"{name}.txt").read_text()).input_ids[384:576]
        )[None]
        after = math.exp(patched(ids, labels=ids).loss.item())
        assert after == pytest.approx(report["texts"][f"{name}.txt"]["after"], rel=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def assert_nothing_private(written, *folders):
    for path in (p for p in written.rglob("*") if p.is_file()):
        for private in (*map(str, folders), getpass.getuser() + "@"):
            assert private.encode() not in path.read_bytes(), path.name


@pytest.mark.parametrize(
    "model, more, said",
    [
        ("org/base", ["--text", "/home/me/a b.txt", "c.txt"], "org/base --text 'a b.txt' c.txt"),
        (
            "/home/me/base/",
            ["--text=/x/y.txt", "--output=/z/new"],
            "base --text=y.txt --output=new",
        ),
        ("../me/base", ["--budget", "0.10", "--text", "y"], "base --budget 0.10 --text y"),
        (".", ["--output", "../new", "--text", "y"], "here --output new --text y"),
    ],
)
def test_the_command_on_a_card(model, more, said, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    argv = ["inject", model, "--mechanism", "hsa", *more]
    args = build_parser().parse_args(argv)
    args.argv = argv
    first, _, rest = said.partition(" ")
    assert public_command(args) == f"hyperattn inject {first} --mechanism hsa {rest}"


@pytest.mark.slow
def test_a_seed_gives_one_result(capsys, folder, tmp_path):
    for name in ("a", "b"):
        assert (
            inject(capsys, folder, "--pairs", "0.7", "--output", tmp_path / name, "--seed", "3")[0]
            == 0
        )
    configs = [(tmp_path / name / "config.json").read_text() for name in ("a", "b")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_what_is_interrupted_leaves_nothing(capsys, folder, tmp_path, monkeypatch, interrupt):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("kept")

    def stop(*_, **__):
        raise interrupt

    monkeypatch.setattr(hub_cards, "try_to_write_card", stop)
    arguments = ["--pairs", "0.8", "--output", tmp_path / "out", "--force"]
    if interrupt is KeyboardInterrupt:
        assert inject(capsys, folder, *arguments)[0] == 130
    else:
        code, _, err = inject(capsys, folder, *arguments)
        assert code == 2 and err.endswith(
            "hyperattn inject: error: RuntimeError; --traceback shows where\n"
        )
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "kept"


def refused(capsys, *arguments) -> str:
    assert main(["inject", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("hyperattn inject: error: ") and err.count("\n") == 1
    return err


def test_bad_input_is_refused_in_one_line(capsys, folder, tmp_path):
    start = [folder / "model", "--text", folder / "one.txt"]
    hsa = [*start, "--mechanism", "hsa"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe" * 99)
    for arguments, said in (
        ([*start, "--mechanism", "cone"], "allowed: hsa"),
        ([*hsa, "--budget", "0"], "--budget 0"),
        ([*hsa, "--budget", "nan"], "--budget nan"),
        ([*hsa, "--pairs", "1.5"], "--pairs 1.5"),
        ([*hsa, "--length", "3"], "--length 3"),
        ([*hsa, "--length", "4096"], "up to 256"),
        ([*hsa, "--rows", "0"], "--rows 0"),
        ([*hsa, "--seed", "-1"], "--seed -1"),
        ([*hsa, "--output", tmp_path / "full"], "not empty"),
        ([*hsa, "--output", tmp_path / "full", "--force"], "holds no checkpoint"),
        ([*hsa, "--output", folder / "model", "--force"], "which would be lost"),
        ([*hsa, "--output", tmp_path / "full" / "file"], "no directory"),
        ([*hsa, "--output", tmp_path / "no" / "where"], "is no folder"),
        ([folder, "--mechanism", "hsa", "--text", folder / "one.txt"], "not a model"),
        ([folder / "none", "--mechanism", "hsa", "--text", folder / "one.txt"], "no such folder"),
        ([folder / "model", "--mechanism", "hsa", "--text", tmp_path / "none"], "No such file"),
        ([folder / "model", "--mechanism", "hsa", "--text", tmp_path / "bytes"], "not UTF-8"),
        (
            [*start, folder / "one.txt", "--mechanism", "hsa", "--length", "64"],
            "a second text called",
        ),
    ):
        assert said in refused(capsys, *arguments)
    (tmp_path / "short.txt").write_text(prose(1, 60))
    short = [
        folder / "model",
        "--mechanism",
        "hsa",
        "--text",
        tmp_path / "short.txt",
        "--length",
        "256",
    ]
    assert "768 or more" in refused(capsys, *short)


def test_an_encoder_is_tied_within_its_budget(capsys, folder, tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=256,
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    arguments = [
        "--mechanism",
        "hsa",
        "--length",
        "96",
        "--text",
        folder / "one.txt",
        "--budget",
        "0.05",
    ]
    (folder / "one.txt").write_text(prose(1, 4000))
    for option in (("--rows", "64"), ("--seed", "0")):
        assert f"{option[0]} has no effect on an encoder" in refused(
            capsys, tmp_path / "bert", *arguments, *option
        )
    said = refused(capsys, tmp_path / "bert", *arguments, "--pairs", "0.6")
    assert (
        "--budget has no effect on an encoder together with --pairs; leave out one of them" in said
    )
    said = refused(capsys, tmp_path / "bert", *arguments, "--cost", "bytes")
    assert (
        "--cost has no effect on an encoder, whose rules go by layer, and which keeps no cache"
        in said
    )
    code = main(
        ["inject", *map(str, [tmp_path / "bert", *arguments, "--output", tmp_path / "out"])]
    )
    out, err = capsys.readouterr()
    assert code == 0, out + err
    report = json.loads((tmp_path / "out" / "hyperattn_inject.json").read_text())
    assert report["metric"] == "cosine" and report["pairs"] < 1
    (row, *_) = (line for line in out.splitlines() if line.startswith("cosine, "))
    assert row.split()[-1] == f"{next(iter(report['texts'].values()))['loss']:.4f}"


def test_an_encoder_gets_sparse_rules(capsys, folder, tmp_path):
    """They run as masks, and are written where a slower model is wanted."""
    bert(max_position_embeddings=256, vocab_size=260).save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    (folder / "sparse.txt").write_text(prose(1, 4000))
    arguments = [
        "--mechanism",
        "sparse",
        "--length",
        "96",
        "--text",
        folder / "sparse.txt",
        "--pairs",
        "0.7",
    ]
    said = refused(capsys, tmp_path / "bert", *arguments, "--retrieval-budget", "0.1")
    assert "--retrieval-budget has no effect on an encoder" in said
    arguments += ["--compare", "--allow-slower", "--output", tmp_path / "out"]
    code = main(["inject", *map(str, [tmp_path / "bert", *arguments])])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    report = json.loads((tmp_path / "out" / "hyperattn_inject.json").read_text())
    assert report["metric"] == "cosine" and 0 < report["pairs"] <= 0.7
    assert "sinks and window, by layer" in report["rivals"] and "near" in out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hyperattn"]["mechanisms"][0]["mechanism"] == "sparse"
    again = hf_hyperattn.describe(AutoModel.from_pretrained(tmp_path / "out"))
    assert "sparse" in str(again)


@dataclass(frozen=True)
class Recent(CandidateRule):
    """A rule from outside the package: only the last keys are seen."""

    keys: int

    is_exact = property(lambda self: self.keys >= 10**6)
    group = "recent"

    def share(self, length):
        return sum(min(i + 1, self.keys) for i in range(length)) / (length * (length + 1) / 2)

    def exact(self):
        return Recent(10**6)

    @staticmethod
    def layer_config(rules, length):
        return hf_hyperattn.HsaConfig((), near=tuple(rule.keys for rule in rules))

    @staticmethod
    def base_config():
        return hf_hyperattn.HypeConfig()

    @staticmethod
    def compare(call, rules, starts, project):
        at = torch.cat([torch.arange(s, s + 16) for s in starts])
        key, value = (
            t[0].repeat_interleave(len(call.query[0]) // len(t[0]), 0)
            for t in (call.key, call.value)
        )
        logits = call.scale * call.query[0][:, at] @ key.mT
        age = at[:, None] - torch.arange(key.shape[1])
        exact = logits.masked_fill(age < 0, -math.inf)
        for rule in rules:
            kept = exact.masked_fill(age >= rule.keys, -math.inf)
            yield project(kept.softmax(-1) @ value), exact.logsumexp(-1) - kept.logsumexp(-1)


def test_a_rule_from_outside_is_measured_and_allocated(model):
    """Beside our own; KL(dropped ‖ own) is the difference of the log-sum-exps."""
    ids = torch.tensor(tiny.tokenizer()(prose(5)).input_ids[:96])
    rules = [Recent(96), Recent(24), HsaHeadRule((4,), 8), HsaHeadRule((4,), EVERYTHING)]
    measured = measure(model, ids, rules, rows=96)
    for costs, kl in zip(measured.costs.values(), measured.kl.values()):
        assert costs[:, [0, 3]].max() < 1e-8 and kl[:, [0, 3]].abs().max() < 1e-4
        assert costs[:, 1].min() > 0 and kl[:, 1].min() > 0
    losses = {
        name: costs * torch.tensor([1, i, 1 - i, 1])
        for i, (name, costs) in enumerate(measured.costs.items())
    }
    kinds = [
        {type(rule) for rule in rules}
        for rules in choose(rules, losses, 96, pairs=0.7).layers.values()
    ]
    assert {Recent} in kinds and {HsaHeadRule} in kinds and all(len(kind) == 1 for kind in kinds)


def test_pairs_of_an_encoder_are_those_that_are_wanted(capsys, folder, tmp_path):
    bert(max_position_embeddings=256, vocab_size=260).save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    (folder / "long.txt").write_text(prose(1, 4000))
    arguments = [
        "--mechanism",
        "hsa",
        "--length",
        "64",
        "--text",
        folder / "long.txt",
        "--pairs",
        "0.6",
    ]
    arguments += ["--compare", "--output", tmp_path / "out"]
    assert main(["inject", *map(str, [tmp_path / "bert", *arguments])]) == 0
    report = json.loads((tmp_path / "out" / "hyperattn_inject.json").read_text())
    assert 0 < report["pairs"] <= 0.6
    rivals = report["rivals"]
    assert {"this choice", "tying both, one for all", "tying both, by layer"} <= set(rivals)
    assert all(0 < rival["pairs"] <= report["pairs"] + 1e-9 for rival in rivals.values())
    assert rivals["this choice"]["losses"] == {
        n: pytest.approx(t["loss"]) for n, t in report["texts"].items()
    }
    arguments[arguments.index("0.6")] = "0.01"
    assert main(["inject", *map(str, [tmp_path / "bert", *arguments, "--force"])]) == 2
    assert (
        "1.0% of stock's pairs is out of reach: the cheapest rules take" in capsys.readouterr().err
    )
