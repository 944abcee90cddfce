"""Three-way attention with windows (w1, w2) against SDPA with the window w1, in one process: time as ratios, peak extra
memory, and the error beside every time.

A query of three-way attention has up to w1 · w2 logits, one of SDPA w1. SDPA knows windows as a mask of all pairs, of
which it computes every one; "sdpa in blocks" cuts the sequence into blocks of queries with the keys that they can see,
and computes little else. The dense definition is measured where its N · M² logits fit.

python benchmarks/trilinear.py --lengths 1024 4096 --json benchmarks/results/trilinear-cpu.json
"""

from __future__ import annotations

import torch
from common import interleaved, options, ratios, report
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.functional import trilinear_attention

SDPA, BLOCKS = "sdpa", "sdpa in blocks"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16")}


class Case:
    """The tensors of one length, and what is timed on them."""

    def __init__(self, length: int, args):
        torch.manual_seed(0)
        self.length, self.windows = length, tuple(args.windows)
        shape = (1, args.heads, length, args.dim)
        drawn = [torch.randn(shape) for _ in range(5)]
        drawn[3:] = [1 + 0.3 * t for t in drawn[3:]]
        self.leaves = [t.to(DTYPES[args.dtype]).requires_grad_() for t in drawn]
        i = torch.arange(length)
        self.mask = (i <= i[:, None]) & (i[:, None] - i < self.windows[0])

    def plain(self) -> torch.Tensor:
        """SDPA with the first window as a mask."""
        return sdpa(*self.leaves[:3], attn_mask=self.mask)

    def blocks(self) -> torch.Tensor:
        """The same a block of queries at a time."""
        size, found = self.windows[0], []
        q, k, v = self.leaves[:3]
        for start in range(0, self.length, size):
            rows, keys = slice(start, start + size), slice(max(0, start - size), start + size)
            found.append(
                sdpa(q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=self.mask[rows, keys])
            )
        return torch.cat(found, 2)

    def three(self, leaves=None, **how) -> torch.Tensor:
        """Three-way attention."""
        return trilinear_attention(
            *(leaves or self.leaves), **{"is_causal": True, "windows": self.windows} | how
        )

    def calls(self, dense_up_to: int) -> dict:
        """What is timed, as functions of no arguments, each with the tensors that it has gradients for."""
        found = {SDPA: (self.plain, self.leaves[:3]), BLOCKS: (self.blocks, self.leaves[:3])}
        found["three-way"] = (lambda: self.three(backend="blockwise"), self.leaves)
        if self.length <= dense_up_to:
            found["definition"] = (lambda: self.three(backend="reference"), self.leaves)
        return found

    def error(self, name: str, out: torch.Tensor) -> float:
        """Largest error of sampled rows against the definition in float64 on the same inputs."""
        rows = torch.linspace(0, self.length - 1, 8).long()
        leaves = [t.detach().double() for t in self.leaves]
        found = []
        for i in (
            rows.tolist()
        ):  # keys of the row's windows alone: the definition takes all pairs of them
            first, second = (max(0, i - w + 1) for w in self.windows)
            if name in (SDPA, BLOCKS):
                q, k, v = leaves[:3]
                keys = slice(first, i + 1)
                found.append(sdpa(q[:, :, i : i + 1], k[:, :, keys], v[:, :, keys]))
                continue
            q, k, v, k2, v2 = leaves
            one, two = slice(first, i + 1), slice(second, i + 1)
            found.append(
                _triples(
                    q[:, :, i : i + 1], k[:, :, one], v[:, :, one], k2[:, :, two], v2[:, :, two]
                )
            )
        return (out.detach()[:, :, rows].double() - torch.cat(found, 2)).abs().max().item()


def _triples(q, k, v, k2, v2) -> torch.Tensor:
    """The formula for one query whose keys j and k may differ in number."""
    logits = q.shape[-1] ** -0.5 * torch.einsum("bhnd,bhjd,bhkd->bhnjk", q, k, k2)
    weights = logits.flatten(-2).softmax(-1).view_as(logits)
    return torch.einsum("bhnjk,bhjv,bhkv->bhnv", weights, v, v2)


def measure(length: int, args) -> list[dict]:
    """The rows of one length."""
    case = Case(length, args)
    functions = case.calls(args.dense_up_to)
    kinds = {"forward": {n: torch.no_grad()(call) for n, (call, _) in functions.items()}}
    if not args.forward_only:
        kinds["forward+backward"] = {
            n: lambda call=call, wanted=wanted: torch.autograd.grad(call().sum(), wanted)
            for n, (call, wanted) in functions.items()
        }
    rows = []
    for kind, runs in kinds.items():
        for name, ratio in ratios(interleaved(runs, args.rounds), SDPA).items():
            with PeakMemory() as memory:
                runs[name]()
            error = case.error(name, torch.no_grad()(functions[name][0])())
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
    parser = options(__doc__, [1024, 4096], rounds=5)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--windows", type=int, nargs=2, default=[512, 32], metavar=("W1", "W2"))
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument(
        "--dense-up-to", type=int, default=0, help="longest length for the dense definition"
    )
    args = parser.parse_args()
    report(args, args.dtype, f"causal, windows {tuple(args.windows)}", measure)


if __name__ == "__main__":
    main()
