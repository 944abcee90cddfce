"""Every fast engine against `reference` in float64 on random calls, outputs and gradients, ties included.

15 calls always; 2,000 with -m slow. A failure names its seed: SWEEP_SEED=123 runs that call alone.
"""

import os

import pytest
import torch

from hf_hyperattn.engines import ENGINES, attention, sdpa
from tests.engines.sweep import Call

FEW, MANY, PART = 15, 2000, 100
#: Of the output; of gradients as a share of the largest. The second pair where points coincide (ties).
TOLERANCE = {
    torch.float64: (
        (1e-9, 1e-7),
        (1e-6, 1e-5),
    ),  # penumbral: no distance is taken for less than 1e-6
    torch.float32: ((2e-4, 2e-3), (5e-3, 2e-2)),
    torch.bfloat16: ((3e-2, 6e-2), (3e-2, 6e-2)),
    torch.float16: ((3e-2, 6e-2), (3e-2, 6e-2)),
}
#: Share of the entries of a gradient that may be further off: at the kink of max(D², u²) rounding takes a side.
STRAY = 2e-3
FLOOR, NOISE = (
    0.02,
    1e-3,
)  # gradients below, and below this share of the root of all terms, are what rounding leaves
ONE = [int(os.environ["SWEEP_SEED"])] if "SWEEP_SEED" in os.environ else None


def computed(
    call: Call, backend: str, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output and the gradients of all inputs."""
    x = call.inputs(dtype)
    score, options = call.pair_score(x), call.option(x)
    if backend == "sdpa" and sdpa.unsupported_reason(score, x["value"], options):
        pytest.skip("not for sdpa")
    out, _ = attention(score, x["value"], options, backend=backend)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).cos()
    found = torch.autograd.grad(
        (out * weight.to(out.dtype)).sum(), list(x.values()), allow_unused=True
    )
    return out.detach().double(), {
        n: None if g is None else g.double() for n, g in zip(x, found, strict=True)
    }


def complaints(seed: int) -> list[str]:
    """What is wrong with the fast engines on one call."""
    call, found = Call(seed), []
    out, grads = computed(call, "reference", torch.float64)
    for backend in engines():
        try:
            got, slopes = computed(call, backend, call.dtype)
        except pytest.skip.Exception:
            continue
        allowed, slope_allowed = TOLERANCE[call.dtype][call.ties]
        found += compare("output", got, out, allowed, 0.0)
        batch, _, _, n, m, _, width = call.shape
        noise = max(FLOOR, NOISE * (batch * n * m * width) ** 0.5)
        for name, g in grads.items():
            if g is not None:
                many = (
                    1 if g.dim() > 1 else 5
                )  # numbers of heads multiply what is left with a whole score
                off = slope_allowed * max(float(g.abs().max()), many * noise)
                row = (
                    g.shape[-1] / g.numel() if g.dim() == 4 and g.numel() else 0.0
                )  # a pair on a kink turns one row
                found += compare(f"gradient of {name}", slopes[name], g, off, max(STRAY, row))
        if found:
            return [f"seed {seed}, {backend}: {call}", *found]
    return []


def engines() -> list[str]:
    """The fast engines; kernels for a GPU only where they are not interpreted."""
    return [e for e in ENGINES if e != "reference" and (e != "triton" or torch.cuda.is_available())]


def compare(
    what: str, got: torch.Tensor, expected: torch.Tensor, allowed: float, stray: float
) -> list[str]:
    """A line if two tensors differ."""
    if got is None or not torch.isfinite(got).all():
        return [f"  {what}: " + ("missing" if got is None else "not finite")]
    error = (got - expected).abs()
    share = (error > allowed).double().mean().item() if error.numel() else 0.0
    if share > stray or (share and error.max() > 25 * allowed):
        return [
            f"  {what}: off by {error.max():.2g}, a share of {share:.2g} by more than {allowed:.2g}"
        ]
    return []


@pytest.mark.parametrize("seed", ONE or range(FEW))
def test_a_few_random_calls(seed):
    wrong = complaints(seed)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, MANY, PART))
def test_many_random_calls(start):
    wrong = [line for seed in range(start, start + PART) for line in complaints(seed)]
    assert not wrong, "\n".join(wrong)


def test_a_call_is_the_same_for_a_seed():
    one, other = Call(3), Call(3)
    assert str(one) == str(other) and all(
        torch.equal(t, other.leaves[n]) for n, t in one.leaves.items()
    )


def test_calls_cover_what_there_is():
    calls = [Call(seed) for seed in range(200)]
    assert {call.score for call in calls} >= {
        "dot",
        "umbral",
        "penumbral",
        "geodesic",
        "squared_lorentz",
    }
    assert {call.blend for call in calls} >= {
        None,
        "umbral",
        "penumbral",
        "geodesic",
        "squared_lorentz",
    }
    asked = {name for call in calls for name in (*call.options, *call.tensors)}
    assert asked == {"is_causal", "window", "offset", "softcap", "mask", "bias", "sinks"}
    assert any(call.ties for call in calls) and any(call.hype for call in calls)
    assert any(call.shape[1] > call.shape[2] for call in calls)
