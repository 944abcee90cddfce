"""Run in a process of its own, where this package cannot be imported: loads exports as remote code.

python remote.py DIRECTORY...        each holds an export in `export` and `io.pt`, its inputs and expected outputs
"""

import importlib.abc
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

OURS = ("hf_hyperattn", "model_patches", "hub_cards", "tests")


class Absent(importlib.abc.MetaPathFinder):
    """As if the packages were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OURS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def tensors(model, inputs: dict) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t for t in model(**inputs).to_tuple() if isinstance(t, torch.Tensor)]


def same(left: list, right: list) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def lacking(auto, directory: Path) -> str:
    """What a load of the saved export says where one added tensor is not in it."""
    weights = load_file(directory / "again" / "model.safetensors")
    del weights[next(name for name in sorted(weights) if ".hyper." in name)]
    shutil.copytree(directory / "again", directory / "lacking")
    save_file(weights, directory / "lacking" / "model.safetensors", {"format": "pt"})
    try:
        auto.from_pretrained(directory / "lacking", trust_remote_code=True)
    except ValueError as error:
        return str(error)
    return "loaded, silently"


def load(directory: Path) -> dict:
    config = json.loads((directory / "export" / "config.json").read_text())
    wanted = f"modeling_hyperattn.{config['architectures'][0]}"
    auto = getattr(
        transformers, next(name for name, cls in config["auto_map"].items() if cls == wanted)
    )
    inputs, expected = torch.load(directory / "io.pt")
    try:
        auto.from_pretrained(directory / "export")
        untrusted = "loaded, silently"
    except Exception as error:
        untrusted = str(error)
    try:
        model = auto.from_pretrained(directory / "export", trust_remote_code=True)
    except Exception as error:
        return {"untrusted": untrusted, "error": f"{type(error).__name__}: {error}"}
    model.save_pretrained(directory / "again")
    again = auto.from_pretrained(directory / "again", trust_remote_code=True)
    return {
        "untrusted": untrusted,
        "error": None,
        "lacking": lacking(auto, directory),
        "same": same(tensors(model, inputs), expected),
        "saved again": same(tensors(again, inputs), expected),
        "remote": type(model).__module__.startswith("transformers_modules."),
        "class": type(model).__name__,
        "generated": generated(model, inputs),
        "beneath": beneath(model, inputs),
    }


def beneath(model, inputs: dict) -> float:
    """How far a name that is written into the config, as Transformers does for Whisper, takes the output away."""
    inputs = {
        name: t for name, t in inputs.items() if name != "attention_mask"
    }  # padding has no meaning to compare
    expected = tensors(model, inputs)
    model.config._attn_implementation = "eager"
    found = tensors(model, inputs)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def generated(model, inputs: dict) -> list[int] | None:
    if not model.can_generate() or model.config.is_encoder_decoder:
        return None
    return model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    torch.set_num_threads(1)
    print(json.dumps({name: load(Path(name)) for name in sys.argv[1:]}))
    assert not set(OURS) & {name.split(".")[0] for name in sys.modules}
