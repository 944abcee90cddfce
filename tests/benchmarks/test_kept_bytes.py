"""The comparison with kvpress: what the repository's side measures, and the table. kvpress runs elsewhere."""

import ast

import kept_bytes
import pytest
import torch
from kept_bytes import FULL, METHODS, OURS

import hf_hyperattn as ha
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.rules import Window
from tests.mechanisms.sparse.test_sparse_models import llama


def test_a_compressed_context_gives_the_losses_of_a_pass_without_a_cache():
    model = ha.patch_model(llama(), ha.SparseConfig(Window(24, 2)), mode="replace")
    torch.manual_seed(1)
    ids = torch.randint(99, (260,))
    item = kept_bytes.make_item("text", ids, 200, [(201, 230), (240, 243)])
    found = kept_bytes.measure_item(model, item)
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    places = [*range(201, 230), *range(240, 243)]
    nats = [-logits[t - 1, ids[t]].item() for t in places]
    assert found["nats"] == pytest.approx(sum(nats) / len(nats), abs=1e-6)
    # Near tokens less the query's own, 64 that may be taken back, and two first ones.
    assert found["kept"] == pytest.approx((23 + 64 + 2) / 200)


class FewRules:
    """Three windows, whose losses are made up, in two layers of four heads."""

    def __init__(self, length):
        self.rules = [SparseHeadRule(Window(near, 4)) for near in (16, 256, 1024)]

    def rules_of(self, cell):
        return [0, 1, 2]

    def losses(self, index):
        weight = torch.tensor([5.0, 1.0, 3.0, 0.5], dtype=torch.float64)[:, None]
        lost = weight / torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
        return {"a": lost, "b": lost * 3}


def test_the_allocation_keeps_its_share_of_the_bytes(monkeypatch):
    monkeypatch.setattr(kept_bytes, "Choices", FewRules)
    monkeypatch.setattr(kept_bytes, "KEY_HEADS", 2)
    for share in (0.1, 0.3):
        made = kept_bytes.allocate_bytes(share)
        kept = []
        for rules in made.layers.values():
            own = [r.rule.near + 4 + 64 if isinstance(r.rule, Window) else 6144 for r in rules]
            # Two query heads share a key head, which keeps the longer window of both.
            kept += [max(own[:2]) / 6144, max(own[2:]) / 6144]
        assert 0.02 < sum(kept) / len(kept) <= share and made.length == 8192


def test_the_names_of_rows_are_those_of_the_script_that_has_kvpress():
    tree = ast.parse(kept_bytes.PRESSES.read_text())
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    hooked = [key.value for key in names["HOOKED"].keys]
    pair = [node for node in tree.body if isinstance(getattr(node, "value", None), ast.Tuple)]
    others = [value.value for node in pair for value in node.value.elts if hasattr(value, "value")]
    assert ast.literal_eval(names["FULL"]) == FULL
    assert [*hooked, *(o for o in others if isinstance(o, str))] == list(METHODS)


def test_the_table_has_the_best_row_first_and_says_what_was_not_run():
    of = lambda a, b, exact: {
        "essay": {"kept": 0.3, "nats": a, "exact": 0.0},
        "German": {"kept": 0.3, "nats": b, "exact": 0.0},
        "needles, essay": {"kept": 0.2, "nats": 1.0, "exact": exact},
    }
    cells = {
        f"{FULL}/1": of(2.0, 3.0, 0.5),
        f"{OURS}/0.3": of(2.1, 3.1, 0.25),
        "SnapKV/0.3": of(2.05, 3.05, 0.0),
        "KVzip/0.3": {"essay": {"kept": 0.3, "failed": "no key"}},
    }
    lines = kept_bytes.table_of({"cells": cells}, 0.3).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert rows[2][0] == FULL and rows[2][-1] == "50%"
    assert rows[3] == ["SnapKV", "30.0%", "+5.1% ± 0.0%", "+5.1%", "+5.1%", "+0.0%", "0%"]
    assert rows[4][0] == OURS and rows[4][2] == "+10.5% ± 0.0%" and rows[4][-1] == "25%"
    zipped = next(row for row in rows if row[0] == "KVzip")
    assert zipped[1:] == ["30.0%", "not run", "no fake key", "not run", "not run", "not run"]
    assert kept_bytes.table_of({"cells": cells}, 0.5) == "Not run."
