"""`hyperbolic_attention` far out, at ties and at the ends of number formats, every engine."""

import math

import pytest
import torch

from hf_hyperattn.functional import hyperbolic_attention, hyperbolic_scores
from tests.mechanisms.hyperbolic.hyperbolic_cases import (
    NAMES,
    SETTINGS,
    at_radius,
    attend,
    every_setting,
)
from tests.oracles import hyperbolic as oracle
from tests.oracles.cases import DTYPES, assert_close, assert_gradients, tensor
from tests.oracles.marks import every_backend, first_always


@every_backend
@first_always("radius", [8.0, 6.0, 4.0, 0.5])
@pytest.mark.parametrize("apart", [1e-4, 1e-2, 1.0, None])
@pytest.mark.parametrize("lk", [24, 600])
def test_float32_out_to_radius_eight(backend, radius, apart, lk):
    """Logits within 1.5e-3 of the exact ones of the same numbers, read off the weights of single keys against the rest.

    `apart` is about the distance between points; None scatters them over the sphere. With 24 keys, `reference` computes
    what "auto" would; with 600, a few pairs among many need differences.
    """
    towards = tensor(32, seed=14) if apart else tensor(lk, 32, seed=14)
    near = towards / towards.norm(dim=-1, keepdim=True) + tensor(lk, 32, seed=15) * (
        apart or 0.0
    ) / math.sinh(radius)
    near[20:] = near[20:] if lk == 24 else tensor(lk - 20, 32, seed=16)
    x = at_radius(near, radius).float()[None, None]
    logits = logits_by(backend, x[:, :, :20], x)
    exact = -oracle.dense_scores(x[:, :, :20].double(), x.double(), scale=1.0)
    # the Lorentz form in float64 keeps sqrt(1e-16 cosh² r) of a distance; the 60 digits are for the nearest
    exact[..., :20] = torch.tensor(-oracle.scores(x[:, :, :20], x[:, :, :20], scale=1.0))
    assert_close(logits, -exact, 1.5e-3, "logits")


def logits_by(backend, q, k, distance="geodesic"):
    """The logits an engine computes, read from its weights of one-hot values, up to the row's own constant."""
    eye = torch.eye(k.shape[2])[None, None]
    weights = hyperbolic_attention(
        q, k, eye, scale=1.0, distance=distance, aggregation="mean", backend=backend
    )
    logits = weights.double().log()
    known = torch.tensor(oracle.scores(q, k[:, :, :1], scale=1.0))
    return logits - logits[..., :1] + known


@every_backend
@every_setting
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 30.0, 6e4])
def test_forward_and_gradients_stay_finite(backend, setting, dtype, size):
    """Zero, equal, opposite and huge rows, up to the end of half precision."""
    base = tensor(1, 2, 150, 8, seed=17)
    base[:, :, 3], base[:, :, 4], base[:, :, 5] = base[:, :, 2], -base[:, :, 2], 0
    x = (base * size).to(DTYPES[dtype])
    q, k, v = (t.clone().requires_grad_() for t in (x, x, x))
    out, pull = attend(q, k, v, setting, backend, is_causal=True), tensor(1, 2, 150, 8, seed=21)
    assert torch.isfinite(out).all()
    assert all(
        torch.isfinite(g).all() for g in torch.autograd.grad((out.float() * pull).sum(), (q, k, v))
    )


@every_backend
@pytest.mark.parametrize("setting", ["geodesic-einstein", "squared_lorentz-mean"])
def test_the_longest_numbers_of_bfloat16(backend, setting):
    # the compiled tiles multiply vectors as they come, so that their squares have to fit into float32
    x = (tensor(1, 2, 150, 8, seed=18) * (1e18 if backend == "cpu" else 3e38)).bfloat16()
    q, k, v = (t.clone().requires_grad_() for t in (x, x.flip(2), x))
    out = attend(q, k, v, setting, backend)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.float().mean(), (q, k, v)))


@every_backend
@every_setting
def test_gradients_at_ties_are_symmetric(backend, setting):
    """Shared vectors for queries and keys: every row meets itself, and duplicates of itself."""
    x = tensor(1, 2, 150, 6, seed=19, dtype=torch.float32)
    x[:, :, 3], x[:, :, 7] = x[:, :, 0], 0
    q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
    score = SETTINGS[setting]["distance"]
    pull = tensor(1, 2, 150, 150, seed=20, dtype=torch.float32)
    eye = torch.eye(150).expand(1, 2, 150, 150)
    rest = {"aggregation": "mean", "distance": score, "backend": backend}
    grads = torch.autograd.grad((hyperbolic_attention(q, k, eye, **rest) * pull).sum(), (q, k))
    plain = [t.detach().double().requires_grad_() for t in (q, k)]
    weights = torch.softmax(hyperbolic_scores(*plain, distance=score), -1)
    want = torch.autograd.grad((weights * pull.double()).sum(), plain)
    assert_gradients(grads, want, 1e-4, NAMES)
