"""HyperbolicAttention: points of the ball in, points of the ball out, against loops in float64."""

import math

import numpy as np
import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.geometry import poincare
from tests.geometry.spaces import points
from tests.oracles.cases import assert_close


def module(dim=8, heads=2, curvature=1.0, seed=0, **settings):
    """A module with random parameters in float64, also those that start at zero."""
    torch.manual_seed(seed)
    made = ha.HyperbolicAttention(dim, heads, curvature, **settings).double().eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or name.startswith("log_"):
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def loops(made, x, context=None, visible=None):
    """The module's definition, one pair at a time, by the Lorentz form."""
    p = {name: value.detach().numpy() for name, value in made.named_parameters()}
    c, width = made.curvature, made.dim // made.heads

    def tangent(point):
        reach = math.sqrt(c) * np.linalg.norm(point)
        return point * (math.atanh(reach) / reach if reach else 1.0)

    def sheet(v, c):
        """The Lorentz point over a tangent vector v of the ball: at distance 2|v| from the origin."""
        norm = np.linalg.norm(v)
        s = 2 * math.sqrt(c) * norm
        return np.array([math.cosh(s), *(math.sinh(s) * v / norm if norm else v)]) / math.sqrt(c)

    def inner(a, b):
        return a[1:] @ b[1:] - a[0] * b[0]

    def linear(name, v):
        return p[f"{name}.weight"] @ v + p.get(f"{name}.bias", 0.0)

    out = np.zeros(x.shape)
    others = x if context is None else context
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            joined = []
            for h in range(made.heads):
                part = slice(h * width, (h + 1) * width)
                ch = c * math.exp(p["log_curvature"][h]) if "log_curvature" in p else c
                tau = made.temperature * math.exp(p["log_temperature"][h])
                seen = [j for j in range(others.shape[1]) if visible is None or visible(i, j)]
                q = sheet(linear("query", tangent(x[b, i].numpy()))[part], ch)
                k = [sheet(linear("key", tangent(others[b, j].numpy()))[part], ch) for j in seen]
                v = [sheet(linear("value", tangent(others[b, j].numpy()))[part], ch) for j in seen]
                logits = [
                    -math.acosh(max(1.0, -ch * inner(q, kj))) / math.sqrt(ch) / tau for kj in k
                ]
                weights = np.exp(np.array(logits) - max(logits))
                centre = sum(w * vj for w, vj in zip(weights / weights.sum(), v))
                centre = centre / math.sqrt(-ch * inner(centre, centre))
                length = np.linalg.norm(centre[1:])
                joined.append(
                    centre[1:] / length * math.asinh(math.sqrt(ch) * length) / math.sqrt(ch) / 2
                )
            y = linear("out", np.concatenate(joined))
            s = math.sqrt(c) * np.linalg.norm(y)
            out[b, i] = y * math.tanh(s) / s
    return torch.tensor(out)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("curvature", [0.3, 1.0, 4.0])
def test_it_is_its_definition(heads, curvature):
    made = module(8, heads, curvature, learn_curvature=True, temperature=0.7)
    x = points(2, 5, 8, c=curvature, seed=1)
    assert_close(made(x), loops(made, x), 1e-9, "points")


def test_masks_and_context():
    made, x, context = module(bias=False), points(2, 5, 8, seed=2), points(2, 7, 8, seed=3)
    assert_close(
        made(x, is_causal=True), loops(made, x, visible=lambda i, j: j <= i), 1e-9, "causal"
    )
    assert_close(made(x, context), loops(made, x, context), 1e-9, "context")
    keep = torch.rand(5, 7, generator=torch.Generator().manual_seed(4)) < 0.5
    keep[:, 0] = True
    expected = loops(made, x, context, lambda i, j: bool(keep[i, j]))
    assert_close(made(x, context, keep), expected, 1e-9, "bool mask")
    added = torch.zeros(5, 7, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    assert_close(made(x, context, added), expected, 1e-9, "additive mask")
    both = loops(made, x, context, lambda i, j: bool(keep[i, j]) and j <= i)
    assert_close(made(x, context, keep, is_causal=True), both, 1e-9, "both")


def test_with_identity_projections_it_is_attention_over_the_points():
    made = ha.HyperbolicAttention(4, 1, 1.7, bias=False).double().eval()
    for projection in (made.query, made.key, made.value, made.out):
        torch.nn.init.eye_(projection.weight)
    x = points(1, 6, 4, c=1.7, seed=5)
    weights = torch.softmax(-poincare.distance(x[0, :, None], x[0, None], 1.7), dim=-1)
    assert_close(made(x)[0], poincare.midpoint(x[0], 1.7, weights), 1e-9, "points")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_reach_every_parameter(dtype):
    made, x = (
        module(learn_curvature=True).to(dtype),
        points(2, 5, 8, seed=6, dtype=dtype).requires_grad_(),
    )
    poincare.distance(made(x), torch.zeros(8, dtype=dtype), 1.0).sum().backward()
    for name, parameter in (("points", x), *made.named_parameters()):
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # a shift of all keys, to first order, changes all distances of a query alike: small, not zero
        assert parameter.grad.abs().max() > 1e-7, name


def test_gradients():
    made, x = module(4, 2, learn_curvature=True), points(1, 3, 4, seed=7).requires_grad_()
    leaves = dict(made.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(made, dict(zip(leaves, values)), (x,))

    assert torch.autograd.gradcheck(run, (x, *leaves.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hostile_points_give_points_of_the_ball(dtype):
    """The origin, coinciding points, the rim and beyond: finite, inside, with finite gradients."""
    x = torch.zeros(1, 6, 8)
    x[0, 1, 0] = 1 - 1e-5
    x[0, 2, 1] = 1.0
    x[0, 3] = x[0, 4] = 0.2
    x[0, 5, 2] = 30.0
    made = module(learn_curvature=True).to(dtype)
    for projection in (made.query, made.key, made.value, made.out):
        torch.nn.init.normal_(projection.weight, std=3.0)
    x = x.to(dtype).requires_grad_()
    out = made(x, is_causal=True)
    assert out.dtype == dtype and out.isfinite().all()
    assert (out.double().norm(dim=-1) < 1).all()
    out.float().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_precisions(dtype, tolerance):
    made, x = module(), points(2, 9, 8, seed=8, reach=0.7)
    expected = made(x)
    assert_close(made.to(dtype)(x.to(dtype)), expected, tolerance, "points")


def test_modules_follow_one_another_and_train():
    """Two of them, in a ball whose curvature is not 1, learn to move points to others nearer the origin."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(ha.HyperbolicAttention(8, 2, 0.5, learn_curvature=True) for _ in range(2))
    )
    x, target = (
        points(4, 6, 8, c=0.5, seed=9).float(),
        points(4, 6, 8, c=0.5, seed=10, reach=0.3).float(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(60):
        loss = poincare.distance(model(x), target, 0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_dropout_acts_in_training_only():
    made, x = module(dropout=0.5), points(1, 9, 8, seed=11)
    assert torch.equal(made(x), made(x))
    made.train()
    assert not torch.equal(made(x), made(x))


def test_state_goes_there_and_back(tmp_path):
    made, x = module(learn_curvature=True), points(1, 5, 8, seed=12)
    again = module(learn_curvature=True, seed=1)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(x), made(x))
    assert set(made.state_dict()) == {
        *(f"{m}.{p}" for m in ("query", "key", "value", "out") for p in ("weight", "bias")),
        "log_temperature",
        "log_curvature",
    }


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"dim": 0}, "dim=0"),
        ({"dim": 8.0}, r"dim=8\.0"),
        ({"heads": 3}, "heads=3 is not allowed with dim=8"),
        ({"heads": 0}, "heads=0"),
        ({"heads": 8}, "heads=8 .* 2 or more a head"),
        ({"curvature": 0.0}, r"curvature=0\.0 is not allowed; allowed: finite numbers above 0"),
        ({"curvature": -1.0}, r"curvature=-1\.0"),
        ({"curvature": float("nan")}, "curvature=nan"),
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"dropout": 1.0}, r"dropout_p=1\.0"),
    ],
)
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ha.HyperbolicAttention(**{"dim": 8, "heads": 2, **settings})


def test_bad_calls_are_refused():
    made = ha.HyperbolicAttention(8, 2)
    for args, said in (
        ((torch.zeros(5, 8),), r"points has shape \(5, 8\)"),
        ((torch.zeros(1, 5, 6),), r"points has shape \(1, 5, 6\)"),
        ((torch.zeros(1, 5, 8, dtype=torch.long),), "dtype torch.int64"),
        ((torch.zeros(1, 5, 8), torch.zeros(1, 5, 4)), r"context has shape \(1, 5, 4\)"),
        ((torch.zeros(1, 5, 8), None, torch.ones(4, 5, dtype=torch.bool)), "attn_mask has shape"),
    ):
        with pytest.raises(ValueError, match=said):
            made(*args)
