"""Settings, parameters and expectations that the tests of hyperbolic attention share."""

import itertools
import math

import pytest
import torch

from hf_hyperattn.functional import hyperbolic_attention
from tests.oracles import hyperbolic as oracle
from tests.oracles.cases import FAST

SETTINGS = {
    f"{d}-{a}": {"distance": d, "aggregation": a}
    for d, a in itertools.product(("geodesic", "squared_lorentz"), ("einstein", "mean"))
}
every_fast_engine = pytest.mark.parametrize("backend", FAST)
every_setting = pytest.mark.parametrize("setting", SETTINGS)
NAMES = ("query", "key", "value", "curvature", "temperature")


def per_head(heads, dtype=torch.float64):
    """(curvature, temperature), one value per head, all different."""
    c = torch.linspace(0.4, 2.1, heads, dtype=torch.float64)
    return c.to(dtype), torch.linspace(1.4, 0.7, heads, dtype=torch.float64).to(dtype)


def at_radius(directions, radius, c=1.0):
    """Tangent vectors for scale 1 whose points lie at geodesic distance `radius` from the origin."""
    return directions / directions.norm(dim=-1, keepdim=True) * (radius / 2 / math.sqrt(c))


def attend(q, k, v, setting, backend, **rest):
    return hyperbolic_attention(q, k, v, backend=backend, **SETTINGS[setting], **rest)


def expected(
    q, k, v, setting, *, mask=None, causal=False, curvature=1.0, temperature=1.0, scale=None
):
    """The whole operator from its formulas, 60 digits."""
    chosen = SETTINGS[setting]
    space = {"curvature": curvature, "temperature": temperature, "scale": scale}
    logits = oracle.scores(q, k, distance_name=chosen["distance"], **space)
    rest = {
        "aggregation": chosen["aggregation"],
        "curvature": curvature,
        "scale": scale,
        "d": q.shape[-1],
    }
    return oracle.attention(logits, v, mask=mask, causal=causal, **rest)


def dense(q, k, v, setting, **rest):
    chosen = SETTINGS[setting]
    return oracle.dense_attention(
        q, k, v, aggregation=chosen["aggregation"], distance_name=chosen["distance"], **rest
    )


def leaves(*tensors):
    return tuple(t.detach().clone().requires_grad_() for t in tensors)
