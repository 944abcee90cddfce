"""Talking heads against SDPA in one process: time as ratios, peak extra memory, and the error beside every time.

"blocks" is what a patched model runs; "dense" is the definition in eager torch, with all logits stored. No fused kernel
exists for talking heads: SDPA is what a model runs without them, not another way to the same result.

python benchmarks/talking_heads.py --lengths 512 2048 8192 --causal --json benchmarks/results/talking_heads-cpu.json
"""

from __future__ import annotations

import torch
from common import interleaved, options, ratios, report
from torch.nn.functional import scaled_dot_product_attention

from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.functional import talking_heads_attention

SDPA = "sdpa"
WAYS = {"blocks": "blockwise", "dense": "reference"}
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16")}


class Case:
    """The tensors of one length, and what is timed on them."""

    def __init__(self, length: int, args):
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, args.heads, length, args.dim)] * 3 + [(args.heads, args.heads)] * 2
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        drawn[3:] = [torch.eye(args.heads) + 0.1 * m for m in drawn[3:]]
        dtype = DTYPES[args.dtype]
        self.leaves = [t.to(dtype) if t.dim() == 4 else t for t in drawn]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.causal, self.length, self.dense = args.causal, length, length <= args.dense_up_to

    def ours(self, backend: str) -> torch.Tensor:
        """The output by one of the ways."""
        q, k, v, before, after = self.leaves
        return talking_heads_attention(
            q, k, v, is_causal=self.causal, before=before, after=after, backend=backend
        )

    def calls(self) -> dict:
        """What is timed, as functions of no arguments that return the output, each with what it has gradients for."""
        found = {
            SDPA: (
                lambda: scaled_dot_product_attention(*self.leaves[:3], is_causal=self.causal),
                self.leaves[:3],
            )
        }
        for name, backend in WAYS.items():
            if name != "dense" or self.dense:
                found[name] = (lambda b=backend: self.ours(b), self.leaves)
        return found

    def error(self, out: torch.Tensor) -> float:
        """Largest error of sampled rows against the definition in float64 on the same inputs."""
        rows = torch.linspace(0, self.length - 1, 16).long()
        mask = torch.arange(self.length) <= rows[:, None] if self.causal else None
        q, k, v, before, after = (t.detach().double() for t in self.leaves)
        exact = talking_heads_attention(
            q[:, :, rows], k, v, mask, before=before, after=after, backend="reference"
        )
        return (out[:, :, rows].double() - exact).abs().max().item()


def measure(length: int, args) -> list[dict]:
    """The rows of one length."""
    case = Case(length, args)
    functions = case.calls()
    kinds = {
        "forward": {n: torch.no_grad()(call) for n, (call, _) in functions.items()},
        "forward+backward": {
            n: lambda call=call, wanted=wanted: torch.autograd.grad(call().sum(), wanted)
            for n, (call, wanted) in functions.items()
        },
    }
    rows = []
    for kind, runs in kinds.items():
        for name, ratio in ratios(interleaved(runs, args.rounds), SDPA).items():
            with PeakMemory() as memory:
                runs[name]()
            error = 0.0 if name == SDPA else case.error(kinds["forward"][name]())
            rows.append(
                {
                    "length": length,
                    "what": name,
                    "kind": kind,
                    **ratio,
                    "extra_mib": memory.added / 2**20,
                    "error": error,
                }
            )
    return rows


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = options(__doc__, [512, 2048, 8192], rounds=5)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--dense-up-to", type=int, default=2048, help="longest length that is computed densely too"
    )
    args = parser.parse_args()
    report(args, args.dtype, "causal" if args.causal else "not causal", measure)


if __name__ == "__main__":
    main()
