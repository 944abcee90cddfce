"""Checkpoints that are damaged in one way each, made from a whole one: what transfers, disks and people do to files."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import hf_hyperattn as ha

RECORD = ha.HyperAttnConfig([ha.ConeConfig()], hosts=["model.layers.0.self_attn"]).to_dict()


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Other content for a file."""
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def cut(name: str, share: float) -> Callable[[Path], None]:
    """Only the first part of a file."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return damage


def values(name: str, **changes) -> Callable[[Path], None]:
    """Other values in a JSON file."""
    return lambda folder: (folder / name).write_text(
        json.dumps(json.loads((folder / name).read_text()) | changes)
    )


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def a_folder(name: str) -> Callable[[Path], None]:
    """A folder in place of a file."""
    return lambda folder: [(folder / name).unlink(missing_ok=True), (folder / name).mkdir()]


def unreadable(name: str) -> Callable[[Path], None]:
    """A link to a file that this process cannot read, root or not."""
    return lambda folder: [
        (folder / name).unlink(missing_ok=True),
        (folder / name).symlink_to("/proc/self/mem"),
    ]


def a_circle(name: str) -> Callable[[Path], None]:
    return lambda folder: [
        (folder / name).unlink(missing_ok=True),
        (folder / name).symlink_to(name),
    ]


CONFIG, WEIGHTS = "config.json", "model.safetensors"
NESTED = "[" * 200_000 + "]" * 200_000

#: Without these the model cannot be described.
OF_CONFIG = {
    "config gone": gone(CONFIG),
    "config empty": text(CONFIG, ""),
    "config cut": cut(CONFIG, 0.5),
    "config cut to a byte": text(CONFIG, "{"),
    "config of zeros": text(CONFIG, b"\0" * 500),
    "config not UTF-8": text(CONFIG, '{"model_type": "Größe"}'.encode("latin-1")),
    "config in UTF-16": text(CONFIG, '{"model_type": "llama"}'.encode("utf-16")),
    "config a list": text(CONFIG, "[]"),
    "config a number": text(CONFIG, "3"),
    "config null": text(CONFIG, "null"),
    "config nested": text(CONFIG, NESTED),
    "config nested in an object": text(
        CONFIG, '{"model_type": "llama", "x": ' + '{"x":' * 150 + "1" + "}" * 151
    ),
    "config a page": text(CONFIG, "<!DOCTYPE html><html>404</html>"),
    "config a pointer of git-lfs": text(
        CONFIG, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
    "config a folder": a_folder(CONFIG),
    "config a circle of links": a_circle(CONFIG),
    "config unreadable": unreadable(CONFIG),
    "no model type": text(CONFIG, "{}"),
    "an unknown model type": values(CONFIG, model_type="lama"),
    "a model type that is a list": values(CONFIG, model_type=["llama"]),
    "a model type that is null": values(CONFIG, model_type=None),
    "classes a string": values(CONFIG, architectures="LlamaForCausalLM"),
    "classes numbers": values(CONFIG, architectures=[3]),
    "classes an object": values(CONFIG, architectures={"0": "LlamaForCausalLM"}),
    "heads a string": values(CONFIG, num_attention_heads="four"),
    "heads none": values(CONFIG, num_attention_heads=0),
    "heads a list": values(CONFIG, num_attention_heads=[4]),
    "width a string": values(CONFIG, hidden_size="wide"),
    "width negative": values(CONFIG, hidden_size=-32),
    "width beyond 64 bits": values(CONFIG, hidden_size=10**30),
    "layers beyond sense": values(CONFIG, num_hidden_layers=10**9),
    "labels beyond sense": values(CONFIG, num_labels=10**9),
    "depths beyond sense": text(
        CONFIG,
        '{"model_type": "swin", "architectures": ["SwinModel"], "embed_dim": 8, "depths": [9000000, 2]}',
    ),
    "layers a fraction": values(CONFIG, num_hidden_layers=1.5),
    "layers null": values(CONFIG, num_hidden_layers=None),
    "vocabulary negative": values(CONFIG, vocab_size=-1),
    "activation unknown": values(CONFIG, hidden_act="swoosh"),
    "activation a number": values(CONFIG, hidden_act=7),
    "rope a string": values(CONFIG, rope_parameters="yarn"),
    "rope of an unknown kind": values(
        CONFIG, rope_parameters={"rope_type": "knot", "rope_theta": 1e4}
    ),
    "dtype unknown": values(CONFIG, dtype="float23"),
    "foreign code": values(CONFIG, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
    "code map a list": values(CONFIG, auto_map=["mine.Config"]),
}
#: Damage of the record, and of what is read where there is one.
OF_RECORD = {
    "record a string": values(CONFIG, hyperattn="cone"),
    "record a list": values(CONFIG, hyperattn=[RECORD]),
    "record empty": values(CONFIG, hyperattn={}),
    "record of another format": values(CONFIG, hyperattn=RECORD | {"format": 99}),
    "record of a format in words": values(CONFIG, hyperattn=RECORD | {"format": "one"}),
    "record with an unknown key": values(CONFIG, hyperattn=RECORD | {"colour": "red"}),
    "record of an unknown mechanism": values(
        CONFIG, hyperattn=RECORD | {"mechanisms": [{"mechanism": "x\ny"}]}
    ),
    "record of no mechanism": values(CONFIG, hyperattn=RECORD | {"mechanisms": []}),
    "record of numbers": values(CONFIG, hyperattn=RECORD | {"mechanisms": [1]}),
    "record with a number out of range": values(
        CONFIG, hyperattn=RECORD | {"mechanisms": [{"mechanism": "cone", "gamma": -1}]}
    ),
    "record with a number beyond floats": values(
        CONFIG, hyperattn=RECORD | {"mechanisms": [{"mechanism": "cone", "gamma": 10**400}]}
    ),
    "record with an unknown mode": values(CONFIG, hyperattn=RECORD | {"mode": 3}),
    "record of hosts that are not there": values(CONFIG, hyperattn=RECORD | {"hosts": ["nowhere"]}),
    "record of hosts that are numbers": values(CONFIG, hyperattn=RECORD | {"hosts": [1, 2]}),
    "record with wrong overrides": values(CONFIG, hyperattn=RECORD | {"overrides": {"nowhere": 3}}),
    "record with heads that are not there": values(CONFIG, hyperattn=RECORD | {"heads": [99]}),
    "weights gone": gone(WEIGHTS),
    "weights empty": text(WEIGHTS, b""),
    "weights cut in the header": cut(WEIGHTS, 0.001),
    "weights cut": cut(WEIGHTS, 0.9),
    "weights of zeros": text(WEIGHTS, b"\0" * 4096),
    "weights with a huge header": text(WEIGHTS, b"\xff" * 7 + b"\x7f" + b"{}"),
    "weights a page": text(WEIGHTS, "<!DOCTYPE html><html>404</html>"),
    "weights a folder": a_folder(WEIGHTS),
    "index garbled": lambda f: [gone(WEIGHTS)(f), text(f"{WEIGHTS}.index.json", "{")(f)],
    "index a list": lambda f: [gone(WEIGHTS)(f), text(f"{WEIGHTS}.index.json", "[]")(f)],
    "index without a map": lambda f: [gone(WEIGHTS)(f), text(f"{WEIGHTS}.index.json", "{}")(f)],
    "index of shards that are not there": lambda f: [
        gone(WEIGHTS)(f),
        text(f"{WEIGHTS}.index.json", '{"metadata": {}, "weight_map": {"a": "model-1.bin"}}')(f),
    ],
}
#: Read by what needs a tokenizer.
OF_TOKENIZER = {
    "tokenizer cut": cut("tokenizer.json", 0.5),
    "tokenizer empty": text("tokenizer.json", ""),
    "tokenizer a list": text("tokenizer.json", "[]"),
    "tokenizer a folder": a_folder("tokenizer.json"),
    "tokenizer config a list": text("tokenizer_config.json", "[]"),
    "tokenizer config not UTF-8": text("tokenizer_config.json", b'{"x": "\xff"}'),
    "tokenizer config nested": text("tokenizer_config.json", NESTED),
}
#: Seen by `export` alone, which takes models without adapters.
OF_ADAPTER = {
    "adapter config garbled": text("adapter_config.json", "{"),
    "adapter config a list": text("adapter_config.json", "[]"),
    "adapter config a folder": a_folder("adapter_config.json"),
}


def damaged(whole: Path, folder: Path, damage: Callable[[Path], None]) -> Path:
    """A damaged copy."""
    shutil.copytree(whole, folder)
    damage(folder)
    assert os.path.isdir(folder)
    return folder
