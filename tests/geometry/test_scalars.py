"""Bounds whose gradient does not depend on torch's version: from 2.14 on, `clamp` has none at its bounds."""

import math

import pytest
import torch

from hf_hyperattn.geometry.scalars import at_least, at_most
from hf_hyperattn.mechanisms.cone.reference import height_and_stretch
from hf_hyperattn.mechanisms.hype.reference import definition
from hf_hyperattn.mechanisms.hyperbolic.midpoint import midpoint
from hf_hyperattn.mechanisms.hyperbolic.reference import direction_and_norm


@pytest.mark.parametrize("bound, slopes", [(at_least, [0, 1, 1]), (at_most, [1, 1, 0])])
def test_the_gradient_at_a_bound(bound, slopes):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    out = bound(x, 2.0)
    out.sum().backward()
    assert out.dtype == x.dtype and x.grad.tolist() == slopes
    assert bound(torch.tensor([math.nan]), 2.0).isnan().all()


@pytest.mark.parametrize("size", [0.5, 1.0, 3.0])
def test_vectors_along_an_axis_have_the_gradients_of_their_norm(size):
    """Divided by its largest number, such a vector has a norm of exactly 1, the least that other vectors have."""
    x = torch.tensor([0.0, size, 0.0], dtype=torch.float64, requires_grad=True)
    direction, norm = direction_and_norm(x, 1.0)
    (of_norm,) = torch.autograd.grad(norm, x, retain_graph=True)
    assert of_norm.tolist() == [0.0, 1.0, 0.0]
    jacobian = torch.stack([torch.autograd.grad(d, x, retain_graph=True)[0] for d in direction])
    torch.testing.assert_close(
        jacobian, torch.diag(torch.tensor([1 / size, 0.0, 1 / size], dtype=torch.float64))
    )


def test_the_midpoint_of_one_value_along_an_axis_is_that_value():
    """Its derivative, too: the value goes through the ball and comes back."""
    x = torch.tensor([0.0, 0.7], dtype=torch.float64, requires_grad=True)
    one, norm = torch.ones((), dtype=torch.float64), torch.linalg.vector_norm(x)
    columns = torch.cat(
        [
            torch.sinh(2 * norm) * x / norm,
            torch.stack([torch.sinh(2 * norm), torch.exp(-2 * norm), one]),
        ]
    )
    out = midpoint(columns.view(1, 1, 1, 5), one[None], 1.0)[0, 0, 0]
    jacobian = torch.stack([torch.autograd.grad(o, x, retain_graph=True)[0] for o in out])
    torch.testing.assert_close(jacobian, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("last, mapping", [(20.0, "xi"), (-20.0, "xi"), (-30.0, "expmap")])
def test_heights_at_the_limit_of_their_mapping_have_a_slope(last, mapping):
    slopes = []
    for at in (last, last * (1 - 1e-9)):  # at the limit, and just within
        x = torch.tensor([0.0, at], dtype=torch.float64, requires_grad=True)
        slopes.append(torch.autograd.grad(height_and_stretch(x, mapping)[0].log(), x)[0])
    assert slopes[1].any()
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["sinh", "cosh"])
def test_positions_at_the_limit_of_hype_have_a_slope(form):
    one, places = torch.ones(1, dtype=torch.float64), torch.tensor([[[60.0]]], dtype=torch.float64)
    slopes = []
    for mu in (one.clone(), one - 1e-9):
        mu.requires_grad_()
        slopes.append(
            torch.autograd.grad(
                definition(0 * places, places, mu, torch.ones_like(mu), form).sum(), mu
            )[0]
        )
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-6, atol=0)
