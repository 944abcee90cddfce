"""Injection of 16-bit models: measurements in float32, logits in pieces, and no float32 copy of the model."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_hyperattn.inject import Allocation, choose, gradients, loss_parts, measure
from hf_hyperattn.inject.gradients import compute_divergence, final_hidden, head_of, loss_of
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.inject.retrieval import copying, score_hidden
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.integration import patch_model, unpatch_model
from hf_hyperattn.mechanisms.sparse import Pages, Window
from tests.cli import tiny

LENGTH = 128
RULES = [
    SparseHeadRule(rule) for rule in (Window(8, 2), Window(32, 2), Window(64, 2), Pages(8, 2, 4, 2))
]
TYING = [HsaHeadRule((4, 16), 16), HsaHeadRule((4, 16), 32, refine_top_k=2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same numbers in bfloat16 and in float32."""
    folder = tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=256)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return half, copy.deepcopy(half).float()


@pytest.fixture(scope="module")
def ids():
    text = "the quick brown fox jumps over a lazy dog and goes home. " * 4
    return torch.tensor(tiny.tokenizer()(text).input_ids[:LENGTH])


def test_pieces_of_logits_give_the_same_numbers(models, ids, monkeypatch):
    _, model = models
    head, hidden = head_of(model, ids), final_hidden(model, ids).detach()
    teacher = hidden + 0.1 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    example = copying(ids, LENGTH)

    def compute_all():
        loss, slope = loss_of(head, hidden, ids)
        divergence, other = compute_divergence(head, hidden, teacher, spans=((5, 40), (60, 99)))
        with torch.no_grad():
            score = score_hidden(hidden, head, example)
        return torch.tensor([loss, divergence, score.nats, score.exact, score.right]), slope, other

    whole = compute_all()
    monkeypatch.setattr(gradients, "PIECE_BYTES", 4 * 260 * 7)
    assert head.piece == 7
    for one, pieces in zip(whole, compute_all(), strict=True):
        torch.testing.assert_close(pieces, one, rtol=1e-6, atol=1e-6)


def test_logits_of_a_16_bit_model_are_not_rounded(models, ids):
    half, full = models
    hidden = final_hidden(half, ids).detach()
    logits = head_of(half, ids)(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, head_of(full, ids)(hidden.float()), rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("rules", [RULES, TYING], ids=["sparse", "hsa"])
def test_a_bfloat16_model_chooses_as_well(models, ids, rules):
    """Its choice loses at most 2 % more than the best one, by the losses of the float32 model."""
    half, full = (measure(model, ids, rules, rows=LENGTH).costs for model in models)
    choices = [choose(rules, costs, LENGTH, pairs=0.6) for costs in (half, full)]
    lost = [
        sum(
            0.0 if rule.is_exact else full[name][head, rules.index(rule)].item()
            for name, heads in choice.layers.items()
            for head, rule in enumerate(heads)
        )
        for choice in choices
    ]
    assert choices[0].pairs <= 0.6 and lost[0] <= 1.02 * lost[1]
    for name, costs in full.items():
        torch.testing.assert_close(half[name], costs, rtol=0.2, atol=0.02 * costs.max().item())


def test_a_rule_that_changes_nothing_costs_nothing_in_bfloat16(models, ids):
    """A 16-bit output differs from the float32 one of the same attention: that is no loss."""
    near = [SparseHeadRule(Window(LENGTH, 0)), SparseHeadRule(Window(8, 2))]
    for costs in measure(models[0], ids, near, rows=LENGTH).costs.values():
        assert (costs[:, 0] < 1e-8 * costs[:, 1]).all()


def test_parts_of_a_bfloat16_model_are_those_of_float32(models, ids):
    names = [f"model.layers.{i}.self_attn" for i in range(2)]
    allocation = Allocation(dict.fromkeys(names, tuple(RULES)), LENGTH)
    found = []
    for model in models:
        with torch.no_grad():
            teacher = final_hidden(model, ids)
        patch_model(model, allocation.config())
        found.append(loss_parts(model, ids, teacher)[1])
        unpatch_model(model)
    for name, part in found[1].items():
        torch.testing.assert_close(found[0][name], part, rtol=0.1, atol=0.02 * part.abs().max())


class FindCopies(TorchDispatchMode):
    """Records the shapes of all float32 results, of the backward pass too."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.shapes.add(tuple(out.shape))
        return out


def test_no_float32_copy_of_the_weights_is_made(models, ids):
    """Except of the output embedding, for one piece of logits at a time."""
    half, _ = models
    with FindCopies() as found:
        measure(half, ids, RULES, rows=32)
    weights = {tuple(p.shape) for p in half.model.layers.parameters() if p.dim() == 2}
    assert weights and not weights & found.shapes
    assert tuple(half.lm_head.weight.shape) in found.shapes
