"""Run in a process of its own: loads checkpoints with plain Transformers calls and writes down what came out.

python loads.py with|without DIRECTORY...      each holds a checkpoint, inputs.pt, and the name of its class
"""

import json
import sys
from pathlib import Path

import torch
import transformers

torch.set_num_threads(1)


def load(directory: Path) -> dict:
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    try:
        model = getattr(transformers, name).from_pretrained(directory)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    with torch.no_grad():
        output = model(**torch.load(directory / "inputs.pt"))
    torch.save(
        [t for t in output.to_tuple() if isinstance(t, torch.Tensor)], directory / "outputs.pt"
    )
    return {"error": None, "ours": "hf_hyperattn" in sys.modules}


if __name__ == "__main__":
    if sys.argv[1] == "with":
        import hf_hyperattn  # noqa: F401
    print(json.dumps({name: load(Path(name)) for name in sys.argv[2:]}))
