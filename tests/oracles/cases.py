"""What the tests run over: engines, valid cone settings, tolerances, and seeded inputs."""

import torch

torch.set_num_threads(1)

BACKENDS = [
    "reference",
    "blockwise",
    "cpu",
]  # append an engine's name, or a pytest.param with its skip mark
FAST = [b for b in BACKENDS if b != "reference"]


def _pairings():
    pairs = {}
    for mapping in ("xi", "psi", "expmap"):
        pairs[f"umbral-{mapping}"] = {"variant": "umbral", "mapping": mapping}
    for mapping in ("psi", "xi", "expmap"):
        for squared in (True, False):
            name = f"penumbral-{mapping}" + ("" if squared else "-unsquared")
            clamp = mapping != "psi"
            setting = {
                "variant": "penumbral",
                "mapping": mapping,
                "squared": squared,
                "clamp_heights": clamp,
            }
            pairs[name] = setting
    return {name: {"squared": True, "clamp_heights": False, **pair} for name, pair in pairs.items()}


PAIRINGS = _pairings()  # every valid pairing, penumbral with both meanings of `squared`
# Both variants, all mappings, for the tests that are too long to run over every pairing.
CORE = ["umbral-xi", "umbral-expmap", "penumbral-psi", "penumbral-xi-unsquared"]

# batch, query heads, key heads, queries, keys: about a million pairs each, which no engine does in one tile; rows
# and keys are no multiple of anything, and in the last one a tile may hold several heads.
MANY_BLOCKS = [(1, 2, 1, 701, 703), (1, 1, 1, 301, 3001), (2, 7, 7, 263, 277)]

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


def tensor(*shape, seed=0, scale=1.0, dtype=torch.float64):
    """Uniform on [-scale, scale], the same numbers for a seed whatever the dtype they are rounded to."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1) * scale).to(
        dtype
    )


def qkv(
    batch=2,
    heads=4,
    kv_heads=None,
    lq=5,
    lk=None,
    d=3,
    dv=None,
    seed=0,
    scale=1.0,
    dtype=torch.float64,
):
    """Query [batch, heads, lq, d], key and value with their own heads, length and (value) width."""
    kv_heads, lk, dv = kv_heads or heads, lk or lq, dv or d
    q = tensor(batch, heads, lq, d, seed=seed, scale=scale, dtype=dtype)
    k = tensor(batch, kv_heads, lk, d, seed=seed + 1, scale=scale, dtype=dtype)
    return q, k, tensor(batch, kv_heads, lk, dv, seed=seed + 2, scale=scale, dtype=dtype)


def per_head(heads, dtype=torch.float64):
    """(gamma, radius), one value per head, all different."""
    gamma = torch.linspace(0.6, 1.7, heads, dtype=torch.float64)
    return gamma.to(dtype), torch.linspace(1.5, 0.8, heads, dtype=torch.float64).to(dtype)


def assert_close(actual, expected, atol, what=""):
    """Largest absolute difference at most `atol`; says where it is and how large."""
    actual, expected = (
        torch.as_tensor(actual).detach().double(),
        torch.as_tensor(expected).detach().double(),
    )
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    )
    bad = (~torch.isfinite(actual)).nonzero()[:3].tolist()
    assert not bad, f"{what}: not finite at {bad}"
    error = (actual - expected).abs()
    if error.numel() and error.max() > atol:
        spot = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        got, want = float(actual[spot]), float(expected[spot])
        off = float(error.max())
        raise AssertionError(
            f"{what}: off by {off:.3g} > {atol:.3g} at {spot}: {got!r}, not {want!r}"
        )


def assert_gradients(actual, expected, rtol, names, stray=0.0):
    """Each gradient within `rtol` of the largest entry of its expectation (at least 1e-3).

    The derivative of a height jumps where two of its arguments are equal, and rounding decides the side for a
    pair that comes close enough: among a million pairs some do. A share `stray` of the entries may therefore be
    off, by up to 25 times as much.
    """
    for name, a, e in zip(names[: len(expected)], actual, expected, strict=True):
        assert a is not None, f"no gradient reached {name}"
        atol = rtol * max(float(e.abs().max()), 1e-3)
        assert_close(a, e, atol * (25 if stray else 1), f"gradient of {name}")
        off = ((a.double() - e).abs() > atol).double().mean().item()
        assert off <= stray, (
            f"gradient of {name}: a share of {off:.2g} is off by more than {atol:.2g}"
        )
