"""Derivatives other than by backward: forward mode, torch.func, twice; and gradients of masks and single parameters."""

import re
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import hf_hyperattn as ha
from hf_hyperattn import functional as F
from hf_hyperattn.mechanisms.sparse import Clusters, Pages, VerticalSlash, Window
from tests.oracles.cases import assert_close, tensor
from tests.registries import restored

MIX = torch.eye(2) + 0.1
RULES = {"pages": Pages(4, 1, 4, 2), "window": Window(8, 2), "clusters": Clusters(4, 1, 8, 4, 1)}


def three_way(q, k, v, **rest):
    return F.trilinear_attention(q, k, v, k, v, windows=(5, 7), **rest)


FUNCTIONS = {
    "cone": F.cone_attention,
    "penumbral": partial(F.cone_attention, variant="penumbral"),
    "hyperbolic": F.hyperbolic_attention,
    "lorentz": partial(F.hyperbolic_attention, distance="squared_lorentz", aggregation="mean"),
    "hype": partial(F.hype_attention, mu=0.01, tau=1.0),
    "talking_heads": partial(F.talking_heads_attention, before=MIX, after=MIX),
    "mkl": partial(F.mkl_attention, beta=torch.tensor([0.3, -0.2])),
    "trilinear": three_way,
    "hsa key": partial(
        F.hierarchical_attention,
        hierarchy=(4, 16),
        tying="key",
        near=4,
        refine_top_k=2,
        is_causal=True,
    ),
    "hsa both": partial(F.hierarchical_attention, hierarchy=(4, 16)),
    **{
        f"sparse {n}": partial(F.sparse_attention, rules=rule, is_causal=True)
        for n, rule in RULES.items()
    },
}
#: How second derivatives are refused.
NO_SECOND = r"^(backend='\w+'|hsa .*) has no second derivative, which create_graph=True asked for; (use|allowed:|with) "
#: What has them, by function; all others by backend="reference".
TWICE = {"hsa key": dict(backend="torch")}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def inputs(n, m, dtype=torch.float32):
    """Queries, keys and values of two heads, and how they change."""
    sizes = (n, m, m)
    return tuple(
        tuple(tensor(1, 2, s, 8, seed=at + i, dtype=dtype) for i, s in enumerate(sizes))
        for at in (0, 10)
    )


def difference(call, at, step, size=1e-6):
    """The derivative of a call along a step, in float64."""
    at, step = ([t.double() for t in tensors] for tensors in (at, step))
    ahead, behind = (
        call(*(a + sign * size * s for a, s in zip(at, step, strict=True))) for sign in (1, -1)
    )
    return (ahead - behind) / (2 * size)


def near(got, want, what):
    assert_close(got.double(), want, 1e-2 * float(want.abs().max()), what)


@pytest.mark.parametrize(
    "name, n, m",
    [
        (name, n, m)
        for name in FUNCTIONS
        for n, m in ((90, 90), (2, 600), (3, 6))
        if n == m
        or not name.startswith(("hsa", "sparse clusters"))  # of whole rows; of all queries before
    ],
)
def test_transforms_see_plain_operators(name, n, m):
    """Kernels know no tangents, which they would lose in silence, and no batches of calls."""
    call = partial(FUNCTIONS[name], first=m - n) if name.startswith("sparse") else FUNCTIONS[name]
    at, step = inputs(n, m)
    want = difference(call, at, step)
    out, tangent = jvp(call, at, step)
    near(out, call(*(t.double() for t in at)), "output")
    near(tangent, want, "jvp")
    with forward_ad.dual_level():
        dual = call(*(forward_ad.make_dual(a, s) for a, s in zip(at, step, strict=True)))
        near(forward_ad.unpack_dual(dual).tangent, want, "forward mode")
        only_values = forward_ad.unpack_dual(
            call(*at[:2], forward_ad.make_dual(at[2], step[2]))
        ).tangent
        near(
            only_values,
            difference(lambda v: call(at[0].double(), at[1].double(), v), at[2:], step[2:]),
            "of values",
        )
    pull = tensor(*out.shape, seed=20)
    slope = grad(lambda q: (call(q, *at[1:]) * pull).sum())(at[0])
    leaf = at[0].double().requires_grad_()
    (want,) = torch.autograd.grad((call(leaf, *(t.double() for t in at[1:])) * pull).sum(), leaf)
    near(slope, want, "grad")
    several = torch.stack([at[0], step[0]])
    near(
        vmap(lambda q: call(q, *at[1:]))(several),
        torch.stack([call(q, *at[1:]) for q in several]).double(),
        "vmap",
    )


@pytest.mark.parametrize(
    "name, backend",
    [
        *((name, "cpu") for name in ("cone", "hyperbolic", "hype", "sparse window")),
        *(
            (n, "blockwise")
            for n in ("cone", "hyperbolic", "hype", "talking_heads", "trilinear", "sparse window")
        ),
    ],
)
def test_engines_of_operators_refuse_transforms(name, backend):
    at, step = inputs(90, 90)
    call = partial(FUNCTIONS[name], backend=backend)
    for transformed in (lambda: jvp(call, at, step), lambda: vmap(call)(*(t[None] for t in at))):
        with pytest.raises(
            ValueError,
            match=f"backend='{backend}' cannot compute this call: torch.func's transforms",
        ):
            transformed()


def test_hsa_refuses_transforms_of_what_plain_operators_do_not_know():
    at, step = inputs(20, 20)
    mask = torch.zeros(20, 20)
    call = partial(FUNCTIONS["hsa key"], attn_mask=mask)
    with pytest.raises(ValueError, match="hsa was called inside torch.func's transforms"):
        jvp(call, at, step)


@every_function
@pytest.mark.parametrize("n", [6, 90])
@pytest.mark.parametrize("linear", [True, False], ids=["sum", "squares"])
def test_second_derivatives_are_right_or_refused(name, n, linear):
    """Also where queries, keys and values are made of one tensor, so that some ways to it have a second derivative."""
    x, step = (tensor(1, 2, n, 8, seed=s, dtype=torch.float64) for s in (30, 31))

    def first(x, **rest):
        out = FUNCTIONS[name](x, x.tanh(), x.sin())
        return torch.autograd.grad(out.sum() if linear else out.square().sum(), x, **rest)[0]

    slope = lambda sign: first((x + sign * 1e-6 * step).requires_grad_())
    try:
        leaf = x.clone().requires_grad_()
        (second,) = torch.autograd.grad(
            (first(leaf, create_graph=True) * step).sum(), leaf, allow_unused=True
        )
    except (RuntimeError, NotImplementedError) as error:
        assert re.search(NO_SECOND, str(error)), error
    else:
        near(second, (slope(1) - slope(-1)) / 2e-6, "second derivative")
    leaf = x.clone().requires_grad_()
    out = FUNCTIONS[name](leaf, leaf.tanh(), leaf.sin()).sum()
    try:
        (0 * out + (first(leaf, create_graph=True) * step).sum()).backward()  # a penalty
    except (RuntimeError, NotImplementedError) as error:
        assert re.search(NO_SECOND, str(error)), error
        return
    near(leaf.grad, (slope(1) - slope(-1)) / 2e-6, "gradient of a penalty")


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "hsa both"])
@pytest.mark.parametrize("n", [6, 90])
def test_what_has_second_derivatives(name, n):
    """In float64 they are the differences of first derivatives; some keys equal a query, and their distance is 0."""
    call = partial(FUNCTIONS[name], **TWICE.get(name, dict(backend="reference")))
    inputs = [tensor(1, 2, n, 8, seed=s, dtype=torch.float64) for s in (30, 31, 32)]
    steps = [tensor(1, 2, n, 8, seed=s, dtype=torch.float64) for s in (33, 34, 35)]
    check_second(call, inputs, steps)
    if name.startswith("hsa"):
        return
    out32 = call(*(leaves := [t.float().requires_grad_() for t in inputs]))
    first = torch.autograd.grad(out32.square().sum(), leaves, create_graph=True)
    assert all(
        t.isfinite().all()
        for t in torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
    )


def check_second(call, inputs, steps):
    def first(at, **rest):
        return torch.autograd.grad(call(*at).square().sum(), at, **rest)

    leaves = [t.clone().requires_grad_() for t in inputs]
    along = sum((g * s).sum() for g, s in zip(first(leaves, create_graph=True), steps, strict=True))
    found = torch.autograd.grad(along, leaves)
    ahead, behind = (
        first([(t + sign * 1e-6 * s).requires_grad_() for t, s in zip(inputs, steps, strict=True)])
        for sign in (1, -1)
    )
    for i, second in enumerate(found):
        near(second, (ahead[i] - behind[i]) / 2e-6, f"second derivative {i}")


def test_second_derivatives_where_points_coincide_are_finite():
    for name in ("cone", "penumbral", "hyperbolic", "lorentz"):
        x = tensor(1, 2, 6, 8, seed=30, dtype=torch.float64).requires_grad_()
        out = FUNCTIONS[name](x, x, x, backend="reference")
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        assert torch.autograd.grad(first.square().sum(), x)[0].isfinite().all(), name


def test_second_derivatives_of_a_score_from_outside():
    with restored():

        @ha.score("steep")
        def steep(dot, slope=0.1):
            return slope * dot * dot

        shapes = [tensor(1, 2, 4, 8, seed=s, dtype=torch.float64) for s in range(30, 36)]
        check_second(
            partial(F.scored_attention, score=steep, backend="reference"), shapes[:3], shapes[3:]
        )


@pytest.mark.parametrize("aggregation", ["mean", "einstein"])
@pytest.mark.parametrize("learned", ["curvature", "temperature"])
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_parameters_learn_alone_from_a_few_queries(backend, learned, aggregation):
    """The kernel for a few queries has no gradient: it must know all that learns."""
    (q, k, v), _ = inputs(2, 600)
    found = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        number = torch.tensor([0.8, 1.3], dtype=dtype, requires_grad=True)
        vectors = (t.to(dtype) for t in (q, k, v))
        out = F.hyperbolic_attention(
            *vectors, **{learned: number}, aggregation=aggregation, backend=name
        )
        found += torch.autograd.grad(out.cos().sum(), number)
    near(found[0], found[1], learned)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "hsa both"])
@pytest.mark.parametrize("shape", [(1, 1, 40, 40), (40,), (2, 40, 40)], ids=str)
def test_masks_that_are_added_learn(name, shape):
    """Also from zero, where they hide nothing and look like a mask of padding."""
    (q, k, v), _ = inputs(40, 40)
    found = []
    for dtype in (torch.float32, torch.float64):
        mask = torch.zeros(shape, dtype=dtype, requires_grad=True)
        out = FUNCTIONS[name](*(t.to(dtype) for t in (q, k, v)), attn_mask=mask)
        found += torch.autograd.grad(out.square().sum(), mask)
    near(found[0], found[1], "mask")
    step = tensor(*shape, seed=33, dtype=torch.float64)
    call = lambda mask: (
        FUNCTIONS[name](*(t.double() for t in (q, k, v)), attn_mask=mask).square().sum()
    )
    if name != "hsa key":  # whose choice of blocks jumps, and whose masks are averaged over them
        near(
            (found[1] * step).sum(), difference(call, [torch.zeros(shape)], [step]), "along a step"
        )


def test_hsa_with_tied_queries_refuses_a_mask_that_learns():
    (q, k, v), _ = inputs(20, 20)
    mask = torch.zeros(20, 20, requires_grad=True)
    with pytest.raises(
        ValueError, match="tying='both' was called with a mask that wants a gradient"
    ):
        FUNCTIONS["hsa both"](q, k, v, attn_mask=mask)
    with torch.no_grad():
        assert_close(
            FUNCTIONS["hsa both"](q, k, v, attn_mask=mask),
            FUNCTIONS["hsa both"](q, k, v),
            1e-6,
            "output",
        )


@pytest.mark.parametrize("batch, n, m", [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 0, 0)])
@pytest.mark.parametrize("name", [*FUNCTIONS, "sparse vertical_slash"])
def test_nothing_to_attend_to(name, batch, n, m):
    call = FUNCTIONS.get(name) or partial(F.sparse_attention, rules=VerticalSlash(), is_causal=True)
    q, k, v = (torch.ones(batch, 2, size, 4, requires_grad=True) for size in (n, m, m))
    for mask in (None, torch.ones(batch, 1, n, m, dtype=torch.bool)):
        out = call(q, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert out.shape == (batch, 2, n, 4) and not any(t.any() for t in (out, *gradients))
