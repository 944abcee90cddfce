"""Scores from outside the package, compiled from their trace, against the same formulas in blocks of torch.

    python benchmarks/own_score.py --lengths 2048 --threads 1 --processor

For each score of docs/your_own_score.md: seconds of `backend="cpu"` and of `backend="blockwise"`, forward and with the
backward pass, causal, float32; how many times as fast the compiled one is, by rounds; and how far the two are apart.
With `--processor` seconds are the processor's and not the clock's: on one thread, beside other work.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from common import environment, interleaved, options, ratios, write_json

from hf_hyperattn.functional import scored_attention

PAGE = Path(__file__).parents[1] / "docs" / "your_own_score.md"
SCORES = {
    "decay": ("height", "slope"),
    "cosine": ("temperature",),
    "elliptic": ("weight", "direction"),
}


def define_scores() -> None:
    """Import the scores of the tutorial as it has them."""
    (source,) = re.findall(
        r"```python\n# file: my_scores\.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my_scores.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("my_scores", path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def measure(name: str, length: int, args) -> list[dict]:
    """Rows of one score: forward, and with the backward pass."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(1, args.heads, length, args.dim, generator=generator) for _ in range(3)]
    numbers = {
        n: torch.full((args.heads, args.dim) if n == "direction" else (args.heads,), 0.5)
        for n in SCORES[name]
    }
    leaves = [t.requires_grad_() for t in (*vectors, *numbers.values())]

    def forward(backend: str) -> torch.Tensor:
        with torch.no_grad():
            return scored_attention(
                *vectors, is_causal=True, score=name, backend=backend, **numbers
            )

    def training(backend: str) -> torch.Tensor:
        out = scored_attention(*vectors, is_causal=True, score=name, backend=backend, **numbers)
        return torch.cat([g.flatten() for g in torch.autograd.grad(out.square().sum(), leaves)])

    rows = []
    for kind, call in (("forward", forward), ("forward+backward", training)):
        compiled, blocks = (call(backend) for backend in ("cpu", "blockwise"))
        apart = ((compiled - blocks).abs().max() / blocks.abs().max()).item()
        clock = time.process_time if args.processor else time.perf_counter
        seconds = interleaved(
            {b: partial(call, b) for b in ("cpu", "blockwise")}, args.rounds, clock
        )
        times = ratios(seconds, "cpu")
        rows.append(
            {
                "score": name,
                "length": length,
                "kind": kind,
                "apart": apart,
                "seconds": times["cpu"]["seconds"],
                "blockwise_seconds": times["blockwise"]["seconds"],
                **{f"times_{k}": times["blockwise"][k] for k in ("median", "low", "high")},
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write JSON where asked to."""
    assert __doc__ is not None
    parser = options(__doc__, [2048], 9)
    parser.add_argument("--processor", action="store_true", help="seconds of the processor")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    define_scores()
    where = environment()
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; float32, causal, 1 x {args.heads} "
        f"heads, d {args.dim}"
    )
    print(
        f"{'length':>7} {'score':9} {'kind':17} {'cpu s':>8} {'blocks s':>9} {'times':>6} {'low':>6} {'high':>6} apart"
    )
    rows = []
    for length in args.lengths:
        for name in SCORES:
            for r in measure(name, length, args):
                rows.append(r)
                print(
                    f"{r['length']:7d} {r['score']:9} {r['kind']:17} {r['seconds']:8.4f} "
                    f"{r['blockwise_seconds']:9.4f} {r['times_median']:6.2f} {r['times_low']:6.2f} "
                    f"{r['times_high']:6.2f} {r['apart']:.0e}",
                    flush=True,
                )
    write_json(args.json, {"environment": where, "arguments": vars(args), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
