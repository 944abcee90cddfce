"""What only a GPU can show of the Triton kernels: real tile sizes, every one of them, tuning, offsets beyond 2^31,
streams and graphs. The small cases of test_triton.py run there too: `pytest -m gpu` is all of it, `-n 8` is quicker.
"""

import pytest
import torch

pytest.importorskip(
    "triton", reason="needs Triton"
)  # before the tests that it borrows from are imported

from hf_hyperattn.engines import Options, attention, dispatch, dot_score  # noqa: E402
from hf_hyperattn.functional import cone_attention, hyperbolic_attention  # noqa: E402
from tests.engines.test_triton import check, inputs, untuned  # noqa: E402
from tests.engines.triton_scores import SCALE, SCORES, learned  # noqa: E402
from tests.oracles.cases import assert_close, assert_gradients, tensor  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
__all__ = ["untuned"]  # a fixture

LONG = {"n": 300, "m": 555}  # several tiles of every size, of which the last is not full


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", SCORES)
def test_several_tiles(name, d, causal):
    """Products of half precision, numbers of unit size."""
    q, k, v = inputs("cuda", heads=4, kv_heads=2, d=d, dtype=torch.bfloat16, scale=1.0, **LONG)
    check(SCORES[name], q, k, v, Options(is_causal=causal, offset=255 if causal else 0))


@pytest.mark.parametrize("d", [16, 96, 256])
@pytest.mark.parametrize("name", ["umbral", "umbral_blend", "geodesic", "hype_sinh"])
def test_several_tiles_in_float32(name, d):
    """Three TF32 products keep the digits of float32. HyPE's logits are thousands here, of which a GPU's exp2, on the
    way to sinh, leaves a digit less.
    """
    q, k, v = inputs("cuda", d=d, scale=0.7, **LONG)
    check(
        SCORES[name],
        q,
        k,
        v,
        Options(is_causal=True, offset=255),
        tolerance=9.0 if "hype" in name else 3.0,
    )


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["dot", "umbral", "penumbral_blend", "geodesic_blend"])
def test_every_tile_size(monkeypatch, name, d):
    """All configs of a kernel that fit on the chip give the same up to rounding."""
    from triton.runtime.errors import OutOfResources

    from hf_hyperattn.engines.triton import launch

    q, k, v = inputs("cuda", d=d, dtype=torch.float16, scale=1.0, **LONG)
    found, t = [], learned(2, device="cuda")
    for number in range(3):
        pick = lambda kind, tried, run, n=number: run(tried[min(n, len(tried) - 1)])
        monkeypatch.setattr(launch, "run_tuned", pick)
        try:
            out, _ = attention(
                SCORES[name](q, k, t), v, Options(is_causal=True, offset=255), backend="triton"
            )
            found.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
        except OutOfResources:
            assert torch.cuda.get_device_capability() not in [(8, 0), (9, 0)]
    for other in found[1:]:
        assert_close(other[0], found[0][0], 2e-3, "output")
        assert_gradients(other[1:], found[0][1:], 1e-2, ["query", "key", "value"])


def test_tuning_keeps_the_result(monkeypatch):
    from hf_hyperattn.engines.triton import configs

    q, k, v = inputs("cuda", dtype=torch.bfloat16, d=64, scale=1.0, **LONG)
    run = lambda: cone_attention(q, k, v, is_causal=True, backend="triton")
    before, known = run(), dict(configs._chosen)
    monkeypatch.setenv("HF_HYPERATTN_TRITON_TUNE", "1")
    assert_close(run(), before, 1e-2, "output")
    assert len(configs._chosen) > len(known)


def test_auto_takes_it():
    q, k, v = inputs("cuda", dtype=torch.bfloat16, d=64, **LONG)
    score = SCORES["umbral"](q, k, learned(2, device="cuda"))
    assert dispatch.choose_engine(score, v, Options(), weights=False) == "triton"
    for attend in (cone_attention, hyperbolic_attention):
        out = attend(q, k, v)
        assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()


def test_a_dot_product_is_that_of_sdpa():
    q, k, v = inputs("cuda", heads=4, d=64, dtype=torch.bfloat16, n=555, m=555)
    out, _ = attention(dot_score(q, k), v, Options(is_causal=True), backend="triton")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(out, expected, 2e-2, "output")


def test_more_elements_than_32_bits_count():
    """A window keeps it quick; the last head lies beyond 2^31 numbers, in inputs, outputs and gradients."""
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of GPU memory")
    n, heads, part = 2**19 + 77, 65, 600
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(
            1, heads, n, 64, device="cuda", dtype=torch.bfloat16, generator=generator
        ).requires_grad_()
        for _ in range(3)
    )
    assert q.numel() > 2**31
    options = Options(is_causal=True, window=64)
    score = SCORES["umbral"](q, k, learned(heads, device="cuda"))
    out, _ = attention(score, v, options, backend="triton")
    grads = torch.autograd.grad(out[:, -1, -part:].square().sum(), [q, k, v])
    tail = [t.detach()[:, -1:, -part - 64 :].float().requires_grad_() for t in (q, k, v)]
    last = {key: x.detach()[-1:] for key, x in learned(heads, device="cuda").items()}
    expected, _ = attention(
        SCORES["umbral"](*tail[:2], last), tail[2], options, backend="blockwise"
    )
    wanted = torch.autograd.grad(expected[:, :, -part:].square().sum(), tail)
    assert_close(out[:, -1:, -part:], expected[:, :, -part:], 2e-2, "output")
    for name, g, w in zip(("query", "key", "value"), grads, wanted, strict=True):
        assert_close(g[:, -1:, -part - 64 :], w, 4e-2 * float(w.abs().max()), f"gradient of {name}")
        assert not g[:, 0, -part:].any()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_under_inductor(mode):
    """Compiled as users do it; the second mode replays CUDA graphs, in which nothing may be tuned."""
    t = learned(2, device="cuda")
    run = lambda q, k, v: attention(
        SCORES["umbral_blend"](q, k, t), v, Options(is_causal=True), backend="triton"
    )[0]
    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for _ in range(3):
        q, k, v = inputs("cuda", d=64, dtype=torch.bfloat16, n=300, m=300)
        ours, plain = compiled(q, k, v).clone(), run(q, k, v)
        assert_close(ours, plain, 1e-3, "output")
        grads, wanted = (
            torch.autograd.grad(out.square().sum(), [q, k, v]) for out in (ours, plain)
        )
        assert_gradients(grads, wanted, 2e-2, ["query", "key", "value"])


def test_another_stream():
    q, k, v = inputs("cuda", d=64, **LONG)
    expected = cone_attention(q, k, v, backend="triton")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        out = cone_attention(q, k, v, backend="triton")
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    q, k, v = inputs("cuda:0", d=64, **LONG)
    expected = cone_attention(q, k, v, backend="triton")
    out = cone_attention(*(t.to("cuda:1") for t in (q, k, v)), backend="triton")
    assert out.device.index == 1 and torch.equal(out.cpu(), expected.cpu())


def test_decoding_reads_a_long_cache():
    q, k, v = inputs(
        "cuda", batch=2, heads=8, kv_heads=2, n=1, m=9001, d=64, dtype=torch.bfloat16, scale=1.0
    )
    t = learned(8, device="cuda")
    out, _ = attention(SCORES["umbral"](q, k, t), v, backend="triton")
    double = [x.detach().double() for x in (q, k, v)]
    exact = {name: x.detach().double() for name, x in t.items()}
    expected, _ = attention(SCORES["umbral"](*double[:2], exact), double[2], backend="reference")
    assert_close(out, expected, 1e-2, "output")


def test_rows_that_see_nothing():
    q, k, v = inputs("cuda", d=64, **LONG)
    mask = tensor(1, 1, 300, 555, seed=2).to("cuda") > 0
    mask[:, :, 100:240] = False
    out, _ = attention(dot_score(q, k, SCALE), v, Options(mask=mask), backend="triton")
    assert not out[:, :, 100:240].any()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))
