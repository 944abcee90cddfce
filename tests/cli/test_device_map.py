"""`hyperattn inject --device-map`: weights in memory and on the disk, and the checkpoint that one process writes."""

import argparse
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_hyperattn.inject.gradients import final_hidden, head_of, loss_of
from hf_hyperattn.inject.kept import fingerprint
from hyperattn_cli import main
from hyperattn_cli.shared import device_map

from . import tiny
from .test_inject import prose

MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "disk",
}
MAP |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama in bfloat16, a text, and where its modules are to lie."""
    folder = tmp_path_factory.mktemp("spread")
    tiny.save(folder / "float32", max_position_embeddings=256, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    (folder / "one.txt").write_text(prose(1))
    (folder / "map.json").write_text(json.dumps(MAP))
    return folder


def request(folder) -> argparse.Namespace:
    """The options of a model that is spread over memory and the disk."""
    return argparse.Namespace(
        model=str(folder / "model"), device_map=str(folder / "map.json"), dtype=None
    )


def inject(folder, output, *more) -> dict:
    """The numbers of the report beside the checkpoint."""
    line = [
        "inject",
        folder / "model",
        "--mechanism",
        "hsa",
        "--length",
        "128",
        "--rows",
        "16",
        "--pairs",
        "0.7",
    ]
    assert (
        main(
            [
                *map(str, line),
                "--text",
                str(folder / "one.txt"),
                "--output",
                str(output),
                *map(str, more),
            ]
        )
        == 0
    )
    return json.loads((output / "hyperattn_inject.json").read_text())


def test_models_on_the_disk_have_fingerprints_of_their_weights(folder, tmp_path):
    args = request(folder)
    print_of = lambda: fingerprint(
        device_map.load_model(AutoModelForCausalLM, args), torch.arange(4), ()
    )
    first = print_of()
    assert print_of() == first
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(1.1)  # which lies on the disk
    model.save_pretrained(tmp_path / "other")
    args.model = str(tmp_path / "other")
    assert print_of() != first


@pytest.mark.slow
@pytest.mark.parametrize("where", ["map.json", "auto"])
def test_the_same_checkpoint_is_written(folder, tmp_path, capsys, where):
    expected = inject(folder, tmp_path / "plain")
    report = inject(
        folder, tmp_path / "spread", "--device-map", where if where == "auto" else folder / where
    )
    assert report["pairs"] == expected["pairs"]
    assert report["texts"]["one.txt"]["after"] == pytest.approx(
        expected["texts"]["one.txt"]["after"], rel=1e-5
    )
    plain, spread = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "spread")
    )
    assert spread.config.hyperattn == plain.config.hyperattn
    states = plain.state_dict(), spread.state_dict()
    assert states[0].keys() == states[1].keys() and {p.dtype for p in spread.parameters()} == {
        torch.bfloat16
    }
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    card = (tmp_path / "spread" / "README.md").read_text()
    assert f"--device-map {where}" in card and str(folder) not in card


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_on_the_disk_is_written_whole(folder, tmp_path, dtype):
    args = request(folder)
    model = device_map.load_model(AutoModelForCausalLM, args)
    assert {p.device.type for p in model.model.layers[0].parameters()} == {"meta"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device_map.save_model(model, dtype, tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).state_dict()
    assert found.dtype == dtype and found.state_dict().keys() == expected.keys()
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.items())


def test_shards_are_cast_one_by_one(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "float32")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    with_numbers = sorted(tmp_path.glob("*.safetensors"))[0]
    save_file(
        load_file(with_numbers) | {"count": torch.tensor([3])}, with_numbers, {"format": "pt"}
    )
    device_map.cast_files(tmp_path, torch.float16)
    assert load_file(with_numbers)["count"].dtype == torch.int64
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for file in files.values() for t in file.values()
    )
    half = model.half().state_dict()
    assert all(
        torch.equal(half[name], files[file][name]) for name, file in index["weight_map"].items()
    )


def test_logits_of_an_offloaded_16_bit_head_are_float32(folder, tmp_path):
    """The head lies on the disk, and is loaded for every piece of logits."""
    (tmp_path / "map.json").write_text(json.dumps(MAP | {"lm_head": "disk"}))
    args = request(folder)
    args.dtype, args.device_map = "bfloat16", str(tmp_path / "map.json")
    model = device_map.load_model(AutoModelForCausalLM, args)
    assert model.lm_head.weight.device.type == "meta" and model.dtype == torch.bfloat16
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    ids = torch.arange(32)
    losses = []
    for each in (model, plain):
        with torch.no_grad():
            hidden = final_hidden(each, ids)
        head = head_of(each, ids)
        assert head(hidden).dtype == torch.float32
        losses.append(loss_of(head, hidden, ids))
    assert losses[0][0] == losses[1][0] and torch.equal(losses[0][1], losses[1][1])
    assert model.lm_head.weight.device.type == "meta"


@pytest.mark.parametrize("value", ["nowhere", "list.json", "text.json", "place.json", ""])
def test_what_is_no_map_is_refused_in_one_line(folder, tmp_path, capsys, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("auto")
    (tmp_path / "place.json").write_text('{"model": 1.5}')
    line = [
        "inject",
        str(folder / "model"),
        "--mechanism",
        "hsa",
        "--text",
        str(folder / "one.txt"),
    ]
    assert main([*line, "--device-map", value]) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err.count("\n") == 1
        and f"--device-map {value!r}" in err
        and "allowed: auto" in err
    )
