"""What the compiler makes of the kernels' first tile sizes, for chips that are not here: registers of a thread, bytes
that it keeps outside them, shared memory of a program. No times.

    python -m tests.engines.triton_report        writes the table of docs/gpu.md; minutes
"""

from pathlib import Path

import pytest
import torch
import triton

import hf_hyperattn.mechanisms  # noqa: F401  registers the terms
from hf_hyperattn.engines.triton import launch
from tests.engines.triton_ahead import Built, backward, call, compiling

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- what the compiler says -->\n", "<!-- end of what the compiler says -->\n"
CHIPS = (80, 90)
WIDTHS = (64, 128)
SCORES = {
    "dot": "dot product",
    "dot+*hype_sinh": "HyPE",
    "umbral": "umbral",
    "dot+*umbral_on_product": "dot + umbral",
    "penumbral_squared": "penumbral",
    "dot+*penumbral_squared_on_product": "dot + penumbral",
    "squared_lorentz": "squared Lorentz",
    "geodesic": "geodesic",
    "dot+*geodesic_on_product": "dot + geodesic",
}
KERNELS = ("forward", "backward_query", "backward_key")


def built(spec: str, width: int) -> list[Built]:
    """The first config of each kernel, causal, bfloat16, compiled for all chips."""
    with pytest.MonkeyPatch.context() as patch, compiling(patch, CHIPS, every=False) as found:
        made = call(spec, d=width)
        launch.forward(made)
        backward(made)
    return found


def cell(kernel: str, found: list[Built]) -> str:
    """Tile, warps and the numbers of both chips."""
    of = [b for b in found if b.kernel == f"attention_{kernel}"]
    rows, columns, warps, _ = of[0].config
    fast = of[: len(CHIPS)]  # before what runs for near pairs alone
    numbers = (f"{b.registers}+{b.spilled}, {b.shared / 1024:.0f}" for b in fast)
    return f"{rows}x{columns}/{warps}: " + "; ".join(numbers)


def table() -> str:
    """The table and what it was made with."""
    lines = [
        f"Triton {triton.__version__}, bfloat16, causal. Queries x keys of a tile / warps: registers + bytes outside "
        "them (stack), KiB of shared memory; first for sm80, then for sm90.\n",
        "| score | width | " + " | ".join(k.replace("_", ", ") for k in KERNELS) + " |",
        "| --- " * (2 + len(KERNELS)) + "|",
    ]
    for width in WIDTHS:
        for spec, name in SCORES.items():
            found = built(spec, width)
            lines.append(
                f"| {name} | {width} | " + " | ".join(cell(k, found) for k in KERNELS) + " |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    made = table()
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + made + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
