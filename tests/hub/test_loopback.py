"""The loopback Hub against stock Transformers: what it is for rests on it speaking the protocol."""

import pytest


@pytest.fixture(scope="module")
def facts(client):
    return client("stock")


def one_line(refusal: dict) -> str:
    cause = refusal["cause"]
    assert "\n" not in cause and cause.startswith("the call failed: ")
    return cause


@pytest.mark.parametrize(
    "push", ["gap", "private_gap", "branch_gap", "resumed_gap", "whole_after_lost_answer"]
)
def test_what_is_pushed_comes_back_exactly(facts, push):
    if facts[push] is None:
        pytest.skip("this huggingface_hub gives a download up where the connection was dropped")
    assert facts[push] == 0.0


def test_a_push_makes_one_commit_with_all_files(facts):
    assert facts["plain"]["commits"] == 2
    assert set(facts["plain"]["files"]) == {
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert not facts["plain"]["private"] and facts["hidden"]["private"]
    assert facts["whoami"] == "tester"


def test_the_same_push_again_changes_nothing(facts):
    assert facts["after_same_push"] == facts["plain"]


def test_a_private_repository_is_hidden(facts):
    for refusal in (facts["hidden_without_token"], facts["hidden_for_guest"]):
        assert refusal["type"] == "RepositoryNotFoundError"
        assert "Repository not found" in one_line(refusal)


def test_a_wrong_token_stops_before_anything_is_made(facts):
    assert not facts["never"]["exists"]
    for refusal in (facts["wrong_token_push"], facts["wrong_token_load"]):
        assert "HTTP 401" in one_line(refusal) and "hf auth login" in one_line(refusal)


def test_a_token_without_rights_is_told_so(facts):
    assert "HTTP 403" in one_line(facts["guest_push"])


def test_a_dropped_commit_leaves_the_repository_as_it_was(facts):
    assert facts["unchanged"]
    for refusal in (facts["dropped_commit"], facts["dropped_answer"]):
        assert "connection to the Hub was lost" in one_line(refusal)


def test_a_dropped_download_leaves_no_half_file(facts):
    assert "connection to the Hub was lost" in one_line(facts["dropped_download"])
    assert "model.safetensors" not in facts["cut_files"]
