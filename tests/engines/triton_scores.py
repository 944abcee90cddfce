"""Scores of every kind for the Triton kernels, as functions of queries, keys and learned numbers."""

import torch

from hf_hyperattn.engines import dot_score
from hf_hyperattn.mechanisms.cone.score import ConeSpace
from hf_hyperattn.mechanisms.hype.score import with_hype
from hf_hyperattn.mechanisms.hyperbolic.score import HyperbolicSpace

SCALE = 0.3


def cone(variant, mapping, squared=True):
    def space(t):
        clamp = variant == "penumbral" and mapping != "psi"
        return ConeSpace(variant, mapping, squared, clamp, t["gamma"], t["radius"])

    return (
        lambda q, k, t: space(t).score(q, k),
        lambda q, k, t: dot_score(q, k, SCALE).plus(*space(t).score(q, k, SCALE, t["gate"]).terms),
    )


def hyperbolic(distance):
    space = lambda t: HyperbolicSpace(distance, 0.25, t["gamma"], t["radius"])
    return (
        lambda q, k, t: space(t).score(q, k),
        lambda q, k, t: dot_score(q, k, SCALE).plus(*space(t).score(q, k, SCALE, t["gate"]).terms),
    )


def hyped(base, form):
    def score(q, k, t):
        positions = (
            torch.arange(x.shape[2], dtype=torch.float64, device=q.device)[None, None]
            for x in (q, k)
        )
        return with_hype(
            base(q, k, t), tuple(positions), t["gamma"] / 50, t["radius"] * 9, form, None, t["gate"]
        )

    return score


def instead(q, k, t):
    """Some heads dot product, the others umbral: two gates, both terms capped."""
    off = torch.zeros_like(t["gate"])
    off[::2] = 1
    space = ConeSpace("umbral", "xi", True, False, t["gamma"], t["radius"])
    return (
        dot_score(q, k, SCALE)
        .weighted(off)
        .plus(*space.score(q, k, SCALE, 1 - off, capped=True).terms)
    )


umbral, umbral_blend = cone("umbral", "xi")
penumbral, penumbral_blend = cone("penumbral", "psi")
roots, roots_blend = cone("penumbral", "expmap", squared=False)
geodesic, geodesic_blend = hyperbolic("geodesic")
lorentz, lorentz_blend = hyperbolic("squared_lorentz")

SCORES = {
    "dot": lambda q, k, t: dot_score(q, k, SCALE),
    "umbral": umbral,
    "umbral_blend": umbral_blend,
    "penumbral": penumbral,
    "penumbral_blend": penumbral_blend,
    "penumbral_unsquared": roots,
    "penumbral_unsquared_blend": roots_blend,
    "geodesic": geodesic,
    "geodesic_blend": geodesic_blend,
    "squared_lorentz": lorentz,
    "squared_lorentz_blend": lorentz_blend,
    "hype_sinh": hyped(lambda q, k, t: dot_score(q, k, SCALE), "sinh"),
    "hype_cosh": hyped(lambda q, k, t: dot_score(q, k, SCALE), "cosh"),
    "umbral_with_hype": hyped(umbral, "sinh"),
    "some_heads": instead,
}


def learned(heads, dtype=torch.float32, device="cpu"):
    """The numbers per head that a score may read, as leaves that want gradients."""
    numbers = {"gamma": (0.6, 1.7), "radius": (1.5, 0.8), "gate": (0.7, -0.4)}
    return {
        name: torch.linspace(*ends, heads, dtype=torch.float64).to(device, dtype).requires_grad_()
        for name, ends in numbers.items()
    }


def exact(q, k, v, t):
    """The same numbers in float64, as new leaves."""
    double = lambda x: x.detach().double().requires_grad_()
    return *map(double, (q, k, v)), {name: double(x) for name, x in t.items()}


__all__ = ["SCALE", "SCORES", "exact", "learned"]
