"""HyPE against SDPA without a bias in one process: time as ratios, peak extra memory, and the error beside every time.

Columns (backend "sdpa") carry the bias in Q and K; tiles (backend "blockwise") evaluate it. A dense bias handed to
SDPA as its mask is measured too: the way without either, with L x L memory.

python benchmarks/hype.py --lengths 1024 8192 --dtype float32 --json benchmarks/results/hype-cpu.json
"""

from __future__ import annotations

import torch
from common import interleaved, options, ratios, report

from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.functional import hype_attention, hype_bias
from hf_hyperattn.mechanisms.hype.config import HypeConfig

SDPA = "sdpa, no bias"
WAYS = {"columns": "sdpa", "tiles": "blockwise"}
DENSE = "dense mask"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


class Case:
    """The tensors of one length, and what is timed on them."""

    def __init__(self, length: int, args):
        torch.manual_seed(0)
        shape, dtype = (1, args.heads, length, args.dim), DTYPES[args.dtype]
        self.form = "sinh" if args.causal else "cosh"
        self.causal, self.length = args.causal, length
        self.leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        mu, tau = HypeConfig(max_length=length).start(self.form, args.heads)
        self.numbers = {"mu": torch.tensor(mu), "tau": torch.tensor(tau), "form": self.form}

    def hype(self, backend: str, leaves=None, **rest) -> torch.Tensor:
        """The output by one of the ways."""
        given = {"is_causal": self.causal} | self.numbers | rest
        return hype_attention(*(leaves or self.leaves), backend=backend, **given)

    def dense(self) -> torch.Tensor:
        """The output from the stored bias."""
        at = torch.arange(self.length)
        bias = hype_bias(at, at, **self.numbers)
        if self.causal:
            bias = bias.masked_fill(at > at[:, None], float("-inf"))
        q, k, v = self.leaves
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))

    def calls(self, dense_up_to: int) -> dict:
        """What is timed, as functions of no arguments that return the output."""
        sdpa = torch.nn.functional.scaled_dot_product_attention
        found = {SDPA: lambda: sdpa(*self.leaves, is_causal=self.causal)}
        for name, backend in WAYS.items():
            found[name] = lambda b=backend: self.hype(b)
        if self.length <= dense_up_to:
            found[DENSE] = self.dense
        return found

    def error(self, out: torch.Tensor) -> float:
        """Largest error of sampled rows against the definition in float64 on the same inputs."""
        rows = torch.linspace(0, self.length - 1, 16).long()
        mask = torch.arange(self.length) <= rows[:, None] if self.causal else None
        q, k, v = (t.detach().double() for t in self.leaves)
        exact = self.hype(
            "reference", (q[:, :, rows], k, v), attn_mask=mask, is_causal=False, query_positions=rows
        )
        return (out.detach()[:, :, rows].double() - exact).abs().max().item()


def without_gradients(call):
    """The call as inference makes it."""

    def run():
        with torch.no_grad():
            return call()

    return run


def measure(length: int, args) -> list[dict]:
    """Rows of the table for one length."""
    case = Case(length, args)
    functions = case.calls(args.dense_up_to)
    kinds = {"forward": {n: without_gradients(c) for n, c in functions.items()}}
    if not args.forward_only:
        kinds["forward+backward"] = {
            n: lambda c=c: torch.autograd.grad(c().sum(), case.leaves) for n, c in functions.items()
        }
    rows = []
    for kind, runs in kinds.items():
        for name, ratio in ratios(interleaved(runs, args.rounds), SDPA).items():
            with PeakMemory() as memory:
                runs[name]()
            error = 0.0 if name == SDPA else case.error(without_gradients(functions[name])())
            rows.append({"length": length, "what": name, "kind": kind, **ratio,
                         "extra_mib": memory.added / 2**20, "error": error})  # fmt: skip
    return rows


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = options(__doc__, [1024, 4096, 8192], rounds=5)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--causal", action="store_true", help="causal attention with sinh, else cosh")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--dense-up-to", type=int, default=4096, help="longest length with a dense bias")
    args = parser.parse_args()
    report(args, args.dtype, "causal, sinh" if args.causal else "not causal, cosh", measure)


if __name__ == "__main__":
    main()
