"""Key-tied attention by the Triton kernel for listed keys, against the definition in float64.

Without a GPU it runs in Triton's interpreter; test_triton_modes.py starts a process for it.
"""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="needs Triton")

from hf_hyperattn.hierarchy import Hierarchy  # noqa: E402
from hf_hyperattn.mechanisms.hsa.windowed import listed  # noqa: E402
from tests.engines.test_triton import devices, slow  # noqa: E402
from tests.mechanisms.hsa.hsa_calls import key_tied  # noqa: E402
from tests.mechanisms.hsa.test_hsa_key import brute  # noqa: E402
from tests.mechanisms.hsa.test_hsa_key_engines import settled, some_call, tied  # noqa: E402
from tests.oracles.cases import assert_close, tensor  # noqa: E402

pytestmark = pytest.mark.extras


def on(device, *tensors):
    return [t.to(device) if isinstance(t, torch.Tensor) else t for t in tensors]


def attend(device, q, k, v, sizes, **rule):
    rule = dict(zip(rule, on(device, *rule.values()), strict=True))
    return tied(*on(device, q, k, v), sizes, **rule, backend="triton")[0].cpu()


@devices
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=slow) for seed in range(6, 60))]
)
def test_float32_near_float64(device, seed):
    """Random lengths, paddings and rules of each head; every sixth call has keys that are all alike."""
    q, k, v, sizes, rule = some_call(seed)
    rule["is_causal"] = True
    double = [t.double() for t in (q, k, v)]
    exact, _ = tied(*double, sizes, **rule, backend="torch")
    out = attend(device, q, k, v, sizes, **rule)
    if (out - exact).abs().max() > 5e-6:
        same = settled(*double, sizes, rule, exact)[..., None]
        out, exact = torch.where(same, out, 0), torch.where(same, exact, 0)
    assert_close(out, exact, 5e-6, f"{sizes}, {rule}")


@devices
@pytest.mark.parametrize("top_k", [0, 3])
def test_output_is_the_definition(device, top_k):
    """Keys are small whole numbers and every second one is doubled, so scores are exact and tie."""
    torch.manual_seed(top_k)
    sizes, near, sinks = (4, 8, 16), 5, 3
    q, k = (torch.randint(-2, 3, (1, h, 45, 16)).float() for h in (4, 2))
    k[:, :, 1::2] = k[:, :, :-1:2]
    v = torch.randn(1, 2, 45, 16)
    bias = torch.tensor([0.0, 1.0, -2.0, float("-inf")])
    expected = brute(
        *(t[0].double() for t in (q, k, v)), sizes, 2, 43, True, near, sinks, top_k, bias
    )
    where = {"starts": torch.tensor([2]), "stops": torch.tensor([43]), "is_causal": True}
    rule = {"near": near, "sinks": sinks, "refine_top_k": top_k, "block_bias": bias}
    out = attend(device, q, k, v, sizes, **where, **rule)
    # The definition leaves the padding in front as it finds it.
    assert_close(out[0, :, 2:], expected[:, 2:], 1e-5, "output")
    assert not out[0, :, :2].any()


@devices
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_gradients(device, seed):
    """Those of query, key, value, block bias and sink logits equal plain torch's in float64."""
    rng = random.Random(seed)
    n = 130
    q, k, v = (tensor(2, h, n, 16, seed=seed + h, dtype=torch.float32) for h in (4, 2, 1))
    v = v.expand(2, 2, n, 16)
    numbers = {
        "near": [rng.choice([0, 5, 20]) for _ in range(4)],
        "sinks": [rng.choice([0, 4]) for _ in range(4)],
        "refine_top_k": [0, 0, 2, 1],
    }
    where = {"starts": torch.tensor([0, 7]), "stops": torch.tensor([n - 4, n])}
    grad = tensor(2, 4, n, 16, seed=9)
    found = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        given = q, k, v, torch.tensor([0.0, 1.0, -2.0, 0.5]), torch.tensor([0.5, -1.0, 0.0, 2.0])
        place = "cpu" if backend == "torch" else device
        given = [t.to(place, dtype).requires_grad_() for t in given]
        hierarchy = Hierarchy(n, sizes=(8, 32), **where)
        out, _ = key_tied(
            *given[:3],
            hierarchy,
            is_causal=True,
            **numbers,
            block_bias=given[3],
            sink_logit=given[4],
            backend=backend,
        )
        found.append(torch.autograd.grad(out, given, grad.to(out)))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    q, k, v = (tensor(1, 2, 200, 32, seed=i, dtype=torch.float32).to(dtype) for i in range(3))
    rule = {"near": 20, "sinks": 2, "is_causal": True}
    out = attend(device, q, k, v, (16, 64), **rule)
    exact, _ = tied(*(t.double() for t in (q, k, v)), (16, 64), **rule, backend="torch")
    assert out.dtype == dtype
    assert_close(out.float(), exact, 3e-2, "output")


@devices
def test_heads_and_queries_in_several_parts(device, monkeypatch):
    monkeypatch.setattr(listed, "MOST_NUMBERS", 1000)
    monkeypatch.setattr(listed, "MOST_COPIED", 1)
    q, k, v = (tensor(2, 2, 90, 8, seed=i, dtype=torch.float32) for i in range(3))
    for top_k in (0, 1):
        rule = {"near": 3, "refine_top_k": top_k, "is_causal": True}
        rule["starts"] = torch.tensor([0, 5])
        out = attend(device, q, k, v, (4, 16), **rule)
        exact, _ = tied(*(t.double() for t in (q, k, v)), (4, 16), **rule, backend="torch")
        assert_close(out, exact, 5e-6, "output")


@devices
@pytest.mark.parametrize("top_k", [0, 2])
def test_nan_in_padding_reaches_nothing(device, top_k):
    """Queries behind a text share tiles with queries of the text, and list means of padding."""
    q, k, v = (tensor(2, 2, 40, 8, seed=i, dtype=torch.float32) for i in range(3))
    for t in (q, k, v):
        t[0, :, 23:] = float("nan")
        t[1, :, :6] = float("nan")
    where = {"starts": torch.tensor([0, 6]), "stops": torch.tensor([23, 40])}
    rule = {"near": 2, "refine_top_k": top_k, "is_causal": True} | where
    given = [t.to(device).requires_grad_() for t in (q, k, v)]
    bias = torch.zeros(2, device=device, requires_grad=True)
    out = tied(*given, (4, 8), **rule, block_bias=bias, backend="triton")[0]
    assert not out[0, :, 23:].any() and not out[1, :, :6].any()
    exact, _ = tied(*(t.double() for t in (q, k, v)), (4, 8), **rule, backend="torch")
    assert_close(out.detach().cpu(), exact, 5e-6, "output")
    gradients = torch.autograd.grad(out.square().sum(), [*given, bias])
    assert all(g.isfinite().all() for g in gradients)


@devices
@pytest.mark.parametrize("top_k", [0, 2])
def test_calls_without_queries_or_rows(device, top_k):
    q, k, v = (torch.randn(2, 2, 20, 8) for _ in "qkv")
    rule = {"refine_top_k": top_k, "is_causal": True}
    for batch, queries in ((0, 20), (2, 0)):
        some = q[:batch, :, :queries], k[:batch], v[:batch]
        out = attend(device, *some, (4, 8), **rule, offset=20 - queries)
        assert out.shape == some[0].shape


@devices
def test_the_default_dtype_does_not_matter(device):
    """The logarithm of 5 has no few digits in bfloat16."""
    q, k, v = (tensor(1, 2, 40, 8, seed=i, dtype=torch.float32) for i in range(3))
    expected = attend(device, q, k, v, (5, 10), is_causal=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = attend(device, q, k, v, (5, 10), is_causal=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)


@devices
def test_an_operator_has_the_gradients_of_the_direct_call(device):
    """FLOP counters see only operators."""
    given = [tensor(1, 2, 40, 8, seed=i, dtype=torch.float32).to(device) for i in range(3)]
    given = [t.requires_grad_() for t in given]

    def differentiate():
        out = tied(*given, (4, 8), near=2, is_causal=True, backend="triton")[0]
        return torch.autograd.grad(out.square().sum(), given)

    expected = differentiate()
    with FlopCounterMode(display=False) as counter:
        found = differentiate()
    assert counter.get_total_flops() > 0
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, 1e-5, "gradient")


@devices
def test_a_call_that_the_kernel_does_not_take(device):
    wide = torch.randn(1, 1, 8, 300, device=device)
    with pytest.raises(ValueError, match="heads are wider than 256"):
        tied(wide[..., :8], wide[..., :8], wide, (4,), is_causal=True, backend="triton")
    q = torch.randn(1, 2, 20, 8, device=device)
    with pytest.raises(ValueError, match="it is not causal"):
        tied(q, q, q, (4,), is_causal=False, backend="triton")
    with pytest.raises(ValueError, match="cannot compute a bias"):
        bias = torch.zeros(20, 20, device=device)
        tied(q, q, q, (4,), is_causal=True, bias=bias, backend="triton")
