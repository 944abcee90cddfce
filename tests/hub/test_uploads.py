"""Cards on pushes of models and adapters, and what happens to a card that a person wrote."""

import pytest
from huggingface_hub import ModelCard

from .metadata import card_errors

pytestmark = (
    pytest.mark.slow
)  # cards are tested in test_cards.py, a push in test_loopback.py, with every change


@pytest.fixture(scope="module")
def facts(client):
    return client("hooked")


@pytest.mark.parametrize(
    "name", ["first", "refreshed", "saved", "fresh", "adapter", "adapter_local"]
)
def test_every_pushed_card_is_valid_and_ours(facts, name):
    assert card_errors(facts[name]) == []
    card = ModelCard(facts[name])
    assert {"hf-hyperattn", "cone"} <= set(card.data.tags)
    assert card.data.base_model == "org/base"
    assert "More Information Needed" not in card.text
    assert "`model.layers.(0-1).self_attn`" in card.text


def test_the_relation_to_the_base_and_the_library(facts):
    model, adapter = ModelCard(facts["first"]).data, ModelCard(facts["adapter"]).data
    assert (model.library_name, model.base_model_relation) == ("transformers", "finetune")
    assert (adapter.library_name, adapter.base_model_relation) == ("peft", "adapter")
    assert "base_model:adapter:org/base" in adapter.tags and "lora" in adapter.tags
    assert model.pipeline_tag == adapter.pipeline_tag == "text-generation"


def test_pushing_twice_makes_no_second_commit(facts):
    assert facts["commits_after_same_push"] == facts["commits"] == 2


def test_a_card_that_nobody_edited_follows_the_model(facts):
    card = ModelCard(facts["refreshed"])
    assert "| Mode | `replace` |" in card.text and "extra" in card.data.tags


def test_a_card_that_a_person_wrote_stays_while_the_weights_change(facts):
    assert "Written by hand." in facts["own_remote"] and "hf-hyperattn" not in facts["own_remote"]
    assert facts["own_local"] == "---\nlicense: mit\n---\n\n# My model\n\nWritten by hand.\n"
    assert facts["gap"] == 0.0


def test_what_is_not_patched_is_left_to_transformers(facts):
    assert facts["unpatched"] == facts["unhooked"]
    assert "hf-hyperattn" not in facts["unpatched"] and not facts["stock_has_card"]


def test_pefts_placeholder_is_replaced_but_not_its_tags(facts):
    assert "[More Information Needed]" in facts["adapter_placeholder"]
    card = ModelCard(facts["adapter_local"])
    assert card.data.license == "apache-2.0" and "transformers" in card.data.tags
    assert set(facts["adapter_files"]) >= {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
