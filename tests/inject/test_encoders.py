"""Injection into an encoder from Python: rivals are measured and never chosen, a cost that it has not is refused."""

import pytest
import torch
from transformers import BertConfig, BertModel

import hf_hyperattn as ha
from hf_hyperattn.inject import hsa, sparse
from hf_hyperattn.inject.encoder import EncoderInjection, cosine_distance, embed_passages
from tests.integration.architectures.hat_models import hat


class Quiet:
    def describe(self, text):
        pass

    def advance(self, steps):
        pass


def injection(**options) -> EncoderInjection:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    texts = [
        {"a": torch.randint(5, 90, (2, 64), generator=torch.Generator().manual_seed(s))}
        for s in range(3)
    ]
    rules = hsa.layer_candidates(64)
    key, both = (
        [rule for rule in rules if rule.config.tying == tying] for tying in ("key", "both")
    )
    return EncoderInjection(
        BertModel(config).eval(), texts, key, 64, 2.0, 0.9, rivals=both, **options
    )


def test_rivals_are_measured_and_not_chosen():
    made = injection()
    made.run(Quiet())
    assert {
        rule for rules in made.allocation.layers.values() for rule in rules if not rule.is_exact
    } <= {*made.rules}
    compared = made.compare_rivals(Quiet())
    assert "tying both, by layer" in compared
    for label, allocation in made.choose_rivals().items():
        family = label.split(", ")[0]
        assert {r.family for rules in allocation.layers.values() for r in rules} <= {
            family,
            "exact",
        }
    alone = [costs.min().item() for costs in made.select_losses(made.rivals).values()]
    assert all(cost > 0 for cost in alone)


def test_layers_of_segments_are_not_measured_as_if_they_saw_all():
    made = injection()
    made.model, made.texts = (
        hat(segment_length=16),
        [{"a": texts["a"] % 61} for texts in made.texts],
    )
    with pytest.raises(
        ValueError, match="HatModel: no layer attends to all of 64 tokens; allowed: a length that"
    ):
        made.run(Quiet())
    made.length, passages = 16, made.texts[0]["a"][:, :16]
    assert made.find_whole_layers(passages) == [f"segment_blocks.{i}.attention" for i in range(3)]
    assert not made.model.training and not hasattr(made.model.config, "hyperattn")


def test_sparse_rules_are_measured_as_patched_and_chosen_by_layer():
    """A layer's loss under a rule is that of the model patched with it, and the choice is what the model computes."""
    made = injection()
    made.rules, made.rivals, made.pairs = sparse.layer_candidates(64), (), 0.8
    made.run(Quiet())
    assert made.allocation.pairs <= 0.8 and made.allocation.sparse
    (first, *_) = made.select_losses(made.rules)
    rule = made.rules[0]
    ids = made.texts[0]["a"]
    ha.unpatch_model(made.model)
    before = embed_passages(made.model, ids)
    ha.patch_model(
        made.model,
        ha.SparseConfig(rule.rule),
        layers=lambda host: host.name == first,
        mode="replace",
    )
    expected = cosine_distance(before, embed_passages(made.model, ids))
    assert (
        expected > 0 and abs(made.select_losses(made.rules)[first][0, 0].item() - expected) < 1e-6
    )


@pytest.mark.parametrize("length", [32, 64, 128, 512])
def test_sparse_candidates_fit_passages(length):
    found = sparse.layer_candidates(length)
    assert found and all(not rule.causal and not rule.rule.only_causal for rule in found)
    assert all(0 < rule.share(length) <= sparse.MOST for rule in found)
    assert len({str(rule) for rule in found}) == len(found) == len(set(found))


def test_an_encoder_has_no_cache_to_make_small():
    with pytest.raises(ValueError, match="rules of an encoder, which keeps no cache"):
        injection(cost="bytes").run(Quiet())
