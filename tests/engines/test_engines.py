"""The engine contract on a plain dot product: every engine equals torch's SDPA and a float64 softmax by rows."""

import pytest
import torch
import torch.nn.functional as F

from hf_hyperattn.engines import (
    ENGINES,
    Options,
    attention,
    available_engines,
    dot_score,
    register_engine,
)
from tests.oracles import softmax
from tests.oracles.cases import (
    BACKENDS,
    DTYPES,
    TOLERANCE,
    assert_close,
    assert_gradients,
    qkv,
    tensor,
)
from tests.oracles.marks import every_backend

LENGTHS = [(6, 6), (5, 9), (9, 5), (560, 900)]
lengths = pytest.mark.parametrize("lq, lk", LENGTHS)


def run(q, k, v, backend, scale=None, **options):
    return attention(dot_score(q, k, scale), v, Options(**options), backend=backend)[0]


def logits_of(q, k, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * scale


def expected(q, k, v, scale=None, **options):
    return softmax.attention(logits_of(q, k, scale).detach(), v.detach(), **options)[0]


@every_backend
@lengths
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_dot_product_equals_sdpa(backend, lq, lk, causal, dtype):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=lq, lk=lk, d=8, dtype=DTYPES[dtype])
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    atol = 1e-12 if dtype == "float64" else 1e-5
    assert_close(run(q, k, v, backend, is_causal=causal), plain, atol, "output")


@every_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_features_are_read_in_float32(backend, dtype):
    q, k, v = qkv(heads=2, lq=33, d=16, dtype=DTYPES[dtype])
    out = run(q, k, v, backend)
    plain = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert_close(out, plain, TOLERANCE[DTYPES[dtype]], "output")


@every_backend
@lengths
@pytest.mark.parametrize("scale", [None, 0.25, 1.0])
def test_scale(backend, lq, lk, scale):
    q, k, v = qkv(batch=1, heads=2, lq=lq, lk=lk)
    assert_close(
        run(q, k, v, backend, scale),
        F.scaled_dot_product_attention(q, k, v, scale=scale),
        1e-12,
        "output",
    )


@every_backend
@lengths
@pytest.mark.parametrize("softcap", [0.3, 5.0])
def test_softcap(backend, lq, lk, softcap):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=lq, lk=lk, scale=3.0)
    got = run(q, k, v, backend, softcap=softcap, is_causal=True)
    assert_close(got, expected(q, k, v, softcap=softcap, causal=True), 1e-9, "output")


@every_backend
@lengths
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sinks(backend, lq, lk, causal):
    q, k, v = qkv(batch=2, heads=3, lq=lq, lk=lk)
    sinks = torch.tensor([-2.0, 0.5, 40.0], dtype=torch.float64)
    got = run(q, k, v, backend, sinks=sinks, is_causal=causal)
    assert_close(got, expected(q, k, v, sinks=sinks, causal=causal), 1e-9, "output")


@every_backend
def test_a_row_that_sees_only_its_sink_gives_zero(backend):
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, lq=4))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = run(q, k, v, backend, sinks=torch.zeros(2, dtype=torch.float64), mask=mask)
    assert not out[:, :, 2].any()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@every_backend
@lengths
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [1, 3, 200])
def test_sliding_window(backend, lq, lk, causal, window):
    q, k, v = qkv(batch=1, heads=2, lq=lq, lk=lk)
    got = run(q, k, v, backend, window=window, is_causal=causal)
    assert_close(got, expected(q, k, v, window=window, causal=causal), 1e-9, "output")


@every_backend
@pytest.mark.parametrize("lq, lk, offset", [(1, 9, 8), (3, 9, 6), (3, 9, 2), (560, 900, 340)])
@pytest.mark.parametrize("window", [None, 4])
def test_offset_of_the_queries(backend, lq, lk, offset, window):
    """Queries of a later step stand further along the keys than their own index says."""
    q, k, v = qkv(batch=1, heads=2, lq=lq, lk=lk)
    got = run(q, k, v, backend, offset=offset, is_causal=True, window=window)
    assert_close(got, expected(q, k, v, offset=offset, causal=True, window=window), 1e-9, "output")


@every_backend
@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 1, 1, 7), (5, 7), (1, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_everything_together(backend, shape, kind):
    """Cap, then bias, then what is hidden, then sinks."""
    q, k, v = qkv(batch=2, heads=3, lq=5, lk=7, scale=2.0)
    bias, keep = tensor(*shape, seed=70, scale=2.0), tensor(2, 3, 5, 7, seed=71) < 0.6
    mask = (
        keep
        if kind == "bool"
        else torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, -torch.inf)
    )
    asked = {"mask": mask, "bias": bias, "softcap": 1.5, "window": 4, "offset": 1}
    sinks = tensor(3, seed=72)
    got = run(q, k, v, backend, is_causal=True, sinks=sinks, **asked)
    assert_close(got, expected(q, k, v, causal=True, sinks=sinks, **asked), 1e-9, "output")


@every_backend
@pytest.mark.parametrize(
    "shape", [(1, 2, 3, 4), (2, 1, 3, 4), (3, 4), (1, 1, 1, 4), (1, 2, 3, 1)], ids=str
)
def test_gradcheck_of_features_bias_and_sinks(backend, shape):
    q, k, v = qkv(batch=2, heads=2, kv_heads=1, lq=3, lk=4, d=3)
    inputs = [
        t.clone().requires_grad_() for t in (q, k, v, tensor(*shape, seed=73), tensor(2, seed=74))
    ]

    def call(q, k, v, bias, sinks):
        return run(q, k, v, backend, bias=bias, sinks=sinks, softcap=2.0, is_causal=True, window=3)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@every_backend
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_equal_sdpa_over_many_blocks(backend, causal):
    """The bias and a per-head mask get theirs too, summed where they were broadcast."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=350, lk=490, d=8)
    inputs = [
        t.clone().requires_grad_()
        for t in (q, k, v, tensor(1, 4, 350, 490, seed=75), tensor(2, 1, 1, 490))
    ]
    got = run(*inputs[:3], backend, bias=inputs[3], mask=inputs[4], is_causal=causal)
    total = inputs[3] + inputs[4]
    if causal:
        total = total.masked_fill(~torch.ones(350, 490, dtype=torch.bool).tril(), -torch.inf)
    plain = F.scaled_dot_product_attention(*inputs[:3], attn_mask=total, enable_gqa=True)
    weight = tensor(*plain.shape, seed=76)
    grads = [torch.autograd.grad((out * weight).sum(), inputs) for out in (got, plain)]
    assert_gradients(*grads, 1e-9, ("query", "key", "value", "bias", "mask"))


# Weights.


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
def test_returned_weights_are_the_softmax(backend, sinks):
    q, k, v = qkv(batch=2, heads=2, kv_heads=1, lq=5, lk=7)
    keep = tensor(2, 1, 5, 7, seed=77) < 0.5
    keep[0, 0, 3] = False
    options = Options(mask=keep, sinks=sinks, softcap=3.0)
    out, weights = attention(dot_score(q, k), v, options, backend=backend, weights=True)
    same, rows = softmax.attention(logits_of(q, k), v, mask=keep, sinks=sinks, softcap=3.0)
    assert_close(out, same, 1e-9, "output")
    assert_close(weights, rows, 1e-9, "weights")
    total = weights.sum(-1)
    assert not total[0, :, 3].any(), "a row that sees nothing has no weights"
    seen = keep.any(-1).expand(2, 2, 5)
    assert (
        (total[seen] < 1).all()
        if sinks is not None
        else torch.allclose(total[seen], torch.ones(()).double())
    )


def test_weights_are_returned_only_on_request():
    q, k, v = qkv(lq=4)
    assert attention(dot_score(q, k), v, backend="reference")[1] is None
    assert attention(dot_score(q, k), v)[1] is None


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_an_engine_without_weights_says_so(backend):
    q, k, v = qkv(lq=4)
    with pytest.raises(ValueError, match="weights"):
        attention(dot_score(q, k), v, backend=backend, weights=True)


# The list of engines, and what is refused.


def test_every_engine_under_test_is_registered():
    assert {str(b) for b in BACKENDS} <= set(ENGINES) and available_engines()[0] == "auto"


def test_unknown_and_repeated_engines_are_refused():
    q, k, v = qkv(lq=4)
    with pytest.raises(ValueError, match="'warp'.*reference"):
        attention(dot_score(q, k), v, backend="warp")
    with pytest.raises(ValueError, match="reference"):
        register_engine("reference", lambda *a: None)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"sinks": torch.zeros(3)}, ["sinks", "(3,)", "4"]),
        ({"bias": torch.zeros(4, 5)}, ["bias", "(4, 5)"]),
        ({"mask": torch.ones(5, 5, dtype=torch.int32)}, ["mask", "int32"]),
        ({"bias": torch.zeros(4, 4, dtype=torch.int64)}, ["bias", "int64"]),
    ],
    ids=["sinks", "bias shape", "mask dtype", "bias dtype"],
)
def test_misshapen_options_are_refused(options, words):
    q, k, v = qkv(lq=4)
    with pytest.raises(ValueError) as caught:
        attention(dot_score(q, k), v, Options(**options))
    assert "\n" not in str(caught.value)
    assert all(w in str(caught.value) for w in words), str(caught.value)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_dot_score_dropout_is_seeded(backend):
    q, k, v = qkv(lq=9)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(run(q, k, v, backend, dropout_p=0.5))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
