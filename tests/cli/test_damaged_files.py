"""Files of other types than `card` and `push` expect: one sentence names the file and what is wrong with it."""

import json
import struct

import pytest

import hf_hyperattn as ha
import hub_cards
from hf_hyperattn.integration.loading.checkpoint_files import check_weights
from hyperattn_cli import main
from tests.integration.models import llama

TYPES = ([1], {"a": 5}, "text", 5, None, True)
HEADERS = (
    *([1], "text", 5, None, True, {"a": 5}, {"a": None}, {"a": [1]}, {"a": {}}),
    *({"a": {"shape": shape}} for shape in (5, "2", None, [-1], ["2"], [1.5], [True], {"a": 1})),
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patched")
    ha.patch_model(llama(), ha.ConeConfig()).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(patched, tmp_path):
    """A copy that may be damaged."""
    for path in patched.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def refused(capfd, *arguments) -> str:
    """The one line that a command refuses with."""
    capfd.readouterr()
    code = main([*map(str, arguments)])
    err = capfd.readouterr().err
    assert code == 2, err
    assert err.count("\n") == 1 and err.startswith(f"hyperattn {arguments[0]}: error: ")
    assert (
        "Traceback" not in err
        and "None:" not in err
        and "Error:" not in err
        and "object has no" not in err
    ), err
    return err


def commands(folder) -> tuple[list, list]:
    return ["card", folder], ["push", folder, "your-name/model", "--dry-run"]


def safetensors(header: object) -> bytes:
    """A file with this header and nothing behind it."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_headers_of_weights(header, folder, capfd):
    (folder / "model.safetensors").write_bytes(safetensors(header))
    for command in commands(folder):
        assert "model.safetensors is no safetensors file: its header" in refused(capfd, *command)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 8, struct.pack("<Q", 100) + b"{}", b"\0" * 8]
)
def test_weights_that_are_cut(content, folder, capfd):
    (folder / "model.safetensors").write_bytes(content)
    for command in commands(folder):
        assert "model.safetensors" in refused(capfd, *command)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "hyperattn_config.json"])
@pytest.mark.parametrize(
    "content", ["[1]", "5", "null", '"text"', "true", "{", "[" * 100_000], ids=lambda c: c[:5]
)
def test_json_files_of_another_type(content, name, folder, capfd):
    if name == "hyperattn_config.json":
        (folder / "config.json").unlink()
    (folder / name).write_text(content)
    for command in commands(folder):
        assert name in refused(capfd, *command)


@pytest.mark.parametrize("value", TYPES, ids=str)
@pytest.mark.parametrize("key", ["architectures", "hyperattn"])
def test_keys_of_config_json(key, value, folder, capfd):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    if key == "architectures" and value is None:
        return
    for command in commands(folder):
        refused(capfd, *command)


@pytest.mark.parametrize("value", [[1], {"a": 5}, "text", 5, True], ids=str)
def test_manifests(value, folder, capfd):
    (folder / "hyperattn_manifest.json").write_text(json.dumps({"sha256": value}))
    said = refused(capfd, "push", folder, "your-name/model", "--dry-run")
    assert "hyperattn_manifest.json has sha256=" in said and "allowed: an object" in said


@pytest.mark.parametrize("value", [[1], {"a": 5}, {"a": None}, "text", 5, None], ids=str)
def test_indexes_of_shards(value, folder):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": value}))
    files = {name: folder / name for name in ("model.safetensors", path.name)}
    with pytest.raises(
        ValueError,
        match="index.json has weight_map=.*allowed: an object of tensors and their files",
    ):
        check_weights(folder, files)


@pytest.mark.parametrize(
    "facts", [[1], {"a": 5}, {"license": [1]}, {"tags": 5}, {"results": 5}], ids=str
)
def test_facts(facts, folder, capfd):
    (folder / "facts.json").write_text(json.dumps(facts))
    refused(capfd, "card", folder, "--facts", folder / "facts.json")


def test_nothing_says_facts_where_none_are_given(folder, capfd):
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": [1], "auto_mapping": 5, "r": {}})
    )
    main(["card", str(folder)])
    assert "--facts None" not in capfd.readouterr().err


def test_the_count_of_a_whole_file_stays(patched):
    added, total = hub_cards.weights.count_parameters(patched)
    model = llama()
    assert total - added == sum(p.numel() for p in model.parameters()) and added > 0
