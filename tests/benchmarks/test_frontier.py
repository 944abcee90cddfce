"""The frontier's cells, its yardstick, its table; the model runs elsewhere."""

import frontier
import pytest
import torch

from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.mechanisms.sparse import Exact


def test_every_cell_is_there_once_and_every_method_has_rules():
    for length in frontier.BUDGETS:
        cells = list(frontier.cells([length]))
        assert len({cell.key for cell in cells}) == len(cells) and cells[0].method == frontier.STOCK
        methods = {cell.method for cell in cells} - {frontier.STOCK} - set(frontier.ABLATIONS)
        assert methods <= set(frontier.METHODS)
    rules = frontier.candidates(2048)
    assert len(set(rules)) == len(rules) and not any(rule.is_exact for rule in rules)
    for method in frontier.METHODS:
        assert any(map(frontier.METHODS[method], rules)), method
    assert {cell.budget for cell in frontier.cells([2048])} == {0.05, 0.1, 0.2, 0.4, 1.0}


def test_the_yardstick_sees_the_heaviest_keys():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 3, 12, 4)
    mask = frontier.ExactTopK(5).mask(query, key)[0]
    for head in range(3):
        for i in range(12):
            logits = (query[0, head, i] @ key[0, head, : i + 1].T).tolist()
            best = sorted(range(i + 1), key=lambda j: -logits[j])[:5]
            assert set(mask[head, i].nonzero().flatten().tolist()) == set(best)
    assert frontier.ExactTopK(5).share(12) == pytest.approx(mask[0].sum().item() / 78)


class Costs(frontier.Choices):
    """Choices whose losses are made up: what a rule leaves out, more at the first head."""

    def __init__(self, length):
        self.length, self.rules = length, frontier.candidates(length)
        lost = torch.tensor([1 - rule.share(length) for rule in self.rules], dtype=torch.float64) ** 2
        self.table = {name: torch.stack([4 * lost, lost]) for name in ("a", "b")}

    def losses(self, index):
        return {name: costs[:, index] for name, costs in self.table.items()}


def test_allocations_keep_their_budget():
    choices = Costs(2048)
    for cell in frontier.cells([2048]):
        if cell.method == frontier.STOCK:
            continue
        made = choices.of(cell)
        assert made is not None or cell.budget < 0.2 and cell.method not in ("HSA", "all rules", "sinks and window")
        if made is None or cell.method in frontier.ABLATIONS:
            continue
        rules = [rule for heads in made.layers.values() for rule in heads]
        assert made.cost <= cell.budget * 1.01
        assert all(rule.is_exact or frontier.METHODS[cell.method](rule) for rule in rules)
        assert cell.kind == "by head" or len(set(rules)) == 1
        assert sum(frontier.counted(made).values()) == len(rules)


def test_ablations_change_what_they_say():
    cell = frontier.Cell(2048, "HSA, blocks dropped", "by head", 0.2)
    rules = [rule for heads in Costs(2048).of(cell).layers.values() for rule in heads]
    assert all(rule.is_exact or rule.block_bias == -float("inf") for rule in rules)
    cell = frontier.Cell(2048, "HSA, no refinement", "by head", 0.2)
    rules = [rule for heads in Costs(2048).of(cell).layers.values() for rule in heads]
    assert all(rule.refine_top_k == 0 for rule in rules)


def result() -> dict:
    names = ("a", "b", "c", "d", "e")
    tasks = {"copying": {"nats": [1.0, 2.0], "exact": [0, 0]}, "mixture": {"nats": [3.0], "exact": [0]}}
    entry = lambda more, **pairs: (
        pairs
        | {
            "texts": {name: [2.0 + more, 3.0 + more] for name in names},
            "retrieval": {t: {**s, "nats": [x + 2 * more for x in s["nats"]]} for t, s in tasks.items()},
            "seconds": [1.0 + more] * 5,
            "bytes": 100,
        }
    )
    quest = frontier.Cell(2048, "Quest", "by head", 0.2)
    return {"cells": {frontier.Cell(2048, frontier.STOCK).key: entry(0.0), quest.key: entry(0.01, pairs=0.199)}}


def test_a_row_says_what_was_measured(capsys):
    assert frontier.table(result(), 2048).splitlines()[2] == (
        "| 20% | Quest | by head | 19.9% | +1.01% ± 0.00% | +1.01% | +1.01% | +1.01% | +1.01% | +1.01% | +2.0% | +2.0% "
        "|  | 1.01 | 1.00 |"
    )
    half = result()
    del half["cells"]["2048/Quest/by head/0.2"]["texts"]["e"]
    half["cells"]["2048/stock//1"]["retrieval"] |= {"needle": {"nats": [1.0], "exact": [1]}}
    frontier.plan(half, [2048])
    every = list(frontier.cells([2048]))
    assert f"{len(every) - 1} of {len(every)} cells" in capsys.readouterr().out


def test_two_processes_keep_each_others_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "RESULTS", tmp_path / "frontier.json")
    ours, theirs = (object.__new__(frontier.Work) for _ in range(2))
    cells = [frontier.Cell(2048, "Quest", "by head", budget) for budget in (0.2, 0.4)]
    for work, cell in zip((ours, theirs, ours), (*cells, cells[0]), strict=True):
        work.keep(cell, {"texts": {}, "pairs": cell.budget})
    assert {key: e["pairs"] for key, e in frontier.read_results()["cells"].items()} == {c.key: c.budget for c in cells}


def test_a_cell_that_another_process_has_done_is_not_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "RESULTS", tmp_path / "frontier.json")
    work, cell = object.__new__(frontier.Work), frontier.Cell(2048, "Quest", "by head", 0.2)
    work.windows, work.examples = {"essay": []}, dict.fromkeys(cell.tasks, [])
    work.keep(cell, {"texts": {"essay": [1.0]}, "retrieval": {}, "seconds": [1.0]})
    assert work.run(cell, until=0.0)  # it has no model that could be run


def test_an_allocation_by_time_follows_the_times_it_is_given():
    choices, cell = Costs(8192), frontier.Cell(8192, "rules with a kernel", "by time", 0.3)
    rules = [choices.rules[i] for i in choices.rules_of(cell)]
    slow = [rule.rule.name == "pages" for rule in rules]
    made = choices.of(cell, [2.0 if pages else rule.share(8192) for pages, rule in zip(slow, rules, strict=True)])
    chosen = {rule for heads in made.layers.values() for rule in heads if not rule.is_exact}
    assert chosen and all(rule.rule.name == "window" for rule in chosen)


def test_costs_that_are_not_committed_need_a_model():
    with pytest.raises(SystemExit, match="not committed; allowed: lengths"):
        frontier.Choices(4096).of(frontier.Cell(4096, "sinks and window", "by head", 0.2))


def test_pages_of_html_become_text():
    source = "<head><title>x</title></head><p>A &amp; <b>B</b></p><script>no</script>\n\n\n<p>C</p>"
    assert frontier.plain(source).split() == ["A", "&", "B", "C"]


def test_no_rule_is_exact_by_name():
    assert not frontier.METHODS["sinks and window"](SparseHeadRule(Exact()))
