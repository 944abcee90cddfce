"""Perplexity against a count by hand: models whose probabilities are known."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_hyperattn.analysis import attention_report, next_token_logits, perplexity

VOCABULARY = 5


class Bigram(nn.Module):
    """A causal LM whose next-token distribution is a row of a table; notes what it was given."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = nn.Parameter(table.log())
        self.seen: list[list[int]] = []

    def forward(self, ids, use_cache):
        assert not self.training and not use_cache
        self.seen.append(ids[0].tolist())
        return SimpleNamespace(logits=self.table[ids])


@pytest.fixture
def model():
    return Bigram(torch.rand(VOCABULARY, VOCABULARY, dtype=torch.float64).softmax(-1))


def by_hand(model, pieces, prefix=()):
    """exp of the mean of -log p(next | last), written out over probabilities."""
    table = model.table.exp().tolist()
    losses = []
    for piece in pieces:
        tokens = [*prefix, *piece]
        first = max(len(prefix), 1)
        losses += [-math.log(table[tokens[i - 1]][tokens[i]]) for i in range(first, len(tokens))]
    return math.exp(sum(losses) / len(losses)), len(losses)


IDS = [0, 3, 1, 4, 1, 2, 2, 0, 3, 4, 4]


@pytest.mark.parametrize(
    "window, pieces",
    [
        (11, [IDS]),
        (100, [IDS]),
        (4, [IDS[:4], IDS[4:8], IDS[8:]]),
        (5, [IDS[:5], IDS[5:10]]),  # a window of the one token left over predicts nothing
    ],
)
@pytest.mark.parametrize("prefix", [(), (2,)])
def test_value(model, window, pieces, prefix):
    got = perplexity(model, IDS, window, prefix=prefix)
    value, predicted = by_hand(model, pieces, prefix)
    assert got.value == pytest.approx(value, rel=1e-6)
    assert got.loss == pytest.approx(math.log(value), rel=1e-6)
    assert (got.predicted, got.windows) == (predicted, len(pieces))
    assert got.read == sum(len(piece) + len(prefix) for piece in pieces)
    assert model.seen == [[*prefix, *piece] for piece in pieces]
    assert got.tokens_per_second == pytest.approx(got.read / got.seconds)


def test_uniform_model_is_as_perplexed_as_its_vocabulary_is_large():
    model = Bigram(torch.full((VOCABULARY, VOCABULARY), 1 / VOCABULARY))
    assert perplexity(model, torch.tensor(IDS), 4).value == pytest.approx(VOCABULARY)


def test_reports_every_window_and_restores_the_mode(model):
    model.train()
    lengths = []
    perplexity(model, IDS, 4, on_window=lengths.append)
    assert lengths == [4, 4, 3]
    assert model.training


def test_the_mode_is_restored_after_an_error(model):
    model.train()
    with pytest.raises(IndexError):
        perplexity(model, [0, VOCABULARY], 2)
    assert model.training


def test_an_impossible_token_gives_inf():
    table = torch.eye(VOCABULARY)
    assert perplexity(Bigram(table), [0, 1], 2).value == math.inf


@pytest.mark.parametrize(
    "ids, window, said", [([1], 4, "holds 1 tokens"), ([], 4, "0 tokens"), (IDS, 1, "window=1")]
)
def test_refusals(model, ids, window, said):
    with pytest.raises(ValueError, match=said):
        perplexity(model, ids, window)


@pytest.mark.parametrize(
    "ids, said",
    [
        (
            torch.ones(2, 32, dtype=torch.long),
            r"ids has shape \(2, 32\); allowed: integers \[N\] of one text",
        ),
        ([[1, 2], [3, 4]], r"ids has shape \(2, 2\)"),
        (torch.tensor(3), r"ids has shape \(\)"),
        (
            torch.full((8,), 1.5),
            r"ids has dtype torch.float32; allowed: integers \[N\] of one text",
        ),
        ([True, False], "ids has dtype torch.bool"),
    ],
)
def test_ids_are_integers_of_one_text(model, ids, said):
    for measure in (
        lambda ids: perplexity(model, ids, 4),
        lambda ids: next_token_logits(model, ids),
    ):
        with pytest.raises(ValueError, match=said):
            measure(ids)
    with pytest.raises(ValueError, match=said):
        attention_report(model, ids)


def test_a_batch_of_one_text_is_that_text(model):
    one = torch.tensor([IDS])
    assert perplexity(model, one, 4).value == perplexity(model, IDS, 4).value
    assert torch.equal(next_token_logits(model, one), next_token_logits(model, IDS))
    with pytest.raises(ValueError, match="prefix has dtype torch.float32; allowed: integers"):
        perplexity(model, IDS, 4, prefix=[0.5])
