"""Results do not depend on torch's default dtype and default device, which a user may have set for something else.

Each call is first made under the other default: kernels, trees and tables that are kept were then made under it too.
"""

import contextlib
from functools import partial

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn import functional as F
from hf_hyperattn.mechanisms.sparse import (
    Clusters,
    Exact,
    NestedWindows,
    Pages,
    VerticalSlash,
    Window,
)
from tests.covering import choose_covering

#: One number for each head, which the gradients of some scores go through.
BY_HEAD = torch.tensor([0.5, 1.5], dtype=torch.float32)
MIX = torch.eye(2, dtype=torch.float32) + 0.1
KEY = dict(hierarchy=(4, 16), tying="key", near=4)


def three_way(q, k, v, **rest):
    return F.trilinear_attention(q, k, v, k, v, windows=(5, 7), **rest)


FUNCTIONS = {
    "cone": F.cone_attention,
    "cone psi": partial(F.cone_attention, mapping="psi"),
    "cone expmap": partial(F.cone_attention, mapping="expmap"),
    "cone by head": partial(F.cone_attention, gamma=BY_HEAD),
    "penumbral": partial(F.cone_attention, variant="penumbral"),
    "hyperbolic": F.hyperbolic_attention,
    "hyperbolic by head": partial(F.hyperbolic_attention, curvature=BY_HEAD),
    "lorentz": partial(F.hyperbolic_attention, distance="squared_lorentz", aggregation="mean"),
    "lorentz einstein": partial(F.hyperbolic_attention, distance="squared_lorentz"),
    "hype": partial(F.hype_attention, mu=0.01, tau=1.0),
    "talking_heads": partial(F.talking_heads_attention, before=MIX, after=MIX),
    "mkl": partial(F.mkl_attention, beta=BY_HEAD),
    "trilinear": three_way,
    "hsa key": partial(F.hierarchical_attention, **KEY, refine_top_k=2, is_causal=True),
    "hsa key, block bias": partial(F.hierarchical_attention, **KEY, block_bias=-0.3),
    "hsa both": partial(F.hierarchical_attention, hierarchy=(4, 16)),
    "sparse pages": partial(F.sparse_attention, rules=Pages(4, 1, 4, 2), is_causal=True),
    "sparse window": partial(F.sparse_attention, rules=Window(8, 2), is_causal=True),
    "sparse clusters": partial(F.sparse_attention, rules=Clusters(4, 1, 8, 4, 1), is_causal=True),
}
ENGINES = {"hsa": ("auto",), "talking": ("auto", "blockwise"), "trilinear": ("auto", "blockwise")}
CALLS = [
    (name, backend)
    for name in FUNCTIONS
    for backend in ENGINES.get(
        name.split("_")[0].split()[0], ("auto", "reference", "blockwise", "cpu")
    )
    if not name.startswith("sparse") or backend in ("auto", "reference")
]


SETTINGS = (torch.float64, torch.bfloat16, torch.float16, "meta")
#: Every function meets every engine that it has, and both meet every default.
CASES = choose_covering([(*call, setting) for call in CALLS for setting in SETTINGS], tuple)


@contextlib.contextmanager
def defaults(setting: torch.dtype | str):
    """Another default dtype, or another default device."""
    if isinstance(setting, str):
        with torch.device(setting):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_inputs(queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    return [draw(1, 2, length, 16).to(dtype).requires_grad_() for length in (queries, keys, keys)]


def compute_all(call, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output with and without gradients, and the gradients."""
    out = call(*inputs)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    with torch.no_grad():
        again = call(*inputs)
    return [out.detach(), again, *gradients]


@pytest.mark.parametrize("name, backend, setting", CASES, ids=str)
def test_functions_do_not_depend_on_defaults(name, backend, setting):
    call = FUNCTIONS[name] if name.startswith("hsa") else partial(FUNCTIONS[name], backend=backend)
    lengths = [(90, 90)] if name.startswith(("hsa", "sparse")) else [(90, 90), (2, 600)]
    for queries, keys in lengths:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = make_inputs(queries, keys, dtype)
            with defaults(setting):
                found = compute_all(call, inputs)
            for tensor, expected in zip(found, compute_all(call, inputs), strict=True):
                assert tensor.dtype == expected.dtype and tensor.device == expected.device
                torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [Exact(), Window(), Pages(), Clusters(), VerticalSlash(), NestedWindows()],
    ids=lambda rule: rule.name,
)
def test_the_cost_of_a_rule_does_not_depend_on_the_default_dtype(rule):
    with defaults(torch.bfloat16):
        found = rule.share(3_000)
    assert found == pytest.approx(rule.share(3_000), rel=1e-12)


def test_where_head_fusion_starts_does_not_depend_on_the_default_dtype():
    from tests.integration.models import llama

    expected = ha.patch_model(llama(), ha.HeadFusionConfig()).state_dict()
    model = llama()
    with defaults(torch.float64):
        found = ha.patch_model(model, ha.HeadFusionConfig()).state_dict()
    names = [name for name in expected if ".hyper." in name]
    assert names and all(torch.equal(found[name], expected[name]) for name in names)


def test_a_kernel_is_not_given_another_dtype_than_it_writes():
    from hf_hyperattn.engines.cpu.kernels import address_of

    assert address_of(torch.zeros(2, dtype=torch.float32)) > 0
    for wrong in (
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, 2)[:, 0],
        torch.zeros(2, device="meta"),
    ):
        with pytest.raises(TypeError, match="a kernel was given"):
            address_of(wrong)
