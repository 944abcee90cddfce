"""`hyperbolic_attention` against the exact definition: values, gradients, masks, precisions, refusals, every engine."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_hyperattn import HyperbolicConfig
from hf_hyperattn.functional import hyperbolic_attention, hyperbolic_scores
from tests.oracles import hyperbolic as oracle
from tests.oracles.cases import (
    BACKENDS,
    DTYPES,
    FAST,
    MANY_BLOCKS,
    TOLERANCE,
    assert_close,
    assert_gradients,
    qkv,
    tensor,
)
from tests.oracles.marks import causal_or_not, every_backend
from tests.test_functional_masks import MASK_SHAPES, random_mask

from .test_hyperbolic import at_radius, per_head

SETTINGS = {
    f"{d}-{a}": {"distance": d, "aggregation": a}
    for d, a in itertools.product(("geodesic", "squared_lorentz"), ("einstein", "mean"))
}
every_fast_engine = pytest.mark.parametrize("backend", FAST)
every_setting = pytest.mark.parametrize("setting", SETTINGS)
NAMES = ("query", "key", "value", "curvature", "temperature")


def attend(q, k, v, setting, backend, **rest):
    return hyperbolic_attention(q, k, v, backend=backend, **SETTINGS[setting], **rest)


def expected(q, k, v, setting, *, mask=None, causal=False, curvature=1.0, temperature=1.0, scale=None):
    """The whole operator from its formulas, 60 digits."""
    chosen = SETTINGS[setting]
    space = {"curvature": curvature, "temperature": temperature, "scale": scale}
    logits = oracle.scores(q, k, distance_name=chosen["distance"], **space)
    rest = {"aggregation": chosen["aggregation"], "curvature": curvature, "scale": scale, "d": q.shape[-1]}
    return oracle.attention(logits, v, mask=mask, causal=causal, **rest)


def dense(q, k, v, setting, **rest):
    chosen = SETTINGS[setting]
    return oracle.dense_attention(
        q, k, v, aggregation=chosen["aggregation"], distance_name=chosen["distance"], **rest
    )


# Values.


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@every_setting
@causal_or_not
def test_output_is_the_definition(backend, setting, causal):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=4, lk=5, d=3, dv=4, scale=2.0)
    c, tau = per_head(4)
    want = expected(q, k, v, setting, causal=causal, curvature=c, temperature=tau)
    got = attend(q, k, v, setting, backend, is_causal=causal, enable_gqa=True, curvature=c, temperature=tau)
    assert_close(got, want, 1e-9, "output")


@every_backend
@every_setting
def test_one_curvature_for_all_heads(backend, setting):
    q, k, v = qkv(batch=1, heads=4, kv_heads=2, lq=4, lk=5, d=3, seed=1)
    want = expected(q, k, v, setting, curvature=0.6, temperature=1.7, scale=0.9)
    got = attend(q, k, v, setting, backend, curvature=0.6, temperature=1.7, scale=0.9, enable_gqa=True)
    assert_close(got, want, 1e-9, "output")


@every_backend
@every_setting
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_in_every_dtype(backend, setting, dtype):
    """The oracle sees the same rounded inputs, so only the engine's own error is left."""
    dtype = DTYPES[dtype]
    q, k, v = qkv(batch=2, heads=2, lq=33, lk=40, d=16, dtype=dtype, seed=5, scale=2.0)
    got = attend(q, k, v, setting, backend)
    assert got.dtype == dtype
    assert_close(got, dense(*(t.double() for t in (q, k, v)), setting), TOLERANCE[dtype], "output")


@every_fast_engine
@every_setting
@causal_or_not
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("batch, heads, kv_heads, lq, lk", MANY_BLOCKS[:2], ids=str)
def test_output_over_many_blocks(backend, setting, causal, dtype, batch, heads, kv_heads, lq, lk):
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=6, dtype=DTYPES[dtype])
    got = attend(q, k, v, setting, backend, is_causal=causal, enable_gqa=True)
    want = dense(*(t.double() for t in (q, k, v)), setting, causal=causal)
    assert_close(got, want, TOLERANCE[DTYPES[dtype]], "output")


@every_setting
def test_scores_and_attention_are_one_operator(setting):
    q, k, v = qkv(seed=11)
    logits = hyperbolic_scores(
        q, k, curvature=0.8, temperature=1.1, scale=0.7, distance=SETTINGS[setting]["distance"]
    )
    got = attend(q, k, v, setting, "reference", curvature=0.8, temperature=1.1, scale=0.7)
    weights = torch.softmax(logits, -1)
    einstein = SETTINGS[setting]["aggregation"] == "einstein"
    assert_close(
        got, oracle.dense_midpoints(weights, v, curvature=0.8, scale=0.7) if einstein else weights @ v, 1e-10
    )


@every_backend
def test_inputs_may_be_views(backend):
    q, k, v = (t.transpose(1, 2) for t in qkv(batch=2, heads=5, lq=3, d=4, seed=12))
    got = hyperbolic_attention(q, k, v, backend=backend)
    assert_close(got, hyperbolic_attention(*(t.contiguous() for t in (q, k, v)), backend=backend), 1e-12)


@every_backend
@pytest.mark.parametrize("c", [1e-10, 1e-16])
def test_without_curvature_it_is_distance_attention_over_the_mean(backend, c):
    q, k, v = qkv(batch=1, heads=2, lq=6, lk=7, d=4, seed=13, dtype=torch.float32)
    flat = torch.softmax(-2 * torch.cdist(q.double(), k.double()) * 0.5 / 0.8, -1) @ v.double()
    assert_close(hyperbolic_attention(q, k, v, curvature=c, temperature=0.8, backend=backend), flat, 1e-5)


# Precision.


@every_backend
@pytest.mark.parametrize("radius", [0.5, 4.0, 6.0, 8.0])
@pytest.mark.parametrize("apart", [1e-4, 1e-2, 1.0, None])
@pytest.mark.parametrize("lk", [24, 600])
def test_float32_out_to_radius_eight(backend, radius, apart, lk):
    """Logits within 1e-3 of the exact ones of the same numbers, read off the weights of single keys against the rest.

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
    assert_close(logits, -exact, 1e-3, "logits")


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
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad((out.float() * pull).sum(), (q, k, v)))


@every_backend
@pytest.mark.parametrize("setting", ["geodesic-einstein", "squared_lorentz-mean"])
def test_the_longest_numbers_of_bfloat16(backend, setting):
    x = (tensor(1, 2, 150, 8, seed=18) * 3e38).bfloat16()
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


# Gradients.


def leaves(*tensors):
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


@every_backend
@every_setting
@causal_or_not
def test_gradcheck(backend, setting, causal):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, d=3, dv=2, seed=40)
    inputs = leaves(q, k, v, *per_head(2), tensor(1, 2, 3, 4, seed=41))

    def run(q, k, v, c, tau, mask):
        rest = {"attn_mask": mask, "is_causal": causal, "enable_gqa": True}
        return attend(q, k, v, setting, backend, curvature=c, temperature=tau, **rest)

    assert torch.autograd.gradcheck(run, inputs)


@every_fast_engine
@every_setting
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-7), ("float32", 2e-3), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_equal_the_oracles(backend, setting, dtype, rtol, kv_heads):
    dtype = DTYPES[dtype]
    q, k, v = qkv(batch=2, heads=4, kv_heads=kv_heads, lq=119, lk=123, d=16, dtype=dtype, seed=42)
    inputs = leaves(q, k, v, *(t.to(dtype) if dtype == torch.float64 else t.float() for t in per_head(4)))
    plain = leaves(*(t.double() for t in inputs))
    pull = tensor(2, 4, 119, 16, seed=43)
    out = attend(*inputs[:3], setting, backend, is_causal=True, enable_gqa=True, curvature=inputs[3],
                 temperature=inputs[4])  # fmt: skip
    want = dense(*plain[:3], setting, causal=True, curvature=plain[3], temperature=plain[4])
    grads = [torch.autograd.grad((o.double() * pull).sum(), t) for o, t in ((out, inputs), (want, plain))]
    assert_gradients(*grads, rtol, NAMES)


@every_backend
def test_checkpointing_changes_nothing(backend):
    inputs = leaves(*qkv(batch=1, heads=2, lq=150, d=4, seed=44, dtype=torch.float32))
    run = lambda q, k, v: hyperbolic_attention(q, k, v, is_causal=True, backend=backend)  # noqa: E731
    plain = torch.autograd.grad(run(*inputs).sum(), inputs)
    again = torch.autograd.grad(checkpoint(run, *inputs, use_reentrant=False).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@every_fast_engine
def test_memory_holds_no_matrix_of_logits(backend):
    """No tensor that autograd keeps grows with the product of the lengths."""
    kept = []
    q, k, v = leaves(*qkv(batch=1, heads=1, lq=700, d=4, dtype=torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        hyperbolic_attention(q, k, v, backend=backend)
    assert kept and max(kept) < 700 * 700 / 10


# Masks, heads, dropout.


@every_backend
@pytest.mark.parametrize("setting", ["geodesic-einstein", "squared_lorentz-mean"])
@pytest.mark.parametrize("kind", ["bool", "additive", "bias"])
@pytest.mark.parametrize("shape", MASK_SHAPES[::2], ids=lambda s: "x".join(map(str, s)))
def test_masks_of_every_form(backend, setting, kind, shape):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=5, lk=7)
    mask = random_mask(shape, kind, seed=30)
    got = attend(q, k, v, setting, backend, attn_mask=mask, is_causal=True, enable_gqa=True)
    assert_close(got, expected(q, k, v, setting, mask=mask, causal=True), 1e-9, "output")


@every_backend
@every_setting
def test_a_query_that_sees_no_key_gives_zeros(backend, setting):
    inputs = leaves(*qkv(batch=1, heads=2, lq=140, dtype=torch.float32))
    mask = torch.ones(140, 140, dtype=torch.bool)
    mask[3] = False
    out = attend(*inputs, setting, backend, attn_mask=mask)
    assert not out[:, :, 3].any() and out[:, :, 4].any()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), inputs))


@every_backend
@every_setting
@pytest.mark.parametrize("per", ["one", "each"])
def test_shared_keys_are_repeated_keys(backend, setting, per):
    q, k, v = qkv(batch=2, heads=6, kv_heads=2, lq=70, d=4, seed=31)
    c = per_head(6)[0] if per == "each" else 0.7
    got = attend(q, k, v, setting, backend, curvature=c, enable_gqa=True)
    far = (t.repeat_interleave(3, dim=1) for t in (k, v))
    assert_close(got, attend(q, *far, setting, backend, curvature=c), 1e-12, "output")


@every_backend
@every_setting
def test_dropout_is_of_the_weights(backend, setting):
    """A mean over draws comes near the output without it; a midpoint is a ratio, and only nearly so."""
    q, k, v = qkv(batch=400, heads=1, lq=1, lk=40, d=4, seed=32)
    q, k, v = (t[:1].expand(400, -1, -1, -1) for t in (q, k, v))
    torch.manual_seed(0)
    out = attend(q, k, v, setting, backend, dropout_p=0.3)
    assert out.std(0).max() > 1e-3
    assert_close(out.mean(0), attend(q[:1], k[:1], v[:1], setting, backend)[0], 2e-2, "mean over draws")


def test_einstein_differs_from_the_mean():
    q, k, v = qkv(scale=3.0)
    one, other = (hyperbolic_attention(q, k, v, aggregation=a) for a in ("einstein", "mean"))
    assert (one - other).abs().max() > 1e-2


# The compiler.


class Attention(torch.nn.Module):
    """Causal hyperbolic attention with per-head parameters, as a model would hold it."""

    def __init__(self, backend, setting):
        super().__init__()
        self.curvature, self.temperature = (torch.nn.Parameter(p) for p in per_head(4, torch.float32))
        self.setting = {"backend": backend, **SETTINGS[setting]}

    def forward(self, q, k, v):
        space = {"curvature": self.curvature, "temperature": self.temperature}
        return hyperbolic_attention(q, k, v, is_causal=True, enable_gqa=True, **space, **self.setting)


def grouped(length):
    return leaves(*qkv(batch=1, heads=4, kv_heads=2, lq=length, d=8, dtype=torch.float32, seed=60))


@every_backend
@pytest.mark.parametrize("setting", ["geodesic-einstein"])
def test_compiles_into_one_graph(backend, setting):
    torch._dynamo.reset()
    model = Attention(backend, setting)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (9, 17):
        inputs, results = grouped(length), []
        for call in (model, compiled):
            out = call(*inputs)
            results.append((out, torch.autograd.grad(out.square().sum(), (*inputs, *model.parameters()))))
        (eager, want), (out, grads) = results
        assert_close(out, eager, 1e-5, "compiled output")
        assert_gradients(grads, want, 1e-4, NAMES)


@every_backend
@pytest.mark.parametrize("setting", ["geodesic-einstein"])
def test_exports_with_a_dynamic_length(backend, setting):
    model = Attention(backend, setting).eval()
    shapes = {name: {2: torch.export.Dim("length", min=2, max=4096)} for name in "qkv"}
    with torch.no_grad():
        program = torch.export.export(model, grouped(12), dynamic_shapes=shapes)
        for other in (12, 2, 300):
            inputs = grouped(other)
            assert_close(program.module()(*inputs), model(*inputs), 1e-5, f"exported output, length {other}")


# Refusals.

Q, K, V = qkv(batch=2, heads=4, lq=5, lk=6, d=3, dtype=torch.float32)
BAD = {
    "curvature zero": ({"curvature": 0.0}, ["curvature", "0.0", "above 0"]),
    "curvature negative": ({"curvature": -1.5}, ["curvature", "-1.5", "above 0"]),
    "curvature NaN": ({"curvature": math.nan}, ["curvature", "nan"]),
    "curvature negative in one head": ({"curvature": torch.tensor([1, 1, 1, -0.5])}, ["curvature", "-0.5"]),
    "curvature for three heads": ({"curvature": torch.ones(3)}, ["curvature", "3", "4"]),
    "temperature zero": ({"temperature": 0}, ["temperature", "0", "above 0"]),
    "temperature negative": ({"temperature": -2.0}, ["temperature", "-2.0"]),
    "temperature infinite": ({"temperature": math.inf}, ["temperature", "inf"]),
    "temperature for five heads": ({"temperature": torch.ones(5)}, ["temperature", "5", "4"]),
    "temperature a word": ({"temperature": "hot"}, ["temperature", "hot"]),
    "scale zero": ({"scale": 0.0}, ["scale", "0.0", "above 0"]),
    "scale negative": ({"scale": -0.5}, ["scale", "-0.5"]),
    "scale NaN": ({"scale": math.nan}, ["scale", "nan"]),
    "unknown distance": ({"distance": "chord"}, ["distance", "chord", "geodesic", "squared_lorentz"]),
    "unknown aggregation": ({"aggregation": "klein"}, ["aggregation", "klein", "einstein", "mean"]),
    "unknown backend": ({"backend": "warp"}, ["backend", "warp", "reference", "auto"]),
    "dropout of one": ({"dropout_p": 1.0}, ["dropout_p", "1.0"]),
    "query of rank 3": ({"query": Q[0]}, ["query", "(4, 5, 3)"]),
    "fewer key heads": ({"key": K[:, :2], "value": V[:, :2]}, ["enable_gqa", "2", "4"]),
    "mask too wide": ({"attn_mask": torch.ones(5, 7, dtype=torch.bool)}, ["attn_mask", "(5, 7)"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_by_name_value_and_range(what):
    changes, fragments = BAD[what]
    with pytest.raises(ValueError) as caught:
        hyperbolic_attention(**{"query": Q, "key": K, "value": V, **changes})
    message = str(caught.value)
    assert "\n" not in message and all(f in message for f in fragments), message
    if not changes.keys() & {"value", "aggregation", "backend", "dropout_p", "attn_mask"}:
        with pytest.raises(ValueError):
            hyperbolic_scores(**{"query": Q, "key": K, **changes})


def test_argument_order_is_that_of_torch():
    q, k, v = qkv(dtype=torch.float32)
    mask = torch.ones(5, 5, dtype=torch.bool)
    F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
    positional = hyperbolic_attention(q, k, v, mask, 0.0, False, 0.5)
    assert_close(positional, hyperbolic_attention(q, k, v, attn_mask=mask, scale=0.5), 0.0, "output")


@pytest.mark.parametrize(
    "value", [1e-50, 1e39, True, torch.tensor([1.0, 1e-50], dtype=torch.float64)], ids=str
)
@pytest.mark.parametrize("name", ["curvature", "temperature"])
def test_parameters_that_float32_does_not_hold_are_refused(name, value):
    """They would be 0 or infinite there, and the output NaN."""
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=rf"^{name}=.* allowed: finite numbers above 0 .*1\.2e-38") as caught:
        hyperbolic_attention(q, q, q, **{name: value})
    assert "\n" not in str(caught.value)
    if not isinstance(value, torch.Tensor):
        with pytest.raises(ValueError, match=rf"^HyperbolicConfig\.{name}=.*; allowed: "):
            HyperbolicConfig(**{name: value})
