"""How exact hyperbolic logits are, by radius, and how far out the heads of a real model put their points.

python benchmarks/hyperbolic_precision.py --radii 4 6 8 10 12 --smollm2
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from common import interleaved, ratios

from hf_hyperattn import HyperbolicConfig, patch_model
from hf_hyperattn.engines.tiles import Tile
from hf_hyperattn.functional import hyperbolic_attention, hyperbolic_scores
from hf_hyperattn.mechanisms.hyperbolic.score import HyperbolicVectors

SPACINGS = (
    1e-4,
    1e-2,
    0.1,
    1.0,
    3.0,
    None,
)  # about how far points lie from each other; None: all over the sphere


def points(radius: float, spacing: float | None, count: int = 200, dim: int = 32) -> torch.Tensor:
    """Tangent vectors, float32, of points on the sphere of that geodesic radius (c = 1, scale = 1)."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.nn.functional.normalize(torch.randn(dim, generator=generator), dim=-1)
    around = torch.randn(count, dim, generator=generator) / math.sqrt(dim)
    towards = around if spacing is None else centre + around * spacing / math.sinh(radius)
    return (torch.nn.functional.normalize(towards, dim=-1) * radius / 2)[None, None]


def error(radius: float, spacing: float | None, backend: str) -> float:
    """The largest error of a float32 logit, read off the weights; the exact ones are the definition in float64."""
    x = points(radius, spacing)
    eye = torch.eye(x.shape[2])[None, None]
    weights = (
        hyperbolic_attention(x, x, eye, scale=1.0, aggregation="mean", backend=backend)
        .double()
        .log()
    )
    exact = hyperbolic_scores(x.double(), x.double(), scale=1.0)
    return (weights - weights[..., :1] + exact[..., :1] - exact).abs().max().item()


def table(radii: list[float]) -> None:
    """Errors by radius and engine."""
    print(
        f"{'radius':>6} {'reference':>10} {'blockwise':>10}   largest error of a logit over {len(SPACINGS)} spacings"
    )
    for radius in radii:
        worst = [
            max(error(radius, s, backend) for s in SPACINGS)
            for backend in ("reference", "blockwise")
        ]
        print(f"{radius:6g} {worst[0]:10.1e} {worst[1]:10.1e}")


def crowd(length: int = 2048, rounds: int = 5) -> None:
    """Time of points that all need differences over that of points that need none."""
    crowded, scattered = (points(7.0, spacing, length, 64) for spacing in (0.1, None))
    calls = {
        name: lambda x=x: hyperbolic_attention(x, x.flip(2), x, scale=1.0, backend="blockwise")
        for name, x in (("crowd", crowded), ("scattered", scattered))
    }
    with torch.no_grad():
        ratio = ratios(interleaved(calls, rounds), "scattered")["crowd"]
    print(
        f"{length} points far out and close together: {ratio['median']:.1f} ({ratio['low']:.1f} to "
        f"{ratio['high']:.1f}) times the time of scattered ones"
    )


def real_model(length: int) -> None:
    """Radii of queries and keys in SmolLM2-135M, and how many pairs its heads need from differences."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hyperattn_cli.shared.smollm2 import smollm2

    path = smollm2()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    text = "\n".join(
        p.read_text() for p in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    )
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[:, :length]
    radii, pairs = [], [0]
    norms, squared_distance = HyperbolicVectors.measure_norms, Tile.squared_distance

    def noted(self):
        radii.extend(2 * norm.flatten() for norm in norms(self))
        return norms(self)

    def counted(self, chosen):
        pairs[0] += int(chosen.sum())
        return squared_distance(self, chosen)

    HyperbolicVectors.measure_norms, Tile.squared_distance = noted, counted
    patch_model(model, HyperbolicConfig())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("hyperbolic.gate"):
                parameter.fill_(0.01)
        model(ids)
    HyperbolicVectors.measure_norms, Tile.squared_distance = norms, squared_distance
    found = torch.cat(radii).sort().values
    half, most, last = (found[int(q * (len(found) - 1))].item() for q in (0.5, 0.99, 1.0))
    print(
        f"SmolLM2-135M, {ids.shape[1]} tokens, c = 1: geodesic radius of queries and keys {half:.1f} at the median, "
        f"{most:.1f} at 99 %, {last:.1f} at most; {pairs[0]} pairs from differences"
    )


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--radii", type=float, nargs="*", default=[4, 6, 8, 10, 12])
    parser.add_argument("--smollm2", action="store_true", help="also run SmolLM2-135M")
    parser.add_argument("--length", type=int, default=768, help="tokens of text for SmolLM2")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table(args.radii)
    crowd()
    if args.smollm2:
        real_model(args.length)


if __name__ == "__main__":
    main()
