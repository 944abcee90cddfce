"""`hyperattn inject` beyond the first table: sparse rules, retrieval, safer candidates, resuming, rivals, time."""

import argparse
import json
import re
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hyperattn import HierarchicalCache
from hf_hyperattn.inject import costs, hsa, pays, sparse
from hf_hyperattn.inject.causal import CausalInjection
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.mechanisms.sparse import Pages, Window
from hyperattn_cli import main
from hyperattn_cli.commands import inject as command
from hyperattn_cli.commands.inject_task import prepare_task

from ..oracles.marks import first_always
from . import tiny
from .test_inject import prose

FEW = [
    SparseHeadRule(rule)
    for rule in (Window(16), Window(64), Pages(16, 4, 8, 4), Pages(16, 4, 8, 4, query="previous"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inject")
    (folder / "one.txt").write_text(prose(1))
    tiny.save(folder / "model", max_position_embeddings=256)
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    """Few rules, and a cache of one's own."""
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sparse, "candidates", lambda length: FEW)
    monkeypatch.setattr(
        hsa, "candidates", lambda length: [hsa.HsaHeadRule((4,), 16), hsa.HsaHeadRule((4,), 64)]
    )


def inject(capsys, folder, *more, mechanism="sparse") -> tuple[int, str, str]:
    arguments = [
        "--mechanism",
        mechanism,
        "--length",
        "192",
        "--rows",
        "32",
        "--text",
        str(folder / "one.txt"),
    ]
    code = main(["inject", str(folder / "model"), *arguments, *map(str, more)])
    return code, *capsys.readouterr()


def report_of(folder) -> dict:
    return json.loads((folder / "hyperattn_inject.json").read_text())


def test_sparse_rules_are_chosen_by_head_verified_on_retrieval_and_written(
    capsys, folder, tmp_path
):
    code, out, err = inject(
        capsys, folder, "--pairs", "0.6", "--allow-slower", "--output", tmp_path / "out"
    )
    assert code == 0, out + err
    report = report_of(tmp_path / "out")
    assert {"copying", "needle"} <= report["retrieval"].keys() and 0 < report["pairs"] <= 0.6
    assert (
        "answers, needle" in out
        and "Heads by rule:" in out
        and "than the original model's on this machine" in out
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "--allow-slower" in card
        and "of stock's time" in card
        and "retrieval: answers of needle" in card
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())["hyperattn"]
    (own,) = next(iter(config["overrides"].values()))
    assert own["mechanism"] == "sparse" and own["tuned_length"] == 192
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_held_out_text_has_no_part_in_the_choice(capsys, folder, tmp_path):
    """With another third part of the text, everything chosen is the same, the seed's needles included."""
    ids = tiny.tokenizer()(prose(1)).input_ids
    other = tiny.tokenizer().decode(ids[:384]) + prose(7)
    for name, text in (("a", prose(1)), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text(text)
        shutil.copytree(folder / "model", tmp_path / name / "model")
        more = ("--pairs", "0.6", "--allow-slower", "--output", tmp_path / name / "out")
        assert inject(capsys, tmp_path / name, *more)[0] == 0
    configs = [(tmp_path / name / "out" / "config.json").read_text() for name in "ab"]
    texts = [report_of(tmp_path / name / "out")["texts"] for name in "ab"]
    assert configs[0] == configs[1] and texts[0] != texts[1]


def refusing(monkeypatch, count: int) -> None:
    """The parts to choose on lose nothing, the held-out ones everything with the first `count` candidates."""

    def compute_losses(self, before, after):
        held_out = before.keys() == self.texts[2].keys()
        return dict.fromkeys(
            self.average_tasks(before), 1.0 if held_out and len(self.rejected) < count else 0.0
        )

    monkeypatch.setattr(CausalInjection, "compute_losses", compute_losses)


def test_the_next_safer_candidate_takes_the_place_of_one_refused(
    capsys, folder, tmp_path, monkeypatch
):
    refusing(monkeypatch, 1)
    code, out, err = inject(capsys, folder, "--allow-slower", "--output", tmp_path / "out")
    assert code == 0, out + err
    report = report_of(tmp_path / "out")
    assert len(report["refused"]) == 1 and report["refused"][0]["pairs"] < report["pairs"] < 1
    assert "of the pairs exceed a budget" in err


def test_a_causal_model_gets_sparse_rules_unless_told(capsys, folder, tmp_path):
    arguments = ["--length", "192", "--rows", "32", "--text", str(folder / "one.txt")]
    more = ["--pairs", "0.6", "--allow-slower", "--output", str(tmp_path / "out")]
    assert main(["inject", str(folder / "model"), *arguments, *more]) == 0
    out = capsys.readouterr().out
    assert report_of(tmp_path / "out")["asked"]["mechanism"] == "sparse"
    saved, lost, verified = re.search("(Saved: .*)\n(Lost, .*)\n(Verification.*)\n", out).groups()
    assert "of the attention pairs. At 192 tokens attention takes" in saved
    assert "perplexity +" in lost or "perplexity -" in lost
    assert "--pairs accepts any loss" in verified


def test_after_the_tried_candidates_come_safer_ones(capsys, folder, tmp_path, monkeypatch):
    """Each saves half as much as the one before; all have rules of their own."""
    refusing(monkeypatch, 99)
    report = {}
    monkeypatch.setattr(command, "explain_refusal", lambda args, made, _: report.update(made) or "")
    inject(capsys, folder, "--allow-slower", "--output", tmp_path / "out")
    refused = [row["pairs"] for row in report["refused"]]
    assert refused == sorted(refused) and len(set(refused)) == len(refused) >= 3
    assert refused[-1] < 1


@first_always("mechanism", ["sparse", "hsa"])
def test_where_all_are_refused_nothing_is_written(capsys, folder, tmp_path, monkeypatch, mechanism):
    refusing(monkeypatch, 99)
    code, out, _ = inject(
        capsys, folder, "--budget", "0.0001", "--output", tmp_path / "out", mechanism=mechanism
    )
    assert code == 1 and re.search("Nothing written. The (safest of|only candidate) ", out)
    assert "Add --resume to reuse the measurements." in out
    assert "perplexity at most +0.01 %" in out
    assert not (tmp_path / "out").exists()


def test_retrieval_has_a_budget_of_its_own():
    lenient, strict = (CausalInjection(None, [{}], FEW, 64, 0.02) for _ in range(2))
    lenient.tokenizer = strict.tokenizer = tiny.tokenizer()
    strict.retrieval_budget = 0.1
    assert lenient.meets_budgets({"text": 0.016, "needle": 9.0}) and not lenient.meets_budgets(
        {"text": 0.017, "needle": 0.0}
    )
    assert strict.meets_budgets({"text": 0.0, "needle": 0.08}) and not strict.meets_budgets(
        {"text": 0.0, "copying": 0.09}
    )
    assert strict.losses_in_budgets({"text": 0.01, "needle": 0.1}) == {"text": 0.5, "needle": 1.0}


def test_a_text_is_not_called_like_a_test(capsys, folder, tmp_path):
    for name in ("copying", "needle 3"):
        (tmp_path / name).write_text(prose(1))
        code = main(
            [
                "inject",
                str(folder / "model"),
                "--mechanism",
                "hsa",
                "--length",
                "64",
                "--text",
                str(tmp_path / name),
            ]
        )
        assert code == 2 and "a test of retrieval has this name" in capsys.readouterr().err


def test_equal_times_are_not_faster(capsys):
    args, report = (
        argparse.Namespace(mechanism="sparse", allow_slower=False, cost=None),
        {"length": 64},
    )
    report["attention_seconds"] = {"before": 1.0, "after": 0.99}
    assert "Nothing written" in command.check_speed(
        args, report, pays.Pays(None, {64: (1.0, 0.99)})
    )
    assert not report["faster"] and "NOT faster" in capsys.readouterr().out


@pytest.mark.slow
def test_a_slower_model_is_not_called_faster(capsys, folder, tmp_path, monkeypatch):
    """What the sentence, the table and the card say of this length is what was timed for it."""
    monkeypatch.setattr(
        command, "pays_from", lambda *_: pays.Pays(1024, {192: (1.0, 1.5), 1024: (1.0, 0.5)})
    )
    code, out, _ = inject(capsys, folder, "--pairs", "0.6", "--output", tmp_path / "out")
    assert (
        code == 1
        and "attention is NOT faster than the original model's on this machine (1.50x the time)"
        in out
        and "It is faster from 1,024 tokens on" in out
    )
    assert re.search(r"attention, time +1.00 s +1.50 s +1.50x the time", out)
    assert "--allow-slower" in out and not (tmp_path / "out").exists()
    code, out, _ = inject(
        capsys, folder, "--pairs", "0.6", "--output", tmp_path / "out", mechanism="hsa"
    )
    assert (
        code == 0
        and "NOT faster" in out
        and "(not faster)" in (tmp_path / "out" / "README.md").read_text()
    )


@pytest.mark.slow
def test_resuming_measures_nothing_again(capsys, folder, monkeypatch):
    """Neither what rules lose alone nor what choices lose together, and the choice is the same."""
    count = []
    for name, function in (("measure", "compare_rules"), ("causal", "loss_parts")):
        module = sys.modules[f"hf_hyperattn.inject.{name}"]
        inner = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *a, n=name, inner=inner: count.append(n) or inner(*a)
        )
    counts, printed = [], []
    for more in ((), ("--resume",), ("--resume", "--seed", "4"), ()):
        count.clear()
        code, out, _ = inject(capsys, folder, "--pairs", "0.6", "--allow-slower", *more)
        assert code == 0
        counts.append((count.count("measure"), count.count("causal")))
        printed.append(out[out.index("Tried") : out.index("Held-out")])
    assert counts[0] == counts[3] and min(counts[0]) > 0 and counts[1] == (0, 0)
    assert (
        counts[2][0] == counts[0][0] and counts[2][1] > 0
    )  # texts are the same, needles are others
    assert printed[0] == printed[1] == printed[3]


def test_rivals_have_no_more_pairs_and_the_model_is_as_it_was(capsys, folder, tmp_path):
    more = ("--pairs", "0.6", "--compare", "--allow-slower", "--output", tmp_path / "out")
    code, out, err = inject(capsys, folder, *more)
    assert code == 0, out + err
    rivals, pairs = report_of(tmp_path / "out")["rivals"], report_of(tmp_path / "out")["pairs"]
    assert {
        "this choice",
        "sinks and window, one for all",
        "sinks and window, by head",
    } <= rivals.keys()
    assert any("pages" in name for name in rivals)
    assert all(rival["pairs"] <= max(0.6, pairs) for rival in rivals.values())
    assert "Rivals at no more of the pairs" in out
    report = report_of(tmp_path / "out")
    assert rivals["this choice"]["losses"]["one.txt"] == pytest.approx(
        report["texts"]["one.txt"]["loss"], abs=1e-6
    )
    ids = torch.tensor(tiny.tokenizer()(prose(1)).input_ids[384:576])[None]
    patched = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    after = patched(ids, labels=ids).loss.exp().item()
    assert after == pytest.approx(report["texts"]["one.txt"]["after"], rel=1e-3)


@pytest.mark.slow
def test_hsa_is_compared_with_sparse_rules_that_it_does_not_choose(capsys, folder, tmp_path):
    more = ("--pairs", "0.8", "--compare", "--output", tmp_path / "out")
    code, out, err = inject(capsys, folder, *more, mechanism="hsa")
    assert code == 0, out + err
    assert "Quest pages, one for all" in report_of(tmp_path / "out")["rivals"]
    assert '"sparse"' not in (tmp_path / "out" / "config.json").read_text()


def test_cache_bytes_as_the_cost(capsys, folder, tmp_path):
    """The card says it, and a cache that forgets holds less; a model that is not faster is written all the same."""
    more = ("--pairs", "0.9", "--cost", "bytes", "--compare", "--output", tmp_path / "out")
    code, out, err = inject(capsys, folder, *more)
    assert code == 0, out + err
    report = report_of(tmp_path / "out")
    assert (
        report["cost"]["name"] == report["asked"]["cost"] == "bytes"
        and report["cost"]["share"] <= 0.9
    )
    assert (
        "of the cache's bytes, at any loss" in out
        and "Rivals at no more of the cache's bytes" in out
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--cost bytes" in card and "chosen by cache bytes (" in card and "evict=True" in card
    assert "corrected 2 times by what heads lose together" in card
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    cache = HierarchicalCache(model, evict=True)
    with torch.no_grad():
        model(torch.arange(5, 197)[None], past_key_values=cache)
    assert any(layer.keep for layer in cache.layers)


def test_the_time_of_rules_as_the_cost(capsys, folder, tmp_path, monkeypatch):
    prices = dict(zip(FEW, (0.1, 0.9, 0.95, 0.99)))
    monkeypatch.setattr(
        costs, "measure_times", lambda rules, *_: {rule: prices.get(rule, 1.0) for rule in rules}
    )
    more = ("--pairs", "0.6", "--cost", "time", "--allow-slower", "--output", tmp_path / "out")
    code, out, err = inject(capsys, folder, *more)
    assert code == 0, out + err
    assert (
        0.1 <= report_of(tmp_path / "out")["cost"]["share"] <= 0.6
        and "attention's time, of the rules alone" in out
    )
    assert "chosen by the time of rules" in (tmp_path / "out" / "README.md").read_text()


def test_a_share_that_no_rules_reach_is_refused(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "measure_times", lambda rules, *_: dict.fromkeys(rules, 0.7))
    code, _, err = inject(
        capsys, folder, "--pairs", "0.6", "--cost", "time", "--output", tmp_path / "out"
    )
    assert (
        code == 2
        and "60.0% of stock's time is out of reach: the cheapest rules take 70.0% at" in err
    )
    monkeypatch.setattr(costs, "measure_times", lambda rules, *_: dict.fromkeys(rules, 1.5))
    code, _, err = inject(
        capsys, folder, "--pairs", "1", "--cost", "time", "--output", tmp_path / "out"
    )
    assert (
        code == 2 and "at 1 of the cost all attention stays exact; allowed: a smaller share" in err
    )
    assert not (tmp_path / "out").exists()


def test_options_that_say_nothing_are_refused(capsys, folder):
    for mechanism, more, said in (
        ("hsa", ["--allow-slower"], "--allow-slower says nothing for --mechanism hsa"),
        (
            "sparse",
            ["--cost", "bytes", "--allow-slower"],
            "--allow-slower says nothing with --cost bytes",
        ),
        ("sparse", ["--rank", "4"], "--rank says nothing for --mechanism sparse"),
        ("collaborative", ["--compare"], "--compare says nothing"),
        ("collaborative", ["--retrieval-budget", "1"], "--retrieval-budget says nothing"),
        ("collaborative", ["--cost", "bytes"], "--cost says nothing"),
        ("sparse", ["--retrieval-budget", "0"], "--retrieval-budget 0 is not allowed"),
        ("sparse", ["--retrieval-budget", "inf"], "--retrieval-budget inf is not allowed"),
    ):
        code, out, err = inject(capsys, folder, *more, mechanism=mechanism)
        assert code == 2 and said in err and not out


@pytest.mark.parametrize(
    "ratios, start",
    [
        ({128: 2.0, 256: 1.5, 512: 0.9}, 512),
        ({128: 2.0, 256: 0.8}, 256),
        ({128: 0.5, 256: 0.5}, 128),
    ],
)
def test_from_which_length_it_pays(monkeypatch, ratios, start):
    """Times that depend on the length alone: looked for upwards or downwards from the length of the text."""
    monkeypatch.setattr(pays, "attention_times", lambda model, ids: (1.0, ratios[ids.shape[-1]]))
    found = pays.pays_from(None, torch.arange(256))
    assert found.start == start and f"from {start:,} tokens" in found.to_sentence()
    monkeypatch.setattr(pays, "attention_times", lambda model, ids: (1.0, 1.1))
    never = pays.pays_from(None, torch.arange(256), longest=700)
    assert never.start is None and max(never.seconds) == 512 and "not faster" in never.to_sentence()


@pytest.mark.parametrize("bos", [False, True])
def test_every_part_begins_with_the_bos_token_of_the_tokenizer(tmp_path, bos):
    """As the model reads texts elsewhere; a model that expects it is another one without it."""
    (tmp_path / "one.txt").write_text(prose(1))
    model = tiny.save(tmp_path / "model", bos, max_position_embeddings=256)
    task = prepare_task(
        argparse.Namespace(model=str(model), text=[str(tmp_path / "one.txt")], length=192)
    )
    plain = tiny.tokenizer()(prose(1)).input_ids
    piece = 192 - bos
    for i, part in enumerate(task.texts):
        assert part["one.txt"].tolist() == [tiny.BOS] * bos + plain[i * piece : (i + 1) * piece]
    chosen = CausalInjection(
        None, task.texts, rules=[], length=192, budget=0.1, tokenizer=task.tokenizer
    )
    made = [e for part in chosen.texts for name, e in part.items() if name != "one.txt"]
    assert len(made) > 4 and all(
        (e.ids == tiny.BOS).nonzero().flatten().tolist() == [0] * bos for e in made
    )
