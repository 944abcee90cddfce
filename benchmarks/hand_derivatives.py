"""Time the `blockwise` engine with two kinds of derivatives: by hand, and from the traced graph.

    python benchmarks/hand_derivatives.py --length 512

Scores of users only have the derivative of their graph. A derivative by hand stays in the package
only while it is measurably faster. Both kinds take turns, round by round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from hf_hyperattn import functional
from hf_hyperattn.engines.score import DerivedDistanceTerm, DistanceTerm
from hf_hyperattn.mechanisms.cone.terms import ConeTerm

#: The methods by hand, by the class that has them.
BY_HAND = {
    DerivedDistanceTerm: {name: vars(DerivedDistanceTerm)[name] for name in ("vjp", "logits")},
    ConeTerm: {"logits": vars(ConeTerm)["logits"]},
}


def use_derivatives(by_hand: bool) -> None:
    """Make all terms use one kind of derivative."""
    for owner, methods in BY_HAND.items():
        for name, method in methods.items():
            setattr(owner, name, method if by_hand else vars(DistanceTerm)[name])


def make_cases(tensors: list[torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a causal call of each score on these queries, keys and values."""
    how = {"is_causal": True, "backend": "blockwise"}
    cone = lambda **options: functional.cone_attention(*tensors, **how, **options)
    distance = lambda **options: functional.hyperbolic_attention(
        *tensors, **how, aggregation="mean", **options
    )
    return {
        "umbral": cone,
        "penumbral, squared": lambda: cone(variant="penumbral"),
        "penumbral": lambda: cone(variant="penumbral", squared=False),
        "geodesic": distance,
        "squared Lorentz": lambda: distance(distance="squared_lorentz"),
    }


def train(call: Callable[[], torch.Tensor], grad: torch.Tensor, tensors) -> torch.Tensor:
    """Run a forward and a backward pass; returns the gradient of the queries."""
    for t in tensors:
        t.grad = None
    call().backward(grad)
    return tensors[0].grad.clone()


def main() -> None:
    """Print a line for each score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tensors = [torch.randn(1, 4, args.length, 64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 4, args.length, 64)
    for name, call in make_cases(tensors).items():
        best, gradients = {True: float("inf"), False: float("inf")}, {}
        for _ in range(args.rounds):
            for by_hand in best:
                use_derivatives(by_hand)
                start = time.perf_counter()
                gradients[by_hand] = train(call, grad, tensors)
                best[by_hand] = min(best[by_hand], time.perf_counter() - start)
        apart = float((gradients[True] - gradients[False]).abs().max())
        print(
            f"{name:20} by hand {1e3 * best[True]:7.1f} ms   by the graph {1e3 * best[False]:7.1f} ms   "
            f"ratio {best[False] / best[True]:.2f}   gradients apart by {apart:.1e}"
        )
    use_derivatives(True)


if __name__ == "__main__":
    main()
