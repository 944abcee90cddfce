"""The frontier's cells, its yardstick, its table; the model runs elsewhere."""

import math
from types import SimpleNamespace

import frontier
import pytest
import torch
from common import cpu
from frontiers import cells
from frontiers.cells import STOCK, Cell, read_results
from frontiers.choices import Choices, counted, digest_of, plain
from frontiers.rules import ABLATIONS, HEALED, METHODS, ExactTopK, as_run, candidates
from frontiers.table import mixed_table, short_table, table
from peft import get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.inject import Allocation, loss_parts, retrieval
from hf_hyperattn.inject.gradients import final_hidden, head_of
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.integration import lora_config
from hf_hyperattn.mechanisms.sparse import Exact, Pages, Window
from hyperattn_cli.commands import demo_long
from tests.cli import tiny
from tests.mechanisms.sparse.test_sparse_models import llama


def test_every_cell_is_there_once_and_every_method_has_rules():
    for length in cells.BUDGETS:
        every = list(cells.cells([length]))
        assert len({cell.key for cell in every}) == len(every) and every[0].method == STOCK
        methods = {cell.method for cell in every} - {STOCK} - set(ABLATIONS)
        assert methods <= set(METHODS)
    rules = candidates(2048)
    assert len(set(rules)) == len(rules) and not any(rule.is_exact for rule in rules)
    for method in METHODS:
        assert any(map(METHODS[method], rules)), method
    assert {cell.budget for cell in cells.cells([2048])} == {0.05, 0.1, 0.2, 0.4, 1.0}


def test_the_yardstick_sees_the_heaviest_keys():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 3, 12, 4)
    mask = ExactTopK(5).mask(query, key)[0]
    for head in range(3):
        for i in range(12):
            logits = (query[0, head, i] @ key[0, head, : i + 1].T).tolist()
            best = sorted(range(i + 1), key=lambda j: -logits[j])[:5]
            assert set(mask[head, i].nonzero().flatten().tolist()) == set(best)
    assert ExactTopK(5).share(12) == pytest.approx(mask[0].sum().item() / 78)


class Costs(Choices):
    """Choices whose losses are made up: what a rule leaves out, more at the first head."""

    def __init__(self, length):
        self.length, self.rules = length, candidates(length)
        lost = (
            torch.tensor([1 - rule.share(length) for rule in self.rules], dtype=torch.float64) ** 2
        )
        self.table = {name: torch.stack([4 * lost, lost]) for name in ("a", "b")}

    def losses(self, index):
        return {name: costs[:, index] for name, costs in self.table.items()}


def test_the_yardstick_runs_as_single_keys_with_the_querys_own():
    """Where that is one of the heaviest, the same keys; else it stands there for the last of them."""
    top, others = SparseHeadRule(ExactTopK(6)), SparseHeadRule(Window(4))
    (ran, *rest) = as_run(Allocation({"a": (top, others, SparseHeadRule(Exact()))}, 40)).layers["a"]
    assert rest == [others, SparseHeadRule(Exact())] and isinstance(ran.rule, Pages)
    query, key = torch.randn(2, 1, 3, 40, 16)
    defined, run = top.rule.mask(query, key), ran.rule.mask(query, key)
    own = torch.eye(40, dtype=torch.bool)
    assert torch.equal(run.sum(-1), defined.sum(-1)) and (run & own).any(-1).all()
    heaviest = (defined & own).any(-1)
    assert 0 < heaviest.sum() < heaviest.numel() and torch.equal(run[heaviest], defined[heaviest])
    assert ((run & ~defined).sum(-1) == ~heaviest).all()


def test_allocations_keep_their_budget():
    choices = Costs(2048)
    for cell in cells.cells([2048]):
        if cell.method == STOCK:
            continue
        made = choices.of(cell)
        assert (
            made is not None
            or cell.budget < 0.2
            and cell.method not in ("HSA", "all rules", "sinks and window")
        )
        if made is None or cell.method in ABLATIONS:
            continue
        rules = [rule for heads in made.layers.values() for rule in heads]
        assert made.cost <= cell.budget * 1.01
        assert all(rule.is_exact or METHODS[cell.method](rule) for rule in rules)
        assert cell.kind in ("by head", "together") or len(set(rules)) == 1
        assert sum(counted(made).values()) == len(rules)


def test_ablations_change_what_they_say():
    cell = Cell(2048, "HSA, blocks dropped", "by head", 0.2)
    rules = [rule for heads in Costs(2048).of(cell).layers.values() for rule in heads]
    assert all(rule.is_exact or rule.block_bias == -float("inf") for rule in rules)
    cell = Cell(2048, "HSA, no refinement", "by head", 0.2)
    rules = [rule for heads in Costs(2048).of(cell).layers.values() for rule in heads]
    assert all(rule.refine_top_k == 0 for rule in rules)


def result() -> dict:
    names = ("a", "b", "c", "d", "e")
    tasks = {
        "copying": {"nats": [1.0, 2.0], "exact": [0, 0]},
        "mixture": {"nats": [3.0], "exact": [0]},
    }
    entry = lambda more, **pairs: (
        pairs
        | {
            "texts": {name: [2.0 + more, 3.0 + more] for name in names},
            "retrieval": {
                t: {**s, "nats": [x + 2 * more for x in s["nats"]]} for t, s in tasks.items()
            },
            "seconds": [1.0 + more] * 5,
            "bytes": 100,
        }
    )
    quest = Cell(2048, "Quest", "by head", 0.2)
    stock = entry(0.0, seconds_on={cpu(): [2.0]})
    return {"cells": {Cell(2048, STOCK).key: stock, quest.key: entry(0.01, pairs=0.199)}}


def test_a_row_says_what_was_measured(capsys):
    assert table(result(), 2048).splitlines()[2] == (
        "| 20% | Quest | by head | 19.9% | +1.01% ± 0.00% | +1.01% | +1.01% | +1.01% | +1.01% | +1.01% | +2.0% | +2.0% "
        "|  | 1.01 | 1.00 |"
    )
    more = result()
    for cell, nats in (("stock//1", [1.0, 2.0, 3.0]), ("Quest/by head/0.2", [1.1, 2.2, 3.3])):
        more["cells"][f"2048/{cell}"]["retrieval"]["needle"] = {"nats": nats, "exact": [1, 1, 1]}
    assert "| needle +22.1% ± 7.1% |" in table(more, 2048)
    half = result()
    del half["cells"]["2048/Quest/by head/0.2"]["texts"]["e"]
    half["cells"]["2048/stock//1"]["retrieval"] |= {"needle": {"nats": [1.0], "exact": [1]}}
    every = list(cells.cells([2048]))
    for wanted in (every, [cell for cell in every if cell.method == "Quest"]):
        frontier.plan(half, wanted)
        left = len(wanted) - (cells.STOCK in {cell.method for cell in wanted})
        assert f"{left} of {len(wanted)} cells" in capsys.readouterr().out


def test_the_short_table_is_of_the_long_ones_rows():
    found = result()
    assert not any("%" in line for line in short_table(found).splitlines()[2:])
    found["cells"]["2048/Quest, shared by 16/by head/0.2"] = found["cells"].pop(
        "2048/Quest/by head/0.2"
    )
    (line,) = (line for line in short_table(found).splitlines()[2:] if "%" in line)
    assert line == "| Quest, shared by 16 | by head |  |  |  | 1.01% ± 0.00% |"


def test_mixtures_are_told_apart_by_task():
    tokenizer, length = tiny.tokenizer(), 16_384
    hay = torch.tensor(
        tokenizer("a fox that jumps over one lazy dog is quick. " * 900).input_ids[:length]
    )
    made = frontier.mixed_examples(tokenizer, [hay, hay.flip(0)], length)
    assert len(made) == 8 and len({tuple(parts["needle"].ids.tolist()) for parts in made}) == 8
    for parts in made:
        assert {task: len(e.spans) for task, e in parts.items()} == {
            "needle": 10,
            "few_shot": 9,
            "variables": 5,
            "needle_values": 4,
        }
        text = lambda start, stop, ids=parts["needle"].ids: tokenizer.decode(ids[start:stop])
        assert all(text(0, start).endswith("is") for start, _ in parts["needle"].spans)
        assert {text(*span).strip() for span in parts["few_shot"].spans} == set(retrieval.KINDS)
        assert all(text(*span).strip().isdigit() for span in parts["needle_values"].spans)
        assert all(len(text(*span).strip()) == 3 for span in parts["variables"].spans)
    with pytest.raises(SystemExit, match="do not hold all tasks"):
        frontier.mixed_examples(tokenizer, [hay], 512)


def test_the_table_of_mixtures_has_the_rows_that_were_measured():
    found = result()
    assert mixed_table(found, 2048) == ""
    for cell, nats in (("stock//1", [1.0, 2.0]), ("Quest/by head/0.2", [1.1, 2.1])):
        found["cells"][f"2048/{cell}"]["mixed"] = {"needle": {"nats": nats, "exact": [1.0, 0.5]}}
    assert mixed_table(found, 2048).splitlines()[2:] == [
        "| | stock | | right 75% |",
        "| 20% | Quest | by head | +10.5% ± 0.0%, right 75% |",
    ]


def test_times_are_compared_on_one_cpu():
    stock = {"seconds": [1.0, 3.0], "seconds_on": {"here": [4.0]}}
    assert (
        cells.time_of({"seconds": [1.0]}, stock) == 0.5
    )  # as it was measured before CPUs were told apart
    assert cells.time_of({"seconds": [1.0], "cpu": "here"}, stock) == 0.25
    assert cells.time_of({"seconds": [1.0], "cpu": "there"}, stock) is None
    assert Cell(2048, STOCK).is_whole(result()["cells"]["2048/stock//1"])
    elsewhere = result()["cells"]["2048/stock//1"] | {"seconds_on": {"there": [1.0]}}
    assert not Cell(2048, STOCK).is_whole(elsewhere)


def test_a_cell_is_kept_beside_those_that_others_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "frontier.json")
    two = [Cell(2048, "Quest", "by head", budget) for budget in (0.2, 0.4)]
    for cell in (*two, two[0]):
        cells.keep(cell, {"texts": {}, "pairs": cell.budget})
    assert {key: e["pairs"] for key, e in read_results()["cells"].items()} == {
        c.key: c.budget for c in two
    }


def test_a_cell_that_another_process_has_done_is_not_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "frontier.json")
    work, cell = object.__new__(frontier.Work), Cell(2048, "Quest", "by head", 0.2)
    work.windows, work.examples, work.mixed = {"essay": []}, dict.fromkeys(cell.tasks, []), []
    cells.keep(cell, {"texts": {"essay": [1.0]}, "retrieval": {}, "seconds": [1.0]})
    assert work.run(cell, until=0.0)  # it has no model that could be run


def test_an_allocation_by_time_follows_the_times_it_is_given():
    choices, cell = Costs(2048), Cell(2048, "rules with a kernel", "by time", 0.3)
    rules = [choices.rules[i] for i in choices.rules_of(cell)]
    slow = [rule.rule.name == "pages" for rule in rules]
    made = choices.of(
        cell, [2.0 if pages else rule.share(2048) for pages, rule in zip(slow, rules, strict=True)]
    )
    chosen = {rule for heads in made.layers.values() for rule in heads if not rule.is_exact}
    assert chosen and all(rule.rule.name == "window" for rule in chosen)


def test_an_allocation_by_bytes_keeps_what_the_dearest_of_three_heads_keeps():
    choices = Costs(2048)
    choices.table = {
        name: torch.cat([costs, costs[:1] * 0]).repeat(3, 1)
        for name, costs in choices.table.items()
    }
    made = choices.of(Cell(2048, "rules with a kernel", "by bytes", 0.3))
    kept = [
        max(r.kept(2048) for r in h[i : i + 3])
        for h in made.layers.values()
        for i in range(0, 9, 3)
    ]
    assert 0.2 < sum(kept) / len(kept) <= 0.3


class Together(Choices):
    """Of a tiny model: two rules, and three texts a round."""

    def __init__(self, model):
        self.model, self.length = model, 64
        self.rules = [SparseHeadRule(Window(8, 2)), SparseHeadRule(Window(24, 2))]
        self.names = [f"model.layers.{i}.self_attn" for i in range(2)]

    def losses(self, index):
        return {name: torch.tensor([[2.0, 1.0]] * 4).double()[:, index] for name in self.names}

    def read_together(self, cell, number):
        ids = lambda i: torch.randint(
            64, (64,), generator=torch.Generator().manual_seed(10 * number + i)
        )
        return [(ids(0), None, 50.0), (ids(1), ((20, 40),), 20.0), (ids(2), ((50, 64),), 20.0)]


def test_what_heads_lose_together_is_found_text_by_text_and_gone_on_with():
    cell, choices = Cell(64, "rules with a kernel", "together", 0.4), Together(llama())
    whole, cut, seen = [], [], []
    assert choices.lose_together(cell, whole, lambda: seen.append(1), math.inf) and len(seen) == 6
    assert [found["done"] for found in whole] == [3, 3]

    def stop():
        raise KeyboardInterrupt

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            choices.lose_together(cell, cut, stop, math.inf)
        assert not any("hyper" in name for name, _ in choices.model.named_modules())
    assert not choices.lose_together(cell, cut, stop, 0.0)  # no time is left
    assert choices.lose_together(cell, cut, lambda: None, math.inf) and cut == whole
    first, second = (choices.of(cell, rounds=whole[:n]) for n in (0, 1))
    assert [found["of"] for found in whole] == [
        digest_of(first),
        digest_of(second),
    ] and first != second
    for found, allocation, number in zip(whole, (first, second), (0, 1)):
        sums = {}
        for ids, spans, weight in choices.read_together(cell, number):
            with torch.no_grad():
                stock = final_hidden(choices.model, ids)
            ha.patch_model(choices.model, allocation.config())
            for name, parts in loss_parts(choices.model, ids, stock, spans)[1].items():
                sums[name] = sums.get(name, 0) + weight * parts
            ha.unpatch_model(choices.model)
        assert found["parts"].keys() == sums.keys()
        assert all(found["parts"][name] == pytest.approx(sums[name].tolist()) for name in sums)
    whole[0]["of"] = "of another choice"
    before = [found["parts"] for found in whole]
    assert (
        choices.lose_together(cell, whole, lambda: None, math.inf)
        and [f["parts"] for f in whole] == before
    )


def test_where_no_rule_is_cheap_enough_nothing_is_found_together():
    choices, rounds = Together(llama()), []
    cell = Cell(64, "rules with a kernel", "together", 0.05)
    assert choices.lose_together(cell, rounds, lambda: None, math.inf) and rounds == []
    assert choices.of(cell, rounds=rounds) is None


def test_a_head_that_loses_more_together_gets_a_rule_that_loses_less():
    choices = Together(None)
    losses = {name: torch.tensor([[2.0, 1.0]] * 4).double() for name in choices.names}
    choices.losses = lambda index: {name: costs[:, index] for name, costs in losses.items()}
    cell = Cell(64, "rules with a kernel", "together", 0.5)
    parts = {name: [0.1, 0.1, 0.1, 4.0] for name in choices.names}
    first, then = choices.of(cell), choices.of(cell, rounds=[{"parts": parts}])
    share = lambda made, head: sum(heads[head].share(64) for heads in made.layers.values())
    assert share(then, 3) > share(then, 0) and then.pairs <= 0.5
    assert share(then, 3) - share(then, 0) > share(first, 3) - share(first, 0)


def test_a_healed_cell_waits_for_its_adapter(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "frontier.json")
    work, cell = object.__new__(frontier.Work), Cell(8192, HEALED, "by head", 0.1)
    work.windows, work.examples, work.mixed = {"essay": []}, dict.fromkeys(cell.tasks, []), []
    assert not work.run(cell, until=0.0)
    assert "healing.py --length 8192 --budget 0.1" in capsys.readouterr().out


def test_a_healed_cell_runs_with_its_adapter_and_goes_on_with_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "frontier.json")
    work, cell, asked = object.__new__(frontier.Work), Cell(8192, HEALED, "by head", 0.1), []
    work.windows, work.examples, work.model = (
        {"essay": [], "code": []},
        dict.fromkeys(cell.tasks, []),
        llama(),
    )
    work.mixed = []
    layers = {f"model.layers.{i}.self_attn": (SparseHeadRule(Window(8, 2)),) * 4 for i in range(2)}
    allocation = Allocation(layers, 64)
    work.choices = SimpleNamespace(of=lambda *_: allocation)
    has_lora = lambda: any("lora_" in name for name, _ in work.model.named_parameters())
    work.measure = lambda entry, kind, name: (
        asked.append(has_lora()),
        entry[kind].update({name: [1.0]}),
    )
    for seed in (0, 1):
        patched = ha.patch_model(llama(), allocation.config())
        torch.manual_seed(seed)
        healed = get_peft_model(patched, lora_config(patched, 2))
        healed.save_pretrained(str(cells.healed_folder(cell)))
        for _ in range(2):  # what is done with an adapter is not done again
            assert work.run(cell, until=math.inf) and not has_lora()
        assert asked == [True] * 2 * (seed + 1)
        entry = read_results()["cells"][cell.key]
        assert entry["adapter"] == cells.adapter_of(cell)
        del entry["texts"]["code"]  # as if it had been cut off there
        cells.keep(cell, entry)


@pytest.mark.parametrize("kind", ["by head", "together"])
def test_a_cell_is_what_its_texts_and_answers_lose_under_its_rules(kind, tmp_path, monkeypatch):
    """Run as the command runs it, of a tiny model, beside the model's own loss and logits under the chosen rules."""
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "frontier.json")
    work, cell, model = (
        object.__new__(frontier.Work),
        Cell(64, "rules with a kernel", kind, 0.4),
        llama(),
    )
    texts = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(7))
    work.windows, work.mixed = {"essay": [texts[0], texts[1]], "code": [texts[2]]}, []
    work.examples = dict.fromkeys(cell.tasks, []) | {
        "copying": [retrieval.Example("copying", texts[3], ((40, 50), (60, 63)))]
    }
    work.model, work.choices, work.head = model, Together(model), head_of(model, texts[0])
    assert work.run(cell, until=math.inf)
    entry = read_results()["cells"][cell.key]
    assert (
        not any("hyper" in name for name, _ in model.named_modules()) and len(entry["seconds"]) == 2
    )
    rounds = entry.get("rounds", ())
    assert [found["done"] for found in rounds] == ([3, 3] if kind == "together" else [])

    made = work.choices.of(cell, rounds=rounds)
    assert entry["pairs"] == made.pairs <= 0.4 and sum(entry["rules"].values()) == 8
    patched = ha.patch_model(llama(), made.config())
    lost = {
        name: [patched(ids[None], labels=ids[None]).loss.item() for ids in w]
        for name, w in work.windows.items()
    }
    assert entry["texts"] == {name: pytest.approx(nats) for name, nats in lost.items()}
    stock = [llama()(ids[None], labels=ids[None]).loss.item() for ids in work.windows["essay"]]
    assert lost["essay"] != pytest.approx(stock)
    logits = patched(texts[3:]).logits[0].log_softmax(-1)
    nats = [-logits[i - 1, texts[3, i]].item() for i in (*range(40, 50), *range(60, 63))]
    assert entry["retrieval"]["copying"]["nats"] == pytest.approx([sum(nats) / 13])


def test_costs_that_are_not_committed_need_a_model():
    with pytest.raises(SystemExit, match="not committed; allowed: lengths"):
        Choices(4096).of(Cell(4096, "sinks and window", "by head", 0.2))


def test_pages_of_html_become_text():
    source = "<head><title>x</title></head><p>A &amp; <b>B</b></p><script>no</script>\n\n\n<p>C</p>"
    assert plain(source).split() == ["A", "&", "B", "C"]


def test_no_rule_is_exact_by_name():
    assert not METHODS["sinks and window"](SparseHeadRule(Exact()))


@pytest.mark.slow
def test_the_rules_of_the_demo_are_those_of_the_frontier():
    """The point "rules with a kernel, together" at 8,192 tokens and 20 %, chosen again from committed costs."""
    cell = Cell(8192, "rules with a kernel", "together", 0.2)
    allocation = Choices(8192).of(cell, None, read_results()["cells"][cell.key]["rounds"])
    config = demo_long.read_rules()
    assert demo_long.compute_share(config) == pytest.approx(allocation.pairs, rel=1e-9)
    assert set(config.overrides) == set(allocation.layers)
    for name, heads in allocation.layers.items():
        (sparse,) = config.overrides[name]
        assert [rule.to_dict() for rule in sparse.rules] == [head.rule.to_dict() for head in heads]
