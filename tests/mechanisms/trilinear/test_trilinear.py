"""`trilinear_attention` against loops, its tiles against its definition, its derivatives, its edges."""

import itertools

import pytest
import torch

from hf_hyperattn.engines import Options
from hf_hyperattn.functional import trilinear_attention
from hf_hyperattn.mechanisms.trilinear import tiles as cut
from hf_hyperattn.mechanisms.trilinear.attention import attend
from hf_hyperattn.mechanisms.trilinear.reference import Windows
from tests.oracles import trilinear as by_hand
from tests.oracles.cases import assert_close, tensor
from tests.test_functional_memory import allocations

BACKENDS = ("reference", "blockwise")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def qkvkv(batch=2, heads=4, kv_heads=2, n=5, m=None, d=4, dv=3, seed=0, dtype=torch.float64):
    """Query, key, value, second key, second value."""
    m = m or n
    shapes = [
        (heads, n, d),
        (kv_heads, m, d),
        (kv_heads, m, dv),
        (kv_heads, m, d),
        (kv_heads, m, dv),
    ]
    return [tensor(batch, *s, seed=seed + i, scale=2.0, dtype=dtype) for i, s in enumerate(shapes)]


@pytest.fixture(params=[2**18, 40], ids=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(cut, "ELEMENTS", request.param)


@every_backend
@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
@pytest.mark.parametrize("windows", [None, (2, 3), (None, 2), (3, None), (1, 1), (50, 50)], ids=str)
def test_it_is_what_the_formula_says(backend, causal, windows, tiles):
    inputs = qkvkv(n=6)
    out = trilinear_attention(
        *inputs, is_causal=causal, enable_gqa=True, windows=windows, backend=backend
    )
    expected, _ = by_hand.attention(*inputs, causal=causal, windows=windows or (None, None))
    assert_close(out, torch.from_numpy(expected), 1e-12)


def masks(n, m):
    draw = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 1, n, m, generator=draw) > 0.4
    seen[0, :, 1] = False  # a query that sees nothing
    numbers = torch.randn(2, 4, n, m, generator=draw, dtype=torch.float64)
    return {"bool": seen, "numbers": numbers, "both": numbers.masked_fill(~seen, -torch.inf)}


@every_backend
@pytest.mark.parametrize("kind", ["bool", "numbers", "both"])
@pytest.mark.parametrize("windows", [None, (3, 2)], ids=str)
def test_what_hides_a_key_hides_it_twice(backend, kind, windows, tiles):
    inputs, mask = qkvkv(n=4, m=7), masks(4, 7)[kind]
    out = trilinear_attention(
        *inputs, mask, scale=0.3, enable_gqa=True, windows=windows, backend=backend
    )
    expected, _ = by_hand.attention(*inputs, scale=0.3, mask=mask, windows=windows or (None, None))
    assert_close(out, torch.from_numpy(expected), 1e-12)
    if kind != "numbers":
        assert not out[0, :, 1].any()


@every_backend
@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min / 4])
def test_gradients_of_a_row_that_large_numbers_hide_whole(backend, number, tiles):
    """The row sees nothing, and has no gradient."""
    q, k, v, k2, v2 = (t.requires_grad_() for t in qkvkv(batch=1, n=3, m=7, dtype=torch.float32))
    mask = torch.zeros(3, 7).index_fill(0, torch.tensor([1]), number)
    out = trilinear_attention(q, k, v, k2, v2, mask, enable_gqa=True, backend=backend)[:, :, 1]
    assert not out.any()
    assert not any(
        gradient.any() for gradient in torch.autograd.grad((1e6 * out).sum(), (q, k, v, k2, v2))
    )


EXTRAS = {
    "bias": dict(bias=tensor(1, 4, 5, 8, seed=9)),
    "softcap": dict(softcap=0.7),
    "sinks": dict(sinks=tensor(4, seed=8)),
    "everything": dict(bias=tensor(1, 4, 5, 8, seed=9), softcap=0.7, sinks=tensor(4, seed=8)),
}


@every_backend
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("windows", [(None, None), (4, 2)], ids=str)
def test_bias_softcap_sinks_and_an_offset(backend, extra, windows, tiles):
    """As hosts have them; weights of j sum over k."""
    q, k, v, k2, v2 = qkvkv(n=5, m=8)
    options = Options(is_causal=True, offset=3, mask=torch.arange(8) > 0, **EXTRAS[extra])
    wanted = backend == "reference"
    out, weights = attend(
        q * 0.5, (k, k2), (v, v2), options, Windows(*windows, True), backend=backend, weights=wanted
    )
    how = dict(scale=0.5, causal=True, offset=3, mask=torch.arange(8) > 0, windows=windows)
    expected, marginal = by_hand.attention(q, k, v, k2, v2, **how, **EXTRAS[extra])
    assert_close(out, torch.from_numpy(expected), 1e-12)
    if wanted:
        assert_close(weights, torch.from_numpy(marginal), 1e-12)


@every_backend
@pytest.mark.parametrize("how", ["causal", "padded", "windowed"])
def test_ones_make_it_ordinary_attention(backend, how):
    """Whatever the window of k: its sum is one factor of a whole row."""
    q, k, v, _, _ = qkvkv(n=9)
    mask = torch.arange(9) >= torch.tensor([[3], [0]]) if how == "padded" else None
    mask = (
        None
        if mask is None
        else mask[:, None, None].expand(2, 1, 9, 9) & torch.ones(9, 9, dtype=torch.bool).tril()
    )
    causal, windows = how != "padded", (None, 3) if how == "windowed" else None
    out = trilinear_attention(
        q,
        k,
        v,
        torch.ones_like(k),
        torch.ones_like(v),
        mask,
        is_causal=causal,
        enable_gqa=True,
        windows=windows,
        backend=backend,
    )
    given = mask if causal is False else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, given, is_causal=causal, enable_gqa=True
    )
    assert_close(out, expected.nan_to_num(0.0), 1e-12)


@every_backend
@pytest.mark.parametrize(
    "windows, causal", [(None, False), (None, True), ((3, 2), True), ((2, 3), False)]
)
def test_gradcheck(backend, windows, causal, tiles):
    inputs = [t.requires_grad_() for t in qkvkv(1, 2, 1, n=4, m=5, d=2, dv=2)]

    def run(*inputs):
        return trilinear_attention(
            *inputs, is_causal=causal, enable_gqa=True, windows=windows, backend=backend
        )

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("windows", [(None, None), (3, 2), (5, None)], ids=str)
@pytest.mark.parametrize("back", [False, True])
def test_gradients_of_tiles_are_those_of_the_definition(extra, windows, back, tiles):
    q, k, v, k2, v2 = (t.requires_grad_() for t in qkvkv(n=5, m=8))
    given = {
        n: t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t
        for n, t in EXTRAS[extra].items()
    }
    mask = torch.arange(8) < torch.tensor([8, 5])[:, None, None, None]
    options = Options(is_causal=back, offset=3, mask=mask, **given)
    leaves = [q, k, v, k2, v2, *(t for t in given.values() if isinstance(t, torch.Tensor))]
    found = []
    for backend in BACKENDS:
        out, _ = attend(q, (k, k2), (v, v2), options, Windows(*windows, back), backend=backend)
        found.append(torch.autograd.grad(out, leaves, tensor(*out.shape, seed=5)))
    for one, other in zip(*found):
        assert_close(one, other, 1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_longer_sequences_in_float32(causal):
    """Thousands of tiles' worth of logits against the definition in float64, and their gradients."""
    inputs = [t.float() for t in qkvkv(1, 2, 1, n=150, d=8, dv=8)]
    found = []
    for dtype, backend in ((torch.float32, "blockwise"), (torch.float64, "reference")):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        out = trilinear_attention(
            *leaves, is_causal=causal, enable_gqa=True, windows=(60, 9), backend=backend
        )
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for one, other in zip(*found):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-4)


@every_backend
def test_extreme_logits_stay_finite(backend):
    """Logits of 10^6, and vectors of zeros."""
    inputs = [t.float().requires_grad_() for t in qkvkv(n=7)]
    with torch.no_grad():
        inputs[0].mul_(1e6)
        inputs[1][:, :, 2] = 0
        inputs[3][:, :, 4] = 0
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[3] = False
    out = trilinear_attention(*inputs, mask, enable_gqa=True, windows=(3, 4), backend=backend)
    (out * 1e6).sum().backward()
    assert out.isfinite().all() and not out[:, :, 3].any()
    assert all(t.grad.isfinite().all() for t in inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(dtype):
    inputs = [t.to(dtype) for t in qkvkv(n=20)]
    out = trilinear_attention(
        *inputs, enable_gqa=True, windows=(9, 4), is_causal=True, backend="blockwise"
    )
    how = dict(enable_gqa=True, windows=(9, 4), is_causal=True, backend="blockwise")
    exact = trilinear_attention(*(t.float() for t in inputs), **how)
    assert out.dtype == dtype and torch.equal(out, exact.to(dtype))
    with torch.autocast("cpu", dtype):
        again = trilinear_attention(*(t.float() for t in inputs), **how)
    assert torch.equal(again, exact)


def test_dropout(tiles):
    """The same in forward and backward, of the right rate, and of weights, not of outputs."""
    q, k, v, k2, v2 = (t.requires_grad_() for t in qkvkv(1, 1, 1, n=12))
    given = [q, k, v, k2, v2]
    torch.manual_seed(0)
    out = trilinear_attention(*given, dropout_p=0.4, backend="blockwise")
    torch.manual_seed(0)
    assert torch.equal(out, trilinear_attention(*given, dropout_p=0.4, backend="blockwise"))
    # linear in v for fixed dropout, so that the gradient of v says what was kept
    (grad,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
    assert (grad * v).sum().item() == pytest.approx(out.sum().item(), rel=1e-9)

    def run(q, k, k2, v2):
        torch.manual_seed(0)
        return trilinear_attention(q, k, v.detach(), k2, v2, dropout_p=0.4, backend="blockwise")

    assert torch.autograd.gradcheck(run, (q, k, k2, v2), fast_mode=True)
    ones = [
        t.detach().fill_(1.0) for t in (torch.empty(1, 1, 60, 2), *[torch.empty(1, 1, 30, 2)] * 4)
    ]
    for backend in BACKENDS:
        mean = trilinear_attention(*ones, dropout_p=0.25, backend=backend).mean().item()
        assert mean == pytest.approx(1.0, abs=0.01)  # 54,000 weights


def test_one_graph_for_all_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(trilinear_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (9, 12):
        inputs = [t.float().requires_grad_() for t in qkvkv(n=n)]
        found = [
            f(*inputs, is_causal=True, enable_gqa=True, windows=(4, 3))
            for f in (compiled, trilinear_attention)
        ]
        grads = [torch.autograd.grad(out.sum(), inputs) for out in found]
        for one, other in zip((found[0], *grads[0]), (found[1], *grads[1])):
            assert_close(one, other, 1e-5)


def test_tiles_are_deterministic():
    inputs = [t.float().requires_grad_() for t in qkvkv(n=40)]

    def run():
        out = trilinear_attention(*inputs, enable_gqa=True, windows=(9, 5), backend="blockwise")
        return (out, *torch.autograd.grad(out.square().sum(), inputs))

    assert all(map(torch.equal, run(), run()))


def test_memory_is_that_of_tiles():
    """3,000 tokens, whose logits would be 27 billion numbers, and those within the windows 0.8 million."""
    inputs = [t.float().requires_grad_() for t in qkvkv(1, 1, 1, n=3000, d=4, dv=4)]

    def run():
        trilinear_attention(*inputs, windows=(64, 4), is_causal=True).sum().backward()

    _, largest, peak = allocations(run)
    assert largest <= 4.4 * cut.ELEMENTS and peak <= 10 * 4 * cut.ELEMENTS


REFUSED = [
    (
        dict(windows=(0, 4)),
        r"windows=\(0, 4\) is not allowed; allowed: \(w1, w2\), each an integer from 1 to 1,000,.* or None",
    ),
    (dict(windows=(4, -1)), r"windows=\(4, -1\) is not allowed"),
    (dict(windows=(4,)), "windows"),
    (dict(windows=(2.0, 3)), "windows"),
    (dict(windows=(True, 3)), "windows"),
    (dict(windows=7), "windows=7"),
    (dict(dropout_p=1.0), r"dropout_p=1.0 is not allowed"),
    (dict(backend="sdpa"), "backend='sdpa' is unknown; allowed: 'auto', 'reference', 'blockwise'"),
    (dict(enable_gqa=False), "enable_gqa=True"),
    (dict(attn_mask=torch.ones(3, 3)), "attn_mask has shape"),
]


@pytest.mark.parametrize("how, said", REFUSED, ids=[str(h)[:40] for h, _ in REFUSED])
def test_refusals(how, said):
    with pytest.raises(ValueError, match=said) as caught:
        trilinear_attention(*qkvkv(), **{"enable_gqa": True} | how)
    assert "\n" not in str(caught.value)


def test_refused_shapes():
    q, k, v, k2, v2 = qkvkv()
    for name, given in itertools.product(("key2", "value2"), (1,)):
        bad = [
            q,
            k,
            v,
            k2[:, :, given:] if name == "key2" else k2,
            v2[:, :, given:] if name == "value2" else v2,
        ]
        with pytest.raises(ValueError, match=f"{name} has shape .*; allowed: that of {name[:-1]}"):
            trilinear_attention(*bad, enable_gqa=True)
    mask = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="gives no gradient to attn_mask; use backend='reference'"):
        trilinear_attention(q, k, v, k2, v2, mask, enable_gqa=True, backend="blockwise")
    trilinear_attention(q, k, v, k2, v2, mask, enable_gqa=True).sum().backward()
    assert mask.grad.any()
