"""What the plugin publishes is loaded exactly by plain ``from_pretrained``, and a failed push changes nothing."""

import sys

import pytest
from huggingface_hub import ModelCard

from .metadata import card_errors

pytestmark = pytest.mark.slow  # what is pushed comes back in test_loopback.py, with every change


@pytest.fixture(scope="module")
def facts(client):
    return client("patched")


@pytest.fixture(scope="module")
def strangers(client, facts):
    """What somebody without the plugin sees."""
    return client("without")


def test_the_model_starts_as_its_base_and_then_differs(facts):
    assert facts["gap_at_start"] <= 1e-5 and facts["gap_stirred"] > 1e-4


@pytest.mark.parametrize(
    "repo", ["patched", "patched-private", "patched-shards", "patched-again", "bare"]
)
def test_a_patched_model_comes_back_exactly(facts, repo):
    assert facts["gaps"][repo if repo == "bare" else f"tester/{repo}"] == 0.0


def test_the_repository_holds_what_it_should(facts):
    assert set(facts["files"]) == {
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert facts["private"] and facts["shards"] > 1


def test_a_lora_adapter_with_the_added_parameters_comes_back_exactly(facts):
    assert facts["lora_gaps"] == [0.0, 0.0, 0.0] and facts["lora_changed"] > 1e-4
    assert "model.safetensors" not in facts["lora_files"]


def test_a_config_comes_back_and_patches_the_same(facts):
    assert facts["config_equal"] and facts["config_gap"] == 0.0
    assert set(facts["config_files"]) == {".gitattributes", "README.md", "hyperattn_config.json"}


@pytest.mark.parametrize(
    "name, library",
    [("card", "transformers"), ("lora_card", "peft"), ("config_card", "hf-hyperattn")],
)
def test_the_card(facts, name, library):
    assert card_errors(facts[name]) == []
    card = ModelCard(facts[name])
    assert card.data.library_name == library and {"hf-hyperattn", "cone"} <= set(card.data.tags)
    assert "gamma=0.5" in card.text and "arXiv 2306.00392" in card.text
    assert "No measured numbers are recorded" in card.text or name == "config_card"


def test_the_card_counts_the_added_parameters_and_reads_the_gates(facts):
    low, high = facts["gates"]
    for name in ("card", "shards_card"):
        assert f"| Parameters added | {facts['added']} of " in facts[name]
    assert f"| Blend gates | {low:.4g} to {high:.4g} |" in facts["card"]
    assert "| Attention modules | `model.layers.1.self_attn` |" in facts["card"]


def test_the_adapters_card_names_its_base(facts):
    data = ModelCard(facts["lora_card"]).data
    assert (data.base_model, data.base_model_relation) == ("tester/patched", "adapter")


def test_importing_the_plugin_is_all_it_takes_to_get_a_card(facts):
    assert facts["hooked"]


@pytest.mark.parametrize(
    "refusal", ["wrong_token", "wrong_token_new", "wrong_token_config", "dropped"]
)
def test_a_failed_push_changes_nothing_and_says_why_in_one_line(facts, refusal):
    cause = facts[refusal]["cause"]
    assert "\n" not in cause
    assert ("HTTP 401" if "token" in refusal else "connection to the Hub was lost") in cause
    if sys.version_info >= (3, 11):
        (note,) = facts[refusal]["notes"]  # the last line of the traceback
        assert note.startswith("push to tester/patched") and note.endswith(
            cause.split(" failed: ")[1]
        )
    assert facts["same_push"] and facts["unchanged"] and not facts["never"]["exists"]
    assert facts["gap_after_faults"] == 0.0


def test_saving_and_pushing_at_once_keeps_a_persons_readme(facts):
    assert facts["saved_gaps"] == [0.0, 0.0] and facts["own"] == "# Mine\n"


@pytest.mark.slow
def test_without_the_plugin_loading_fails_and_names_it(strangers):
    for refusal in strangers.values():
        assert "hf_hyperattn" in refusal["message"]


def test_the_command_replaces_what_was_there_but_no_persons_card(facts):
    assert facts["command_codes"] == [
        0,
        0,
        2,
    ]  # the last: --private, into a repository that is public
    assert facts["command_gap"] == 0.0 and facts["command_theirs"].endswith("# Theirs\n")
    assert set(facts["command_files"]) == set(facts["files"]), (
        "the shards of an earlier push are gone"
    )
    assert "# tester/patched-command" in facts["command_card"] and "`cone`" in facts["command_card"]
