"""Tile sizes, and the choice among them by measuring.

What fits depends on the width of a head (rounded up to a power of two) and on the size of its numbers: a program keeps
its own block and `stages` copies of the tiles it walks over in shared memory, and its sums in registers. For each
kernel two or three sizes are tried, once per kind of call: first small ones of 4 warps, several of which hide each
other's waits on a multiprocessor (the fastest of those tried on an H100 with an umbral score and heads of 64; wider
heads were not measured), then others, for chips with less shared memory (the smallest needs at most 99 KiB) and long
scores. tests/engines/test_triton_compiled.py holds them to what chips have.

Where 64 lines of a tile are multiplied by 8 warps, all that they meet is wider than 16: of products of 64 x 16, and of
64 lines of queries and keys beside values of 16 numbers, Triton 3.6 reads beyond its shared memory, seen on an H100
with float32.

Environment: HF_HYPERATTN_TRITON_TUNE=0 takes the first size without measuring.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from .tile import INTERPRETED


@dataclass(frozen=True)
class Config:
    """Queries and keys of a tile, warps of a program, tiles in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


#: By kernel and width for numbers of 2 bytes; float32 takes the sizes of twice its width.
CONFIGS = {
    "forward": {
        64: (Config(64, 64, 4, 2), Config(64, 32, 4, 2)),
        128: (Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(128, 64, 8, 2)),
        256: (Config(64, 32, 8, 2), Config(32, 32, 4, 2)),
        512: (Config(32, 16, 4, 1), Config(16, 16, 4, 1)),
    },
    "query": {
        64: (Config(64, 32, 4, 2), Config(32, 32, 4, 2)),
        128: (Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(64, 32, 8, 2)),
        256: (Config(32, 32, 8, 1), Config(16, 32, 4, 1)),
        512: (Config(16, 16, 4, 1),),
    },
    "key": {
        64: (Config(32, 64, 4, 2), Config(32, 32, 4, 2)),
        128: (Config(32, 32, 4, 2), Config(32, 64, 8, 2)),
        256: (Config(16, 32, 4, 1), Config(16, 16, 4, 1)),
        512: (Config(16, 16, 4, 1),),
    },
}
#: For Triton's interpreter, which is fastest with few tiles, and whose tests want several.
INTERPRETER = (Config(32, 32, 1, 1),)

_chosen: dict[Hashable, Config] = {}


def padded(width: int) -> int:
    """The power of two, at least 16, that holds `width`."""
    return max(16, int(triton.next_power_of_2(width)))


def configs(kernel: str, width: int, item: int, narrowest: int) -> Sequence[Config]:
    """What is tried for a kernel, the best guess first.

    Args:
        kernel: "forward", "query" or "key".
        width: of heads, the larger of that of keys and of values, as padded.
        item: bytes of a number, 2 or 4.
        narrowest: as `width`, the smaller one.
    """
    if INTERPRETED.value:
        return INTERPRETER
    found = CONFIGS[kernel][max(64, width * item // 2)]
    return (
        found
        if narrowest > 16
        else [c for c in found if c.warps < 8 or 64 not in (c.rows, c.columns)]
    )


def few(width: int, item: int) -> tuple[int, int]:
    """Keys of a tile and tiles in flight where few queries meet many keys; arguments as of `configs`."""
    if INTERPRETED.value:
        return 32, 1
    return 32 if width * item > 256 else 64, 1 if width * item > 512 else 2


def tuned(kind: Hashable, tried: Sequence[Config], run: Callable[[Config], None]) -> None:
    """Run a kernel, for the first time of its kind with each config to find the fastest; where that is not to be found
    out, with the first one that the chip has room for.

    Args:
        kind: what the best config depends on.
        tried: the configs.
        run: launches the kernel; may be called several times.
    """
    if kind not in _chosen and measurable(tried):
        _chosen[kind] = min(tried, key=lambda config: seconds(run, config))
    if kind in _chosen:
        return run(_chosen[kind])
    for config in tried:
        try:
            return run(config)
        except OutOfResources:  # before anything has run: the chip has too little for this one
            if config is tried[-1]:
                raise


def measurable(tried: Sequence[Config]) -> bool:
    """Whether there is a choice, and kernels may be timed here and now."""
    tunes = os.environ.get("HF_HYPERATTN_TRITON_TUNE", "1") != "0"
    return len(tried) > 1 and tunes and not torch.cuda.is_current_stream_capturing()


def seconds(run: Callable[[Config], None], config: Config) -> float:
    """The time of a launch; infinite where the chip has too little for it."""
    try:
        median: Any = triton.testing.do_bench(
            lambda: run(config), warmup=10, rep=40, return_mode="median"
        )
        return median
    except OutOfResources:
        return float("inf")
