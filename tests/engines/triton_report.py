"""Count what the compiler makes of the kernels, for chips that are not here: no GPU is needed, and nothing is timed.

    python -m tests.engines.triton_report        writes the tables of docs/internals/gpu.md; a quarter of an hour

Counted are the machine instructions of the main loop for each pair of a query and a key, a thread's registers and
stack, and the shared memory of a program. Tile sizes are the first ones of `engines/triton/configs.py`.
"""

from pathlib import Path

import pytest
import torch
import triton

import hf_hyperattn.mechanisms  # noqa: F401  registers the terms
from hf_hyperattn.engines.triton import launch
from tests.engines.triton_ahead import (
    SHORT_LOOP,
    Built,
    backward,
    call,
    compiling,
    listed,
)

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "gpu.md"
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
    """Return the first config of each kernel, causal, bfloat16, compiled for all chips."""
    with (
        pytest.MonkeyPatch.context() as patch,
        compiling(patch, CHIPS, every=False, careful=False) as found,
    ):
        made = call(spec, d=width)
        launch.forward(made)
        backward(made)
    return found


def cell(kernel: str, found: list[Built]) -> str:
    """Return the numbers of a kernel on one chip, before the run for near pairs."""
    made = next(b for b in found if b.kernel == f"attention_{kernel}")
    rows, columns, warps, _ = made.config
    instructions = made.per_pair(len(made.main_loop))
    return (
        f"{rows}x{columns}/{warps}: **{instructions:.1f}**; {made.registers}+{made.spilled}; "
        f"{made.shared / 1024:.0f}; {made.warps_that_fit}"
    )


def listed_table() -> list[str]:
    """Return a table of the kernels for listed keys, for all chips, pages and widths."""
    lines = [
        "\nListed keys (sparse rules), forward, by the kind of tile: all queries of a block see all keys; some of them "
        "have chosen a key; the first keys of a text and the ends of the near ones.\n",
        "| chip | keys of a page | width | clean | chosen | edge |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for chip in CHIPS:
        for page in (16, 1):
            for width in WIDTHS:
                with (
                    pytest.MonkeyPatch.context() as patch,
                    compiling(patch, [chip], every=False) as found,
                ):
                    listed(page, width, gradients=False)
                made = next(b for b in found if b.kernel == "listed_forward")
                counts = [made.per_pair(len(loop)) for loop in made.loops if len(loop) > SHORT_LOOP]
                cells = " | ".join(f"**{count:.1f}**" for count in counts)
                lines.append(f"| sm_{chip} | {page} | {width} | {cells} |")
    return lines


def tables() -> str:
    """Return a table for each chip, and what they were made with."""
    lines = [
        f"Triton {triton.__version__}, bfloat16, causal. A cell holds queries x keys of a tile / warps: "
        "**instructions for each pair**; registers + bytes of stack of a thread; KiB of shared memory of "
        "a program; warps that fit on a multiprocessor.",
    ]
    made = {(spec, width): built(spec, width) for width in WIDTHS for spec in SCORES}
    for chip in CHIPS:
        lines += [
            f"\nFor sm_{chip}:\n",
            "| score | width | " + " | ".join(k.replace("_", ", ") for k in KERNELS) + " |",
            "| --- " * (2 + len(KERNELS)) + "|",
        ]
        for (spec, width), kernels in made.items():
            found = [b for b in kernels if b.capability == chip]
            cells = " | ".join(cell(kernel, found) for kernel in KERNELS)
            lines.append(f"| {SCORES[spec]} | {width} | {cells} |")
    lines += listed_table()
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    made = tables()
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + made + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
