"""Cone attention against SDPA in one process: time as ratios, peak extra memory, and a match check beside every time.

python benchmarks/cone.py --lengths 1024 8192 --json benchmarks/results/cone-cpu.json
"""

from __future__ import annotations

import torch
from common import interleaved, options, ratios, report

from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.functional import cone_attention

SDPA = "sdpa"
CASES = {"umbral": {"variant": "umbral"}, "penumbral": {"variant": "penumbral"}}


def tensors(length: int, args) -> list[torch.Tensor]:
    """Query, key and value [1, heads, length, dim], float32, of unit variance."""
    torch.manual_seed(0)
    return [torch.randn(1, args.heads, length, args.dim, requires_grad=True) for _ in range(3)]


def calls(q, k, v, args) -> dict:
    """What is timed, as functions of no arguments that return the output."""
    found = {SDPA: lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=args.causal)}
    for name, setting in CASES.items():
        found[name] = lambda s=setting: cone_attention(
            q, k, v, is_causal=args.causal, backend=args.backend, **s
        )
    return found


def forward(call):
    """The call without gradients."""

    def run():
        with torch.no_grad():
            return call()

    return run


def with_backward(call, leaves):
    """The call and its gradients."""
    return lambda: torch.autograd.grad(call().sum(), leaves)


def match(name: str, out: torch.Tensor, q, k, v, args) -> float:
    """Largest error of sampled rows against the definition in float64."""
    rows = torch.linspace(0, q.shape[2] - 1, 16).long()
    mask = torch.arange(k.shape[2]) <= rows[:, None] if args.causal else None
    with torch.no_grad():
        exact = cone_attention(q[:, :, rows].double(), k.double(), v.double(), attn_mask=mask, backend="reference",
                               **CASES[name])  # fmt: skip
    return (out[:, :, rows].double() - exact).abs().max().item()


def measure(length: int, args) -> list[dict]:
    """Rows of the table for one length."""
    leaves = tensors(length, args)
    functions = calls(*leaves, args)
    times = {
        "forward": interleaved({n: forward(c) for n, c in functions.items()}, args.rounds),
        "forward+backward": interleaved(
            {n: with_backward(c, leaves) for n, c in functions.items()}, args.rounds
        ),
    }
    rows = []
    for kind, seconds in times.items():
        for name, ratio in ratios(seconds, SDPA).items():
            call = functions[name]
            run = forward(call) if kind == "forward" else with_backward(call, leaves)
            with PeakMemory() as memory:
                run()
            error = 0.0 if name == SDPA else match(name, forward(call)(), *leaves, args)
            rows.append({"length": length, "what": name, "kind": kind, **ratio,
                         "extra_mib": memory.added / 2**20, "error": error})  # fmt: skip
    return rows


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = options(__doc__, [1024, 4096, 8192], rounds=3)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backend", default="blockwise")
    args = parser.parse_args()
    direction = "causal" if args.causal else "not causal"
    report(args, "float32", f"{direction}, backend {args.backend}", measure)


if __name__ == "__main__":
    main()
