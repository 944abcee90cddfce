"""docs/publishing.md does what it says."""

import pytest


@pytest.mark.slow
def test_the_code_of_the_page_runs(client):
    facts = client("docs")
    assert facts["blocks"] >= 6 and facts["patched"]
    assert all(state["exists"] for state in facts["states"]) and facts["states"][0]["private"]
    assert facts["metrics"] == ["perplexity"]
    lines = facts["said"].strip().splitlines()
    assert (
        lines[-1].startswith("push to tester/SmolLM2-135M-cone failed") and "HTTP 401" in lines[-1]
    )
