"""Write the checkpoints of cases.py with the code that is installed: `python -m tests.saved.write FOLDER`.

Outputs are kept in float64, so that they do not depend on the CPU.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.saved.cases import CASES, compute_output


def write(folder: Path) -> None:
    for number, (name, case) in enumerate(CASES.items()):
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        with case.registered():
            model = case.build(seed=number)
            if case.is_adapter:
                case.build_base(seed=number).save_pretrained(place / "base")
            model.save_pretrained(place)
            for readme in place.rglob("README.md"):
                readme.unlink()
            rounded = compute_output(model, case)
            exact = compute_output(model.double(), case)
            gap = (rounded - exact).abs().max().item() / exact.abs().max().item()
            save_file({"output": exact}, place / "expected.safetensors")
        print(f"{name:28} float32 differs by {gap:.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(Path(sys.argv[1]))
