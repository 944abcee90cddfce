"""`hierarchical_attention`: every argument against brute force, and what it refuses, in one line."""

import math

import pytest
import torch

from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.selection.growing import GrowingTensor
from tests.oracles import hsa
from tests.oracles.cases import DTYPES, TOLERANCE, assert_close, qkv, tensor
from tests.oracles.marks import first_always

SIZES, N = (
    (2, 8),
    16,
)  # all windows complete, so that the causal tree is the same continued to the right
PARENTS = hsa.windows_parents(N, SIZES)
RULE = {"near": 3, "sinks": 1, "refine_top_k": 1, "block_bias": 0.4}
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def inputs(kv_heads=4, n=N, m=N, dtype=torch.float64, seed=0):
    return qkv(
        batch=2,
        heads=4,
        kv_heads=kv_heads,
        lq=n,
        lk=m,
        d=5,
        dv=3,
        seed=seed,
        scale=2.0,
        dtype=dtype,
    )


def brute(q, k, v, causal=False, visible=None, scale=None, rule=RULE, parents=PARENTS):
    """Key tying, head by head: every number of the rule is one for all heads or one a head."""
    scale, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            own = {n: x[h] if isinstance(x, list | tuple) else x for n, x in rule.items()}
            seen = None if visible is None else visible.expand(*q.shape[:2], -1, -1)[b, h].numpy()
            S = (q[b, h] @ k[b, h // group].T * scale).numpy()
            P = hsa.key_attention(S, parents, causal=causal, visible=seen, **own)
            out[b, h] = torch.tensor(P) @ v[b, h // group]
    return out


# tying="key"


@CAUSAL
@pytest.mark.parametrize(
    "rule",
    [
        {},
        RULE,
        {"near": [0, 2, 5, 40], "sinks": (1, 0, 3, 2), "refine_top_k": [0, 1, 2, 0]},
        {"block_bias": -math.inf, "near": 2},
    ],
    ids=["plain", "rule", "per head", "dropped"],
)
def test_key_tying_equals_brute_force(rule, causal):
    q, k, v = inputs(kv_heads=2)
    got = hierarchical_attention(
        q, k, v, is_causal=causal, enable_gqa=True, scale=0.7, hierarchy=SIZES, tying="key", **rule
    )
    assert_close(got, brute(q, k, v, causal, scale=0.7, rule=rule), 1e-10, "output")


def test_a_block_bias_a_head_gets_its_gradient():
    q, k, v = inputs()
    bias = torch.tensor([0.3, -1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    call = lambda b: hierarchical_attention(
        q, k, v, hierarchy=SIZES, tying="key", near=2, block_bias=b
    )
    expected = brute(q, k, v, rule={"near": 2, "block_bias": bias.tolist()})
    assert_close(call(bias), expected, 1e-10, "output")
    assert torch.autograd.gradcheck(call, (bias,))


@CAUSAL
def test_masks_and_causality_intersect(causal):
    q, k, v = inputs()
    mask = torch.rand(2, 4, N, N, generator=torch.Generator().manual_seed(3)) > 0.2
    mask |= torch.eye(N, dtype=torch.bool)
    call = lambda m: hierarchical_attention(
        q, k, v, m, is_causal=causal, hierarchy=SIZES, tying="key", **RULE
    )
    expected = brute(q, k, v, causal, visible=mask)
    assert_close(call(mask), expected, 1e-10, "bool")
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    assert_close(call(additive), expected, 1e-10, "additive")


@CAUSAL
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(side, causal):
    q, k, v = inputs(n=N + 3, m=N + 3)
    real = slice(3, None) if side == "left" else slice(0, N)
    mask = torch.zeros(2, 1, 1, N + 3, dtype=torch.bool)
    mask[..., real] = True
    got = hierarchical_attention(
        q, k, v, mask, is_causal=causal, hierarchy=SIZES, tying="key", **RULE
    )
    assert_close(
        got[:, :, real],
        brute(q[:, :, real], k[:, :, real], v[:, :, real], causal),
        1e-10,
        "real rows",
    )


@pytest.mark.parametrize("keys", [N + 3, N + 6])
@pytest.mark.parametrize("additive", [False, True])
def test_padding_under_a_mask_that_is_causal_as_well(additive, keys):
    """Rows padded by 3 and by 5 tokens at the left, one at both ends: each as if it came alone and unpadded."""
    q, k, v = qkv(batch=3, heads=4, kv_heads=4, lq=N + 3, lk=keys, d=5, dv=3, scale=2.0)
    spans = ((3, N + 3), (5, N + 3), (2, N))
    mask = torch.zeros(3, 1, N + 3, keys, dtype=torch.bool)
    for row, (start, stop) in enumerate(spans):
        mask[row, ..., start:stop] = True
    mask = mask & torch.ones(N + 3, keys, dtype=torch.bool).tril()
    given = (
        torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf) if additive else mask
    )
    got = hierarchical_attention(
        q, k, v, given, is_causal=True, hierarchy=SIZES, tying="key", **RULE
    )
    for row, (start, stop) in enumerate(spans):
        own = [t[row : row + 1, :, start:stop] for t in (q, k, v)]
        alone = hierarchical_attention(*own, is_causal=True, hierarchy=SIZES, tying="key", **RULE)
        assert_close(got[row : row + 1, :, start:stop], alone, 1e-10, f"row {row}")


def test_fewer_queries_than_keys_are_the_first_ones():
    q, k, v = inputs(n=5)
    whole = torch.cat([q, q.new_zeros(2, 4, N - 5, 5)], 2)
    mask = (torch.arange(N) < 12)[None, None, None]
    for given in (None, mask):
        expected = brute(whole, k, v) if given is None else None
        got = hierarchical_attention(q, k, v, given, hierarchy=SIZES, tying="key", **RULE)
        if given is None:
            assert_close(got, expected[:, :, :5], 1e-10, "output")
        same = hierarchical_attention(whole, k, v, given, hierarchy=SIZES, tying="key", **RULE)
        assert_close(got, same[:, :, :5], 1e-10, "as part of all")


@pytest.mark.parametrize("tying", ["both", "key"])
def test_hierarchies_of_every_form(tying):
    q, k, v = inputs()
    tree = Hierarchy.windows(N, SIZES)
    call = lambda h: hierarchical_attention(q, k, v, hierarchy=h, tying=tying)
    expected = call(SIZES)
    for form in (
        list(SIZES),
        tree,
        tree.materialised,
        tree.to_ids(),
        tree.to_ids().repeat(2, 1, 1),
    ):
        assert_close(call(form), expected, 1e-12, type(form).__name__)


# tying="both"


@pytest.mark.parametrize("keep", [True, False])
def test_tying_both_is_the_constrained_optimum(keep):
    q, k, v = inputs(kv_heads=2, seed=4)
    got = hierarchical_attention(
        q, k, v, enable_gqa=True, scale=0.3, hierarchy=SIZES, tying="both", keep_diagonal=keep
    )
    labels = hsa.ties(PARENTS, N)
    for b in range(2):
        for h in range(4):
            P = hsa.optimum((q[b, h] @ k[b, h // 2].T * 0.3).numpy(), labels, keep)
            assert_close(got[b, h], torch.tensor(P) @ v[b, h // 2], 1e-8, f"row {b} head {h}")


def test_padding_with_tying_both():
    q, k, v = inputs(n=N + 2, m=N + 2)
    mask = torch.ones(2, 1, 1, N + 2, dtype=torch.bool)
    mask[0, ..., :2] = False
    got = hierarchical_attention(q, k, v, mask, hierarchy=SIZES)
    alone = hierarchical_attention(*(t[:1, :, 2:] for t in (q, k, v)), hierarchy=SIZES)
    assert_close(got[:1, :, 2:], alone, 1e-10, "padded row")
    assert (got[0, :, :2] == 0).all()


@pytest.mark.parametrize("tying", ["both", "key"])
def test_a_flat_tree_is_softmax_attention(tying):
    q, k, v = inputs(n=11, m=11)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert_close(
        hierarchical_attention(q, k, v, hierarchy=(), tying=tying), expected, 1e-12, "output"
    )


# dtypes, layouts


@pytest.mark.parametrize("tying", ["both", "key"])
@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name, tying):
    dtype = DTYPES[name]
    q, k, v = inputs(dtype=dtype)
    rule = RULE if tying == "key" else {}
    got = hierarchical_attention(q, k, v, hierarchy=SIZES, tying=tying, **rule)
    exact = hierarchical_attention(
        q.double(), k.double(), v.double(), hierarchy=SIZES, tying=tying, **rule
    )
    assert got.dtype == dtype
    assert_close(got, exact, TOLERANCE[dtype], "output")


@pytest.mark.parametrize("backend", ["torch", "rows", "native"])
def test_backends_agree(backend):
    q, k, v = inputs(dtype=torch.float32)
    call = lambda name: hierarchical_attention(
        q, k, v, hierarchy=SIZES, tying="key", backend=name, **RULE
    )
    if backend == "native":
        from hf_hyperattn.mechanisms.hsa.windowed import native

        if not native.can_serve(q):
            pytest.skip("no compiler here")
    assert_close(call(backend), call("auto"), 2e-6, backend)


@pytest.mark.parametrize("tying", ["both", "key"])
def test_gradients(tying):
    q, k, v = (t[:1, :2, :8].clone().requires_grad_() for t in inputs())
    rule = {"near": 2, "sinks": 1, "refine_top_k": 1} if tying == "key" else {}
    call = lambda *t: hierarchical_attention(*t, hierarchy=(2, 4), tying=tying, **rule)
    assert torch.autograd.gradcheck(call, (q, k, v))


def test_dropout_drops_weights_of_pairs():
    """Its mean over many calls is the output without; with p = 0 nothing changes."""
    q, k, v = (t[:1] for t in inputs())
    call = lambda p: hierarchical_attention(q, k, v, hierarchy=SIZES, tying="key", dropout_p=p)
    torch.manual_seed(0)
    mean = torch.stack([call(0.3) for _ in range(400)]).mean(0)
    assert_close(mean, call(0.0), 0.15, "mean")
    assert (call(0.3) - call(0.0)).abs().max() > 0.05


# What is refused.

Q, K, V = inputs(dtype=torch.float32)
KEY = {"tying": "key"}
BAD = {
    "causal and both": ({"is_causal": True}, ["tying='both'", "causal", "tying='key'"]),
    "dropout and both": ({"dropout_p": 0.1}, ["tying='both'", "dropout", "tying='key'"]),
    "a hiding mask and both": (
        {"attn_mask": torch.ones(N, N, dtype=torch.bool).tril()},
        ["tying='both'", "mask", "padding"],
    ),
    "near and both": ({"near": 3}, ["near=3", "tying='both'", "tying='key'"]),
    "sinks and both": ({"sinks": 1}, ["sinks=1", "tying='key'"]),
    "top_k and both": ({"refine_top_k": 1}, ["refine_top_k=1", "tying='key'"]),
    "bias and both": ({"block_bias": 1.0}, ["block_bias=1.0", "tying='key'"]),
    "a bias a head and both": ({"block_bias": torch.ones(4)}, ["block_bias", "tying='key'"]),
    "backend and both": ({"backend": "rows"}, ["backend='rows'", "tying='both'", "auto"]),
    "no diagonal and key": ({**KEY, "keep_diagonal": False}, ["keep_diagonal=False", "True"]),
    "unknown tying": ({"tying": "values"}, ["tying='values'", "both", "key"]),
    "unknown backend": ({**KEY, "backend": "triton"}, ["backend='triton'", "auto"]),
    "unknown backend and both": ({"backend": "triton"}, ["backend='triton'", "auto"]),
    "native and a mask": (
        {**KEY, "backend": "native", "attn_mask": torch.eye(N, dtype=torch.bool)},
        ["backend='native'", "mask"],
    ),
    "negative near": ({**KEY, "near": -1}, ["near=-1", "0"]),
    "fractional sinks": ({**KEY, "sinks": 1.5}, ["sinks=1.5"]),
    "near for three heads": ({**KEY, "near": (1, 2, 3)}, ["near", "3", "4"]),
    "bias for three heads": ({**KEY, "block_bias": torch.ones(3)}, ["block_bias", "(3,)", "4"]),
    "infinite bias": ({**KEY, "block_bias": math.inf}, ["block_bias=inf", "-inf"]),
    "windows that do not divide": ({"hierarchy": (4, 6)}, ["(4, 6)", "dividing"]),
    "a window of one": ({"hierarchy": (1, 4)}, ["1", "at least 2"]),
    "a single number": ({"hierarchy": 4}, ["hierarchy", "int", "window sizes"]),
    "a tree of other tokens": ({"hierarchy": Hierarchy.windows(N + 1, SIZES)}, ["17", "16"]),
    "three rows of trees": (
        {"hierarchy": Hierarchy.windows(N, SIZES).to_ids().repeat(3, 1, 1)},
        ["3 rows", "2"],
    ),
    "a mask that does not fit": (
        {"attn_mask": torch.ones(3, N, dtype=torch.bool)},
        ["attn_mask", "(3, 16)"],
    ),
    "an integer mask": ({"attn_mask": torch.ones(N, N, dtype=torch.long)}, ["attn_mask", "int64"]),
    "dropout of one": ({**KEY, "dropout_p": 1.0}, ["dropout_p", "1.0"]),
    "heads without gqa": ({"key": K[:, :2], "value": V[:, :2]}, ["enable_gqa", "2", "4"]),
    "other queries and both": ({"query": Q[:, :, :5]}, ["tying='both'", "5", "16"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name):
    changed, parts = BAD[name]
    with pytest.raises(ValueError) as caught:
        hierarchical_attention(**{"query": Q, "key": K, "value": V, "hierarchy": SIZES, **changed})
    message = str(caught.value)
    assert "\n" not in message and [p for p in parts if p not in message] == [], message


# The compiler.

PADDED = torch.ones(2, 1, 1, N, dtype=torch.bool)
PADDED[1, ..., :3] = False
CALLS = {
    "both": {},
    "both, padding": {"attn_mask": PADDED},
    "both, ids": {"hierarchy": Hierarchy.windows(N, SIZES).to_ids()},
    "key": {**KEY, "near": 2, "refine_top_k": 1},
    "key, causal": {**KEY, "is_causal": True, "near": (1, 2, 0, 3), "block_bias": torch.ones(4)},
    "key, padding": {**KEY, "is_causal": True, "attn_mask": PADDED},
    "key, ids": {**KEY, "hierarchy": Hierarchy.windows(N, SIZES).to_ids()},
}


@first_always("name", ["key, padding", *(c for c in CALLS if c != "key, padding")])
def test_compiles_into_one_graph(name):
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))
    call = lambda *t: hierarchical_attention(*t, **{"hierarchy": SIZES, **CALLS[name]})
    torch._dynamo.reset()
    got, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v)
    assert_close(got, expected, 1e-6, "output")
    grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, expected))
    for one, other in zip(*grads):
        assert_close(one, other, 1e-5, "gradient")


@pytest.mark.parametrize(
    "tying",
    [{"tying": "both"}, *({"tying": "key", **RULE, "backend": b} for b in ("torch", "rows"))],
)
def test_autocast_rounds_nothing(tying):
    q, k, v = (t.requires_grad_() for t in inputs(dtype=torch.float32))
    call = lambda: hierarchical_attention(q, k, v, enable_gqa=True, hierarchy=SIZES, **tying)
    own = call()
    with torch.autocast("cpu", torch.bfloat16):
        cast = call()
        through = torch.autograd.grad(call().sum(), (q, k, v))  # backward under autocast: no error
    assert torch.equal(own, cast) and all(g.isfinite().all() for g in through)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (own, cast))):
        assert torch.equal(a, b)


# Storage of the cache.


def test_growing_keeps_what_it_should():
    grown, all_of_it = GrowingTensor(tensor(1, 2, 1, 3)), tensor(1, 2, 90, 3)
    for start in range(0, 90, 3):
        grown.append(all_of_it[:, :, start : start + 3])
        grown.evict(max(0, grown.length - 10), 4)
        held, places = grown.view(), grown.find_places()
        assert torch.equal(held, all_of_it[:, :, places])
        assert {*range(min(4, grown.length)), *range(max(0, grown.length - 10), grown.length)} <= {
            *places.tolist()
        }
        assert grown.room.shape[2] <= 40
