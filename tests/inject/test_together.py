"""What heads lose together, against the gradient of gates, and what is made of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.inject import Allocation, Score, causal, choose
from hf_hyperattn.inject.causal import CausalInjection
from hf_hyperattn.inject.gradients import final_hidden
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.inject.together import MOST, corrected, loss_parts
from hf_hyperattn.mechanisms.sparse import Exact, Pages, Window
from tests.cli import tiny

LENGTH, HEADS = 128, 4
EXACT = SparseHeadRule(Exact())
SPARSE = [SparseHeadRule(rule) for rule in (Window(8, 2), Pages(4, 2, 4, 2), Window(16, 0))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(
        tiny.tokenizer()("a fox that jumps over one lazy dog is quick. " * 9).input_ids[:LENGTH]
    )
    return model, ids


def kl_of(model, ids, teacher, counted):
    """Written anew: KL(teacher ‖ model) in nats a token that counts."""
    log_q = model(ids[None]).logits[0, counted].double().log_softmax(-1)
    return (teacher[counted].exp() * (teacher[counted] - log_q)).sum(-1).mean()


@pytest.mark.parametrize("spans", [None, ((20, 30), (100, LENGTH))])
@pytest.mark.parametrize(
    "heads", [(SPARSE[0], SPARSE[1], EXACT, SPARSE[2]), (HsaHeadRule((4,), 8, 1, 2, 0.0),) * HEADS]
)
def test_parts_are_half_the_gradient_of_gates_that_are_one(folder, heads, spans):
    """A gate g makes o' + g·(o - o') of a head, so that the gradient by it is Σ G·(o - o')."""
    model, ids = loaded(folder)
    count = len(model.model.layers)
    names = [f"model.layers.{i}.self_attn" for i in range(count - 1)]  # the last layer stays exact
    allocation = Allocation(
        {**dict.fromkeys(names, heads), f"model.layers.{count - 1}.self_attn": (EXACT,) * 4}, LENGTH
    )
    with torch.no_grad():
        hidden, teacher = (
            final_hidden(model, ids),
            model(ids[None]).logits[0].double().log_softmax(-1),
        )
    ha.patch_model(model, allocation.config())
    found_hidden, parts = loss_parts(model, ids, hidden, spans)
    with torch.no_grad():
        assert torch.allclose(found_hidden, final_hidden(model, ids), atol=1e-5)
    ha.unpatch_model(model)
    assert list(parts) == names[::-1] and all(p.shape == (HEADS,) for p in parts.values())

    ha.patch_model(model, replace(allocation.config(), mode="blend"))
    gates = {name: gate for name, gate in model.named_parameters() if name.endswith("gate")}
    assert len(gates) == count - 1
    for gate in gates.values():
        gate.data.fill_(1.0)
    counted = torch.arange(LENGTH)
    if spans is not None:
        counted = torch.cat([torch.arange(start - 1, stop - 1) for start, stop in spans])
    kl_of(model, ids, teacher, counted).backward()
    for name, gate in gates.items():
        of_layer = next(parts[host] for host in names if name.startswith(host))
        assert torch.allclose(of_layer, 0.5 * gate.grad.double(), rtol=1e-3, atol=1e-7)
        assert of_layer.abs().max() > 1e-6 and (heads[2] != EXACT or of_layer[2].abs() < 1e-7)


def test_parts_add_up_to_what_is_lost_where_little_is(folder):
    """KL is a quadratic form there."""
    model, ids = loaded(folder)
    layers = {
        f"model.layers.{i}.self_attn": (SparseHeadRule(Window(110, 2)),) * 4
        for i in range(len(model.model.layers))
    }
    with torch.no_grad():
        hidden, teacher = (
            final_hidden(model, ids),
            model(ids[None]).logits[0].double().log_softmax(-1),
        )
    ha.patch_model(model, Allocation(layers, LENGTH).config())
    _, parts = loss_parts(model, ids, hidden)
    with torch.no_grad():
        lost = kl_of(model, ids, teacher, torch.arange(LENGTH)).item()
    assert sum(p.sum().item() for p in parts.values()) == pytest.approx(lost, rel=0.1) and lost > 0


def test_heads_lose_in_proportion_to_what_they_were_found_to_lose():
    """By hand: the parts are 6 of 4 that was thought, so 1.5 is usual; of both heads 4 / (1.5·2) and 2 / (1.5·2)."""
    rules = [SPARSE[0], SPARSE[2]]
    losses = {
        "a": torch.tensor([[2.0, 1.0], [5.0, 2.0], [1.0, 1.0]]).double(),
        "b": torch.ones(1, 2).double(),
    }
    allocation = Allocation({"a": (rules[0], rules[1], EXACT), "b": (EXACT,)}, LENGTH)
    parts = {"a": torch.tensor([4.0, 2.0, 0.0]).double()}
    whole = corrected(losses, rules, allocation, parts, 1.0)
    more = torch.tensor([4 / 3, 2 / 3, 1.0]).double()
    assert torch.allclose(whole["a"], losses["a"] * more[:, None]) and whole["b"] is losses["b"]
    root = corrected(losses, rules, allocation, parts, 0.5)
    assert torch.allclose(root["a"], losses["a"] * more.sqrt()[:, None])


def test_a_correction_is_bounded():
    """A head of which nothing was thought, one that gains, and no loss at all."""
    losses = {"a": torch.tensor([[1e-9], [1.0], [1.0]]).double()}
    allocation = Allocation({"a": (SPARSE[0],) * 3}, LENGTH)
    found = corrected(
        losses, SPARSE[:1], allocation, {"a": torch.tensor([5.0, -1.0, 1.0]).double()}, 1.0
    )["a"]
    assert found[0, 0] == pytest.approx(1e-9 * MOST) and found[1, 0] == pytest.approx(1 / MOST)
    nothing = corrected(losses, SPARSE[:1], allocation, {"a": torch.zeros(3).double()}, 1.0)
    assert torch.equal(nothing["a"], losses["a"])
    thought_nothing = corrected(
        {"a": torch.zeros(3, 1)}, SPARSE[:1], allocation, {"a": torch.ones(3).double()}, 1.0
    )
    assert torch.equal(thought_nothing["a"], torch.zeros(3, 1))


def test_a_head_that_matters_gets_more_pairs_after_the_correction():
    losses = {"a": torch.tensor([[3.0, 1.0], [3.0, 1.0]]).double()}
    rules = [SparseHeadRule(Window(8, 0)), SparseHeadRule(Window(32, 0))]
    allocation = Allocation({"a": (rules[1], rules[1])}, LENGTH)
    now = corrected(losses, rules, allocation, {"a": torch.tensor([4.0, 0.5]).double()}, 1.0)
    pairs = (rules[0].share(LENGTH) + rules[1].share(LENGTH)) / 2
    assert choose(rules, now, LENGTH, pairs=pairs).layers["a"] == (rules[1], rules[0])


def test_what_cannot_be_corrected_is_refused():
    losses, allocation = {"a": torch.ones(1, 1).double()}, Allocation({"a": (SPARSE[0],)}, LENGTH)
    with pytest.raises(ValueError, match="no candidate; allowed: the rules"):
        corrected(losses, [SPARSE[2]], allocation, {"a": torch.ones(1)}, 1.0)
    with pytest.raises(ValueError, match="no parts of a; allowed"):
        corrected(losses, [SPARSE[0]], allocation, {}, 1.0)
    for power in (-0.1, 1.5, float("nan")):
        with pytest.raises(
            ValueError, match=f"power={power} is not allowed; allowed: numbers from 0 to 1"
        ):
            corrected(losses, [SPARSE[0]], allocation, {"a": torch.ones(1)}, power)
    with pytest.raises(ValueError, match="parts of b; allowed: parts of patched layers only"):
        corrected(losses, [SPARSE[0]], allocation, {"a": torch.ones(1), "b": torch.ones(1)}, 1.0)
    with pytest.raises(
        ValueError, match="the parts of a are not all finite; allowed: finite numbers"
    ):
        corrected(losses, [SPARSE[0]], allocation, {"a": torch.tensor([torch.nan])}, 1.0)


class Fake(CausalInjection):
    """A model of one layer and two heads, whose second head loses more in the model than it does alone."""

    def __post_init__(self):
        self.progress = SimpleNamespace(describe=lambda text: None, advance=lambda steps: None)
        self.alone = {"a": torch.tensor([[3.0, 1.0], [3.0, 1.0]]).double()}
        self.costs = self.select_losses(self.rules)
        self.key_heads = {"a": 2}

    def compute_hidden(self, item):
        return item.float()

    def evaluate_hidden(self, hidden, item):
        return Score(0.0, 0.0)

    def average_tasks(self, scores):
        return scores

    def measure_joint_loss(self, allocation, item, stock):
        assert torch.equal(stock, item.float())
        return Score(self.lost, 0.0), {
            "a": torch.tensor([1.0, 3.0 if len(item) == 1 else 5.0]).double()
        }

    def measure_losses(self, allocation, part, before):
        return dict.fromkeys(before, self.lost)


def fake(lost, **more):
    rules = [SparseHeadRule(Window(8, 0)), SparseHeadRule(Window(32, 0))]
    texts = {"text": torch.zeros(1), "copying": torch.zeros(2)}
    made = Fake(
        None, [texts] * 3, rules, LENGTH, 0.02, tokenizer="some", retrieval_budget=0.1, **more
    )
    made.lost = lost
    return made


def test_the_first_choices_correct_what_is_expected_by_texts_in_units_of_their_budgets():
    """By hand: parts over 0.02 of the text and over 0.1 of the task make 60 and 200, 130 on average."""
    made, before = fake(0.001, pairs=0.3), {"text": Score(0.0, 0.0), "copying": Score(0.0, 0.0)}
    both = Allocation({"a": (made.rules[0],) * 2}, LENGTH)
    made.try_and_correct(
        both, before, {name: item.float() for name, item in made.texts[1].items()}, 0.75
    )
    more = (torch.tensor([60.0, 200.0]).double() / 130) ** 0.75
    assert torch.allclose(made.costs["a"], made.alone["a"] * more[:, None])
    assert made.tried == [(both, pytest.approx({"text": 0.001, "copying": 0.001}, rel=1e-3))]
    assert torch.equal(made.alone["a"], torch.tensor([[3.0, 1.0], [3.0, 1.0]]).double())


def test_what_has_been_tried_is_not_read_again():
    made = fake(0.001)
    for lost in (0.001, 0.002):
        made.lost = lost
        made.try_allocation(Allocation({"a": (made.rules[0],) * 2}, LENGTH, lost), {"text": None})
    assert [losses for _, losses in made.tried] == [{"text": 0.001}] * 2


def test_three_choices_at_a_share_of_the_pairs_are_corrected_twice(monkeypatch):
    made, powers = fake(0.001, pairs=0.3), []
    real = causal.corrected
    monkeypatch.setattr(causal, "corrected", lambda *a: powers.append(a[-1]) or real(*a))
    assert made.search_allocation() is not None and powers == [0.75, 0.5] and len(made.tried) == 3
    second, last = (allocation.layers["a"] for allocation, _ in made.tried[1:])
    assert last[1].share(LENGTH) > last[0].share(LENGTH) and second[1].share(LENGTH) >= second[
        0
    ].share(LENGTH)


def test_a_first_choice_that_fails_does_not_bar_its_share_of_the_pairs():
    """By costs that are corrected it may hold."""
    made, asked = fake(1.0), []
    correct, choose_at = made.try_and_correct, made.choose_allocation

    def first_fails(*arguments):
        correct(*arguments)
        made.lost = 0.0  # all that comes later holds
        made.tried[-1] = (
            Allocation({}, LENGTH),
            made.tried[-1][1],
        )  # what was tried would not be read again

    made.try_and_correct, made.choose_allocation = (
        first_fails,
        lambda pairs: asked.append(pairs) or choose_at(pairs),
    )
    assert made.search_allocation() is not None
    assert (
        asked[:2] == [0.4, 0.5]
        and asked[2] < 0.4
        and len(asked) == 5
        and asked[2:] == sorted(asked[2:])[::-1]
    )


@pytest.mark.parametrize(
    ("task", "score", "decides"),
    [
        ("variables", Score(3.0, 0.0, 0.9), False),
        ("variables", Score(3.0, 0.24), False),
        ("needle", Score(3.0, 0.25), True),
        (
            "few_shot",
            Score(1.0, 13 / 27),
            False,
        ),  # chance gives 9 of 27, and 14 or more in 4 % of cases
        ("few_shot", Score(1.0, 14 / 27), True),
        ("copying", Score(1.0, 0.0, 0.6), True),
        ("copying", Score(1.0, 0.0, 0.4), False),
        ("mixture", Score(1.0, 0.1), False),
        ("text", Score(9.0, 0.0), True),
    ],
)
def test_a_task_that_the_model_cannot_do_decides_nothing(task, score, decides):
    made = fake(0.001)
    made.note_original({task: score, "some text": Score(9.0, 0.0)})
    assert (made.find_budget(task) is not None) == decides
    assert made.meets_budgets({task: 9.9}) == (not decides)
    assert (task in made.losses_in_budgets({task: 9.9, "some text": 0.0})) == decides
    assert not made.meets_budgets({task: 0.0, "some text": 0.03})
    made.note_original({task: Score(0.0, 1.0, 1.0)})  # another part of the texts
    assert made.find_budget(task) is not None


def test_the_refusal_names_no_task_that_does_not_decide():
    from hyperattn_cli.commands.inject import explain_refusal, list_failed_tasks

    row = {"before": 9.0, "after": 9.9, "right_before": 0.3, "right_after": 0.3}
    report = {
        "accepted": False,
        "refused": [1],
        "texts": {"text": {"loss": 0.03}},
        "retrieval": {
            "variables": row | {"loss": 9.0, "exact_before": 0.0, "decides": False},
            "needle": row | {"loss": 0.06, "exact_before": 1.0, "decides": True},
        },
    }
    said = explain_refusal(SimpleNamespace(budget=0.02, retrieval_budget=0.05), report, False)
    assert "variables" not in said and "3 % on text (budget 2 %)" in said
    assert list_failed_tasks(report) == ["variables"]
