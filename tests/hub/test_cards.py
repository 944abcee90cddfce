"""Rendered cards read back through huggingface_hub, and refused by nobody who checks their header."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, parse_eval_result_entries

import hub_cards
from hf_hyperattn.address import install
from hub_cards.mechanisms import KNOWN
from hub_cards.results import eval_entries, read_results

from .metadata import card_errors, read_header
from .samples import ADAPTER, RESULT, SPEC

EXAMPLES = Path(hub_cards.__file__).parent / "examples"


def rows(card, heading: str) -> list[list[str]]:
    """The cells of all table rows under a heading."""
    section = card.text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rendered(kind: str, **facts):
    if kind == "config":
        return hub_cards.render_config_card(SPEC, **facts)
    if kind == "adapter":
        return hub_cards.render_adapter_card(
            SPEC, "org/base", "apache-2.0", adapter=ADAPTER, **facts
        )
    return hub_cards.render_model_card(SPEC, "org/base", "apache-2.0", **facts)


@pytest.mark.parametrize("kind", ["model", "adapter", "config"])
def test_a_card_survives_saving_and_loading(kind, tmp_path):
    card = rendered(kind, repo_id="me/mine")
    card.save(tmp_path / "README.md")
    loaded = ModelCard.load(tmp_path / "README.md")
    assert loaded.data.to_dict() == card.data.to_dict() and loaded.text == card.text
    assert card_errors((tmp_path / "README.md").read_text()) == []


@pytest.mark.parametrize(
    "kind, library, relation",
    [("model", "transformers", "finetune"), ("adapter", "peft", "adapter")],
)
def test_the_header(kind, library, relation):
    facts = {
        "language": "en",
        "pipeline_tag": "text-generation",
        "datasets": ["org/data"],
        "results": [RESULT],
    }
    header = read_header(str(rendered(kind, **facts)))
    expected = {
        "base_model": "org/base",
        "base_model_relation": relation,
        "library_name": library,
        "license": "apache-2.0",
        "language": "en",
        "pipeline_tag": "text-generation",
        "datasets": ["org/data"],
        "metrics": ["perplexity"],
    }
    assert {key: header[key] for key in expected} == expected
    assert header["tags"][:3] == ["hf-hyperattn", "cone", "hype"]
    (model,) = header["model-index"]
    (result,) = model["results"]
    assert result["metrics"] == [{"type": "perplexity", "value": 12.5, "name": "perplexity"}]


def test_what_was_changed_and_where():
    changed = rows(
        rendered("model", parameters_added=1234, parameters_total=5678), "What was changed"
    )
    assert ["`cone`", "score", '`variant="umbral", gamma=0.5, radius=1.0`'] in changed
    assert ["`hype`", "bias", '`slopes="alibi", max_length=4096`'] in changed
    assert ["Attention modules", "`model.layers.(3-5, 9).self_attn`"] in changed
    assert ["Modules changed", "4"] in changed and ["Heads", "`0-2, 7`"] in changed
    assert ["Parameters added", "1,234 of 5,678 in the files"] in changed


def test_measured_numbers_come_with_their_command_machine_and_versions():
    _, row = rows(rendered("model", results=[RESULT]), "Measured")
    versions = "torch 2.13.0, transformers 5.23.0"
    assert row == ["perplexity", "a text", "12.5", "12.25", "`make recipe`", "2 cores", versions]


def test_a_card_without_numbers_says_so():
    for kind in ("model", "adapter"):
        assert "No measured numbers are recorded for this repository." in rendered(kind).text
        assert "model-index" not in read_header(str(rendered(kind)))


def test_how_to_load():
    text = rendered(
        "model", repo_id="me/mine", auto_class="AutoModelForCausalLM", tokenizer=True
    ).text
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "import hf_hyperattn" in code and f"\n{install()}\n" in text
    assert 'AutoModelForCausalLM.from_pretrained("me/mine")' in code
    assert 'AutoTokenizer.from_pretrained("me/mine")' in code


def test_every_paper_is_cited_once():
    for name, about in KNOWN.items():
        text = hub_cards.render_model_card({"mechanisms": [{"mechanism": name}]}).text
        for paper in about.papers:
            assert text.count(paper.split("arXiv ")[1]) == 1
    both = rendered("model").text
    assert all(
        number in both for number in ("2306.00392", "2305.15215", "2310.19676", "2108.12409")
    )


def test_a_mechanism_from_elsewhere_is_described_by_its_maker():
    spec = {"mechanisms": [{"mechanism": "toy", "depth": 2}]}
    about = {"toy": {"stage": "bias", "what": "Adds a toy.", "papers": ["Toys, arXiv 0000.00000"]}}
    card = hub_cards.render_model_card(spec, about=about)
    assert ["`toy`", "bias", "`depth=2`"] in rows(card, "What was changed")
    assert "Adds a toy." in card.text and "Toys, arXiv 0000.00000" in card.text
    assert ["`toy`", "not stated", "`depth=2`"] in rows(
        hub_cards.render_model_card(spec), "What was changed"
    )


def test_gates_at_zero_are_stated():
    assert "All gates of this model are 0." in rendered("model", gates=[0, 0]).text
    card = rendered("model", gates=[-0.25, 0.5])
    assert "All gates" not in card.text
    assert ["Blend gates", "-0.25 to 0.5"] in rows(card, "What was changed")


def test_no_licence_and_no_base_are_stated_as_such():
    card = hub_cards.render_model_card(SPEC)
    assert {"license", "base_model", "base_model_relation"}.isdisjoint(read_header(str(card)))
    assert (
        "No licence is stated here" in card.text and "The base model is not named here" in card.text
    )


def test_benchmarks_on_the_hub_become_eval_results():
    entry = RESULT | {
        "dataset_id": "org/bench",
        "task_id": "default",
        "date": "2026-11-21",
        "revision": "a" * 40,
    }
    (made,) = eval_entries(read_results([entry, RESULT]))
    assert (made.dataset_id, made.task_id, made.value, made.date) == (
        "org/bench",
        "default",
        12.5,
        "2026-11-21",
    )


@pytest.mark.parametrize(
    "facts, word",
    [
        ({"base_model": "/home/me/model"}, "base_model"),
        ({"base_model": "a/b/c"}, "base_model"),
        ({"repo_id": "me/../you"}, "repo_id"),
        ({"license": "MIT License\n"}, "license"),
        ({"license": "other"}, "license_name"),
        ({"language": "English"}, "language"),
        ({"auto_class": "AutoModel; import os"}, "auto_class"),
        ({"results": [RESULT | {"value": float("nan")}]}, "finite"),
        ({"results": [RESULT | {"value": True}]}, "number"),
        ({"results": [RESULT | {"command": " "}]}, "command"),
        ({"results": [RESULT | {"date": "yesterday"}]}, "ISO date"),
        ({"results": [{"metric": "perplexity", "value": 1.0}]}, "machine"),
        ({"results": [RESULT | {"speed": 3}]}, "metric"),
        ({"parameters_added": -1}, "count"),
        ({"gates": [0.0, float("inf")]}, "gate"),
        ({"about": {"cone": {"paper": "x"}}}, "papers"),
    ],
)
def test_what_has_no_place_in_a_card_is_refused_in_one_line(facts, word):
    with pytest.raises(ValueError, match=word) as refusal:
        hub_cards.render_model_card(SPEC, **facts)
    assert "\n" not in str(refusal.value) and "allowed" in str(refusal.value)


@pytest.mark.parametrize(
    "config",
    [
        None,
        3,
        {},
        {"mechanisms": "cone"},
        {"mechanisms": [3]},
        {"mechanisms": [{"mechanism": 1}]},
        {"mechanisms": [{"mechanism": "x"}] * 99},
        SPEC | {"hosts": "all"},
        SPEC | {"hosts": [1]},
    ],
)
def test_a_malformed_config_is_refused_in_one_line(config):
    with pytest.raises(ValueError, match="allowed") as refusal:
        hub_cards.render_model_card(config)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "example", sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
)
def test_the_examples_are_what_the_command_writes(example, tmp_path):
    from hyperattn_cli import main

    for path in (EXAMPLES / example).iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert main(["card", str(tmp_path), "--facts", str(tmp_path / "facts.json"), "--write"]) == 0
    assert (tmp_path / "README.md").read_text() == (EXAMPLES / example / "README.md").read_text()
    assert card_errors((tmp_path / "README.md").read_text()) == []


def test_eval_results_file_reads_back(tmp_path):
    import yaml

    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "hyperattn": SPEC})
    )
    hub_cards.write_card(
        tmp_path, results=[RESULT | {"dataset_id": "org/bench", "task_id": "default"}]
    )
    (entry,) = parse_eval_result_entries(
        yaml.safe_load((tmp_path / ".eval_results/hf_hyperattn.yaml").read_text())
    )
    assert (entry.dataset_id, entry.task_id, entry.value) == ("org/bench", "default", 12.5)


def test_settings_of_single_modules_are_a_table():
    """Modules that agree share a row; of numbers by head the least and the largest are shown."""
    own = {
        "mechanism": "hsa",
        "windows": [16, 64, 256],
        "near": [32, 2147483648, 96],
        "block_bias": [0.0, "-inf", 0.0],
    }
    overrides = {f"model.layers.{i}.self_attn": [own] for i in (12, 3, 4)}
    overrides["model.layers.9.self_attn"] = [{"mechanism": "hsa", "near": 8}]
    config = {"mechanisms": [{"mechanism": "hsa"}], "overrides": overrides}
    shown = rows(hub_cards.render_model_card(config, "org/base", "apache-2.0"), "What was changed")
    head = shown.index(["Modules with settings of their own", "Mechanism", "Settings"])
    assert shown[head + 1 : head + 3] == [
        [
            "`model.layers.(3-4, 12).self_attn`",
            "`hsa`",
            "`windows=[16, 64, 256], near=32 to no limit, block_bias=-inf to 0`",
        ],
        ["`model.layers.9.self_attn`", "`hsa`", "`near=8`"],
    ]
