"""Tile sizes of the Triton kernels, and how the fastest one is found.

Here you learn which sizes are tried for a kind of call, and when nothing is measured.
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

# What fits on a chip depends on the padded width of a head and on the bytes of a number. A program
# keeps its own block and `stages` copies of the tiles it walks over in shared memory, and its sums
# in registers.
#
# Each kernel has two or three sizes, tried once per kind of call. First come small ones with 4
# warps: several such programs run on a multiprocessor and hide each other's waits. They were the
# fastest of those tried on an H100 with an umbral score and heads of 64; wider heads were not
# measured. The others are for chips with less shared memory (the smallest needs at most 99 KiB) and
# for long scores. tests/engines/test_triton_compiled.py checks them for real chips.


@dataclass(frozen=True)
class Config:
    """The tile size of a kernel and its launch options.

    Args:
        rows: Queries of a tile.
        columns: Keys of a tile.
        warps: Warps of a program.
        stages: Tiles in flight.
    """

    rows: int
    columns: int
    warps: int
    stages: int


#: By kernel and padded width, for numbers of 2 bytes. float32 takes the sizes of twice its width.
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
#: For Triton's interpreter. It is fastest with few tiles, but its tests need several.
INTERPRETER = (Config(32, 32, 1, 1),)

#: The fastest config of each kind of call that was measured.
_chosen: dict[Hashable, Config] = {}


def pad_width(width: int) -> int:
    """Return the smallest power of two that is at least `width` and at least 16."""
    return max(16, int(triton.next_power_of_2(width)))


def list_configs(kernel: str, width: int, item: int, narrowest: int) -> Sequence[Config]:
    """Return the configs to try for a kernel, the best guess first.

    Args:
        kernel: "forward", "query" or "key".
        width: Padded width of the vectors: the larger of keys' and values'.
        item: Bytes of a number, 2 or 4.
        narrowest: The smaller of the two padded widths.
    """
    if INTERPRETED.value:
        return INTERPRETER
    found = CONFIGS[kernel][max(64, width * item // 2)]
    if narrowest > 16:
        return found
    # Triton 3.6 reads beyond its shared memory if 8 warps multiply 64 lines and any other side is
    # 16: in products of 64 x 16, and for 64 lines of queries and keys with values of 16 components.
    # Seen on an H100 with float32.
    return [c for c in found if c.warps < 8 or 64 not in (c.rows, c.columns)]


def tile_for_few_queries(width: int, item: int) -> tuple[int, int]:
    """Return the keys of a tile and the tiles in flight for decoding.

    The arguments are as in `list_configs`.
    """
    if INTERPRETED.value:
        return 32, 1
    columns = 32 if width * item > 256 else 64
    stages = 1 if width * item > 512 else 2
    return columns, stages


def choose_listed_config(width: int, item: int, has_grad: bool) -> Config:
    """Return the config of a kernel for listed keys.

    Args:
        width, item: As in `list_configs`.
        has_grad: Whether it is a backward kernel, which keeps twice as many tiles.
    """
    line = width * item
    if line <= 128:
        return Config(64, 64, 4, 2)
    if line <= 256:
        return Config(32, 64, 4, 1) if has_grad else Config(64, 64, 4, 2)
    if line <= 512:
        return Config(32, 32, 4, 1)
    return Config(16, 16, 4, 1)


def run_tuned(kind: Hashable, tried: Sequence[Config], run: Callable[[Config], None]) -> None:
    """Run a kernel with the fastest config.

    The first call of a kind measures all configs. If measuring is not possible, the first config is
    taken that fits the shared memory of the chip. HF_HYPERATTN_TRITON_TUNE=0 in the environment
    turns measuring off.

    Args:
        kind: What the best config depends on.
        tried: The configs.
        run: Launches the kernel; may be called several times.
    """
    if kind not in _chosen and can_measure(tried):
        _chosen[kind] = min(tried, key=lambda config: measure_seconds(run, config))
    if kind in _chosen:
        return run(_chosen[kind])
    for config in tried:
        try:
            return run(config)
        except OutOfResources:
            # Raised before anything has run, so the next config may try.
            if config is tried[-1]:
                raise


def can_measure(tried: Sequence[Config]) -> bool:
    """Return whether there is a choice, and kernels may be timed now."""
    tunes = os.environ.get("HF_HYPERATTN_TRITON_TUNE", "1") != "0"
    # A CUDA graph that is being captured would record the launches of all measurements.
    return len(tried) > 1 and tunes and not torch.cuda.is_current_stream_capturing()


def measure_seconds(run: Callable[[Config], None], config: Config) -> float:
    """Return the time of a launch, or infinity if the config does not fit the chip."""
    try:
        median: Any = triton.testing.do_bench(
            lambda: run(config), warmup=10, rep=40, return_mode="median"
        )
        return median
    except OutOfResources:
        return float("inf")
