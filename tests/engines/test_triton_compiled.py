"""Every kernel compiles for GPUs that are not here, sm80 (A100) and sm90 (H100), and fits into what they have."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

import hf_hyperattn.mechanisms  # noqa: E402, F401  registers the terms
from hf_hyperattn.engines.triton import configs, launch  # noqa: E402
from tests.engines.triton_ahead import backward, call, compiling, listed  # noqa: E402
from tests.engines.triton_scores import SCORES, learned  # noqa: E402

slow, pytestmark = pytest.mark.slow, pytest.mark.extras
CHIPS = {80: 163 * 1024, 90: 227 * 1024}  # bytes of shared memory that a program may have
SMALL = 99 * 1024  # the same on GPUs for desktops
#: Bytes a thread may keep outside its registers in the config that keeps fewest; sm80, whose products take their
#: factors from registers, keeps more at width 128 (docs/internals/gpu.md).
SPILLED = {80: 256, 90: 256}


def specs():
    q = torch.zeros(1, 2, 2, 4)
    return sorted({score(q, q, learned(2)).score_key for score in SCORES.values()})


def fits(built, d=64, more=0):
    """Check shared memory and spilled bytes, of which `more` are allowed."""
    assert built
    for b in built:
        assert b.shared <= CHIPS[b.capability], b
    for kernel, capability in {(b.kernel, b.capability) for b in built}:
        of = [b for b in built if (b.kernel, b.capability) == (kernel, capability)]
        assert min(b.shared for b in of) <= SMALL, (kernel, capability)
        if d == 64 or capability == 90:
            assert min(b.spilled for b in of) <= SPILLED[capability] + more, [
                (b.kernel, b.config, b.spilled) for b in of
            ]


def test_umbral_in_bfloat16(monkeypatch):
    with compiling(monkeypatch, [90], every=False) as built:
        made = call("umbral")
        launch.forward(made)
        backward(made)
    fits(built)
    assert all("wgmma" in b.ptx for b in built)  # products on tensor cores
    forward, query = (
        next(b.ptx for b in built if b.kernel.endswith(name)) for name in ("forward", "query")
    )
    assert "sqrt.approx" in forward and "ex2.approx" in forward and "rsqrt.approx" in query


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("spec", specs())
def test_every_score(monkeypatch, spec, d):
    with compiling(monkeypatch, CHIPS) as built:
        made = call(spec, d=d)
        launch.forward(made)
        backward(made)
    fits(built, d)


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d, dv", [(24, 40), (64, 67), (80, 80), (96, 96), (128, 128), (256, 256)])
def test_every_width(monkeypatch, d, dv, dtype):
    with compiling(monkeypatch, CHIPS) as built:
        made = call("umbral", d=d, dv=dv, dtype=dtype)
        launch.forward(made)
        backward(made)
    assert all(b.shared <= CHIPS[b.capability] for b in built)


@slow
@pytest.mark.timeout(900)
def test_every_option(monkeypatch):
    mask, bias = torch.ones(1, 1, 1, 2048, dtype=torch.bool), torch.zeros(1, 4, 2048, 2048)
    options = {
        "mask": mask,
        "bias": bias,
        "seed": torch.zeros(1, dtype=torch.int64),
        "dropout_p": 0.1,
    }
    options |= {"window": 256, "softcap": 30.0, "sinks": torch.zeros(4)}
    with compiling(monkeypatch, CHIPS, every=False) as built:
        made = call("dot+*umbral_on_product", **options)
        launch.forward(made)
        backward(made)
    assert all(b.shared <= CHIPS[b.capability] for b in built)


#: Most instructions for each pair of a query and a key, on sm_90 at width 64: forward, backward by
#: queries, backward by keys. A little above what was counted with Triton 3.6.0.
INSTRUCTIONS = {
    "dot": (11, 13, 16),
    "dot+*hype_sinh": (15, 27, 23),
    "umbral": (27, 54, 56),
    "penumbral_squared": (43, 85, 101),
    "squared_lorentz": (36, 62, 68),
    "geodesic": (45, 76, 86),
}


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", INSTRUCTIONS)
def test_instructions_for_each_pair(monkeypatch, spec):
    with compiling(monkeypatch, [90], every=False) as built:
        made = call(spec, kv_heads=4)
        launch.forward(made)
        backward(made)
    counted = [b.per_pair(len(b.main_loop)) for b in built if not b.careful]
    assert all(0 < found <= bar for found, bar in zip(counted, INSTRUCTIONS[spec], strict=True)), (
        counted
    )


@pytest.mark.parametrize("kernel", configs.CONFIGS)
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize(
    "widths", [(16, 16), (64, 16), (128, 16), (256, 16), (64, 64), (128, 128)], ids=str
)
def test_no_tile_that_triton_compiles_wrongly(kernel, item, widths):
    """64 lines by 8 warps beside 16 of anything: see configs.py."""
    found = configs.list_configs(kernel, widths[0], item, widths[1])
    assert found
    for c in found:
        assert (
            c.warps < 8 or 64 not in (c.rows, c.columns) or 16 not in (c.rows, c.columns, *widths)
        )


def test_decoding(monkeypatch):
    with compiling(monkeypatch, [80]) as built:
        launch.forward(call("umbral", queries=1))
    assert [b.kernel for b in built] == ["attention_forward", "combine_parts"] and built[0].config[
        0
    ] == 16
    assert built[0].shared <= SMALL and built[0].spilled == 0


#: The same for listed keys, by the keys of a page, the width, and whether there are summaries: clean
#: tiles, and tiles with keys that some queries of a block have chosen.
LISTED = {
    (16, 64, False): (12, 16),
    (16, 128, False): (14, 18),
    (1, 64, False): (12, 16),
    (1, 128, False): (15, 18),
    # Their bias has to be loaded and added.
    (16, 64, True): (15, 19),
    (16, 128, True): (19, 22),
}


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page, d, has_summaries", LISTED)
def test_instructions_for_each_listed_pair(monkeypatch, page, d, has_summaries):
    with compiling(monkeypatch, [90], every=False) as built:
        listed(page, d, summaries=128 * has_summaries)
    # The gradient of the bias takes registers of the backward kernel for keys.
    fits([b for b in built if b.kernel.startswith("listed")], more=32 * has_summaries)
    forward = next(b for b in built if b.kernel == "listed_forward")
    counted = [forward.per_pair(len(loop)) for loop in forward.loops if len(loop) > 100]
    # The loops of clean, chosen and edge tiles, in this order; the last one has no bar.
    assert len(counted) == 3
    assert all(
        0 < n <= bar for n, bar in zip(counted[:2], LISTED[page, d, has_summaries], strict=True)
    ), counted


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [24, 80, 256])
def test_every_width_of_listed_keys(monkeypatch, d, dtype):
    with compiling(monkeypatch, CHIPS, every=False) as built:
        listed(16, d, dtype=dtype)
    assert all(b.shared <= CHIPS[b.capability] for b in built)


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", ["umbral", "dot+*geodesic_on_product", "dot+*hype_sinh", "listed"])
def test_every_kernel_compiles_for_an_amd_chip(monkeypatch, spec):
    """Nothing in them is NVIDIA's alone. None has run on such a chip, and `auto` does not take them there."""
    with compiling(monkeypatch, ["gfx942"], every=False) as built:
        if spec == "listed":
            listed(16)
        else:
            made = call(spec)
            launch.forward(made)
            backward(made)
    assert built and all(b.shared <= 64 * 1024 and "gfx942" in b.ptx for b in built)
